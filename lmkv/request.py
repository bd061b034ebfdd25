"""What the store remembers of one request."""

from lmkv.index import Entry


class Request:
    """What the store remembers of one request."""

    __slots__ = (
        "busy",
        "cacheable",
        "deadline",
        "done",
        "failed",
        "gated",
        "hit_leases",
        "loading",
        "number",
        "offered",
        "promoted",
        "promoted_bytes",
        "promoted_leases",
        "store_stopped",
        "used",
        "wait_until",
    )

    def __init__(self, number: int, cacheable: bool, wait_until: float | None = None) -> None:
        self.number = number
        #: False: neither looked up nor stored.
        self.cacheable = cacheable
        #: Until then another engine is expected to store its chunks; None if none is.
        self.wait_until = wait_until
        #: Its loads have to beat computing. What another engine computes for a request that waits for it is
        #: not computed here.
        self.gated = wait_until is None
        #: When it stops waiting for promotions; None while it waits for nothing.
        self.deadline: float | None = None
        self.done = False
        #: Entries leased to it until it claims them: found in host memory, or promoted for it.
        self.hit_leases: dict[bytes, Entry] = {}
        self.promoted_leases: dict[bytes, Entry] = {}
        #: Its last lookup found everything ready; leases it does not claim in that step end.
        self.offered = False
        #: Entries being copied into the engine for it.
        self.loading: dict[bytes, Entry] = {}
        #: Keys promoted for it, by the tier they came from.
        self.promoted: dict[bytes, str] = {}
        #: Slot bytes of its promotions, in flight or leased.
        self.promoted_bytes = 0
        #: Keys whose promotion failed while it waited.
        self.failed: set[bytes] = set()
        #: A chunk of it did not fit; the ones after it are of no use.
        self.store_stopped = False
        #: Entries it loaded or stored, in that order, and stores and writes still under way.
        self.used: list[Entry] = []
        self.busy = 0

    def waits(self, now: float) -> bool:
        """Whether another engine is still expected to store its chunks."""
        return self.wait_until is not None and now < self.wait_until
