"""The Redis protocol (RESP2) on a connected socket: payloads go out of and into the caller's memory.

redis-py opens the connection: address, TLS, authentication. What follows goes past its parser, which would
copy every payload twice. Format: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

#: Buffers of one `sendmsg`: Linux takes no more (IOV_MAX).
_MAX_VECTORS = 1024
#: Replies that carry no payload are read through memory of this size; no such line is longer.
_BUFFER_BYTES = 64 << 10
#: A value that is not the expected one is read and thrown away up to this size; the connection is given up
#: for a larger one.
_MAX_DRAIN_BYTES = 8 << 20
#: How often the watchdog looks. A deadline is kept to about this.
_WATCH_S = 0.02


class ProtocolError(Exception):
    """The other side sent what no reply to these commands can be."""


class Refused(Exception):
    """An error reply. Its first word names it, such as OOM or MOVED."""

    @property
    def kind(self) -> str:
        """The first word."""
        return str(self).partition(" ")[0]


class Watchdog:
    """Shuts sockets down that are past their deadline, from a thread of its own.

    A time-out of the socket would not do: it starts anew with every byte that comes.
    """

    def __init__(self) -> None:
        self._watched: dict[object, tuple[float, Any]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: How many it shut down.
        self.expired = 0

    @contextlib.contextmanager
    def watch(self, connection: Any, deadline: float) -> Iterator[None]:
        """While the block runs, `connection.abort()` is called once it is later than `deadline`
        (`time.monotonic`)."""
        mark = object()
        with self._lock:
            self._watched[mark] = deadline, connection
            if self._thread is None or not self._thread.is_alive():  # not after a fork
                self._thread = threading.Thread(target=self._run, name="lmkv-redis-watch", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._watched.pop(mark, None)

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(_WATCH_S)
            now = time.monotonic()
            with self._lock:
                late = [mark for mark, (deadline, _) in self._watched.items() if deadline < now]
                expired = [self._watched.pop(mark)[1] for mark in late]
                idle = 0 if self._watched or expired else idle + 1
                if idle > 50:  # a second without anything to watch
                    self._thread = None
                    return
                self.expired += len(expired)
            for connection in expired:
                connection.abort()


def command(*words: bytes) -> bytes:
    """One command without payload."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def number(text: Any) -> int:
    """What digits stand for. Raises ProtocolError if there are none."""
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ProtocolError(f"{text!r:.40} instead of a number") from None


#: The usual integer replies.
_DIGITS = {b":%d" % digit: digit for digit in range(10)}


class Wire:
    """One connection. Whatever goes wrong closes it, so that a reply can never be taken for another's.

    Raises OSError (also after `abort`), ProtocolError.
    """

    def __init__(self, connection: Any) -> None:
        """`connection`: of redis-py, connected; its parser must hold nothing that was not read."""
        self._connection = connection
        # redis-py has no public way to the socket.
        self._socket: socket.socket = connection._sock
        self._socket.settimeout(None)  # the watchdog ends what takes too long
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._memory = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._memory)
        self._start = self._end = 0
        self.aborted = False

    def abort(self) -> None:
        """Make every call under way on another thread end with OSError."""
        self.aborted = True
        with contextlib.suppress(OSError):
            # Of the plain socket: TLS would want to say goodbye.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):  # redis-py's clean-up of a broken connection may raise anything
            self._connection.disconnect()

    @property
    def quiet(self) -> bool:
        """Whether nothing is left over from earlier commands, and the server has not hung up."""
        if self._start != self._end:
            return False
        if self._tls:  # records without content may come at any time
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts, in order."""
        if self._tls:
            for part in parts:
                self._socket.sendall(part)
            return
        views = [memoryview(part) for part in parts]
        at = 0
        while at < len(views):
            sent = self._socket.sendmsg(views[at : at + _MAX_VECTORS])
            while at < len(views) and sent >= views[at].nbytes:
                sent -= views[at].nbytes
                at += 1
            if sent:
                views[at] = views[at][sent:]

    def line(self) -> bytes:
        """The next line, without its end."""
        while True:
            start, end = self._start, self._memory.find(b"\r\n", self._start, self._end)
            if end >= 0:
                self._start = end + 2
                return self._buffer[start:end].tobytes()
            self._fill()

    def integers(self, count: int) -> list[Any]:
        """The next `count` replies, integers or Refused (returned)."""
        lines: list[bytes] = []
        while len(lines) < count:
            data = self._buffer[self._start : self._end].tobytes()
            whole = data.rfind(b"\r\n") + 2
            if whole >= 2:
                some = data[: whole - 2].split(b"\r\n")[: count - len(lines)]
                self._start += sum(map(len, some)) + 2 * len(some)
                lines += some
            else:
                self._fill()
        return [_DIGITS[line] if line in _DIGITS else _integer(line) for line in lines]

    def reply(self, depth: int = 4) -> Any:
        """The next reply of no payload: bytes, int, Refused (returned), None, or a list of such.

        `depth`: so many lists may lie in each other.
        """
        line = self.line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refused(rest.decode(errors="replace"))
        size = number(rest)
        if kind == b":":
            return size
        if kind == b"*" and depth > 0:
            return None if size < 0 else [self.reply(depth - 1) for _ in range(size)]
        if kind == b"$":
            if size > _BUFFER_BYTES // 2:
                raise ProtocolError(f"a value of {size} bytes instead of a short one")
            return None if size < 0 else self._short(size)
        raise ProtocolError(f"unexpected reply {line[:40]!r}")

    def array(self, count: int) -> Refused | None:
        """The head of a reply of `count` values, or the error in its place."""
        line = self.line()
        if line[:1] == b"-":
            return Refused(line[1:].decode(errors="replace"))
        if line != b"*%d" % count:
            raise ProtocolError(f"unexpected reply {line[:40]!r}")
        return None

    def value(self, pieces: Sequence[memoryview]) -> int | Refused:
        """Receive a value into `pieces` if it is exactly as long. Returns its length, -1 if there is none.

        Of another one only the first piece is filled, as far as it goes, and the rest thrown away. Raises
        ProtocolError for one of absurd length.
        """
        line = self.line()
        if line[:1] == b"-":
            return Refused(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ProtocolError(f"unexpected reply {line[:40]!r}")
        size = number(line[1:])
        if size < 0:
            return -1
        expected = sum(piece.nbytes for piece in pieces)
        if size == expected:
            self._receive(pieces)
        elif size <= expected + _MAX_DRAIN_BYTES:
            first = pieces[0][:size]
            self._receive([first])
            self._drain(size - first.nbytes)
        else:
            raise ProtocolError(f"a value of {size} bytes instead of {expected}")
        if self._short(0) != b"":
            raise ProtocolError("a value without an end")
        return size

    # -- small things

    def _fill(self) -> None:
        """Receive at least one more byte into the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _BUFFER_BYTES:
            left = self._end - self._start
            if left == _BUFFER_BYTES:
                raise ProtocolError("a line without an end")
            self._buffer[:left] = self._buffer[self._start : self._end].tobytes()
            self._start, self._end = 0, left
        count = self._socket.recv_into(self._buffer[self._end :])
        if count == 0:
            raise ConnectionError("the server closed the connection")
        self._end += count

    def _take(self, view: memoryview) -> int:
        """Copy what the buffer holds of the next `view.nbytes` bytes."""
        count = min(view.nbytes, self._end - self._start)
        view[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        return count

    def _receive(self, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            at = self._take(piece)
            while at < piece.nbytes:
                # WAITALL spares a system call, and the interpreter, per packet.
                flags = 0 if self._tls else socket.MSG_WAITALL
                count = self._socket.recv_into(piece[at:], 0, flags)
                if count == 0:
                    raise ConnectionError("the server closed the connection")
                at += count

    def _drain(self, size: int) -> None:
        scratch = memoryview(bytearray(min(size, _BUFFER_BYTES)))
        while size:
            step = min(size, scratch.nbytes)
            self._receive([scratch[:step]])
            size -= step

    def _short(self, size: int) -> bytes:
        """A value of `size` bytes and the end that follows it."""
        data = memoryview(bytearray(size + 2))
        self._receive([data])
        if data[size:].tobytes() != b"\r\n":
            raise ProtocolError("a value without an end")
        return data[:size].tobytes()


def _integer(line: bytes) -> Any:
    if line[:1] == b":":
        return number(line[1:])
    if line[:1] == b"-":
        return Refused(line[1:].decode(errors="replace"))
    raise ProtocolError(f"unexpected reply {line[:40]!r}")
