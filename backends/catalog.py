"""What the file tier holds, as all processes of a directory agree on it.

Each process keeps the index for itself and follows the journal. Who changes something holds the directory's
lock, reads what is new, decides, and appends. So all processes go through the same states in the same order:
no key is put twice, a remove finds whatever was put before it, and a segment has one owner at a time.
"""

import contextlib
import errno
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from lmkv.backends.chunks import Index
from lmkv.backends.journal import (
    CAPACITY,
    ENTRY_BYTES,
    READ,
    RECYCLE,
    REMOVE,
    Image,
    Journal,
    Row,
    max_journal_bytes,
)
from lmkv.backends.segments import Directory, max_chunks_for
from lmkv.keys import NAMESPACE_BYTES

#: More news than this is not read while a caller waits: 1,024 entries take ~3 ms.
MAX_INLINE_BYTES = 1024 * ENTRY_BYTES
#: Entries that are applied without letting a read in between, or appended without compacting in between.
_SLICE = 1024
#: Chunks whose first read was not told to the other processes yet; what is above that goes untold.
_MAX_UNTOLD = 4096


class Catalog:
    """Index and journal. Methods that change something are called within `changing`, and raise OSError."""

    def __init__(self, directory: Directory, capacity_bytes: int) -> None:
        """`capacity_bytes` holds until the journal tells another one."""
        self.index = Index()
        self.lock = threading.Lock()  # the index; never held over I/O
        self.damaged = 0  # journal entries
        self.evicted = 0  # chunks
        self._directory = directory
        self._mutex = threading.RLock()  # the journal; taken before `lock`
        self._journal = Journal(directory.journal_path)
        self._closed = self._displaced = False
        self.loads = 0  # of the journal, from its start
        self._moving: set[bytes] = set()  # read from a recycled segment, to be put again
        self._owed: list[Row] = []  # removes that the journal does not have yet
        self._untold: dict[bytes, int] = {}  # place by key
        self._told_bytes: int | None = None
        self.capacity_bytes = capacity_bytes
        self.max_chunks = max_chunks_for(capacity_bytes)

    def load(self) -> None:
        """Read the journal from the start. Raises OSError."""
        with self._mutex:
            image = self._journal.read()
            self._displaced = not self._directory.in_place()  # what was read has another lock than ours
            # Listed after the journal was read: what that speaks of is there unless it was deleted since.
            existing = self._directory.scan().segments
            index = Index.build(image, existing, self._directory.segment_bytes)
            with self.lock:
                for row in self._owed:
                    if index.lies_at(row.key, row.segment << 16 | row.offset):
                        index.discard(row.key)
                self.index = index
                self.loads += 1
                self.damaged += image.damaged
            self._moving.clear()
            self._told_bytes = None
            self._learn_capacity(image)

    def follow(self, *, blocking: bool = True, inline: bool = False) -> bool:
        """Learn what other processes did. Raises OSError.

        Without `blocking`, not if another thread is at it. False if it is more than can be done `inline`.
        """
        if not self._mutex.acquire(blocking=blocking):
            return True
        try:
            if self._closed:
                return True
            images = self._journal.news(MAX_INLINE_BYTES) if inline else self._journal.news()
            if images is not None:
                for image in images:
                    self._apply(image)
            elif inline:
                return False
            else:
                self.load()
            return True
        except BaseException:
            self._journal.close()  # what it has read may not be in the index: the next time, all of it
            raise
        finally:
            self._mutex.release()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody else changes anything, and everything is known. Raises OSError.

        Others wait meanwhile; who has not followed for a while does that before.
        """
        with self._directory.locked():
            self.follow()
            if self._displaced:
                raise FileNotFoundError(errno.ENOENT, "the directory was removed or replaced")
            yield

    def put(self, rows: Sequence[Row], *, again: bool) -> list[Row]:
        """Offer chunks that are durable. Returns those that nobody else has put meanwhile.

        Those that are put `again`, from a recycled segment, only if nobody has removed them meanwhile.
        """
        if not all(self.is_newest(row.segment, row.generation) for row in rows):
            raise OSError(errno.ESTALE, "the journal was lost meanwhile")
        fresh = [row for row in rows if not self.index.has(row.key)]
        if again:
            fresh = [row for row in fresh if row.key in self._moving]
        if not fresh:
            return fresh
        self._append([*self._read_rows(), *fresh])
        with self.lock:
            for row in fresh:
                digest, rest = row.key[:NAMESPACE_BYTES], row.key[NAMESPACE_BYTES:]
                self.index.insert(digest, rest, row.segment, row.offset, row.length)
        return fresh

    def remove(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget chunks, durably. Returns those that were there."""
        keys = dict.fromkeys(keys)
        there, elsewhere = [], []
        with self.lock:
            for key in keys:
                if self.index.has(key) or key in self._moving:
                    there.append(key)
                if self.index.has(key):
                    self._owed.append(self.index.row(REMOVE, key))
                    self.index.discard(key)
                else:  # another process may be moving it
                    elsewhere.append(Row(REMOVE, key=key))
            self._moving.difference_update(keys)
        if keys:
            self._append(elsewhere, sync=True)
        return there

    def forget(self, keys: Iterable[bytes]) -> None:
        """Do not offer these in this process; with its next change it tells the others. May be called at any
        time."""
        with self.lock:
            for key in keys:
                if self.index.has(key):
                    self._owed.append(self.index.row(REMOVE, key))
                    self.index.discard(key)

    def tell(self) -> None:
        """Make durable what was forgotten."""
        self._append((), sync=True)

    def recycle(self, segment: int, moving: Sequence[bytes] = ()) -> int:
        """Forget what lies in a segment, before it is written to or deleted. Returns its generation from now
        on. `moving` will be put again."""
        known = self.index.segments.get(segment)
        generation = known.generation + 1 if known else 1
        # Not synced: after a power cut that loses this entry, what was overwritten fails verification.
        self._append([Row(RECYCLE, segment, generation, time_s=int(time.time()))])
        with self.lock:
            self._moving.update(moving)
            self.evicted += self.index.recycle(segment, generation) - len(moving)
        return generation

    def moved(self, keys: Iterable[bytes]) -> None:
        """These are not moving any more, wherever they are now. May be called at any time."""
        with self.lock:
            self._moving.difference_update(keys)

    def is_newest(self, segment: int, generation: int) -> bool:
        """False after the journal was lost, while somebody wrote to this segment."""
        known = self.index.segments.get(segment)
        return known is not None and known.generation == generation

    def agree_on_capacity(self, capacity_bytes: int) -> None:
        """From now on the directory may hold so much, for all processes. Its segments fit already."""
        if self.damaged:
            self._compact()
        if self._told_bytes != capacity_bytes:
            self._append([Row(CAPACITY, key=capacity_bytes.to_bytes(8, "little"))])
        self._set_capacity(capacity_bytes)
        if self._journal.size_bytes > self._journal.max_bytes:
            self._compact()

    def note_read(self, reads: Iterable[tuple[bytes, int]]) -> None:
        """These chunks were read at these places: they may survive recycling. May be called at any time."""
        with self.lock:
            for key, place in reads:
                if self.index.mark_hot(key, place) and len(self._untold) < _MAX_UNTOLD:
                    self._untold[key] = place

    def renew_locks(self) -> None:
        """In a forked child: threads that do not exist here may hold them."""
        self.lock, self._mutex = threading.Lock(), threading.RLock()
        self._directory.renew_lock()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            self._journal.close()

    def _read_rows(self) -> list[Row]:
        """What was read for the first time, as far as it still lies there."""
        with self.lock:
            untold, self._untold = self._untold, {}
            return [self.index.row(READ, key) for key, at in untold.items() if self.index.lies_at(key, at)]

    def _apply(self, image: Image) -> None:
        for start in range(0, len(image.entries), _SLICE):
            part = Image(image.entries[start : start + _SLICE], image.namespaces, 0, 0)
            with self.lock:
                self._moving.difference_update(self.index.apply(part, self._directory.segment_bytes))
        self.damaged += image.damaged
        self._learn_capacity(image)

    def _compact(self) -> None:
        with self._mutex:
            self._journal.compact()

    def _append(self, rows: Sequence[Row], *, sync: bool = False) -> None:
        with self._mutex:
            if self._closed:
                raise OSError(errno.EBADF, "the tier is closed")
            with self.lock:
                owed = list(self._owed)
            surviving = self.index.chunks + len(self.index.segments)
            rows = [*owed, *rows]
            while len(rows) > _SLICE:  # a journal of the least size has room for these, once it is compacted
                self._journal.append(rows[:_SLICE], surviving)
                rows = rows[_SLICE:]
            self._journal.append(rows, surviving, sync=sync)
            with self.lock:
                del self._owed[: len(owed)]

    def _learn_capacity(self, image: Image) -> None:
        if (capacity_bytes := image.capacity_bytes) is not None:
            self._set_capacity(capacity_bytes)
            self._told_bytes = capacity_bytes

    def _set_capacity(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_chunks = max_chunks_for(capacity_bytes)
        self._journal.max_bytes = max_journal_bytes(self.max_chunks)[0]
