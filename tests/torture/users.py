"""Users of the library, in a module that a new process imports fast.

python -m tests.torture.users DIRECTORY URL NUMBER
"""

import hashlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from lmkv.backends.file import FileTier
from lmkv.keys import make_key
from lmkv.tier import Status, Tier, open_tier

SIZE = 12_000
CAPACITY = 160 * 2**20
#: What the parent stored before; and of each user so many.
SHARED, EACH = range(8), 4
OK = Status.OK


def key(number: int) -> bytes:
    """Of a chunk."""
    return make_key(bytes(32), number.to_bytes(32, "little"), 0)


def payload(number: int) -> memoryview:
    """The bytes of a chunk follow from its number, so that any process can check them."""
    seed = hashlib.sha256(b"%d" % number).digest()
    return memoryview((seed * (SIZE // len(seed) + 1))[:SIZE])


def stored(tier: Tier, numbers: Sequence[int]) -> list[Status]:
    """Store chunks."""
    return tier.put([key(n) for n in numbers], [payload(n) for n in numbers])


def right(tier: Tier, numbers: Sequence[int]) -> list[Status]:
    """Read chunks; what is OK must be right."""
    buffers = [memoryview(bytearray(SIZE)) for _ in numbers]
    statuses = tier.get([key(n) for n in numbers], buffers)
    for number, status, buffer in zip(numbers, statuses, buffers, strict=True):
        assert status is not OK or buffer == payload(number), f"the value of {number} is another's"
    return statuses


def opened_tiers(path: Path, url: str | None) -> list[Tier]:
    """A tier of each kind that outlives a process."""
    tiers: list[Tier] = [FileTier(path, CAPACITY)]
    if url is not None:
        tiers.append(open_tier("redis", {"url": url}))
    return tiers


def use(tier: Tier, user: int, *, ours: bool) -> None:
    """Store and read; no value is another's. `ours`: the tier was opened here, so all must go well."""
    mine, others = (range(1000 + EACH * n, 1000 + EACH * (n + 1)) for n in (user, user - 1))
    for _ in range(3):
        outcome = stored(tier, mine), right(tier, mine), right(tier, SHARED)
        assert not ours or outcome == ([OK] * EACH, [OK] * EACH, [OK] * len(SHARED)), outcome
        right(tier, others)


def main() -> None:
    """One user of tiers of its own."""
    from lmkv.backends import redis, servers

    redis.DEADLINE_S = servers.CONNECT_S = 60.0  # a loaded machine is no dead server
    logging.disable()
    path, url, user = sys.argv[1:]
    for tier in opened_tiers(Path(path), None if url == "none" else url):
        use(tier, int(user), ours=True)
        tier.close()


if __name__ == "__main__":
    main()
