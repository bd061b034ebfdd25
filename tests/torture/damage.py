"""Bits that flip, and writes that were torn or lost: found, counted and never served."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

from lmkv.backends.chunks import place_of
from lmkv.backends.file import FileTier
from lmkv.backends.journal import ENTRY_BYTES
from lmkv.backends.segments import BLOCK_BYTES
from lmkv.record import HEADER_BYTES, encode_header
from lmkv.tier import Status
from tests.test_file_tier import MiB, counters, get, key, payload, put
from tests.torture.base import Run

CAPACITY = 88 * MiB
OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT
#: Chunks of a round, and how many of them are damaged.
CHUNKS, DAMAGED = 32, 20
SECTOR_BYTES = 512


class Disk:
    """The segments below a tier, written to without its knowledge."""

    def __init__(self, path: Path, tier: FileTier) -> None:
        self._path, self._tier = path, tier
        self._files: dict[int, int] = {}

    def at(self, number: int) -> tuple[int, int]:
        """File descriptor and offset of a chunk's record."""
        location = self._tier._catalog.index.locate(key(number))
        assert location is not None
        segment, block = place_of(location) >> 16, place_of(location) & 0xFFFF
        if segment not in self._files:
            self._files[segment] = os.open(self._path / f"w0-{segment:05}.seg", os.O_RDWR)
        return self._files[segment], block * BLOCK_BYTES

    def flip(self, number: int, offset: int, bit: int) -> None:
        """Change one bit of a record."""
        fd, start = self.at(number)
        (byte,) = os.pread(fd, 1, start + offset)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), start + offset)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)


def _check_found(tier: FileTier, numbers: list[int], size: int, damaged: set[int]) -> None:
    """What was damaged is found, counted, and gone; all else is served."""
    before = counters(tier)["corrupt"]
    assert get(tier, numbers, size) == [CORRUPT if n in damaged else OK for n in numbers]
    assert counters(tier)["corrupt"] == before + len(damaged)
    assert set(get(tier, sorted(damaged), size)) <= {MISS}


def record_bits(run: Run) -> str:
    """One bit of a header or of the data."""
    tier = FileTier(run.path, CAPACITY)
    disk = Disk(run.path, tier)
    flips = in_headers = 0
    for chance in run.rounds(-(-run.number // DAMAGED)):
        size = chance.choice([1, 1000, BLOCK_BYTES, 5000, 20_000])
        numbers = [size * 1000 + n for n in range(CHUNKS)]
        assert put(tier, numbers, size) == [OK] * CHUNKS
        damaged = set(chance.sample(numbers, DAMAGED))
        for number in damaged:
            in_header = chance.random() < 0.5
            offset = chance.randrange(HEADER_BYTES) if in_header else BLOCK_BYTES + chance.randrange(size)
            disk.flip(number, offset, chance.randrange(8))
            in_headers += in_header
        _check_found(tier, numbers, size, damaged)
        flips += DAMAGED
    assert counters(tier)["corrupt"] == flips
    assert counters(tier)["races"] == counters(tier)["io_errors"] == 0
    disk.close()
    tier.close()
    return f"0 served; {flips:,} counted as corrupt, {in_headers:,} of them in headers"


def journal_bits(run: Run) -> str:
    """One bit in each of ten entries of a journal, which is then read from the start."""
    size, flips, lost, damaged = 3000, 0, 0, 0
    numbers = list(range(100))
    journal = run.path / "w0.journal"
    for chance in run.rounds(-(-run.number // 10)):
        tier = FileTier(run.path, CAPACITY)
        assert put(tier, numbers, size) == [OK] * 100
        removed = chance.sample(numbers, 5)
        assert tier.remove([key(n) for n in removed]) == [OK] * 5
        tier.close()
        content = bytearray(journal.read_bytes())
        for entry in chance.sample(range(len(content) // ENTRY_BYTES), 10):
            content[entry * ENTRY_BYTES + chance.randrange(ENTRY_BYTES)] ^= 1 << chance.randrange(8)
        journal.write_bytes(content)
        flips += 10
        tier = FileTier(run.path, CAPACITY)
        damaged += counters(tier)["journal_damaged"]
        statuses = get(tier, numbers, size)
        assert set(statuses) <= {OK, MISS, CORRUPT}
        lost += 95 - statuses.count(OK)
        tier.close()
    assert damaged == flips, f"{damaged} of {flips} were found"
    return f"0 served wrong; {damaged:,} counted as damaged; {max(lost, 0):,} of {10 * flips:,} chunks lost"


def _tears(new: bytes, old: bytes) -> Iterator[bytes]:
    """A record of which another write reached the disk up to some sector, from it on, or but for it."""
    for cut in range(SECTOR_BYTES, len(new), SECTOR_BYTES):
        yield new[:cut] + old[cut:]
        yield old[:cut] + new[cut:]
        yield new[:cut] + old[cut : cut + SECTOR_BYTES] + new[cut + SECTOR_BYTES :]
    yield old


def _records(disk: Disk, numbers: list[int], size: int) -> list[bytes]:
    length = BLOCK_BYTES + size
    return [os.pread(fd, length, start) for fd, start in map(disk.at, numbers)]


def torn_records(run: Run) -> str:
    """What lies in a record's place begins or ends with what lay there before: nothing, another chunk, or
    another content of the same chunk."""
    tier = FileTier(run.path, CAPACITY)
    disk = Disk(run.path, tier)
    done = harmless = 0
    rounds = 0
    while done < run.number:
        chance = random.Random(run.seed + rounds)
        run.at, rounds = run.seed + rounds, rounds + 1
        size = chance.choice([1, 3, 8]) * BLOCK_BYTES
        numbers = [size * 1000 + n for n in range(CHUNKS)]
        assert put(tier, numbers, size) == [OK] * CHUNKS
        records = _records(disk, numbers, size)
        kind = rounds % 3
        damaged = set()
        for i, (number, new) in enumerate(zip(numbers, records, strict=True)):
            content = bytes(payload(number + 1, size))
            header = encode_header(key(number), memoryview(content), chance.getrandbits(60))
            older = header.ljust(BLOCK_BYTES, b"\0") + content
            old = (bytes(len(new)), records[i - 1], older)[kind]
            tears = list(_tears(new, old))
            # The whole of an older record of the same chunk would be that chunk.
            torn = tears[(i + CHUNKS * (rounds // 3)) % (len(tears) - (kind == 2))]
            if torn == new:  # only padding
                harmless += 1
                continue
            fd, start = disk.at(number)
            os.pwrite(fd, torn, start)
            damaged.add(number)
        _check_found(tier, numbers, size, damaged)
        done += len(damaged)
    assert counters(tier)["corrupt"] == done
    disk.close()
    tier.close()
    return f"0 served; {done:,} counted as corrupt; {harmless:,} more changed nothing"
