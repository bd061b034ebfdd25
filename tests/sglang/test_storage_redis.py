"""The storage on a real Redis server: pages that engines share, files above it, a server that dies."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkv.config import ConfigError
from lmkv.connectors.sglang import LMKVStorage
from tests.redis_servers import START_TIMEOUT_S, Server, running
from tests.sglang import test_linker_unit as linkers
from tests.sglang.test_linker_unit import open_linker, wait
from tests.sglang.test_storage_unit import HostPool, keys, mha, mla, no_engine, ranks

__all__ = ["no_engine", "open_linker"]
LAYOUT = "page_first"
FOUR = [0, 1, 2, 3]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "redis", maxmemory="256mb", maxmemory_policy="allkeys-lru") as server:
        yield server


class Engine:
    """A storage with one pool, whose pages hold known bytes."""

    def __init__(self, pool: HostPool, lmkv: dict[str, Any], seed: int, **changed: Any) -> None:
        extra = {"backend_name": "lmkv", "interface_v1": 1, "lmkv": lmkv}
        self.storage = LMKVStorage(ranks(None, extra_config=extra, **changed))
        self.pool = pool
        pool.fill(seed)
        self.storage.register_mem_pool_host(pool.pool)
        self.storage.on_host_pools_registered()

    def store(self, pages: list[int]) -> list[bool]:
        return self.storage.batch_set_v1(keys(len(pages)), self.pool.indices(pages))

    def load(self, pages: list[int]) -> list[bool]:
        return self.storage.batch_get_v1(keys(len(pages)), self.pool.indices(pages))

    def count(self, name: str, *labels: str) -> float:
        return self.storage.metrics.get(f"lmkv_{name}", *labels)


def assert_came(target: Engine, before: list[torch.Tensor], source: Engine, pages: list[int]) -> None:
    """These pages are the source's now, all else in the pool is as it was."""
    expected = target.pool.moved(before, source.pool.contents(), {page: page for page in pages})
    assert target.pool.holds(expected)


@pytest.mark.usefixtures("no_engine")
def test_what_one_engine_stored_another_loads(server: Server) -> None:
    lmkv = {"redis": {"url": server.url}}
    first, second = Engine(mha(LAYOUT), lmkv, 1), Engine(mha(LAYOUT), lmkv, 2)
    assert second.storage.batch_exists(keys(4)) == 0
    assert first.store(FOUR) == [True] * 4
    assert second.storage.batch_exists(keys(5)) == 4
    before = second.pool.contents()
    assert second.load(FOUR) == [True] * 4
    assert_came(second, before, first, FOUR)
    assert second.count("loaded_chunks", "redis") == 4
    assert second.store(FOUR) == [True] * 4  # SGLang writes again what it has read
    assert server.client().dbsize() == 4
    for engine in (first, second):
        engine.storage.close()


@pytest.mark.usefixtures("no_engine")
def test_the_server_has_what_the_files_lack(server: Server, tmp_path: Path) -> None:
    both = {"file": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}, "redis": {"url": server.url}}
    first = Engine(mha(LAYOUT), both, 1)
    assert first.store(FOUR) == [True] * 4
    assert first.count("stored_chunks", "file") == first.count("stored_chunks", "redis") == 4
    first.storage.close()
    other = both | {"file": {"path": str(tmp_path / "other"), "capacity": "64MiB"}}
    second = Engine(mha(LAYOUT), other, 1)
    assert second.store([0, 1]) == [True] * 2  # two pages are in its own files too
    second.pool.fill(2)
    before = second.pool.contents()
    assert second.storage.batch_exists(keys(4)) == 4
    assert second.load(FOUR) == [True] * 4
    assert_came(second, before, first, FOUR)
    assert second.count("loaded_chunks", "file") == second.count("loaded_chunks", "redis") == 2
    second.storage.close()


@pytest.mark.usefixtures("no_engine")
def test_a_dead_server_is_left_alone_and_used_again(server: Server) -> None:
    engine = Engine(mha(LAYOUT), {"redis": {"url": server.url}}, 1)
    assert engine.store(FOUR) == [True] * 4
    server.kill()
    assert engine.load(FOUR) == [False] * 4
    (place,) = engine.storage._servers.values()
    failed = place.tier.stats().counters["io_errors"]
    assert engine.storage.batch_exists(keys(4)) == 0
    assert engine.store(FOUR) == [False] * 4
    assert place.breaker.trips == 1 and failed > 0
    server.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while place.breaker.open(0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert engine.store(FOUR) == [True] * 4
    assert engine.load(FOUR) == [True] * 4
    engine.storage.close()


@pytest.mark.usefixtures("no_engine")
def test_of_replicas_one_stores_and_all_read(server: Server) -> None:
    lmkv = {"redis": {"url": server.url}}
    ranked = [
        Engine(mla(LAYOUT), lmkv, rank, tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)
    ]
    assert ranked[1].store(FOUR) == [False] * 4
    assert server.client().dbsize() == 0
    assert ranked[0].store(FOUR) == [True] * 4
    assert ranked[1].load(FOUR) == [True] * 4
    for engine in ranked:
        engine.storage.close()


def test_when_pages_go_down_is_sglangs_to_say(server: Server) -> None:
    lmkv = {"redis": {"url": server.url, "policy": "demote"}}
    extra = {"backend_name": "lmkv", "interface_v1": 1, "lmkv": lmkv}
    with pytest.raises(ConfigError, match=r"\[redis\] policy: SGLang itself decides.*hicache-write-policy"):
        LMKVStorage(ranks(None, extra_config=extra))


def test_the_linker_on_a_server(
    open_linker: linkers.Open,  # pytest's way
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMKV_REDIS_URL", server.url)
    pool = linkers.mha()
    names = linkers.keys(5)
    first = open_linker(pool, file=False)
    linkers.fill(pool, 1)
    source = linkers.contents(pool)
    assert first.offload(linkers.kv(names, [7, 2, 3, 9, 11]))
    first.written()
    assert server.client().dbsize() == 5
    second = open_linker(pool, file=False)
    # Nothing is known of the server yet: it is asked, for the next lookup.
    assert second.linker.lookup("a", [linkers.kv(names)]) == []
    wait(lambda: second.linker.lookup("b", [linkers.kv(names)]) == [1, 2, 3, 4, 5])
    linkers.fill(pool, 2)
    before = linkers.contents(pool)
    assert second.linker.load("b", [linkers.kv(names, [1, 10, 4, 0, 8])])
    assert second.land()
    assert linkers.holds(pool, linkers.moved(before, source, {1: 7, 10: 2, 4: 3, 0: 9, 8: 11}))
    assert second.counter("lmkv_hit_tokens", "redis") == 5 * linkers.PAGE
    server.stop()  # no lookup waits for it
    assert second.linker.lookup("c", [linkers.kv(names)]) == [1, 2, 3, 4, 5]  # in memory
    other = [linkers.key("other")]
    below = second.linker._store._below[0]
    wait(lambda: second.linker.lookup("d", [linkers.kv(other)]) == [] and below.reads.open)
    server.go_on()
    assert second.errors() == 0
