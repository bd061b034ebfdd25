"""What is special about a kind of model. `test_vllm_compat.py` has what holds for all.

The answers must equal those of an engine without lmkv, and the hits the number that follows from
prompt, block size and window.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Engine, full_hit, prompt, same, state_hit, window_hit
from tests.engine.test_vllm_compat import Case, cold_then_host_then_restart

HOST = {"capacity": "256MiB"}
BOS = 2  # Gemma answers nonsense without it
#: vLLM computes linear attention on a CPU in this type only, and makes the block as large as a state.
LINEAR = {"dtype": "bfloat16"}
LINEAR_BLOCK = 256


def test_gemma3(start: Any, reference: Any, tmp_path: Path) -> None:
    """Six groups of which five have a window of 512 tokens, and real weights."""
    case = Case("gemma3-270m", 128, window_hit, first=BOS)
    cold_then_host_then_restart(case, start, reference, tmp_path)


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


@pytest.fixture(scope="module")
def stateful(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("stateful") / "cache"
    lmkv = {"host": HOST, "file": {"path": str(path), "capacity": "512MiB"}}
    with start("tiny-qwen3-next", lmkv, **LINEAR) as engine:
        yield engine


@pytest.mark.parametrize("after", ["host", "file"])
@pytest.mark.parametrize("tokens", [255, 256, 257, 511, 512, 513, 1100])
def test_state_at_every_boundary(stateful: Engine, reference: Any, tokens: int, after: str) -> None:
    ids = prompt(tokens, tokens)
    (expected,) = reference("tiny-qwen3-next", [ids], **LINEAR)
    same(stateful.generate([ids]), [expected])
    stateful.flush()
    stateful.reset_prefix_cache()
    if after == "file":
        stateful.forget_host()
    with stateful.counting() as warm:
        same(stateful.generate([ids]), [expected])
    assert warm[f"lmkv_hit_tokens:{after}"] == state_hit(tokens, LINEAR_BLOCK)
    assert warm["lmkv_hit_tokens:window"] == 0


def test_a_shared_prefix_has_a_state_from_its_second_use(stateful: Engine, reference: Any) -> None:
    """By default vLLM keeps a state at the end of a prompt, and where another one that is still in its own
    cache left it."""
    common = prompt(7, 300)
    prompts = [common + prompt(seed, 400) for seed in (8, 9, 10)]
    expected = reference("tiny-qwen3-next", prompts, **LINEAR)
    for ids, answer, hits in zip(prompts, expected, (0, 0, LINEAR_BLOCK), strict=True):
        if hits:
            stateful.reset_prefix_cache()
        with stateful.counting() as counted:
            same(stateful.generate([ids]), [answer])
        assert counted["lmkv_hit_tokens:host"] == hits


@pytest.mark.parametrize(("interval", "hits"), [(0, 256), (256, 512)])
def test_the_next_turn(start: Any, interval: int, hits: int) -> None:
    """With vLLM's default the next turn finds the state of the prompt, with an interval that of the answer.
    Decoding computes it by another kernel than a prefill, so answers are compared with those over vLLM's own
    prefix cache."""
    ids = prompt(11, 480)
    with start(
        "tiny-qwen3-next", {"host": HOST}, prefix_cache_retention_interval=interval, **LINEAR
    ) as engine:
        (first,) = engine.generate([ids], 60)
        again = ids + first["tokens"] + prompt(12, 20)
        (own,) = engine.generate([again])
        assert own["cached"] == hits
    with start(
        "tiny-qwen3-next", {"host": HOST}, prefix_cache_retention_interval=interval, **LINEAR
    ) as engine:
        assert engine.generate([ids], 60)[0]["tokens"] == first["tokens"]
        engine.flush()
        engine.reset_prefix_cache()
        with engine.counting() as warm:
            answers = engine.generate([again])
        assert warm["lmkv_hit_tokens:host"] == hits
        same(answers, [own])


def test_states_within_a_block(start: Any, reference: Any) -> None:
    """With --prefix-match-unit vLLM keeps the state at the last of these units of a prompt."""
    options = {**LINEAR, "prefix_match_unit": 32}
    prompts = [prompt(seed, tokens) for seed, tokens in enumerate((700, 300, 200))]
    expected = reference("tiny-qwen3-next", prompts, **options)
    with start("tiny-qwen3-next", {"host": HOST}, **options) as engine:
        same([engine.generate([ids])[0] for ids in prompts], expected)
        engine.flush()
        engine.reset_prefix_cache()
        with engine.counting() as warm:
            same([engine.generate([ids])[0] for ids in prompts], expected)
        assert warm["lmkv_hit_tokens:host"] == 672 + 288 + 192
