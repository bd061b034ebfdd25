"""The tiers below SGLang's host pool, and what keeps one that is sick from being used."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmkv.below import TIER_DEADLINE_S, ProbedBreaker
from lmkv.executor import Breaker
from lmkv.gate import Gate
from lmkv.keys import KEY_BYTES
from lmkv.metrics import RateLimitedLog
from lmkv.store import DEFER_BYTES_PER_S
from lmkv.tier import Buffer, Status, Tier, Unavailable


class Place:
    """A tier that pages are moved to and from. Its calls come on SGLang's threads and on the storage's."""

    def __init__(
        self, tier: Tier, log: RateLimitedLog, gate: Gate | None = None, *, role: str, writes: bool = True
    ) -> None:
        """`gate`: is told how fast it reads. `role`: as in the tier's settings. `writes`: whether this rank
        stores at all."""
        self.tier = tier
        self._gate = gate
        self.name = tier.info.name
        self.readable = role != "write_only"
        self.writable = writes and role != "read_only"
        self._log = log
        self.breaker = (
            ProbedBreaker(lambda: tier.contains((bytes(KEY_BYTES),))) if tier.info.remote else Breaker()
        )
        self._lock = threading.Lock()
        self._deadlines: dict[object, float] = {}  # of the I/O under way
        # Reads of a batch run side by side; what they do together is measured.
        self._reads = self._read_bytes = 0
        self._reads_began = 0.0

    def healthy(self) -> bool:
        """Whether the tier is to be used now; opens the breaker when I/O is overdue."""
        now = time.monotonic()
        if any(deadline < now for deadline in list(self._deadlines.values())):
            self._log.warning(
                f"{self.name} overdue",
                "the %s tier has not answered in time; it is left alone for a while",
                self.name,
            )
            self._record(False)
        return not self.breaker.open(now)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which chunks are there; none when the tier cannot say."""
        if not self.readable or not self.healthy():
            return [False] * len(keys)
        try:
            return self.tier.contains(keys)
        except Unavailable as error:
            self._sick(error)
            return [False] * len(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer], size_bytes: int) -> list[Status]:
        """`Tier.get`, watched. `size_bytes`: of all chunks."""
        with self._lock:
            if self._reads == 0:
                self._reads_began, self._read_bytes = time.monotonic(), 0
            self._reads += 1
        loaded_bytes = 0
        try:
            with self._watched(size_bytes):
                statuses = self._reported(self.tier.get(keys, buffers))
            loaded_bytes = size_bytes * statuses.count(Status.OK) // len(keys)
            return statuses
        finally:
            with self._lock:
                self._reads -= 1
                self._read_bytes += loaded_bytes
                if self._gate is not None and self._reads == 0 and self._read_bytes:
                    seconds = time.monotonic() - self._reads_began
                    self._gate.loaded(self.name, self._read_bytes, seconds)

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer], size_bytes: int) -> list[Status]:
        """`Tier.put`, watched. `size_bytes`: of all chunks."""
        with self._watched(size_bytes):
            return self._reported(self.tier.put(keys, buffers))

    def close(self) -> None:
        """Close the tier."""
        if isinstance(self.breaker, ProbedBreaker):
            self.breaker.stop()
        self.tier.close()

    def _reported(self, statuses: list[Status]) -> list[Status]:
        if Status.UNAVAILABLE in statuses:
            self._sick("it answers with errors")
        else:
            self._record(True)
        return statuses

    def _sick(self, why: object) -> None:
        self._log.warning(self.name, "the %s tier fails and is left alone for a while: %s", self.name, why)
        self._record(False)

    def _record(self, healthy: bool) -> None:
        with self._lock:
            self.breaker.record(healthy, time.monotonic())

    @contextmanager
    def _watched(self, size_bytes: int) -> Iterator[None]:
        """I/O that should be over within the tier's deadline. Nothing can end it: it goes to memory
        that SGLang takes back once the call returns. But nothing new is begun while it is overdue."""
        mark = object()
        self._deadlines[mark] = time.monotonic() + TIER_DEADLINE_S + size_bytes / DEFER_BYTES_PER_S
        try:
            yield
        finally:
            del self._deadlines[mark]
