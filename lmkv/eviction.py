"""Which chunk leaves the host tier first.

A policy holds exactly the entries that may be evicted: the index adds an entry when its last
lease ends and takes it out when it is leased, so a policy never meets one that is in use.
"""

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

    def insert(self, entry: Evictable) -> None:
        """The entry became evictable; it was used just now."""

    def remove(self, entry: Evictable) -> None:
        """The entry is leased or gone."""

    def victim(self) -> Evictable | None:
        """The entry to evict next, left in place; None when there is none."""


class LRU:
    """Least recently used first: a doubly linked ring through the entries."""

    def __init__(self) -> None:
        self._ring = ring = Evictable()
        ring.older = ring.newer = ring

    def insert(self, entry: Evictable) -> None:
        """Make `entry` the most recently used one."""
        ring = self._ring
        newest = ring.older
        entry.older = newest
        entry.newer = ring
        newest.newer = entry  # type: ignore[union-attr]  # the ring has no open ends
        ring.older = entry

    def remove(self, entry: Evictable) -> None:
        """Unlink `entry`, which must be in the ring."""
        older, newer = entry.older, entry.newer
        older.newer = newer  # type: ignore[union-attr]  # the ring has no open ends
        newer.older = older  # type: ignore[union-attr]  # the ring has no open ends
        entry.older = entry.newer = None

    def victim(self) -> Evictable | None:
        """The least recently used entry."""
        oldest = self._ring.newer
        return None if oldest is self._ring else oldest
