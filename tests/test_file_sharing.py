"""Several processes that write and read one directory of the NVMe tier: real processes, real kills."""

import contextlib
import errno
import fcntl
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends import catalog as catalog_module
from lmkv.backends import file as file_module
from lmkv.backends import journal as journal_module
from lmkv.backends import segments as segments_module
from lmkv.backends.file import FileTier
from lmkv.backends.journal import ENTRY_BYTES, open_journal, read_journal
from lmkv.config import ConfigError
from tests.test_file_tier import (
    CAPACITY,
    CHUNK,
    CORRUPT,
    MISS,
    OK,
    REJECTED,
    UNAVAILABLE,
    MiB,
    Open,
    counters,
    disk_bytes,
    flip,
    get,
    key,
    put,
    run_python,
)

LARGE = 88 * MiB  # ten segments of 8 MiB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chunks"


@pytest.fixture
def open_tier(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(file_module, "POLL_S", 0.0)
    monkeypatch.setattr(journal_module, "LOOK_S", 0.0)
    with contextlib.ExitStack() as stack:

        def open_(capacity: int = LARGE, *, read_only: bool = False) -> FileTier:
            tier = FileTier(path, capacity, read_only=read_only)
            stack.callback(tier.close)
            return tier

        yield open_


class Child:
    """A process with a tier. It does what its standard input says, and answers with a line."""

    def __init__(self, path: Path, capacity: int = LARGE) -> None:
        self._process = run_python(
            f"""
            import lmkv.backends.file
            lmkv.backends.file.POLL_S = 0.0
            tier = FileTier.open({{"path": str(path), "capacity": {capacity}}})
            print("ready", flush=True)
            for line in sys.stdin:
                print(eval(line), flush=True)
            """,
            path,
            stdin=subprocess.PIPE,
        )
        assert self.answer() == "ready"

    def say(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{expression}\n".encode())
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def ask(self, expression: str) -> Any:
        self.say(expression)
        return eval(self.answer())

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            assert self._process.wait() == -signal.SIGKILL
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start(path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start_(capacity: int = LARGE) -> Child:
            child = Child(path, capacity)
            stack.callback(child.kill)
            return child

        yield start_


def stores(first: int, end: int, size: int = CHUNK) -> str:
    """Store these chunks, ten at a time; the number that was."""
    batches = f"(range(n, min(n + 10, {end})) for n in range({first}, {end}, 10))"
    return f"sum(put(tier, list(batch), {size}).count(OK) for batch in {batches})"


def live_puts(path: Path) -> int:
    fd = open_journal(path / "w0.journal")
    try:
        return int(journal_module.replay(read_journal(fd)).live.sum())
    finally:
        os.close(fd)


def offered(tier: FileTier, end: int) -> list[int]:
    assert get(tier, []) == []  # learns all that is new, which `contains` leaves to a thread if it is much
    return [n for n in range(end) if tier.has(key(n))]


# -- capacity


@pytest.mark.parametrize("count", [2, 4])
def test_writers_beside_each_other_never_exceed_the_capacity(
    open_tier: Open, path: Path, start: Any, count: int
) -> None:
    children = [start() for _ in range(count)]
    share = 3 * LARGE // CHUNK // count  # three times what fits
    for i, child in enumerate(children):
        child.say(stores(1000 * i, 1000 * i + share))
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.extend([child.answer() for child in children]))
    thread.start()
    largest = 0
    while thread.is_alive():
        largest = max(largest, disk_bytes(path))
    assert [int(answer) for answer in answers] == [share] * count
    assert 0.8 * LARGE < largest <= LARGE
    third = open_tier(read_only=True)
    found = offered(third, 1000 * count)
    assert get(third, found) == [OK] * len(found)
    assert len(found) == live_puts(path) > 200
    for i, child in enumerate(children):  # what each stored last is there, and all see the same
        assert {1000 * i + share - 1} <= set(found)
        assert child.ask("tier.contains([]) or tier.stats().chunks") == len(found)
        assert child.ask("tier.stats().counters['corrupt']") == 0
    assert counters(third)["corrupt"] == counters(third)["races"] == 0


def test_who_joins_a_full_directory_can_store(open_tier: Open, path: Path) -> None:
    first = open_tier()
    for n in range(0, 400, 10):
        assert put(first, list(range(n, n + 10))) == [OK] * 10
    second = open_tier()
    for n in range(1000, 1400, 10):  # at the same pace
        assert put(second, list(range(n, n + 10))) == [OK] * 10
        assert put(first, list(range(n - 600, n - 590))) == [OK] * 10
        assert disk_bytes(path) <= LARGE
    shares = [sum(n // 1000 == of for n in offered(first, 1400)) for of in (0, 1)]
    assert min(shares) > sum(shares) / 3
    for n in range(1400, 2400, 10):  # the other one rests
        assert put(second, list(range(n, n + 10))) == [OK] * 10
    assert all(n >= 1000 or n >= 760 for n in offered(second, 2400))


def test_the_capacity_of_who_opened_last_holds_for_all(open_tier: Open, path: Path) -> None:
    first = open_tier()
    for n in range(0, 400, 10):
        put(first, list(range(n, n + 10)))
    assert disk_bytes(path) > 0.8 * LARGE
    second = open_tier(48 * MiB)
    assert disk_bytes(path) <= 48 * MiB
    assert get(second, [399]) == get(first, [399]) == [OK]
    kept = offered(first, 400)
    assert kept == offered(second, 400) and 60 < len(kept) < 160
    for n in range(400, 800, 10):
        assert put(first, list(range(n, n + 10))) == [OK] * 10
        assert disk_bytes(path) <= 48 * MiB
    assert first.room(CHUNK) == second.room(CHUNK)
    third = open_tier(56 * MiB)
    for n in range(1000, 1400, 10):
        assert put(first, list(range(n, n + 10))) == [OK] * 10
    assert 48 * MiB < disk_bytes(path) <= 56 * MiB
    assert get(third, [1399]) == [OK]
    assert counters(first)["corrupt"] == counters(second)["corrupt"] == 0


def test_no_more_processes_write_than_can(open_tier: Open, path: Path, start: Any) -> None:
    child = start(CAPACITY)
    open_tier(CAPACITY)  # four segments: two processes
    with pytest.raises(ConfigError, match=r"2 engines write to .* already.*role to read_only"):
        open_tier(CAPACITY)
    open_tier(CAPACITY, read_only=True)
    child.kill()
    assert put(open_tier(CAPACITY), [1]) == [OK]


def test_a_capacity_too_small_for_those_that_write_is_refused(open_tier: Open, path: Path) -> None:
    tiers = [open_tier(120 * MiB) for _ in range(6)]
    for n, tier in enumerate(tiers):
        assert put(tier, [n]) == [OK]  # each keeps a segment
    tiers[0].close()
    with pytest.raises(ConfigError, match=r"5 engines write to .* already; its capacity allows 2"):
        open_tier(CAPACITY)
    for tier in tiers[2:]:
        tier.close()
    open_tier(CAPACITY)
    assert disk_bytes(path) <= CAPACITY


# -- one copy


def test_what_another_process_stored_is_not_stored_again(open_tier: Open, start: Any) -> None:
    child, tier = start(), open_tier()
    assert child.ask(stores(0, 50)) == 50
    assert put(tier, list(range(60))) == [OK] * 60
    assert counters(tier)["put_dedup"] == 50 and counters(tier)["put_chunks"] == 10
    assert child.ask("put(tier, [55]) == [OK] and tier.stats().counters['put_dedup']") == 1


def test_two_processes_that_store_the_same_at_once_leave_one_copy(
    open_tier: Open, path: Path, start: Any
) -> None:
    children = [start(), start()]
    size = 20_000
    for child in children:
        child.say(stores(0, 1000, size))
    assert [int(child.answer()) for child in children] == [1000, 1000]
    third = open_tier()
    assert get(third, list(range(1000)), size) == [OK] * 1000
    assert third.stats().chunks == live_puts(path) == 1000
    put_chunks = [child.ask("tier.stats().counters['put_chunks']") for child in children]
    assert sum(put_chunks) == 1000
    for child in children:
        assert child.ask("tier.stats().chunks") == 1000
    # One word removes it, for there is one copy.
    assert third.remove([key(n) for n in range(1000)]) == [OK] * 1000
    for child in children:
        child.kill()
    assert offered(open_tier(), 1000) == []


def test_who_comes_second_gives_the_place_back(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_tier(), open_tier()
    real = file_module.write

    def write(*arguments: Any) -> None:
        real(*arguments)
        monkeypatch.setattr(file_module, "write", real)
        assert put(second, list(range(10))) == [OK] * 10  # while the first one's lie on disk already

    put(first, [100])
    monkeypatch.setattr(file_module, "write", write)
    assert put(first, list(range(10))) == [OK] * 10
    assert counters(first)["put_dedup"] == 10 and counters(first)["put_chunks"] == 1
    assert first._tail == CHUNK + 4096
    assert get(first, list(range(10))) == get(second, list(range(10))) == [OK] * 10


# -- kills


def test_a_killed_writer_loses_nothing_acknowledged(open_tier: Open, path: Path) -> None:
    survivor = open_tier(320 * MiB)  # nothing is evicted
    writer = f"""
    tier = FileTier.open({{"path": str(path), "capacity": {320 * MiB}}})
    n = int(sys.argv[2])
    while True:
        assert put(tier, list(range(n, n + 7)), 9000) == [OK] * 7
        n += 7
        print(n, flush=True)
    """
    first = mine = 0
    for round_ in range(20):
        child = run_python(writer, path, first)
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        deadline = time.monotonic() + 0.01 * (round_ % 5)
        while time.monotonic() < deadline:
            lines.append(child.stdout.readline())
            assert put(survivor, [100_000 + mine], 9000) == [OK]
            mine += 1
        child.kill()
        lines += child.stdout.readlines()
        child.stdout.close()
        child.wait()
        first, before = int([line for line in lines if line.endswith(b"\n")][-1]), first
        assert get(survivor, list(range(before, first)), 9000) == [OK] * (first - before)
        assert disk_bytes(path) <= 320 * MiB
    assert first > 140
    fresh = open_tier(320 * MiB)
    assert get(fresh, list(range(first)), 9000) == [OK] * first
    assert get(fresh, [100_000 + n for n in range(mine)], 9000) == [OK] * mine
    for tier in (survivor, fresh):
        assert counters(tier)["corrupt"] == counters(tier)["races"] == counters(tier)["io_errors"] == 0
    # Twenty processes went on in each other's segments.
    assert len(list(path.glob("*.seg"))) <= 1 + (first + mine) * 4096 * 4 // survivor._segment_bytes + 2


def test_killed_writers_that_recycle_and_compact_leave_nothing_wrong(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SLACK_BYTES", 64 * ENTRY_BYTES)
    survivor = open_tier()
    writer = f"""
    import lmkv.backends.file
    lmkv.backends.file.POLL_S = 0.0
    journal_module._SLACK_BYTES = {64 * ENTRY_BYTES}
    tier = FileTier.open({{"path": str(path), "capacity": {LARGE}}})
    rng = random.Random(int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        put(tier, [rng.randrange(800) for _ in range(rng.randrange(1, 30))])
        get(tier, [rng.randrange(800) for _ in range(4)])
        tier.remove([key(rng.randrange(800))])
    """
    for round_ in range(12):
        children = [run_python(writer, path, 2 * round_ + i) for i in range(1 + round_ % 2)]
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        for n in range(5):
            assert put(survivor, [10_000 + 5 * round_ + n]) == [OK]
            assert disk_bytes(path) <= LARGE
        for child in children:
            child.kill()
            assert child.stdout is not None
            child.stdout.close()
            child.wait()
        found = offered(survivor, 800)
        assert get(survivor, found) == [OK] * len(found)
        assert disk_bytes(path) <= LARGE
        assert counters(survivor)["corrupt"] == counters(survivor)["io_errors"] == 0
    chunks = survivor.stats().chunks
    assert counters(survivor)["evicted"] + chunks > 0
    assert open_tier().stats().chunks == chunks == live_puts(path)


def test_a_segment_that_a_process_left_is_filled_up(open_tier: Open, path: Path, start: Any) -> None:
    for n in range(6):
        child = start()
        assert child.ask(f"put(tier, [{n}]) == [OK]")
        child.kill()
    assert len(list(path.glob("*.seg"))) == 1
    assert get(open_tier(), list(range(6))) == [OK] * 6


def test_a_fork_keeps_nothing_of_what_its_parent_held(open_tier: Open, path: Path) -> None:
    parent = run_python(
        f"""
        tier = FileTier.open({{"path": str(path), "capacity": {CAPACITY}}})
        assert put(tier, [1]) == [OK]
        with tier._directory.locked():
            child = os.fork()
            if child == 0:  # it has the same open files
                os.write(1, b"read\\n" if get(tier, [1]) == [OK] else b"lost\\n")
                time.sleep(1000)
            os.write(1, f"{{child}}\\n".encode())  # at once: the other one writes too
            time.sleep(1000)
        """,
        path,
    )
    assert parent.stdout is not None
    lines = sorted(parent.stdout.readline() for _ in range(2))
    try:
        parent.kill()
        parent.wait()
        assert lines[1] == b"read\n"
        assert put(open_tier(CAPACITY), [2]) == [OK]
        assert len(list(path.glob("*.seg"))) == 1
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)
        parent.stdout.close()


def test_a_fork_of_a_tier_reads_and_changes_nothing(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    assert put(tier, [1, 2]) == [OK, OK]
    flip(path / "w0-00000.seg", 4096)
    child = os.fork()
    if child == 0:
        corrupt = get(tier, [1, 2])
        good = (
            corrupt == [CORRUPT, OK]
            and put(tier, [2, 3]) == [OK, UNAVAILABLE]
            and tier.remove([key(2)]) == [UNAVAILABLE]
        )
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert put(tier, [3]) == [OK]
    assert get(tier, [1, 2, 3]) == [CORRUPT, OK, OK]
    assert get(open_tier(), [1, 2, 3]) == [MISS, OK, OK]


def test_a_stopped_process_stops_no_other_for_long(
    open_tier: Open, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "LOCK_WAIT_S", 0.1)
    tier, child = open_tier(), start()
    assert put(tier, [1, 2]) == [OK, OK]
    child.say(
        "exec('h = tier._directory.locked(); h.__enter__(); os.kill(os.getpid(), signal.SIGSTOP)', globals())"
    )
    deadline = time.monotonic() + 30
    while put(tier, [10]) == [OK]:  # until it holds the lock
        assert tier.remove([key(10)]) in ([OK], [UNAVAILABLE]) and time.monotonic() < deadline
    assert put(tier, [1, 3]) == [OK, UNAVAILABLE]
    assert get(tier, [1, 2, 3]) == [OK, OK, MISS]
    assert tier.remove([key(2)]) == [UNAVAILABLE] and get(tier, [2]) == [MISS]
    late = open_tier()  # serves, and stores once it can
    assert get(late, [1]) == [OK] and put(late, [1, 4]) == [OK, UNAVAILABLE]
    child.kill()
    assert put(tier, [3]) == put(late, [4]) == [OK]
    assert get(tier, [1, 3, 4]) == get(late, [1, 3, 4]) == [OK] * 3
    assert get(late, [2]) == get(open_tier(), [2]) == [MISS]  # it was told when that was possible


def test_a_lock_that_is_held_all_the_time_is_waited_for_once(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "LOCK_WAIT_S", 2.0)
    tier = open_tier()
    put(tier, [0])
    fd = os.open(path / "writer.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    started = time.monotonic()
    try:
        for n in range(1, 16):
            assert put(tier, [n]) == [UNAVAILABLE]
    finally:
        os.close(fd)
    assert time.monotonic() - started < 20  # and not 30
    assert put(tier, list(range(16))) == [OK] * 16


# -- removal


def test_a_chunk_that_another_process_stored_is_removed_for_good(open_tier: Open, start: Any) -> None:
    owner, remover = start(), start()
    assert owner.ask(stores(0, 20)) == 20
    assert remover.ask("tier.remove([key(3), key(4), key(99)]) == [OK, OK, MISS]")
    remover.kill()
    assert owner.ask("get(tier, [2, 3, 4, 5]) == [OK, MISS, MISS, OK]")
    owner.kill()
    tier = open_tier()
    assert get(tier, [2, 3, 4, 5]) == [OK, MISS, MISS, OK]
    tier._catalog._compact()
    assert put(tier, [3]) == [OK]
    assert get(open_tier(), [2, 3, 4, 5]) == [OK, OK, MISS, OK]


def test_what_is_removed_while_it_moves_does_not_come_back(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, other = open_tier(), open_tier()
    put(tier, list(range(20)))
    assert get(tier, [2, 3, 4]) == [OK] * 3
    real = file_module.write
    moved = []

    def write(piece: Any, *arguments: Any) -> None:
        if piece.again:
            moved.extend([row.key for row in piece.rows])
            assert tier.remove([key(3)]) == [OK]  # it was there
            assert other.remove([key(4)]) == [MISS]  # this one cannot tell
        real(piece, *arguments)

    monkeypatch.setattr(file_module, "write", write)
    for n in range(100, 500, 10):
        put(tier, list(range(n, n + 10)))
    assert moved == [key(2), key(3), key(4)]
    for each in (tier, other, open_tier()):
        assert get(each, [1, 2, 3, 4]) == [MISS, OK, MISS, MISS]


# -- readers


def test_readers_of_what_others_recycle_see_races_and_no_corruption(open_tier: Open, start: Any) -> None:
    children = [start(), start()]
    for i, child in enumerate(children):
        child.say(stores(1000 * i, 1000 * i + 700))
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.extend([child.answer() for child in children]))
    thread.start()
    tier = open_tier(read_only=True)
    hits = 0
    while thread.is_alive():
        assert tier.contains([]) == []
        numbers = list({int.from_bytes(m.key[32:64], "little") for s in range(3) for m in members(tier, s)})[
            :40
        ]
        time.sleep(0.01)
        tier._next_poll = time.monotonic() + 100  # it has not heard of it
        statuses = get(tier, numbers)
        tier._next_poll = 0.0
        assert set(statuses) <= {OK, MISS}
        hits += statuses.count(OK)
    assert answers == ["700", "700"] and hits > 0
    assert counters(tier)["corrupt"] == 0


def members(tier: FileTier, segment: int) -> Sequence[Any]:
    with tier._catalog.lock:
        return tier._catalog.index.members(segment)


def test_what_another_process_reads_survives_recycling(open_tier: Open) -> None:
    writer, reader = open_tier(), open_tier()
    put(writer, list(range(20)))
    assert get(reader, [2, 3]) == [OK, OK]
    assert put(reader, [50]) == [OK]  # tells of it
    for n in range(100, 450, 10):
        put(writer, list(range(n, n + 10)))
    assert get(reader, [1, 2, 3]) == [MISS, OK, OK]
    assert counters(writer)["reinserted"] + counters(reader)["reinserted"] >= 2


def test_compaction_is_followed_without_reading_the_journal_anew(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    load = catalog_module.Catalog.load

    def counted(self: catalog_module.Catalog) -> None:
        loads.append(self)
        load(self)

    writer, follower, late = open_tier(), open_tier(), open_tier()
    put(writer, [0])
    assert get(follower, [0]) == get(late, [0]) == [OK]
    monkeypatch.setattr(catalog_module.Catalog, "load", counted)
    for n in range(1, 40, 4):
        put(writer, [n, n + 1])
        writer.remove([key(n)])
        writer._catalog._compact()
        put(writer, [n + 2])
        assert get(follower, [n, n + 1, n + 2]) == [MISS, OK, OK]
        assert put(follower, [n + 3]) == [OK]
        assert get(writer, [n + 3]) == [OK]
    assert not loads
    assert offered(late, 50) == offered(writer, 50) == offered(follower, 50)
    assert loads == [late._catalog]  # it missed some
    assert counters(follower)["journal_damaged"] == 0


def test_compaction_by_who_is_killed_or_overtaken_on_the_way_loses_nothing(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, follower = open_tier(), open_tier()
    monkeypatch.setattr(journal_module, "LOOK_S", 100.0)  # nothing but the journal tells of it
    put(writer, [0])
    assert get(follower, [0]) == [OK]
    rename = os.rename

    def killed(*_: Any) -> None:
        raise OSError(errno.EIO, "as if it were killed")

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(OSError, match="killed"):
        writer._catalog._compact()
    assert put(follower, [1]) == [OK] and get(writer, [1]) == [OK]

    def overtaken(*names: Any) -> None:
        assert get(follower, [0, 2]) == [OK, MISS]  # it reads the last entry
        rename(*names)

    monkeypatch.setattr(os, "rename", overtaken)
    writer._catalog._compact()
    assert put(follower, [2]) == [OK]
    assert get(writer, [0, 1, 2]) == get(open_tier(), [0, 1, 2]) == [OK] * 3


def test_many_namespaces_and_compactions_beside_each_other(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SLACK_BYTES", 16 * ENTRY_BYTES)
    tiers = [open_tier() for _ in range(3)]
    for n in range(150):
        tier = tiers[n % 3]
        assert tier.put([key(n, namespace=n % 40)], [memoryview(bytes([n]) * 64)]) == [OK]
        if n % 2:
            assert tiers[(n + 1) % 3].remove([key(n, namespace=n % 40)]) == [OK]
    for tier in (*tiers, open_tier()):
        for n in range(150):
            content = memoryview(bytearray(64))
            assert tier.get([key(n, namespace=n % 40)], [content]) == [MISS if n % 2 else OK]
            assert n % 2 or content == bytes([n]) * 64


def test_processes_agree_whatever_they_do(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_SLACK_BYTES", 64 * ENTRY_BYTES)
    rng = random.Random(5)
    tiers = [open_tier() for _ in range(4)]
    there: set[int] = set()  # or evicted
    hits = 0
    for _ in range(1500):
        at = rng.randrange(4)
        numbers = [rng.randrange(600) for _ in range(rng.randrange(1, 12))]
        kind = rng.random()
        if kind < 0.5:
            assert put(tiers[at], numbers) == [OK] * len(numbers)
            there.update(numbers)
        elif kind < 0.85:
            statuses = get(tiers[at], numbers)
            assert set(statuses) <= {OK, MISS}
            assert {n for n, status in zip(numbers, statuses, strict=True) if status is OK} <= there
            hits += statuses.count(OK)
        elif kind < 0.98:
            statuses = tiers[at].remove([key(n) for n in numbers])
            assert set(statuses) <= {OK, MISS}
            there.difference_update(numbers)
        else:
            tiers[at].close()
            tiers[at] = open_tier()
    found = [offered(tier, 600) for tier in tiers]
    assert found[0] == found[1] == found[2] == found[3] and set(found[0]) <= there and hits > 500
    for tier in tiers:
        assert counters(tier)["corrupt"] == counters(tier)["races"] == counters(tier)["io_errors"] == 0
        assert tier.stats().chunks == len(found[0])


# -- faults


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process cannot open another file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_news_that_an_error_kept_from_the_index_are_read_again(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, follower = open_tier(), open_tier(read_only=True)
    put(writer, [0, 1])
    assert get(follower, [0, 1]) == [OK, OK]
    monkeypatch.setattr(journal_module, "LOOK_S", 100.0)
    follower._catalog._journal._next_look = time.monotonic() + 100
    writer.remove([key(0)])
    put(writer, [2])
    writer._catalog._compact()
    put(writer, [3])
    with no_more_files():  # it reads the old journal to its end, and cannot open the new one
        assert get(follower, []) == []
    assert counters(follower)["io_errors"] == 1
    assert get(follower, [0, 1, 2, 3]) == [MISS, OK, OK, OK]


def test_a_journal_that_was_read_in_vain_is_read_again(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, follower = open_tier(), open_tier(read_only=True)
    put(writer, [0, 1])
    assert get(follower, [0, 1]) == [OK, OK]
    writer.remove([key(0)])
    put(writer, [2])
    for _ in range(2):  # it missed one, so it reads all
        writer._catalog._compact()

    def failing(_: Any) -> None:
        raise OSError(errno.EMFILE, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(segments_module.Directory, "scan", failing)
        assert get(follower, []) == []
    assert counters(follower)["io_errors"] == 1
    put(writer, [3])
    assert get(follower, [0, 1, 2, 3]) == [MISS, OK, OK, OK]


def test_more_is_removed_at_once_than_the_journal_may_hold(open_tier: Open, path: Path) -> None:
    tier = open_tier(CAPACITY)
    put(tier, [0, 1])
    assert tier.remove([key(n) for n in range(1, 20_000)]) == [OK] + [MISS] * 19_998
    assert put(tier, [2]) == [OK] and counters(tier)["io_errors"] == 0
    assert get(open_tier(CAPACITY), [0, 1, 2]) == [OK, MISS, OK]
    assert disk_bytes(path) <= CAPACITY


@pytest.mark.parametrize("fault", ["last entry is torn", "directory is not synced"])
def test_what_fails_at_the_end_of_a_compaction_parts_nobody(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    writer, follower = open_tier(), open_tier()
    monkeypatch.setattr(journal_module, "LOOK_S", 100.0)
    put(writer, [0])
    assert get(follower, [0]) == [OK]
    pwrite = os.pwrite

    def torn(fd: int, data: bytes, at: int) -> int:
        return pwrite(fd, data[:30] if data[0] == journal_module.MOVED else data, at)

    def failing(_: Path) -> None:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        if fault == "last entry is torn":
            patch.setattr(os, "pwrite", torn)
        else:
            patch.setattr(journal_module, "sync_directory", failing)
        with pytest.raises(OSError, match=r"injected|short write"):
            writer._catalog._compact()
    assert put(writer, [1]) == put(follower, [2]) == put(writer, [3]) == [OK]
    for tier in (writer, follower, open_tier()):
        assert get(tier, [0, 1, 2, 3]) == [OK] * 4
        assert counters(tier)["journal_damaged"] == 0


@pytest.mark.parametrize("look_s", [0.0, 100.0])
def test_a_directory_in_the_place_of_another_is_left_alone(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    old = open_tier()
    put(old, list(range(20)))
    old._next_place_check = time.monotonic() + 1000  # it has looked just now
    monkeypatch.setattr(journal_module, "LOOK_S", look_s)
    old._catalog._journal._next_look = time.monotonic() + look_s
    path.rename(path.with_name("elsewhere"))
    new = open_tier()
    for n in range(0, 300, 10):
        assert put(new, list(range(n, n + 10))) == [OK] * 10
    for n in range(1000, 1100, 10):
        put(old, list(range(n, n + 10)))
    assert old.remove([key(299)]) != [OK]
    for tier in (new, open_tier()):
        assert get(tier, list(range(1000, 1100))) == [MISS] * 100
        assert get(tier, list(range(300)))[100:] == [OK] * 200
        assert counters(tier)["corrupt"] == 0


def test_too_many_chunks_in_segments_that_others_write_to_are_refused(open_tier: Open, path: Path) -> None:
    tier = open_tier(CAPACITY)
    most = CAPACITY // segments_module.MIN_MEAN_CHUNK_BYTES
    for n in range(0, most, 40):
        assert put(tier, list(range(n, n + 40)), 4096) == [OK] * 40
    assert tier._active is not None
    numbers = {int(file.stem[3:]) for file in path.glob("*.seg")} - {tier._active.segment}
    others = [tier._directory.open_segment(number, os.O_RDWR) for number in numbers]
    assert all(file.lock() for file in others)
    statuses: list[Any] = []
    thread = threading.Thread(target=lambda: statuses.extend(put(tier, [most], 4096)), daemon=True)
    thread.start()
    thread.join(60)
    assert statuses == [OK]  # at the cost of what it wrote itself
    assert tier.stats().chunks <= most


def test_who_stores_while_the_journal_is_lost_is_not_told_that_it_holds(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier, [0])
    real = file_module.write

    def write(*arguments: Any) -> None:
        real(*arguments)
        (path / "w0.journal").unlink()
        monkeypatch.setattr(file_module, "write", real)

    monkeypatch.setattr(file_module, "write", write)
    assert put(tier, [1]) == [UNAVAILABLE]
    assert put(tier, [1]) == [OK] and get(open_tier(), [0, 1]) == [MISS, OK]


def test_a_full_disk_and_a_segment_that_never_got_its_blocks(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_tier()
    for n in range(0, 150, 10):
        put(first, list(range(n, n + 10)))
    (path / "w0-00009.seg").touch(0o600)  # by who was killed then
    real = os.posix_fallocate

    def full(fd: int, at: int, size: int) -> None:
        if os.fstat(fd).st_blocks * 512 < size:
            raise OSError(errno.ENOSPC, "injected")
        real(fd, at, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    second = open_tier()
    for n in range(200, 400, 10):
        assert put(second, list(range(n, n + 10))) == [OK] * 10
    assert get(first, [399]) == [OK]


def test_files_that_are_deleted_below_living_processes_are_not_taken_for_new_ones(
    open_tier: Open, path: Path
) -> None:
    writer, reader = open_tier(), open_tier(read_only=True)
    put(writer, [0, 1])
    assert get(reader, [0, 1]) == [OK, OK]
    for file in (*path.glob("*.seg"), path / "w0.journal"):
        file.unlink()
    assert put(writer, [2, 3]) == [OK, OK]
    assert get(reader, [0, 1, 2, 3]) == [MISS, MISS, OK, OK]
    assert counters(reader)["corrupt"] == 0


def test_a_closed_directory_is_nowhere(open_tier: Open) -> None:
    tier = open_tier()
    tier._directory.close()  # in another thread, while a put is under way
    assert put(tier, [1]) == [UNAVAILABLE]


# -- damage


@pytest.mark.parametrize("damage", ["flip", "truncate", "garbage", "delete"])
def test_a_journal_damaged_beside_living_processes_costs_chunks_only(
    open_tier: Open, path: Path, start: Any, damage: str
) -> None:
    child, tier = start(), open_tier()
    assert child.ask(stores(0, 40)) == 40
    assert put(tier, list(range(100, 140))) == [OK] * 40
    child.kill()
    file = path / "w0.journal"
    if damage == "flip":
        for n in range(10):
            flip(file, ENTRY_BYTES * (5 + 7 * n) + 25)
    elif damage == "truncate":
        os.truncate(file, file.stat().st_size // 2 + 17)
    elif damage == "garbage":
        file.write_bytes(os.urandom(10_000))
    else:
        file.unlink()
    fresh = open_tier()
    found = offered(fresh, 140)
    assert set(get(fresh, found)) <= {OK}
    assert 70 <= len(found) < 80 if damage == "flip" else len(found) < 40
    for n in range(200, 600, 10):  # both go on, and recycle
        assert put(tier, list(range(n, n + 10))) == [OK] * 10
        assert put(fresh, list(range(n + 1000, n + 1010))) == [OK] * 10
        assert disk_bytes(path) <= LARGE
    for each in (tier, fresh, open_tier()):
        assert get(each, [599, 1599]) == [OK, OK]
        found = offered(each, 1600)
        assert get(each, found) == [OK] * len(found)


def test_a_directory_of_the_first_version_is_gone_on_with(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    for n in range(0, 400, 10):
        put(tier, list(range(n, n + 10)))
    tier.remove([key(399)])
    before = offered(tier, 400)
    tier.close()
    file = path / "w0.journal"  # that version knew four kinds of entries
    entries = [file.read_bytes()[i : i + ENTRY_BYTES] for i in range(0, file.stat().st_size, ENTRY_BYTES)]
    file.write_bytes(b"".join(entry for entry in entries if entry[0] <= 4))
    tiers = [open_tier(), open_tier()]
    for tier in tiers:
        assert offered(tier, 400) == before
        assert get(tier, before) == [OK] * len(before)
    for n in range(400, 800, 10):
        assert put(tiers[n // 10 % 2], list(range(n, n + 10))) == [OK] * 10
        assert disk_bytes(path) <= LARGE
    assert get(open_tier(read_only=True), [399, *range(700, 800)]) == [MISS] + [OK] * 100
    assert counters(tiers[0])["journal_damaged"] == 0


def test_reading_only_refuses_and_follows_several(open_tier: Open, start: Any) -> None:
    reader, children = open_tier(read_only=True), [start(), start()]
    for i, child in enumerate(children):
        assert child.ask(stores(100 * i, 100 * i + 10)) == 10
    assert get(reader, [0, 9, 100, 109]) == [OK] * 4
    assert put(reader, [0, 50]) == [OK, REJECTED] and reader.remove([key(0), key(50)]) == [REJECTED, MISS]
