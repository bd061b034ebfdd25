"""What holds over an engine's life: resets, kills, damage on disk, hanging tiers, several processes."""

import os
from pathlib import Path
from typing import Any

import pytest

from lmkv.record import HEADER_BYTES, decode_header
from tests.engine.harness import EngineError, full_hit, prompt, same

MODEL = "tiny-llama"
BLOCK = 32
OPTIONS: dict[str, Any] = {"block_size": BLOCK}
IDS = prompt(1, 330)
HIT = full_hit(len(IDS), BLOCK)


def settings(tmp_path: Path, **tables: Any) -> dict[str, Any]:
    return {
        "host": {"capacity": "64MiB"},
        "file": {"path": str(tmp_path / "cache"), "capacity": "256MiB"},
    } | tables


@pytest.fixture
def expected(reference: Any) -> list[dict[str, Any]]:
    return reference(MODEL, [IDS], **OPTIONS)  # type: ignore[no-any-return]


def test_reset_serves_nothing_older(start: Any, expected: Any, tmp_path: Path) -> None:
    with start(MODEL, settings(tmp_path), **OPTIONS) as engine:
        same(engine.generate([IDS]), expected)
        engine.flush()
        assert engine.reset_prefix_cache(connector=True)
        with engine.counting() as after:
            same(engine.generate([IDS]), expected)
        assert after["lmkv_hit_tokens:host"] == after["lmkv_hit_tokens:file"] == 0
        assert after["lmkv_stored_chunks:file"] == HIT // BLOCK
        engine.reset_prefix_cache()
        with engine.counting() as newer:  # what came after the reset is served
            same(engine.generate([IDS]), expected)
        assert newer["lmkv_hit_tokens:host"] == HIT

        # With requests at work: their copies are under way when the cache is reset.
        engine.reset_prefix_cache()
        engine.break_("copies_wait", True)
        other = prompt(2, 330)
        requests = [engine.submit(IDS), engine.submit(other)]  # one is loaded, one is stored
        engine.step(3)
        engine.reset_prefix_cache(connector=True)
        engine.break_("copies_wait", False)
        engine.run()
        same([engine.answer(requests[0])], expected)
        first_answer = engine.answer(requests[1])
        engine.flush()
        engine.reset_prefix_cache(connector=True)
        with engine.counting() as last:
            same(engine.generate([IDS]), expected)
            same(engine.generate([other]), [first_answer])
        assert last["lmkv_hit_tokens:host"] == last["lmkv_hit_tokens:file"] == 0

    with start(MODEL, settings(tmp_path), **OPTIONS) as engine, engine.counting() as another:
        same(engine.generate([IDS]), expected)
    assert another["lmkv_hit_tokens:file"] == HIT  # what others share was left alone


def test_reset_while_chunks_are_read(start: Any, expected: Any, tmp_path: Path) -> None:
    with start(MODEL, settings(tmp_path), **OPTIONS) as engine:
        engine.generate([IDS])
        engine.flush()
        engine.reset_prefix_cache()
        engine.forget_host()
        engine.break_("tier_sleeps", ["get", 0.1])
        with engine.counting() as during:
            request = engine.submit(IDS)
            engine.step(2)
            engine.reset_prefix_cache(connector=True)
            engine.run()
        same([engine.answer(request)], expected)
        assert during["lmkv_hit_tokens:host"] == during["lmkv_hit_tokens:file"] == 0


def test_kill_during_stores(start: Any, reference: Any, tmp_path: Path) -> None:
    """SIGKILL at some point of a stream of writes. What was written is served, and is right."""
    prompts = [prompt(seed, 330) for seed in range(10, 20)]
    for kill_after in (1, 6):
        with start(MODEL, settings(tmp_path), **OPTIONS) as engine:
            for ids in prompts[:kill_after]:
                engine.generate([ids])
            engine.send("generate", prompts[kill_after:])
            engine.kill()
    leftovers = [name for name in os.listdir("/dev/shm") if "lmkv" in name]
    assert leftovers == []
    with start(MODEL, settings(tmp_path), **OPTIONS) as engine, engine.counting() as after:
        for ids in prompts:
            same(engine.generate([ids]), reference(MODEL, [ids], **OPTIONS))
    # How much of the last requests before a kill was written is not known.
    assert after["lmkv_hit_tokens:file"] >= 5 * HIT
    assert after["lmkv_misses:corrupt"] == 0


def test_a_damaged_byte_ends_the_prefix_there(start: Any, expected: Any, tmp_path: Path) -> None:
    with start(MODEL, settings(tmp_path), **OPTIONS) as engine:
        engine.generate([IDS])
    blocks = HIT // BLOCK
    damaged = blocks // 2
    damage(tmp_path / "cache", damaged, blocks)
    with start(MODEL, settings(tmp_path), **OPTIONS) as engine:
        with engine.counting() as first:
            same(engine.generate([IDS]), expected)
        assert first["lmkv_misses:corrupt"] == 1
        assert first["lmkv_hit_tokens:file"] == damaged * BLOCK
        # The chunk was computed and stored anew.
        assert first["lmkv_stored_chunks:file"] == 1
        engine.reset_prefix_cache()
        engine.forget_host()
        with engine.counting() as healed:
            same(engine.generate([IDS]), expected)
        assert healed["lmkv_hit_tokens:file"] == HIT
        assert healed["lmkv_misses:corrupt"] == 0


def damage(directory: Path, which: int, count: int) -> None:
    """Flip one bit in the payload of the `which`-th of `count` records, which lie in the prompt's order."""
    records = []
    for file in sorted(directory.rglob("*")):
        if not file.is_file():
            continue
        data = file.read_bytes()
        for offset in range(0, len(data), 4096):
            if decode_header(data[offset : offset + HEADER_BYTES]) is not None:
                records.append((file, offset))
    assert len(records) == 1 + count  # the first one was tried at the start, and removed
    file, offset = records[1 + which]
    with open(file, "r+b") as stream:
        stream.seek(offset + 4096 + 1000)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def test_a_hanging_tier(start: Any, expected: Any, reference: Any, tmp_path: Path) -> None:
    """Reads do not come back for a minute: no request waits for that, and none asks the tier again."""
    with start(MODEL, settings(tmp_path), **OPTIONS) as engine:
        engine.generate([IDS])
    hanging = OPTIONS | {"faults": {"tier_sleeps": ["get", 60]}}
    with start(MODEL, settings(tmp_path), **hanging) as engine:
        same(engine.generate([IDS]), expected)
        engine.wait_for_trip()
        counters = engine.counters()
        assert counters["lmkv_misses:deadline"] >= 1
        assert "lmkv_hit_tokens:file" not in counters
        # After a pause one more request may probe the tier, and waits no longer than the first.
        for asked in (prompt(2, 330), IDS[:200]):
            engine.reset_prefix_cache()
            same(engine.generate([asked]), reference(MODEL, [asked], **OPTIONS))
        after = engine.counters()
        assert after["lmkv_misses:deadline"] <= counters["lmkv_misses:deadline"] + 1
        assert "lmkv_hit_tokens:file" not in after
        assert not any(name.startswith("lmkv_errors") for name in after)
        engine.kill()  # the hanging thread would hold up a clean exit's flush


@pytest.mark.parametrize(
    ("options", "transfer"),
    [
        ({}, {"kv_connector_module_path": "lmkv.connectors.vllm"}),
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {}),
    ],
    ids=["one-rank", "tensor-parallel", "pipeline-parallel"],
)
def test_processes(
    start: Any, reference: Any, tmp_path: Path, options: dict[str, Any], transfer: dict[str, Any]
) -> None:
    """Scheduler and ranks in processes of their own; of two ranks each has half the heads or half the layers.

    vLLM finds the connector by its one word (entry point), or by the path of its module.
    """
    engine_options = OPTIONS | options | {"processes": True, "cpus": "0|1" if options else "0-1"}
    try:
        expected = reference(MODEL, [IDS], **engine_options)
    except EngineError as error:
        if "self.intermediate_tensors is not None" in str(error):
            pytest.skip(
                "vLLM's CPU runner has no room for what another pipeline stage sends, without lmkv too"
            )
        raise
    with start(MODEL, settings(tmp_path), transfer=transfer, **engine_options) as engine:
        with engine.counting() as cold:
            same(engine.generate([IDS]), expected)
        assert cold["lmkv_stored_chunks:host"] == cold["lmkv_stored_chunks:file"] == (330 + 7) // BLOCK
        engine.reset_prefix_cache()
        with engine.counting() as warm:
            same(engine.generate([IDS]), expected)
        assert warm["lmkv_hit_tokens:host"] == HIT
        assert engine.vllm_metrics()["prompt_tokens_cached_by_source:host"] == HIT
        engine.kill()
    assert [name for name in os.listdir("/dev/shm") if "lmkv" in name] == []
    with start(MODEL, settings(tmp_path), transfer=transfer, **engine_options) as engine:
        with engine.counting() as restarted:
            same(engine.generate([IDS]), expected)
        assert restarted["lmkv_hit_tokens:file"] == HIT
        assert engine.vllm_metrics()["prompt_tokens_cached_by_source:disk"] == HIT
