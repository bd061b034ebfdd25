"""The shared slab: real processes, real kills."""

import ctypes
import errno
import fcntl
import logging
import os
import random
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmkv import slab as module
from lmkv.slab import (
    DATA_OFFSET,
    FAILED_RING,
    HUGE_PAGE_BYTES,
    MAX_GROUPS,
    MAX_RANKS,
    Slab,
    SlabError,
    create_or_join,
    private,
)

CAPACITY = 1 << 20
ROOT = Path(__file__).parent.parent

#: A process that joins slabs and does what it is told, one command a line; answers one line each.
WORKER = """
import sys
from lmkv.slab import create_or_join

print("imported", flush=True)
for line in sys.stdin:
    command, *args = line.split()
    answer = "ok"
    if command == "join":
        slab = create_or_join(args[0], int(args[1]))
        answer = str(slab.capacity_bytes)
    elif command == "swap":  # what lies there, then write the new byte
        place, byte = int(args[0]), int(args[1])
        answer = str(slab.data[place])
        slab.data[place] = byte
    elif command == "register":
        slab.rank(int(args[0])).register(bytes([int(args[0]) % 256]) * 32, [100, 200])
    elif command == "finish":
        slab.rank(int(args[0])).finish(int(args[1]))
    elif command == "fail":
        slab.rank(int(args[0])).fail(int(args[1]))
    elif command == "unlink":
        slab.unlink()
    elif command == "close":
        slab.close()
    print(answer, flush=True)
"""


class Worker:
    """Another process of the engine."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        print(*command, file=self.process.stdin, flush=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, *command: object) -> str:
        self.tell(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Workers:
    """Starts processes at once and kills them all at the end."""

    def __init__(self) -> None:
        self.all: list[Worker] = []

    def start(self, count: int) -> list[Worker]:
        new = [Worker() for _ in range(count)]
        self.all += new
        for worker in new:
            assert worker.answer() == "imported"
        return new


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    for worker in workers.all:
        worker.kill()


@pytest.fixture
def engine_id() -> Iterator[str]:
    engine_id = f"test-{uuid.uuid4()}"
    yield engine_id
    module._rendezvous_path(engine_id).unlink(missing_ok=True)


def rendezvous(engine_id: str) -> Path:
    return module._rendezvous_path(engine_id)


def mappings() -> int:
    """Slabs mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:lmkv-slab")


def open_slabs() -> int:
    """Slab descriptors of this process."""
    links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd))
    return sum("memfd:lmkv-slab" in link for link in links)


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


# --- sharing


def test_processes_share_bytes_and_control_words(workers: Workers, engine_id: str) -> None:
    ours = create_or_join(engine_id, CAPACITY)
    first, second = workers.start(2)
    # The creator's capacity counts.
    assert first.do("join", engine_id, 5 * CAPACITY) == second.do("join", engine_id, 4096) == str(CAPACITY)
    ours.data[CAPACITY - 1] = 7
    assert first.do("swap", CAPACITY - 1, 8) == "7"
    assert second.do("swap", CAPACITY - 1, 9) == "8"
    assert ours.data[CAPACITY - 1] == 9
    areas = [ours.rank(0), ours.rank(MAX_RANKS - 1)]
    assert not any(area.registered for area in areas)
    first.do("register", 0)
    second.do("register", MAX_RANKS - 1)
    assert all(area.registered for area in areas)
    assert [area.fingerprint for area in areas] == [bytes(32), bytes([(MAX_RANKS - 1) % 256]) * 32]
    assert [area.group_bytes for area in areas] == [[100, 200]] * 2
    first.do("finish", 0, 41)
    second.do("fail", MAX_RANKS - 1, 2**40)
    assert [area.watermark for area in areas] == [41, 0]
    assert [area.failed_count for area in areas] == [0, 1]
    assert areas[1].failed_since(0) == [2**40]
    ours.close()


def test_after_unlink_it_lives_on_and_a_late_process_gets_a_new_one(workers: Workers, engine_id: str) -> None:
    first, late = workers.start(2)
    first.do("join", engine_id, CAPACITY)
    ours = create_or_join(engine_id, CAPACITY)
    ours.data[0] = 1
    ours.unlink()
    ours.unlink()
    assert not rendezvous(engine_id).exists()
    assert first.do("swap", 0, 2) == "1" and ours.data[0] == 2
    late.do("join", engine_id, CAPACITY)
    assert late.do("swap", 0, 3) == "0" and ours.data[0] == 2
    ours.close()


def test_a_clean_exit_leaves_nothing(workers: Workers, engine_id: str) -> None:
    before = mappings(), open_slabs()
    (worker,) = workers.start(1)
    worker.do("join", engine_id, CAPACITY)
    ours = create_or_join(engine_id, CAPACITY)
    assert rendezvous(engine_id).exists()
    assert mappings() == before[0] + 1
    worker.do("close")
    ours.close()
    ours.close()
    assert not rendezvous(engine_id).exists()
    assert (mappings(), open_slabs()) == before


def test_many_processes_at_once_get_one_slab(workers: Workers) -> None:
    crowd = workers.start(8)
    for round_ in range(10):
        engine_id = f"test-{uuid.uuid4()}"
        for worker in crowd:
            worker.tell("join", engine_id, CAPACITY)
        assert [worker.answer() for worker in crowd] == [str(CAPACITY)] * 8
        for i, worker in enumerate(crowd):  # each finds what the one before it wrote
            assert worker.do("swap", round_, i + 1) == str(i)
        for worker in crowd:
            worker.do("close")
        assert not rendezvous(engine_id).exists()


def test_a_join_waits_for_the_creator_and_notices_that_its_file_was_removed(
    workers: Workers, engine_id: str
) -> None:
    (worker,) = workers.start(1)
    path = rendezvous(engine_id)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a creator that has not written yet
        worker.tell("join", engine_id, CAPACITY)
        assert select.select([worker.process.stdout], [], [], 0.1)[0] == []
        path.unlink()  # a cleaner took it for a dead one's
    assert worker.answer() == str(CAPACITY)
    ours = create_or_join(engine_id, CAPACITY)
    ours.data[0] = 9
    assert worker.do("swap", 0, 1) == "9"
    ours.close()


# --- kills and damage


def test_a_killed_creator_leaves_at_most_a_file_that_the_next_start_removes(workers: Workers) -> None:
    rng = random.Random(1)
    for i, worker in enumerate(workers.start(10)):
        engine_id = f"test-{uuid.uuid4()}"
        path = rendezvous(engine_id)
        worker.tell("join", engine_id, 64 * CAPACITY)
        if i == 0:
            worker.answer()  # the whole of it happened
        else:
            time.sleep(rng.random() * 0.02)
        worker.kill()
        assert i or path.exists()
        if path.exists():
            assert path.stat().st_size < 4096
        if i % 2:  # the same engine starts again
            slab = create_or_join(engine_id, CAPACITY)
            assert slab.capacity_bytes == CAPACITY
        else:  # another one starts
            slab = create_or_join(f"test-{uuid.uuid4()}", CAPACITY)
        slab.close()
        assert not path.exists()


def test_a_running_engine_is_not_taken_for_a_dead_one(workers: Workers, engine_id: str) -> None:
    (worker,) = workers.start(1)
    worker.do("join", engine_id, CAPACITY)
    create_or_join(f"test-{uuid.uuid4()}", CAPACITY).close()
    assert rendezvous(engine_id).exists()
    joined = create_or_join(engine_id, CAPACITY)
    worker.do("swap", 5, 55)
    assert joined.data[5] == 55
    joined.close()


def test_another_pid_namespace_is_left_alone(engine_id: str) -> None:
    # Two containers on one /dev/shm: the process ids in the other's file mean nothing here.
    ours = rendezvous(engine_id)
    parts = ours.name.split("-")
    parts[2] = "1"
    theirs = ours.with_name("-".join(parts))
    theirs.write_text("999999999 5 12345\n")
    try:
        create_or_join(engine_id, CAPACITY).close()
        assert theirs.exists()
    finally:
        theirs.unlink()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "12",
        "1 2 3",  # torn: no line end
        "1 2 3 4\n",
        "-1 2 3\n",
        "a b c\n",
        "999999999999999999999999 3 4\n",
        "{pid} 999999 4\n",
        "{pid} 0 {inode}\n",  # a descriptor that is no slab
        "{pid} {memfd} 1\n",  # a slab, but not this one
        "\0\xff" * 300,
    ],
)
def test_a_damaged_rendezvous_file_is_replaced(engine_id: str, text: str) -> None:
    foreign = private(4096)
    filled = text.format(pid=os.getpid(), inode=os.fstat(0).st_ino, memfd=foreign._memfd)
    path = rendezvous(engine_id)
    path.write_bytes(filled.encode("latin-1"))
    slab = create_or_join(engine_id, CAPACITY)
    assert slab.capacity_bytes == CAPACITY and slab.data[0] == 0
    joined = create_or_join(engine_id, CAPACITY)
    slab.data[0] = 3
    assert joined.data[0] == 3
    for each in (joined, slab, foreign):
        each.close()


@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory"])
def test_what_is_no_regular_file_is_refused(engine_id: str, kind: str, tmp_path: Path) -> None:
    path, target = rendezvous(engine_id), tmp_path / "victim"
    if kind == "directory":
        path.mkdir()
    else:
        if kind == "symlink":
            target.write_text("precious")
        path.symlink_to(target)
    try:
        with pytest.raises(SlabError, match=r"cannot be opened .* Fix: "):
            create_or_join(engine_id, CAPACITY)
        assert target.exists() == (kind == "symlink")
        assert kind != "symlink" or target.read_text() == "precious"
    finally:
        if kind == "directory":
            path.rmdir()
        else:
            path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's file")
def test_another_users_file_is_refused(engine_id: str) -> None:
    path = rendezvous(engine_id)
    path.touch()
    os.chown(path, 65534, 65534)
    with pytest.raises(SlabError, match=r"another user|cannot be opened"):
        create_or_join(engine_id, CAPACITY)


# --- memory


def test_layout_and_alignment() -> None:
    slab = private(3 * 4096)
    assert slab.address % HUGE_PAGE_BYTES == 0
    assert slab.data.nbytes == 3 * 4096 and not slab.data.readonly
    slab.data[:3] = b"abc"
    assert ctypes.string_at(slab.address, 3) == b"abc"
    assert (MAX_RANKS + 1) * 4096 == DATA_OFFSET
    with pytest.raises(SlabError, match="rank"):
        slab.rank(MAX_RANKS)
    slab.close()


def test_prefault_makes_all_of_it_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4 << 20)
    slab = private(10 << 20)
    assert slab.ready_bytes == slab.capacity_bytes and slab.fully_faulted
    assert 0 <= slab.huge_bytes <= slab.ready_bytes
    resident = os.fstat(slab._memfd or 0).st_blocks * 512
    assert resident >= slab.capacity_bytes
    slab.close()


class Madvise:
    """Stands for the kernel: refuses to populate from the `failing` call on."""

    def __init__(self, failing: int, code: int) -> None:
        self.failing, self.code, self.calls = failing, code, 0

    def __call__(self, address: int, size: int, advice: int) -> int:
        if advice != module._MADV_POPULATE_WRITE:
            return -1
        self.calls += 1
        if self.calls < self.failing:
            return 0
        ctypes.set_errno(self.code)
        return -1


def stub(monkeypatch: pytest.MonkeyPatch, failing: int, code: int) -> None:
    class Libc:
        mmap, munmap = module._libc.mmap, module._libc.munmap
        madvise = staticmethod(Madvise(failing, code))

    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_libc", Libc)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_without_memory_it_warns_and_stays_small(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    stub(monkeypatch, 3, code)
    with caplog.at_level(logging.WARNING):
        slab = private(5 << 20)
    assert slab.ready_bytes == 2 << 20 and slab.fully_faulted
    assert "[host] capacity: memory ran out after 2097152 of 5242880 bytes" in caplog.text
    assert "Fix: lower [host] capacity" in caplog.text
    slab.close()


def test_a_kernel_that_cannot_populate_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 1, errno.EINVAL)
    slab = private(3 << 20)
    assert slab.ready_bytes == 3 << 20 and slab.huge_bytes == 0
    slab.data[slab.capacity_bytes - 1] = 1
    slab.close()


def test_closing_while_it_is_faulted_in(engine_id: str) -> None:
    slab = create_or_join(engine_id, 512 << 20)
    slab.close()
    assert not rendezvous(engine_id).exists()


def test_a_capacity_that_cannot_be_mapped_names_the_setting() -> None:
    memfd = os.memfd_create("lmkv-slab")
    with pytest.raises(SlabError, match=r"\[host\] capacity"):
        Slab(memfd, 1 << 62, None)
    os.close(memfd)


# --- the control area


def test_failures_are_remembered_up_to_the_ring() -> None:
    slab = private(4096)
    area = slab.rank(0)
    assert area.failed_since(0) == []
    for ticket in range(1, FAILED_RING + 1):
        area.fail(ticket)
    assert area.failed_since(0) == list(range(1, FAILED_RING + 1))
    area.fail(999)
    assert area.failed_since(0) is None
    assert area.failed_since(FAILED_RING - 1) == [FAILED_RING, 999]
    assert area.failed_count == FAILED_RING + 1
    del area
    slab.close()


def test_areas_do_not_touch_each_other_or_the_data() -> None:
    slab = private(4096)
    slab.data[:] = b"\xee" * 4096
    shapes = {0: [1], 1: list(range(1, MAX_GROUPS + 1)), 2: [], MAX_RANKS - 1: [2**40] * MAX_GROUPS}
    for rank, groups in shapes.items():
        slab.rank(rank).register(np.random.default_rng(rank).bytes(32), groups)
        for ticket in range(FAILED_RING):
            slab.rank(rank).fail(ticket)
        slab.rank(rank).finish(2**63)
    for rank, groups in shapes.items():
        assert slab.rank(rank).group_bytes == groups
        assert slab.rank(rank).fingerprint == np.random.default_rng(rank).bytes(32)
        assert slab.rank(rank).watermark == 2**63
    assert not slab.rank(3).registered
    assert slab.fully_faulted and slab.ready_bytes == 4096
    assert slab.data == b"\xee" * 4096
    with pytest.raises(SlabError, match="KV groups"):
        slab.rank(0).register(bytes(32), [1] * (MAX_GROUPS + 1))
    slab.close()
