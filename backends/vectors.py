"""What one system call of the file tier moves: the vectors of neighbouring records.

A record goes to disk as a header block and its payload, in whole blocks. The pieces of a chunk's buffer
are vectors themselves if the disk can take them from where they lie; otherwise the payload bounces: it
goes through aligned memory, of which each thread keeps a bounded amount.
"""

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from lmkv.backends.journal import record_blocks
from lmkv.backends.segments import BLOCK_BYTES
from lmkv.tier import Buffer, buffer_bytes, pieces

#: Vectors per system call: Linux takes no more (IOV_MAX).
MAX_VECTORS = 1024
#: Records per system call: each is a header and a payload.
MAX_RUN_RECORDS = MAX_VECTORS // 2
#: Bytes per system call, unless one record is larger: enough to keep any disk busy, and short enough
#: that a second thread verifies one run while another is read.
MAX_RUN_BYTES = 64 * 2**20
#: Bytes that bounce per system call, unless one record is larger. Each thread that ever bounced keeps so
#: much memory: with its header blocks 6 MiB, for the store's nine threads 54 MiB at most.
MAX_BOUNCE_BYTES = 4 * 2**20


class Payload(NamedTuple):
    """A chunk's buffer, and whether it bounces."""

    pieces: Sequence[memoryview]
    length: int
    bounces: bool

    @classmethod
    def of(cls, buffer: Buffer, *, direct: bool) -> "Payload":
        """With `direct`, for O_DIRECT: addresses and lengths of all pieces must be whole blocks."""
        parts, length = pieces(buffer), buffer_bytes(buffer)
        whole = length % BLOCK_BYTES == 0 and len(parts) < MAX_VECTORS
        if whole and direct:
            whole = not any((_address(part) | part.nbytes) % BLOCK_BYTES for part in parts)
        return cls(parts, length, not whole)

    @property
    def bounced_bytes(self) -> int:
        """Bounce memory it takes: whole blocks, or none."""
        return (record_blocks(self.length) - 1) * BLOCK_BYTES if self.bounces else 0


class Extent(NamedTuple):
    """What a record takes on disk and in a system call."""

    place: int  # in blocks
    blocks: int
    vectors: int = 2
    bounced_bytes: int = 0

    @classmethod
    def of(cls, place: int, payload: Payload) -> "Extent":
        vectors = 2 if payload.bounces else 1 + len(payload.pieces)
        return cls(place, record_blocks(payload.length), vectors, payload.bounced_bytes)


def runs(extents: Sequence[Extent], max_bytes: int = MAX_RUN_BYTES) -> Iterator[slice]:
    """Slices of a list sorted by place that each lie in one piece and fit one system call."""
    first = size = vectors = bounced = end = 0
    for i, extent in enumerate(extents):
        full = (
            vectors + extent.vectors > MAX_VECTORS
            or (size + extent.blocks) * BLOCK_BYTES > max_bytes
            or bounced + extent.bounced_bytes > MAX_BOUNCE_BYTES
        )
        # A run ends with its segment: records never lie across two, but places may look adjacent.
        if i > first and (extent.place != end or extent.place & 0xFFFF == 0 or full):
            yield slice(first, i)
            first, size, vectors, bounced = i, 0, 0, 0
        size += extent.blocks
        vectors += extent.vectors
        bounced += extent.bounced_bytes
        end = extent.place + extent.blocks
    if extents:
        yield slice(first, len(extents))


class Scratch(threading.local):
    """Aligned memory for one system call, per thread."""

    def __init__(self) -> None:
        view = memory(MAX_RUN_RECORDS * BLOCK_BYTES)
        #: For headers.
        self.blocks = [view[i : i + BLOCK_BYTES] for i in range(0, view.nbytes, BLOCK_BYTES)]
        self._bounce = memoryview(b"")

    def vectors(self, payloads: Sequence[Payload]) -> list[Sequence[memoryview]]:
        """Memory of whole blocks for each payload of a run: its own pieces, or one view that stays good
        until this thread's next call."""
        ends = list(accumulate((payload.bounced_bytes for payload in payloads), initial=0))
        view = self._bounce
        if ends[-1] > MAX_BOUNCE_BYTES:  # one large record
            view = memory(ends[-1])
        elif ends[-1] > view.nbytes:
            view = self._bounce = memory(MAX_BOUNCE_BYTES)
        return [
            [view[start:end]] if payload.bounces else payload.pieces
            for payload, (start, end) in zip(payloads, pairwise(ends), strict=True)
        ]


def memory(size_bytes: int) -> memoryview:
    """Aligned memory, of huge pages where it is large: the disk moves those several times as fast.

    Private, because Python's default, a shared mapping, gets none.
    """
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def _address(view: memoryview) -> int:
    if not view.readonly:  # six times as fast as through numpy
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
