"""Whole engines without a model: cancelled requests, too much load, SIGTERM."""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lmkv.slab import _rendezvous_path, create_or_join, private
from tests.test_file_tier import MiB
from tests.torture.base import MAX_GROWTH_BYTES, Fork, Run, peak_bytes, reset_peak
from tests.torture.engine import Engine, missing

#: Requests of one engine's life.
REQUESTS = 100
EXIT_S = 5.0


def _prompt(chance: random.Random, prompts: int, blocks: int = 12) -> list[int]:
    """One of so many prompts; two that share a thousand share their first block."""
    number = chance.randrange(prompts)
    head = [1_000_000 + number // 4]
    return [*head, *range(blocks * number, blocks * number + chance.randint(1, blocks))]


def _held() -> tuple[int, int, int]:
    """Open descriptors, threads, and mapped slabs of this process."""
    gc.collect()
    slabs = Path("/proc/self/maps").read_text().count("lmkv-slab")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), slabs


def cancelled(run: Run) -> str:
    """Engines start, serve requests of which half are cancelled at some moment, and end."""
    _life(run, random.Random(0), 4)  # what is made once and kept
    before = _held()
    loaded = 0
    for chance in run.rounds(-(-run.number // REQUESTS)):
        loaded += _life(run, chance, REQUESTS)
    deadline = time.monotonic() + 10
    while (after := _held())[1] > before[
        1
    ] and time.monotonic() < deadline:  # a thread that follows a journal
        time.sleep(0.05)
    assert after[0] <= before[0] + 2, f"{before[0]} descriptors became {after[0]}"
    assert after[1] <= before[1], f"threads are left: {threading.enumerate()}"
    assert after[2] <= before[2], "shared memory is left"
    descriptors = after[0] - before[0]
    return f"descriptors {descriptors:+}, threads +0, shared memory 0, leases 0; {loaded:,} chunks loaded"


def _life(run: Run, chance: random.Random, requests: int) -> int:
    name = f"torture-{os.getpid()}-{run.at}"
    engine = Engine(create_or_join(name, 8 * MiB), run.path / "kv", 88 * MiB)
    loaded = 0
    for number in range(requests):
        loaded += engine.serve(_prompt(chance, 200), chance, cancelled=number % 2 == 0)
        if chance.random() < 0.01:
            engine.store.reset()
    engine.settle()
    engine.close()
    assert not _rendezvous_path(name).exists()
    return loaded


def load(run: Run) -> str:
    """`number` seconds of twice the requests that an engine gets through."""
    slab_bytes = 64 * MiB
    engine = Engine(private(slab_bytes), run.path / "kv", 480 * MiB)
    chance = random.Random(run.seed)
    served, begun = 0, time.monotonic()
    while time.monotonic() - begun < 1.0:  # how many it gets through
        engine.serve(_prompt(chance, 2000), chance, cancelled=False)
        engine.settle()
        served += 1
    pause_s = 1.0 / (2 * served)
    before, offered, most = reset_peak(), 0, 0
    begun = time.monotonic()
    while (late_s := time.monotonic() - begun) < run.number:
        if offered * pause_s > late_s:
            time.sleep(0.0002)
            engine.store.end_step()
            continue
        offered += 1
        engine.serve(_prompt(chance, 2000), chance, cancelled=chance.random() < 0.1)
        most = max(most, engine.store.index.leased_bytes)
    grown = max(0, peak_bytes() - before)
    skipped = sum(engine.metric("skipped_stores", why) for why in ("write_queue_full", "slab_full"))
    engine.settle()
    assert grown <= MAX_GROWTH_BYTES, f"memory +{grown} bytes"
    assert most <= slab_bytes
    assert not engine.tier.stats().counters["corrupt"]
    engine.close()
    return (
        f"memory +{grown / MiB:.0f} MiB over the slab's {slab_bytes // MiB}, leases back to 0; "
        f"{offered:,} requests, {skipped:,} chunks not stored"
    )


def _store_until_told(path: Path, say: Callable[[str], None]) -> None:
    """Store as fast as the files take it, and end in order on SIGTERM, as engines do."""

    def ended(*_: object) -> NoReturn:
        sys.exit(0)

    engine = Engine(private(64 * MiB), path, 640 * MiB)
    signal.signal(signal.SIGTERM, ended)
    number = 0
    say("ready")
    try:
        while True:
            request = engine.store.new_request()
            accepted = engine.save(request, list(range(number, number + 8)))
            say(" ".join(map(str, accepted)))
            engine.store.finish_request(request)
            engine.store.end_step()
            number += 8
            while engine.store.pending_writes > 256:  # of the 512 that may wait
                time.sleep(0.0005)
                engine.store.end_step()
    finally:
        engine.close()
        say(f"skipped {engine.metric('skipped_stores', 'write_queue_full')}")


def terminated(run: Run) -> str:
    """SIGTERM at a random moment of a store."""
    longest_s, kept = 0.0, 0
    for chance in run.rounds():
        path = run.path / str(run.at)
        child = Fork(lambda say, path=path: _until_exit(path, say))
        assert child.line() == "ready"
        time.sleep(chance.random() * 0.1)
        begun = time.monotonic()
        child.signal(signal.SIGTERM)
        assert child.wait() == 0, "a child failed"
        took_s = time.monotonic() - begun
        assert took_s <= EXIT_S * run.patience, f"it took {took_s:.1f} s to exit"
        longest_s = max(longest_s, took_s)
        *lines, last = child.said()[1:]
        assert last == "skipped 0"
        stored = [int(number) for line in lines for number in line.split()]
        assert missing(path, 640 * MiB, stored) == 0, "what was acknowledged is lost"
        kept += len(stored)
    return f"exit within {longest_s:.1f} s; all of {kept:,} acknowledged chunks are there"


def _until_exit(path: Path, say: Callable[[str], None]) -> None:
    try:
        _store_until_told(path, say)
    except SystemExit as ended:
        assert ended.code == 0
