"""The boot canary of the tiers: a chunk of every size goes down and comes back, before any request does."""

import logging
import mmap
import os
from collections.abc import Iterable

from lmkv.config import ConfigError
from lmkv.keys import HASH_BYTES, Namespace, make_key
from lmkv.tier import Status, Tier

logger = logging.getLogger(__name__)

_SETTINGS = {"file": "[file] path", "redis": "[redis] url"}


def check_tier(tier: Tier, namespace: Namespace, sizes_bytes: Iterable[int]) -> None:
    """Store a chunk of random bytes of each size, read it, compare and remove it.

    A tier that refuses or does not answer now is left to its breaker. Raises ConfigError if a byte differs.
    """
    name = tier.info.name
    for size in sorted({size for size in sizes_bytes if size <= tier.info.max_chunk_bytes}):
        key = make_key(namespace.digest, os.urandom(HASH_BYTES), 0)
        content = os.urandom(size)
        with mmap.mmap(-1, 2 * -(-size // mmap.PAGESIZE) * mmap.PAGESIZE) as memory:
            view = memoryview(memory)
            source, target = view[:size], view[view.nbytes // 2 :][:size]
            source[:] = content
            try:
                statuses = tier.put([key], [source])
                if statuses == [Status.OK]:
                    statuses = tier.get([key], [target])
                    tier.remove([key])
                same = target == content
            finally:
                for part in (source, target, view):
                    part.release()
        if statuses == [Status.OK] and same:
            continue
        if statuses in ([Status.OK], [Status.CORRUPT]):
            problem = f"a test chunk of {size} bytes came back with other bytes from the {name} tier."
            fix = "check the disk or the server and the memory of this machine, or leave the tier out."
            raise ConfigError(_SETTINGS.get(name, f"[{name}]"), problem, fix)
        logger.warning(
            "lmkv: the %s tier could not be tried with a chunk of %d bytes: %s",
            name,
            size,
            statuses[0].name.lower(),
        )
