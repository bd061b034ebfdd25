"""The file tier's journal: which chunk lies where, as fixed-size entries in an append-only file.

One entry is 64 little-endian bytes, so a damaged one is skipped without losing its neighbours:

    offset size  field
         0    1  kind: 1 namespace, 2 put, 3 remove, 4 segment recycled
         1    1  writer of the segment (the number in its file name)
         2    2  number of the namespace, as defined by an earlier namespace entry of this file
         4    2  segment number
         6    2  offset of the record in its segment, in blocks of 4,096 bytes
         8    4  generation of the segment: how often it was recycled
        12    4  length of the payload in bytes
        16    4  time, Unix seconds (for a put: when the chunk was created)
        20   36  the key behind its namespace digest; in a namespace entry the digest and 4 zero bytes
        56    8  XXH3-64 of bytes 0..55

A put holds while its generation is its segment's newest and no remove names its place, whatever the
order of the entries; so several journals, each of one writer, add up to one index.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from lmkv.keys import KEY_BYTES, NAMESPACE_BYTES

NAMESPACE, PUT, REMOVE, RECYCLE = 1, 2, 3, 4

ENTRY_BYTES = 64
_ENTRY = np.dtype(
    [
        ("kind", "u1"),
        ("writer", "u1"),
        ("namespace", "<u2"),
        ("number", "<u2"),
        ("offset", "<u2"),
        ("generation", "<u4"),
        ("length", "<u4"),
        ("time_s", "<u4"),
        ("rest", f"V{KEY_BYTES - NAMESPACE_BYTES}"),
        ("checksum", "<u8"),
    ]
)
_BODY = struct.Struct("<BBHHHIII36s")
_CHECKSUM = struct.Struct("<Q")
assert _ENTRY.itemsize == _BODY.size + _CHECKSUM.size == ENTRY_BYTES

#: A namespace is one model served one way; a directory that sees more than this is misused.
MAX_NAMESPACES = 1024
#: A reader trusts no file size: twice the entries of the largest index (`segments.MAX_CHUNKS`) fit.
MAX_READ_BYTES = 2**30

#: Growth that is never worth a compaction: reading it takes milliseconds.
_SLACK_BYTES = 4096 * ENTRY_BYTES

Array = NDArray[Any]


class Row(NamedTuple):
    """One entry to append. Segment id: writer << 16 | number. Offset in blocks, length in bytes."""

    segment: int
    generation: int
    key: bytes = b""
    offset: int = 0
    length: int = 0
    time_s: int = 0


@dataclass
class Image:
    """The valid entries of one journal (or of its newest part), in order."""

    entries: Array
    #: Digest by number.
    namespaces: dict[int, bytes]
    damaged: int
    #: Bytes up to the end of the last whole entry.
    size_bytes: int


@dataclass
class Replay:
    """What some journals say together. Segments go by their id."""

    #: Per image, which entries are puts that hold.
    live: list[Array] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)
    #: End of the last record of each segment's newest generation, in blocks.
    tails: dict[int, int] = field(default_factory=dict)


def record_blocks(length: int) -> int:
    """Blocks of 4,096 bytes that a record takes: one for the header, the payload rounded up."""
    return 1 + (length + 4095 >> 12)


def segment_ids(entries: Array) -> Array:
    """Segment id of each entry."""
    ids: Array = entries["writer"].astype(np.int64) << 16 | entries["number"]
    return ids


def open_journal(path: Path) -> int:
    """File descriptor for reading. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_journal(fd: int, start: int = 0, known: dict[int, bytes] | None = None) -> Image:
    """The entries of a journal from byte `start` on. `known`: namespaces defined before that.

    A torn or damaged entry is left out and counted. Raises OSError.
    """
    size = min(os.fstat(fd).st_size, MAX_READ_BYTES) - start
    raw = os.pread(fd, size, start) if size > 0 else b""
    count = len(raw) // ENTRY_BYTES
    entries = np.frombuffer(raw, _ENTRY, count)
    ends = range(_BODY.size, count * ENTRY_BYTES, ENTRY_BYTES)
    sums = np.fromiter((xxh3_64_intdigest(raw[end - _BODY.size : end]) for end in ends), np.uint64, count)
    valid = entries["checksum"] == sums
    damaged = count - int(valid.sum()) + (len(raw) % ENTRY_BYTES != 0)
    entries = entries[valid]
    namespaces = dict(known or {})
    for entry in entries[entries["kind"] == NAMESPACE]:
        namespaces[int(entry["namespace"])] = entry["rest"].tobytes()[:NAMESPACE_BYTES]
    return Image(entries, namespaces, damaged, start + count * ENTRY_BYTES)


def replay(images: Sequence[Image]) -> Replay:
    """Which puts hold, by the rule above, over all journals together."""
    result = Replay()
    views = []
    for image in images:
        entries = image.entries[image.entries["kind"] != NAMESPACE]
        ids, inverse = np.unique(segment_ids(entries), return_inverse=True)
        newest = np.zeros(len(ids), np.int64)
        np.maximum.at(newest, inverse, entries["generation"])
        for segment, generation in zip(ids.tolist(), newest.tolist(), strict=True):
            result.newest[segment] = max(result.newest.get(segment, 0), generation)
    for image in images:
        entries = image.entries
        ids, inverse = np.unique(segment_ids(entries), return_inverse=True)
        newest = np.array([result.newest.get(segment, 0) for segment in ids.tolist()], np.int64)
        kind = entries["kind"]
        current = ((kind == PUT) | (kind == REMOVE)) & (entries["generation"] == newest[inverse])
        places = segment_ids(entries) << 16 | entries["offset"]
        views.append((current & (kind == PUT), places, places[current & (kind == REMOVE)]))
        ends = entries["offset"] + 1 + (entries["length"].astype(np.int64) + 4095 >> 12)
        tails = np.zeros(len(ids), np.int64)
        np.maximum.at(tails, inverse[current], ends[current])
        for segment, tail in zip(ids.tolist(), tails.tolist(), strict=True):
            result.tails[segment] = max(result.tails.get(segment, 0), tail)
    removed = np.concatenate([gone for _, _, gone in views]) if views else np.empty(0, np.int64)
    result.live = [puts & ~np.isin(places, removed) for puts, places, _ in views]
    return result


def max_journal_bytes(max_chunks: int) -> tuple[int, int]:
    """Bounds on a journal, and on its copy while it is compacted, in bytes.

    A compacted journal holds a put per chunk, an entry per segment (of at least 512 chunks' worth of
    capacity, see `segments.py`) and the namespaces; it is compacted again when it has doubled.
    """
    compacted = ENTRY_BYTES * (max_chunks + max_chunks // 512 + MAX_NAMESPACES)
    return 2 * compacted, compacted


class Journal:
    """The journal of this writer, open for appending. One thread at a time."""

    def __init__(
        self, path: Path, writer: int, max_bytes: int, size: int, namespaces: dict[int, bytes], chunks: int
    ) -> None:
        """Open or create. `size` and `namespaces`: what was read of it; `chunks`: puts that hold.

        Raises OSError.
        """
        self._path = path
        self._writer = writer
        self._max_bytes = max_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._size = size  # the next entry overwrites a torn one
        self._numbers = {digest: number for number, digest in namespaces.items()}
        self._compact_at = self._compaction_at(chunks * ENTRY_BYTES)

    def append(self, kind: int, rows: Iterable[Row], *, sync: bool = False) -> None:
        """Append one entry per row, after the namespaces that they are the first to use.

        All or nothing, except across a crash. Durable at return only with `sync`: a put that a power
        cut takes away is a miss, a lost remove would not be. Raises OSError.
        """
        rows = list(rows)
        new = self._undefined(rows)
        size = ENTRY_BYTES * (len(rows) + len(new))
        if self._size + size > self._compact_at or len(self._numbers) + len(new) > MAX_NAMESPACES:
            try:
                self.compact()
            except OSError:  # no room for the copy: go on without, up to the bound
                self._compact_at = min(self._compact_at + size + _SLACK_BYTES, self._max_bytes)
            new = self._undefined(rows)  # a compacted journal has forgotten unused ones
        taken = set(self._numbers.values())
        free = (number for number in range(MAX_NAMESPACES) if number not in taken)
        defined = dict(zip(new, free, strict=False))
        if len(defined) < len(new):
            raise OSError(errno.ENOSPC, "too many namespaces in one directory")
        numbers = self._numbers | defined
        data = b"".join(
            [_encode(NAMESPACE, number, Row(0, 0), digest) for digest, number in defined.items()]
            + [_encode(kind, numbers.get(_namespace(row), 0), row, row.key[NAMESPACE_BYTES:]) for row in rows]
        )
        if self._size + len(data) > self._max_bytes:
            raise OSError(errno.ENOSPC, "the journal is full")
        try:
            if os.pwrite(self._fd, data, self._size) != len(data):
                raise OSError(errno.EIO, "short write to the journal")
            if sync:
                os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # else the next entry overwrites it
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self._numbers = numbers

    def _undefined(self, rows: list[Row]) -> list[bytes]:
        """The namespaces of the rows that this journal does not number yet."""
        digests = {_namespace(row): None for row in rows if row.key}
        return [digest for digest in digests if digest not in self._numbers]

    def compact(self, recycled: Iterable[Row] = ()) -> None:
        """Rewrite the journal with only what still holds, after also recycling some segments."""
        more = b"".join(_encode(RECYCLE, 0, row, b"") for row in recycled)
        temporary = self._path.with_name(self._path.name + ".tmp")
        image = read_journal(self._fd)
        image.entries = np.concatenate([image.entries, np.frombuffer(more, _ENTRY)])
        result = replay([image])
        entries, live = image.entries, result.live[0]
        kind, ids = entries["kind"], segment_ids(entries)
        # A remove of a chunk that another writer put is the only word about it.
        keep = live | (kind == REMOVE) & (entries["writer"] != self._writer)
        used = np.unique(entries["namespace"][keep])
        keep |= (kind == NAMESPACE) & np.isin(entries["namespace"], used)
        for at in np.flatnonzero(kind == RECYCLE):
            keep[at] = entries["generation"][at] == result.newest[int(ids[at])]
        data = entries[keep].tobytes()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.EIO, "short write to the journal")
            os.fdatasync(fd)
            os.rename(temporary, self._path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        os.close(self._fd)
        self._fd = fd
        sync_directory(self._path.parent)
        self._size = len(data)
        self._numbers = {image.namespaces[number]: number for number in used.tolist()}
        self._compact_at = self._compaction_at(len(data))

    def _compaction_at(self, compacted_bytes: int) -> int:
        # Doubling keeps the cost per entry constant.
        return min(2 * compacted_bytes + _SLACK_BYTES, self._max_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _namespace(row: Row) -> bytes:
    return row.key[:NAMESPACE_BYTES]


def _encode(kind: int, namespace: int, row: Row, rest: bytes) -> bytes:
    writer, number = row.segment >> 16, row.segment & 0xFFFF
    body = _BODY.pack(
        kind, writer, namespace, number, row.offset, row.generation, row.length, row.time_s, rest
    )
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
