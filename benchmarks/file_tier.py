"""The NVMe tier against fio on the same disk, in the same run.

    python benchmarks/file_tier.py [--dir D] [--sizes 2097152,...] [--json build/bench/file_tier.json]

Chunks lie in one slab of huge pages and are moved by threads that each call `put` or `get` with a
batch, as the executor does; checksums are on, the page cache is bypassed. fio runs before and after
every measured round (A-B-A) with O_DIRECT, psync, 4 jobs, huge pages, the same block size and bytes;
io_uring is recorded beside it. Ratios are medians over the rounds and come first: the absolute
figures are the machine's.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import platform
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lmkv.backends.file import FileTier
from lmkv.tier import Status

HUGE_PAGE_BYTES = 2 * 2**20
PIECE_BYTES = 64 * 2**20
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
PROT_READ, PROT_WRITE = 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x1, 0x2, 0x10, 0x20
#: The bars of the project, by operation: the ratio must be at least (at most for "<=" rows) this.
BARS = {"load": 0.9, "store": 0.85, "load, busy": 0.75, "store, busy": 0.75}
CHUNKS = 100_000


def slab(size_bytes: int) -> memoryview:
    """Shared memory of huge pages, filled with random bytes. It is never unmapped."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    ]  # fmt: skip
    # Huge pages need an address that is a multiple of theirs: reserve more, map over a part of it.
    anywhere = libc.mmap(None, size_bytes + HUGE_PAGE_BYTES, 0, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    start = -(-anywhere // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    libc.mmap(start, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
    for offset in range(0, size_bytes, PIECE_BYTES):
        for advice in (MADV_POPULATE_WRITE, MADV_COLLAPSE):
            piece = ctypes.c_void_p(start + offset), ctypes.c_size_t(min(PIECE_BYTES, size_bytes - offset))
            if libc.madvise(*piece, advice):
                print(f"madvise({advice}): {os.strerror(ctypes.get_errno())}; some pages are small")
    memory = memoryview((ctypes.c_ubyte * size_bytes).from_address(start)).cast("B")
    words = np.frombuffer(memory, np.uint64)
    words[:] = np.random.default_rng(0).integers(0, 2**63, len(words), np.uint64)
    return memory


def key(number: int) -> bytes:
    return b"n" * 32 + number.to_bytes(32, "little") + bytes(4)


def fio(directory: Path, operation: str, block_bytes: int, total_bytes: int, *, uring: bool) -> float:
    """GB/s of one fio run over files that exist already."""
    jobs = 1 if uring else 4
    command = [
        "fio", f"--name={'uring' if uring else 'psync'}", f"--directory={directory}", "--direct=1",
        f"--ioengine={'io_uring' if uring else 'psync'}", f"--iodepth={16 if uring else 1}",
        f"--numjobs={jobs}", f"--bs={block_bytes}", f"--size={total_bytes // jobs}", f"--rw={operation}",
        "--overwrite=1", "--end_fsync=1", "--iomem=malloc", "--iomem_align=2M",
        "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    # glibc then asks for huge pages, without which fio is no limit: it reads at half the speed.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
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


def move(
    operation: Any, keys: list[bytes], buffers: list[memoryview], per_batch: int, threads: int
) -> float:
    """GB/s of moving all chunks by `threads` threads, batch by batch. Every status must be OK."""
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for first in range(0, len(keys), per_batch):
        work.put(first)
    failed: list[Status] = []

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                first = work.get_nowait()
                part = slice(first, first + per_batch)
                failed.extend(status for status in operation(keys[part], buffers[part]) if status)

    pool = [threading.Thread(target=run) for _ in range(threads)]
    start = time.perf_counter()
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    seconds = time.perf_counter() - start
    if failed:
        raise SystemExit(f"a chunk was not moved: {failed[0]!r}")
    return sum(buffer.nbytes for buffer in buffers) / seconds / 1e9


class Report:
    """Rows of the result."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, op: str, size: int, value: float, unit: str, limit: float, bar: str = "") -> None:
        ratio = value / limit
        self.rows.append(
            {"op": op, "size_bytes": size, "value": value, "unit": unit, "limit": limit, "ratio": ratio}
        )
        print(f"{ratio:6.2f}  {op:32} {size:>9}  {value:10.3f} of {limit:10.3f} {unit:10} {bar}", flush=True)


def bandwidth(
    report: Report, directory: Path, memory: memoryview, size: int, args: argparse.Namespace
) -> None:
    """Store and load of chunks of one size: against fio, and beside a busy thread against idle."""
    buffers = [memory[i : i + size] for i in range(0, args.total - size + 1, size)]
    per_batch = max(1, args.batch // size)
    have_fio = shutil.which("fio") is not None
    if not have_fio:
        print("fio is not installed: no ratio to the disk's own speed (Debian: apt install fio)")
    samples: dict[str, list[tuple[float, float]]] = {}
    fio_directory = directory / "fio"
    fio_directory.mkdir(exist_ok=True)
    tier = FileTier.open({"path": str(directory / f"tier-{size}"), "capacity": 3 * args.total})
    serial = 0

    def measure(operation: str) -> float:
        nonlocal serial
        if operation == "write":
            serial += len(buffers)
            keys = [key(serial + i) for i in range(len(buffers))]
            return move(tier.put, keys, buffers, per_batch, args.store_threads)
        keys = [key(serial + i) for i in range(len(buffers))]
        return move(tier.get, keys, buffers, per_batch, args.threads)

    def limit(operation: str, uring: bool) -> float:
        return fio(fio_directory, operation, size, args.total, uring=uring)

    for operation in ("write", "write", "write", "write", "read"):  # every segment and file written once
        measure(operation)
    if have_fio:
        for uring in (False, True):
            limit("write", uring)
    for _ in range(args.rounds):
        for operation, name in (("write", "store"), ("read", "load")):
            before = limit(operation, False) if have_fio else 0.0
            value = measure(operation)
            if have_fio:
                after = limit(operation, False)
                samples.setdefault(name, []).append((value, (before + after) / 2))
                samples.setdefault(f"{name} to io_uring", []).append((value, limit(operation, True)))
            with busy_thread():
                beside = measure(operation)
            samples.setdefault(f"{name}, busy", []).append((beside, (value + measure(operation)) / 2))
    for op, pairs in samples.items():
        ratio = statistics.median(value / reference for value, reference in pairs)
        value = statistics.median(value for value, _ in pairs)
        bar = BARS.get(op) if size == HUGE_PAGE_BYTES else None
        note = "" if bar is None else f"bar {bar}: {'met' if ratio >= bar else 'MISSED'}"
        report.add(op, size, value, "GB/s", value / ratio, note)
    print({name: count for name, count in tier.stats().counters.items() if count})
    tier.close()
    shutil.rmtree(directory / f"tier-{size}")
    shutil.rmtree(fio_directory)


def bookkeeping(report: Report, directory: Path) -> None:
    """Restart, memory and lookup with 100,000 chunks."""
    settings = {"path": str(directory / "many"), "capacity": 4 * 2**30}
    keys = [key(i) for i in range(CHUNKS)]
    tier = FileTier.open(settings)
    chunk = memoryview(mmap.mmap(-1, 4096))
    for first in range(0, CHUNKS, 500):
        tier.put(keys[first : first + 500], [chunk] * 500)
    tier.close()

    def reopen() -> float:
        nonlocal tier
        tier.close()
        gc.collect()
        start = time.perf_counter()
        tier = FileTier.open(settings)
        return time.perf_counter() - start

    def met(value: float, limit: float) -> str:
        return f"at most 1: {'met' if value <= limit else 'MISSED'}"

    seconds = statistics.median(reopen() for _ in range(5))
    assert tier.stats().chunks == CHUNKS
    report.add("restart, 100,000 chunks", 4096, seconds, "s", 1.0, met(seconds, 1.0))
    lookups = []
    for first in range(0, CHUNKS, 1000):
        start = time.perf_counter()
        found = tier.contains(keys[first : first + 1000])
        lookups.append((time.perf_counter() - start) * 1e3)
        assert all(found)
    lookup = statistics.median(lookups)
    report.add("contains, 1,000 keys", 4096, lookup, "ms", 0.3, met(lookup, 0.3))
    tier.close()
    gc.collect()
    tracemalloc.start()
    tier = FileTier.open(settings)
    gc.collect()
    memory = tracemalloc.get_traced_memory()[0] / CHUNKS
    tracemalloc.stop()
    report.add("memory of a chunk in the index", 4096, memory, "bytes", 300.0, met(memory, 300))
    tier.close()
    shutil.rmtree(settings["path"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", type=Path, help="an empty place on the disk in question; default: under $TMPDIR")
    parser.add_argument("--sizes", default="2097152,262144,8388608", help="chunk sizes in bytes")
    parser.add_argument("--total", type=int, default=2**30, help="bytes moved per round")
    parser.add_argument("--batch", type=int, default=32 * 2**20, help="bytes per call of put or get")
    parser.add_argument("--threads", type=int, default=4, help="threads that load")
    parser.add_argument("--store-threads", type=int, default=4, help="threads that store")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-bookkeeping", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("build/bench/file_tier.json"))
    args = parser.parse_args()
    report = Report()
    print(" ratio  op                               size_bytes       value of      limit unit")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="lmkv-bench-") as name:
        memory = slab(args.total)
        for size in map(int, args.sizes.split(",")):
            bandwidth(report, Path(name), memory, size, args)
        if not args.skip_bookkeeping:
            bookkeeping(report, Path(name))
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    machine = {
        "cpu": cpu.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "batch_bytes": args.batch,
        "threads": args.threads,
        "store_threads": args.store_threads,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"machine": machine, "rows": report.rows}, indent=1))
    print(f"{machine}\nwrote {args.json}")


if __name__ == "__main__":
    main()
