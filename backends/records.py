"""Records of the file tier: made for a batch of chunks, written by few system calls, read back when their
segment is recycled.

A record is one block of 4,096 bytes that begins with the header of `lmkv.record`, and the payload, padded to
whole blocks. The records of a batch lie next to each other.
"""

import errno
import os
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lmkv.backends.chunks import Member
from lmkv.backends.journal import Row, record_blocks
from lmkv.backends.segments import BLOCK_BYTES, SegmentFile
from lmkv.backends.vectors import Extent, Payload, Scratch, memory, runs
from lmkv.record import HEADER_BYTES, decode_header, encode_header, verify
from lmkv.tier import Status, gather


class Record(NamedTuple):
    """A record to write."""

    key: bytes
    block: memoryview  # with its header
    payload: Payload
    created_ns: int

    @property
    def blocks(self) -> int:
        """Blocks that it takes."""
        return record_blocks(self.payload.length)


class Piece(NamedTuple):
    """Records to write next to each other. Their place is taken, and `file` keeps it until then."""

    file: SegmentFile
    start: int  # bytes
    end: int
    records: list[Record]
    rows: list[Row]
    again: bool  # reinserted
    outcome: list[Status]  # one status in the end, for other threads with the same keys


def prepare(items: Sequence[tuple[bytes, Payload]], scratch: Scratch) -> list[Record]:
    """Records of at most a run. Their header blocks lie in this thread's scratch."""
    records = []
    for block, (key, payload) in zip(scratch.blocks, items, strict=False):
        now = time.time_ns()
        block[:] = encode_header(key, payload.pieces, now).ljust(BLOCK_BYTES, b"\0")
        records.append(Record(key, block, payload, now))
    return records


def write(piece: Piece, scratch: Scratch) -> None:
    """Write a piece by as few system calls as it takes, and make it durable. Raises OSError."""
    extents = [
        Extent.of(row.offset, record.payload) for row, record in zip(piece.rows, piece.records, strict=True)
    ]
    at = piece.start
    for run in runs(extents):
        records = piece.records[run]
        parts: list[memoryview] = []
        for record, vectors in zip(records, scratch.vectors([r.payload for r in records]), strict=True):
            pieces, length, bounces = record.payload
            if bounces:
                gather(vectors[0][:length], pieces)
                vectors[0][length:] = bytes(vectors[0].nbytes - length)
            parts += (record.block, *vectors)
        size = sum(part.nbytes for part in parts)
        if os.pwritev(piece.file.fd, parts, at) != size:
            raise OSError(errno.EIO, "short write")
        at += size
    os.fdatasync(piece.file.fd)


def read_back(file: SegmentFile, members: Sequence[Member]) -> list[Record]:
    """The records of some members of a segment that are as they were written. Raises OSError."""
    if not members:
        return []
    ends = list(accumulate((record_blocks(m.length) * BLOCK_BYTES for m in members), initial=0))
    view = memory(ends[-1])
    for run in runs([Extent(member.place, record_blocks(member.length)) for member in members]):
        part = view[ends[run.start] : ends[run.stop]]
        os.preadv(file.fd, [part], (members[run.start].place & 0xFFFF) * BLOCK_BYTES)
    records = []
    for start, (_, length, key, _) in zip(ends, members, strict=False):
        record = view[start : start + record_blocks(length) * BLOCK_BYTES]
        header = decode_header(record[:HEADER_BYTES])
        if header and verify(header, key, record[BLOCK_BYTES : BLOCK_BYTES + length]):
            payload = Payload((record[BLOCK_BYTES:],), length, bounces=False)
            records.append(Record(key, record[:BLOCK_BYTES], payload, header.created_ns))
    return records
