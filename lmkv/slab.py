"""The host slab: one piece of memory shared by all processes of one engine.

The memory is a memfd. The first process to arrive creates it and leaves a few bytes of text in
a rendezvous file named after the engine, through which the others open the same memfd by way of
/proc/PID/fd; the scheduler removes the file once every rank has joined. So /dev/shm never holds
KV bytes (its size, 64 MiB in Docker, does not matter) and an engine that is killed leaves no
memory behind, at worst a rendezvous file that the next start removes.

The slab begins with a control area (layout below, 64-bit words) through which the ranks tell the
scheduler what they registered and what they finished; slots start at `DATA_OFFSET`.
"""

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
#: Slots start here: the control area rounded up to a huge page.
DATA_OFFSET = HUGE_PAGE_BYTES
#: Memory is faulted in and collapsed this much at a time: about 0.3 s of background work, small
#: enough that the first slots are usable at once.
PIECE_BYTES = 64 << 20
_JOIN_TIMEOUT_S = 60.0
_MEMFD_NAME = "lmkv-slab"

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_PROT_READ_WRITE = 0x3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Words of the control area. Each word has one writer.
_W_READY, _W_HUGE, _W_FAULTED = 0, 1, 2
_RANK_AREA_WORDS = 512
#: Control areas of 4 KiB that fit before the data, less the common one.
MAX_RANKS = DATA_OFFSET // 8 // _RANK_AREA_WORDS - 1
_W_REGISTERED, _W_FINGERPRINT, _W_GROUPS, _W_WATERMARK, _W_FAILED_COUNT = 0, 1, 5, 6, 7
_W_GROUP_BYTES = 8
MAX_GROUPS = 128
_W_FAILED = _W_GROUP_BYTES + MAX_GROUPS
#: Remembered tickets of failed stores; when more fail unseen, everything in flight is dropped.
FAILED_RING = 256


class SlabError(RuntimeError):
    """The slab cannot be made or joined. The message says what to change."""


class RankArea:
    """One rank's words in the control area: written by the rank, read by the scheduler."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words

    def register(self, fingerprint: bytes, group_bytes: Sequence[int]) -> None:
        """Publish this rank's layout: a 32-byte fingerprint and its bytes per chunk of each group."""
        if len(group_bytes) > MAX_GROUPS:
            raise SlabError(f"the model has {len(group_bytes)} KV groups; lmkv handles {MAX_GROUPS}")
        self._words[_W_FINGERPRINT : _W_FINGERPRINT + 4] = np.frombuffer(fingerprint, np.uint64)
        self._words[_W_GROUP_BYTES : _W_GROUP_BYTES + len(group_bytes)] = group_bytes
        self._words[_W_GROUPS] = len(group_bytes)
        self._words[_W_REGISTERED] = 1

    @property
    def registered(self) -> bool:
        """Whether the rank has published its layout."""
        return bool(self._words[_W_REGISTERED])

    @property
    def fingerprint(self) -> bytes:
        """The rank's 32-byte layout fingerprint."""
        return self._words[_W_FINGERPRINT : _W_FINGERPRINT + 4].tobytes()

    @property
    def group_bytes(self) -> list[int]:
        """This rank's bytes per chunk, one entry a group."""
        count = int(self._words[_W_GROUPS])
        return [int(n) for n in self._words[_W_GROUP_BYTES : _W_GROUP_BYTES + count]]

    def finish(self, watermark: int) -> None:
        """Publish that every transfer with a ticket up to `watermark` is over."""
        self._words[_W_WATERMARK] = watermark

    @property
    def watermark(self) -> int:
        """Highest ticket up to which all transfers of this rank are over."""
        return int(self._words[_W_WATERMARK])

    def fail(self, ticket: int) -> None:
        """Publish that this rank's part of the store `ticket` failed. Call it before the store
        is acknowledged to the engine."""
        count = int(self._words[_W_FAILED_COUNT])
        self._words[_W_FAILED + count % FAILED_RING] = ticket
        self._words[_W_FAILED_COUNT] = count + 1

    @property
    def failed_count(self) -> int:
        """How many stores this rank failed so far."""
        return int(self._words[_W_FAILED_COUNT])

    def failed_since(self, seen: int) -> list[int] | None:
        """Tickets of the stores that failed after the first `seen`; None if some were overwritten."""
        count = self.failed_count
        if count - seen > FAILED_RING:
            return None
        return [int(self._words[_W_FAILED + i % FAILED_RING]) for i in range(seen, count)]


class Slab:
    """A mapping of the shared slab in this process."""

    def __init__(self, memfd: int, capacity_bytes: int, rendezvous: Path | None) -> None:
        self.capacity_bytes = capacity_bytes
        self._memfd: int | None = memfd
        self._rendezvous = rendezvous
        self._prefault_thread: threading.Thread | None = None
        self._closing = False
        self._mapped_bytes = DATA_OFFSET + capacity_bytes
        self._reserved, self._reserved_bytes, self._address = _map_aligned(memfd, self._mapped_bytes)
        raw = (ctypes.c_ubyte * self._mapped_bytes).from_address(self._address)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memoryview(raw).cast("B"), np.uint8)
        self._words = self._bytes[:DATA_OFFSET].view(np.uint64)
        #: The slots' bytes; a slot is named by its byte offset in here.
        self.data = memoryview(raw).cast("B")[DATA_OFFSET:]

    @property
    def address(self) -> int:
        """Virtual address of the first slot in this process."""
        return self._address + DATA_OFFSET

    @property
    def ready_bytes(self) -> int:
        """Leading bytes of `data` that are faulted in; slots may be used up to here."""
        return int(self._words[_W_READY])

    @property
    def huge_bytes(self) -> int:
        """How many of the ready bytes lie in huge pages."""
        return int(self._words[_W_HUGE])

    @property
    def fully_faulted(self) -> bool:
        """Whether prefaulting is over (also when it stopped early for lack of memory)."""
        return bool(self._words[_W_FAULTED])

    def rank(self, rank: int) -> RankArea:
        """The control words of one rank (0-based)."""
        if not 0 <= rank < MAX_RANKS:
            raise SlabError(f"rank {rank} is out of range: lmkv handles {MAX_RANKS} ranks an engine")
        start = (rank + 1) * _RANK_AREA_WORDS
        return RankArea(self._words[start : start + _RANK_AREA_WORDS])

    def prefault(self) -> None:
        """Fault in the whole slab and collapse it into huge pages, piece by piece. Blocks."""
        for start in range(0, self.capacity_bytes, PIECE_BYTES):
            if self._closing:
                return
            size = min(PIECE_BYTES, self.capacity_bytes - start)
            where = self.address + start
            if _libc.madvise(where, size, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code != errno.EINVAL:  # EINVAL: kernel < 5.14, pages fault in on first use
                    logger.warning(
                        "lmkv: [host] capacity: memory ran out after %d of %d bytes (%s); "
                        "the host tier stays that small. Fix: lower [host] capacity.",
                        start,
                        self.capacity_bytes,
                        os.strerror(code),
                    )
                    break
            if _libc.madvise(where, size, _MADV_COLLAPSE) == 0:
                self._words[_W_HUGE] += np.uint64(size)
            self._words[_W_READY] = start + size
        self._words[_W_FAULTED] = 1

    def prefault_in_background(self) -> None:
        """Start `prefault` on a thread of its own."""
        self._prefault_thread = threading.Thread(target=self.prefault, name="lmkv-prefault", daemon=True)
        self._prefault_thread.start()

    def unlink(self) -> None:
        """Remove the rendezvous file: call it once every process has joined. Idempotent."""
        if self._rendezvous is not None:
            self._rendezvous.unlink(missing_ok=True)
            self._rendezvous = None
        if self._memfd is not None:
            os.close(self._memfd)
            self._memfd = None

    def close(self) -> None:
        """Give the memory back. Views of `data` must not be used afterwards. Idempotent."""
        if self._bytes is None:
            return
        self._closing = True
        if self._prefault_thread is not None:
            self._prefault_thread.join()
        self.unlink()
        self.data.release()
        del self._words
        self._bytes = None
        _libc.munmap(self._reserved, self._reserved_bytes)


def create_or_join(engine_id: str, capacity_bytes: int) -> Slab:
    """Open the slab of the engine `engine_id`, making it if this process is the first.

    The creator's capacity (a multiple of 4 KiB) counts, and it starts to prefault in the background.
    Raises SlabError when another process's slab cannot be opened.
    """
    path = _rendezvous_path(engine_id)
    _remove_stale(path)
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        try:
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:  # a symbolic link, a directory, another user's file
            raise SlabError(
                f"{path} cannot be opened ({error.strerror}). Fix: remove it or use another engine id."
            ) from error
        try:
            if not _lock(fd, deadline) or not _same_file(fd, path):
                if time.monotonic() > deadline:
                    raise SlabError(f"{path} stayed locked for {_JOIN_TIMEOUT_S:.0f} s")
                continue
            if os.fstat(fd).st_uid != os.geteuid():
                raise SlabError(f"{path} belongs to another user. Fix: remove it or use another engine id.")
            described = _parse(os.pread(fd, 256, 0))
            if described is not None and (memfd := _open_memfd(*described)) is not None:
                return Slab(memfd, os.fstat(memfd).st_size - DATA_OFFSET, path)
            memfd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
            os.ftruncate(memfd, DATA_OFFSET + capacity_bytes)
            slab = Slab(memfd, capacity_bytes, path)
            text = f"{os.getpid()} {memfd} {os.fstat(memfd).st_ino}\n"
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
            slab.prefault_in_background()
            return slab
        finally:
            os.close(fd)


def private(capacity_bytes: int) -> Slab:
    """A slab of this process alone, faulted in before it returns (for tests and benchmarks)."""
    memfd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
    os.ftruncate(memfd, DATA_OFFSET + capacity_bytes)
    slab = Slab(memfd, capacity_bytes, None)
    slab.prefault()
    return slab


def _map_aligned(memfd: int, size: int) -> tuple[int, int, int]:
    """Map `memfd` at a huge-page boundary; returns (reserved address, reserved bytes, address).

    mmap alone does not align shared memory, and only aligned memory can become huge pages.
    """
    reserved_bytes = size + HUGE_PAGE_BYTES
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _libc.mmap(None, reserved_bytes, 0, flags, -1, 0)
    if reserved in (None, ctypes.c_void_p(-1).value):
        raise SlabError(f"cannot reserve {reserved_bytes} bytes of address space. Fix: [host] capacity.")
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    mapped = _libc.mmap(address, size, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, memfd, 0)
    if mapped != address:
        code = ctypes.get_errno()
        raise SlabError(f"cannot map the host slab: {os.strerror(code)}. Fix: lower [host] capacity.")
    return reserved, reserved_bytes, address


def _rendezvous_path(engine_id: str) -> Path:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    return folder / f"{_rendezvous_prefix()}{name}.slab"


def _rendezvous_prefix() -> str:
    """Names the user and the PID namespace: containers may share a /dev/shm (docker --ipc=host), and
    the process ids in one's files mean nothing in another."""
    return f"lmkv-{os.geteuid()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _lock(fd: int, deadline: float) -> bool:
    """Take the exclusive lock; it is only ever held for the few system calls of a join."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)


def _same_file(fd: int, path: Path) -> bool:
    """Whether `path` still names the file behind `fd` (a cleaner may have removed it meanwhile)."""
    try:
        return os.fstat(fd).st_ino == path.stat(follow_symlinks=False).st_ino
    except FileNotFoundError:
        return False


def _parse(text: bytes) -> tuple[int, int, int] | None:
    """(pid, fd, inode) from a rendezvous file, None if it holds nothing usable."""
    parts = text.decode("ascii", "replace").split()
    if len(parts) != 3 or not text.endswith(b"\n") or not all(part.isdigit() for part in parts):
        return None
    pid, fd, inode = (int(part) for part in parts)
    return pid, fd, inode


def _open_memfd(pid: int, fd: int, inode: int) -> int | None:
    """Open another process's memfd, None if that process is gone."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # The number may have passed to another process: open nothing of it that is not a slab.
        if not os.readlink(path).startswith(f"/memfd:{_MEMFD_NAME}"):
            return None
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        raise SlabError(
            f"/proc/{pid}/fd is not readable: the engine's processes need one user and one PID "
            "namespace, and ptrace rights between them (do not run them with hidepid or as non-dumpable)."
        ) from error
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        return None
    return opened


def _remove_stale(ours: Path) -> None:
    """Remove rendezvous files whose engine is gone."""
    for path in ours.parent.glob(f"{_rendezvous_prefix()}*.slab"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone already, or not ours to touch
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            described = _parse(os.pread(fd, 256, 0))
            alive = _open_memfd(*described) if described is not None else None
            if alive is not None:
                os.close(alive)
            elif path != ours and _same_file(fd, path):
                path.unlink(missing_ok=True)
        except (BlockingIOError, SlabError):
            continue  # being created just now, or alive under another user namespace
        finally:
            os.close(fd)
