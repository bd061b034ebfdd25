"""Whether loading KV beats computing it again, by the speeds measured so far."""

import threading
import time
from collections.abc import Callable

#: What each new measurement leaves of the older ones: about ten count.
_DECAY = 0.9
#: A speed this old is measured anew, by letting one load through.
_STALE_S = 10.0


class Speed:
    """Amount per second, over the last few measurements, weighted by their length."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Note that `amount` took `seconds`."""
        self._amount = _DECAY * self._amount + amount
        self._seconds = _DECAY * self._seconds + seconds

    @property
    def per_s(self) -> float | None:
        """None before anything was measured."""
        return self._amount / self._seconds if self._seconds > 0 else None


class Gate:
    """Compares the time to load chunks from a tier with the time to compute their tokens.

    Both are taken from what this engine did: prefill steps, and reads from the submission of a request's
    chunks to the arrival of the last, queues included. What was not measured yet is let through. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Tokens a second.
        self.prefill = Speed()
        #: Bytes a second, by tier.
        self.loads: dict[str, Speed] = {}
        self._measured_at: dict[str, float] = {}

    def computed(self, tokens: int, seconds: float) -> None:
        """Note that a step computed so many prompt tokens."""
        with self._lock:
            self.prefill.add(tokens, seconds)

    def loaded(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Note that chunks came from a tier."""
        with self._lock:
            self.loads.setdefault(tier, Speed()).add(size_bytes, seconds)
            self._measured_at[tier] = self._clock()

    def recompute_s(self, tokens: int) -> float | None:
        """Seconds to compute so many tokens; None if that was not measured."""
        speed = self.prefill.per_s
        return tokens / speed if speed else None

    def worth(self, tier: str, size_bytes: int, tokens: int) -> bool:
        """Whether to load chunks of `size_bytes` that hold the KV of `tokens`."""
        with self._lock:
            recompute_s = self.recompute_s(tokens)
            speed = self.loads[tier].per_s if tier in self.loads else None
            if recompute_s is None or not speed or size_bytes / speed <= recompute_s:
                return True
            now = self._clock()
            if now - self._measured_at[tier] < _STALE_S:
                return False
            self._measured_at[tier] = now
            return True
