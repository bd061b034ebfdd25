"""The NVMe tier against fio on the same disk, in the same run.

    python -m benchmarks.file_tier [--dir D] [--sizes 2097152,...] [--json build/bench/file_tier.json]

Chunks lie in one slab of huge pages and are moved through the executor, with the store's numbers of
threads and sizes of batches; checksums are on, the page cache is bypassed. fio runs before and after
every measured round (A-B-A) with O_DIRECT, psync, 4 jobs, the same block size and bytes, on huge
pages; fio without huge pages, as it runs by default, and io_uring are recorded beside it. Ratios are
medians over the rounds and come first: the absolute figures are the machine's.
"""

import argparse
import contextlib
import gc
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, write
from lmkv import slab as slabs
from lmkv.backends.file import FileTier
from lmkv.below import READ_BATCH_BYTES, READ_THREADS, WRITE_BATCH_BYTES, WRITE_THREADS
from lmkv.executor import ThreadedExecutor

HUGE_PAGE_BYTES = 2 * 2**20
#: The project's bars on the ratios for chunks of 2 MiB.
BARS = {
    "file load / fio psync": 0.9,
    "file store / fio psync": 0.85,
    "file load, busy / idle": 0.75,
    "file store, busy / idle": 0.75,
}
CHUNKS, CHUNK_BYTES = 100_000, 4096
#: Capacity of the tier in rounds: large enough for segments like a real one's (128 MiB at 2 GiB a round).
CAPACITY_ROUNDS = 4
HAVE_FIO = shutil.which("fio") is not None


def slab(size_bytes: int) -> memoryview:
    """The slots of a real slab, filled with random bytes."""
    slab = slabs.private(size_bytes)
    slab.prefault()
    if slab.huge_bytes < size_bytes:
        print(f"only {slab.huge_bytes} of the slab's {size_bytes} bytes lie in huge pages")
    words = np.frombuffer(slab.data, np.uint64)
    words[:] = np.random.default_rng(0).integers(0, 2**63, len(words), np.uint64)
    return slab.data  # it stays mapped until the process ends


def key(number: int) -> bytes:
    return b"n" * 32 + number.to_bytes(32, "little") + bytes(4)


def fio(
    directory: Path, operation: str, block_bytes: int, total_bytes: int, *, uring: bool, huge: bool
) -> float:
    """GB/s of one fio run over files that exist already; `huge`: from and to huge pages."""
    jobs = 1 if uring else 4
    command = [
        "fio", f"--name={'uring' if uring else 'psync'}", f"--directory={directory}", "--direct=1",
        f"--ioengine={'io_uring' if uring else 'psync'}", f"--iodepth={16 if uring else 1}",
        f"--numjobs={jobs}", f"--bs={block_bytes}", f"--size={total_bytes // jobs}", f"--rw={operation}",
        "--overwrite=1", "--end_fsync=1", "--iomem=malloc", "--iomem_align=2M",
        "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    # glibc then asks for huge pages, with which fio is up to twice as fast.
    environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float(job[operation]["bw_bytes"]) / 1e9


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A Python thread that never lets go of the interpreter by itself, like a busy engine."""
    stop = False

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def move(operation: Any, keys: list[bytes], buffers: list[memoryview], executor: ThreadedExecutor) -> float:
    """GB/s of moving all chunks through the executor, in batches as large as the store's. Every
    status must be OK."""
    limit = WRITE_BATCH_BYTES if operation.__name__ == "put" else READ_BATCH_BYTES
    per_batch = max(1, limit // buffers[0].nbytes)
    start = time.perf_counter()
    for first in range(0, len(keys), per_batch):
        part = slice(first, first + per_batch)
        assert executor.submit(partial(operation, keys[part], buffers[part]), None, 60.0)
    assert executor.drain(600.0)
    seconds = time.perf_counter() - start
    for job in executor.poll():
        if job.error is not None or any(job.result):
            raise SystemExit(f"a chunk was not moved: {job.error or job.result}")
    return sum(buffer.nbytes for buffer in buffers) / seconds / 1e9


def median_row(op: str, size: int, pairs: list[tuple[float, float]]) -> Row:
    """A row of GB/s from (value, limit) of each round; the ratio is taken round by round."""
    ratio = statistics.median(value / limit for value, limit in pairs)
    value = statistics.median(value for value, _ in pairs)
    return Row(op, size, value, "GB/s", value / ratio, ratio)


def bandwidth(directory: Path, memory: memoryview, size: int, args: argparse.Namespace) -> list[Row]:
    """Store and load of chunks of one size: against fio, and beside a busy thread against idle."""
    buffers = [memory[i : i + size] for i in range(0, memory.nbytes - size + 1, size)]
    reads = ThreadedExecutor("read", READ_THREADS, 10_000)
    writes = ThreadedExecutor("write", WRITE_THREADS, 10_000)
    tier = FileTier.open(
        {"path": str(directory / f"tier-{size}"), "capacity": CAPACITY_ROUNDS * memory.nbytes}
    )
    files = directory / "fio"
    files.mkdir(exist_ok=True)
    newest = 0

    def measure(operation: str) -> float:
        nonlocal newest
        newest += len(buffers) if operation == "write" else 0
        keys = [key(newest + i) for i in range(len(buffers))]
        if operation == "write":
            return move(tier.put, keys, buffers, writes)
        return move(tier.get, keys, buffers, reads)

    def limit(operation: str, *, uring: bool = False, huge: bool = True) -> float:
        if not HAVE_FIO:
            return math.nan
        return fio(files, operation, size, memory.nbytes, uring=uring, huge=huge)

    samples: dict[str, list[tuple[float, float]]] = {}
    limit("write")
    limit("write", uring=True)
    for _ in range(CAPACITY_ROUNDS):
        samples.setdefault("file store, first fill", []).append((measure("write"), limit("write")))
    for operation, name in (("write", "file store"), ("read", "file load")):
        for _ in range(args.rounds):
            before = limit(operation)
            value = measure(operation)
            reference = (before + limit(operation)) / 2
            uring = limit(operation, uring=True)
            plain = limit(operation, huge=False)
            with busy_thread():
                busy = measure(operation)
            idle = (value + measure(operation)) / 2
            samples.setdefault(f"{name} / fio psync", []).append((value, plain))
            samples.setdefault(f"{name} / fio psync on huge pages", []).append((value, reference))
            samples.setdefault(f"{name} / fio io_uring", []).append((value, uring))
            samples.setdefault(f"{name}, busy / idle", []).append((busy, idle))
    for _ in range(CAPACITY_ROUNDS):  # everything was read, so that a quarter of it is written again
        measure("write")
        measure("read")
    for _ in range(args.rounds):
        samples.setdefault("file store, evicting read chunks", []).append((measure("write"), limit("write")))
    assert tier.direct, "O_DIRECT does not work here: these figures are the page cache's"
    reads.close(1.0)
    writes.close(1.0)
    tier.close()
    shutil.rmtree(directory / f"tier-{size}")
    shutil.rmtree(files)
    return [median_row(op, size, pairs) for op, pairs in samples.items()]


def bookkeeping(directory: Path) -> list[Row]:
    """Restart, memory and lookup with 100,000 chunks."""
    settings = {"path": str(directory / "many"), "capacity": 4 * 2**30}
    keys = [key(i) for i in range(CHUNKS)]
    tier = FileTier.open(settings)
    chunk = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    for first in range(0, CHUNKS, 500):
        tier.put(keys[first : first + 500], [chunk] * 500)

    def reopen() -> float:
        nonlocal tier
        tier.close()
        gc.collect()
        start = time.perf_counter()
        tier = FileTier.open(settings)
        return time.perf_counter() - start

    def lookup(first: int) -> float:
        start = time.perf_counter()
        found = tier.contains(keys[first : first + 1000])
        assert all(found)
        return (time.perf_counter() - start) * 1e3

    restart = statistics.median(reopen() for _ in range(5))
    assert tier.stats().chunks == CHUNKS
    lookup_ms = statistics.median(lookup(first) for first in range(0, CHUNKS, 1000))
    tracemalloc.start()
    reopen()
    gc.collect()
    memory = tracemalloc.get_traced_memory()[0] / CHUNKS
    tracemalloc.stop()
    tier.close()
    return [
        Row("file restart, 100,000 chunks", CHUNK_BYTES, restart, "s", 1.0, restart / 1.0),
        Row("file contains, 1,000 keys", CHUNK_BYTES, lookup_ms, "ms", 0.3, lookup_ms / 0.3),
        Row("file index memory per chunk", CHUNK_BYTES, memory, "bytes", 300.0, memory / 300.0),
    ]


def judge(row: Row) -> str | None:
    """Whether a row meets its bar; None where there is none."""
    bar = BARS.get(row.op)
    if bar is not None and row.size_bytes == HUGE_PAGE_BYTES and not math.isnan(row.ratio):
        return f"{'met' if row.ratio >= bar else 'MISSED'}: {row.op} {row.ratio:.2f}, at least {bar}"
    if row.size_bytes == CHUNK_BYTES:
        return f"{'met' if row.ratio <= 1 else 'MISSED'}: {row.op} {row.ratio:.2f}, at most 1"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to make a directory; default: $TMPDIR")
    parser.add_argument("--sizes", default="2097152,262144,8388608", help="chunk sizes in bytes")
    parser.add_argument("--total", type=int, default=2 * 2**30, help="bytes moved per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-bookkeeping", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("build/bench/file_tier.json"))
    args = parser.parse_args()
    if not HAVE_FIO:
        print("fio is not installed: no ratio to the disk's own speed (Debian: apt install fio)")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="lmkv-bench-") as name:
        memory = slab(args.total)
        for size in map(int, args.sizes.split(",")):
            rows += bandwidth(Path(name), memory, size, args)
        if not args.skip_bookkeeping:
            rows += bookkeeping(Path(name))
    write(args.json, rows)
    print("\n".join(verdict for row in rows if (verdict := judge(row))))


if __name__ == "__main__":
    main()
