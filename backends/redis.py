"""Chunks on a server of the Redis protocol: Redis, Valkey or another, alone, behind Sentinel, or a cluster.

How they lie there: `lmkv.backends.values`. Which server: `lmkv.backends.servers`. The bytes on the
connection: `lmkv.backends.resp`.
"""

import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from lmkv.backends.resp import ProtocolError, Refused, command
from lmkv.backends.servers import MIN_VERSION, Address, ServerInfo, Servers, redirected
from lmkv.backends.values import (
    MAX_PARTS,
    Chunk,
    Found,
    Turn,
    Values,
    exist,
    lengths,
    numbered,
    unlink,
    walk,
    with_memory,
    without_memory,
)
from lmkv.config import ConfigError, RedisConfig, load_table
from lmkv.keys import NAMESPACE_BYTES
from lmkv.tier import (
    Buffer,
    Status,
    Tier,
    TierInfo,
    TierStats,
    Unavailable,
    buffer_bytes,
    check_batch,
)

logger = logging.getLogger(__name__)

#: A call takes no longer than this plus its bytes at the slowest useful speed, whatever the server does.
#: Nobody waits for stores, and several threads share the network.
DEADLINE_S = 0.5
READ_BYTES_PER_S = 0.1e9
WRITE_BYTES_PER_S = 0.02e9
#: A server is looked at for this long when the tier is opened.
OPEN_S = 3.0
#: Rounds of a batch whose keys move to other servers of a cluster meanwhile.
_MAX_ROUNDS = 5
#: Pause before a chunk is asked for again of which only some parts moved so far.
_MOVING_S = 0.02
#: Chunks of one pipeline, and payload bytes where the chunks themselves move: what the server holds in its
#: buffers for a client has left its caches when it is sent. 8 MiB at a time is read at half the speed.
_MAX_CHUNKS = 1024
_PIPELINE_BYTES = 1 << 20
_LOG_S = 10.0

#: Errors that another attempt may mend: the key is elsewhere, is moving, or the master became a replica.
_AGAIN = ("MOVED", "ASK", "TRYAGAIN", "READONLY")
#: The server is well but stores nothing: full, a replica, its disk fails, too few replicas, the user may not.
_STORES_NOTHING = ("OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM")

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

#: A server, and whether it has to be told that it is asked on behalf of another (ASKING).
_Target = tuple[Address, bool]


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
        self._values = Values(int(config.part_size), config.ttl)
        self._writes = config.role != "read_only"
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
        deadline = time.monotonic() + OPEN_S
        try:
            info = self._servers.info(deadline)
            count = len(self._servers.nodes(deadline))  # those of a cluster are alike
        except (OSError, ProtocolError, Refused) as error:
            logger.warning("lmkv: %s does not answer yet: %s", self._servers.shown, error)
        else:
            capacity = count * (info.maxmemory_bytes or info.total_memory_bytes) or capacity
            self._announce(info, config)
        longest = min(capacity, MAX_PARTS * int(config.part_size))
        self._info = TierInfo("redis", capacity, True, True, 1, longest, remote=True)

    def _announce(self, info: ServerInfo, config: RedisConfig) -> None:
        shown = self._servers.shown
        numbers = tuple(int(part) for part in info.version.split(".")[:2] if part.isdigit())
        if numbers < MIN_VERSION:
            wanted = ".".join(map(str, MIN_VERSION))
            self._servers.close()
            raise ConfigError(
                "[redis] url", f"{shown} is {info.product}.", f"use {wanted} or newer, or Valkey."
            )
        logger.info(
            "lmkv: %s: %s%s, maxmemory %s, policy %s",
            shown,
            info.product,
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
        found = self._batch(without_memory(keys), exist)
        if not {int}.issuperset(map(type, found)):
            raise Unavailable(f"{self._servers.shown} does not answer")
        return list(map(bool, found))

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers, writable=True)
        chunks = with_memory(keys, buffers)
        found = self._batch(chunks, self._values.get, READ_BYTES_PER_S)
        statuses = [_read(result) for result in found]
        broken = [chunk for chunk in chunks if statuses[chunk.position] is Status.CORRUPT]
        # A chunk without all its parts would be taken for stored for ever.
        holes = [chunk for chunk in chunks if found[chunk.position] is Found.HOLE]
        if (broken or holes) and self._writes:
            self._unlink([chunk.key for chunk in (*broken, *holes)])
        others = found.count(Found.OTHER_PART_SIZE)
        self._count(
            get_hits=statuses.count(Status.OK),
            get_misses=statuses.count(Status.MISS),
            corrupt=len(broken),
            parts_missing=len(holes),
            part_size_differs=others,
            read_bytes=sum(c.length for c in chunks if statuses[c.position] is Status.OK),
        )
        if broken:
            self._log(f"{len(broken)} chunks failed verification")
        if others:
            self._log(f"{others} chunks were stored with another [redis] part_size and are of no use")
        return statuses

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        self._check(keys, buffers)
        statuses = [Status.REJECTED] * len(keys)
        fresh: dict[bytes, Chunk] = {}
        for chunk in with_memory(keys, buffers):
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

    def _store(self, chunks: Sequence[Chunk]) -> tuple[dict[bytes, Status], int]:
        """Send what is not there; the outcomes, and how many were there."""
        asked = numbered(chunks)
        results: dict[bytes, Status] = {}
        missing = []
        for chunk, is_there in zip(asked, self._batch(asked, self._values.whole), strict=True):
            if is_there is False:
                missing.append(chunk)
                results[chunk.key] = Status.REJECTED
            else:
                results[chunk.key] = Status.OK if is_there is True else Status.UNAVAILABLE
        there = sum(status is Status.OK for status in results.values())
        if not self._writes:
            return results, there
        wanted = numbered(missing)
        outcome = self._batch(wanted, self._values.put, WRITE_BYTES_PER_S)
        for chunk, result in zip(wanted, outcome, strict=True):
            results[chunk.key] = _written(result)
        self._stored([chunk for chunk in wanted if results[chunk.key] is Status.OK])
        full = sum(isinstance(result, Refused) and result.kind == "OOM" for result in outcome)
        self._count(server_full=full)
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
        counters |= {"connections": self._servers.connections, "timeouts": self._servers.watchdog.expired}
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
                    for space, first, size in walk(wire):
                        chunks, used = found.get(space, (0, 0))
                        found[space] = chunks + first, used + size
        except (OSError, ProtocolError, Refused, ConfigError) as error:
            raise Unavailable(str(error)) from error
        return found

    def close(self) -> None:
        self._closed = True
        self._servers.close()

    # -- batches

    def _batch(self, chunks: Sequence[Chunk], turn: Turn, bytes_per_s: float = math.inf) -> list[Any]:
        """Results of all chunks in order, None for those whose server did not answer in time, `Refused` for
        those that it gave an error for. `bytes_per_s`: how fast the payload has to move at least."""
        results: list[Any] = [None] * len(chunks)
        size = sum(chunk.length for chunk in chunks)
        deadline = time.monotonic() + DEADLINE_S + size / bytes_per_s
        todo = self._spread(chunks, deadline)
        most_bytes = _PIPELINE_BYTES if bytes_per_s < math.inf else math.inf
        for _ in range(_MAX_ROUNDS):
            again: list[tuple[Chunk, _Target]] = []
            for target, some in todo.items():
                for part, found in self._talk(target, some, turn, deadline, most_bytes):
                    for chunk, result in zip(part, found, strict=True):
                        results[chunk.position] = result
                        if type(result) is Refused and result.kind in _AGAIN:
                            again.append((chunk, target))
            if not again or time.monotonic() >= deadline:
                break
            todo = self._redirect(again, results, deadline)
        if Refused in set(map(type, results)):
            self._note({result.kind: result for result in results if isinstance(result, Refused)})
        return results

    def _spread(self, chunks: Sequence[Chunk], deadline: float) -> dict[_Target, list[Chunk]]:
        """Which server is to be asked for which chunks; none if that could not be learnt."""
        todo: dict[_Target, list[Chunk]] = {}
        try:
            if (only := self._servers.only(deadline)) is not None:
                return {(only, False): list(chunks)}
            for chunk in chunks:
                todo.setdefault((self._servers.address(chunk.name, deadline), False), []).append(chunk)
        except (OSError, ProtocolError, Refused, ConfigError) as error:
            self._failed(error)
            return {}
        return todo

    def _talk(
        self, target: _Target, chunks: Sequence[Chunk], turn: Turn, deadline: float, most_bytes: float
    ) -> Iterator[tuple[Sequence[Chunk], Sequence[Any]]]:
        """Chunks and their results from one server, as far as it gives any. `most_bytes`: of a pipeline."""
        address, asking = target
        try:
            for part in _slices(chunks, 1 if asking else _MAX_CHUNKS, most_bytes):
                with self._servers.connection(address, deadline) as wire:
                    if asking:  # holds for the next command, or transaction
                        wire.send([command(b"ASKING")])
                        wire.reply()
                    found = turn(wire, part)
                yield part, found
        except (OSError, ProtocolError, ConfigError) as error:
            self._failed(error)

    def _redirect(
        self, again: Sequence[tuple[Chunk, _Target]], results: Sequence[Any], deadline: float
    ) -> dict[_Target, list[Chunk]]:
        """Which server is to be asked next for chunks that were not where they were looked for."""
        self._count(redirects=len(again))
        kinds = {results[chunk.position].kind for chunk, _ in again}
        todo: dict[_Target, list[Chunk]] = {}
        try:
            if not kinds.isdisjoint(("MOVED", "READONLY")):
                self._servers.refresh(deadline)
            if "TRYAGAIN" in kinds:
                time.sleep(_MOVING_S)
            for chunk, (asked, asking) in again:
                refused = results[chunk.position]
                if refused.kind in ("MOVED", "ASK"):
                    target = redirected(refused, asked), refused.kind == "ASK"
                elif refused.kind == "TRYAGAIN":
                    target = asked, asking
                else:
                    target = self._servers.only(deadline) or asked, False
                todo.setdefault(target, []).append(chunk)
        except (OSError, ProtocolError, Refused, ConfigError) as error:
            self._failed(error)
        return todo

    # -- removing

    def _unlink(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Take chunks off the servers; whether each was there, None if its server did not answer."""
        chunks = without_memory(keys)
        sizes = self._batch(chunks, lengths)
        known = [chunk for chunk in chunks if isinstance(sizes[chunk.position], tuple)]
        parts = [c._replace(position=i, length=sizes[c.position][1]) for i, c in enumerate(known)]
        gone = self._batch(parts, unlink)
        out: list[bool | None] = [None] * len(keys)
        with self._lock:
            for chunk, count in zip(known, gone, strict=True):
                if not isinstance(count, int):
                    continue
                out[chunk.position] = count > 0
                if count:
                    space = chunk.key[:NAMESPACE_BYTES]
                    self._chunks[space] -= 1
                    self._bytes[space] -= sizes[chunk.position][0]
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

    def _stored(self, chunks: Sequence[Chunk]) -> None:
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

    def _note(self, refused: Mapping[str, Refused]) -> None:
        """Errors of a server, by kind."""
        for kind, error in refused.items():
            if kind in _STORES_NOTHING:
                self._log(str(error))
            elif kind != "WRONGTYPE":
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._count(io_errors=1)
        self._log(str(error))

    def _log(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_S
            logger.warning("lmkv: %s: %s", self._servers.shown, text)


def _read(result: Any) -> Status:
    """What a read came to."""
    if isinstance(result, Status):
        return result
    if isinstance(result, Found):
        return Status.MISS
    if isinstance(result, Refused) and result.kind == "WRONGTYPE":  # somebody else's value under our name
        return Status.CORRUPT
    return Status.UNAVAILABLE


def _written(result: Any) -> Status:
    """What a store came to."""
    if isinstance(result, Refused):
        return Status.REJECTED if result.kind in _STORES_NOTHING else Status.UNAVAILABLE
    return Status.OK if result is Status.OK else Status.UNAVAILABLE


def _slices(chunks: Sequence[Chunk], most: int, most_bytes: float) -> Iterator[Sequence[Chunk]]:
    """Pipelines of at most `most` chunks and so many bytes, one chunk at least."""
    start = size = 0
    for i, chunk in enumerate(chunks):
        if i > start and (i - start == most or size + chunk.length > most_bytes):
            yield chunks[start:i]
            start, size = i, 0
        size += chunk.length
    if chunks:
        yield chunks[start:]
