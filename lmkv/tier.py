"""The one interface for every place chunks live, and the registry that finds a tier by name."""

import enum
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmkv.keys import KEY_BYTES

#: Memory of one chunk: a contiguous byte memoryview, or several whose concatenation is the chunk, such as
#: the keys and the values of a page, or one piece per layer, that an engine holds at different addresses.
Buffer = memoryview | Sequence[memoryview]


class Status(enum.IntEnum):
    """Result of one key in a batch."""

    OK = 0
    #: Not there. The buffer's content is undefined.
    MISS = 1
    #: Refused by policy (too large, no room, read-only). Nothing was stored.
    REJECTED = 2
    #: Found, but it failed verification. The buffer's content is undefined; the tier counted
    #: it and will not offer the chunk again.
    CORRUPT = 3
    #: The tier could not answer (I/O error, dead server). It may work again later.
    UNAVAILABLE = 4


@dataclass(frozen=True)
class TierInfo:
    """What a tier is; replaces capability flags."""

    name: str
    #: Upper bound on the bytes the tier occupies, its own bookkeeping included.
    capacity_bytes: int
    #: Chunks survive the process.
    persistent: bool
    #: Other processes can see the chunks.
    shared: bool
    #: Buffer addresses and lengths that are multiples of this many bytes move without a copy.
    alignment_bytes: int
    #: Larger chunks are REJECTED.
    max_chunk_bytes: int = sys.maxsize
    #: `contains` asks a server: it takes a round trip, up to its deadline when the server is in
    #: trouble, and raises `Unavailable` then. To be called from a thread that may wait.
    remote: bool = False


class Unavailable(Exception):
    """A remote tier could not say what it has."""


@dataclass
class TierStats:
    """A snapshot. `counters` are monotonic and named like `get_hits` or `corrupt`."""

    chunks: int = 0
    used_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class Tier(ABC):
    """One place chunks live. Synchronous, batch-only, caller-owned buffers, thread-safe.

    Keys are `lmkv.keys.KEY_BYTES` bytes. A buffer (see `Buffer`) is as long as the chunk; how it is cut
    into pieces makes no difference to what is stored or found. Every per-key outcome is a `Status`; an
    exception means a configuration or programming error (wrong key length, fewer buffers than keys, a
    closed tier).
    """

    #: Called on a thread of the tier with chunks that it is about to evict (keys and payloads, which are
    #: good until it returns), so that they can go to another tier. Only tiers that evict by themselves
    #: and can read what they evict call it.
    on_evict: Callable[[Sequence[bytes], Sequence[Buffer]], None] | None = None

    @property
    @abstractmethod
    def info(self) -> TierInfo:
        """Static facts about this tier."""

    def room(self, chunk_bytes: int) -> int:
        """How many chunks of this size the tier holds when it is full."""
        return self.info.capacity_bytes // chunk_bytes

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key would probably be found by `get`. No I/O on the caller's time, except in a
        tier that is `remote`.
        """

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        """Read each chunk into its writable buffer, whose pieces do not overlap, and verify it.

        A stored chunk whose length differs from its buffer's is CORRUPT.
        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        """Store each buffer under its key: atomic (a reader sees all of a chunk or nothing),
        repeatable (a key that is already there is OK without a second copy) and refusable. A chunk
        of zero bytes is REJECTED.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        """Forget each key: OK if it was there, else MISS. A removed key is never served again,
        also after a crash or a restart, until it is put again.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Current counters. Cheap: reads nothing from the medium."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Calling it again does nothing."""


def pieces(buffer: Buffer) -> Sequence[memoryview]:
    """The memoryviews whose concatenation is the chunk, without empty ones."""
    if isinstance(buffer, memoryview):
        return (buffer,) if buffer.nbytes else ()
    return [piece for piece in buffer if piece.nbytes]


def buffer_bytes(buffer: Buffer) -> int:
    """Length of the chunk in bytes."""
    return buffer.nbytes if isinstance(buffer, memoryview) else sum([piece.nbytes for piece in buffer])


#: numpy gives up the GIL for a copy. For a large one that lets other threads run; for a small one, getting
#: it back beside a busy thread takes longer than the copy.
_SMALL_COPY_BYTES = 1 << 20


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between two byte memoryviews of equal length."""
    if source.nbytes <= _SMALL_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def gather(memory: memoryview, buffer: Buffer) -> None:
    """Copy a chunk from its buffer into `memory`, one byte memoryview as long as the chunk."""
    for piece, part in _beside(buffer, memory):
        copy_bytes(part, piece)


def scatter(memory: memoryview, buffer: Buffer) -> None:
    """Copy a chunk from `memory`, one byte memoryview as long as the chunk, into its buffer."""
    for piece, part in _beside(buffer, memory):
        copy_bytes(piece, part)


def _beside(buffer: Buffer, memory: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    """Each piece, and its part of `memory`."""
    start = 0
    for piece in pieces(buffer):
        yield piece, memory[start : start + piece.nbytes]
        start += piece.nbytes


def check_batch(
    keys: Sequence[bytes], buffers: Sequence[Buffer] | None = None, *, writable: bool = False
) -> None:
    """Raise ValueError on a batch that only a programming error can produce, for every tier alike."""
    if not {KEY_BYTES}.issuperset(map(len, keys)):
        raise ValueError(f"a key has {KEY_BYTES} bytes")
    if buffers is None:
        return
    if len(buffers) < len(keys):
        raise ValueError(f"{len(keys)} keys need as many buffers, not {len(buffers)}")
    for buffer in buffers:
        for piece in pieces(buffer):
            if piece.format != "B" or not piece.c_contiguous or (writable and piece.readonly):
                raise ValueError('a buffer must be contiguous, of format "B", and writable in get')


_TIERS = {
    "host": "lmkv.backends.host:HostTier",
    "file": "lmkv.backends.file:FileTier",
    "redis": "lmkv.backends.redis:RedisTier",
}


def register_tier(name: str, target: str) -> None:
    """Make `open_tier(name, ...)` construct `target`, written as "package.module:Class"."""
    if name in _TIERS and _TIERS[name] != target:
        raise ValueError(f"a tier named {name!r} is already registered as {_TIERS[name]}")
    _TIERS[name] = target


def open_tier(name: str, settings: Mapping[str, Any], *, read_only: bool = False) -> Tier:
    """Open the tier registered under `name` with its settings (its config table's names).

    `read_only`: store nothing; only for tiers that other processes write to.
    Raises `lmkv.config.ConfigError` naming the setting when one is unknown or unusable.
    """
    if name not in _TIERS:
        raise ValueError(f"no tier is named {name!r}; known tiers: {', '.join(sorted(_TIERS))}")
    module_name, _, class_name = _TIERS[name].partition(":")
    tier_class = getattr(importlib.import_module(module_name), class_name)
    tier: Tier = tier_class.open(settings, read_only=True) if read_only else tier_class.open(settings)
    return tier
