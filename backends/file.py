"""The NVMe tier: chunks in recycled segment files, moved by few large O_DIRECT system calls.

A chunk is offered only after its bytes are durable and its journal entry is written; a segment is
overwritten only after the journal says that it was recycled. A lost or damaged journal loses chunks,
nothing else. Several processes write and read one directory: `catalog.py` says how they agree on what lies
where, `space.py` how they share its capacity.
"""

import errno
import logging
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from lmkv.backends.catalog import Catalog
from lmkv.backends.chunks import Member, length_of, place_of
from lmkv.backends.journal import PUT, Row, record_blocks
from lmkv.backends.records import Piece, Record, prepare, read_back, write
from lmkv.backends.segments import BLOCK_BYTES, Directory, SegmentFile, max_chunks_for
from lmkv.backends.space import Claim, Space
from lmkv.backends.vectors import MAX_RUN_BYTES, MAX_RUN_RECORDS, Extent, Payload, Scratch, runs
from lmkv.config import ConfigError, load_table, resolve_file_capacity
from lmkv.record import HEADER_BYTES, decode_header, verify
from lmkv.tier import (
    Buffer,
    Status,
    Tier,
    TierInfo,
    TierStats,
    buffer_bytes,
    check_batch,
    scatter,
)

logger = logging.getLogger(__name__)

#: What other processes did is looked for this often.
POLL_S = 0.5
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
#: A failing disk gets one line in the log per this time.
LOG_S = 60.0


_tiers: "weakref.WeakSet[FileTier]" = weakref.WeakSet()


def _leave_all() -> None:
    for tier in list(_tiers):
        tier._leave()


os.register_at_fork(after_in_child=_leave_all)


class _Wanted(NamedTuple):
    """A record to read. `place` comes first: sorting puts neighbours side by side."""

    place: int
    position: int
    key: bytes
    payload: Payload
    generation: int


class FileTier(Tier):
    """Chunks in files under one directory, which any number of processes may read, and `MAX_WRITERS` write.

    What one of them stored or removed the others know at most `POLL_S` later. A forked child reads what its
    parent's tier holds; to store it opens one of its own.
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

        The capacity is the directory's from now on, also for processes that opened it with another one. A
        tier that is `read_only` stores nothing: `put` finds what is there and refuses the rest. It is for
        chunks of which every process has the same, such as the replicated KV of MLA under tensor
        parallelism: one rank writes and all ranks read. It may come before any writer does.
        """
        self._read_only = read_only
        self._counters = Counter(dict.fromkeys(COUNTERS, 0))
        self._counting = threading.Lock()
        self._directory = Directory(path, capacity_bytes, read_only=read_only)
        #: Whether reads and writes bypass the page cache.
        self.direct = self._directory.direct
        self._segment_bytes = self._directory.segment_bytes
        longest = self._segment_bytes - BLOCK_BYTES
        self._info = TierInfo("file", capacity_bytes, True, True, BLOCK_BYTES, longest)
        self._catalog = Catalog(self._directory, capacity_bytes)
        self._space = Space(self._directory, self._catalog, self._failed)
        self._write_lock = threading.RLock()  # what follows; taken before the directory is locked
        self._active: Claim | None = None
        self._tail = 0  # bytes
        self._in_flight: dict[bytes, list[Status]] = {}  # outcomes to come, by key
        self._landed = threading.Condition(self._write_lock)
        self._adopted = False
        self._closed = self._forked = False
        self._scratch = Scratch()
        _tiers.add(self)
        self._files: dict[int, tuple[tuple[int, int], SegmentFile]] = {}  # open for reading, by segment
        self._next_place_check = self._next_poll = self._next_attempt = self._next_log = 0.0
        self._following: threading.Thread | None = None
        try:
            self._counters["foreign_files"] = self._directory.scan().foreign_files
            self._catalog.load()
            if not read_only:
                self._is_ready()  # else `put` tries again
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
        capacity_bytes = self._catalog.capacity_bytes
        segments = self._directory.max_segments(capacity_bytes, self._directory.scan())
        return min(segments * (self._segment_bytes // blocks), max_chunks_for(capacity_bytes))

    def has(self, key: bytes) -> bool:
        """`contains` of one key, without looking for news of another process."""
        return self._catalog.index.has(key)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._check(keys)
        self._catch_up(wait=False)
        return self._catalog.index.contains(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers, writable=True)
        self._catch_up(wait=True)
        statuses = [Status.MISS] * len(keys)
        payloads = [Payload.of(buffer, direct=self.direct) for buffer in buffers[: len(keys)]]
        wanted: list[_Wanted] = []
        suspects: list[_Wanted] = []  # found, but not what the index says
        with self._catalog.lock:
            index = self._catalog.index
            for position, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
                location = index.locate(key)
                if location is not None:
                    generation = index.segments[location >> 45].generation
                    want = _Wanted(place_of(location), position, key, payload, generation)
                    (wanted if length_of(location) == payload.length else suspects).append(want)
        wanted.sort()
        for run in runs([Extent.of(want.place, want.payload) for want in wanted]):
            self._read(wanted[run], statuses, suspects)
        self._catalog.note_read((w.key, w.place) for w in wanted if statuses[w.position] is Status.OK)
        if suspects:
            self._quarantine(suspects, statuses)
        self._count(get_hits=statuses.count(Status.OK), get_misses=statuses.count(Status.MISS))
        return statuses

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers)
        if not self._forked and not self._in_place():
            return [Status.UNAVAILABLE] * len(keys)
        self._catch_up(wait=True, now=True)
        ready = self._is_ready()
        refused = Status.REJECTED if self._read_only else Status.UNAVAILABLE
        statuses = [Status.REJECTED if ready else refused] * len(keys)
        fresh: dict[bytes, Buffer] = {}
        for position, (key, buffer) in enumerate(zip(keys, buffers, strict=False)):
            if self.has(key):
                statuses[position] = Status.OK
            elif ready and 0 < buffer_bytes(buffer) <= self._info.max_chunk_bytes:
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
            records = prepare(items[run], self._scratch)
            with self._write_lock:
                decided, pieces = self._reserve(records, elsewhere)
            results |= decided
            while pieces:  # a piece that is held keeps its segment
                results |= self._write(pieces.pop(0))
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
        """See `Tier.remove`. REJECTED by a tier for reading only."""
        self._check(keys)
        if self._read_only:
            return [Status.REJECTED if self.has(key) else Status.MISS for key in keys]
        self._catch_up(wait=True, now=True)
        there, gone = set(keys), Status.UNAVAILABLE  # a restart could bring them back
        try:
            if keys and self._is_ready():
                with self._catalog.changing():
                    there = set(self._catalog.remove(keys))
                gone = Status.OK
        except OSError as error:
            self._catalog.forget(keys)
            self._failed("remove chunks", error)
        statuses = []
        for key in keys:
            statuses.append(gone if key in there else Status.MISS)
            there.discard(key)
        return statuses

    def stats(self) -> TierStats:
        catalog = self._catalog
        with catalog.lock, self._counting:
            counters, index = dict(self._counters), catalog.index
            counters["evicted"] += catalog.evicted
            counters["journal_damaged"] += catalog.damaged
            return TierStats(index.chunks, index.used_blocks * BLOCK_BYTES, counters)

    def close(self) -> None:
        with self._write_lock:
            self._closed = True
            self._active = None
            self._files = {}
            self._catalog.close()
            self._directory.close()

    # -- reading

    def _read(self, run: list[_Wanted], statuses: list[Status], suspects: list[_Wanted]) -> None:
        """Read adjacent records by one system call and verify each."""
        if bounced := sum([want.payload.bounces for want in run]):
            self._count(bounced=bounced)
        payloads = self._scratch.vectors([want.payload for want in run])
        blocks = self._scratch.blocks[: len(run)]
        parts = [part for block, payload in zip(blocks, payloads, strict=True) for part in (block, *payload)]
        expected = sum(part.nbytes for part in parts)
        segment, offset = run[0].place >> 16, (run[0].place & 0xFFFF) * BLOCK_BYTES
        try:
            file = self._open(segment, run[0].generation)
            count = os.preadv(file.fd, parts, offset)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # dropped by another process, or replaced
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

    def _open(self, segment: int, generation: int) -> SegmentFile:
        # Another process may drop a file and make a new one of its name, but not within a generation; those
        # begin anew with a new journal.
        version = self._catalog.loads, generation
        known, file = self._files.get(segment, (None, None))
        if file is None or known != version:
            file = self._directory.open_segment(segment)
            with self._counting:
                while len(self._files) >= MAX_OPEN_FILES:
                    del self._files[next(iter(self._files))]
                self._files[segment] = version, file
        return file

    def _same(self, want: _Wanted) -> bool:
        """Whether the index still says what it said before the read. Holds the index's lock."""
        catalog = self._catalog
        newest = catalog.is_newest(want.place >> 16, want.generation)
        return newest and catalog.index.lies_at(want.key, want.place)

    def _quarantine(self, suspects: list[_Wanted], statuses: list[Status]) -> None:
        """Never offer again what failed verification, unless it was only overtaken by recycling."""
        self._catch_up(wait=True, now=True)
        with self._catalog.lock:
            corrupt = [want for want in suspects if self._same(want)]
        self._count(corrupt=len(corrupt), races=len(suspects) - len(corrupt))
        if not corrupt:
            return
        for want in corrupt:
            statuses[want.position] = Status.CORRUPT
        self._catalog.forget([want.key for want in corrupt])
        try:
            if not self._read_only and not self._forked:
                with self._catalog.changing():
                    self._catalog.tell()
        except OSError as error:
            self._failed("write the journal", error)
        if self._may_log():
            logger.warning(
                "lmkv: chunks in %s failed verification and are not served (%d so far): check the disk",
                self._directory.path,
                self._counters["corrupt"],
            )

    # -- writing; all of it under _write_lock, except what _write does before it takes that

    def _reserve(
        self, records: list[Record], elsewhere: dict[bytes, list[Status]]
    ) -> tuple[dict[bytes, Status], list[Piece]]:
        """Take space for records, in as many segments as it takes.

        Returns the status by key of those that are not to be written, and the pieces to write. Adds
        to `elsewhere` those that another thread is writing.
        """
        results = {record.key: Status.OK for record in records if self.has(record.key)}
        elsewhere |= {r.key: self._in_flight[r.key] for r in records if r.key in self._in_flight}
        records = [r for r in records if r.key not in results and r.key not in elsewhere]
        pieces: list[Piece] = []
        at = 0
        status = Status.OK
        try:
            while at < len(records) and status is Status.OK:
                room = self._catalog.max_chunks - self._catalog.index.chunks - len(self._in_flight)
                batch = self._fitting(records[at : at + max(room, 0)])
                if batch:
                    pieces.append(self._take(batch))
                    at += len(batch)
                elif room > 0:
                    status = self._roll(records[at].blocks * BLOCK_BYTES, pieces)
                elif (oldest := self._space.oldest()) is not None:
                    self._recycle(oldest)
                elif self._active is not None:
                    self._active = None  # it may be the only one that nobody else writes to
                else:
                    status = Status.REJECTED
        except OSError as error:
            self._failed("take space", error)
            status = Status.UNAVAILABLE
        return results | dict.fromkeys((record.key for record in records[at:]), status), pieces

    def _fitting(self, records: list[Record]) -> list[Record]:
        """The first records, as far as the active segment has room."""
        active = self._active
        usable = active is not None and self._catalog.is_newest(active.segment, active.generation)
        room = self._segment_bytes - self._tail if usable else 0
        for count, record in enumerate(records):
            room -= record.blocks * BLOCK_BYTES
            if room < 0:
                return records[:count]
        return records

    def _take(self, batch: list[Record], *, again: bool = False) -> Piece:
        """Space in the active segment, where the batch fits."""
        assert self._active is not None
        segment, generation = self._active.segment, self._active.generation
        rows, start = [], self._tail
        for record in batch:
            offset, time_s = self._tail // BLOCK_BYTES, record.created_ns // 10**9
            rows.append(Row(PUT, segment, generation, record.key, offset, record.payload.length, time_s))
            self._tail += record.blocks * BLOCK_BYTES
        outcome: list[Status] = []
        self._in_flight |= dict.fromkeys((row.key for row in rows), outcome)
        return Piece(self._active.file, start, self._tail, batch, rows, again, outcome)

    def _write(self, piece: Piece) -> dict[bytes, Status]:
        """Write a piece, make it durable, journal it, offer its chunks.

        Takes _write_lock only at the end: the disk works on several pieces at once, and a flush
        takes milliseconds.
        """
        if bounced := sum([record.payload.bounces for record in piece.records]):
            self._count(bounced=bounced)
        status, used = Status.UNAVAILABLE, False
        try:
            write(piece, self._scratch)
            with self._write_lock:
                used = True  # at least some of it may be in the journal
                used = self._offer(piece)
            status = Status.OK
        except OSError as error:
            self._failed("store", error)
        finally:  # whatever it was: other threads wait for the outcome
            with self._write_lock:
                active = self._active
                if not used and active and active.file is piece.file and self._tail == piece.end:
                    self._tail = piece.start  # the next batch goes to the same place
                if piece.again:
                    self._catalog.moved(row.key for row in piece.rows)
                for row in piece.rows:
                    del self._in_flight[row.key]
                piece.outcome.append(status)
                self._landed.notify_all()
        return dict.fromkeys((row.key for row in piece.rows), status)

    def _offer(self, piece: Piece) -> bool:
        """Whether any of a durable piece is offered: other processes may have stored all of it meanwhile.

        Raises OSError.
        """
        with self._catalog.changing():
            offered = len(self._catalog.put(piece.rows, again=piece.again))
        size = piece.end - piece.start
        if piece.again:
            self._count(written_bytes=size, reinserted=offered)
        else:
            self._count(written_bytes=size, put_chunks=offered, put_dedup=len(piece.rows) - offered)
        return offered > 0

    def _roll(self, needed_bytes: int, pieces: list[Piece]) -> Status:
        """Go on in another segment. Raises OSError."""
        self._active = None
        claim = self._space.claim(needed_bytes)
        if claim is None:
            return Status.REJECTED
        hot: list[Record] = []
        if claim.full:
            generation, hot = self._recycle(claim, keep_hot=True)
            claim = claim._replace(generation=generation)
        self._active, self._tail = claim, claim.tail
        for first in range(0, len(hot), MAX_RUN_RECORDS):
            pieces.append(self._take(hot[first : first + MAX_RUN_RECORDS], again=True))
        return Status.OK

    def _recycle(self, claim: Claim, *, keep_hot: bool = False) -> tuple[int, list[Record]]:
        """Forget what lies in a segment; returns its new generation, and what is to be written again as it
        is. Raises OSError."""
        with self._catalog.lock:
            members = self._catalog.index.members(claim.segment)
        hot = self._read_back(claim, self._hottest(members)) if keep_hot else []
        kept = {record.key for record in hot}
        if self.on_evict is not None:
            self._hand_on(claim, [member for member in members if member.key not in kept])
        with self._catalog.changing():
            hot = [record for record in hot if self._lies_in(record.key, claim.segment)]  # not removed
            generation = self._catalog.recycle(claim.segment, [record.key for record in hot])
        return generation, hot

    def _lies_in(self, key: bytes, segment: int) -> bool:
        location = self._catalog.index.locate(key)
        return location is not None and location >> 45 == segment

    def _hottest(self, members: Sequence[Member]) -> list[Member]:
        """Those that were read since they were written, as many as may survive."""
        hot = [member for member in members if member.hot]
        ends = list(accumulate(record_blocks(member.length) * BLOCK_BYTES for member in hot))
        return hot[: bisect_right(ends, self._segment_bytes // REINSERTED_SHARE)]

    def _hand_on(self, claim: Claim, members: Sequence[Member]) -> None:
        """Give the chunks of a segment to whoever wants what is evicted."""
        assert self.on_evict is not None
        for run in runs([Extent(place, record_blocks(length)) for place, length, *_ in members]):
            records = self._read_back(claim, members[run])
            payloads = [record.payload.pieces[0][: record.payload.length] for record in records]
            try:
                if records:
                    self.on_evict([record.key for record in records], payloads)
            except Exception as error:  # noqa: BLE001  # another tier's fault must not keep this one from storing
                self._failed("hand on what it evicts", error)

    def _read_back(self, claim: Claim, members: Sequence[Member]) -> list[Record]:
        try:
            return read_back(claim.file, members)
        except OSError as error:
            self._failed("read", error)
            return []

    # -- other processes

    def _in_place(self) -> bool:
        """Whether the directory is still where it was; looked at no more often than POLL_S."""
        if time.monotonic() >= self._next_place_check:
            if not self._directory.in_place():
                fix = FileNotFoundError("the directory was removed or replaced. Fix: restart the engine")
                self._failed("store", fix)
                return False
            self._next_place_check = time.monotonic() + POLL_S
        return True

    def _is_ready(self) -> bool:
        """Whether this process may store; until it could, it tries again every POLL_S."""
        if self._forked:
            return False
        if not self._adopted and not self._read_only and time.monotonic() >= self._next_attempt:
            self._next_attempt = time.monotonic() + POLL_S
            try:
                self._adopt()
            except OSError as error:
                self._failed("prepare the directory for storing", error)
        return self._adopted

    def _leave(self) -> None:
        """In a forked child: read on, but store nothing, for what keeps writers apart is the parent's."""
        self._forked = True
        self._active = None
        # Threads that do not exist here may hold these.
        self._counting, self._write_lock = threading.Lock(), threading.RLock()
        self._landed = threading.Condition(self._write_lock)
        self._in_flight = {}
        self._catalog.renew_locks()

    def _adopt(self) -> None:
        """Become one of those that write. Raises OSError."""
        with self._write_lock:
            if not self._adopted and not self._closed:
                self._space.adopt(self._info.capacity_bytes)
                self._adopted = True

    def _catch_up(self, *, wait: bool, now: bool = False) -> None:
        """Learn what other processes did. Without `wait` in a few milliseconds at most."""
        if time.monotonic() < self._next_poll and not now:
            return
        self._next_poll = time.monotonic() + POLL_S
        if self._follow(blocking=now, inline=not wait):
            return
        if self._following is None or not self._following.is_alive():
            self._following = threading.Thread(target=self._follow, name="lmkv-file-follow", daemon=True)
            self._following.start()

    def _follow(self, *, blocking: bool = True, inline: bool = False) -> bool:
        """See `Catalog.follow`."""
        try:
            return self._catalog.follow(blocking=blocking, inline=inline)
        except OSError as error:
            self._failed("read the journal", error)
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
        with self._counting:
            self._counters.update(amounts)

    def _say(self, what: str) -> None:
        role = "for reading only" if self._read_only else f"as writer {self._directory.writer}"
        logger.info(
            "lmkv: %s %s with %d chunks, %s; %d damaged journal entries, %d foreign files",
            self._directory.path,
            what,
            self._catalog.index.chunks,
            role,
            self._catalog.damaged,
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
            # As text: a log that keeps its records must not keep the segments that the traceback leads to.
            text = f"{error}"
            logger.warning("lmkv: the file tier in %s could not %s: %s", self._directory.path, what, text)
