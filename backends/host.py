"""The host tier on its own: chunks in private, preallocated memory, evicted least recently used first."""

import mmap
import threading
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmkv.config import load_table, resolve_host_capacity
from lmkv.tier import (
    Buffer,
    Status,
    Tier,
    TierInfo,
    TierStats,
    buffer_bytes,
    check_batch,
    gather,
    scatter,
)

#: Chunks start on cache lines; coarser would waste memory on small chunks.
ALIGNMENT_BYTES = 64


class HostTier(Tier):
    """Chunks in one anonymous mapping of `capacity` bytes; the index beside it does not count.

    Free space is a sorted list of extents, first fit, joined with their neighbours when freed. One
    lock covers the index and the copies, so no copy can meet an eviction.
    """

    @classmethod
    def open(cls, settings: Mapping[str, Any]) -> "HostTier":
        """Open with the settings of the table `[host]`. Raises ConfigError."""
        return cls(resolve_host_capacity(load_table("host", settings)))

    def __init__(self, capacity_bytes: int) -> None:
        self._info = TierInfo("host", capacity_bytes, persistent=False, shared=False, alignment_bytes=1)
        # A private mapping, because Python's default, a shared one, gets no transparent huge pages.
        mapping = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(mapping)
        np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE] = 0  # fault it in now, not on a first store
        self._lock = threading.Lock()
        self._chunks: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # start, length; oldest use first
        self._free = [(0, capacity_bytes)]  # start, length; sorted, never adjacent
        self._used_bytes = 0
        self._counters: Counter[str] = Counter()
        self._closed = False

    @property
    def info(self) -> TierInfo:
        return self._info

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._check(keys)
        return [key in self._chunks for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers, writable=True)
        return list(map(self._get, keys, buffers))

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers)
        return list(map(self._put, keys, buffers))

    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        self._check(keys)
        with self._lock:
            return [Status.OK if self._forget(key) else Status.MISS for key in keys]

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(len(self._chunks), self._used_bytes, dict(self._counters))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._chunks.clear()
            self._used_bytes = 0
            self._memory = memoryview(b"")  # drops the last reference to the mapping

    def _check(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer] | None = None, *, writable: bool = False
    ) -> None:
        """Raise ValueError on what only a programming error can cause."""
        if self._closed:
            raise ValueError("the host tier is closed")
        check_batch(keys, buffers, writable=writable)

    def _get(self, key: bytes, buffer: Buffer) -> Status:
        with self._lock:
            if key not in self._chunks:
                self._counters["get_misses"] += 1
                return Status.MISS
            start, length = self._chunks[key]
            if length != buffer_bytes(buffer):
                self._forget(key)
                self._counters["corrupt"] += 1
                return Status.CORRUPT
            self._chunks.move_to_end(key)
            scatter(self._memory[start : start + length], buffer)
            self._counters["get_hits"] += 1
            return Status.OK

    def _put(self, key: bytes, buffer: Buffer) -> Status:
        length = buffer_bytes(buffer)
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
                return Status.OK
            if not 0 < _extent(length) <= self._info.capacity_bytes or self._closed:
                self._counters["put_rejected"] += 1
                return Status.REJECTED
            start = self._allocate(_extent(length))
            gather(self._memory[start : start + length], buffer)
            self._chunks[key] = (start, length)
            self._used_bytes += length
            self._counters["puts"] += 1
            return Status.OK

    def _allocate(self, extent: int) -> int:
        """Take `extent` bytes, at most the capacity, evicting until they are free in one piece."""
        while True:
            for index, (start, free) in enumerate(self._free):
                if free >= extent:
                    self._free[index : index + 1] = [(start + extent, free - extent)] if free > extent else []
                    return start
            self._forget(next(iter(self._chunks)))
            self._counters["evictions"] += 1

    def _forget(self, key: bytes) -> bool:
        """Drop a chunk and give back its extent, joined with the free ones beside it."""
        if key not in self._chunks:
            return False
        start, length = self._chunks.pop(key)
        self._used_bytes -= length
        end = start + _extent(length)
        index = bisect_left(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))
        return True


def _extent(length: int) -> int:
    return -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
