"""The one place where lmkv waits: batches against a tier run on its threads, under a deadline.

The owner submits, polls and drains; it never blocks. `SteppedExecutor` is the same thing run by
hand, one job at a time on the caller's thread and clock, for tests and simulation.
"""

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

#: First pause after a tier failed, doubled with every failure in a row up to the largest.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
#: A thread that waits for the GIL beside one that computes in Python gets it after this long. With
#: Python's default of 5 ms, stores beside a busy thread fell to 0.54 of their speed, with this to
#: 0.89 (docs/performance.md). It holds for the whole process, which pays only while I/O is going on.
SWITCH_INTERVAL_S = 0.0005


@dataclass(eq=False)
class Job:
    """One batch for a tier. `run` may block; it is called once, on another thread."""

    run: Callable[[], Any]
    #: Handed back with the outcome, for the owner's use.
    tag: Any
    #: On the executor's clock; a job still unfinished then is overdue and trips the breaker.
    deadline: float
    result: Any = None
    #: What `run` raised, if it did.
    error: BaseException | None = None
    overdue: bool = False


class Executor(Protocol):
    """Bounded asynchronous execution of jobs."""

    #: Opened by jobs that fail or are overdue; several executors of one tier may share it.
    breaker: "Breaker"

    def submit(self, run: Callable[[], Any], tag: Any, deadline_s: float) -> bool:
        """Queue a job that should be done within `deadline_s` from now; False when the queue is
        full or the breaker is open."""

    def poll(self) -> list[Job]:
        """Jobs that ended since the last call, in the order they ended."""

    @property
    def pending(self) -> int:
        """Jobs submitted and not yet returned by `poll`."""

    @property
    def open(self) -> bool:
        """Whether the breaker is open: the tier is not to be used now."""

    def report(self, healthy: bool) -> None:
        """Tell the breaker how the tier fared in a job."""

    def drain(self, timeout_s: float) -> bool:
        """Wait for all pending jobs to end; False when the time ran out. `poll` still returns them."""

    def close(self, timeout_s: float) -> bool:
        """Stop after the running jobs; queued ones end with an error. Waits at most `timeout_s`;
        False when a job still runs then, and may touch its buffers."""


class Breaker:
    """Opens when a tier fails or hangs, and closes for a new attempt after a growing pause."""

    def __init__(self) -> None:
        self.trips = 0
        self._failures = 0
        self._closed_at = 0.0

    def open(self, now: float) -> bool:
        """Whether the tier is to be left alone at time `now`."""
        return now < self._closed_at

    def record(self, healthy: bool, now: float) -> None:
        """Note one outcome. The first failure of a row opens the breaker at once; further ones
        while it is open are of the same outage and do not make the pause longer."""
        if healthy:
            self._failures = 0
            self._closed_at = 0.0
        elif not self.open(now):
            pause = min(FIRST_BACKOFF_S * 2**self._failures, MAX_BACKOFF_S)
            self._failures = min(self._failures + 1, 16)  # 2**16 is far beyond the largest pause
            self._closed_at = now + pause
            self.trips += 1


class ThreadedExecutor:
    """Runs jobs on daemon threads. A job that hangs costs its thread, never its owner."""

    def __init__(self, name: str, threads: int, max_pending: int, breaker: Breaker | None = None) -> None:
        self.breaker = breaker or Breaker()
        self._max_pending = max_pending
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: deque[Job] = deque()  # appended by the threads, popped by the owner
        self._jobs: dict[int, Job] = {}
        self._next_overdue_check = 0.0
        self._stopped = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._threads = [
            threading.Thread(target=self._work, name=f"lmkv-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, run: Callable[[], Any], tag: Any, deadline_s: float) -> bool:
        """See `Executor.submit`."""
        if len(self._jobs) >= self._max_pending or self._stopped or self.open:
            return False
        job = Job(run, tag, time.monotonic() + deadline_s)
        self._jobs[id(job)] = job
        self._queue.put(job)
        return True

    def poll(self) -> list[Job]:
        """See `Executor.poll`."""
        if not self._jobs:
            return []
        ended = []
        while self._done:
            job = self._done.popleft()
            del self._jobs[id(job)]
            ended.append(job)
        self._check_overdue()
        return ended

    @property
    def pending(self) -> int:
        """See `Executor.pending`."""
        return len(self._jobs)

    @property
    def open(self) -> bool:
        """See `Executor.open`."""
        return self.breaker.open(time.monotonic())

    def report(self, healthy: bool) -> None:
        """See `Executor.report`."""
        self.breaker.record(healthy, time.monotonic())

    def drain(self, timeout_s: float) -> bool:
        """See `Executor.drain`."""
        deadline = time.monotonic() + timeout_s
        while len(self._done) < len(self._jobs):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self, timeout_s: float) -> bool:
        """See `Executor.close`."""
        self._stopped = True
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._stopped:
                job.error = RuntimeError("the executor was closed")
            else:
                _run(job)
            self._done.append(job)

    def _check_overdue(self) -> None:
        now = time.monotonic()
        if now < self._next_overdue_check:
            return
        self._next_overdue_check = now + 0.01  # deadlines are coarse; polls come every step
        for job in self._jobs.values():
            if not job.overdue and now > job.deadline:
                job.overdue = True
                self.breaker.record(healthy=False, now=now)
                logger.warning("lmkv: a tier has not answered in time; it is left alone for a while")


class SteppedExecutor:
    """The executor's twin for tests: nothing runs until `step`, and time is the caller's."""

    def __init__(
        self,
        max_pending: int = 64,
        clock: Callable[[], float] = lambda: 0.0,
        breaker: Breaker | None = None,
    ) -> None:
        self.breaker = breaker or Breaker()
        self._max_pending = max_pending
        self._clock = clock
        self._queued: deque[Job] = deque()
        self._done: list[Job] = []
        self._stopped = False

    def submit(self, run: Callable[[], Any], tag: Any, deadline_s: float) -> bool:
        """See `Executor.submit`."""
        if self.pending >= self._max_pending or self._stopped or self.open:
            return False
        self._queued.append(Job(run, tag, self._clock() + deadline_s))
        return True

    def step(self, count: int = 1) -> int:
        """Run up to `count` queued jobs; returns how many ran."""
        ran = 0
        while self._queued and ran < count:
            job = self._queued.popleft()
            _run(job)
            self._done.append(job)
            ran += 1
        return ran

    def poll(self) -> list[Job]:
        """See `Executor.poll`."""
        now = self._clock()
        for job in self._queued:
            if not job.overdue and now > job.deadline:
                job.overdue = True
                self.breaker.record(healthy=False, now=now)
        ended, self._done = self._done, []
        return ended

    @property
    def pending(self) -> int:
        """See `Executor.pending`."""
        return len(self._queued) + len(self._done)

    @property
    def open(self) -> bool:
        """See `Executor.open`."""
        return self.breaker.open(self._clock())

    def report(self, healthy: bool) -> None:
        """See `Executor.report`."""
        self.breaker.record(healthy, self._clock())

    def drain(self, timeout_s: float) -> bool:
        """See `Executor.drain`."""
        self.step(len(self._queued))
        return True

    def close(self, timeout_s: float) -> bool:
        """See `Executor.close`."""
        self._stopped = True
        for job in self._queued:
            job.error = RuntimeError("the executor was closed")
        self._done.extend(self._queued)
        self._queued.clear()
        return True


def _run(job: Job) -> None:
    try:
        job.result = job.run()
    except Exception as error:  # noqa: BLE001  # whatever a tier raises is its job's outcome
        job.error = error
