"""The same promises under the engine's and lmkv's options, each with an engine of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import full_hit, prompt, same

MODEL = "tiny-llama"
BLOCK = 32
CHUNK_BYTES = BLOCK * 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, values a head, bytes of a float32
HOST = {"capacity": "64MiB"}


def both_tiers(tmp_path: Path, **tables: Any) -> dict[str, Any]:
    return {"host": HOST, "file": {"path": str(tmp_path / "cache"), "capacity": "256MiB"}} | tables


def from_each_tier(engine: Any) -> Iterator[str]:
    """The tiers in turn; each time only that one and those below it still hold what was stored."""
    for tier in ("host", "file"):
        engine.reset_prefix_cache()
        if tier == "file":
            engine.forget_host()
        yield tier


def test_a_slab_smaller_than_one_prompt(start: Any, reference: Any, tmp_path: Path) -> None:
    """40 blocks, 16 slots. In memory the head of the prompt that fits; from files half the slab a request.
    Served again and again it neither thrashes nor hangs."""
    ids = prompt(1, 40 * BLOCK + 5)
    expected = reference(MODEL, [ids], block_size=BLOCK)
    slots = 16
    with start(MODEL, both_tiers(tmp_path), block_size=BLOCK) as engine, engine.counting() as filled:
        same(engine.generate([ids]), expected)
    assert filled["lmkv_stored_chunks:file"] == 40

    small = both_tiers(tmp_path, host={"capacity": slots * CHUNK_BYTES})
    with start(MODEL, small, block_size=BLOCK) as engine:
        with engine.counting() as first:
            same(engine.generate([ids]), expected)
        assert first["lmkv_hit_tokens:file"] == slots // 2 * BLOCK
        assert first["lmkv_loaded_chunks:file"] == slots // 2
        assert first["lmkv_evictions"] == 0
        for _ in range(3):
            engine.reset_prefix_cache()
            with engine.counting() as again:
                same(engine.generate([ids]), expected)
            assert again["lmkv_hit_tokens:host"] == slots * BLOCK
            assert again["lmkv_loaded_chunks:file"] == again["lmkv_evictions"] == 0
        other = prompt(2, 40 * BLOCK + 5)
        with engine.counting() as evicting:
            same(engine.generate([other]), reference(MODEL, [other], block_size=BLOCK))
        assert evicting["lmkv_evictions"] == evicting["lmkv_stored_chunks:host"] == slots
        # At most half the slab waits for the disk.
        assert evicting["lmkv_stored_chunks:file"] == slots // 2
        assert evicting["lmkv_skipped_stores:write_queue_full"] == slots // 2


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
        {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    ],
    ids=["whole", "chunked"],
)
def test_chunked_prefill(start: Any, reference: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    prompts = [prompt(1, 500), prompt(2, 321)]
    expected = reference(MODEL, prompts, block_size=BLOCK, **options)
    with start(MODEL, both_tiers(tmp_path), block_size=BLOCK, **options) as engine:
        same(engine.generate(prompts), expected)
        engine.flush()
        for tier in from_each_tier(engine):
            with engine.counting() as warm:
                same(engine.generate(prompts), expected)
            assert warm[f"lmkv_hit_tokens:{tier}"] == sum(full_hit(len(ids), BLOCK) for ids in prompts)


def test_preemption(start: Any, reference: Any, tmp_path: Path) -> None:
    """Six requests that need 6 x 9 blocks between them, in an engine with 25."""
    options = {"block_size": BLOCK, "num_gpu_blocks_override": 25, "max_model_len": 512}
    prompts = [prompt(seed, 200) for seed in range(6)]
    expected = reference(MODEL, prompts, 80, **options)
    with start(MODEL, both_tiers(tmp_path), **options) as engine:
        same(engine.generate(prompts, 80), expected)
        assert engine.vllm_metrics()["num_preemptions"] > 0
        engine.flush()
        engine.reset_prefix_cache()
        with engine.counting() as again:
            same([engine.generate([ids])[0] for ids in prompts], [cut(answer, 8) for answer in expected])
        assert again["lmkv_hit_tokens:host"] == 6 * full_hit(200, BLOCK)


def cut(answer: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {"tokens": answer["tokens"][:tokens], "logprobs": answer["logprobs"][:tokens]}


def test_ngram_speculation(start: Any, reference: Any, tmp_path: Path) -> None:
    """Rejected drafts leave nothing wrong behind: the second turn reuses what was generated with them."""
    options = {
        "block_size": BLOCK,
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
        },
    }  # fmt: skip
    model = "smollm2-135m"  # a model of random weights repeats nothing, so nothing would be drafted
    repeated = prompt(1, 40)
    ids = repeated * 4 + prompt(3, 30) + repeated[:1] + prompt(3, 5) + repeated[9:10]
    (first,) = reference(model, [ids], 40, **options)
    chat = ids + first["tokens"] + prompt(2, 10)
    (second,) = reference(model, [chat], **options)
    with start(model, both_tiers(tmp_path), **options) as engine:
        same(engine.generate([ids], 40), [first])
        metrics = engine.vllm_metrics()
        assert metrics["spec_decode_num_draft_tokens"] > metrics["spec_decode_num_accepted_tokens"] > 0
        engine.flush()
        for tier in from_each_tier(engine):
            with engine.counting() as warm:
                same(engine.generate([chat]), [second])
            assert warm[f"lmkv_hit_tokens:{tier}"] == full_hit(len(ids) + 40 - 1, BLOCK)


def test_prompt_only(start: Any, reference: Any, tmp_path: Path) -> None:
    ids = prompt(1, 100)
    (first,) = reference(MODEL, [ids], 70, block_size=BLOCK)
    chat = ids + first["tokens"] + prompt(2, 20)
    expected = reference(MODEL, [chat], block_size=BLOCK)
    with start(MODEL, both_tiers(tmp_path, vllm={"prompt_only": True}), block_size=BLOCK) as engine:
        engine.generate([ids], 70)
        engine.flush()
        engine.reset_prefix_cache()
        with engine.counting() as second:
            same(engine.generate([chat]), expected)
        assert second["lmkv_hit_tokens:host"] == full_hit(100, BLOCK)


def test_two_blocks_a_chunk(start: Any, reference: Any, tmp_path: Path) -> None:
    """Hits end with whole chunks; they begin inside one where the engine itself has its first block."""
    lmkv = both_tiers(tmp_path, vllm={"blocks_per_chunk": 2})
    ids = prompt(1, 300)
    expected = reference(MODEL, [ids], block_size=BLOCK)
    whole_chunks = full_hit(300, 2 * BLOCK)

    def ask(engine: Any, in_engine: int, **hits: int) -> None:
        with engine.counting() as warm:
            same(engine.generate([ids]), expected)
        for tier in ("host", "file"):
            assert warm[f"lmkv_hit_tokens:{tier}"] == hits.get(tier, 0), (in_engine, tier)

    with start(MODEL, lmkv, block_size=BLOCK) as engine:
        with engine.counting() as cold:
            same(engine.generate([ids]), expected)
        assert cold["lmkv_stored_chunks:file"] == (300 + 7) // (2 * BLOCK)
        engine.reset_prefix_cache()
        ask(engine, 0, host=whole_chunks)
        for blocks in (1, 2, 3):
            engine.reset_prefix_cache()
            engine.generate([ids[: blocks * BLOCK]], 1)
            ask(engine, blocks, host=whole_chunks - blocks * BLOCK)
    with start(MODEL, lmkv, block_size=BLOCK) as engine:
        ask(engine, 0, file=whole_chunks)
        engine.reset_prefix_cache()
        engine.forget_host()
        engine.generate([ids[:BLOCK]], 1)
        ask(engine, 1, file=whole_chunks - BLOCK)


def test_lora_requests_stay_out(start: Any, reference: Any, tmp_path: Path) -> None:
    """vLLM hashes an adapter by name and path, not by content."""
    options = {"block_size": BLOCK, "enable_lora": True, "max_lora_rank": 8}
    adapter = make_adapter(tmp_path / "adapter")
    ids = prompt(1, 130)
    (expected,) = reference(MODEL, [ids], lora=adapter, **options)
    (base,) = reference(MODEL, [ids], **options)
    assert expected["tokens"] != base["tokens"]
    with start(MODEL, both_tiers(tmp_path), **options) as engine:
        with engine.counting() as counted:
            for _ in range(2):
                same(engine.generate([ids], lora=adapter), [expected])
                engine.flush()
                engine.reset_prefix_cache()
        assert counted["lmkv_stored_chunks:host"] == counted["lmkv_hit_tokens:host"] == 0
        with engine.counting() as counted:
            same(engine.generate([ids]), [base])
            engine.flush()
            engine.reset_prefix_cache()
            same(engine.generate([ids]), [base])
        assert counted["lmkv_hit_tokens:host"] == 128


def make_adapter(path: Path) -> str:
    """A random LoRA adapter for tiny-llama, strong enough to change its answers."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    path.mkdir()
    weights = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 128)
        weights[f"{name}.lora_B.weight"] = torch.randn(128, 8)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)
