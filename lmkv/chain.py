"""The tiers below host memory that the settings ask for, and what goes from one to the next."""

import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from lmkv.below import Below
from lmkv.config import Config, redact_url
from lmkv.tier import Buffer, Status, Tier, open_tier

logger = logging.getLogger(__name__)


def open_redis(config: Config) -> Tier | None:
    """The Redis tier, if there is to be one. Raises ConfigError."""
    if config.redis.url is None:
        return None
    tier = open_tier("redis", msgspec.structs.asdict(config.redis))
    logger.info(
        "lmkv: redis tier: %s, %s, %s", redact_url(config.redis.url), config.redis.role, config.redis.policy
    )
    return tier


def chain(config: Config, file: Tier | None, redis: Tier | None) -> list[Below]:
    """The tiers in the order in which they are asked, each with threads of its own.

    What is to be demoted to Redis comes from the files where there are some: they hold it the longest.
    """
    below = []
    if file is not None:
        below.append(Below.threaded(file, role=config.file.role, policy=config.file.policy))
    if redis is not None:
        last = Below.threaded(redis, role=config.redis.role, policy=config.redis.policy)
        if file is not None and last.demote and last.writable:
            file.on_evict = partial(_demote, last)
            last.writable = False
        below.append(last)
    return below


def _demote(below: Below, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> None:
    """Called on a thread of the tier above, with what it is about to evict."""
    if not below.writes.open:
        below.writes.report(Status.UNAVAILABLE not in below.tier.put(keys, buffers))
