"""What lies in a tier that outlives its process: for those who list and delete it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lmkv.keys import Namespace


class StoredChunk(NamedTuple):
    """One chunk of a tier."""

    key: bytes
    payload_bytes: int
    #: When it was stored, Unix seconds; 0 where that is not known.
    created_s: int


class Inventory(ABC):
    """A tier whose chunks other processes list and delete. Thread-safe, like `Tier`.

    A tier that is `remote` waits for its server in all of these, and raises `Unavailable`.
    """

    @abstractmethod
    def describe(self, namespace: Namespace) -> None:
        """Keep the readable fields of a namespace beside its chunks. Failing to is no error: it is then
        listed by its digest alone."""

    @abstractmethod
    def namespaces(self) -> dict[bytes, Mapping[str, str]]:
        """The digests of all namespaces that have chunks here, and the fields of those that were described
        (checked against the digest), else none."""

    @abstractmethod
    def chunks(self, namespace: bytes) -> Iterator[StoredChunk]:
        """All chunks of a namespace."""

    @abstractmethod
    def removed(self) -> Sequence[bytes]:
        """The keys that other processes removed (`Tier.remove`, not eviction) since the last call, so that
        copies of them in host memory go too; a namespace's digest stands for all its keys."""
