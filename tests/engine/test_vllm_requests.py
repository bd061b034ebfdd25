"""What becomes of requests, on one tiny engine: exact hits, chats, salts, aborts, and injected faults.

All tests of this file share an engine with blocks of 32 tokens, and no two the same prompts.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.harness import Engine, full_hit, prompt, same

MODEL = "tiny-llama"
BLOCK = 32
CHUNK_BYTES = BLOCK * 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, values a head, bytes of a float32
OPTIONS = {"block_size": BLOCK}
_seeds = itertools.count(1000)


@pytest.fixture(scope="module")
def engine(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("requests") / "cache"
    lmkv = {"host": {"capacity": "64MiB"}, "file": {"path": str(path), "capacity": "256MiB"}}
    with start(MODEL, lmkv, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def answers(reference: Any) -> Any:
    """What the model answers to prompts without lmkv."""
    return lambda *prompts, max_tokens=8: reference(MODEL, list(prompts), max_tokens, **OPTIONS)


@pytest.fixture
def ids() -> Any:
    """Makes prompts that no other test uses."""
    seed = next(_seeds)
    return lambda tokens, other=0: prompt(seed * 10 + other, tokens)


@pytest.fixture
def fault(engine: Engine) -> Iterator[Any]:
    """Puts a fault into the engine and ends it after the test: fault(name, argument, end)."""
    ends = []

    def put_in(name: str, argument: Any, end: Any, end_name: str | None = None) -> None:
        engine.break_(name, argument)
        ends.append((end_name or name, end))

    yield put_in
    for name, end in ends:
        engine.break_(name, end)


def fill(engine: Engine, *prompts: list[int], max_tokens: int = 8, forget_host: bool = False) -> None:
    """Serve prompts, let their blocks be stored and written, and empty the engine's own cache."""
    engine.generate(list(prompts), max_tokens)
    engine.flush()
    engine.reset_prefix_cache()
    if forget_host:
        engine.forget_host()


def leased(engine: Engine) -> float:
    engine.flush()
    return float(engine.counters()["lmkv_leased_bytes"])


# --- hits, exactly


@pytest.mark.parametrize("tokens", [31, 32, 33, 127, 128, 129])
@pytest.mark.parametrize("tier", ["host", "file"])
def test_every_complete_block_is_a_hit(
    engine: Engine, answers: Any, ids: Any, tokens: int, tier: str
) -> None:
    asked = ids(tokens)
    fill(engine, asked, forget_host=tier == "file")
    with engine.counting() as warm:
        same(engine.generate([asked]), answers(asked))
    assert warm[f"lmkv_hit_tokens:{tier}"] == full_hit(tokens, BLOCK)
    assert warm["lmkv_hit_tokens:host"] + warm["lmkv_hit_tokens:file"] == full_hit(tokens, BLOCK)
    assert warm["lmkv_loaded_chunks:host"] == tokens // BLOCK


def test_the_engine_s_own_hits_are_not_loaded_again(engine: Engine, answers: Any, ids: Any) -> None:
    asked = ids(200)
    fill(engine, asked)
    engine.generate([asked[:100]])  # three blocks in the engine's own cache
    with engine.counting() as warm:
        (answer,) = engine.generate([asked])
    same([answer], answers(asked))
    assert answer["cached"] == full_hit(200, BLOCK)
    assert warm["lmkv_hit_tokens:host"] == full_hit(200, BLOCK) - full_hit(100, BLOCK)


def test_the_prefix_on_disk_after_the_one_in_memory(engine: Engine, answers: Any, ids: Any) -> None:
    asked = ids(200)
    fill(engine, asked, forget_host=True)
    fill(engine, asked[:100])  # three blocks in memory
    with engine.counting() as warm:
        same(engine.generate([asked]), answers(asked))
    assert warm["lmkv_hit_tokens:host"] == 96
    assert warm["lmkv_hit_tokens:file"] == full_hit(200, BLOCK) - 96


def test_the_same_prompt_twice_is_stored_once(engine: Engine, ids: Any) -> None:
    asked = ids(130)
    with engine.counting() as both:
        engine.generate([asked, asked])
        engine.reset_prefix_cache()
        engine.generate([asked, asked])
    blocks = (130 + 7) // BLOCK  # the last of 8 generated tokens has no KV
    assert both["lmkv_stored_chunks:host"] == both["lmkv_stored_chunks:file"] == blocks
    assert both["lmkv_stored_bytes:file"] == blocks * CHUNK_BYTES


def test_the_second_turn_of_a_chat_finds_the_first_answer(engine: Engine, answers: Any, ids: Any) -> None:
    question = ids(100)
    (first,) = answers(question, max_tokens=70)
    same(engine.generate([question], 70), [first])
    engine.flush()
    engine.reset_prefix_cache()
    chat = question + first["tokens"] + ids(20, 1)
    with engine.counting() as second:
        same(engine.generate([chat]), answers(chat))
    assert second["lmkv_hit_tokens:host"] == full_hit(100 + 70 - 1, BLOCK) == 160


def test_salts_do_not_share(engine: Engine, answers: Any, ids: Any) -> None:
    asked = ids(130)
    engine.generate([asked], salt="one")
    engine.flush()
    engine.reset_prefix_cache()
    with engine.counting() as others:
        same(engine.generate([asked], salt="two"), answers(asked))
        same(engine.generate([asked]), answers(asked))
    assert others["lmkv_hit_tokens:host"] == others["lmkv_hit_tokens:file"] == 0
    engine.reset_prefix_cache()
    with engine.counting() as own:
        same(engine.generate([asked], salt="one"), answers(asked))
    assert own["lmkv_hit_tokens:host"] == 128


def test_many_requests_at_once(engine: Engine, answers: Any, ids: Any) -> None:
    asked = [ids(100 + 40 * i, i) for i in range(6)]
    fill(engine, *asked, forget_host=True)
    with engine.counting() as warm:
        same(engine.generate(asked), answers(*asked))
    assert warm["lmkv_hit_tokens:file"] == sum(full_hit(len(one), BLOCK) for one in asked)


# --- aborts


def copies_end_and_serve(engine: Engine, answers: Any, asked: list[int]) -> None:
    """Once the copies end nothing is leased any more, and what they stored or held is served."""
    engine.break_("copies_wait", False)
    assert leased(engine) == 0
    engine.reset_prefix_cache()
    with engine.counting() as after:
        same(engine.generate([asked]), answers(asked))
    assert after["lmkv_hit_tokens:host"] == 128


def test_abort_while_chunks_are_read(engine: Engine, answers: Any, ids: Any, fault: Any) -> None:
    asked = ids(130)
    fill(engine, asked, forget_host=True)
    fault("tier_sleeps", ("get", 0.1), ("get", 0))
    with engine.counting() as during:
        request = engine.submit(asked)
        engine.step(2)
        assert engine.counters()["lmkv_leased_bytes"] == 4 * CHUNK_BYTES
        engine.abort([request])
    assert during["lmkv_hit_tokens:file"] == 0
    assert leased(engine) == 0
    with engine.counting() as after:  # what was read meanwhile is in memory now
        same(engine.generate([asked]), answers(asked))
    assert after["lmkv_hit_tokens:host"] == 128


def test_abort_while_blocks_are_filled(engine: Engine, answers: Any, ids: Any, fault: Any) -> None:
    asked = ids(130)
    fill(engine, asked)
    fault("copies_wait", True, False)
    request = engine.submit(asked)
    engine.step(2)
    assert engine.counters()["lmkv_leased_bytes"] == 4 * CHUNK_BYTES
    engine.abort([request])
    engine.step(2)
    assert engine.counters()["lmkv_leased_bytes"] == 4 * CHUNK_BYTES  # the copy still runs
    copies_end_and_serve(engine, answers, asked)


def test_abort_while_blocks_are_stored(engine: Engine, answers: Any, ids: Any, fault: Any) -> None:
    asked = ids(130)
    fault("copies_wait", True, False)
    request = engine.submit(asked, 50)
    engine.step(3)
    engine.abort([request])
    engine.step(1)
    copies_end_and_serve(engine, answers, asked)


# --- faults


def test_a_slow_tier_costs_at_most_the_deadline(engine: Engine, answers: Any, ids: Any, fault: Any) -> None:
    """Reads take longer than a request may wait: it is computed, and asks no second time."""
    asked = ids(130)
    fill(engine, asked, forget_host=True)
    fault("tier_sleeps", ("get", 1.0), ("get", 0))
    with engine.counting() as slow:
        same(engine.generate([asked]), answers(asked))
    assert slow["lmkv_hit_tokens:file"] == slow["lmkv_hit_tokens:host"] == 0
    assert slow["lmkv_misses:deadline"] >= 1
    assert leased(engine) == 0


@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
def test_a_disk_that_takes_no_writes(engine: Engine, answers: Any, ids: Any, fault: Any, code: str) -> None:
    asked = ids(130)
    fault("system_call_fails", ("pwritev", code), ("pwritev", None))
    with engine.counting() as full:
        same(engine.generate([asked]), answers(asked))
    assert full["lmkv_stored_chunks:host"] == 4
    assert full["lmkv_stored_chunks:file"] == 0
    assert sum(n for name, n in full.items() if name.startswith("lmkv_skipped_stores")) == 4
    engine.reset_prefix_cache()
    with engine.counting() as warm:  # memory serves all the same
        same(engine.generate([asked]), answers(asked))
    assert warm["lmkv_hit_tokens:host"] == 128
    heal(engine)


def test_a_disk_that_cannot_be_read(engine: Engine, answers: Any, ids: Any, fault: Any) -> None:
    asked = ids(130)
    fill(engine, asked, forget_host=True)
    fault("system_call_fails", ("preadv", "EIO"), ("preadv", None))
    with engine.counting() as broken:
        same(engine.generate([asked]), answers(asked))
    assert broken["lmkv_hit_tokens:file"] == broken["lmkv_hit_tokens:host"] == 0
    assert broken["lmkv_misses:unavailable"] == 4
    heal(engine)


def heal(engine: Engine) -> None:
    """Wait for the breakers to close after the longest pause that a few failures in a row give."""
    engine.close_breakers()


@pytest.mark.parametrize(
    "method", ["open_window", "lookup", "new_request", "finish_request", "prepare_store", "end_step"]
)
def test_an_error_inside_lmkv_is_a_counted_miss(engine: Engine, answers: Any, ids: Any, method: str) -> None:
    asked = ids(200)
    fill(engine, asked[:130], forget_host=True)
    engine.break_("store_raises", method)
    same(engine.generate([asked]), answers(asked))
    engine.generate([ids(3, 1)])  # a request's end reaches lmkv in the step after its last
    engine.break_("store_works", method)
    assert engine.forgive_errors() > 0
    engine.reset_prefix_cache()
    same(engine.generate([asked]), answers(asked))
    assert leased(engine) == 0
