"""Which chunk leaves the host tier first.

A policy holds exactly the entries that may be evicted: the index adds an entry when its last
lease ends and takes it out when it is leased, so a policy never meets one that is in use.
"""

from collections.abc import Iterator
from typing import Protocol


class Evictable:
    """Links and owner of one entry, kept in the entry itself to save memory."""

    __slots__ = ("newer", "older", "owner")

    def __init__(self) -> None:
        self.older: Evictable | None = None
        self.newer: Evictable | None = None
        #: Number of the request that used the entry last.
        self.owner = 0


class EvictionPolicy(Protocol):
    """Order of eviction among unleased entries. Every call costs O(1)."""

    def insert(self, entry: Evictable, *, coldest: bool = False) -> None:
        """The entry became evictable. It was used just now; or it goes, with `coldest`, before all others
        but those that were put in so before it."""

    def remove(self, entry: Evictable) -> None:
        """The entry is leased or gone."""

    def victim(self) -> Evictable | None:
        """The entry to evict next, left in place; None when there is none."""

    def oldest_first(self) -> Iterator[Evictable]:
        """All entries in the order of eviction. Nothing may change meanwhile."""


class LRU:
    """What was put in as coldest, then the least recently used: doubly linked rings through the entries."""

    def __init__(self) -> None:
        self._used, self._cold = _ring(), _ring()

    def insert(self, entry: Evictable, *, coldest: bool = False) -> None:
        """Make `entry` the most recently used one, or the last of those that go first."""
        ring = self._cold if coldest else self._used
        newest = ring.older
        entry.older = newest
        entry.newer = ring
        newest.newer = entry  # type: ignore[union-attr]  # the ring has no open ends
        ring.older = entry

    def remove(self, entry: Evictable) -> None:
        """Unlink `entry`, which must be in a ring."""
        older, newer = entry.older, entry.newer
        older.newer = newer  # type: ignore[union-attr]  # the ring has no open ends
        newer.older = older  # type: ignore[union-attr]  # the ring has no open ends
        entry.older = entry.newer = None

    def victim(self) -> Evictable | None:
        """The entry to evict next."""
        for ring in (self._cold, self._used):
            if ring.newer is not ring:
                return ring.newer
        return None

    def oldest_first(self) -> Iterator[Evictable]:
        """See `EvictionPolicy.oldest_first`."""
        for ring in (self._cold, self._used):
            entry = ring.newer
            while entry is not None and entry is not ring:
                yield entry
                entry = entry.newer


def _ring() -> Evictable:
    ring = Evictable()
    ring.older = ring.newer = ring
    return ring
