"""The store with a tier that has to be asked, roles, demotion, waiting for another engine, and the gate."""

import threading
import time
from collections.abc import Iterator

import pytest

from lmkv import below as below_module
from lmkv.below import Answers, Below, ProbedBreaker
from lmkv.chain import chain
from lmkv.config import Config, FileConfig, RedisConfig
from lmkv.gate import Gate
from lmkv.store import DEFER_S, WAIT_POLL_S, Presence
from lmkv.tier import Status, Unavailable
from tests.test_store import CHUNK_TOKENS, HIT, MISS, PAGE, PENDING, UNKNOWN, FaultyTier, World, key, keys


class Shared:
    """Engines that share one server."""

    def __init__(self) -> None:
        self.server = FaultyTier("redis", remote=True)
        self.worlds: list[World] = []

    def engine(self, slots: int = 8, *, file: bool = False, gate: Gate | None = None) -> World:
        tiers = [FaultyTier("file"), self.server] if file else [self.server]
        self.worlds.append(World(slots, tiers=tiers, gate=gate))
        return self.worlds[-1]


@pytest.fixture
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    for world in shared.worlds:
        world.close()


# --- asking


def test_what_one_engine_stored_another_loads(shared: Shared) -> None:
    shared.engine().prompt(1, 2, 3)
    other = shared.engine()
    shared.server.asks.clear()
    assert other.serve(1, 2, 3, 4) == 3
    assert other.metric("loaded_chunks", "redis") == 3
    # One question for the whole prompt, and none for what is known by then.
    assert shared.server.asks == [[other.tier_key(key(n)) for n in (1, 2, 3, 4)]]
    other.assert_idle()


def test_a_lookup_neither_waits_nor_guesses(shared: Shared) -> None:
    shared.engine().prompt(1)
    other = shared.engine()
    request = other.store.new_request()
    assert other.ask(request, keys(1, 2)) == [UNKNOWN, UNKNOWN]
    assert other.ask(request, keys(1, 2)) == [UNKNOWN, UNKNOWN]
    other.step()
    assert other.ask(request, keys(1, 2)) == [PENDING, MISS]
    other.step()
    assert other.ask(request, keys(1, 2)) == [HIT, MISS]
    other.store.finish_request(request)


def test_an_answer_is_good_for_a_while(shared: Shared) -> None:
    world = shared.engine()
    assert world.serve(1) == 0
    shared.server.asks.clear()
    assert world.serve(1) == 0
    assert shared.server.asks == []
    world.now += 1.1
    shared.engine().prompt(1)
    shared.server.asks.clear()
    assert world.serve(1) == 1
    assert len(shared.server.asks) == 1


def test_what_was_stored_need_not_be_asked_for(shared: Shared) -> None:
    world = shared.engine()
    world.prompt(1, 2)
    world.forget_host()
    shared.server.asks.clear()
    assert world.serve(1, 2) == 2
    assert shared.server.asks == []


def test_an_answer_that_comes_too_late_serves_the_next_request(shared: Shared) -> None:
    shared.engine().prompt(1)
    world = shared.engine()
    request = world.store.new_request()
    assert world.ask(request, keys(1)) == [UNKNOWN]
    world.now += DEFER_S + 0.01
    assert world.ask(request, keys(1)) == [MISS]
    assert world.metric("misses", "deadline") == 1
    world.store.finish_request(request)
    world.step()
    request = world.store.new_request()
    assert world.ask(request, keys(1)) == [PENDING]
    world.step()
    assert world.ask(request, keys(1)) == [HIT]
    world.store.finish_request(request)


def test_while_the_breaker_is_open_nothing_is_asked_read_or_written(shared: Shared) -> None:
    shared.engine().prompt(1)
    world = shared.engine()
    shared.server.error = Unavailable("no route to host")
    assert world.serve(1) == 0
    shared.server.asks.clear()
    assert world.serve(1, 2, 3) == 0
    world.prompt(5)
    assert shared.server.asks == [] and shared.server.gets == []
    assert world.metric("skipped_stores", "breaker_open") == 1
    shared.server.error = None
    world.now += 1
    assert world.serve(1) == 1


def test_a_chunk_that_is_gone_is_a_miss_and_forgotten(shared: Shared) -> None:
    shared.engine().prompt(1, 2)
    world = shared.engine()
    request = world.store.new_request()
    world.ask(request, keys(1, 2))
    world.step()
    shared.server.chunks.clear()  # FLUSHALL between lookup and load
    assert world.ask(request, keys(1, 2)) == [PENDING, PENDING]
    world.step()
    assert world.ask(request, keys(1, 2)) == [MISS]
    assert world.metric("misses", "miss") == 2
    world.store.finish_request(request)
    assert world.serve(1, 2) == 0
    world.assert_idle()


def test_the_files_are_looked_in_before_the_server_is_asked(shared: Shared) -> None:
    world = shared.engine(file=True)
    world.prompt(1, 2)
    world.forget_host()
    del world.tiers[0].chunks[world.tier_key(key(2))]  # type: ignore[attr-defined]
    shared.server.asks.clear()
    assert world.serve(1, 2) == 2
    assert world.metric("loaded_chunks", "file") == world.metric("loaded_chunks", "redis") == 1


def test_presence_asks_for_the_next_time(shared: Shared) -> None:
    shared.engine().prompt(1)
    world = shared.engine()
    world.prompt(3)
    assert world.store.presence(keys(1, 2, 3)) == [Presence.NOWHERE, Presence.NOWHERE, Presence.HOST]
    world.store.presence(keys(1, 2))
    world.step()
    assert shared.server.asks[-1] == [world.tier_key(key(1)), world.tier_key(key(2))]
    assert world.store.presence(keys(1, 2)) == [Presence.BELOW, Presence.NOWHERE]


def test_answers_are_bounded_and_grow_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(below_module, "_MAX_ANSWERS", 3)
    answers = Answers()
    for number in range(5):
        answers.note(key(number), number % 2 == 0, now=0)
    assert [answers.has(key(number), 0.5) for number in range(5)] == [None, None, True, False, True]
    assert [answers.has(key(number), 2) for number in (2, 3, 4)] == [True, None, True]
    assert answers.has(key(3), 0.5, absent_s=0.1) is None
    assert answers.has(key(4), 61) is None


# --- the breaker of a server


def test_a_probed_breaker_closes_only_when_its_probe_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(below_module, "_FIRST_PROBE_S", 0.001)
    monkeypatch.setattr(below_module, "_MAX_PROBE_S", 0.002)
    well, probes = threading.Event(), threading.Semaphore(0)

    def probe() -> None:
        probes.release()
        if not well.is_set():
            raise Unavailable

    breaker = ProbedBreaker(probe)
    for _ in range(3):
        breaker.record(False, 0)
    assert breaker.open(1e9) and breaker.trips == 1
    breaker.record(True, 0)  # from before the outage
    for _ in range(5):
        assert probes.acquire(timeout=30)
    assert breaker.open(0)
    well.set()
    while breaker.open(0):
        time.sleep(0.001)
    assert breaker.trips == 1
    breaker.record(False, 0)
    assert breaker.trips == 2
    breaker.stop()


def test_the_executors_of_a_remote_tier_share_a_breaker_that_stops_with_them() -> None:
    tier = FaultyTier("redis", remote=True)
    below = Below.threaded(tier)
    assert below.asks is not None
    assert {id(executor.breaker) for executor in below.executors} == {id(below.asks.breaker)}
    tier.error = Unavailable("down")
    below.writes.report(False)
    assert below.reads.open and below.asks.open and below.trips == 1
    assert below.close() and tier.closed


# --- roles and policies


def test_a_read_only_tier_is_read_and_not_written(shared: Shared) -> None:
    shared.engine().prompt(1)
    world = shared.engine()
    world.below[0].writable = False
    assert world.serve(1) == 1
    world.prompt(2)
    assert len(shared.server.chunks) == 1
    world.assert_idle()


def test_a_write_only_tier_is_written_and_never_asked(shared: Shared) -> None:
    world = shared.engine()
    world.below[0].readable = False
    world.prompt(1)
    assert len(shared.server.chunks) == 1
    world.forget_host()
    shared.server.asks.clear()
    assert world.serve(1) == 0
    assert world.store.presence(keys(1)) == [Presence.NOWHERE]
    assert shared.server.asks == []


def test_demoted_is_what_is_about_to_be_evicted_in_its_order(shared: Shared) -> None:
    world = shared.engine(slots=64)
    world.below[0].demote = True
    for number in range(56):
        world.prompt(number)
    assert shared.server.chunks == {}
    for number in range(56, 64):
        world.prompt(number)
    written = [world.tier_key(key(number)) for number in range(8)]
    assert list(shared.server.chunks) == written
    assert world.in_host() == set(range(64))
    # The coldest are still the next to go, although they were leased meanwhile.
    world.prompt(64)
    assert world.in_host() == set(range(1, 65))
    for number in range(65, 200):
        world.prompt(number)
    assert len(shared.server.chunks) == 200 - 64 + 8
    assert world.serve(0) == 1
    world.assert_idle()


def test_nothing_is_demoted_twice(shared: Shared) -> None:
    world = shared.engine(slots=16)
    world.below[0].demote = True
    for number in range(16):
        world.prompt(number)
    assert len(shared.server.puts) == len(shared.server.chunks) == 2
    for _ in range(5):
        world.step()
    assert len(shared.server.puts) == 2


def config(**tables: object) -> Config:
    return replace_tables(Config(), tables)


def replace_tables(config: Config, tables: dict[str, object]) -> Config:
    return Config(**{name: tables.get(name, getattr(config, name)) for name in config.__struct_fields__})  # type: ignore[arg-type]


def test_what_goes_down_to_redis_comes_from_the_files_where_there_are_some() -> None:
    file, redis = FaultyTier("file"), FaultyTier("redis", remote=True)
    settings = config(file=FileConfig(path="/x"), redis=RedisConfig(policy="demote"))
    first, last = chain(settings, file, redis)
    assert (first.name, first.writable, last.name, last.writable) == ("file", True, "redis", False)
    assert file.on_evict is not None
    tier_key = bytes(28) + key(1) + bytes(4)
    file.on_evict([tier_key], [memoryview(b"x" * PAGE)])
    assert redis.chunks == {tier_key: b"x" * PAGE}
    redis.faults[tier_key] = Status.UNAVAILABLE
    file.on_evict([tier_key], [memoryview(b"x" * PAGE)])
    assert last.writes.open
    file.on_evict([tier_key], [memoryview(b"x" * PAGE)])
    assert len(redis.puts) == 2
    for below in (first, last):
        below.close()


def test_without_files_demoted_chunks_come_from_host_memory() -> None:
    (only,) = chain(config(redis=RedisConfig(policy="demote", role="write_only")), None, FaultyTier("redis"))
    assert (only.demote, only.writable, only.readable) == (True, True, False)
    only.close()


# --- waiting for another engine


def test_a_request_waits_for_another_engine_to_store_its_chunks(shared: Shared) -> None:
    producer, consumer = shared.engine(), shared.engine()
    request = consumer.store.new_request(wait_s=2.0)
    assert consumer.store.rest_s == 0
    for _ in range(5):
        consumer.now += 0.1
        assert consumer.ask(request, keys(1, 2)) == [UNKNOWN, UNKNOWN]
        consumer.step()
        assert consumer.store.rest_s > 0
    producer.prompt(1)
    consumer.now += WAIT_POLL_S + 0.001
    for expected in ([UNKNOWN, UNKNOWN], [PENDING, UNKNOWN], [HIT, UNKNOWN]):
        assert consumer.ask(request, keys(1, 2)) == expected
        consumer.step()
    producer.prompt(2)
    consumer.now += WAIT_POLL_S + 0.001
    for expected in ([HIT, UNKNOWN], [HIT, PENDING], [HIT, HIT]):
        assert consumer.ask(request, keys(1, 2)) == expected
        consumer.step()
    consumer.store.finish_request(request)
    consumer.assert_idle()


def test_trouble_that_passes_does_not_end_the_wait(shared: Shared) -> None:
    shared.engine().prompt(1, 2)
    world = shared.engine()
    request = world.store.new_request(wait_s=2.0)
    for expected in ([UNKNOWN, UNKNOWN], [PENDING, PENDING]):
        assert world.ask(request, keys(1, 2)) == expected
        shared.server.error = Unavailable("no route to host") if expected[0] is PENDING else None
        world.step()
    assert world.metric("misses", "unavailable") == 2
    assert world.ask(request, keys(1, 2)) == [UNKNOWN, UNKNOWN]  # and not what was loaded so far
    world.step()
    shared.server.error = None
    world.now += 1
    for expected in ([PENDING, PENDING], [HIT, HIT]):
        assert world.ask(request, keys(1, 2)) == expected
        world.step()
    world.store.finish_request(request)
    world.assert_idle()


def test_trouble_that_lasts_ends_with_the_wait(shared: Shared) -> None:
    shared.engine().prompt(1)
    world = shared.engine()
    request = world.store.new_request(wait_s=2.0)
    for expected in ([UNKNOWN], [PENDING]):
        assert world.ask(request, keys(1)) == expected
        world.step()
        shared.server.error = Unavailable("no route to host")
    world.now += 2.1
    assert world.ask(request, keys(1)) == [MISS]
    world.store.finish_request(request)
    world.assert_idle()


def test_the_wait_ends(shared: Shared) -> None:
    world = shared.engine(file=True)
    request = world.store.new_request(wait_s=2.0)
    assert world.ask(request, keys(1)) == [UNKNOWN]
    world.step()
    world.now += 1.9
    assert world.ask(request, keys(1)) == [UNKNOWN]
    world.step()
    world.now += 0.2
    assert world.ask(request, keys(1)) == [MISS]
    world.store.finish_request(request)
    world.assert_idle()


# --- the gate


def test_the_gate_compares_what_was_measured() -> None:
    now = 0.0
    gate = Gate(lambda: now)
    assert gate.worth("redis", 1000, 10)
    gate.computed(100, 1.0)
    assert gate.recompute_s(50) == pytest.approx(0.5)
    assert gate.worth("redis", 1000, 10)  # its speed is not known yet
    gate.loaded("redis", 1000, 1.0)
    assert gate.worth("redis", 99, 10)
    assert not gate.worth("redis", 101, 10)
    assert gate.worth("file", 101, 10)
    now = 11.0  # measured anew, once
    assert [gate.worth("redis", 101, 10) for _ in range(2)] == [True, False]
    for _ in range(50):
        gate.loaded("redis", 10_000, 1.0)
    assert gate.worth("redis", 101, 10)


def test_a_hit_that_does_not_pay_is_left_alone(shared: Shared) -> None:
    shared.engine().prompt(1, 2)
    gate = Gate(lambda: world.now)
    world = shared.engine(gate=gate)
    gate.computed(CHUNK_TOKENS, 0.001)
    gate.loaded("redis", PAGE, 0.1)
    assert world.serve(1, 2) == 0
    assert world.metric("misses", "gate") == 2
    assert shared.server.gets == []
    world.assert_idle()
    world.now += 20
    assert world.serve(1, 2) == 2


def test_the_speed_of_loads_is_measured_from_the_first_to_the_last_chunk(shared: Shared) -> None:
    shared.engine().prompt(1, 2, 3)
    gate = Gate(lambda: world.now)
    world = shared.engine(gate=gate)
    request = world.store.new_request()
    world.ask(request, keys(1, 2, 3))
    world.step()
    world.ask(request, keys(1, 2, 3))
    world.store.end_step()
    world.now += 0.01
    world.step()
    assert gate.loads["redis"].per_s == pytest.approx(3 * PAGE / 0.01)
    assert world.ask(request, keys(1, 2, 3)) == [HIT] * 3
    world.store.finish_request(request)
    world.now += 2
    world.store.computed(100, 1.0)
    world.store.end_step()
    assert world.metric("load_bytes_per_s", "redis") == round(3 * PAGE / 0.01)
    assert world.metric("prefill_tokens_per_s") == 100


def test_nobody_waits_for_longer_than_computing_would_take(shared: Shared) -> None:
    gate = Gate(lambda: world.now)
    world = shared.engine(gate=gate)
    gate.computed(CHUNK_TOKENS, 0.01)
    request = world.store.new_request()
    assert world.ask(request, keys(1, 2)) == [UNKNOWN, UNKNOWN]
    world.store.end_step()
    world.now += 0.019
    assert world.ask(request, keys(1, 2)) == [UNKNOWN, UNKNOWN]
    world.store.end_step()
    world.now += 0.002
    assert world.ask(request, keys(1, 2)) == [MISS]
    world.store.finish_request(request)


def test_what_another_engine_computes_passes_the_gate(shared: Shared) -> None:
    shared.engine().prompt(1)
    gate = Gate(lambda: world.now)
    world = shared.engine(gate=gate)
    gate.computed(CHUNK_TOKENS, 1e-6)
    gate.loaded("redis", PAGE, 10.0)
    request = world.store.new_request(wait_s=1.0)
    for expected in (UNKNOWN, PENDING, HIT):
        assert world.ask(request, keys(1)) == [expected]
        world.step()
    world.store.finish_request(request)
