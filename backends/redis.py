"""Chunks on a server of the Redis protocol: Redis, Valkey or another, alone, behind Sentinel, or a cluster.

A chunk is the value of one key, or of several where it is longer than the part size:

    lmkv:<namespace, 64 hex digits>:{<rest of the key, 72 hex digits>}       header, first part
    lmkv:<namespace, 64 hex digits>:{<rest of the key, 72 hex digits>}:1     second part, and so on

The header is that of `lmkv.record`. What stands in braces puts all parts of a chunk on one slot of a cluster.
Several parts are written by one transaction and read by one MGET, so a reader sees a chunk whole or finds a
part missing.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from lmkv.backends.resp import ProtocolError, Refused, Wire, command
from lmkv.backends.servers import MIN_VERSION, Address, ServerInfo, Servers
from lmkv.config import ConfigError, RedisConfig, load_table
from lmkv.keys import KEY_BYTES, NAMESPACE_BYTES
from lmkv.record import HEADER_BYTES, decode_header, encode_header, verify
from lmkv.tier import (
    Buffer,
    Status,
    Tier,
    TierInfo,
    TierStats,
    Unavailable,
    buffer_bytes,
    check_batch,
    pieces,
)

logger = logging.getLogger(__name__)

#: A call takes no longer than this plus its bytes at the slowest useful speed, whatever the server does.
DEADLINE_S = 0.5
BYTES_PER_S = 0.1e9
#: A server is looked at for this long when the tier is opened.
OPEN_S = 3.0
#: Rounds of a batch whose keys move to other servers of a cluster meanwhile.
_MAX_ROUNDS = 4
#: Chunks and payload bytes of one pipeline: the server holds as much in its buffers for this client.
_MAX_CHUNKS = 1024
_PIPELINE_BYTES = 16 << 20
_QUESTIONS = 128
_LOG_S = 10.0
#: More parts than this of one chunk are refused.
_MAX_PARTS = 1024
#: So many parts are unlinked of a chunk whose header does not tell.
_GUESSED_PARTS = 16

COUNTERS = (
    "get_hits",
    "get_misses",
    "put_chunks",
    "put_dedup",
    "rejected",
    "corrupt",
    "parts_missing",
    "part_size_differs",
    "server_full",
    "redirects",
    "connections",
    "timeouts",
    "io_errors",
    "read_bytes",
    "written_bytes",
)


#: What a read finds besides a `Status`: some part is gone; another part size than ours.
_HOLE, _OTHER = "a part is missing", "another part size"
_STATUS: dict[Any, Status] = {_HOLE: Status.MISS, _OTHER: Status.MISS, None: Status.UNAVAILABLE}


class _Chunk(NamedTuple):
    """One chunk of a batch."""

    position: int
    key: bytes
    name: bytes
    buffer: Buffer = ()
    length: int = 0


#: Sends what it takes to a server, receives the answers, and gives a result a chunk.
_Turn = Callable[[Wire, Sequence[_Chunk]], Sequence[Any]]


class RedisTier(Tier):
    """Thread-safe; every call is bounded by a total deadline."""

    @classmethod
    def open(cls, settings: Mapping[str, Any]) -> "RedisTier":
        """Open with the settings of the table `[redis]`. Raises ConfigError."""
        table: RedisConfig = load_table("redis", settings)
        if table.url is None:
            raise ConfigError("[redis] url", "not set.", "write redis://host:6379/0.")
        return cls(table)

    def __init__(self, config: RedisConfig) -> None:
        """A server that is down is no error: it is used when it comes. Raises ConfigError."""
        self._part_bytes = int(config.part_size)
        self._writes = config.role != "read_only"
        #: The last two words of a SET.
        self._expiry = b""
        if config.ttl is not None:
            milliseconds = b"%d" % max(1, round(config.ttl * 1000))
            self._expiry = b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(milliseconds), milliseconds)
        self._lock = threading.Lock()
        self._counters = Counter(dict.fromkeys(COUNTERS, 0))
        #: What this process stored less what it removed, by namespace: chunks and bytes.
        self._chunks: Counter[bytes] = Counter()
        self._bytes: Counter[bytes] = Counter()
        self._storing: dict[bytes, Future[Status]] = {}  # outcomes to come
        self._next_log = 0.0
        self._closed = False
        self._servers = Servers(config)
        capacity = sys.maxsize
        try:
            info = self._servers.info(time.monotonic() + OPEN_S)
        except (OSError, ProtocolError, Refused) as error:
            logger.warning("lmkv: %s does not answer yet: %s", self._servers.shown, error)
        else:
            capacity = info.maxmemory_bytes or info.total_memory_bytes or capacity
            self._announce(info, config)
        longest = min(capacity, _MAX_PARTS * self._part_bytes)
        self._info = TierInfo("redis", capacity, True, True, 1, longest, remote=True)

    def _announce(self, info: ServerInfo, config: RedisConfig) -> None:
        shown = self._servers.shown
        numbers = tuple(int(part) for part in info.version.split(".")[:2] if part.isdigit())
        if numbers < MIN_VERSION:
            wanted = ".".join(map(str, MIN_VERSION))
            self._servers.close()
            raise ConfigError("[redis] url", f"{shown} is version {info.version}.", f"use {wanted} or newer.")
        logger.info(
            "lmkv: %s: version %s%s, maxmemory %s, policy %s",
            shown,
            info.version,
            ", a cluster" if info.cluster else "",
            info.maxmemory_bytes or "not set",
            info.policy,
        )
        if info.maxmemory_bytes and info.policy == "noeviction":
            logger.warning("lmkv: %s evicts nothing (maxmemory-policy): once full it stores no more", shown)
        elif not info.maxmemory_bytes:
            logger.warning("lmkv: %s has no maxmemory: chunks fill its memory until it fails", shown)
        elif info.policy.startswith("volatile") and config.ttl is None:
            logger.warning("lmkv: %s evicts only what expires: set [redis] ttl", shown)

    @property
    def info(self) -> TierInfo:
        return self._info

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.contains`. One round trip. Raises Unavailable."""
        self._check(keys)
        chunks = _named(keys)
        found = self._batch(chunks, _exists, 0)
        if None in found:
            raise Unavailable(f"{self._servers.shown} does not answer")
        return [bool(is_there) for is_there in found]

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers, writable=True)
        chunks = _chunks(keys, buffers)
        found = self._batch(chunks, self._get_turn, sum(chunk.length for chunk in chunks))
        broken = [chunk for chunk in chunks if found[chunk.position] is Status.CORRUPT]
        # A chunk without all its parts would be taken for stored for ever.
        holes = [chunk for chunk in chunks if found[chunk.position] is _HOLE]
        if (broken or holes) and self._writes:
            self._unlink([chunk.key for chunk in (*broken, *holes)])
        statuses = [_STATUS.get(result, result) for result in found]
        self._count(
            get_hits=statuses.count(Status.OK),
            get_misses=statuses.count(Status.MISS),
            corrupt=len(broken),
            parts_missing=len(holes),
            part_size_differs=found.count(_OTHER),
            read_bytes=sum(c.length for c in chunks if statuses[c.position] is Status.OK),
        )
        if broken and self._may_log():
            logger.warning("lmkv: %d chunks on %s failed verification", len(broken), self._servers.shown)
        return statuses

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers)
        statuses = [Status.REJECTED] * len(keys)
        fresh: dict[bytes, _Chunk] = {}
        for chunk in _chunks(keys, buffers):
            if 0 < chunk.length <= self._info.max_chunk_bytes:
                fresh.setdefault(chunk.key, chunk)
        ours, theirs = self._claim(list(fresh))
        results: dict[bytes, Status] = {}
        deduplicated = 0
        try:
            results, deduplicated = self._store([chunk for chunk in fresh.values() if chunk.key in ours])
        finally:
            self._release({key: results.get(key, Status.UNAVAILABLE) for key in ours})
        # Another thread's call is bounded by its deadline.
        results |= {key: outcome.result() for key, outcome in theirs.items()}
        for i, key in enumerate(keys):
            if key in results and fresh[key].length == buffer_bytes(buffers[i]):
                statuses[i] = results[key]
        self._count(rejected=statuses.count(Status.REJECTED), put_dedup=deduplicated + len(keys) - len(fresh))
        return statuses

    def _store(self, chunks: Sequence[_Chunk]) -> tuple[dict[bytes, Status], int]:
        """Send what is not there; the outcomes, and how many were there."""
        results: dict[bytes, Status] = {}
        asked = _numbered(chunks)
        for chunk, is_there in zip(asked, self._batch(asked, _exists, 0), strict=True):
            if is_there is None:
                results[chunk.key] = Status.UNAVAILABLE
            elif is_there:
                results[chunk.key] = Status.OK
        there = sum(status is Status.OK for status in results.values())
        if not self._writes:
            return results, there
        wanted = _numbered([chunk for chunk in asked if chunk.key not in results])
        outcome = self._batch(wanted, self._put_turn, sum(chunk.length for chunk in wanted))
        for chunk, status in zip(wanted, outcome, strict=True):
            results[chunk.key] = Status.UNAVAILABLE if status is None else status
        self._stored([chunk for chunk in wanted if results[chunk.key] is Status.OK])
        return results, there

    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        self._check(keys)
        unique = list(dict.fromkeys(keys))
        gone = dict(zip(unique, self._unlink(unique), strict=True))
        statuses = []
        for key in keys:
            is_gone = gone[key]
            statuses.append(Status.UNAVAILABLE if is_gone is None else Status.OK if is_gone else Status.MISS)
            gone[key] = is_gone and False  # the second time it is not there
        return statuses

    def stats(self) -> TierStats:
        """What this process stored and removed; the server may have evicted, and others stored, more."""
        with self._lock:
            counters = dict(self._counters)
            chunks, used = self._chunks.total(), self._bytes.total()
        counters |= {"connections": self._servers.reconnects, "timeouts": self._servers.watchdog.expired}
        return TierStats(max(0, chunks), min(max(0, used), self._info.capacity_bytes), counters)

    def usage(self, deadline_s: float = 10.0) -> dict[str, tuple[int, int]]:
        """What lies on the servers, whoever stored it: by namespace (hex), chunks and bytes of values.

        Walks over all keys. Raises Unavailable.
        """
        deadline = time.monotonic() + deadline_s
        found: dict[str, tuple[int, int]] = {}
        try:
            for address in self._servers.nodes(deadline):
                with self._servers.connection(address, deadline) as wire:
                    for names, sizes in _walk(wire):
                        for name, size in zip(names, sizes, strict=True):
                            space = name[5:69].decode(errors="replace")
                            chunks, used = found.get(space, (0, 0))
                            found[space] = chunks + name.endswith(b"}"), used + size
        except (OSError, ProtocolError, Refused) as error:
            raise Unavailable(str(error)) from error
        return found

    def close(self) -> None:
        self._closed = True
        self._servers.close()

    # -- batches

    def _batch(self, chunks: Sequence[_Chunk], turn: _Turn, size_bytes: int) -> list[Any]:
        """Results of all chunks in order, None for those whose server did not answer in time."""
        results: list[Any] = [None] * len(chunks)
        deadline = time.monotonic() + DEADLINE_S + size_bytes / BYTES_PER_S
        todo: dict[tuple[Address, bool], list[_Chunk]] = {}
        try:
            if (only := self._servers.only(deadline)) is not None:
                todo[only, False] = list(chunks)
            else:
                for chunk in chunks:
                    todo.setdefault((self._servers.address(chunk.name, deadline), False), []).append(chunk)
        except (OSError, ProtocolError, Refused, ConfigError) as error:
            self._failed(error)
            return results
        for _ in range(_MAX_ROUNDS):
            moved: dict[tuple[Address, bool], list[_Chunk]] = {}
            for (address, asking), some in todo.items():
                try:
                    for part in _slices(some, 1 if asking else _MAX_CHUNKS):
                        with self._servers.connection(address, deadline) as wire:
                            if asking:  # holds for the next command, or transaction
                                wire.send([command(b"ASKING")])
                                wire.reply()
                            found = turn(wire, part)
                        for chunk, result in zip(part, found, strict=True):
                            if isinstance(result, Refused) and result.kind in ("MOVED", "ASK"):
                                target = _target(result, address), result.kind == "ASK"
                                moved.setdefault(target, []).append(chunk)
                            else:
                                results[chunk.position] = self._outcome(result)
                except (OSError, ProtocolError, Refused, ConfigError) as error:
                    self._failed(error)
            if not moved:
                break
            self._count(redirects=sum(map(len, moved.values())))
            if not all(asking for _, asking in moved):
                try:
                    self._servers.refresh(deadline)
                except OSError as error:
                    self._failed(error)
            todo = moved
        return results

    def _outcome(self, result: Any) -> Any:
        if not isinstance(result, Refused):
            return result
        if result.kind == "OOM":
            self._count(server_full=1)
            return Status.REJECTED
        if result.kind == "WRONGTYPE":  # somebody else's value under our name
            return Status.CORRUPT
        self._failed(result)
        return None

    def _get_turn(self, wire: Wire, chunks: Sequence[_Chunk]) -> list[Any]:
        requests = []
        for chunk in chunks:
            count = self._parts(chunk.length)
            if count == 1:
                requests.append(command(b"GET", chunk.name))
            else:
                requests.append(command(b"MGET", *_names(chunk.name, count)))
        wire.send([b"".join(requests)])
        return [self._receive(wire, chunk) for chunk in chunks]

    def _receive(self, wire: Wire, chunk: _Chunk) -> Any:
        """The status of one chunk, whose values come next."""
        count = self._parts(chunk.length)
        if count > 1 and (error := wire.array(count)) is not None:
            return error
        header = memoryview(bytearray(HEADER_BYTES))
        sizes = []
        for part in self._cut(chunk, header):
            size = wire.value(part)
            if isinstance(size, Refused):
                return size
            sizes.append((size, sum(piece.nbytes for piece in part)))
        if all(size == -1 for size, _ in sizes):
            return Status.MISS
        size, expected = sizes[0]
        if size not in (-1, expected):
            known = decode_header(header)
            same = known is not None and (known.key, known.stored_bytes) == (chunk.key, chunk.length)
            return _OTHER if same and size > HEADER_BYTES else Status.CORRUPT
        if any(size == -1 for size, _ in sizes):
            return _HOLE
        if any(size != expected for size, expected in sizes):
            return Status.CORRUPT
        whole = verify(decode_header(header), chunk.key, chunk.buffer)
        return Status.OK if whole else Status.CORRUPT

    def _put_turn(self, wire: Wire, chunks: Sequence[_Chunk]) -> list[Any]:
        parts: list[bytes | memoryview] = []
        words = 5 if self._expiry else 3
        for chunk in chunks:
            header = encode_header(chunk.key, chunk.buffer, time.time_ns())
            values = self._cut(chunk, memoryview(header))
            count = self._parts(chunk.length)
            if count > 1:
                parts.append(command(b"MULTI"))
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
            results.append(_stored_all([wire.reply() for _ in range(count + 2 if count > 1 else 1)]))
        return results

    def _cut(self, chunk: _Chunk, header: memoryview) -> Iterator[list[memoryview]]:
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

    # -- removing

    def _unlink(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Take chunks off the servers; whether each was there, None if its server did not answer."""
        chunks = _named(keys)
        lengths = self._batch(chunks, _lengths, 0)
        known = [chunk for chunk in chunks if lengths[chunk.position] is not None]
        parts = [c._replace(position=i, length=lengths[c.position][1]) for i, c in enumerate(known)]
        gone = self._batch(parts, _unlink_parts, 0)
        out: list[bool | None] = [None] * len(keys)
        with self._lock:
            for chunk, count in zip(known, gone, strict=True):
                out[chunk.position] = None if count is None else count > 0
                if count:
                    space = chunk.key[:NAMESPACE_BYTES]
                    self._chunks[space] -= 1
                    self._bytes[space] -= lengths[chunk.position][0]
        return out

    # -- one store of a chunk at a time in this process

    def _claim(self, keys: Sequence[bytes]) -> tuple[set[bytes], dict[bytes, Future[Status]]]:
        """Those of the keys that this thread may store now, and the outcomes to come of the others."""
        ours: set[bytes] = set()
        theirs: dict[bytes, Future[Status]] = {}
        with self._lock:
            for key in keys:
                if key in self._storing:
                    theirs[key] = self._storing[key]
                else:
                    self._storing[key] = Future()
                    ours.add(key)
        return ours, theirs

    def _release(self, outcomes: Mapping[bytes, Status]) -> None:
        with self._lock:
            waiting = {key: self._storing.pop(key) for key in outcomes}
        for key, future in waiting.items():
            future.set_result(outcomes[key])

    # -- small things

    def _stored(self, chunks: Sequence[_Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self._chunks[chunk.key[:NAMESPACE_BYTES]] += 1
                self._bytes[chunk.key[:NAMESPACE_BYTES]] += chunk.length
            self._counters["put_chunks"] += len(chunks)
            self._counters["written_bytes"] += sum(chunk.length for chunk in chunks)

    def _check(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer] | None = None, *, writable: bool = False
    ) -> None:
        if self._closed:
            raise ValueError("the Redis tier is closed")
        check_batch(keys, buffers, writable=writable)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counters.update(amounts)

    def _failed(self, error: Exception) -> None:
        self._count(io_errors=1)
        if self._may_log():
            logger.warning("lmkv: %s: %s", self._servers.shown, error)

    def _may_log(self) -> bool:
        if time.monotonic() < self._next_log:
            return False
        self._next_log = time.monotonic() + _LOG_S
        return True


def _named(keys: Sequence[bytes]) -> list[_Chunk]:
    """Chunks without memory."""
    text = b"".join(keys).hex().encode()  # of all at once: lookups make thousands of names
    chunks = []
    for i, key in enumerate(keys):
        at = 2 * KEY_BYTES * i
        rest = at + 2 * NAMESPACE_BYTES
        chunks.append(_Chunk(i, key, b"lmkv:%b:{%b}" % (text[at:rest], text[rest : at + 2 * KEY_BYTES])))
    return chunks


def _numbered(chunks: Iterable[_Chunk]) -> list[_Chunk]:
    """The chunks as a batch of their own."""
    return [chunk._replace(position=i) for i, chunk in enumerate(chunks)]


def _names(name: bytes, parts: int) -> list[bytes]:
    return [name] + [b"%b:%d" % (name, number) for number in range(1, parts)]


def _chunks(keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[_Chunk]:
    named = zip(_named(keys), buffers, strict=False)
    return [chunk._replace(buffer=buffer, length=buffer_bytes(buffer)) for chunk, buffer in named]


def _slices(chunks: Sequence[_Chunk], most: int) -> Iterator[Sequence[_Chunk]]:
    """Pipelines of at most `most` chunks and `_PIPELINE_BYTES`, one chunk at least."""
    start = size = 0
    for i, chunk in enumerate(chunks):
        if i > start and (i - start == most or size + chunk.length > _PIPELINE_BYTES):
            yield chunks[start:i]
            start, size = i, 0
        size += chunk.length
    if chunks:
        yield chunks[start:]


def _target(redirect: Refused, asked: Address) -> Address:
    """Of "MOVED 3999 127.0.0.1:6381"; a server that does not know its own address leaves the host away."""
    host, _, port = str(redirect).split(" ")[2].rpartition(":")
    return Address(host or asked.host, int(port))


def _exists(wire: Wire, chunks: Sequence[_Chunk]) -> list[Any]:
    head = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n" % len(chunks[0].name)  # all names are of one length
    for start in range(0, len(chunks), _QUESTIONS):  # the server works while the next ones are put together
        some = chunks[start : start + _QUESTIONS]
        wire.send([b"".join([b"%b%b\r\n" % (head, chunk.name) for chunk in some])])
    return wire.integers(len(chunks))


def _lengths(wire: Wire, chunks: Sequence[_Chunk]) -> list[Any]:
    """Of each chunk the payload bytes and the number of parts, as its header tells."""
    end = b"%d" % (HEADER_BYTES - 1)
    wire.send([command(b"GETRANGE", c.name, b"0", end) + command(b"STRLEN", c.name) for c in chunks])
    results: list[Any] = []
    for _ in chunks:
        start, size = wire.reply(), wire.reply()
        if isinstance(start, Refused) and start.kind in ("MOVED", "ASK"):
            results.append(start)
            continue
        header = decode_header(start) if isinstance(start, bytes) else None
        if header is None or size <= HEADER_BYTES:
            results.append((0, _GUESSED_PARTS))
        else:
            parts = -(-header.stored_bytes // (size - HEADER_BYTES))
            results.append((header.stored_bytes, min(max(1, parts), _MAX_PARTS)))
    return results


def _unlink_parts(wire: Wire, chunks: Sequence[_Chunk]) -> list[Any]:
    """`length`: how many parts each has."""
    wire.send([command(b"UNLINK", *_names(chunk.name, chunk.length)) for chunk in chunks])
    return [wire.reply() for _ in chunks]


def _stored_all(replies: Sequence[Any]) -> Any:
    """Status of a store, from the replies to SET, or to MULTI, the SETs and EXEC."""
    errors = [reply for reply in replies if isinstance(reply, Refused)]
    if errors:  # the first says why, the last only that the transaction was given up
        return errors[0]
    last = replies[-1]
    if last == b"OK" or (isinstance(last, list) and all(reply == b"OK" for reply in last)):
        return Status.OK
    refused = [reply for reply in last if isinstance(reply, Refused)] if isinstance(last, list) else []
    return refused[0] if refused else Status.UNAVAILABLE


def _walk(wire: Wire) -> Iterator[tuple[list[bytes], list[int]]]:
    """Names and lengths of all values of ours on a server."""
    cursor = b"0"
    while True:
        wire.send([command(b"SCAN", cursor, b"MATCH", b"lmkv:*", b"COUNT", b"1000")])
        reply = wire.reply()
        if isinstance(reply, Refused):
            raise reply
        cursor, names = reply
        if names:
            wire.send([command(b"STRLEN", name) for name in names])
            yield names, wire.integers(len(names))
        if cursor == b"0":
            return
