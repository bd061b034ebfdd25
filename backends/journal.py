"""The file tier's journal: which chunk lies where, as fixed-size entries in an append-only file.

One entry is 64 little-endian bytes, so a damaged one is skipped without losing its neighbours:

    offset size  field
         0    1  kind: 1 namespace, 2 put, 3 remove, 4 segment recycled, 5 capacity, 6 origin, 7 read,
                   8 moved
         1    1  0 (part of a segment's number in its file name)
         2    2  number of the namespace, as defined by an earlier namespace entry of this file
         4    2  segment number
         6    2  offset of the record in its segment, in blocks of 4,096 bytes
         8    4  generation of the segment: how often it was recycled
        12    4  length of the payload in bytes
        16    4  time, Unix seconds (for a put: when the chunk was created)
        20   36  the key behind its namespace digest; in a namespace entry the digest and 4 zero bytes
        56    8  XXH3-64 of bytes 0..55

A put holds while its generation is its segment's newest and no remove names its place and key, whatever the
order of the entries. A remove of length 0 names no place: the chunk lay nowhere, but may have been about to
be put again. A read says that the chunk at this place was read since it was written.

All processes append to one journal, each entry after having read all before it, under the directory's
lock; so they agree on everything, and no key is put twice. A capacity entry (8 bytes in place of the key)
tells them what the directory may hold. Before a compacted journal takes the place of this one, a moved entry
ends it. The compacted one begins with an origin: the inode of the journal that it replaces (8 bytes in place
of the key), its own length, and in place of the offset how many namespace entries follow; who has read the
old one to its end goes on behind that.
"""

import contextlib
import errno
import os
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from lmkv.backends.quick import file_bytes
from lmkv.keys import KEY_BYTES, NAMESPACE_BYTES

NAMESPACE, PUT, REMOVE, RECYCLE, CAPACITY, ORIGIN, READ, MOVED = range(1, 9)

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
_U64 = struct.Struct("<Q")
assert _ENTRY.itemsize == _BODY.size + _U64.size == ENTRY_BYTES

#: A namespace is one model served one way; a directory that sees more than this is misused.
MAX_NAMESPACES = 1024
#: A reader trusts no file size: twice the entries of the largest index (`segments.MAX_CHUNKS`) fit.
MAX_READ_BYTES = 2**30

#: Whether somebody removed or replaced the journal is looked at this often.
LOOK_S = 0.5

#: Growth that is never worth a compaction: reading it takes milliseconds.
_SLACK_BYTES = 4096 * ENTRY_BYTES

Array = NDArray[Any]


class Row(NamedTuple):
    """One entry to append. Offset in blocks, length in bytes."""

    kind: int
    segment: int = 0
    generation: int = 0
    key: bytes = b""
    offset: int = 0
    length: int = 0
    time_s: int = 0


@dataclass
class Image:
    """The valid entries of a journal (or of its newest part), in order."""

    entries: Array
    #: Digest by number.
    namespaces: dict[int, bytes]
    damaged: int
    #: Bytes up to the end of the last whole entry.
    size_bytes: int

    @property
    def capacity_bytes(self) -> int | None:
        """The last capacity it tells."""
        told = self.entries["rest"][self.entries["kind"] == CAPACITY]
        return _U64.unpack_from(told[-1].tobytes())[0] if len(told) else None


@dataclass
class Replay:
    """What a journal says."""

    #: Which entries are puts that hold.
    live: Array
    #: Which of them were read since.
    read: Array
    #: What a compacted journal keeps: puts that hold, and how often each segment was recycled.
    kept: Array
    #: By segment, the one recycled first coming first: its newest generation, and the end of the last
    #: record of that, in blocks.
    segments: dict[int, tuple[int, int]]


def record_blocks(length: int) -> int:
    """Blocks of 4,096 bytes that a record takes: one for the header, the payload rounded up."""
    return 1 + (length + 4095 >> 12)


def segment_ids(entries: Array) -> Array:
    """Segment of each entry."""
    ids: Array = entries["writer"].astype(np.int64) << 16 | entries["number"]
    return ids


def open_journal(path: Path, flags: int = os.O_RDONLY) -> int:
    """File descriptor. Raises OSError."""
    # Without O_NONBLOCK, opening a named pipe in its place would hang.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EEXIST, "the journal is not a regular file, or one with another name")
    return fd


def read_journal(
    fd: int, start: int = 0, known: dict[int, bytes] | None = None, end: int = MAX_READ_BYTES
) -> Image:
    """The entries of a journal from byte `start` on. `known`: namespaces defined before that.

    A torn or damaged entry is left out and counted. Raises OSError.
    """
    size = min(os.fstat(fd).st_size, end) - start
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


def replay(image: Image) -> Replay:
    """What holds, by the rule above."""
    entries = image.entries
    kind, generation = entries["kind"], entries["generation"]
    ids, inverse = np.unique(segment_ids(entries), return_inverse=True)
    of_segment = (kind == PUT) | (kind == REMOVE) & (entries["length"] > 0) | (kind == RECYCLE)
    newest = np.zeros(len(ids), np.int64)
    np.maximum.at(newest, inverse[of_segment], generation[of_segment])
    current = generation == newest[inverse]
    places = segment_ids(entries) << 16 | entries["offset"]
    reads = current & (kind == READ)
    current &= of_segment
    puts, removes = current & (kind == PUT), current & (kind == REMOVE)
    live = puts.copy()
    # A remove that was told late may name the place of another chunk by now.
    removed = set(zip(places[removes].tolist(), entries["rest"][removes].tolist(), strict=True))
    at_removed = np.flatnonzero(puts & np.isin(places, places[removes]))
    rests = entries["rest"][at_removed].tolist()
    live[at_removed] = [pair not in removed for pair in zip(places[at_removed].tolist(), rests, strict=True)]
    placed = puts | removes
    ends = entries["offset"] + 1 + (entries["length"].astype(np.int64) + 4095 >> 12)
    tails = np.zeros(len(ids), np.int64)
    np.maximum.at(tails, inverse[placed], ends[placed])
    first = np.full(len(ids), len(entries))
    np.minimum.at(first, inverse[current], np.flatnonzero(current))
    order = [at for at in np.argsort(first) if first[at] < len(entries)]
    segments = {int(ids[at]): (int(newest[at]), int(tails[at])) for at in order}
    kept = live | current & (kind == RECYCLE)
    return Replay(live, live & np.isin(places, places[reads]), kept, segments)


def max_journal_bytes(max_chunks: int) -> tuple[int, int]:
    """Bounds on a journal, and on its copy while it is compacted, in bytes.

    A compacted journal holds a put per chunk, an entry per segment (of at least 512 chunks' worth of
    capacity, see `segments.py`), the namespaces, the origin and the capacity; it is compacted again when it
    has doubled.
    """
    compacted = ENTRY_BYTES * (max_chunks + max_chunks // 512 + MAX_NAMESPACES + 2)
    return 2 * compacted, compacted


class Journal:
    """The journal of a directory, as far as this process has read it. One thread at a time.

    Who appends or compacts holds the directory's lock, and has read all of it. What was appended is never
    taken back: others may have read it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._inode = 0
        self._next_look = 0.0
        self._ended = False  # perhaps: who moves it may be killed before it has
        #: What was read; the next entry overwrites a torn one.
        self.size_bytes = 0
        self._namespaces: dict[int, bytes] = {}
        self._compact_above = 0  # bytes, while there is no room for the copy
        self.max_bytes = MAX_READ_BYTES

    def read(self) -> Image:
        """All of it, from the start; nothing if there is none. Raises OSError."""
        self.close()
        try:
            self._open(os.O_RDWR)
        except FileNotFoundError:
            return Image(np.empty(0, _ENTRY), {}, 0, 0)
        return self._read_on()

    def news(self, max_bytes: int = MAX_READ_BYTES) -> list[Image] | None:
        """What was appended since, in order; None if it is more than `max_bytes`, or if all of the journal
        is to be read anew. Raises OSError."""
        if self._fd < 0 or self._ended or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if not self._in_place():
                return [] if self._fd < 0 else self._follow_compaction(max_bytes)
        if self._fd < 0:
            return None
        new = file_bytes(self._fd) - self.size_bytes
        if not 0 <= new <= max_bytes:
            return None
        if new < ENTRY_BYTES:
            return []
        image = self._read_on()
        if self._ended and not self._in_place():
            more = self._follow_compaction(max_bytes)
            return None if more is None else [image, *more]
        return [image]

    def _in_place(self) -> bool:
        """Whether the path names the journal that is being read; if none is, whether it names any."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._fd < 0 or self._inode == status.st_ino

    def append(self, rows: Sequence[Row], surviving: int, *, sync: bool = False) -> None:
        """Append one entry per row, after the namespaces that they are the first to use.

        `surviving`: how many entries a compacted journal would have, for it is compacted when it has twice
        as many. Durable at return only with `sync`: a put that a power cut takes away is a miss, a lost
        remove would not be. Raises OSError; what was written then is news.
        """
        new = self._undefined(rows)
        size = ENTRY_BYTES * (len(rows) + len(new))
        bound = min(2 * ENTRY_BYTES * surviving + _SLACK_BYTES, self.max_bytes)
        if self.size_bytes + size > max(bound, self._compact_above) or self._spare(new) < 0:
            try:
                self.compact()
            except OSError:  # no room for the copy: go on without, up to the bound
                self._compact_above = min(self.size_bytes + size + _SLACK_BYTES, self.max_bytes)
            new = self._undefined(rows)  # a compacted journal has forgotten unused ones
        if self._spare(new) < 0:
            raise OSError(errno.ENOSPC, "too many namespaces in one directory")
        free = (number for number in range(MAX_NAMESPACES) if number not in self._namespaces)
        namespaces = self._namespaces | dict(zip(free, new, strict=False))
        numbers = {digest: number for number, digest in namespaces.items()}
        data = b"".join(
            [_encode_namespace(numbers[digest], digest) for digest in new]
            + [_encode(row, numbers.get(_namespace(row), 0)) for row in rows]
        )
        if self.size_bytes + len(data) > self.max_bytes:
            raise OSError(errno.ENOSPC, "the journal is full")
        if self._fd < 0:
            self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)  # never into one that was not read
            sync_directory(self._path.parent)
        if os.pwrite(self._fd, data, self.size_bytes) != len(data):
            raise OSError(errno.EIO, "short write to the journal")
        if sync:
            os.fdatasync(self._fd)
        self.size_bytes += len(data)
        self._namespaces, self._ended = namespaces, False

    def compact(self) -> None:
        """Rewrite the journal with only what still holds. Raises OSError."""
        if self._fd < 0:
            return
        image = read_journal(self._fd)
        entries = image.entries[replay(image).kept]
        used = np.unique(entries["namespace"][entries["kind"] == PUT]).tolist()
        namespaces = {number: image.namespaces[number] for number in used if number in image.namespaces}
        more = [_encode_namespace(number, digest) for number, digest in namespaces.items()]
        if (capacity_bytes := image.capacity_bytes) is not None:
            more.append(_encode(Row(CAPACITY, key=_U64.pack(capacity_bytes)), 0))
        kept = entries.tobytes()
        size = ENTRY_BYTES * (1 + len(more)) + len(kept)
        inode = _U64.pack(self._inode)
        origin = _encode(Row(ORIGIN, key=inode, offset=len(namespaces), length=size), 0)
        fd = self._replace(b"".join([origin, *more, kept]), _encode(Row(MOVED), 0))
        self._switch(fd, size, namespaces)  # before anything else may fail: nobody reads the old one any more
        self._compact_above = 0
        sync_directory(self._path.parent)

    def close(self) -> None:
        """Forget what was read."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.size_bytes, self._namespaces, self._ended = -1, 0, {}, False

    def _read_on(self) -> Image:
        image = read_journal(self._fd, self.size_bytes, self._namespaces)
        self.size_bytes, self._namespaces = image.size_bytes, image.namespaces
        if len(image.entries):
            self._ended = image.entries["kind"][-1] == MOVED
        return image

    def _follow_compaction(self, max_bytes: int) -> list[Image] | None:
        """The rest of the journal that was read, and what follows the part of its successor that says the
        same; None if that cannot be told, or is more than `max_bytes`."""
        try:
            fd, known = open_journal(self._path, os.O_RDWR), False
        except FileNotFoundError:
            return None
        try:
            head = read_journal(fd, 0, end=ENTRY_BYTES).entries
            here = _U64.pack(self._inode)
            if not len(head) or head["kind"][0] != ORIGIN or head["rest"][0].tobytes()[: _U64.size] != here:
                return None
            start, count = int(head["length"][0]), int(head["offset"][0])
            if file_bytes(fd) - start + file_bytes(self._fd) - self.size_bytes > max_bytes:
                return None
            namespaces = read_journal(fd, ENTRY_BYTES, end=ENTRY_BYTES * (1 + count)).namespaces
            if len(namespaces) != count:  # damaged
                return None
            rest, known = self._read_on(), True
        finally:
            if not known:
                os.close(fd)
        self._switch(fd, start, namespaces)
        return [rest, self._read_on()]

    def _open(self, flags: int) -> None:
        self._fd = open_journal(self._path, flags)
        self._inode = os.fstat(self._fd).st_ino

    def _switch(self, fd: int, size_bytes: int, namespaces: dict[int, bytes]) -> None:
        """Go on in another file."""
        os.close(self._fd)
        self._fd, self._inode = fd, os.fstat(fd).st_ino
        self.size_bytes, self._namespaces, self._ended = size_bytes, namespaces, False

    def _undefined(self, rows: Sequence[Row]) -> list[bytes]:
        """The namespaces of the rows that this journal does not number yet."""
        digests = dict.fromkeys(map(_namespace, rows))
        return [digest for digest in digests if digest and digest not in self._namespaces.values()]

    def _spare(self, new: list[bytes]) -> int:
        return MAX_NAMESPACES - len(self._namespaces) - len(new)

    def _replace(self, data: bytes, last_entry: bytes) -> int:
        """Put a new file in the journal's place, after this last entry in the old one; returns its
        descriptor."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = open_journal(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.EIO, "short write to the journal")
            os.fdatasync(fd)
            if os.pwrite(self._fd, last_entry, self.size_bytes) != len(last_entry):
                raise OSError(errno.EIO, "short write to the journal")
            self.size_bytes += len(last_entry)
            os.rename(temporary, self._path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return fd


def _namespace(row: Row) -> bytes:
    return row.key[: -(KEY_BYTES - NAMESPACE_BYTES)]


def _encode_namespace(number: int, digest: bytes) -> bytes:
    return _encode(Row(NAMESPACE, key=digest), number)


def _encode(row: Row, namespace: int) -> bytes:
    rest = row.key[-(KEY_BYTES - NAMESPACE_BYTES) :]
    high, number = row.segment >> 16, row.segment & 0xFFFF
    body = _BODY.pack(
        row.kind, high, namespace, number, row.offset, row.generation, row.length, row.time_s, rest
    )
    return body + _U64.pack(xxh3_64_intdigest(body))


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
