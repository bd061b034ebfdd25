"""System calls that never wait, made without giving up the GIL.

Python gives it up for every system call, and beside a busy thread it takes a switch interval to get it back:
more than a thousand times as long as these calls take.
"""

import ctypes
import errno
import fcntl
import os

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.flock.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.lseek.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int)
_libc.lseek.restype = ctypes.c_int64


def lock(fd: int) -> bool:
    """flock(2) for oneself alone; False if somebody else has it. Raises OSError."""
    if _libc.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) == 0:
        return True
    code = ctypes.get_errno()
    if code not in (errno.EWOULDBLOCK, errno.EINTR):
        raise OSError(code, os.strerror(code))
    return False


def unlock(fd: int) -> None:
    """End `lock`. Raises OSError."""
    if _libc.flock(fd, fcntl.LOCK_UN) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def file_bytes(fd: int) -> int:
    """Size of an open file, whose position it moves. Raises OSError."""
    size: int = _libc.lseek(fd, 0, os.SEEK_END)
    if size < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return size
