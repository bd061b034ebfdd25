"""A disk that is full, fails, or writes less than it was told to, at each of the first system calls."""

import contextlib
import errno
import os
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from lmkv.backends.file import FileTier
from lmkv.config import ConfigError
from lmkv.tier import Status
from tests.test_file_tier import CHUNK, MiB, get, key, put
from tests.torture.base import Run, check_served, check_tidy, hasty, known

CAPACITY = 88 * MiB  # of ten segments
#: Calls that change something on a disk.
WRITES = ("pwritev", "pwrite")
CHANGES = (*WRITES, "fdatasync", "fsync", "posix_fallocate", "ftruncate", "rename")
KINDS = ("ENOSPC", "EIO", "short")
CALLS = 20
#: Each kind at each call, from a new directory on and from a running tier on, once and until further notice.
CASES = len(KINDS) * CALLS * 4
RESUME_S = 5.0


class Disk:
    """Counts calls, and lets some fail."""

    def __init__(self, kind: str, first: int, *, once: bool) -> None:
        self._kind, self._first, self._once = kind, first, once
        self._calls = 0
        self.failed = 0

    def _fails(self) -> bool:
        self._calls += 1
        fails = self._calls == self._first if self._once else self._calls >= self._first
        self.failed += fails
        return fails

    def _patched(self, name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            if not self._fails():
                return real(*arguments)
            if self._kind != "short":
                raise OSError(getattr(errno, self._kind), "injected")
            fd, data, offset = arguments
            return real(fd, data[: len(data) // 2], offset)

        return patch.object(os, name, call)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """While the block runs."""
        with contextlib.ExitStack() as stack:
            for name in WRITES if self._kind == "short" else CHANGES:
                stack.enter_context(self._patched(name))
            yield


def disk_faults(run: Run) -> str:
    """A tier on such a disk; when the disk is well again it stores, and a restart finds all that it said."""
    failed = refused = kept = 0
    longest_s = 0.0
    with hasty():
        for chance in run.rounds():
            case = run.at % CASES
            kind, first = KINDS[case % 3], case // 3 % CALLS + 1
            running, once = divmod(case // 3 // CALLS, 2)
            disk, path = Disk(kind, first, once=bool(once)), run.path / str(run.at)
            tier = FileTier(path, CAPACITY) if running else None
            stored: set[int] = set()
            removed: set[int] = set()
            with disk.failing():
                try:
                    tier = tier or FileTier(path, CAPACITY)
                except ConfigError:
                    refused += 1
                else:
                    stored, removed = _use(tier, chance)
            failed += disk.failed
            tier = tier or FileTier(path, CAPACITY)
            longest_s = max(longest_s, _resume_s(tier, RESUME_S * run.patience))
            evicted = tier.stats().counters["evicted"]
            tier.close()
            tier = FileTier(path, CAPACITY)
            check_tidy(path, tier, CAPACITY)
            lost = stored - set(known(tier))
            assert len(lost) <= evicted, f"{kind} at call {first}: {len(lost)} acknowledged chunks are lost"
            assert not removed & set(known(tier)), f"{kind} at call {first}: what was removed is there"
            kept += check_served(tier, known(tier), CHUNK)
            assert tier.stats().counters["corrupt"] == 0
            tier.close()
    return (
        f"nothing partial visible; {failed:,} calls failed, {refused} starts were refused; "
        f"{kept:,} reads after a restart; stores went on within {longest_s:.1f} s"
    )


def _use(tier: FileTier, chance: random.Random) -> tuple[set[int], set[int]]:
    """Store, read and remove; what is to be there, less than half of what fits, and what not, also after a
    restart."""
    stored: set[int] = set()
    removed: set[int] = set()
    for first in range(0, 120, 10):
        numbers = list(range(first, first + 10))
        statuses = put(tier, numbers)
        assert set(statuses) <= {Status.OK, Status.UNAVAILABLE, Status.REJECTED}
        stored |= {n for n, status in zip(numbers, statuses, strict=True) if status is Status.OK}
        statuses = get(tier, sorted(stored))
        assert set(statuses) <= {Status.OK, Status.MISS}
        # Where the disk has no room for another segment, the only one is recycled.
        assert statuses.count(Status.MISS) <= tier.stats().counters["evicted"]
        # One that was refused may be there, if all of it is.
        assert set(get(tier, numbers)) <= {Status.OK, Status.MISS}
        gone = chance.randrange(first + 10)
        if tier.remove([key(gone)]) != [Status.UNAVAILABLE]:
            removed.add(gone)
        stored.discard(gone)
        assert get(tier, [gone]) == [Status.MISS]
    return stored, removed


def _resume_s(tier: FileTier, limit_s: float) -> float:
    """How long it takes until the tier stores again."""
    begun = time.monotonic()
    while put(tier, [10_000, 10_001]) != [Status.OK] * 2:
        assert time.monotonic() - begun < limit_s, f"stores did not go on within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - begun
