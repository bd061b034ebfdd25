"""The file tier's directory: who may use it, what is in it, and how its segments are opened.

    FORMAT               format version and segment size, text
    writer.lock          locked while a process changes what the directory holds
    w0-00000.seg         segment 0: preallocated, recycled, never grown
    w0.journal           the journal of all processes

A lock goes with the last descriptor of the open file, so what a killed process held is free at once:

    writer.lock, flock       to append to the journal, or to create, take or delete a segment
    writer.lock, byte n      process n of those that write, for as long as it does
    a segment, flock         to write to it: nobody else recycles it
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lmkv.backends import quick
from lmkv.backends.journal import max_journal_bytes, sync_directory
from lmkv.config import ConfigError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
#: Unit of O_DIRECT offsets, lengths and addresses that every common disk accepts.
BLOCK_BYTES = 4096
#: Below, one segment holds too few chunks; above, recycling drops too much at a time, and offsets in
#: blocks outgrow the 16 bits that journal entries give them.
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 8 * 2**20, 256 * 2**20
#: At least this many segments in a new directory: recycling one then costs 6 % of what is stored or
#: less. More and smaller ones would waste more at their ends, where a large chunk does not fit.
SEGMENTS = 16
#: With fewer, recycling one would drop a third or more of the tier.
MIN_SEGMENTS = 4
#: Journal entries number segments with 16 bits (16 TiB of the largest).
MAX_SEGMENTS = 2**16
#: Chunks below this average fill the index before the disk; it bounds the journal to ~1 % of the capacity.
MIN_MEAN_CHUNK_BYTES = 16 * 2**10
#: About 1 GB of index in memory.
MAX_CHUNKS = 2**22
#: FORMAT, lock, probe and the directory itself.
_OTHER_BYTES = 256 * 2**10

#: Processes that write one directory: engines of one machine.
MAX_WRITERS = 64
#: The directory is locked for milliseconds, or seconds while a journal of millions of chunks is compacted;
#: for longer if who holds it is stopped, or an older lmkv. Below the deadline of the executor.
LOCK_WAIT_S = 4.0
#: After that was in vain, and until it succeeds: else a batch, or several threads, would wait many times.
_STUCK_WAIT_S = 0.05
#: A probe that is left over is older than this.
_PROBE_S = 60

_SEGMENT_NAME = re.compile(r"w0-(\d{5})\.seg", re.ASCII)
_OTHER_NAME = re.compile(r"FORMAT(\.tmp)?|writer\.lock|w0\.journal(\.tmp)?|(probe)\.\d+\.\d+", re.ASCII)


#: struct flock of fcntl(2): type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


@dataclass
class Scan:
    """What lies in the directory. Sizes are the disk space that `du` counts."""

    segments: set[int] = field(default_factory=set)
    foreign_files: int = 0
    foreign_bytes: int = 0
    own_bytes: int = 0


class SegmentFile:
    """An open segment. When nobody holds it any more, it closes itself, and its lock ends."""

    __slots__ = ("__weakref__", "_locked", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._locked = False

    def lock(self) -> bool:
        """Keep everybody else from writing to it, unless somebody already does that."""
        if quick.lock(self.fd):
            self._locked = True
            _held.add(self)
        return self._locked

    def abandon(self) -> None:
        """Close it in a forked process, without a word to the one that holds the lock."""
        os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        if self.fd < 0:
            return
        if self._locked:  # closing it would not do, if a fork has it too
            quick.unlock(self.fd)
        os.close(self.fd)


#: What keeps others out as long as any process has it open: a fork must not.
_held: "weakref.WeakSet[SegmentFile | Directory]" = weakref.WeakSet()


def _abandon() -> None:
    for held in list(_held):
        held.abandon()


os.register_at_fork(after_in_child=_abandon)


def segment_bytes_for(capacity_bytes: int) -> int:
    """Segment size of a new directory: a power of two, a 16th of its capacity or less."""
    size = 1 << (capacity_bytes // SEGMENTS).bit_length() - 1 if capacity_bytes >= SEGMENTS else 1
    return min(max(size, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)


def max_chunks_for(capacity_bytes: int) -> int:
    """Chunks that the index may hold."""
    return min(capacity_bytes // MIN_MEAN_CHUNK_BYTES, MAX_CHUNKS)


def max_segments_for(capacity_bytes: int, segment_bytes: int, foreign_bytes: int = 0) -> int:
    """Segments that fit into the capacity next to everything else, extent blocks included."""
    journal, copy = max_journal_bytes(max_chunks_for(capacity_bytes))
    # A file system keeps the extents of a badly fragmented file outside of its inode: ext4 needs 4 KiB
    # for 340 extents, so a 512th of the segment holds one extent for every 6 KiB.
    segment_cost = segment_bytes + segment_bytes // 512 + 4 * BLOCK_BYTES
    return min((capacity_bytes - foreign_bytes - journal - copy - _OTHER_BYTES) // segment_cost, MAX_SEGMENTS)


class Directory:
    """A directory that passed all checks."""

    def __init__(self, path: Path, capacity_bytes: int, *, read_only: bool = False) -> None:
        """Check or create. Raises ConfigError naming `[file] path` or `[file] capacity`.

        With `read_only` this process is none of those that write.
        """
        self.path = path
        self._lock_fd = -1
        self._mutex = threading.Lock()  # flock does not tell threads apart
        self._stuck = False  # the last wait was in vain
        try:
            self._check_owner()
            self._lock_fd = os.open(
                path / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            _held.add(self)
            segment_bytes = self._read_format()
            self._check_capacity(capacity_bytes, segment_bytes or segment_bytes_for(capacity_bytes))
            if segment_bytes is None:
                segment_bytes = self._set_up(capacity_bytes)
            self.segment_bytes = segment_bytes
            #: Which of those that write this process is.
            self.writer = None if read_only else self._take_seat(capacity_bytes)
            self.direct = self._probe_direct()
        except OSError as error:
            self.close()
            problem = f"{path} cannot be used: {error}."
            fix = "name a directory on a local disk that this user can write to."
            raise ConfigError("[file] path", problem, fix) from error
        except ConfigError:
            self.close()
            raise
        if not self.direct:
            logger.warning(
                "lmkv: %s refuses O_DIRECT; the file tier goes through the page cache, which costs memory "
                "and about half of the speed",
                path,
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one, of all processes and threads, who changes what the directory holds.

        Raises TimeoutError when somebody else holds it all the time.
        """
        if not self._mutex.acquire(timeout=LOCK_WAIT_S):
            raise _busy()
        try:
            self._lock()
            try:
                yield
            finally:
                quick.unlock(self._lock_fd)
        finally:
            self._mutex.release()

    def _lock(self) -> None:
        deadline, pause_s = time.monotonic() + (_STUCK_WAIT_S if self._stuck else LOCK_WAIT_S), 0.0001
        while True:
            if self._lock_fd < 0:
                raise OSError(errno.EBADF, "the directory is closed")
            if quick.lock(self._lock_fd):
                self._stuck = False
                return
            if time.monotonic() > deadline:
                self._stuck = True
                raise _busy()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)

    def in_place(self) -> bool:
        """Whether the path still names this directory: somebody may have removed or replaced it, and
        what is written here then is lost with the last file handle."""
        try:
            there = os.stat(self.path / "writer.lock", follow_symlinks=False)
            here = os.fstat(self._lock_fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def renew_lock(self) -> None:
        """In a forked process: a thread that does not exist here may hold it."""
        self._mutex = threading.Lock()

    def abandon(self) -> None:
        """In a forked process: its locks are another one's."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def close(self) -> None:
        """Calling it again does nothing."""
        with self._mutex:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._lock_fd = -1

    def scan(self) -> Scan:
        """Look at every name. Raises OSError."""
        result = Scan()
        with os.scandir(self.path) as names:
            for entry in names:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # a process beside us dropped it
                    continue
                taken = status.st_blocks * 512
                # What has another name too, a hard link, may be somebody's file elsewhere.
                ours = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                ours = ours and status.st_uid == os.geteuid()
                match = _SEGMENT_NAME.fullmatch(entry.name) if ours else None
                if match and int(match[1]) < MAX_SEGMENTS:
                    result.segments.add(int(match[1]))
                elif not ours or not _OTHER_NAME.fullmatch(entry.name):
                    result.foreign_files += 1
                    result.foreign_bytes += taken
                    continue
                result.own_bytes += taken
        return result

    @property
    def journal_path(self) -> Path:
        """Path of the journal."""
        return self.path / "w0.journal"

    def open_segment(self, segment: int, mode: int = os.O_RDONLY) -> SegmentFile:
        """Raises OSError."""
        file = SegmentFile(os.open(self._segment_path(segment), mode | self._flags(), 0o600))
        status = os.fstat(file.fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(errno.ELOOP, "not a regular file, or one with another name")
        return file

    def preallocate(self, file: SegmentFile) -> None:
        """Give a segment its full size, and no more. Raises OSError."""
        if os.fstat(file.fd).st_size > self.segment_bytes:
            os.ftruncate(file.fd, self.segment_bytes)
        os.posix_fallocate(file.fd, 0, self.segment_bytes)

    def has_segment(self, segment: int) -> bool:
        """Whether anything has the name of this segment."""
        return os.path.lexists(self._segment_path(segment))

    def delete_segment(self, segment: int) -> None:
        """Give the space of a segment back; also of one that could only be allocated in part."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._segment_path(segment))

    def delete_leftovers(self) -> None:
        """Delete the unfinished files of processes that were killed. Holds `locked`."""
        for name in os.listdir(self.path):
            match = _OTHER_NAME.fullmatch(name)
            if match and (name.endswith(".tmp") or match[3]):
                with contextlib.suppress(FileNotFoundError):
                    age_s = time.time() - os.lstat(self.path / name).st_mtime
                    if not match[3] or age_s > _PROBE_S:
                        os.unlink(self.path / name)

    def max_segments(self, capacity_bytes: int, scan: Scan) -> int:
        """Segments that there may be."""
        return max_segments_for(capacity_bytes, self.segment_bytes, scan.foreign_bytes)

    def _segment_path(self, segment: int) -> Path:
        return self.path / f"w0-{segment:05}.seg"

    def _flags(self) -> int:
        # Without O_NONBLOCK, opening a named pipe in a file's place would hang.
        return (os.O_DIRECT if self.direct else 0) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

    def _check_owner(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            pass
        except NotADirectoryError:
            raise self._bad(f"a parent of {self.path} is not a directory.", "name another path.") from None
        status = self.path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise self._bad(f"{self.path} is not a directory.", "name a directory.")
        if status.st_uid != os.geteuid():
            problem = f"{self.path} belongs to user id {status.st_uid}, not to ours ({os.geteuid()})."
            raise self._bad(problem, "name a directory of this user, or chown it.")
        if status.st_mode & 0o022:
            problem = f"{self.path} can be written to by others (mode {stat.S_IMODE(status.st_mode):o})."
            raise self._bad(problem, f"chmod go-w {self.path}, or name another directory.")

    def _check_capacity(self, capacity_bytes: int, segment_bytes: int) -> None:
        scan = self.scan()
        file_system = os.statvfs(self.path)
        available = file_system.f_bavail * file_system.f_frsize + scan.own_bytes
        if capacity_bytes > available:
            problem = f"{capacity_bytes} bytes are more than the {available} that {self.path} can hold."
            raise ConfigError("[file] capacity", problem, "set a smaller capacity, or free disk space.")
        if max_segments_for(capacity_bytes, segment_bytes, scan.foreign_bytes) < MIN_SEGMENTS:
            raise self._too_small(capacity_bytes, segment_bytes, scan.foreign_bytes)

    def _too_small(self, capacity_bytes: int, segment_bytes: int, foreign_bytes: int) -> ConfigError:
        needed = MIN_SEGMENTS * segment_bytes
        while max_segments_for(needed, segment_bytes, foreign_bytes) < MIN_SEGMENTS:
            needed += 2**20
        problem = (
            f"{capacity_bytes} bytes are too few: {self.path} has segments of {segment_bytes} bytes "
            f"and {foreign_bytes} bytes of other files."
        )
        return ConfigError("[file] capacity", problem, f"set at least {needed}, or name an empty directory.")

    def _read_format(self) -> int | None:
        """Segment size of an existing directory; None in a new one."""
        try:
            # Without O_NONBLOCK, opening a named pipe in its place would hang.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(self.path / "FORMAT", flags)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            text = file.read(4096).decode("ascii", "replace") if is_file else ""
        match = re.fullmatch(r"lmkv file tier\nversion (\d{1,9})\nsegment_bytes (\d{1,9})\n", text)
        if match is None or int(match[1]) != FORMAT_VERSION:
            found = f"version {match[1]}" if match else "not readable"
            problem = f"the format of {self.path} is {found}; this lmkv reads version {FORMAT_VERSION}."
            raise self._bad(problem, "name another directory, or empty this one.")
        segment_bytes = int(match[2])
        if not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES or segment_bytes % BLOCK_BYTES:
            problem = f"{self.path}/FORMAT has a segment size of {segment_bytes} bytes."
            raise self._bad(problem, "name another directory, or empty this one.")
        return segment_bytes

    def _set_up(self, capacity_bytes: int) -> int:
        """Segment size of the directory, which somebody else may be setting up at this moment."""
        with self.locked():
            segment_bytes = self._read_format()
            if segment_bytes is None:
                return self._write_format(segment_bytes_for(capacity_bytes))
        self._check_capacity(capacity_bytes, segment_bytes)
        return segment_bytes

    def _take_seat(self, capacity_bytes: int) -> int:
        # Each may write to two segments at a time: one is being filled while the last one is flushed.
        count = min(MAX_WRITERS, self.max_segments(capacity_bytes, self.scan()) // 2)
        # Not only those of the first numbers: they may have come when the capacity was larger.
        taken = sum(map(self._is_locked, range(MAX_WRITERS)))
        for number in range(count if taken < count else 0):
            if self._lock_byte(number):
                return number
        problem = f"{max(taken, count)} engines write to {self.path} already; its capacity allows {count}."
        raise self._bad(problem, "set a larger capacity, or role to read_only, or name another directory.")

    def _is_locked(self, at: int) -> bool:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        held = _FLOCK.unpack(fcntl.fcntl(self._lock_fd, fcntl.F_OFD_GETLK, request))
        return bool(held[0] != fcntl.F_UNLCK)

    def _lock_byte(self, at: int) -> bool:
        """Lock of the open file, as flock is, but of a part of it; in one process, two tiers exclude each
        other."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        try:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _write_format(self, segment_bytes: int) -> int:
        temporary = self.path / "FORMAT.tmp"
        self.delete_leftovers()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(f"lmkv file tier\nversion {FORMAT_VERSION}\nsegment_bytes {segment_bytes}\n")
            file.flush()
            os.fsync(fd)
        os.rename(temporary, self.path / "FORMAT")
        sync_directory(self.path)
        return segment_bytes

    def _probe_direct(self) -> bool:
        """Whether O_DIRECT works here: write a block and read it back."""
        probe = self.path / f"probe.{os.getpid()}.{time.monotonic_ns()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        block = mmap.mmap(-1, BLOCK_BYTES)
        block[:4] = b"lmkv"
        try:
            fd = os.open(probe, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with contextlib.suppress(FileNotFoundError):  # tmpfs creates the file before it refuses
                os.unlink(probe)
            return False
        try:
            os.unlink(probe)
            os.pwrite(fd, block, 0)
            block[:4] = b"none"
            os.preadv(fd, [block], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            os.close(fd)
        return block[:4] == b"lmkv"

    def _bad(self, problem: str, fix: str) -> ConfigError:
        return ConfigError("[file] path", problem, fix)


def _busy() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "another process has held writer.lock for too long")
