"""A tier below the host tier, with the threads that drive it and what is known of it."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lmkv.executor import Breaker, Executor, ThreadedExecutor
from lmkv.index import Entry
from lmkv.keys import KEY_BYTES
from lmkv.request import Request
from lmkv.tier import Tier

#: Bytes of one read job: several run at once and keep a disk busy, each large enough that the
#: GIL is passed around rarely (see docs/performance.md).
READ_BATCH_BYTES = 8 << 20
READ_THREADS = 6
#: Half of a slab of 64 GiB.
MAX_READ_JOBS = 4096
#: Bytes of one write job. While one runs, the next is only started once it is full: what comes in
#: slowly is written in few large pieces, what comes in fast by several threads.
WRITE_BATCH_BYTES = 64 << 20
#: While one job is flushed and one hashed, the third keeps the disk busy.
WRITE_THREADS = 3
#: A second batch of questions need not wait for the first one's answer.
ASK_THREADS = 2
MAX_ASKS = 64
#: A batch that takes longer than this plus its bytes at DEFER_BYTES_PER_S trips the breaker.
TIER_DEADLINE_S = 5.0
#: The same of a question.
ASK_DEADLINE_S = 0.5

#: How long an answer holds: that a chunk is there (a read finds out when it is not), and that it is not.
_PRESENT_S = 60.0
_ABSENT_S = 1.0
#: About 50 MB of answers.
_MAX_ANSWERS = 2**18
#: Pauses between the probes of a server that is down: recovery is noticed within the last one.
_FIRST_PROBE_S = 0.25
_MAX_PROBE_S = 2.0


class Answers:
    """What a remote tier was heard to have, or not to have."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()

    def note(self, key: bytes, present: bool, now: float) -> None:
        """Remember what was heard at time `now`."""
        self._answers[key] = (present, now)
        self._answers.move_to_end(key)
        if len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)

    def has(self, key: bytes, now: float, absent_s: float = _ABSENT_S) -> bool | None:
        """None when it was not heard, or too long ago; `absent_s`: how old a "no" may be."""
        present, heard = self._answers.get(key, (False, float("-inf")))
        return present if now - heard <= (_PRESENT_S if present else absent_s) else None


class ProbedBreaker(Breaker):
    """Stays open after a failure until a probe of its own succeeds, so that no request has to find out.

    The probe runs on a thread that lives only while the breaker is open.
    """

    def __init__(self, probe: Callable[[], object]) -> None:
        """`probe` raises while the tier cannot answer; it may block for as long as the tier's deadline."""
        super().__init__()
        self._probe = probe
        self._is_open = False
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def open(self, now: float) -> bool:
        """See `Breaker.open`."""
        return self._is_open

    def record(self, healthy: bool, now: float) -> None:
        """Note one outcome. A success is no news: one from before the outage may come in late."""
        if healthy:
            return
        with self._lock:
            if self._is_open or self._stopped.is_set():
                return
            self._is_open = True
            self.trips += 1
        threading.Thread(target=self._watch, name="lmkv-probe", daemon=True).start()

    def stop(self) -> None:
        """Probe no more."""
        self._stopped.set()

    def _watch(self) -> None:
        pause_s = _FIRST_PROBE_S
        while not self._stopped.wait(pause_s):
            pause_s = min(2 * pause_s, _MAX_PROBE_S)
            try:
                self._probe()
            except Exception:  # noqa: BLE001  # whatever it is, the tier is not well yet
                continue
            self._is_open = False
            return


@dataclass(eq=False)
class Below:
    """A tier below the host tier with the executors that drive it."""

    tier: Tier
    reads: Executor
    writes: Executor
    #: Questions to a remote tier; None for one that answers from its own index.
    asks: Executor | None = None
    #: Whether chunks are looked for there, and whether they are stored there.
    readable: bool = True
    writable: bool = True
    #: Only chunks about to be evicted from host memory are stored.
    demote: bool = False
    queue: deque[tuple[Entry, Request]] = field(default_factory=deque)
    #: Chunks queued or being written, and the bytes of their slots.
    writing_chunks: int = 0
    writing_bytes: int = 0
    #: Slot bytes that are queued and not yet in a write job.
    queued_bytes: int = 0
    answers: Answers = field(default_factory=Answers)
    #: Keys to ask for at the end of the lookup window, in order, and those asked for now.
    unasked: dict[bytes, None] = field(default_factory=dict)
    asking: set[bytes] = field(default_factory=set)

    @classmethod
    def threaded(cls, tier: Tier, *, role: str = "read_write", policy: str = "write_through") -> "Below":
        """With threads of its own. `role`, `policy`: as in the tier's settings."""
        name = tier.info.name
        breaker: Breaker | None = None
        asks = None
        if tier.info.remote:
            breaker = ProbedBreaker(lambda: tier.contains((bytes(KEY_BYTES),)))
            asks = ThreadedExecutor(f"{name}-ask", ASK_THREADS, MAX_ASKS, breaker)
        return cls(
            tier=tier,
            reads=ThreadedExecutor(f"{name}-read", READ_THREADS, MAX_READ_JOBS, breaker),
            writes=ThreadedExecutor(f"{name}-write", WRITE_THREADS, WRITE_THREADS, breaker),
            asks=asks,
            readable=role != "write_only",
            writable=role != "read_only",
            demote=policy == "demote",
        )

    @property
    def name(self) -> str:
        """The tier's name, a metric label."""
        return self.tier.info.name

    @property
    def executors(self) -> list[Executor]:
        """All there are."""
        return [executor for executor in (self.reads, self.writes, self.asks) if executor is not None]

    @property
    def trips(self) -> int:
        """How often the tier was given up for a while."""
        return sum(breaker.trips for breaker in {executor.breaker for executor in self.executors})

    def has(self, key: bytes, now: float, absent_s: float = _ABSENT_S) -> bool | None:
        """Whether a chunk is there, as far as is known without waiting; None: a server has to be asked."""
        if self.asks is None:
            return self.tier.contains((key,))[0]
        return self.answers.has(key, now, absent_s)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Stop the threads, then close the tier; False when a job still hangs: the tier stays open then."""
        for executor in self.executors:
            if isinstance(executor.breaker, ProbedBreaker):
                executor.breaker.stop()
        stopped = [executor.close(timeout_s) for executor in self.executors]
        if all(stopped):
            self.tier.close()
        return all(stopped)
