"""Names of stored bytes: namespaces and keys.

A *namespace* is the SHA-256 over everything that must match for KV bytes to be
interchangeable; a *key* is that digest, the engine's chained block hash and the KV group.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

NAMESPACE_BYTES = 32
HASH_BYTES = 32
GROUP_BYTES = 4
KEY_BYTES = NAMESPACE_BYTES + HASH_BYTES + GROUP_BYTES


@dataclass(frozen=True)
class Namespace:
    """All identity fields of one set of interchangeable KV bytes, and their digest.

    `fields` keeps the readable values, so that two namespaces can be compared field by field.
    """

    fields: Mapping[str, str]
    digest: bytes

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> "Namespace":
        """Digest `fields`, each name and value prefixed by its length, in the order of the names.

        The length prefixes make the encoding injective: no two field sets share one.
        """
        hasher = hashlib.sha256()
        for name in sorted(fields):
            for text in (name, fields[name]):
                part = text.encode("utf-8", "surrogateescape")  # a path may hold any byte
                hasher.update(len(part).to_bytes(8, "little"))
                hasher.update(part)
        return cls(fields=dict(fields), digest=hasher.digest())

    def differences(self, other: "Namespace") -> dict[str, tuple[str | None, str | None]]:
        """Fields whose values differ, as name -> (ours, theirs); None where a field is absent."""
        names = sorted(self.fields.keys() | other.fields.keys())
        pairs = {name: (self.fields.get(name), other.fields.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def make_key(namespace: bytes, block_hash: bytes, group: int) -> bytes:
    """Build the key of one chunk: `KEY_BYTES` long.

    `block_hash` is the engine's chained hash of the chunk's last block. A hash shorter than
    `HASH_BYTES` is padded with zero bytes (its algorithm is part of the namespace); a longer
    one raises ValueError, because a truncated hash could name two prefixes.
    """
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace digest has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
    if len(block_hash) > HASH_BYTES:
        raise ValueError(f"a block hash has at most {HASH_BYTES} bytes, not {len(block_hash)}")
    return namespace + block_hash.ljust(HASH_BYTES, b"\0") + group.to_bytes(GROUP_BYTES, "big")


def key_namespace(key: bytes) -> bytes:
    """The namespace digest inside a key."""
    return key[:NAMESPACE_BYTES]
