"""What has to hold with every vLLM that lmkv supports: `make compat` runs this file with each.

Cold, from host memory, and from files in a new process: the answers must equal those of an engine without
lmkv, and the hits the number that follows from prompt, block size and kind of cache.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from lmkv.connectors.vllm import compat
from tests.engine.harness import EngineError, full_hit, prompt, same, state_hit, window_hit

HOST = {"capacity": "256MiB"}


class Case(NamedTuple):
    """A model, what its prompts find again, and the options that vLLM's CPU build wants for it."""

    model: str
    block: int
    hit: Callable[[int, int], int]
    sizes: tuple[int, int] = (700, 300)
    first: int | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    #: The first CPU build that runs the model, with or without lmkv.
    since: tuple[int, int] = compat.OLDEST


CASES = {
    "full attention": Case("smollm2-135m", 128, full_hit, (600, 300)),
    "sliding window": Case("tiny-gemma3", 32, window_hit, options={"block_size": 32}),
    # It computes linear attention in bfloat16 only, and makes the block as large as a state.
    "linear attention": Case("tiny-qwen3-next", 256, state_hit, options={"dtype": "bfloat16"}),
    "short convolution": Case("tiny-lfm2", 128, state_hit, since=(0, 32)),
    # Its kernel cannot give out a state inside a prefill, which vLLM asks for where one spans more than a
    # block; before 0.32 it had no float32.
    "Mamba 2": Case(
        "tiny-granite-hybrid",
        128,
        state_hit,
        options={"dtype": "bfloat16", "max_num_batched_tokens": 128},
    ),
}


@pytest.mark.parametrize("feature", CASES)
def test_cold_then_host_then_restart(start: Any, reference: Any, tmp_path: Path, feature: str) -> None:
    if release() < CASES[feature].since:
        pytest.skip("vLLM's CPU build has no kernel for this model")
    cold_then_host_then_restart(CASES[feature], start, reference, tmp_path)


def cold_then_host_then_restart(case: Case, start: Any, reference: Any, tmp_path: Path) -> None:
    """The test itself, for any model."""
    model, block, hit, sizes, first, options, _ = case
    prompts = [prompt(seed, tokens, first) for seed, tokens in enumerate(sizes)]
    expected = reference(model, prompts, **options)
    hits = sum(hit(len(ids), block) for ids in prompts)
    lmkv = {"host": HOST, "file": {"path": str(tmp_path / "cache"), "capacity": "512MiB"}}

    with start(model, lmkv, **options) as engine:
        with engine.counting() as cold:
            same([engine.generate([ids])[0] for ids in prompts], expected)
        assert cold["lmkv_hit_tokens:host"] == cold["lmkv_hit_tokens:file"] == 0
        assert cold["lmkv_stored_chunks:host"] == cold["lmkv_stored_chunks:file"] > 0
        engine.reset_prefix_cache()
        with engine.counting() as warm:
            same([engine.generate([ids])[0] for ids in prompts], expected)
        assert warm["lmkv_hit_tokens:host"] == hits
        assert warm["lmkv_hit_tokens:file"] == warm["lmkv_hit_tokens:window"] == 0
        assert warm["lmkv_stored_chunks:host"] == warm["lmkv_stored_chunks:file"] == 0
        said = engine.vllm_metrics()
        assert said["external_prefix_cache_hits"] == hits
        if tells_sources():
            assert said["prompt_tokens_cached_by_source:host"] == hits

    with start(model, lmkv, **options) as engine:
        with engine.counting() as restarted:
            same([engine.generate([ids])[0] for ids in prompts], expected)
        assert restarted["lmkv_hit_tokens:file"] == hits
        assert restarted["lmkv_hit_tokens:host"] == restarted["lmkv_hit_tokens:window"] == 0
        assert restarted["lmkv_stored_chunks:file"] == 0
        if tells_sources():
            assert engine.vllm_metrics()["prompt_tokens_cached_by_source:disk"] == hits


def release() -> tuple[int, ...]:
    """The installed vLLM's, as (0, 32)."""
    return tuple(map(int, compat.vllm_version().split(".")[:2]))


def tells_sources() -> bool:
    """Whether this vLLM counts hits by where they came from."""
    return release() >= (0, 32)


def test_engine_and_scheduler_in_processes_of_their_own(start: Any, reference: Any, tmp_path: Path) -> None:
    """The shape of a server; lmkv's counters reach /metrics."""
    ids = prompt(0, 200)
    expected = reference("tiny-llama", [ids], block_size=32)
    lmkv = {"host": HOST, "file": {"path": str(tmp_path / "cache"), "capacity": "512MiB"}}
    for tier in ("host", "file"):
        with start("tiny-llama", lmkv, processes=True, block_size=32) as engine:
            if tier == "host":
                same(engine.generate([ids]), expected)
                engine.flush()
                engine.reset_prefix_cache()
            with engine.counting() as warm:
                same(engine.generate([ids]), expected)
            assert warm[f"lmkv_hit_tokens:{tier}"] == full_hit(200, 32)


def test_states_without_prefix_caching_are_refused(start: Any) -> None:
    """vLLM keeps only the last state of a request then: there is nothing to store."""
    with pytest.raises(EngineError, match="ConfigError") as refused:
        start("tiny-qwen3-next", {"host": HOST}, dtype="bfloat16", enable_prefix_caching=False)
    assert "--enable-prefix-caching" in str(refused.value)
