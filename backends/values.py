"""How a chunk lies on a server of the Redis protocol, and the commands that write, read and delete it.

A chunk is the value of one key, or of several where it is longer than the part size:

    lmkv:<namespace, 64 hex digits>:{<rest of the key, 72 hex digits>}       header, first part
    lmkv:<namespace, 64 hex digits>:{<rest of the key, 72 hex digits>}:1     second part, and so on

The header is that of `lmkv.record`. What stands in braces puts all parts of a chunk on one slot of a cluster.
Several parts are written by one transaction and read by one MGET, so a reader sees a chunk whole or finds a
part missing.

A turn is one pipeline: it sends the commands for some chunks and gives one result each, `Refused` among them.
"""

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple

import numpy as np

from lmkv.backends.resp import ProtocolError, Refused, Wire, command
from lmkv.keys import KEY_BYTES, NAMESPACE_BYTES
from lmkv.record import HEADER_BYTES, decode_header, encode_header, verify
from lmkv.tier import Buffer, Status, buffer_bytes, pieces

#: More parts than this of one chunk are refused.
MAX_PARTS = 1024
#: So many parts are deleted of a chunk whose header does not tell.
_GUESSED_PARTS = 16


class Found(enum.Enum):
    """What a read may find besides a `Status`."""

    HOLE = "a part is missing"
    OTHER_PART_SIZE = "stored with another part size"


class Chunk(NamedTuple):
    """One chunk of a batch: its place there, its key and its memory."""

    position: int
    key: bytes
    buffer: Buffer = ()
    length: int = 0

    @property
    def name(self) -> bytes:
        """The server's key of the first part."""
        return _name(self.key)


Turn = Callable[[Wire, Sequence[Chunk]], Sequence[Any]]


def without_memory(keys: Sequence[bytes]) -> list[Chunk]:
    """Chunks that are only spoken about."""
    return list(map(Chunk, count(), keys))


def with_memory(keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Chunk]:
    """Chunks with their memory; there may be more buffers than keys."""
    both = enumerate(zip(keys, buffers, strict=False))
    return [Chunk(i, key, buffer, buffer_bytes(buffer)) for i, (key, buffer) in both]


def numbered(chunks: Iterable[Chunk]) -> list[Chunk]:
    """The chunks as a batch of their own."""
    return [chunk._replace(position=i) for i, chunk in enumerate(chunks)]


class Values:
    """The commands that depend on the settings."""

    def __init__(self, part_bytes: int, ttl_s: float | None) -> None:
        self._part_bytes = part_bytes
        #: The last two words of a SET.
        self._expiry = b""
        if ttl_s is not None:
            milliseconds = b"%d" % max(1, round(ttl_s * 1000))
            self._expiry = b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(milliseconds), milliseconds)

    def get(self, wire: Wire, chunks: Sequence[Chunk]) -> list[Any]:
        """Read chunks into their memory and verify them: OK, MISS, CORRUPT or `Found`."""
        requests = []
        for chunk in chunks:
            parts = self._parts(chunk.length)
            if parts == 1:
                requests.append(command(b"GET", chunk.name))
            else:
                requests.append(command(b"MGET", *_names(chunk.name, parts)))
        wire.send([b"".join(requests)])
        return [self._receive(wire, chunk) for chunk in chunks]

    def _receive(self, wire: Wire, chunk: Chunk) -> Any:
        """The result for one chunk, whose values come next."""
        count = self._parts(chunk.length)
        if count > 1 and (error := wire.array(count)) is not None:
            return error
        header = memoryview(bytearray(HEADER_BYTES))
        sizes = []
        for part in self._cut(chunk, header):
            size = wire.value(part)
            if isinstance(size, Refused):
                if count > 1:
                    raise ProtocolError(f"an error within a list: {size}")
                return size
            sizes.append((size, sum(piece.nbytes for piece in part)))
        if all(size == -1 for size, _ in sizes):
            return Status.MISS
        size, expected = sizes[0]
        if size not in (-1, expected):
            known = decode_header(header)
            same = known is not None and (known.key, known.stored_bytes) == (chunk.key, chunk.length)
            return Found.OTHER_PART_SIZE if same and size > HEADER_BYTES else Status.CORRUPT
        if any(size == -1 for size, _ in sizes):
            return Found.HOLE
        if any(size != expected for size, expected in sizes):
            return Status.CORRUPT
        whole = verify(decode_header(header), chunk.key, chunk.buffer)
        return Status.OK if whole else Status.CORRUPT

    def put(self, wire: Wire, chunks: Sequence[Chunk]) -> list[Any]:
        """Store chunks, each in one transaction if it has several parts."""
        parts: list[bytes | memoryview] = []
        words = 5 if self._expiry else 3
        for chunk in chunks:
            header = encode_header(chunk.key, chunk.buffer, time.time_ns())
            count = self._parts(chunk.length)
            if count > 1:
                parts.append(command(b"MULTI"))
            values = self._cut(chunk, memoryview(header))
            for name, value in zip(_names(chunk.name, count), values, strict=True):
                size = sum(piece.nbytes for piece in value)
                parts.append(b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(name), name, size))
                parts += value
                parts.append(b"\r\n" + self._expiry)
            if count > 1:
                parts.append(command(b"EXEC"))
        wire.send(parts)
        results = []
        for chunk in chunks:
            count = self._parts(chunk.length)
            results.append(_stored([wire.reply() for _ in range(count + 2 if count > 1 else 1)]))
        return results

    def whole(self, wire: Wire, chunks: Sequence[Chunk]) -> list[Any]:
        """Whether all parts of each chunk are there; one that lost some can be stored again."""
        wire.send([command(b"EXISTS", *_names(c.name, self._parts(c.length))) for c in chunks])
        return [
            found if isinstance(found, Refused) else found == self._parts(chunk.length)
            for found, chunk in zip(wire.integers(len(chunks)), chunks, strict=True)
        ]

    def _cut(self, chunk: Chunk, header: memoryview) -> Iterator[list[memoryview]]:
        """The memory of each value of a chunk: of the first the header and then payload."""
        views = list(pieces(chunk.buffer))
        ends = list(accumulate((view.nbytes for view in views), initial=0))
        for start in range(0, max(chunk.length, 1), self._part_bytes):
            end = min(start + self._part_bytes, chunk.length)
            inside = [
                view[max(start - at, 0) : end - at]
                for view, (at, after) in zip(views, pairwise(ends), strict=True)
                if at < end and after > start
            ]
            yield [header, *inside] if start == 0 else inside

    def _parts(self, length: int) -> int:
        return max(1, -(-length // self._part_bytes))


def exist(wire: Wire, chunks: Sequence[Chunk]) -> list[Any]:
    """1 for each chunk whose first part is there, else 0."""
    # Lookups ask for thousands: one pass over all keys, not one for each.
    text = np.frombuffer(b"".join([chunk.key for chunk in chunks]).hex().encode(), np.uint8)
    digits = text.reshape(len(chunks), 2 * KEY_BYTES)
    lines = np.empty((len(chunks), len(_EXISTS)), np.uint8)
    lines[:] = _EXISTS
    lines[:, _SPACE] = digits[:, : 2 * NAMESPACE_BYTES]
    lines[:, _REST] = digits[:, 2 * NAMESPACE_BYTES :]
    wire.send([lines.tobytes()])
    return wire.integers(len(chunks))


def lengths(wire: Wire, chunks: Sequence[Chunk]) -> list[Any]:
    """Of each chunk the payload bytes and the number of parts, as its header tells."""
    end = b"%d" % (HEADER_BYTES - 1)
    wire.send([command(b"GETRANGE", c.name, b"0", end) + command(b"STRLEN", c.name) for c in chunks])
    results: list[Any] = []
    for _ in chunks:
        start, size = wire.reply(), wire.reply()
        if isinstance(start, Refused) and start.kind != "WRONGTYPE":
            results.append(start)
            continue
        header = decode_header(start) if isinstance(start, bytes) else None
        if header is None or not isinstance(size, int) or size <= HEADER_BYTES:
            results.append((0, _GUESSED_PARTS))
        else:
            parts = -(-header.stored_bytes // (size - HEADER_BYTES))
            results.append((header.stored_bytes, min(max(1, parts), MAX_PARTS)))
    return results


def unlink(wire: Wire, chunks: Sequence[Chunk]) -> list[Any]:
    """Delete each chunk, whose `length` says how many parts it has; how many there were."""
    wire.send([command(b"UNLINK", *_names(chunk.name, chunk.length)) for chunk in chunks])
    return wire.integers(len(chunks))


def walk(wire: Wire) -> Iterator[tuple[str, int, int]]:
    """Of all values of ours on a server the namespace (hex), 1 for a first part, else 0, and the bytes.

    Raises Refused.
    """
    cursor = b"0"
    while True:
        wire.send([command(b"SCAN", cursor, b"MATCH", b"lmkv:*", b"COUNT", b"1000")])
        reply = wire.reply()
        if isinstance(reply, Refused):
            raise reply
        if not isinstance(reply, list) or len(reply) != 2:
            raise ProtocolError("SCAN is answered by something else")
        cursor, names = reply
        if names:
            wire.send([command(b"STRLEN", name) for name in names])
            for name, size in zip(names, wire.integers(len(names)), strict=True):
                if isinstance(size, int):  # else it is of another type, so not ours
                    yield name[5:69].decode(errors="replace"), int(name.endswith(b"}")), size
        if cursor == b"0":
            return


def _name(key: bytes) -> bytes:
    text = key.hex().encode()
    return b"lmkv:%b:{%b}" % (text[: 2 * NAMESPACE_BYTES], text[2 * NAMESPACE_BYTES :])


_QUESTION = command(b"EXISTS", _name(bytes(KEY_BYTES)))  # all are of one length
_EXISTS = np.frombuffer(_QUESTION, np.uint8)
#: Where the digits of the key are in it.
_SPACE = slice(at := _QUESTION.index(b"lmkv:") + 5, at + 2 * NAMESPACE_BYTES)
_REST = slice(at := _QUESTION.index(b"{") + 1, at + 2 * (KEY_BYTES - NAMESPACE_BYTES))


def _names(name: bytes, parts: int) -> list[bytes]:
    return [name] + [b"%b:%d" % (name, number) for number in range(1, parts)]


def _stored(replies: Sequence[Any]) -> Any:
    """OK or why not, from the replies to SET, or to MULTI, the SETs and EXEC."""
    last = replies[-1]
    flat = [*replies, *(last if isinstance(last, list) else ())]
    for reply in flat:  # the first error says why, the last only that the transaction was given up
        if isinstance(reply, Refused):
            return reply
    done = last == b"OK" or (isinstance(last, list) and all(reply == b"OK" for reply in last))
    return Status.OK if done else Refused("no OK")
