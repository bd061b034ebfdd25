"""lmkv's storage for SGLang against SGLang's `file` backend and against lmkv's own NVMe tier, in one run.

    python -m benchmarks.sglang_storage [--dir D] [--rounds N] [--json build/bench/sglang_storage.json]

In the SGLang environment, without an engine: real host pools in the layout `page_first`, batches of 128 pages
as SGLang makes them. The tier is driven directly with the same threads and sizes of parts, from pages that
lie in one piece; it bounds what the storage can do. SGLang's `file` backend is called as its controller calls
it; its files are flushed and dropped from the page cache before they are read, its stores are timed without
the flush. The three take turns; ratios are medians of the rounds' ratios.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from benchmarks.report import Row, write
from lmkv.backends.file import FileTier
from lmkv.below import READ_BATCH_BYTES, READ_THREADS, WRITE_BATCH_BYTES, WRITE_THREADS
from lmkv.connectors.sglang import LMKVLinker, LMKVStorage, compat
from lmkv.connectors.sglang import linker as linker_module
from lmkv.connectors.sglang import storage as storage_module
from lmkv.tier import Status
from tools import sglang_cpu

BATCH = 128
PAGE_TOKENS = 64
#: (layers, heads, head size) of a page of 64 tokens in bfloat16: an 8B-like model, and a small one.
MODELS = {8 << 20: (32, 8, 128), 64 << 10: (2, 2, 64)}
LOOKUP_PAGES = 1000


def config(directory: Path, page_bytes: int) -> HiCacheStorageConfig:
    """What SGLang tells a storage."""
    lmkv = {"file": {"path": str(directory), "capacity": f"{max(8 * BATCH * page_bytes >> 20, 256)}MiB"}}
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config={"interface_v1": 1, "lmkv": lmkv},
    )


def host_pool(page_bytes: int) -> MHATokenToKVPoolHost:
    """Room for one batch, filled with random bytes."""
    layers, heads, size = MODELS[page_bytes]
    device = MHATokenToKVPool(
        size=PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=size,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    (info,) = device.get_device_pool_infos()
    with host_memory_budget_scope(8 << 30):
        pool = MHATokenToKVPoolHost(
            info.buffer_info,
            host_to_device_ratio=2.0,
            host_size=0,
            page_size=PAGE_TOKENS,
            layout="page_first",
            pin_memory=False,
            device_capacity_tokens=PAGE_TOKENS,
            start_layer=0,
            end_layer=layers,
            host_token_capacity=BATCH * PAGE_TOKENS,
        )
    raw = pool.kv_buffer.view(torch.uint8).reshape(-1)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return pool


def hashes(round_number: int, count: int = BATCH) -> list[str]:
    return [hashlib.sha256(f"{round_number} {page}".encode()).hexdigest() for page in range(count)]


class Direct:
    """The tier by itself, as `lmkv.store` drives it: large batches on several threads."""

    def __init__(self, directory: Path, page_bytes: int, pool: MHATokenToKVPoolHost) -> None:
        self.tier = FileTier(directory, max(8 * BATCH * page_bytes, 256 << 20))
        # The pool's own memory: how it is scattered over physical pages makes up to a factor of two.
        view = memoryview(pool.kv_buffer.view(torch.uint8).reshape(-1).numpy())[: BATCH * page_bytes]
        self.pages = [view[start : start + page_bytes] for start in range(0, len(view), page_bytes)]
        self.reads = ThreadPoolExecutor(READ_THREADS)
        self.writes = ThreadPoolExecutor(WRITE_THREADS)

    def move(self, move: Any, threads: ThreadPoolExecutor, part_bytes: int, names: list[str]) -> None:
        keys = [b"n" * 32 + bytes.fromhex(name) + bytes(4) for name in names]
        step = max(1, part_bytes // self.pages[0].nbytes)
        starts = range(0, BATCH, step)
        parts = [(keys[at : at + step], self.pages[at : at + step]) for at in starts]
        for statuses in threads.map(move, *zip(*parts, strict=True)):
            assert set(statuses) == {Status.OK}

    def store(self, names: list[str]) -> None:
        self.move(self.tier.put, self.writes, WRITE_BATCH_BYTES, names)

    def load(self, names: list[str]) -> None:
        self.move(self.tier.get, self.reads, READ_BATCH_BYTES, names)


class Ours:
    """LMKVStorage."""

    def __init__(self, directory: Path, page_bytes: int) -> None:
        self.storage = LMKVStorage(config(directory, page_bytes))
        self.pool = host_pool(page_bytes)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        self.indices = torch.arange(BATCH * PAGE_TOKENS)

    def store(self, names: list[str]) -> None:
        assert all(self.storage.batch_set_v1(names, self.indices))

    def load(self, names: list[str]) -> None:
        assert all(self.storage.batch_get_v1(names, self.indices))


class SGLangFile:
    """SGLang's own `file` backend, page by page through the pool's copies, as its controller calls it."""

    def __init__(self, directory: Path, page_bytes: int, pool: MHATokenToKVPoolHost) -> None:
        self.backend = HiCacheFile(config(directory, page_bytes), str(directory))
        self.directory = directory
        self.pool = pool

    def store(self, names: list[str]) -> None:
        pages = [self.pool.get_data_page(page * PAGE_TOKENS) for page in range(len(names))]
        assert self.backend.batch_set(names, pages)

    def load(self, names: list[str]) -> None:
        empty = [self.pool.get_dummy_flat_data_page() for _ in names]
        for page, data in enumerate(self.backend.batch_get(names, empty)):
            assert data is not None
            self.pool.set_from_flat_data_page(page * PAGE_TOKENS, data)

    def settle(self) -> None:
        """Flush what was stored and forget it in memory, as the other two have done."""
        for file in self.directory.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def seconds(call: Callable[..., object], *args: object) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def bench(directory: Path, page_bytes: int, rounds: int) -> list[Row]:
    """Rows of one page size."""
    ours = Ours(directory / "ours", page_bytes)
    direct = Direct(directory / "direct", page_bytes, ours.pool)
    (directory / "sglang").mkdir()
    theirs = SGLangFile(directory / "sglang", page_bytes, ours.pool)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        names = hashes(number)
        for operation in ("store", "load"):
            turns = [("lmkv", ours), ("tier", direct)]
            for who, what in (*turns[:: 1 if number % 2 else -1], ("sglang", theirs)):
                took = seconds(getattr(what, operation), names)
                if number:  # the first round allocates files and threads
                    times.setdefault((who, operation), []).append(took)
            theirs.settle()
        for file in (directory / "sglang").iterdir():
            file.unlink()
        os.sync()
    rows = []
    size = BATCH * page_bytes
    for operation in ("store", "load"):
        mine = times["lmkv", operation]
        for who, label in (("tier", "lmkv's NVMe tier directly"), ("sglang", "SGLang's file backend")):
            other = times[who, operation]
            ratio = statistics.median(b / a for a, b in zip(mine, other, strict=True))
            value, limit = (size / statistics.median(taken) / 1e9 for taken in (mine, other))
            rows.append(Row(f"{operation} / {label}", page_bytes, value, "GB/s", limit, ratio))
    if page_bytes == min(MODELS):
        rows += lookups(ours, rounds)
    ours.storage.close()
    direct.tier.close()
    return rows


def lookups(ours: Ours, rounds: int) -> list[Row]:
    """Milliseconds of a lookup of 1,000 stored pages; the bar is 0.5 ms."""
    names = hashes(-1, LOOKUP_PAGES)
    for start in range(0, LOOKUP_PAGES, BATCH):
        part = names[start : start + BATCH]
        assert all(ours.storage.batch_set_v1(part, ours.indices[: len(part) * PAGE_TOKENS]))
    transfer = SimpleNamespace(
        name=PoolName.KV, hit_policy=SimpleNamespace(value="trailing_pages"), keys=names[:4]
    )
    plain, several = [], []
    for _ in range(20 * rounds):
        plain.append(seconds(ours.storage.batch_exists, names))
        several.append(seconds(ours.storage.batch_exists_v2, names, [transfer]))
    assert ours.storage.batch_exists(names) == LOOKUP_PAGES
    return [
        Row(f"lookup of {LOOKUP_PAGES} pages{more}", 0, 1e3 * median, "ms", 0.5, 1e3 * median / 0.5)
        for more, median in (
            ("", statistics.median(plain)),
            (" in two pools", statistics.median(several)),
        )
    ]


def linker_lookups(directory: Path, rounds: int) -> list[Row]:
    """Microseconds a page of the linker's lookup, with all pages in the slab and with all below it."""
    compat.linker_ranks = lambda _: SimpleNamespace(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        dp_rank=0,
        is_mla_model=False,
    )
    compat.server_args = lambda: SimpleNamespace(pp_size=1, dp_size=1)
    pool = MHATokenToKVPool(
        size=LOOKUP_PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=64,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    params = SimpleNamespace(
        page_size=PAGE_TOKENS,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        attn_cp_cache_group=None,
        attn_tp_cache_group=None,
        tp_cache_group=None,
        mtp_draft_device_pools=(),
        sidecar_draft_device_pools=(),
    )
    lmkv = {"host": {"capacity": "64MiB"}, "file": {"path": str(directory), "capacity": "256MiB"}}
    medians = {}
    for where in ("in the slab", "below it"):
        linker = LMKVLinker(None, params, components={ComponentType.FULL}, extra_config={"lmkv": lmkv})
        indices = torch.arange(LOOKUP_PAGES * PAGE_TOKENS)
        names = hashes(-1, LOOKUP_PAGES)
        wanted = [PoolTransfer(name=PoolName.KV, keys=names, device_indices=indices)]
        if where == "in the slab":
            assert linker.offload(wanted)
            while not linker.num_completed_offloads() or linker.pending_writes:
                time.sleep(0.01)
        assert linker.lookup("bench", wanted)[-1] == LOOKUP_PAGES
        times = [seconds(linker.lookup, "bench", wanted) for _ in range(20 * rounds)]
        medians[where] = 1e6 * statistics.median(times) / LOOKUP_PAGES
        linker.close()
    return [
        Row(f"linker lookup, a page {where}", 0, median, "us", 1, median) for where, median in medians.items()
    ]


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("RssAnon"))


def memory(directory: Path) -> Row:
    """Anonymous memory that batches of both sizes leave behind or took at most, beside the pool."""
    grown = 0
    for page_bytes in MODELS:
        ours = Ours(directory / f"memory-{page_bytes}", page_bytes)
        before = resident_bytes()
        for number in range(2):
            ours.store(hashes(number))
            ours.load(hashes(number))
            grown = max(grown, resident_bytes() - before)
        ours.storage.close()
    return Row("memory beside the pool", 0, grown / 2**20, "MiB", 64, grown / 2**20 / 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("build"), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path("build/bench/sglang_storage.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sglang_cpu.register()
    # What an engine would tell; nothing here depends on it.
    for module in (storage_module, linker_module):
        module.check_engine = lambda _: None
        module.engine_fields = lambda _: {}
    args.dir = args.dir.resolve()
    args.dir.mkdir(parents=True, exist_ok=True)
    rows = []
    for page_bytes in MODELS:
        directory = Path(tempfile.mkdtemp(dir=args.dir, prefix="bench-sglang-"))
        try:
            rows += bench(directory, page_bytes, args.rounds)
        finally:
            shutil.rmtree(directory)
    directory = Path(tempfile.mkdtemp(dir=args.dir, prefix="bench-sglang-"))
    try:
        rows.append(memory(directory))
        rows += linker_lookups(directory / "linker", args.rounds)
    finally:
        shutil.rmtree(directory)
    write(args.json, rows)


if __name__ == "__main__":
    main()
