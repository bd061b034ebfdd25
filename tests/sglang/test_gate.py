"""What lmkv measures of SGLang's batches, and what it leaves alone because computing it is faster."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from lmkv.connectors.sglang import live, steps
from lmkv.gate import Gate
from tests.sglang import test_linker_unit as linkers
from tests.sglang import test_storage_unit as storages
from tests.sglang.test_linker_unit import open_linker  # noqa: F401  # a fixture
from tests.sglang.test_storage_unit import no_engine, open_storage  # noqa: F401  # fixtures


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "gate", Gate(clock.monotonic))
    monkeypatch.setattr(steps, "time", clock)
    return clock


class Result:
    """What SGLang hands from one to the other: not hashable, and equal to its like."""

    __hash__ = None  # type: ignore[assignment]  # as of a dataclass

    def __eq__(self, other: object) -> bool:
        return True


def batch(tokens: int, mode: ForwardMode = ForwardMode.EXTEND) -> Any:
    return SimpleNamespace(forward_mode=mode, extend_num_tokens=tokens)


def begin(measured: steps.Steps, of: Any, result: Any) -> Any:
    assert measured.run_batch(lambda scheduler, given: result, None, of) is result
    return result


def end(measured: steps.Steps, result: Any) -> None:
    assert measured.process_batch_result(lambda scheduler, of, given: 7, None, None, result) == 7


def test_batches_one_after_the_other(clock: Clock) -> None:
    measured = steps.Steps()
    for mode, tokens, seconds in (
        (ForwardMode.EXTEND, 1000, 0.5),
        (ForwardMode.DECODE, 1000, 9.0),  # says nothing of prompts
        (ForwardMode.EXTEND, 31, 9.0),  # nor does this one
    ):
        result = begin(measured, batch(tokens, mode), Result())
        clock.now += seconds
        end(measured, result)
        clock.now += 5.0  # nothing to do
    assert live.gate.prefill.per_s == pytest.approx(2000)
    assert not measured.metrics.values


def test_overlapping_batches_are_told_apart(clock: Clock) -> None:
    measured = steps.Steps()
    first = begin(measured, batch(1000), Result())
    clock.now += 0.1
    second = begin(measured, batch(100, ForwardMode.MIXED), Result())
    begin(measured, batch(0, ForwardMode.IDLE), Result())  # never processed
    clock.now += 0.4
    end(measured, first)
    assert live.gate.prefill.per_s == pytest.approx(2000)
    clock.now += 0.5
    end(measured, second)  # it began when the first one was over
    assert live.gate.prefill.per_s == pytest.approx((0.9 * 1000 + 100) / (0.9 * 0.5 + 0.5))


def test_what_cannot_be_measured_stops_nothing(clock: Clock) -> None:
    measured = steps.Steps()
    begin(measured, SimpleNamespace(), Result())
    begin(measured, batch(100), None)
    end(measured, None)
    end(measured, Result())
    assert live.gate.prefill.per_s is None
    assert measured.metrics.values[("lmkv_errors", ("_began",))] == 1


def test_the_storage_leaves_alone_what_is_computed_faster(
    clock: Clock,
    open_storage: storages.Open,  # noqa: F811  # pytest's way
) -> None:
    pool = storages.mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    names = storages.keys(4)
    pool.fill(1)
    assert storage.batch_set_v1(names, pool.indices([0, 1, 2, 3])) == [True] * 4
    live.gate.computed(10**9, 1.0)
    assert storage.batch_exists(names) == 4  # how fast it loads is not known yet
    assert storage.batch_get_v1(names, pool.indices([4, 5, 6, 7])) == [True] * 4
    assert storage.batch_exists(names) == 0
    assert storage.batch_exists_v2(names, []).kv_hit_pages == 0
    assert storage.metrics.values[("lmkv_misses", ("gate",))] == 8
    clock.now += 11
    assert [storage.batch_exists(names) for _ in range(2)] == [4, 0]  # one is let through to be measured
    for _ in range(200):
        live.gate.computed(10, 1.0)
    assert storage.batch_exists(names) == 4


def test_the_linker_leaves_alone_what_is_computed_faster(
    clock: Clock,
    open_linker: linkers.Open,  # noqa: F811  # pytest's way
) -> None:
    pool = linkers.mha()
    first = open_linker(pool)
    names = linkers.keys(4)
    linkers.fill(pool, 1)
    assert first.offload(linkers.kv(names, [0, 1, 2, 3]))
    first.written()
    first.linker.close()
    second = open_linker(pool)
    live.gate.computed(10**9, 1.0)
    live.gate.loaded("file", 1, 1.0)
    assert second.linker.lookup("a", [linkers.kv(names)]) == []
    assert second.counter("lmkv_misses", "gate") == 4
    clock.now += 11
    assert second.linker.lookup("b", [linkers.kv(names)]) == [1, 2, 3, 4]
    assert second.linker.load("b", [linkers.kv(names, [4, 5, 6, 7])])  # not asked again
    assert second.land()
    assert second.linker.lookup("c", [linkers.kv(names)]) == [1, 2, 3, 4]  # in memory now
