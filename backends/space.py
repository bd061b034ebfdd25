"""Which segment a process writes to.

All segments of a directory are one pool. A process takes one to write to by locking its file, and lets it go
when it is full; a killed process lets it go too, and the next one that needs space goes on where it ended. So
who stores more takes more: there are as many segments as fit into the capacity, then whoever needs one takes
the oldest that nobody writes to, whoever filled it.
"""

import errno
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from lmkv.backends.catalog import Catalog
from lmkv.backends.segments import BLOCK_BYTES, MAX_SEGMENTS, Directory, Scan, SegmentFile, max_chunks_for

#: After the disk had no room for one more segment, the tier makes do with those it has for so long.
RETRY_CREATE_S = 60.0
#: The same if it has none to make do with: then it stores nothing meanwhile.
RETRY_FIRST_S = 1.0
#: Less than this share of a segment is not worth going on with.
_WORTHWHILE_SHARE = 4


class Claim(NamedTuple):
    """A segment that only this process writes to, until nobody holds the file."""

    segment: int
    file: SegmentFile
    tail: int  # bytes
    generation: int
    #: It may hold chunks that are still offered: to be recycled before it is written to.
    full: bool = False


class Space:
    """Takes segments. One thread at a time."""

    def __init__(
        self, directory: Directory, catalog: Catalog, failed: Callable[[str, Exception], None]
    ) -> None:
        """`failed` is told what the disk refused."""
        self._directory = directory
        self._catalog = catalog
        self._failed = failed
        self._next_create = 0.0

    def claim(self, needed_bytes: int) -> Claim | None:
        """A segment with room for a record; None if all are being written to. Raises OSError."""
        with self._catalog.changing():
            scan = self._scan()
            allowed = self._directory.max_segments(self._catalog.capacity_bytes, scan)
            self._shrink(scan, allowed)
            claim = self._unfinished(scan, needed_bytes)
            if claim is None and len(scan.segments) < allowed:
                claim = self._create(scan)
            claim = claim or self._oldest(scan)
            if claim is None:
                self._next_create = min(self._next_create, time.monotonic() + RETRY_FIRST_S)
            return claim

    def oldest(self) -> Claim | None:
        """A segment that holds chunks, to recycle it; None if all are being written to. Raises OSError."""
        with self._catalog.changing():
            scan, known = self._scan(), self._catalog.index.segments
            scan.segments = {s for s in scan.segments if s in known and known[s].members}
            return self._oldest(scan)

    def adopt(self, capacity_bytes: int) -> None:
        """Tidy up what other processes left, and make it fit into the capacity, which is the directory's from
        now on. Raises OSError."""
        catalog, max_chunks = self._catalog, max_chunks_for(capacity_bytes)
        with catalog.changing():
            self._directory.delete_leftovers()
            scan = self._directory.scan()
            self._shrink(scan, self._directory.max_segments(capacity_bytes, scan))
            for segment in self._by_age(scan):
                if catalog.index.chunks > max_chunks and self._lock(segment):
                    catalog.recycle(segment)
            catalog.agree_on_capacity(capacity_bytes)

    def _scan(self) -> Scan:
        if not self._directory.in_place():  # the segments under its path are somebody else's
            raise FileNotFoundError(errno.ENOENT, "the directory was removed or replaced")
        return self._directory.scan()

    def _shrink(self, scan: Scan, allowed: int) -> None:
        """Delete what is not allowed, oldest first."""
        for segment in self._by_age(scan):
            if len(scan.segments) <= allowed:
                break
            if self._lock(segment) is not None:
                self._catalog.recycle(segment)
                self._directory.delete_segment(segment)
                scan.segments.discard(segment)

    def _by_age(self, scan: Scan) -> list[int]:
        """Existing segments, what the journal does not know coming first, then what was recycled first."""
        known = self._catalog.index.segments
        return sorted(scan.segments - known.keys()) + [s for s in known if s in scan.segments]

    def _lock(self, segment: int) -> SegmentFile | None:
        try:
            file = self._directory.open_segment(segment, os.O_RDWR)
        except OSError:  # deleted or replaced by somebody else
            return None
        return file if file.lock() else None

    def _allocate(self, file: SegmentFile) -> bool:
        """Whether a segment has all of its blocks; one whose maker was killed may not have got them yet."""
        try:
            self._directory.preallocate(file)
        except OSError as error:
            self._failed("preallocate", error)
            return False
        return True

    def _unfinished(self, scan: Scan, needed_bytes: int) -> Claim | None:
        """A segment with room left: that of a process that ended, or in which a large chunk had no room."""
        segment_bytes = self._directory.segment_bytes
        needed_bytes = max(needed_bytes, segment_bytes // _WORTHWHILE_SHARE)
        for segment in reversed(self._by_age(scan)):
            known = self._catalog.index.segments.get(segment)
            tail = known.tail * BLOCK_BYTES if known else 0
            if tail + needed_bytes > segment_bytes or (file := self._lock(segment)) is None:
                continue
            if self._allocate(file):
                generation = known.generation if known else self._catalog.recycle(segment)
                return Claim(segment, file, tail, generation)
        return None

    def _create(self, scan: Scan) -> Claim | None:
        """One more segment, if the disk has room."""
        if time.monotonic() < self._next_create:
            return None
        names = (s for s in range(MAX_SEGMENTS) if s not in scan.segments)
        segment = next((s for s in names if not self._directory.has_segment(s)), None)
        if segment is None:
            return None
        generation = self._catalog.recycle(segment)  # what lay in a lost file of this name
        try:
            file = self._directory.open_segment(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if file.lock():
                self._directory.preallocate(file)
                return Claim(segment, file, 0, generation)
        except OSError as error:
            self._directory.delete_segment(segment)
            self._next_create = time.monotonic() + RETRY_CREATE_S
            self._failed("preallocate", error)
        return None

    def _oldest(self, scan: Scan) -> Claim | None:
        for segment in self._by_age(scan):
            if (file := self._lock(segment)) and self._allocate(file):
                return Claim(segment, file, 0, 0, full=True)
        return None
