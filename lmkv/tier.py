"""The one interface for every place chunks live, and the registry that finds a tier by name."""

import enum
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmkv.keys import KEY_BYTES


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


@dataclass
class TierStats:
    """A snapshot. `counters` are monotonic and named like `get_hits` or `corrupt`."""

    chunks: int = 0
    used_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class Tier(ABC):
    """One place chunks live. Synchronous, batch-only, caller-owned buffers, thread-safe.

    Keys are `lmkv.keys.KEY_BYTES` bytes. Buffers are contiguous byte memoryviews as long as the
    chunk. Every per-key outcome is a `Status`; an exception means a configuration or programming
    error (wrong key length, fewer buffers than keys, a closed tier).
    """

    @property
    @abstractmethod
    def info(self) -> TierInfo:
        """Static facts about this tier."""

    def room(self, chunk_bytes: int) -> int:
        """How many chunks of this size the tier holds when it is full."""
        return self.info.capacity_bytes // chunk_bytes

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key would probably be found by `get`. No I/O on the caller's time."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Status]:
        """Read each chunk into its writable buffer and verify it.

        A stored chunk whose length differs from its buffer's is CORRUPT.
        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Status]:
        """Store each buffer under its key: atomic (a reader sees all of a chunk or nothing),
        repeatable (a key that is already there is OK without a second copy) and refusable.
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


def check_batch(keys: Sequence[bytes], buffers: Sequence[memoryview] | None = None) -> None:
    """Raise ValueError on a batch that only a programming error can produce, for every tier alike."""
    if not {KEY_BYTES}.issuperset(map(len, keys)):
        raise ValueError(f"a key has {KEY_BYTES} bytes")
    if buffers is not None and len(buffers) < len(keys):
        raise ValueError(f"{len(keys)} keys need as many buffers, not {len(buffers)}")


_TIERS = {
    "host": "lmkv.backends.host:HostTier",
    "file": "lmkv.backends.file:FileTier",
}


def register_tier(name: str, target: str) -> None:
    """Make `open_tier(name, ...)` construct `target`, written as "package.module:Class"."""
    if name in _TIERS and _TIERS[name] != target:
        raise ValueError(f"a tier named {name!r} is already registered as {_TIERS[name]}")
    _TIERS[name] = target


def open_tier(name: str, settings: Mapping[str, Any]) -> Tier:
    """Open the tier registered under `name` with its settings (its config table's names).

    Raises `lmkv.config.ConfigError` naming the setting when one is unknown or unusable.
    """
    if name not in _TIERS:
        raise ValueError(f"no tier is named {name!r}; known tiers: {', '.join(sorted(_TIERS))}")
    module_name, _, class_name = _TIERS[name].partition(":")
    tier_class = getattr(importlib.import_module(module_name), class_name)
    tier: Tier = tier_class.open(settings)
    return tier
