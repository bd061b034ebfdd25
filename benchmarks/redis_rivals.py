"""lmkv's Redis tier beside LMCache's `redis://` and `resp://` and redis-py with hiredis, on one server.

    make bench-rivals [ARGS="--sizes 1048576,... --url redis://..."]

Everything runs in one process of an environment of its own, through LMCache's own factory of connectors
(`CreateConnector`) and their calls for batches, in the settings that its documentation recommends. Each moves
the same bytes to and from host memory that was touched before; what came back is compared outside of the
timed part. lmkv goes through its executor as it does below an engine, and verifies a checksum; the others
verify nothing. They take turns; figures are medians over the rounds, ratios are taken round by round.
"""

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from benchmarks.file_tier import key, median_row, move, slab
from benchmarks.redis_tier import LOOKUP_KEYS, Client, server
from benchmarks.report import Row, write
from lmkv.backends.redis import RedisTier
from lmkv.below import READ_THREADS, WRITE_THREADS
from lmkv.executor import ThreadedExecutor

#: LMCache's scheme -> what its documentation says to set for it.
LMCACHE = {"redis": {}, "resp": {"save_chunk_meta": False, "resp_num_threads": 8}}
LAYERS, HEADS, HEAD_DIM = 16, 8, 64
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2


class LMCache:
    """One of LMCache's connectors, on an event loop of its own as its engine runs it."""

    def __init__(self, scheme: str, address: str, chunk_bytes: int, room_bytes: int) -> None:
        tokens = chunk_bytes // TOKEN_BYTES
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=tokens,
            local_cpu=False,
            max_local_cpu_size=room_bytes / 2**30,
            remote_url=f"{scheme}://{address}",
            remote_serde="naive",
            save_unfull_chunk=False,
            extra_config=LMCACHE[scheme],
        )
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, tokens, HEADS, HEAD_DIM),
            chunk_size=tokens,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.memory = LocalCPUBackend(config, metadata, "cpu")
        self._make = lambda: CreateConnector(config.remote_url, self._loop, self.memory, config, metadata)
        self._remote = self._wait(self._made())
        self._shapes, self._dtypes = metadata.get_shapes(), metadata.get_dtypes()
        self._scheme = scheme

    async def _made(self) -> Any:
        return self._make()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(600)

    @staticmethod
    def keys(numbers: Sequence[int]) -> list[Any]:
        """Keys as LMCache makes them."""
        return [CacheEngineKey("bench", 1, 0, number, torch.bfloat16) for number in numbers]

    def filled(self, buffers: Sequence[memoryview]) -> list[Any]:
        """Its memory objects with the content of some buffers."""
        objects = [self.memory.allocate(self._shapes, self._dtypes) for _ in buffers]
        for made, buffer in zip(objects, buffers, strict=True):
            np.copyto(np.frombuffer(made.byte_array, np.uint8), np.frombuffer(buffer, np.uint8))
        return objects

    def store(self, keys: list[Any], objects: list[Any]) -> float:
        """Seconds to store all of them."""
        for made in objects:  # its connector lets go of what it has stored
            made.ref_count_up()
        start = time.perf_counter()
        self._wait(self._remote.batched_put(keys, objects))
        return time.perf_counter() - start

    def load(self, keys: list[Any], buffers: Sequence[memoryview]) -> float:
        """Seconds to load all of them; they have to be what is in the buffers."""
        start = time.perf_counter()
        objects = self._wait(self._remote.batched_get_non_blocking("bench", keys))
        seconds = time.perf_counter() - start
        assert len(objects) == len(buffers)
        for loaded, buffer in zip(objects, buffers, strict=True):
            assert bytes(loaded.byte_array) == bytes(buffer), f"{self._scheme}: other bytes came back"
            loaded.ref_count_down()
        return seconds

    def found(self, keys: list[Any]) -> int:
        """How many of the keys are there, up to the first that is not."""
        return int(self._wait(self._remote.batched_async_contains("bench", keys)))

    def close(self) -> None:
        """Give the memory back. Its connector's own `close` waits on the loop for that same loop (0.5.6)."""
        self.memory.memory_allocator.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


def bandwidth(url: str, memory: memoryview, size: int, rounds: int) -> list[Row]:
    """Store and load of chunks of one size, each against lmkv in the same round."""
    buffers = [memory[i : i + size] for i in range(0, memory.nbytes - size + 1, size)]
    keys = [key(i) for i in range(len(buffers))]
    reads = ThreadedExecutor("read", READ_THREADS, 10_000)
    writes = ThreadedExecutor("write", WRITE_THREADS, 10_000)
    tier, client = RedisTier.open({"url": url}), Client(url)
    address = url.removeprefix("redis://").partition("/")[0]
    total = memory.nbytes
    runs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "redis-py + hiredis": (
            lambda: move(client.put, keys, buffers, writes),
            lambda: move(client.get, keys, buffers, reads),
        )
    }
    rivals = {scheme: LMCache(scheme, address, size, 2 * total + 2**28) for scheme in LMCACHE}
    for scheme, rival in rivals.items():
        theirs, objects = rival.keys(range(len(buffers))), rival.filled(buffers)
        runs[f"LMCache {scheme}://"] = (
            lambda rival=rival, theirs=theirs, objects=objects: total / rival.store(theirs, objects) / 1e9,
            lambda rival=rival, theirs=theirs: total / rival.load(theirs, buffers) / 1e9,
        )
    samples: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        for name in (*list(runs)[turn % len(runs) :], *list(runs)[: turn % len(runs)]):
            store, load = runs[name]
            ours = move(tier.put, keys, buffers, writes), move(tier.get, keys, buffers, reads)
            tier.remove(keys)
            theirs = store(), load()
            client.flush()
            for operation, mine, other in zip(("store", "load"), ours, theirs, strict=True):
                if turn:  # in the first one connections and memory are new
                    samples.setdefault(f"redis {operation} / {name}", []).append((mine, other))
    for rival in rivals.values():
        rival.close()
    reads.close(1.0)
    writes.close(1.0)
    tier.close()
    return [median_row(op, size, pairs) for op, pairs in samples.items()]


def lookup(url: str) -> list[Row]:
    """1,000 keys, all of which are there."""
    address = url.removeprefix("redis://").partition("/")[0]
    size, rows = 4 * TOKEN_BYTES, []
    content = memoryview(bytes(size))
    tier = RedisTier.open({"url": url})
    keys = [key(i) for i in range(LOOKUP_KEYS)]
    tier.put(keys, [content] * LOOKUP_KEYS)
    ours = timed(lambda: sum(tier.contains(keys)), 100)
    tier.remove(keys)
    tier.close()
    for scheme in LMCACHE:
        rival = LMCache(scheme, address, size, 2**29)
        theirs = rival.keys(range(LOOKUP_KEYS))
        rival.store(theirs, rival.filled([content] * LOOKUP_KEYS))
        taken = timed(lambda rival=rival, theirs=theirs: rival.found(theirs), 20)
        rows.append(Row(f"redis lookup / LMCache {scheme}://", size, ours, "ms", taken, taken / ours))
        rival.close()
    return rows


def timed(ask: Callable[[], int], times: int) -> float:
    """Milliseconds of a question that finds all keys, as a median."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        assert ask() == LOOKUP_KEYS
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="of a server without password; it is emptied; default: one is started")
    parser.add_argument("--sizes", default="1048576,2097152,4194304", help="chunk sizes in bytes")
    parser.add_argument("--total", type=int, default=256 * 2**20, help="bytes moved per round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, default=Path("build/bench/redis_rivals.json"))
    args = parser.parse_args()
    print(f"LMCache's settings: {LMCACHE}; one event loop, memory touched before")
    rows: list[Row] = []
    with server(args.url, 8 * args.total) as url:
        memory = slab(args.total)
        for size in map(int, args.sizes.split(",")):
            rows += bandwidth(url, memory, size, args.rounds)
        rows += lookup(url)
    write(args.json, rows)


if __name__ == "__main__":
    main()
