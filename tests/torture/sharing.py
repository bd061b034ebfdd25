"""Processes that share: two that store the same blocks at once, and users that were forked or spawned."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmkv.backends.file import FileTier
from lmkv.backends.host import HostTier
from lmkv.tier import Tier, open_tier
from tests.processes import ROOT, die_with_parent
from tests.redis_servers import running
from tests.test_file_sharing import live_puts
from tests.test_file_tier import MiB
from tests.torture.base import HANG_S, Fork, Run, patient
from tests.torture.users import OK, SHARED, opened_tiers, right, stored, use

BATCH = 50


def _store_all(opened: Callable[[], Tier], number: int) -> Fork:
    """A child that stores so many blocks; says how many of them it was that stored them."""

    def work(say: Callable[[str], None]) -> None:
        tier = opened()
        for first in range(0, number, BATCH):
            batch = range(first, min(first + BATCH, number))
            statuses = stored(tier, batch)
            assert statuses == [OK] * len(batch), statuses
            assert right(tier, batch) == [OK] * len(batch)
        counters = tier.stats().counters
        assert not counters["io_errors"] and not counters["corrupt"]
        say(str(counters["put_chunks"]))
        tier.close()

    return Fork(work)


def _same_blocks(opened: Callable[[], Tier], number: int) -> tuple[Tier, list[int]]:
    """Two children store the same; a tier in which all of it was found, and how much each stored."""
    with patient():
        children = [_store_all(opened, number) for _ in range(2)]
        for child in children:
            assert child.wait(10 * HANG_S) == 0, "a child failed"
    tier = opened()
    for first in range(0, number, BATCH):
        batch = range(first, min(first + BATCH, number))
        assert right(tier, batch) == [OK] * len(batch)
    return tier, [int(child.line()) for child in children]


def same_blocks_in_files(run: Run) -> str:
    """Two processes store the same blocks into one directory."""
    tier, counts = _same_blocks(lambda: FileTier(run.path / "kv", 640 * MiB), run.number)
    assert sum(counts) == tier.stats().chunks == live_puts(run.path / "kv") == run.number, counts
    tier.close()
    return f"0 errors; one good copy of each: {counts[0]:,} by one, {counts[1]:,} by the other"


def same_blocks_on_redis(run: Run) -> str:
    """Two processes store the same blocks on one server."""
    with running(run.path) as server:
        tier, counts = _same_blocks(lambda: open_tier("redis", {"url": server.url}), run.number)
        values = server.client().dbsize()
        assert values == run.number, f"{values} values"
        tier.close()
    return f"0 errors; one good copy of each, {sum(counts) - run.number:,} written twice"


# -- users


@contextlib.contextmanager
def _server(path: Path) -> Iterator[str | None]:
    """The address of a server, if there is one to be had."""
    with contextlib.ExitStack() as stack:
        url = None
        with contextlib.suppress(pytest.skip.Exception):
            url = stack.enter_context(running(path)).url
        yield url


def forked_users(run: Run) -> str:
    """Children of a process that has tiers open: they use these, or open their own, while it goes on."""
    with patient(), _server(run.path / "redis") as url:
        tiers = [*opened_tiers(run.path / "kv", url), HostTier(128 * MiB)]
        for tier in tiers:
            assert stored(tier, SHARED) == [OK] * len(SHARED)
        for chance in run.rounds():
            user, inherits = 2 * run.at, chance.random() < 0.5

            def work(_: object, user: int = user, inherits: bool = inherits) -> None:
                for tier in tiers if inherits else opened_tiers(run.path / "kv", url):
                    use(tier, user, ours=not inherits)

            child = Fork(work)
            while child.poll() is None:
                for tier in tiers:
                    use(tier, user + 1, ours=True)
            assert child.wait() == 0, "a child failed"
        for tier in tiers:
            assert right(tier, SHARED) == [OK] * len(SHARED)
            counters = tier.stats().counters
            assert not counters.get("corrupt") and not counters.get("io_errors")
            tier.close()
    return f"0 crossed values on {len(tiers)} kinds of tiers, 0 lost"


def spawned_users(run: Run) -> str:
    """New processes, two at a time, beside one that goes on."""
    with patient(), _server(run.path / "redis") as url:
        tiers = opened_tiers(run.path / "kv", url)
        for tier in tiers:
            assert stored(tier, SHARED) == [OK] * len(SHARED)
        for _ in run.rounds(-(-run.number // 2)):
            command = [sys.executable, "-m", "tests.torture.users", str(run.path / "kv"), url or "none"]
            children = [
                subprocess.Popen([*command, str(3 * run.at + i)], cwd=ROOT, preexec_fn=die_with_parent)
                for i in range(2)
            ]
            while any(child.poll() is None for child in children):
                for tier in tiers:
                    use(tier, 3 * run.at + 2, ours=True)
                time.sleep(0.01)
            assert [child.returncode for child in children] == [0, 0], "a child failed"
        for tier in tiers:
            counters = tier.stats().counters
            assert not counters["corrupt"] and not counters["io_errors"]
            tier.close()
    return f"0 crossed values on {len(tiers)} kinds of tiers"
