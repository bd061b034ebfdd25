"""The NVMe tier: chunks in recycled segment files, moved by few large O_DIRECT system calls.

A record is one block of 4,096 bytes that begins with the header of `lmkv.record`, and the payload,
padded to whole blocks. The records of a batch lie next to each other. A chunk is offered only after
its bytes are durable and its journal entry is written; a segment is overwritten only after the
journal says durably that it was recycled. A lost or damaged journal loses chunks, nothing else.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from lmkv.backends.journal import (
    ENTRY_BYTES,
    PUT,
    RECYCLE,
    REMOVE,
    Image,
    Journal,
    Row,
    max_journal_bytes,
    open_journal,
    read_journal,
    record_blocks,
    replay,
    segment_ids,
)
from lmkv.backends.segments import (
    BLOCK_BYTES,
    MAX_SEGMENTS,
    Directory,
    SegmentFile,
    max_chunks_for,
)
from lmkv.backends.vectors import MAX_RUN_BYTES, MAX_RUN_RECORDS, Extent, Payload, Scratch, memory, runs
from lmkv.config import ConfigError, load_table, resolve_file_capacity
from lmkv.keys import NAMESPACE_BYTES
from lmkv.record import HEADER_BYTES, decode_header, encode_header, verify
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

logger = logging.getLogger(__name__)

#: A reader looks for news of the writer, or for its lock, this often.
POLL_S = 0.5
#: More news than this is read on another thread: 1,024 entries take a caller of `contains` ~3 ms.
MAX_INLINE_BYTES = 1024 * ENTRY_BYTES
#: Share of a segment that may survive its recycling, so that recycling always frees most of it.
REINSERTED_SHARE = 4

#: Chunks, except for the last five, which count files, entries, errors and bytes.
COUNTERS = (
    *("get_hits", "get_misses", "put_chunks", "put_dedup", "rejected", "bounced"),
    *("corrupt", "races", "evicted", "reinserted"),
    *("foreign_files", "journal_damaged", "io_errors", "read_bytes", "written_bytes"),
)
#: Segments kept open for reading, of the 1,024 files that a process may open by default.
MAX_OPEN_FILES = 128
#: After the disk had no room for one more segment, the tier makes do with those it has for so long.
RETRY_CREATE_S = 60.0
#: A failing disk gets one line in the log per this time.
LOG_S = 60.0

# A location is one int: segment << 45 | offset in blocks << 29 | payload bytes << 1 | read since written.
_HOT = 1
_EMPTY: dict[bytes, int] = {}


def _place(location: int) -> int:
    """Segment id << 16 | offset in blocks: adjacent records have places a record apart."""
    return location >> 29


def _length(location: int) -> int:
    return location >> 1 & (1 << 28) - 1


class _Segment:
    """What the index knows of one segment."""

    __slots__ = ("generation", "members")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        #: By namespace, the keys written to it; some may be gone or have moved since.
        self.members: dict[bytes, list[bytes]] = {}


class _Index:
    """Key -> location, in two levels so that a chunk costs about 200 bytes. The caller locks."""

    def __init__(self) -> None:
        self.spaces: dict[bytes, dict[bytes, int]] = {}
        self.segments: dict[int, _Segment] = {}
        self.chunks = 0
        self.used_blocks = 0

    @classmethod
    def build(
        cls, images: Sequence[Image], segments: set[int], segment_bytes: int
    ) -> tuple["_Index", dict[int, int]]:
        """Index of what the journals say about existing segments.

        With it, for each segment that holds something, the end of its last record in blocks; the
        one whose first record is the oldest comes first.
        """
        index = cls()
        result = replay(images)
        for segment in segments | result.newest.keys():
            index.segments[segment] = _Segment(result.newest.get(segment, 0))
        order: dict[int, int] = {}
        for image, live in zip(images, result.live, strict=True):
            entries = image.entries[live]
            rests = entries["rest"].tolist()
            columns = (entries["namespace"], segment_ids(entries), entries["offset"], entries["length"])
            rows = zip(rests, *(column.tolist() for column in columns), strict=True)
            for rest, number, segment, offset, length in rows:
                fits = (offset + record_blocks(length)) * BLOCK_BYTES <= segment_bytes
                if fits and segment in segments and number in image.namespaces:
                    index.insert(image.namespaces[number], rest, segment, offset, length)
                    order[segment] = result.tails[segment]
        # What was removed keeps its place until the segment is recycled: a new record there would be
        # taken for the removed one by the next replay.
        dead = {s: tail for s, tail in result.tails.items() if tail and s in segments and s not in order}
        return index, dead | order

    def apply(self, image: Image, segment_bytes: int) -> None:
        """Follow what a writer appended to its journal."""
        for kind, writer, name, number, offset, generation, length, _, rest, _ in image.entries.tolist():
            segment = writer << 16 | number
            digest = image.namespaces.get(name)
            known = self.segments.get(segment)
            if kind == RECYCLE or known is None or known.generation < generation:
                self.recycle(segment, generation)
            elif digest is None or known.generation > generation:
                continue
            fits = (offset + record_blocks(length)) * BLOCK_BYTES <= segment_bytes
            if kind == PUT and digest is not None and fits:
                self.insert(digest, rest, segment, offset, length)
            elif kind == REMOVE and digest is not None:
                location = self.locate(digest + rest)
                if location is not None and _place(location) == segment << 16 | offset:
                    self.discard(digest + rest)

    def locate(self, key: bytes) -> int | None:
        return self.spaces.get(key[:NAMESPACE_BYTES], _EMPTY).get(key[NAMESPACE_BYTES:])

    def insert(self, digest: bytes, rest: bytes, segment: int, offset: int, length: int) -> None:
        space = self.spaces.setdefault(digest, {})
        self._forget(space, rest)
        space[rest] = segment << 45 | offset << 29 | length << 1
        known = self.segments.get(segment)
        if known is None:
            known = self.segments[segment] = _Segment(0)
        known.members.setdefault(digest, []).append(rest)
        self.chunks += 1
        self.used_blocks += record_blocks(length)

    def discard(self, key: bytes) -> None:
        self._forget(self.spaces.get(key[:NAMESPACE_BYTES], {}), key[NAMESPACE_BYTES:])

    def recycle(self, segment: int, generation: int) -> int:
        """Drop what lies in a segment; returns how many chunks."""
        before = self.chunks
        for digest, rests in self.segments.get(segment, _Segment(0)).members.items():
            space = self.spaces.get(digest, {})
            for rest in rests:
                location = space.get(rest)
                if location is not None and location >> 45 == segment:
                    self._forget(space, rest)
            if not space:
                self.spaces.pop(digest, None)
        self.segments[segment] = _Segment(generation)
        return before - self.chunks

    def _forget(self, space: dict[bytes, int], rest: bytes) -> None:
        location = space.pop(rest, None)
        if location is not None:
            self.chunks -= 1
            self.used_blocks -= record_blocks(_length(location))


class _View(NamedTuple):
    """How far a journal was read. The open file keeps its inode from naming a successor."""

    fd: int
    size_bytes: int
    namespaces: dict[int, bytes]


class _Record(NamedTuple):
    """A record to write."""

    key: bytes
    block: memoryview  # with its header
    payload: Payload
    created_ns: int


class _Member(NamedTuple):
    """A chunk of a segment. `place` comes first: sorting puts neighbours side by side."""

    place: int
    length: int
    key: bytes
    hot: bool


class _Piece(NamedTuple):
    """Records to write next to each other. Their place is taken, and its segment not recycled until then."""

    file: SegmentFile
    start: int  # bytes
    end: int
    records: list[_Record]
    rows: list[Row]
    again: bool  # reinserted
    outcome: list[Status]  # one status in the end, for other threads with the same keys


class _Wanted(NamedTuple):
    """A record to read. `place` comes first: sorting puts neighbours side by side."""

    place: int
    position: int
    key: bytes
    payload: Payload
    segment: _Segment
    generation: int


class FileTier(Tier):
    """Chunks in files under one directory.

    One process writes at a time. Others that open the directory find what it wrote, at most
    `POLL_S` later; one of them takes over when it is gone, unless it was opened for reading only.
    """

    @classmethod
    def open(cls, settings: Mapping[str, Any], *, read_only: bool = False) -> "FileTier":
        """Open with the settings of the table `[file]`. Raises ConfigError."""
        table = load_table("file", settings)
        if table.path is None:
            raise ConfigError("[file] path", "not set.", "name a directory on a local disk.")
        return cls(Path(table.path), resolve_file_capacity(table), read_only=read_only)

    def __init__(self, path: Path, capacity_bytes: int, *, read_only: bool = False) -> None:
        """Raises ConfigError.

        A tier that is `read_only` never becomes the writer: `put` finds what is there and refuses the
        rest. It is for chunks of which every process has the same, such as the replicated KV of MLA
        under tensor parallelism: one rank writes and all ranks read, and no other rank may take the
        lock, even while the writing one restarts. It may come before the writer does.
        """
        self._read_only = read_only
        self._counters = Counter(dict.fromkeys(COUNTERS, 0))
        self._directory = Directory(path, capacity_bytes, read_only=read_only)
        #: Whether reads and writes bypass the page cache.
        self.direct = self._directory.direct
        self._segment_bytes = self._directory.segment_bytes
        longest = self._segment_bytes - BLOCK_BYTES
        self._info = TierInfo("file", capacity_bytes, True, True, BLOCK_BYTES, longest)
        self._max_chunks = max_chunks_for(capacity_bytes)
        self._lock = threading.Lock()  # the index; never held over I/O
        self._write_lock = threading.RLock()  # everything below; taken before _lock
        self._scratch = Scratch()
        self._closed = False
        self._index = _Index()
        self._views: dict[int, _View] = {}  # by writer
        self._files: dict[int, SegmentFile] = {}  # open for reading
        self._next_place_check = 0.0
        self._next_poll = self._next_attempt = self._next_create = self._next_log = 0.0
        self._reloading: threading.Thread | None = None
        self._journal: Journal | None = None  # set while this process is the writer
        self._active: int | None = None
        self._active_file: SegmentFile | None = None
        self._tail = 0  # bytes
        self._in_flight: dict[bytes, list[Status]] = {}  # outcomes to come, by key
        self._landed = threading.Condition(self._write_lock)
        self._unwritten: Counter[int] = Counter()  # by segment, chunks that are being written
        self._full: deque[int] = deque()  # oldest first
        self._free: list[int] = []
        self._max_segments = 0
        try:
            self._counters["foreign_files"] = self._directory.scan().foreign_files
            if self._directory.locked:
                self._adopt()
            else:
                self._reload()
            self._say("opened")
        except (OSError, ConfigError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            fix = "check the disk, or name another directory."
            raise ConfigError("[file] path", f"{path} cannot be read: {error}.", fix) from error

    @property
    def info(self) -> TierInfo:
        return self._info

    def room(self, chunk_bytes: int) -> int:
        blocks = record_blocks(chunk_bytes) * BLOCK_BYTES
        segments = self._directory.max_segments(self._info.capacity_bytes, self._directory.scan())
        return min(segments * (self._segment_bytes // blocks), self._max_chunks)

    def has(self, key: bytes) -> bool:
        """`contains` of one key, without looking for news of another process."""
        return key[NAMESPACE_BYTES:] in self._index.spaces.get(key[:NAMESPACE_BYTES], _EMPTY)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._check(keys)
        self._catch_up(wait=False)
        space = self._index.spaces.get
        return [key[NAMESPACE_BYTES:] in space(key[:NAMESPACE_BYTES], _EMPTY) for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers, writable=True)
        self._catch_up(wait=True)
        statuses = [Status.MISS] * len(keys)
        payloads = [Payload.of(buffer, direct=self.direct) for buffer in buffers[: len(keys)]]
        wanted: list[_Wanted] = []
        suspects: list[_Wanted] = []  # found, but not what the index says
        with self._lock:
            for position, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
                location = self._index.locate(key)
                if location is not None:
                    segment = self._index.segments[location >> 45]
                    want = _Wanted(_place(location), position, key, payload, segment, segment.generation)
                    (wanted if _length(location) == payload.length else suspects).append(want)
        wanted.sort()
        for run in runs([Extent.of(want.place, want.payload) for want in wanted]):
            self._read(wanted[run], statuses, suspects)
        self._mark_hot([want for want in wanted if statuses[want.position] is Status.OK])
        if suspects:
            self._quarantine(suspects, statuses)
        self._count(get_hits=statuses.count(Status.OK), get_misses=statuses.count(Status.MISS))
        return statuses

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers)
        if not self._in_place():
            return [Status.UNAVAILABLE] * len(keys)
        writer = self._is_writer()
        if not writer:
            self._catch_up(wait=True)
        statuses = [Status.REJECTED] * len(keys)
        fresh: dict[bytes, Buffer] = {}
        for position, (key, buffer) in enumerate(zip(keys, buffers, strict=False)):
            if self.has(key):
                statuses[position] = Status.OK
            elif writer and 0 < buffer_bytes(buffer) <= self._info.max_chunk_bytes:
                fresh.setdefault(key, buffer)
        results: dict[bytes, Status] = {}
        elsewhere: dict[bytes, list[Status]] = {}
        items = [(key, Payload.of(buffer, direct=self.direct)) for key, buffer in fresh.items()]
        places = accumulate((record_blocks(payload.length) for _, payload in items), initial=1)
        extents = [
            Extent(place, record_blocks(p.length)) for place, (_, p) in zip(places, items, strict=False)
        ]
        # What one flush makes durable, as if it lay on disk already; hashed before the lock is taken.
        for run in runs(extents, min(MAX_RUN_BYTES, self._segment_bytes)):
            records = self._prepare(items[run])
            with self._write_lock:
                decided, pieces = self._reserve(records, elsewhere)
            results |= decided
            for piece in pieces:
                results |= self._write(piece)
        if elsewhere:  # another thread is writing these
            with self._landed:
                self._landed.wait_for(lambda: all(elsewhere.values()))
            results |= {key: outcome[0] for key, outcome in elsewhere.items()}
        for position, key in enumerate(keys):
            statuses[position] = results.get(key, statuses[position])
        stored = sum(results[key] is Status.OK for key in fresh.keys() - elsewhere.keys())
        self._count(rejected=statuses.count(Status.REJECTED), put_dedup=statuses.count(Status.OK) - stored)
        return statuses

    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        """See `Tier.remove`. REJECTED while another process is the writer."""
        self._check(keys)
        if not self._is_writer():
            return [Status.REJECTED if self.has(key) else Status.MISS for key in keys]
        with self._write_lock:
            with self._lock:
                rows = {key: self._forget(key) for key in dict.fromkeys(keys) if self.has(key)}
            durable = not rows or self._journal_rows(REMOVE, list(rows.values()))
        gone = Status.OK if durable else Status.UNAVAILABLE  # a restart could bring it back
        return [gone if rows.pop(key, None) else Status.MISS for key in keys]

    def stats(self) -> TierStats:
        with self._lock:
            index = self._index
            return TierStats(index.chunks, index.used_blocks * BLOCK_BYTES, dict(self._counters))

    def close(self) -> None:
        with self._write_lock:
            self._closed = True
            if self._journal is not None:
                self._journal.close()
            self._active = self._active_file = self._journal = None
            self._files = {}
            self._forget_views()
            self._directory.close()

    # -- reading

    def _read(self, run: list[_Wanted], statuses: list[Status], suspects: list[_Wanted]) -> None:
        """Read adjacent records by one system call and verify each."""
        payloads = self._vectors([want.payload for want in run])
        blocks = self._scratch.blocks[: len(run)]
        parts = [part for block, payload in zip(blocks, payloads, strict=True) for part in (block, *payload)]
        expected = sum(part.nbytes for part in parts)
        segment, offset = run[0].place >> 16, (run[0].place & 0xFFFF) * BLOCK_BYTES
        try:
            file = self._open(segment)
            count = os.preadv(file.fd, parts, offset)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # dropped by the writer, or replaced
                suspects += run
                return
            count = -1
            if len(run) == 1:
                self._failed("read", error)
        if count != expected and len(run) > 1:  # find out whose fault it is
            for want in run:
                self._read([want], statuses, suspects)
            return
        self._count(read_bytes=max(count, 0))
        for block, (payload, *_), want in zip(blocks, payloads, run, strict=True):
            pieces, length, bounced = want.payload
            content: Buffer = payload[:length] if bounced else pieces
            if count < 0:
                statuses[want.position] = Status.UNAVAILABLE
            elif count == expected and verify(decode_header(block[:HEADER_BYTES]), want.key, content):
                if bounced:
                    scatter(payload[:length], pieces)
                statuses[want.position] = Status.OK
            else:
                suspects.append(want)

    def _open(self, segment: int) -> SegmentFile:
        file = self._files.get(segment)
        if file is None:
            file = self._directory.open_segment(segment)
            with self._lock:
                while len(self._files) >= MAX_OPEN_FILES:
                    del self._files[next(iter(self._files))]
                self._files[segment] = file
        return file

    def _vectors(self, payloads: Sequence[Payload]) -> list[Sequence[memoryview]]:
        """See `Scratch.vectors`; counts."""
        if bounced := sum(payload.bounces for payload in payloads):
            self._count(bounced=bounced)
        return self._scratch.vectors(payloads)

    def _same(self, want: _Wanted) -> bool:
        """Whether the index still says what it said before the read. Holds _lock."""
        location = self._index.locate(want.key)
        segment = self._index.segments.get(want.place >> 16)
        return (
            location is not None
            and _place(location) == want.place
            and segment is not None
            and segment.generation == want.generation
        )

    def _mark_hot(self, read: list[_Wanted]) -> None:
        with self._lock:
            for want in read:
                space = self._index.spaces.get(want.key[:NAMESPACE_BYTES], {})
                location = space.get(want.key[NAMESPACE_BYTES:], _HOT)
                if not location & _HOT and _place(location) == want.place:
                    space[want.key[NAMESPACE_BYTES:]] = location | _HOT

    def _quarantine(self, suspects: list[_Wanted], statuses: list[Status]) -> None:
        """Never offer again what failed verification, unless it was only overtaken by recycling."""
        with self._write_lock:
            self._catch_up(wait=True, now=True)
            rows = []
            with self._lock:
                for want in suspects:
                    if self._same(want):
                        rows.append(self._forget(want.key))
                        statuses[want.position] = Status.CORRUPT
                self._counters["corrupt"] += len(rows)
                corrupt = self._counters["corrupt"]
                self._counters["races"] += len(suspects) - len(rows)
            if rows and self._journal is not None:
                self._journal_rows(REMOVE, rows)
        if rows and self._may_log():
            logger.warning(
                "lmkv: chunks in %s failed verification and are not served (%d so far): check the disk",
                self._directory.path,
                corrupt,
            )

    def _forget(self, key: bytes) -> Row:
        """Drop an indexed chunk; returns the journal row that says so. Holds _lock."""
        location = self._index.locate(key)
        assert location is not None
        self._index.discard(key)
        segment, offset = location >> 45, _place(location) & 0xFFFF
        generation = self._index.segments[segment].generation
        return Row(segment, generation, key, offset, _length(location), int(time.time()))

    # -- writing; all of it under _write_lock, except _prepare and _write_records

    def _prepare(self, items: Sequence[tuple[bytes, Payload]]) -> list[_Record]:
        """Records of at most a run. Their header blocks lie in this thread's scratch."""
        records = []
        for block, (key, payload) in zip(self._scratch.blocks, items, strict=False):
            now = time.time_ns()
            block[:] = encode_header(key, payload.pieces, now).ljust(BLOCK_BYTES, b"\0")
            records.append(_Record(key, block, payload, now))
        return records

    def _reserve(
        self, records: list[_Record], elsewhere: dict[bytes, list[Status]]
    ) -> tuple[dict[bytes, Status], list[_Piece]]:
        """Take space for records, in as many segments as it takes.

        Returns the status by key of those that are not to be written, and the pieces to write. Adds
        to `elsewhere` those that another thread is writing.
        """
        results = {record.key: Status.OK for record in records if self.has(record.key)}
        elsewhere |= {r.key: self._in_flight[r.key] for r in records if r.key in self._in_flight}
        records = [r for r in records if r.key not in results and r.key not in elsewhere]
        pieces: list[_Piece] = []
        at = 0
        status = Status.OK if self._journal is not None else Status.REJECTED
        while at < len(records) and status is Status.OK:
            batch = self._fitting(records[at:])
            too_many = self._index.chunks + len(self._in_flight) + len(batch) > self._max_chunks
            if too_many and (oldest := self._oldest()) is not None:
                status = self._recycle(oldest)
            elif too_many or not batch:
                status = self._roll(pieces)
            else:
                pieces.append(self._take(batch))
                at += len(batch)
        return results | dict.fromkeys((record.key for record in records[at:]), status), pieces

    def _fitting(self, records: list[_Record]) -> list[_Record]:
        """The first records, as far as the active segment has room."""
        room = self._segment_bytes - self._tail if self._active is not None else 0
        for count, record in enumerate(records):
            room -= record_blocks(record.payload.length) * BLOCK_BYTES
            if room < 0:
                return records[:count]
        return records

    def _take(self, batch: list[_Record], *, again: bool = False) -> _Piece:
        """Space in the active segment, where the batch fits."""
        assert self._active is not None and self._active_file is not None
        generation = self._index.segments[self._active].generation
        rows, start = [], self._tail
        for record in batch:
            offset, time_s = self._tail // BLOCK_BYTES, record.created_ns // 10**9
            rows.append(Row(self._active, generation, record.key, offset, record.payload.length, time_s))
            self._tail += record_blocks(record.payload.length) * BLOCK_BYTES
        self._unwritten[self._active] += len(rows)
        outcome: list[Status] = []
        self._in_flight |= dict.fromkeys((row.key for row in rows), outcome)
        return _Piece(self._active_file, start, self._tail, batch, rows, again, outcome)

    def _write(self, piece: _Piece) -> dict[bytes, Status]:
        """Write a piece by as few system calls as it takes, make it durable, journal it, offer its chunks.

        Takes _write_lock only at the end: the disk works on several pieces at once, and a flush
        takes milliseconds.
        """
        status = Status.OK
        try:
            self._write_records(piece)
            os.fdatasync(piece.file.fd)
        except OSError as error:
            self._failed("write", error)
            status = Status.UNAVAILABLE
        segment = piece.rows[0].segment
        with self._write_lock:
            self._unwritten[segment] -= len(piece.rows)
            if status is Status.OK and not self._journal_rows(PUT, piece.rows, sync=False):
                status = Status.UNAVAILABLE
            if status is Status.OK:
                with self._lock:
                    for row in piece.rows:
                        digest, rest = row.key[:NAMESPACE_BYTES], row.key[NAMESPACE_BYTES:]
                        self._index.insert(digest, rest, segment, row.offset, row.length)
                    self._counters["written_bytes"] += piece.end - piece.start
                    self._counters["reinserted" if piece.again else "put_chunks"] += len(piece.rows)
            elif self._active == segment and self._tail == piece.end:
                self._tail = piece.start  # the next batch goes to the same place
            for row in piece.rows:
                del self._in_flight[row.key]
            piece.outcome.append(status)
            self._landed.notify_all()
        return dict.fromkeys((row.key for row in piece.rows), status)

    def _write_records(self, piece: _Piece) -> None:
        """Raises OSError."""
        extents = [
            Extent.of(r.offset, record.payload) for r, record in zip(piece.rows, piece.records, strict=True)
        ]
        at = piece.start
        for run in runs(extents):
            records = piece.records[run]
            parts: list[memoryview] = []
            for record, vectors in zip(records, self._vectors([r.payload for r in records]), strict=True):
                pieces, length, bounces = record.payload
                if bounces:
                    gather(vectors[0][:length], pieces)
                    vectors[0][length:] = bytes(vectors[0].nbytes - length)
                parts += (record.block, *vectors)
            size = sum(part.nbytes for part in parts)
            if os.pwritev(piece.file.fd, parts, at) != size:
                raise OSError(errno.EIO, "short write")
            at += size

    def _roll(self, pieces: list[_Piece]) -> Status:
        """Make another segment the active one: a free one, a new one, or else the oldest."""
        if self._active is not None:
            self._full.append(self._active)
            self._active = self._active_file = None
        if not self._free and len(self._full) < self._max_segments:
            self._create()
        hot: list[_Record] = []
        if not self._free and (oldest := self._oldest()) is not None:
            hot = self._read_hot(oldest)
            if self._recycle(oldest, kept=hot) is not Status.OK:
                return Status.UNAVAILABLE
        if not self._free:
            return Status.REJECTED
        segment = self._free.pop()
        try:
            self._active_file = self._directory.allocate_segment(segment)
        except OSError as error:
            self._free.insert(0, segment)
            self._failed("allocate", error)
            return Status.UNAVAILABLE
        self._active, self._tail = segment, 0
        for first in range(0, len(hot), MAX_RUN_RECORDS):
            pieces.append(self._take(hot[first : first + MAX_RUN_RECORDS], again=True))
        return Status.OK

    def _oldest(self) -> int | None:
        """The segment to recycle next: none that a thread still writes to."""
        return next((segment for segment in self._full if not self._unwritten[segment]), None)

    def _create(self) -> None:
        """Preallocate one more segment, if the disk has room."""
        if time.monotonic() < self._next_create:
            return
        for segment in range(MAX_SEGMENTS):
            if segment not in self._full and not self._directory.has_segment(segment):
                if self._recycle(segment) is not Status.OK:  # what lay in a lost file of this name
                    return
                try:
                    self._directory.allocate_segment(segment)
                except OSError as error:
                    self._free.remove(segment)
                    self._directory.delete_segment(segment)
                    self._next_create = time.monotonic() + RETRY_CREATE_S
                    self._failed("preallocate", error)
                return

    def _recycle(self, segment: int, kept: Sequence[_Record] = ()) -> Status:
        """Forget what lies in a segment, durably, and make it a free one. `kept` is written again."""
        if self.on_evict is not None:
            self._hand_on(segment, {record.key for record in kept})
        known = self._index.segments.get(segment)
        generation = known.generation + 1 if known else 1
        # Not synced: after a power cut that loses this entry, what was overwritten fails verification.
        row = Row(segment, generation, time_s=int(time.time()))
        if not self._journal_rows(RECYCLE, [row], sync=False):
            return Status.UNAVAILABLE
        if segment in self._full:
            self._full.remove(segment)
        with self._lock:
            self._counters["evicted"] += self._index.recycle(segment, generation) - len(kept)
        self._free.append(segment)
        return Status.OK

    def _hand_on(self, segment: int, kept: set[bytes]) -> None:
        """Give the chunks of a segment to whoever wants what is evicted."""
        assert self.on_evict is not None
        stored = [chunk for chunk in self._members(segment) if chunk.key not in kept]
        for run in runs([Extent(place, record_blocks(length)) for place, length, *_ in stored]):
            records = self._read_back(segment, stored[run])
            payloads = [record.payload.pieces[0][: record.payload.length] for record in records]
            try:
                if records:
                    self.on_evict([record.key for record in records], payloads)
            except Exception as error:  # noqa: BLE001  # another tier's fault must not keep this one from storing
                self._failed("hand on what it evicts", error)

    def _read_hot(self, segment: int) -> list[_Record]:
        """Records that were read since they were written, ready to be written again as they are."""
        hot = [chunk for chunk in self._members(segment) if chunk.hot]
        ends = list(accumulate(record_blocks(chunk.length) * BLOCK_BYTES for chunk in hot))
        return self._read_back(segment, hot[: bisect_right(ends, self._segment_bytes // REINSERTED_SHARE)])

    def _members(self, segment: int) -> list[_Member]:
        """What lies in a segment and is still offered, in order."""
        members = set()
        for digest, rests in self._index.segments.get(segment, _Segment(0)).members.items():
            for rest in rests:
                location = self._index.spaces.get(digest, _EMPTY).get(rest, -1)
                if location >= 0 and location >> 45 == segment:
                    hot = bool(location & _HOT)
                    members.add(_Member(_place(location), _length(location), digest + rest, hot))
        return sorted(members)

    def _read_back(self, segment: int, members: Sequence[_Member]) -> list[_Record]:
        """The records of some members that are as they were written."""
        ends = list(accumulate((record_blocks(m.length) * BLOCK_BYTES for m in members), initial=0))
        if not members:
            return []
        view = memory(ends[-1])
        records = []
        try:
            file = self._open(segment)
            for run in runs([Extent(member.place, record_blocks(member.length)) for member in members]):
                part = view[ends[run.start] : ends[run.stop]]
                os.preadv(file.fd, [part], (members[run.start].place & 0xFFFF) * BLOCK_BYTES)
        except OSError as error:
            self._failed("read", error)
            return []
        for start, (_, length, key, _) in zip(ends, members, strict=False):
            record = view[start : start + record_blocks(length) * BLOCK_BYTES]
            header = decode_header(record[:HEADER_BYTES])
            if header and verify(header, key, record[BLOCK_BYTES : BLOCK_BYTES + length]):
                payload = Payload((record[BLOCK_BYTES:],), length, bounces=False)
                records.append(_Record(key, record[:BLOCK_BYTES], payload, header.created_ns))
        return records

    # -- the journal and other processes

    def _in_place(self) -> bool:
        """Whether the directory is still where it was; looked at no more often than POLL_S."""
        if time.monotonic() >= self._next_place_check:
            if not self._directory.in_place():
                fix = FileNotFoundError("the directory was removed or replaced. Fix: restart the engine")
                self._failed("store", fix)
                return False
            self._next_place_check = time.monotonic() + POLL_S
        return True

    def _is_writer(self) -> bool:
        """Whether this process writes; takes over when the writer is gone, if it may."""
        if self._journal is None and not self._read_only and time.monotonic() >= self._next_attempt:
            self._next_attempt = time.monotonic() + POLL_S
            with self._write_lock:
                if self._journal is None and not self._closed and self._directory.try_lock():
                    try:
                        self._adopt()
                        self._say("taken over")
                    except (OSError, ConfigError) as error:
                        self._failed("take over", error)
                        self._directory.unlock()
        return self._journal is not None

    def _adopt(self) -> None:
        """Become the writer of what the directory holds. Raises OSError, ConfigError."""
        directory = self._directory
        directory.delete_leftovers()
        scan = directory.scan()
        self._max_segments = directory.max_segments(self._info.capacity_bytes, scan)
        index, order, damaged = self._load()
        full = [segment for segment in order if segment >> 16 == 0]
        free = sorted((s for s in scan.segments - order.keys() if s >> 16 == 0), reverse=True)
        dropped = []
        while len(full) + len(free) > self._max_segments:  # the capacity was larger before
            dropped.append(free.pop(0) if free else full.pop(0))
            directory.delete_segment(dropped[-1])
        while index.chunks > self._max_chunks and full:
            dropped.append(full.pop(0))
            free.append(dropped[-1])
        rows = [Row(s, index.segments[s].generation + 1, time_s=int(time.time())) for s in dropped]
        evicted = sum(index.recycle(row.segment, row.generation) for row in rows)
        max_bytes, _ = max_journal_bytes(self._max_chunks)
        _, size_bytes, namespaces = self._views.get(0, (0, 0, {}))
        self._forget_views()
        journal = Journal(directory.journal_path(0), 0, max_bytes, size_bytes, namespaces, index.chunks)
        try:
            if dropped or damaged:
                journal.compact(rows)
            if full:
                self._active_file = directory.allocate_segment(full[-1])
                self._active = full.pop()
                self._tail = order[self._active] * BLOCK_BYTES
        except OSError:
            journal.close()
            raise
        self._full, self._free = deque(full), free
        with self._lock:
            self._index, self._journal = index, journal
            self._counters["evicted"] += evicted

    def _load(self) -> tuple[_Index, dict[int, int], int]:
        """Index and order of `_Index.build`, and how many journal entries were damaged. Raises OSError."""
        self._forget_views()
        images = []
        for writer in sorted(self._directory.scan().writers):
            with contextlib.suppress(FileNotFoundError):
                fd = open_journal(self._directory.journal_path(writer))
                images.append(read_journal(fd))
                self._views[writer] = _View(fd, images[-1].size_bytes, images[-1].namespaces)
        damaged = sum(image.damaged for image in images)
        self._count(journal_damaged=damaged)
        # Listed after the journals were read: what they speak of is there unless it was deleted since.
        segments = self._directory.scan().segments
        return *_Index.build(images, segments, self._segment_bytes), damaged

    def _forget_views(self) -> None:
        self._files = {}  # the writer may have dropped some
        for view in self._views.values():
            os.close(view.fd)
        self._views = {}

    def _reload(self) -> None:
        """Read all journals from the start."""
        with self._write_lock:
            if self._journal is None and not self._closed:
                index, _, _ = self._load()
                with self._lock:
                    self._index = index

    def _try_reload(self) -> None:
        try:
            self._reload()
        except OSError as error:
            self._failed("read the journals", error)

    def _catch_up(self, *, wait: bool, now: bool = False) -> None:
        """Learn what the writer, another process, did. Without `wait` in a few milliseconds at most."""
        if self._journal is not None or (time.monotonic() < self._next_poll and not now):
            return
        self._next_poll = time.monotonic() + POLL_S
        if not self._write_lock.acquire(blocking=wait):
            return
        try:
            if self._closed or self._news():
                return
            if wait:
                self._try_reload()
            elif self._reloading is None or not self._reloading.is_alive():
                self._reloading = threading.Thread(
                    target=self._try_reload, name="lmkv-file-reload", daemon=True
                )
                self._reloading.start()
        except OSError as error:
            self._failed("read the journals", error)
        finally:
            self._write_lock.release()

    def _news(self) -> bool:
        """Follow the journals; False when they are to be read anew. Raises OSError."""
        for writer in {0, *self._views}:
            view = self._views.get(writer)
            try:
                status = os.stat(self._directory.journal_path(writer), follow_symlinks=False)
            except FileNotFoundError:
                if view is not None:
                    return False
                continue
            if view is None or os.fstat(view.fd).st_ino != status.st_ino:  # first, or compacted
                return False
            if not 0 <= (new := status.st_size - view.size_bytes) <= MAX_INLINE_BYTES:
                return False
            if new >= ENTRY_BYTES:
                image = read_journal(view.fd, view.size_bytes, view.namespaces)
                with self._lock:
                    self._index.apply(image, self._segment_bytes)
                    self._counters["journal_damaged"] += image.damaged
                self._views[writer] = _View(view.fd, image.size_bytes, image.namespaces)
        return True

    def _journal_rows(self, kind: int, rows: list[Row], *, sync: bool = True) -> bool:
        """Append to the journal; whether it worked."""
        try:
            if self._journal is None:
                return False
            self._journal.append(kind, rows, sync=sync)
        except OSError as error:
            self._failed("write the journal", error)
            return False
        return True

    # -- small things

    def _check(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer] | None = None, *, writable: bool = False
    ) -> None:
        """Raise ValueError on what only a programming error can cause."""
        if self._closed:
            raise ValueError("the file tier is closed")
        check_batch(keys, buffers, writable=writable)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counters.update(amounts)

    def _say(self, what: str) -> None:
        role = "for reading only" if self._read_only else "for reading: another process writes"
        if self._journal is not None:
            role = "as the writer"
        logger.info(
            "lmkv: %s %s with %d chunks, %s; %d damaged journal entries, %d foreign files",
            self._directory.path,
            what,
            self._index.chunks,
            role,
            self._counters["journal_damaged"],
            self._counters["foreign_files"],
        )

    def _may_log(self) -> bool:
        """At most one line per LOG_S about what goes wrong again and again."""
        if time.monotonic() < self._next_log:
            return False
        self._next_log = time.monotonic() + LOG_S
        return True

    def _failed(self, what: str, error: Exception) -> None:
        """Count an I/O error, and log it unless one was logged just now."""
        self._count(io_errors=1)
        if self._may_log():
            logger.warning("lmkv: the file tier in %s could not %s: %s", self._directory.path, what, error)
