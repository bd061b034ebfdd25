"""The file tier's directory: who may use it, what is in it, and how its segments are opened.

    FORMAT               format version and segment size, text
    writer.lock          flock of the process that writes
    w0-00000.seg         segment 0 of writer 0: preallocated, recycled, never grown
    w0.journal           journal of writer 0

Names carry the writer, so that several can share a directory. This version writes as writer 0
only, under the lock, and reads what every writer left.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

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

_SEGMENT_NAME = re.compile(r"w(0|[1-9]\d{0,2})-(\d{5})\.seg", re.ASCII)
_JOURNAL_NAME = re.compile(r"w(0|[1-9]\d{0,2})\.journal", re.ASCII)
_OTHER_NAME = re.compile(r"FORMAT(\.tmp)?|writer\.lock|w0\.journal\.tmp", re.ASCII)


@dataclass
class Scan:
    """What lies in the directory. Sizes are the disk space that `du` counts."""

    segments: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    foreign_files: int = 0
    #: Taken by what this writer cannot recycle: foreign files and other writers' segments.
    foreign_bytes: int = 0
    own_bytes: int = 0


class SegmentFile:
    """An open segment. It closes itself when nobody holds it any more."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


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
    """A directory that passed all checks; `locked` says whether this process may write to it."""

    def __init__(self, path: Path, capacity_bytes: int, *, read_only: bool = False) -> None:
        """Check or create. Raises ConfigError naming `[file] path` or `[file] capacity`.

        With `read_only` the lock is held only while a new directory is created, and not afterwards.
        """
        self.path = path
        self._lock_fd = -1
        try:
            self._check_owner()
            self._lock_fd = os.open(
                path / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            self.locked = False
            if not read_only:
                self.try_lock()
            segment_bytes = self._read_format()
            self._check_capacity(capacity_bytes, segment_bytes or segment_bytes_for(capacity_bytes))
            self.segment_bytes = segment_bytes or self._write_format(segment_bytes_for(capacity_bytes))
            if read_only and self.locked:
                self.unlock()
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

    def try_lock(self) -> bool:
        """Become the writer, unless another one holds the lock."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
        return self.locked

    def in_place(self) -> bool:
        """Whether the path still names this directory: somebody may have removed or replaced it, and
        what is written here then is lost with the last file handle."""
        try:
            there = os.stat(self.path / "writer.lock", follow_symlinks=False)
        except OSError:
            return False
        here = os.fstat(self._lock_fd)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def unlock(self) -> None:
        """Let another process write."""
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        self.locked = False

    def close(self) -> None:
        """Release the lock. Calling it again does nothing."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1
        self.locked = False

    def scan(self) -> Scan:
        """Look at every name. Raises OSError."""
        result = Scan()
        with os.scandir(self.path) as names:
            for entry in names:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # a writer beside us dropped it
                    continue
                taken = status.st_blocks * 512
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if ours and (match := _SEGMENT_NAME.fullmatch(entry.name)):
                    segment = int(match[1]) << 16 | int(match[2])
                    ours = segment < 1 << 24 and segment & 0xFFFF == int(match[2])
                    if ours:
                        result.segments.add(segment)
                        result.foreign_bytes += taken if segment >> 16 else 0
                elif ours and (match := _JOURNAL_NAME.fullmatch(entry.name)) and int(match[1]) < 256:
                    result.writers.add(int(match[1]))
                    result.foreign_bytes += taken if int(match[1]) else 0
                else:
                    ours = ours and _OTHER_NAME.fullmatch(entry.name) is not None
                if ours:
                    result.own_bytes += taken
                else:
                    result.foreign_files += 1
                    result.foreign_bytes += taken
        return result

    def journal_path(self, writer: int) -> Path:
        """Path of a writer's journal."""
        return self.path / f"w{writer}.journal"

    def open_segment(self, segment: int) -> SegmentFile:
        """For reading. Raises OSError."""
        return SegmentFile(os.open(self._segment_path(segment), os.O_RDONLY | self._flags()))

    def allocate_segment(self, segment: int) -> SegmentFile:
        """For writing: a segment of full size, created if need be. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | self._flags()
        file = SegmentFile(os.open(self._segment_path(segment), flags, 0o600))
        if not stat.S_ISREG(os.fstat(file.fd).st_mode):
            raise OSError(errno.EEXIST, "not a regular file")
        if os.fstat(file.fd).st_size > self.segment_bytes:
            os.ftruncate(file.fd, self.segment_bytes)
        os.posix_fallocate(file.fd, 0, self.segment_bytes)
        return file

    def has_segment(self, segment: int) -> bool:
        """Whether anything has the name of this segment."""
        return os.path.lexists(self._segment_path(segment))

    def delete_segment(self, segment: int) -> None:
        """Give the space of a segment back; also of one that could only be allocated in part."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._segment_path(segment))

    def delete_leftovers(self) -> None:
        """Delete the unfinished files of a writer that was killed. Only for the writer."""
        for name in ("FORMAT.tmp", "w0.journal.tmp"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)

    def max_segments(self, capacity_bytes: int, scan: Scan) -> int:
        """Segments that this writer may have. Raises ConfigError when they are too few."""
        count = max_segments_for(capacity_bytes, self.segment_bytes, scan.foreign_bytes)
        if count < MIN_SEGMENTS:
            raise self._too_small(capacity_bytes, self.segment_bytes, scan.foreign_bytes)
        return count

    def _segment_path(self, segment: int) -> Path:
        return self.path / f"w{segment >> 16}-{segment & 0xFFFF:05}.seg"

    def _flags(self) -> int:
        return (os.O_DIRECT if self.direct else 0) | os.O_NOFOLLOW | os.O_CLOEXEC

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
        """Segment size of an existing directory; None in a new one that is ours to set up."""
        deadline = time.monotonic() + 5  # another process is creating it: milliseconds, unless it hangs
        while True:
            try:
                fd = os.open(self.path / "FORMAT", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if self.locked:
                    return None
                if self.try_lock():  # look again: somebody may have created it just now, and gone
                    continue
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        with open(fd, "rb") as file:
            text = file.read(4096).decode("ascii", "replace")
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
