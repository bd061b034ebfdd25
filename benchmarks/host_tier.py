"""The host tier against memcpy, and the cost of lmkv's bookkeeping per call.

    python benchmarks/host_tier.py [--json build/bench/host_tier.json]

Runs in an environment with torch (no engine needed). Copies go through the CPU engine's path:
`RankPipeline` over a SmolLM2-like layout of 30 layers, beside `memmove` of the same bytes between
the same two memories in turn (A-B-A). Bookkeeping goes through `Store` with a tier below that
answers at once, so that only lmkv's own instructions are counted.
"""

import argparse
import ctypes
import hashlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Row, write
from lmkv import slab as slabs
from lmkv.below import Below
from lmkv.executor import SteppedExecutor
from lmkv.index import HostIndex
from lmkv.kernels import Fragment
from lmkv.keys import Namespace
from lmkv.pipeline import GroupBlocks, RankPipeline
from lmkv.slots import SlotAllocator
from lmkv.store import Store
from lmkv.tier import Status, Tier, TierInfo, TierStats

LAYERS = 30
SLAB_BYTES = 1 << 30
ROUNDS = 9
#: Bytes copied per measured round: far beyond the last-level cache.
ROUND_BYTES = 256 << 20

_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class NoTier(Tier):
    """Holds nothing and takes everything at once: what is left is the cost of the store itself."""

    info = TierInfo("none", 0, False, False, 1)

    def contains(self, keys: object) -> list[bool]:
        return [False]

    def get(self, keys: object, buffers: object) -> list[Status]:
        return []

    def put(self, keys: list[bytes], buffers: object) -> list[Status]:
        return [Status.OK] * len(keys)

    def remove(self, keys: object) -> list[Status]:
        return []

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        pass


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def copies(chunk_bytes: int) -> list[Row]:
    """Store and load of chunks through the pipeline, as a ratio to memmove of whole chunks."""
    fragment = chunk_bytes // LAYERS // 64 * 64
    chunk = fragment * LAYERS
    count = max(1, ROUND_BYTES // chunk)
    tensors = [torch.zeros((count, fragment), dtype=torch.int8) for _ in range(LAYERS)]
    for tensor in tensors:
        tensor.random_(-100, 100)
    slab = slabs.private(SLAB_BYTES)
    layout = [[Fragment(tensor, fragment, i * fragment) for i, tensor in enumerate(tensors)]]
    pipeline = RankPipeline(slab, 0, layout, 1, bytes(32))
    slot = -(-chunk // 4096) * 4096
    offsets = [i * slot for i in range(count)]
    blocks = np.arange(count, dtype=np.int64)
    source = torch.zeros(count * chunk, dtype=torch.int8).random_(-100, 100)

    def memmove(*, to_slab: bool) -> None:
        for i in range(count):
            block, place = source.data_ptr() + i * chunk, slab.address + i * slot
            _memmove(*((place, block) if to_slab else (block, place)), chunk)

    ticket = iter(range(1, 10_000))

    def store() -> None:
        pipeline.store(0, next(ticket), [GroupBlocks(blocks, 0)], offsets)
        pipeline.finished()

    def load() -> None:
        pipeline.load(0, next(ticket), [GroupBlocks(blocks, 0)], offsets)
        pipeline.finished()

    rows = []
    for op, run, to_slab in (("host store", store, True), ("host load", load, False)):
        ours, limits, ratios = [], [], []
        for _ in range(ROUNDS):
            before = seconds(lambda to_slab=to_slab: memmove(to_slab=to_slab))
            own = seconds(run)
            after = seconds(lambda to_slab=to_slab: memmove(to_slab=to_slab))
            ours.append(count * chunk / own / 1e9)
            limits.append(count * chunk / ((before + after) / 2) / 1e9)
            ratios.append(ours[-1] / limits[-1])
        medians = [statistics.median(values) for values in (ours, limits, ratios)]
        rows.append(Row(op, chunk_bytes, medians[0], "GB/s", medians[1], medians[2]))
    pipeline.close()
    slab.close()
    return rows


def new_store(slots: int, slab: slabs.Slab) -> tuple[Store, SteppedExecutor]:
    writes = SteppedExecutor()
    below = Below(NoTier(), SteppedExecutor(), writes)
    store = Store(
        slab=slab,
        ranks=[slab.rank(0)],
        chunk_bytes={0: 4096},
        namespace=Namespace.of({}),
        below=[below],
    )
    return store, writes


def keys(count: int, seed: int) -> list[bytes]:
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() + bytes(4) for i in range(count)]


def bookkeeping() -> list[Row]:
    """Microseconds per chunk of the store's calls, in steps of 16 chunks, evicting."""
    slab = slabs.private(64 << 20)
    store, writes = new_store(0, slab)
    step, count = 16, 32_000
    warm = keys(slab.capacity_bytes // 4096, 1)
    rows = []

    def cycle(batch: list[list[bytes]], times: dict[str, float]) -> None:
        for part in batch:
            request = store.new_request()
            start = time.perf_counter()
            _, transfer = store.prepare_store(part, request)
            prepared = time.perf_counter()
            assert transfer is not None
            store.complete_store(part, request)
            completed = time.perf_counter()
            store.end_step()
            writes.step(8)
            store.end_step()
            store.finish_request(request)
            end = time.perf_counter()
            times["prepare_store"] += prepared - start
            times["complete_store"] += completed - prepared
            times["cycle"] += end - start

    def split(all_keys: list[bytes]) -> list[list[bytes]]:
        return [all_keys[i : i + step] for i in range(0, len(all_keys), step)]

    names = ("prepare_store", "complete_store", "cycle")
    cycle(split(warm), dict.fromkeys(names, 0.0))
    samples = []
    for round_number in range(ROUNDS):
        times = dict.fromkeys(names, 0.0)
        cycle(split(keys(count // ROUNDS // step * step, 100 + round_number)), times)
        samples.append({name: t / (count // ROUNDS // step * step) * 1e6 for name, t in times.items()})
    for name, limit in (("prepare_store", 2.0), ("complete_store", 2.0), ("cycle", 6.0)):
        value = statistics.median(sample[name] for sample in samples)
        rows.append(Row(f"bookkeeping {name}, per chunk", 4096, value, "us", limit, value / limit))

    held = [key for key in store.index.ready][-1000:]
    loads, lookups, idles = [], [], []
    for _ in range(200):
        request = store.new_request()
        start = time.perf_counter()
        find, found = store.open_window(request)
        for key in held:
            found(find(key))
        lookups.append(time.perf_counter() - start)
        start = time.perf_counter()
        store.prepare_load(held, request)
        store.complete_load(held, request)
        loads.append((time.perf_counter() - start) / len(held))
        store.finish_request(request)
        start = time.perf_counter()
        store.end_step()
        idles.append(time.perf_counter() - start)
    value = statistics.median(loads) * 1e6
    rows.append(Row("bookkeeping prepare_load + complete_load, per chunk", 4096, value, "us", 4.0, value / 4))
    value = statistics.median(lookups) * 1e3
    rows.append(Row("lookup of 1,000 keys, through the store", 4096, value, "ms", 0.3, value / 0.3))
    value = statistics.median(idles) * 1e6
    rows.append(Row("a step with nothing to do", 0, value, "us", 20.0, value / 20))
    store.close()
    slab.close()
    return rows


def memory() -> Row:
    """Bytes of memory per chunk in the host index, at 100,000 chunks (tracemalloc)."""
    import tracemalloc

    count = 100_000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = HostIndex(SlotAllocator(count * 4096, [4096]))
    for i in range(count):
        entry = index.reserve(os.urandom(36), 4096, i // 16 + 1)
        assert entry is not None
        index.commit(entry)
        index.release(entry)
    value = (tracemalloc.get_traced_memory()[0] - before) / count
    tracemalloc.stop()
    return Row("memory per chunk in the host index", 4096, value, "B", 300.0, value / 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("build/bench/host_tier.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for size in (256 << 10, 2 << 20, 8 << 20) for row in copies(size)]
    rows += bookkeeping()
    rows.append(memory())
    write(args.json, rows)


if __name__ == "__main__":
    main()
