"""The NVMe tier on real files: what comes back, what is bounded, and what damage and kills may cost."""

import errno
import hashlib
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends import journal as journal_module
from lmkv.backends import segments as segments_module
from lmkv.backends import space as space_module
from lmkv.backends import vectors as vectors_module
from lmkv.backends.file import FileTier
from lmkv.backends.journal import ENTRY_BYTES, open_journal, read_journal
from lmkv.config import ConfigError
from lmkv.testing import chunk_bytes, chunk_key
from lmkv.tier import Status
from tests.processes import die_with_parent

MiB = 2**20
CAPACITY = 40 * MiB  # 4 segments of 8 MiB
CHUNK = 256 * 1024
OK, MISS, REJECTED, CORRUPT, UNAVAILABLE = Status


def key(number: int, namespace: int = 1) -> bytes:
    return bytes([namespace]) * 32 + number.to_bytes(32, "little") + bytes(4)


def payload(number: int, size: int = CHUNK, namespace: int = 1) -> memoryview:
    """The bytes of a chunk follow from its key, so that any process can check them."""
    seed = hashlib.sha256(b"%d %d" % (namespace, number)).digest()
    return memoryview((seed * (size // 32 + 1))[:size])


def buffer(size: int = CHUNK) -> memoryview:
    return memoryview(bytearray(size))


def put(tier: FileTier, numbers: list[int], size: int = CHUNK) -> list[Status]:
    return tier.put([key(n) for n in numbers], [payload(n, size) for n in numbers])


def get(tier: FileTier, numbers: list[int], size: int = CHUNK) -> list[Status]:
    """Statuses of a read; what is OK must be right."""
    buffers = [buffer(size) for _ in numbers]
    statuses = tier.get([key(n) for n in numbers], buffers)
    for number, status, content in zip(numbers, statuses, buffers, strict=True):
        assert status is not OK or content == payload(number, size), f"chunk {number} is wrong"
    return statuses


def disk_bytes(path: Path) -> int:
    """What `du` counts."""
    total = path.lstat().st_blocks * 512
    for name in os.listdir(path):
        try:
            total += (path / name).lstat().st_blocks * 512
        except FileNotFoundError:  # a journal was replaced meanwhile
            continue
    return total


def counters(tier: FileTier) -> dict[str, int]:
    return tier.stats().counters


Open = Callable[..., FileTier]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chunks"


@pytest.fixture
def open_tier(path: Path) -> Iterator[Open]:
    tiers = []

    def open_(capacity: int = CAPACITY, *, read_only: bool = False) -> FileTier:
        if read_only:
            tiers.append(FileTier(path, capacity, read_only=True))
        else:
            tiers.append(FileTier.open({"path": str(path), "capacity": capacity}))
        return tiers[-1]

    yield open_
    for tier in tiers:
        tier.close()


def run_python(source: str, *arguments: object, stdin: int | None = None) -> "subprocess.Popen[bytes]":
    """Another process, with the helpers of this file at hand."""
    source = "import sys\nfrom tests.test_file_tier import *\npath = Path(sys.argv[1])\n" + textwrap.dedent(
        source
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdin=stdin, stdout=subprocess.PIPE, preexec_fn=die_with_parent
    )


# -- the plain job


def test_round_trip_and_restart_in_another_process(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    numbers = list(range(60))
    assert put(tier, numbers) == [OK] * 60
    assert tier.contains([key(0), key(59), key(60), key(0, namespace=2)]) == [True, True, False, False]
    assert tier.has(key(3)) and not tier.has(key(99))
    tier.close()
    child = run_python(
        f"""
        tier = FileTier.open({{"path": str(path), "capacity": {CAPACITY}}})
        assert get(tier, list(range(60))) == [OK] * 60
        assert put(tier, [60]) == [OK]
        """,
        path,
    )
    assert child.wait(30) == 0
    tier = open_tier()
    assert get(tier, [*numbers, 60, 61]) == [OK] * 61 + [MISS]
    assert tier.stats().chunks == 61
    assert counters(tier)["get_hits"] == 61 and counters(tier)["get_misses"] == 1


def test_put_stores_a_key_once(open_tier: Open) -> None:
    tier = open_tier()
    assert tier.put([key(1), key(1), key(2)], [payload(1), payload(1), payload(2)]) == [OK] * 3
    assert put(tier, [1]) == [OK]
    assert tier.stats().chunks == 2
    assert counters(tier)["put_chunks"] == 2 and counters(tier)["put_dedup"] == 2


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000, 8 * MiB - 4096])
def test_any_length(open_tier: Open, size: int) -> None:
    tier = open_tier()
    assert put(tier, [1, 2], size) == [OK, OK]
    assert get(tier, [2, 1], size) == [OK, OK]
    assert counters(tier)["bounced"] > 0 or size % 4096 == 0
    tier.close()
    assert get(open_tier(), [1, 2], size) == [OK, OK]


def test_unaligned_memory_bounces_and_aligned_does_not(open_tier: Open) -> None:
    tier = open_tier()
    if not tier.direct:
        pytest.skip("this file system has no O_DIRECT")
    memory = memoryview(mmap.mmap(-1, 2 * CHUNK))
    for start, bounced in ((0, 0), (64, 2)):
        part = memory[start : start + CHUNK]
        part[:] = payload(start)
        assert tier.put([key(start)], [part]) == [OK]
        part[:] = bytes(CHUNK)
        assert tier.get([key(start)], [part]) == [OK]
        assert part == payload(start)
        assert counters(tier)["bounced"] == bounced


def test_too_long_and_empty_chunks_are_rejected(open_tier: Open) -> None:
    tier = open_tier()
    assert tier.info.max_chunk_bytes == 8 * MiB - 4096
    assert put(tier, [1], tier.info.max_chunk_bytes + 1) == [REJECTED]
    assert tier.put([key(1)], [memoryview(b"")]) == [REJECTED]
    assert counters(tier)["rejected"] == 2 and tier.stats().chunks == 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The system calls that move, flush or journal chunks: name and number of vectors."""
    made: list[tuple[str, int]] = []

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            made.append((name, len(arguments[1]) if name in ("preadv", "pwritev") else 1))
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("preadv", "pwritev", "fdatasync", "pwrite"):
        counted(name)
    return made


def moved(calls: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The calls since the last time that moved chunks."""
    result = [call for call in calls if call[0] in ("preadv", "pwritev")]
    calls.clear()
    return result


def test_a_batch_is_written_and_read_by_one_call(open_tier: Open, calls: list[tuple[str, int]]) -> None:
    tier = open_tier()
    put(tier, [100])  # the first put also makes a segment
    calls.clear()
    assert put(tier, list(range(16))) == [OK] * 16
    assert sorted(calls) == [("fdatasync", 1), ("pwrite", 1), ("pwritev", 32)]  # flush, journal, data
    calls.clear()
    assert get(tier, random.Random(1).sample(range(16), 16)) == [OK] * 16
    assert calls == [("preadv", 32)]


# -- buffers in pieces


def aligned_pieces(content: memoryview, count: int) -> list[memoryview]:
    """The content in like pieces that begin at page boundaries and do not touch."""
    size = content.nbytes // count
    memory = memoryview(mmap.mmap(-1, count * (size + 4096)))
    parts = [memory[start : start + size] for start in range(0, memory.nbytes, size + 4096)]
    for i, part in enumerate(parts):
        part[:] = content[i * size : (i + 1) * size]
    return parts


def test_aligned_pieces_are_the_vectors_of_one_call(open_tier: Open, calls: list[tuple[str, int]]) -> None:
    tier = open_tier()
    size, numbers = 64 * 1024, range(12)
    put(tier, [100])
    before = counters(tier)["bounced"]
    keys = [key(n) for n in numbers]
    for count in (2, 16):
        calls.clear()
        tier.remove(keys)
        buffers = [aligned_pieces(payload(n, size), count) for n in numbers]
        assert tier.put(keys, buffers) == [OK] * 12
        assert moved(calls) == [("pwritev", 12 * (1 + count))]
        assert get(tier, list(numbers), size) == [OK] * 12  # as one memoryview each
        calls.clear()
        for parts in buffers:
            parts[-1][:] = parts[0][:] = bytes(parts[0].nbytes)
        assert tier.get(keys, [tuple(parts) for parts in buffers]) == [OK] * 12
        assert moved(calls) == [("preadv", 12 * (1 + count))]
        assert [b"".join(parts) for parts in buffers] == [payload(n, size) for n in numbers]
    if tier.direct:  # the two reads into single memoryviews, which lie anywhere
        assert counters(tier)["bounced"] - before <= 24


def test_no_call_has_more_vectors_than_linux_takes(open_tier: Open, calls: list[tuple[str, int]]) -> None:
    tier = open_tier()
    put(tier, [100])
    calls.clear()
    before = counters(tier)["bounced"]
    size, numbers = 400 * 4096, range(5)
    keys = [key(n) for n in numbers]
    buffers = [aligned_pieces(payload(n, size), 400) for n in numbers]
    assert tier.put(keys[:4], buffers[:4]) == [OK] * 4  # 401 vectors a record
    assert moved(calls) == [("pwritev", 802)] * 2
    assert tier.get(keys[:4], buffers[:4]) == [OK] * 4
    assert moved(calls) == [("preadv", 802)] * 2
    assert counters(tier)["bounced"] == before
    for pieces, vectors in ((1023, 1024), (1024, 2)):
        part = aligned_pieces(payload(pieces, pieces * 4096), pieces)
        assert tier.put([key(pieces)], [part]) == [OK]
        assert tier.get([key(pieces)], [part]) == [OK]
        assert b"".join(part) == payload(pieces, pieces * 4096)
        assert [call for call in moved(calls) if call[0] == "preadv"] == [("preadv", vectors)]
    assert counters(tier)["bounced"] == before + 2


def test_small_unaligned_pages_share_their_bounce_memory(
    open_tier: Open, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(320 * MiB)  # all of it fits into a segment of 16 MiB
    put(tier, [100])
    calls.clear()
    allocated = []
    real = vectors_module.memory

    def memory(size_bytes: int) -> memoryview:
        allocated.append(size_bytes)
        return real(size_bytes)

    monkeypatch.setattr(vectors_module, "memory", memory)
    size, numbers = 32 * 1024, range(160)
    keys = [key(n) for n in numbers]
    before = counters(tier)["bounced"]
    for _ in range(2):
        memories = [memoryview(bytearray(size + 2)) for _ in numbers]
        buffers = [[m[1 : size // 2 + 1], m[size // 2 + 2 :]] for m in memories]
        for n, (keys_part, values) in zip(numbers, buffers, strict=True):
            keys_part[:], values[:] = payload(n, size)[: size // 2], payload(n, size)[size // 2 :]
        tier.remove(keys)
        assert tier.put(keys, buffers) == [OK] * 160
        for keys_part, values in buffers:
            keys_part[:] = values[:] = bytes(size // 2)
        assert tier.get(keys, buffers) == [OK] * 160
        assert [b"".join(parts) for parts in buffers] == [payload(n, size) for n in numbers]
    assert calls.count(("fdatasync", 1)) == 2 + 2  # puts and removals
    # 5 MiB each time: 4 MiB of bounce memory hold 128 pages.
    assert moved(calls) == [("pwritev", 256), ("pwritev", 64), ("preadv", 256), ("preadv", 64)] * 2
    assert counters(tier)["bounced"] == before + 4 * 160
    assert sum(allocated) <= vectors_module.MAX_BOUNCE_BYTES


def test_a_record_is_the_same_however_its_chunk_was_cut(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    size = 2 * 4096 + 100
    content = payload(1, size)
    noise = memoryview(os.urandom(4 * 4096))
    records = []
    for buffer_ in (content, [content[:5000], content[5000:]], aligned_pieces(content, 1)):
        tier.put([key(2)], [noise])  # what bounces leaves something behind in the bounce memory
        assert tier.put([key(1)], [buffer_]) == [OK]
        file, start = segment_with(path, 1)
        record = bytearray(file.read_bytes()[start : start + 4 * 4096])
        record[120:128] = record[248:256] = bytes(8)  # creation time, and the checksum over it
        records.append(bytes(record))
        assert record[4096:] == bytes(content).ljust(3 * 4096, b"\0")
        flip(file, start + 16)  # so that the next one is found
        assert tier.remove([key(1), key(2)]) == [OK, OK]
    assert len(set(records)) == 1


def test_programming_errors_raise(open_tier: Open) -> None:
    tier = open_tier()
    with pytest.raises(ValueError, match="68 bytes"):
        tier.contains([b"short"])
    with pytest.raises(ValueError, match="buffers"):
        tier.get([key(1)], [])
    tier.close()
    tier.close()
    with pytest.raises(ValueError, match="closed"):
        tier.contains([key(1)])
    assert not [fd for fd in os.listdir("/proc/self/fd") if "chunks" in _target(fd)]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_without_o_direct(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(name: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "injected")
        return real(name, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    tier = open_tier()
    assert not tier.direct and "O_DIRECT" in caplog.text
    assert put(tier, list(range(200))) == [OK] * 200
    assert get(tier, list(range(190, 200))) == [OK] * 10
    assert disk_bytes(path) <= CAPACITY


def test_on_tmpfs() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        tier = FileTier.open({"path": f"{name}/chunks", "capacity": CAPACITY})
        for first in range(0, 200, 20):
            assert put(tier, list(range(first, first + 20))) == [OK] * 20
            assert disk_bytes(Path(name) / "chunks") <= CAPACITY
        assert get(tier, list(range(190, 200))) == [OK] * 10
        tier.close()


# -- bounds and eviction


def test_disk_space_is_bounded_at_every_step(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    rng = random.Random(1)
    written = number = 0
    while written < 5 * CAPACITY:
        sizes = [rng.choice([5000, 70_000, CHUNK, 2 * MiB]) for _ in range(8)]
        numbers = range(number, number + 8)
        statuses = tier.put(
            [key(n) for n in numbers], [payload(n, size) for n, size in zip(numbers, sizes, strict=True)]
        )
        assert statuses == [OK] * 8
        assert disk_bytes(path) <= CAPACITY
        written += sum(sizes)
        number += 8
    assert counters(tier)["evicted"] > 0
    assert tier.stats().used_bytes <= CAPACITY


def test_small_chunks_fill_the_index_not_the_journal(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compactions = []
    real = journal_module.Journal.compact

    def compact(self: journal_module.Journal) -> None:
        compactions.append(1)
        real(self)

    monkeypatch.setattr(journal_module.Journal, "compact", compact)
    monkeypatch.setattr(journal_module, "_SLACK_BYTES", 64 * ENTRY_BYTES)
    tier = open_tier()
    limit = segments_module.max_chunks_for(CAPACITY)
    for first in range(0, 5 * limit, 500):
        assert put(tier, list(range(first, first + 500)), 64) == [OK] * 500
        assert tier.stats().chunks <= limit
        assert disk_bytes(path) <= CAPACITY
    assert compactions
    newest = list(range(first, first + 500))
    tier.close()
    assert get(open_tier(), newest, 64) == [OK] * 500


def test_eviction_drops_the_oldest_and_keeps_what_was_read(open_tier: Open) -> None:
    tier = open_tier()
    put(tier, list(range(20)))
    assert get(tier, [2, 3]) == [OK, OK]
    for first in range(20, 150, 10):
        put(tier, list(range(first, first + 10)))
    assert get(tier, [0, 1, 2, 3, 4]) == [MISS, MISS, OK, OK, MISS]
    assert counters(tier)["reinserted"] == 2
    tier.close()
    assert get(open_tier(), [2, 3, 149]) == [OK] * 3


def test_hot_chunks_take_at_most_a_quarter_of_a_segment(open_tier: Open) -> None:
    tier = open_tier()
    for first in range(0, 400, 10):
        numbers = list(range(first, first + 10))
        assert put(tier, numbers) == [OK] * 10
        assert get(tier, numbers) == [OK] * 10
    assert 0 < counters(tier)["reinserted"] <= counters(tier)["evicted"] / 2


def test_a_smaller_capacity_is_honoured_on_reopening(open_tier: Open, path: Path) -> None:
    tier = open_tier(80 * MiB)
    put(tier, list(range(250)))
    before = disk_bytes(path)
    tier.close()
    tier = open_tier(CAPACITY)
    assert disk_bytes(path) <= CAPACITY < before
    assert get(tier, [249]) == [OK]
    kept = tier.stats().chunks
    assert 0 < kept < 250
    tier.close()
    tier = open_tier(80 * MiB)
    assert tier.stats().chunks == kept
    for first in range(1000, 1300, 20):
        assert put(tier, list(range(first, first + 20))) == [OK] * 20
        assert disk_bytes(path) <= 80 * MiB
    assert get(tier, list(range(1290, 1300))) == [OK] * 10


# -- damage


def segment_with(path: Path, number: int, size: int = CHUNK) -> tuple[Path, int]:
    """Where the record of a chunk begins."""
    for file in path.glob("*.seg"):
        at = file.read_bytes().find(key(number) + bytes(4))
        if at >= 0:
            return file, at - 16
    raise AssertionError(f"chunk {number} is nowhere")


def flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("offset", [0, 9, 20, 60, 90, 110, 250, 4096, 4096 + CHUNK // 2, 4096 + CHUNK - 1])
def test_a_flipped_bit_is_found_and_costs_one_chunk(open_tier: Open, path: Path, offset: int) -> None:
    tier = open_tier()
    put(tier, list(range(10)))
    file, start = segment_with(path, 4)
    flip(file, start + offset)
    assert get(tier, list(range(10))) == [OK] * 4 + [CORRUPT] + [OK] * 5
    assert counters(tier)["corrupt"] == 1
    assert not tier.has(key(4)) and get(tier, [4]) == [MISS]
    tier.close()
    tier = open_tier()
    assert get(tier, [3, 4, 5]) == [OK, MISS, OK]
    assert put(tier, [4]) == [OK] and get(tier, [4]) == [OK]


def test_a_flipped_bit_in_the_padding_is_harmless(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    put(tier, [1, 2], 5000)
    file, start = segment_with(path, 1)
    flip(file, start + 300)
    flip(file, start + 4096 + 5001)
    assert get(tier, [1, 2], 5000) == [OK, OK]


def test_another_length_is_corrupt(open_tier: Open) -> None:
    tier = open_tier()
    put(tier, [1, 2])
    assert tier.get([key(1), key(2)], [buffer(CHUNK + 4096), buffer()]) == [CORRUPT, OK]
    assert not tier.has(key(1))


def test_a_truncated_segment_loses_its_end_only(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    put(tier, list(range(10)))
    file, start = segment_with(path, 6)
    os.truncate(file, start + 8192)
    assert get(tier, list(range(10))) == [OK] * 6 + [CORRUPT] * 4
    tier.close()
    tier = open_tier()
    assert get(tier, list(range(10))) == [OK] * 6 + [MISS] * 4
    assert put(tier, list(range(6, 10))) == [OK] * 4
    assert get(tier, list(range(10))) == [OK] * 10
    assert file.stat().st_size == 8 * MiB


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 300])
def test_a_truncated_journal_loses_its_end_only(open_tier: Open, path: Path, cut: int) -> None:
    tier = open_tier()
    put(tier, list(range(10)))
    tier.close()
    file = path / "w0.journal"
    os.truncate(file, file.stat().st_size - cut)
    lost = -(-cut // ENTRY_BYTES)
    tier = open_tier()
    assert get(tier, list(range(10))) == [OK] * (10 - lost) + [MISS] * lost
    assert counters(tier)["journal_damaged"] == (cut % ENTRY_BYTES != 0)
    put(tier, list(range(10)))
    tier.close()
    tier = open_tier()
    assert get(tier, list(range(10))) == [OK] * 10
    assert counters(tier)["journal_damaged"] == 0


def test_a_damaged_journal_entry_is_skipped(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    put(tier, list(range(10)))
    tier.close()
    flip(path / "w0.journal", (path / "w0.journal").stat().st_size - 5 * ENTRY_BYTES + 30)
    tier = open_tier()
    assert get(tier, list(range(10))).count(OK) == 9
    assert counters(tier)["journal_damaged"] == 1


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(10_000), bytes(64 * 100)])
def test_a_garbage_journal_loses_everything_and_harms_nothing(
    open_tier: Open, path: Path, content: bytes
) -> None:
    tier = open_tier()
    put(tier, list(range(120)))
    tier.close()
    (path / "w0.journal").write_bytes(content)
    tier = open_tier()
    assert tier.stats().chunks == 0
    assert (counters(tier)["journal_damaged"] > 0) == (content != b"")
    assert put(tier, list(range(200, 300))) == [OK] * 100
    assert get(tier, list(range(290, 300))) == [OK] * 10
    assert disk_bytes(path) <= CAPACITY
    tier.close()
    assert get(open_tier(), list(range(290, 300))) == [OK] * 10


def test_an_old_journal_never_brings_wrong_bytes_back(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    put(tier, list(range(120)))
    old = (path / "w0.journal").read_bytes()
    for first in range(200, 400, 20):
        put(tier, list(range(first, first + 20)))
    tier.close()
    (path / "w0.journal").write_bytes(old)
    tier = open_tier()
    statuses = get(tier, list(range(120)))
    assert set(statuses) <= {CORRUPT, MISS} and CORRUPT in statuses


def test_foreign_files_are_counted_and_left_alone(open_tier: Open, path: Path, tmp_path: Path) -> None:
    tier = open_tier(56 * MiB)
    put(tier, list(range(10)))
    tier.close()
    elsewhere = tmp_path / "precious"
    elsewhere.write_bytes(b"do not touch" * 1000)
    (path / "notes.txt").write_bytes(b"hello")
    (path / "w0-1.seg").write_bytes(b"not our way to write a number")
    (path / "w0-00001.seg").symlink_to(elsewhere)  # in the place of the next segment
    (path / "w0-00002.seg").mkdir()
    (path / "w1.journal").symlink_to(elsewhere)
    os.mkfifo(path / "w2.journal")
    tier = open_tier(56 * MiB)
    assert counters(tier)["foreign_files"] == 6
    assert get(tier, list(range(10))) == [OK] * 10
    for first in range(100, 400, 20):
        assert put(tier, list(range(first, first + 20))) == [OK] * 20
        assert disk_bytes(path) <= 56 * MiB
    assert elsewhere.read_bytes() == b"do not touch" * 1000
    assert (path / "notes.txt").read_bytes() == b"hello"
    assert (path / "w0-00001.seg").is_symlink() and (path / "w0-00002.seg").is_dir()


def test_a_symlink_in_place_of_a_segment_loses_its_chunks(
    open_tier: Open, path: Path, tmp_path: Path
) -> None:
    tier = open_tier()
    put(tier, list(range(10)))
    file, _ = segment_with(path, 1)
    copy = tmp_path / "copy"
    file.rename(copy)
    file.symlink_to(copy)
    assert get(tier, [1]) == [CORRUPT]
    tier.close()
    before = copy.read_bytes()
    tier = open_tier()
    assert tier.stats().chunks == 0
    for first in range(100, 300, 20):
        put(tier, list(range(first, first + 20)))
    assert get(tier, [299]) == [OK]
    assert copy.read_bytes() == before


def test_a_hard_link_is_somebody_elses_file(open_tier: Open, path: Path, tmp_path: Path) -> None:
    tier = open_tier(56 * MiB)
    put(tier, list(range(10)))
    elsewhere = tmp_path / "precious"
    elsewhere.write_bytes(b"do not touch" * 1000)
    segments = segments_module.SEGMENTS
    for segment in range(1, segments):  # in the place of each one to come
        (path / f"w0-{segment:05}.seg").hardlink_to(elsewhere)
    assert put(tier, list(range(100, 200))) == [OK] * 100
    tier.close()
    tier = open_tier(56 * MiB)
    assert counters(tier)["foreign_files"] == segments - 1
    for first in range(200, 500, 20):
        assert put(tier, list(range(first, first + 20))) == [OK] * 20
    tier.close()
    (path / "w0.journal").unlink()
    (path / "w0.journal").hardlink_to(elsewhere)
    assert "another name" in bad(path, 56 * MiB)
    assert elsewhere.read_bytes() == b"do not touch" * 1000


# -- failing disks


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, "short"])
def test_a_failed_write_shows_nothing_and_its_space_is_used_again(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | str
) -> None:
    tier = open_tier()
    put(tier, [0])
    real = os.pwritev

    def fail(fd: int, parts: Any, offset: int) -> int:
        if fault == "short":
            return real(fd, parts[:1], offset)
        raise OSError(fault, "injected")

    monkeypatch.setattr(os, "pwritev", fail)
    assert put(tier, [1, 2, 3]) == [UNAVAILABLE] * 3
    assert get(tier, [0, 1, 2, 3]) == [OK, MISS, MISS, MISS]
    assert counters(tier)["io_errors"] == 1
    monkeypatch.setattr(os, "pwritev", real)
    for first in range(1, 28, 9):
        assert put(tier, list(range(first, first + 9))) == [OK] * 9
    assert get(tier, list(range(28))) == [OK] * 28
    assert len(list(path.glob("*.seg"))) == 1  # 28 chunks fit into one only because no space was lost
    tier.close()
    assert get(open_tier(), list(range(28))) == [OK] * 28


@pytest.mark.parametrize("call", ["fdatasync", "pwrite"])
def test_a_failed_flush_or_journal_write_shows_nothing(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tier = open_tier()
    put(tier, [0])
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, "injected")

        patch.setattr(os, call, fail)
        assert put(tier, [1, 2]) == [UNAVAILABLE] * 2
        assert tier.remove([key(0)]) == [UNAVAILABLE]
    assert get(tier, [0, 1, 2]) == [MISS] * 3
    assert put(tier, [1, 2]) == [OK, OK]
    assert get(tier, [1, 2]) == [OK, OK]
    tier.close()
    assert get(open_tier(), [1, 2]) == [OK, OK]


def test_a_read_error_spoils_no_neighbour(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    put(tier, list(range(5)))
    real = os.preadv
    bad = 2 * (CHUNK + 4096)

    def fail(fd: int, parts: Any, offset: int) -> int:
        if offset <= bad < offset + sum(part.nbytes for part in parts):
            raise OSError(errno.EIO, "injected")
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", fail)
    assert get(tier, list(range(5))) == [OK, OK, UNAVAILABLE, OK, OK]
    monkeypatch.setattr(os, "preadv", real)
    assert get(tier, list(range(5))) == [OK] * 5


def test_a_full_disk_makes_the_tier_smaller(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    real = os.posix_fallocate
    room = 2

    def fallocate(fd: int, offset: int, length: int) -> None:
        nonlocal room
        if os.fstat(fd).st_size == 0:
            if room == 0:
                raise OSError(errno.ENOSPC, "injected")
            room -= 1
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    for first in range(0, 200, 10):
        assert put(tier, list(range(first, first + 10))) == [OK] * 10
    assert len(list(path.glob("*.seg"))) == 2
    assert get(tier, [199]) == [OK]


def test_no_room_at_all_is_a_refusal(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()

    def fallocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    assert put(tier, [1]) == [REJECTED]
    assert counters(tier)["rejected"] == 1
    monkeypatch.undo()  # nothing is stored until then, so it looks again soon
    deadline = time.monotonic() + space_module.RETRY_CREATE_S / 2
    while put(tier, [1]) == [REJECTED]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert get(tier, [1]) == [OK]


# -- removal


def test_removed_chunks_never_come_back(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    put(tier, list(range(10)))
    assert tier.remove([key(3), key(4), key(3), key(77)]) == [OK, OK, MISS, MISS]
    assert get(tier, [2, 3, 4, 5]) == [OK, MISS, MISS, OK]
    put(tier, [4])
    child = run_python(
        f"""
        tier = FileTier.open({{"path": str(path), "capacity": {CAPACITY}}})
        assert tier.remove([key(5), key(4)]) == [OK, OK]
        os.kill(os.getpid(), 9)
        """,
        path,
    )
    tier.close()
    assert child.wait(30) == -signal.SIGKILL
    tier = open_tier()
    assert get(tier, [2, 3, 4, 5, 6]) == [OK, MISS, MISS, MISS, OK]
    assert put(tier, [3]) == [OK] and get(tier, [3]) == [OK]
    tier.close()
    assert get(open_tier(), [2, 3, 4, 5]) == [OK, OK, MISS, MISS]


def test_a_chunk_put_again_after_its_removal_and_a_restart_stays(open_tier: Open) -> None:
    tier = open_tier()
    assert put(tier, [1]) == [OK]
    assert tier.remove([key(1)]) == [OK]
    for _ in range(2):  # the second restart replays put, remove, put
        tier.close()
        tier = open_tier()
        assert put(tier, [1]) == [OK]
    assert tier.stats().counters["put_dedup"] == 1
    assert get(tier, [1]) == [OK]


def test_space_of_a_removed_last_chunk_is_not_confused_with_its_successor(open_tier: Open) -> None:
    tier = open_tier()
    put(tier, [1, 2])
    tier.remove([key(2)])
    tier.close()
    tier = open_tier()
    put(tier, [3])
    tier.close()
    assert get(open_tier(), [1, 2, 3]) == [OK, MISS, OK]


# -- kills, readers, threads

WRITER = f"""
tier = FileTier.open({{"path": str(path), "capacity": {CAPACITY}}})
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    numbers = [rng.randrange(400) for _ in range(rng.randrange(1, 12))]
    put(tier, numbers)
    get(tier, [rng.randrange(400) for _ in range(4)])
    if rng.random() < 0.1:
        tier.remove([key(rng.randrange(400))])
"""


def test_killed_writers_leave_nothing_wrong(open_tier: Open, path: Path) -> None:
    rng = random.Random(7)
    found = 0
    for round_ in range(30):
        child = run_python(WRITER, path, round_)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.15)
        child.kill()
        child.wait()
        assert disk_bytes(path) <= CAPACITY
        tier = open_tier()
        assert disk_bytes(path) <= CAPACITY
        offered = [n for n in range(400) if tier.has(key(n))]
        assert get(tier, offered) == [OK] * len(offered)
        assert counters(tier)["corrupt"] == 0
        found += len(offered)
        tier.close()
    assert found > 0


def test_a_reader_sees_puts_removes_recycling_and_compaction(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.backends.file.POLL_S", 0.0)
    writer, reader = open_tier(), open_tier()
    put(writer, list(range(10)))
    assert get(reader, list(range(10))) == [OK] * 10
    writer.remove([key(1)])
    assert reader.contains([key(0), key(1)]) == [True, False]
    for first in range(100, 300, 20):
        put(writer, list(range(first, first + 20)))
        assert get(reader, list(range(first, first + 20))) == [OK] * 20
    assert reader.contains([key(0)]) == [False]
    assert reader.stats().chunks == writer.stats().chunks
    writer.remove([key(299)])
    writer._catalog._compact()
    writer.remove([key(298)])
    assert get(reader, [297, 298, 299]) == [OK, MISS, MISS]
    assert reader.stats().chunks == writer.stats().chunks
    assert counters(reader)["corrupt"] == counters(reader)["races"] == 0


def test_a_reader_misses_no_segment_that_is_made_while_it_reads(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_tier()

    def read(fd: int, *arguments: Any) -> Any:
        monkeypatch.setattr(journal_module, "read_journal", read_journal)
        put(writer, [1])  # the first, which makes a segment
        return read_journal(fd, *arguments)

    monkeypatch.setattr(journal_module, "read_journal", read)
    assert get(open_tier(), [1]) == [OK]


def test_a_reader_overtaken_by_recycling_counts_a_race(open_tier: Open) -> None:
    writer, reader = open_tier(), open_tier()
    put(writer, list(range(10)))
    reader._catch_up(wait=True, now=True)
    assert reader.has(key(0))
    for first in range(100, 300, 20):
        put(writer, list(range(first, first + 20)))
    reader._next_poll = time.monotonic() + 100  # it has not heard of it
    assert get(reader, [0, 1]) == [MISS, MISS]
    assert counters(reader)["races"] == 2 and counters(reader)["corrupt"] == 0


# -- for reading only

HOLDS_TEN = f"""
tier = FileTier.open({{"path": str(path), "capacity": {CAPACITY}}})
first = int(sys.argv[2])
assert put(tier, list(range(first, first + 10))) == [OK] * 10
print("written", flush=True)
time.sleep(1000)
"""


def test_a_read_only_tier_outlives_its_writer_and_never_takes_over(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.backends.file.POLL_S", 0.0)
    reader = open_tier(read_only=True)  # of a directory that is not there yet
    assert get(reader, [0]) == [MISS]
    assert put(reader, [0]) == [REJECTED] and reader.remove([key(0)]) == [MISS]
    for first in (0, 10):
        writer = run_python(HOLDS_TEN, path, first)
        assert writer.stdout is not None and writer.stdout.readline() == b"written\n"
        numbers = list(range(first + 10))
        assert put(reader, [0, 99]) == [OK, REJECTED]
        assert get(reader, numbers) == [OK] * len(numbers)
        assert reader.contains([key(n) for n in numbers]) == [True] * len(numbers)
        assert reader.remove([key(0), key(99)]) == [REJECTED, MISS]
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        assert get(reader, numbers) == [OK] * len(numbers)
        assert put(reader, [0, 99]) == [OK, REJECTED]
        assert reader.remove([key(0)]) == [REJECTED]
    writer_here = open_tier()
    assert put(writer_here, [99]) == [OK] and writer_here.remove([key(0)]) == [OK]
    assert get(reader, [0, 19, 99]) == [MISS, OK, OK]
    assert counters(reader)["io_errors"] == counters(reader)["corrupt"] == 0


def test_a_read_only_tier_follows_recycling(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.backends.file.POLL_S", 0.0)
    reader, writer = open_tier(read_only=True), open_tier()
    for first in range(0, 300, 20):
        numbers = list(range(first, first + 20))
        assert put(writer, numbers) == [OK] * 20
        assert get(reader, numbers) == [OK] * 20
        assert reader.stats().chunks == writer.stats().chunks
    assert get(reader, [0]) == [MISS] and counters(writer)["evicted"] > 0


def test_a_writer_that_meets_a_read_only_tier_setting_up_the_directory_waits(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.backends.file.POLL_S", 0.0)
    write_format, lock = segments_module.Directory._write_format, segments_module.quick.lock
    opened: list[FileTier] = []
    thread = threading.Thread(target=lambda: opened.append(open_tier()))
    refused = threading.Event()

    def noticed(fd: int) -> bool:
        got = lock(fd)
        if not got:
            refused.set()
        return got

    def slowly(self: segments_module.Directory, segment_bytes: int) -> int:
        thread.start()
        assert refused.wait(30)
        return write_format(self, segment_bytes)

    monkeypatch.setattr(segments_module.quick, "lock", noticed)
    monkeypatch.setattr(segments_module.Directory, "_write_format", slowly)
    reader = open_tier(read_only=True)
    thread.join()
    (writer,) = opened
    assert put(writer, [1]) == [OK]
    assert get(reader, [1]) == [OK]


def test_who_finds_the_directory_set_up_meanwhile_does_not_set_it_up_again(
    open_tier: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    opened: list[FileTier] = []

    def open_(name: Any, *arguments: Any, **more: Any) -> int:
        try:
            return real(name, *arguments, **more)
        except FileNotFoundError:
            if Path(name).name == "FORMAT" and not opened:
                monkeypatch.setattr(os, "open", real)
                opened.append(open_tier(80 * MiB))  # between the look and the lock
                put(opened[0], [1])
                opened[0].close()
            raise

    monkeypatch.setattr(os, "open", open_)
    before = open_tier(320 * MiB, read_only=True)  # by itself it would choose larger segments
    assert opened
    assert before._segment_bytes == opened[0]._segment_bytes == 8 * MiB
    assert get(before, [1]) == [OK]


def test_threads_beside_each_other(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    stop = time.monotonic() + 4
    failures: list[BaseException] = []
    sizes = [5000, CHUNK, 600_000]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < stop:
                numbers = [rng.randrange(498) for _ in range(8)]  # a multiple of 3
                size = sizes[numbers[0] % 3]
                numbers = [n - n % 3 + numbers[0] % 3 for n in numbers]  # one length per number
                if seed % 2:
                    assert set(put(tier, numbers, size)) <= {OK, REJECTED}
                else:
                    assert set(get(tier, numbers, size)) <= {OK, MISS}
                    if rng.random() < 0.02:
                        tier.remove([key(rng.randrange(500))])
                assert disk_bytes(path) <= CAPACITY
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counters(tier)["get_hits"] > 0 and counters(tier)["evicted"] > 0
    assert counters(tier)["corrupt"] == counters(tier)["io_errors"] == 0
    numbers = [n for n in range(500) if tier.has(key(n))]
    chunks = tier.stats().chunks
    assert len(numbers) == chunks
    tier.close()
    tier = open_tier()
    assert tier.stats().chunks == chunks
    for n in numbers:
        assert get(tier, [n], sizes[n % 3]) == [OK]


def test_the_journal_holds_one_live_entry_per_chunk(open_tier: Open, path: Path) -> None:
    tier = open_tier()

    def work() -> None:
        for first in range(0, 60, 6):
            put(tier, list(range(first, first + 6)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fd = open_journal(path / "w0.journal")
    live = journal_module.replay(read_journal(fd)).live
    os.close(fd)
    assert int(live.sum()) == tier.stats().chunks == 60


# -- bad input


def bad(path: Path, capacity: Any = CAPACITY) -> str:
    with pytest.raises(ConfigError) as caught:
        FileTier.open({"path": str(path), "capacity": capacity})
    return str(caught.value)


def test_bad_settings(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[file\] path: not set"):
        FileTier.open({"capacity": CAPACITY})
    with pytest.raises(ConfigError, match=r"\[file\] capcity"):
        FileTier.open({"path": str(path), "capcity": CAPACITY})
    assert "[file] capacity" in bad(path, "lots")
    message = bad(path, MiB)
    assert "[file] capacity" in message and "too few" in message
    smallest = int(message.partition("set at least ")[2].split(",")[0])
    assert "too few" in bad(path, smallest - 2 * MiB)
    FileTier.open({"path": str(path), "capacity": smallest}).close()
    message = bad(tmp_path / "other", 2**60)
    assert "[file] capacity" in message and "can hold" in message


def test_bad_directories(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert "[file] path" in bad(file) and "not a directory" in bad(file)
    assert "not a directory" in bad(file / "below")
    path.mkdir(mode=0o700)
    path.chmod(0o770)
    message = bad(path)
    assert "[file] path" in message and "written to by others" in message and "chmod" in message
    path.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert "belongs to user id" in bad(path)
    with monkeypatch.context() as patch:

        def read_only(*_: Any, **__: Any) -> int:
            raise OSError(errno.EROFS, "Read-only file system")

        patch.setattr(os, "open", read_only)
        assert "Read-only" in bad(path)
    (path / "FORMAT").write_text("lmkv file tier\nversion 2\nsegment_bytes 8388608\n")
    message = bad(path)
    assert "version 2" in message and "version 1" in message and "Fix: " in message
    (path / "FORMAT").write_bytes(os.urandom(100))
    assert "not readable" in bad(path)
    (path / "FORMAT").unlink()
    os.mkfifo(path / "FORMAT")  # nobody writes to it
    assert "not readable" in bad(path)


def test_modes(open_tier: Open, path: Path) -> None:
    tier = open_tier()
    put(tier, [1])
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


def test_what_is_evicted_is_handed_on_whole(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", 64 * 2**20)
    handed: dict[bytes, bytes] = {}
    calls = 0

    def take(keys: Sequence[bytes], buffers: Sequence[Any]) -> None:
        nonlocal calls
        calls += 1
        handed.update({key: bytes(buffer) for key, buffer in zip(keys, buffers, strict=True)})
        if calls % 3 == 0:
            raise OSError("the other tier is gone")

    tier.on_evict = take
    length = 300_000
    keys = [chunk_key(i) for i in range(600)]
    hot = keys[3]
    for start in range(0, len(keys), 20):
        part = keys[start : start + 20]
        contents = [memoryview(chunk_bytes(key, length)) for key in part]
        assert tier.put(part, contents) == [Status.OK] * 20
        assert tier.get([hot], [memoryview(bytearray(length))]) == [Status.OK]  # it is written again
    assert calls > 3
    there = tier.contains(keys)
    assert hot not in handed
    # Everything is in one of both places, and nothing is in both.
    assert [key in handed for key in keys] == [not is_there for is_there in there]
    assert all(content == chunk_bytes(key, length) for key, content in handed.items())
    assert tier.stats().counters["evicted"] == len(handed)
    tier.close()
