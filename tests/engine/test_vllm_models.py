"""Each kind of model: cold, from host memory, and from files in a new process.

The answers must equal those of an engine without lmkv, and the hits the number that follows from
prompt, block size and window.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import full_hit, prompt, same, window_hit

HOST = {"capacity": "256MiB"}
BOS = 2  # Gemma answers nonsense without it


@pytest.mark.parametrize(
    ("model", "block", "sizes", "first", "hit"),
    [
        ("smollm2-135m", 128, (600, 300), None, full_hit),
        # Six groups of which five have a window of 512 tokens.
        ("gemma3-270m", 128, (700, 300), BOS, window_hit),
    ],
)
def test_cold_then_host_then_restart(
    start: Any,
    reference: Any,
    tmp_path: Path,
    model: str,
    block: int,
    sizes: tuple[int, int],
    first: int | None,
    hit: Any,
) -> None:
    prompts = [prompt(seed, tokens, first) for seed, tokens in enumerate(sizes)]
    expected = reference(model, prompts)
    hits = sum(hit(len(ids), block) for ids in prompts)
    lmkv = {"host": HOST, "file": {"path": str(tmp_path / "cache"), "capacity": "512MiB"}}

    with start(model, lmkv) as engine:
        with engine.counting() as cold:
            same([engine.generate([ids])[0] for ids in prompts], expected)
        assert cold["lmkv_hit_tokens:host"] == cold["lmkv_hit_tokens:file"] == 0
        assert cold["lmkv_stored_chunks:host"] == cold["lmkv_stored_chunks:file"] > 0
        engine.reset_prefix_cache()
        with engine.counting() as warm:
            same([engine.generate([ids])[0] for ids in prompts], expected)
        assert warm["lmkv_hit_tokens:host"] == hits
        assert warm["lmkv_hit_tokens:file"] == 0
        assert warm["lmkv_stored_chunks:host"] == warm["lmkv_stored_chunks:file"] == 0
        said = engine.vllm_metrics()
        assert said["prompt_tokens_cached_by_source:host"] == hits
        assert said["external_prefix_cache_hits"] == hits

    with start(model, lmkv) as engine:
        with engine.counting() as restarted:
            same([engine.generate([ids])[0] for ids in prompts], expected)
        assert restarted["lmkv_hit_tokens:file"] == hits
        assert restarted["lmkv_hit_tokens:host"] == 0
        assert restarted["lmkv_stored_chunks:file"] == 0
        assert engine.vllm_metrics()["prompt_tokens_cached_by_source:disk"] == hits


def test_latent_attention(start: Any, reference: Any, tmp_path: Path) -> None:
    """Tiny DeepSeek-V2. vLLM's reference MLA for CPUs turns prefix caching off, and its decode differs
    from its prefill by more than rounding, without lmkv too. So equal splits are compared: the answer to a
    prompt, and its continuation when prompt and first token are sent again: all but that token is loaded."""
    ids = prompt(1, 208)
    (whole,) = reference("tiny-deepseek-v2", [ids], 9)
    rest = {name: whole[name][1:] for name in ("tokens", "logprobs")}
    again = ids + whole["tokens"][:1]
    lmkv = {"host": HOST, "file": {"path": str(tmp_path / "cache"), "capacity": "512MiB"}}
    for tier in ("host", "file"):
        with start("tiny-deepseek-v2", lmkv) as engine:
            if tier == "host":
                same(engine.generate([ids], 9), [whole])
                engine.flush()
            with engine.counting() as warm:
                same(engine.generate([again]), [rest])
            assert warm[f"lmkv_hit_tokens:{tier}"] == full_hit(209, 16) == 208
            assert warm["lmkv_stored_chunks:file"] == 0


@pytest.mark.parametrize("after", ["host", "file"])
@pytest.mark.parametrize("tokens", [127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 600])
def test_window_at_every_boundary(windowed: Any, reference: Any, tokens: int, after: str) -> None:
    """A window of 256 tokens, blocks of 32: prompts around multiples of both."""
    ids = prompt(tokens, tokens)
    (expected,) = reference("tiny-gemma3", [ids], block_size=32)
    same(windowed.generate([ids]), [expected])
    windowed.flush()
    windowed.reset_prefix_cache()
    if after == "file":
        windowed.forget_host()
    with windowed.counting() as warm:
        same(windowed.generate([ids]), [expected])
    assert warm[f"lmkv_hit_tokens:{after}"] == window_hit(tokens, 32)
    assert warm["lmkv_hit_tokens:window"] == 0


@pytest.fixture(scope="module")
def windowed(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("windowed") / "cache"
    lmkv = {"host": HOST, "file": {"path": str(path), "capacity": "512MiB"}}
    with start("tiny-gemma3", lmkv, block_size=32) as engine:
        yield engine
