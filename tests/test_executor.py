"""The executor and its stepped twin give the same results; the breaker; jobs that hang."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmkv import executor as module
from lmkv.executor import FIRST_BACKOFF_S, MAX_BACKOFF_S, Breaker, SteppedExecutor, ThreadedExecutor

LONG_S = 60.0


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """One executor, and how a test waits for it: the same script runs on both kinds."""

    def __init__(self, kind: str, max_pending: int, clock: Clock) -> None:
        self.clock = clock
        self.threaded = kind == "threaded"
        self.executor: Any
        if self.threaded:
            self.executor = ThreadedExecutor("test", 1, max_pending)
        else:
            self.executor = SteppedExecutor(max_pending, clock)

    def wait(self) -> None:
        assert self.executor.drain(LONG_S)

    def outcomes(self) -> list[tuple[Any, Any, str]]:
        self.wait()
        return [(job.tag, job.result, type(job.error).__name__) for job in self.executor.poll()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Time:
        monotonic = staticmethod(clock)
        sleep = staticmethod(threading.Event().wait)

    monkeypatch.setattr(module, "time", Time)
    return clock


Make = Callable[..., Driver]


@pytest.fixture(params=["threaded", "stepped"])
def make(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Make]:
    drivers: list[Driver] = []

    def make(max_pending: int = 8) -> Driver:
        drivers.append(Driver(request.param, max_pending, clock))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.executor.close(LONG_S)


def test_results_and_errors_come_back_in_order(make: Make) -> None:
    driver = make()
    assert driver.executor.submit(lambda: 1, "a", LONG_S)
    assert driver.executor.submit(lambda: 1 // 0, "b", LONG_S)
    assert driver.executor.submit(lambda: [2], "c", LONG_S)
    assert driver.executor.pending == 3
    assert driver.outcomes() == [
        ("a", 1, "NoneType"),
        ("b", None, "ZeroDivisionError"),
        ("c", [2], "NoneType"),
    ]
    assert driver.executor.pending == 0
    assert driver.executor.poll() == []


def test_the_queue_is_bounded_until_its_jobs_are_polled(make: Make) -> None:
    driver = make(max_pending=3)
    assert [driver.executor.submit(int, i, LONG_S) for i in range(5)] == [True] * 3 + [False] * 2
    driver.wait()
    assert not driver.executor.submit(int, 9, LONG_S)
    assert [tag for tag, _, _ in driver.outcomes()] == [0, 1, 2]
    assert driver.executor.submit(int, 9, LONG_S)


def test_a_failing_tier_is_left_alone_and_tried_again(make: Make) -> None:
    driver = make()
    executor = driver.executor
    executor.report(healthy=False)
    assert executor.open and executor.breaker.trips == 1
    assert not executor.submit(int, "refused", LONG_S)
    driver.clock.now += FIRST_BACKOFF_S
    assert not executor.open
    assert executor.submit(int, "probe", LONG_S)
    assert [tag for tag, _, _ in driver.outcomes()] == ["probe"]
    executor.report(healthy=False)  # the probe failed: the pause doubles
    driver.clock.now += FIRST_BACKOFF_S
    assert executor.open
    driver.clock.now += FIRST_BACKOFF_S
    assert not executor.open
    executor.report(healthy=True)
    executor.report(healthy=False)  # a new row begins with the first pause
    driver.clock.now += FIRST_BACKOFF_S
    assert not executor.open and executor.breaker.trips == 3


def test_overdue_jobs_trip_the_breaker_once(make: Make) -> None:
    driver = make()
    executor = driver.executor
    gate = threading.Event()
    if driver.threaded:
        assert executor.submit(gate.wait, "hangs", 1.0)
    else:
        assert executor.submit(lambda: True, "hangs", 1.0)
    assert executor.submit(int, "behind it", 1.0)
    assert executor.poll() == [] and not executor.open
    driver.clock.now += 1.1
    assert executor.poll() == []
    assert executor.open and executor.breaker.trips == 1
    driver.clock.now += FIRST_BACKOFF_S  # both jobs are one outage: one pause
    assert executor.poll() == [] and not executor.open
    gate.set()
    assert [tag for tag, _, _ in driver.outcomes()] == ["hangs", "behind it"]
    assert executor.breaker.trips == 1


def test_close_ends_queued_jobs_with_an_error(make: Make) -> None:
    driver = make()
    executor = driver.executor
    gate, started = threading.Event(), threading.Event()
    if driver.threaded:

        def occupy() -> None:
            started.set()
            gate.wait()

        executor.submit(occupy, "running", LONG_S)
        started.wait()
    for i in range(3):
        executor.submit(int, i, LONG_S)
    if driver.threaded:
        executor.close(0.0)  # returns although a job runs
        gate.set()
    executor.close(LONG_S)
    outcomes = driver.outcomes()
    assert [outcome for outcome in outcomes if outcome[0] != "running"] == [
        (i, None, "RuntimeError") for i in range(3)
    ]
    assert not executor.submit(int, "late", LONG_S)
    executor.close(LONG_S)


def test_a_hanging_job_blocks_neither_poll_nor_drain_nor_close() -> None:
    executor = ThreadedExecutor("test", 2, 8)
    gate, started = threading.Event(), threading.Event()

    def hang() -> str:
        started.set()
        gate.wait()
        return "late"

    executor.submit(hang, "hangs", LONG_S)
    started.wait()
    for i in range(5):  # the other thread goes on
        assert executor.submit(lambda i=i: i, i, LONG_S)
    results: list[Any] = []
    while len(results) < 5:
        results.extend(job.result for job in executor.poll())
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert executor.pending == 1
    assert not executor.drain(0.01)
    executor.close(0.01)
    assert executor.pending == 1
    gate.set()
    assert executor.drain(LONG_S)
    assert [(job.tag, job.result) for job in executor.poll()] == [("hangs", "late")]


def test_jobs_run_on_other_threads_and_in_parallel() -> None:
    executor = ThreadedExecutor("test", 2, 8)
    meeting = threading.Barrier(2)  # passes only if two jobs run at once
    for tag in "ab":
        executor.submit(lambda: (meeting.wait(LONG_S), threading.get_ident())[1], tag, LONG_S)
    assert executor.drain(LONG_S)
    idents = {job.result for job in executor.poll()}
    assert len(idents) == 2 and threading.get_ident() not in idents
    executor.close(LONG_S)


def test_stepping_runs_one_job_at_a_time() -> None:
    executor = SteppedExecutor()
    ran: list[int] = []
    for i in range(3):
        executor.submit(lambda i=i: ran.append(i), i, LONG_S)
    assert executor.step() == 1 and ran == [0]
    assert [job.tag for job in executor.poll()] == [0]
    assert executor.step(5) == 2 and ran == [0, 1, 2]
    assert executor.step() == 0


def test_the_pause_doubles_up_to_its_limit() -> None:
    breaker = Breaker()
    now, pauses = 0.0, []
    for _ in range(40):
        breaker.record(False, now)
        breaker.record(False, now)  # the same outage
        low, high = 0.0, 2 * MAX_BACKOFF_S
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if breaker.open(now + middle) else (low, middle)
        pauses.append(round(high, 3))
        now += high
    assert pauses[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == max(pauses) == MAX_BACKOFF_S
    assert breaker.trips == 40
