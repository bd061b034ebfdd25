"""Which prefixes of a prompt can be restored when its pages lie in several pools.

SGLang's rules (`PoolHitPolicy` in mem_cache/hicache_storage.py): a pool with ALL_PAGES needs every page
of the prefix, one with TRAILING_PAGES (a sliding window, a recurrent state) only the last few. The latter
lie only where a request ended, so 5 pages may be restorable when 4 and 3 are not; every length is named,
because the ranks intersect their sets.
"""

from collections.abc import Sequence


def leading(present: Sequence[bool]) -> int:
    """How many pages are there from the first on without a gap."""
    return present.index(False) if False in present else len(present)


def windows(present: Sequence[bool], window: int, limit: int) -> set[int]:
    """Prefix lengths up to `limit` (pages) whose last `window` pages, or all if fewer, are there."""
    found, run = set(), 0
    for length in range(1, limit + 1):
        run = run + 1 if present[length - 1] else 0
        if run >= min(window, length):
            found.add(length)
    return found
