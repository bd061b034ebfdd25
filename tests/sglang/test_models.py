"""Each kind of model through the storage and through the linker: computed, found again, found by another
process.

Answers (tokens and log-probabilities) must equal those of an engine without lmkv, and hits the number that
follows from prompt and page size.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.sglang import probes
from tests.sglang.harness import PAGE, hicache, linker, prompt

#: Two prompts, the second longer than the first and sharing its head; each ends within a page.
SIZES = (200, 333)
#: SGLang's own number for both: whole pages, of which it computes at least the last token.
HITS = [(size - 1) // PAGE * PAGE for size in SIZES]
TP2 = {"tp_size": 2, "cpus": "0|1"}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("smollm2-135m", {}),
    ("gemma3-270m", {}),
    ("tiny-llama", TP2),
    ("tiny-deepseek-v2-dense", TP2),
    ("tiny-mellum", {}),
]
NAMES = [name + ("-tp2" if options else "") for name, options in MODELS]


def same(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal tokens, and log-probabilities as far as float32 goes."""
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-3)


def ask(engine: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """One after the other, so that what a prompt finds is certain."""
    return [engine.generate([ids])[0] for ids in prompts]


@pytest.mark.parametrize(("model", "options"), MODELS, ids=NAMES)
def test_storage(start: Any, reference: Any, tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    prompts = [prompt(seed, size) for seed, size in enumerate(SIZES)]
    expected = reference(model, prompts, **options)
    ranks = options.get("tp_size", 1)
    flags = hicache(tmp_path / "cache") | options
    with start(model, **flags) as engine:
        cold = ask(engine, prompts)
        same(cold, expected)
        assert [answer["cached"] for answer in cold] == [0, 0]
        engine.wait_written()
        stored = engine.inside(probes.stored_chunks)
        assert len(stored) == ranks and min(stored) > 0
        assert engine.flush_cache()
        found = ask(engine, prompts)
        same(found, expected)
        assert [answer["sources"]["storage"] for answer in found] == HITS
        assert [answer["cached"] for answer in found] == HITS
        engine.wait_written()
        # What was read is not written again. (A rank that only reads may have seen less the first time.)
        assert max(engine.inside(probes.stored_chunks)) == max(stored)
        assert not any(
            "lmkv_errors" in name for counted in engine.inside(probes.counters) for name in counted
        )
    if not model.startswith("tiny"):
        return  # a restart is the same for all: the small ones are quicker
    with start(model, **flags) as engine:
        restarted = ask(engine, prompts)
        same(restarted, expected)
        assert [answer["sources"]["storage"] for answer in restarted] == HITS


@pytest.mark.parametrize(("model", "options"), MODELS, ids=NAMES)
def test_linker(start: Any, reference: Any, tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    prompts = [prompt(seed, size) for seed, size in enumerate(SIZES)]
    expected = reference(model, prompts, **options)
    ranks = options.get("tp_size", 1)
    flags = linker(tmp_path / "cache") | options
    with start(model, **flags) as engine:
        cold = ask(engine, prompts)
        same(cold, expected)
        assert [answer["cached"] for answer in cold] == [0, 0]
        engine.wait_written()
        assert engine.flush_cache()
        found = ask(engine, prompts)
        same(found, expected)
        assert [answer["cached"] for answer in found] == HITS
        for counted in engine.inside(probes.counters):
            assert counted["lmkv_hit_tokens host"] == sum(HITS)
            assert not any("lmkv_errors" in name for name in counted)
        stored = engine.inside(probes.stored_chunks)
        assert len(stored) == ranks and min(stored) > 0
    if not model.startswith("tiny"):
        return
    with start(model, **flags) as engine:
        restarted = ask(engine, prompts)
        same(restarted, expected)
        assert [answer["cached"] for answer in restarted] == HITS
        for counted in engine.inside(probes.counters):
            assert counted["lmkv_hit_tokens file"] == sum(HITS)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
def test_layouts_of_the_host_pool(start: Any, reference: Any, tmp_path: Path, layout: str) -> None:
    ids = prompt(7, SIZES[0])
    expected = reference("tiny-llama", [ids])
    with start("tiny-llama", **hicache(tmp_path / "cache", layout=layout)) as engine:
        same(ask(engine, [ids]), expected)
        engine.wait_written()
        assert engine.flush_cache()
        found = ask(engine, [ids])
        same(found, expected)
        assert found[0]["sources"]["storage"] == HITS[0]
