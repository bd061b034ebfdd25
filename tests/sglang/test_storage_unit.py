"""LMKVStorage over SGLang's real host pools and a real directory, without an engine.

Pages are compared with an oracle that slices a pool's tensors by their documented shape (`init_kv_buffer` of
each pool), not by the addresses that lmkv uses. Every host pool that lmkv may meet is here, those of Mamba
and of an indexer (DSA) included: all can be made on a CPU. An indexer's and `page_first_kv_split`'s device
pools cannot, so their host pools are given descriptions of such pools. The copies between device and host
pool are SGLang's own, and left to the tests with engines.
"""

import errno
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo, MLABufferInfo, MLASplitBuffers
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from lmkv.backends import file as file_tier
from lmkv.config import Config, ConfigError
from lmkv.connectors.sglang import LMKVStorage, checks, compat, live, places
from lmkv.connectors.sglang import storage as storage_module
from lmkv.connectors.sglang.pages import PagesByCopy, PagesInPlace, host_pages
from lmkv.connectors.sglang.scopes import scope_of
from lmkv.tier import Status
from tools import sglang_cpu

if not torch.cuda.is_available():
    sglang_cpu.register()

PAGE = 16
PAGES = 12
LAYERS = 2
TIMEOUT_S = 60


# --- host pools


@pytest.fixture(autouse=True)
def host_memory() -> Iterator[None]:
    """SGLang makes no host pool unless 10 GB of memory stay free, or it is told what it may take."""
    with host_memory_budget_scope(1 << 30):
        yield


class HostPool(NamedTuple):
    """A host pool, the tensors it keeps its pages in, and where a page lies in each of them."""

    pool: Any
    buffers: Sequence[torch.Tensor]
    page_of: Callable[[torch.Tensor, int], torch.Tensor]
    page_size: int = PAGE

    def fill(self, seed: int) -> None:
        """Random bytes: no two pages are alike."""
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            raw = _raw(buffer)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))

    def contents(self) -> list[torch.Tensor]:
        return [_raw(buffer).clone() for buffer in self.buffers]

    def moved(
        self, before: list[torch.Tensor], source: list[torch.Tensor], where: dict[int, int]
    ) -> list[torch.Tensor]:
        """What the pool must hold when pages of `source` came to it; `where`: target page -> source page."""
        after = [buffer.clone() for buffer in before]
        for target, page in where.items():
            for new, old in zip(after, source, strict=True):
                self.page_of(new, target).copy_(self.page_of(old, page))
        return after

    def holds(self, expected: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, self.contents(), expected))

    def indices(self, pages: Sequence[int]) -> torch.Tensor:
        """Token slots of these pages."""
        slots = [range(page * self.page_size, (page + 1) * self.page_size) for page in pages]
        return torch.tensor(list(itertools.chain.from_iterable(slots)), dtype=torch.int64)


def _raw(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes."""
    return buffer.view(torch.uint8)


def _tokens(axis: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """A page is PAGE tokens on this axis."""
    return lambda buffer, page: buffer.narrow(axis, page * PAGE, PAGE)


def _rows(axis: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """A page is one row on this axis."""
    return lambda buffer, page: buffer.select(axis, page)


def _placed(pages: int, layers: int = LAYERS) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": PAGE,
        "pin_memory": False,
        "device_capacity_tokens": PAGE,
        "start_layer": 0,
        "end_layer": layers,
        "host_token_capacity": pages * PAGE,
    }


def mha(layout: str, *, heads: int = 2, size: int = 64, pages: int = PAGES) -> HostPool:
    """With a head size of 64, K of a page and layer takes 4,096 bytes."""
    device = MHATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=size,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    (info,) = device.get_device_pool_infos()
    pool = MHATokenToKVPoolHost(info.buffer_info, layout=layout, **_placed(pages))
    page_of = {
        "layer_first": _tokens(2),  # [K and V, layer, token, head, size]
        "page_first": _tokens(1),  # [K and V, token, layer, head, size]
        "page_first_direct": _rows(1),  # [K and V, page, layer, token of the page, head, size]
        "page_head": _rows(1),  # [K and V, page, head, token of the page, layer, size]
    }
    return HostPool(pool, [pool.kv_buffer], page_of[layout])


def uneven(layout: str) -> HostPool:
    """K and V of different sizes, in a tensor each."""
    device = MHATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=64,
        v_head_dim=128,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    (info,) = device.get_device_pool_infos()
    pool = AsymmetricMHATokenToKVPoolHost(info.buffer_info, layout=layout, **_placed(PAGES))
    page_of = {"page_first": _tokens(0), "page_first_direct": _rows(0)}
    return HostPool(pool, list(pool.kv_buffer), page_of[layout])


def mla(layout: str, *, rank: int = 128, rope: int = 128) -> HostPool:
    """With 128 + 128, a page and layer takes 8,192 bytes."""
    device = MLATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    (described,) = device.get_device_pool_infos()
    info = described.buffer_info
    if layout == "page_first_kv_split":  # that of an NPU
        index = torch.zeros((1, 2, PAGE, 1, rank), dtype=torch.bfloat16)
        split = MLASplitBuffers(
            k=None,
            v=None,
            index_k=index,
            index_scales=None,
            index_layer_indices=(1,),
            k_width=rank,
            v_width=rope,
            index_width=rank,
        )
        info = MLABufferInfo(
            buffers=split,
            data_ptrs=None,
            layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS,
            page_size=PAGE,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            kv_cache_dim=rank + rope,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
    pool = MLATokenToKVPoolHost(info, layout=layout, target_layer_num=LAYERS, **_placed(PAGES))
    page_of = {
        "layer_first": _tokens(1),  # [layer, token, 1, size]
        "page_first": _tokens(0),  # [token, layer, 1, size]
        "page_first_direct": _rows(0),  # [page, layer, token of the page, 1, size]
        "page_first_kv_split": _rows(0),  # the same, for latents, RoPE and index keys each
    }
    split_buffers = [pool.k_buffer, pool.v_buffer, pool.index_k_buffer] if "split" in layout else None
    return HostPool(pool, split_buffers or [pool.kv_buffer], page_of[layout])


def indexer(layout: str, *, token_bytes: int = 256) -> HostPool:
    """The index keys of sparse attention (DSA): one row of bytes a page and layer."""
    anchor = mla(layout).pool
    info = HostPoolStorageInfo(bytes_per_token_per_layer=token_bytes, dtype=torch.uint8)
    device = SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=LAYERS,
        layer_num=LAYERS,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[torch.zeros((2, info.page_bytes(PAGE)), dtype=torch.uint8)] * LAYERS,
    )
    described = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=info,
        host_pool_builder=None,
    )
    pool = DSAIndexerPoolHost(described, anchor, pin_memory=False)
    axis = 1 if layout == "layer_first" else 0  # [layer, page, bytes] or [page, layer, 1, bytes]
    return HostPool(pool, [pool.index_k_with_scale_buffer], _rows(axis))


def mamba(layout: str, *, state: int = 1024, beside: bool = False) -> HostPool:
    """One state a page: [page, layer, 1, *shape] for the temporal and for the convolution's states.

    `beside`: with rows of other states, which SGLang cannot name by addresses."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros((LAYERS, 2, state), dtype=torch.float32),
        conv=(torch.zeros((LAYERS, 2, state, 2), dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros((2, 24), dtype=torch.uint8),) if beside else (),
    )
    pool = MambaPoolHost(info, float(PAGES), 0, device_capacity=1, pin_memory=False, layout=layout)
    buffers = [pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers]
    return HostPool(pool, buffers, _rows(0), page_size=1)


# --- storages

Open = Callable[..., LMKVStorage]


def ranks(directory: Path | None, capacity: str = "64MiB", **changed: Any) -> HiCacheStorageConfig:
    """What SGLang tells a storage of its rank; `changed` are fields of it."""
    file = {"path": str(directory), "capacity": capacity}
    extra = {"backend_name": "lmkv", "interface_v1": 1, "lmkv": {"file": file}}
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": None,
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**fields | changed)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to check or to identify: there is no model."""
    monkeypatch.setattr(storage_module, "check_engine", lambda config: None)
    monkeypatch.setattr(storage_module, "engine_fields", lambda config: {"tenant": config.identity.tenant})
    monkeypatch.setattr(places, "TIER_DEADLINE_S", float(TIMEOUT_S))  # a busy machine is not a fault


@pytest.fixture
def open_storage(tmp_path: Path, no_engine: None) -> Iterator[Open]:
    """`open_storage(pools, **ranks)`: a storage with its pools ({name: HostPool}) registered."""
    opened: list[LMKVStorage] = []

    def open_one(pools: dict[PoolName, HostPool], **changed: Any) -> LMKVStorage:
        storage = LMKVStorage(ranks(tmp_path, **changed))
        opened.append(storage)
        storage.register_mem_pool_host(pools[PoolName.KV].pool)
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool.pool, name)
        storage.on_host_pools_registered()
        return storage

    yield open_one
    for storage in opened:
        storage.close()


def key(*parts: object) -> str:
    """A page hash, as SGLang makes them."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def keys(count: int, of: object = "a") -> list[str]:
    return [key(of, page) for page in range(count)]


def errors(storage: LMKVStorage) -> float:
    """Exceptions that were caught at the boundary."""
    return sum(value for (name, _), value in storage.metrics.values.items() if name == "lmkv_errors")


def counters(storage: LMKVStorage) -> dict[str, int]:
    """Of the one directory in use."""
    (tier,) = (place.tier for place in storage._files.values())
    return tier.stats().counters


def move(
    call: Callable[..., Any], name: PoolName, pool: HostPool, page_keys: list[str], pages: list[int]
) -> list[bool]:
    """`batch_get_v2` or `batch_set_v2` of one pool."""
    answer = call([PoolTransfer(name=name, host_indices=pool.indices(pages), keys=page_keys)])
    result: list[bool] = answer[name]
    return result


# --- layouts

MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split")
#: name: (how to make it, its pool, whether its pages are whole blocks of the disk, or None: by copy)
LAYOUTS: dict[str, tuple[Callable[[], HostPool], PoolName, bool | None]] = {
    **{f"mha {layout}": (lambda layout=layout: mha(layout), PoolName.KV, True) for layout in MHA},
    **{
        f"mha small {layout}": (lambda layout=layout: mha(layout, heads=1, size=20), PoolName.KV, False)
        for layout in MHA
    },
    **{f"mla {layout}": (lambda layout=layout: mla(layout), PoolName.KV, True) for layout in MLA},
    **{
        f"mla small {layout}": (lambda layout=layout: mla(layout, rank=20, rope=8), PoolName.KV, False)
        for layout in MLA
    },
    **{
        f"uneven {layout}": (lambda layout=layout: uneven(layout), PoolName.KV, True)
        for layout in ("page_first", "page_first_direct")
    },
    "indexer page_first": (lambda: indexer("page_first"), PoolName.INDEXER, True),
    "indexer page_first_direct": (lambda: indexer("page_first_direct"), PoolName.INDEXER, True),
    "indexer small page_first": (lambda: indexer("page_first", token_bytes=132), PoolName.INDEXER, False),
    "indexer layer_first": (lambda: indexer("layer_first"), PoolName.INDEXER, None),
    "mamba page_first": (lambda: mamba("page_first"), PoolName.MAMBA, True),
    "mamba small page_first_direct": (lambda: mamba("page_first_direct", state=6), PoolName.MAMBA, False),
    "mamba with other states": (lambda: mamba("page_first", beside=True), PoolName.MAMBA, None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_to_other_places_and_nothing_else_changes(open_storage: Open, layout: str) -> None:
    make, name, whole_blocks = LAYOUTS[layout]
    pool = make()
    pages = host_pages(pool.pool)
    assert isinstance(pages, PagesByCopy if whole_blocks is None else PagesInPlace)
    assert pages.in_place is bool(whole_blocks)
    pools = {PoolName.KV: pool} if name == PoolName.KV else {PoolName.KV: mha("page_first"), name: pool}
    storage = open_storage(pools)
    names, stored, loaded = keys(4), [7, 2, 3, 9], [1, 10, 4, 0]

    pool.fill(1)
    source = pool.contents()
    assert move(storage.batch_set_v2, name, pool, names, stored) == [True] * 4
    assert pool.holds(source)
    pool.fill(2)
    before = pool.contents()
    assert move(storage.batch_get_v2, name, pool, names, loaded) == [True] * 4
    assert pool.holds(pool.moved(before, source, dict(zip(loaded, stored, strict=True))))

    # And one page at a time.
    pool.fill(3)
    before = pool.contents()
    for page_key, target in zip(names, loaded, strict=True):
        assert move(storage.batch_get_v2, name, pool, [page_key], [target]) == [True]
    assert pool.holds(pool.moved(before, source, dict(zip(loaded, stored, strict=True))))
    assert (counters(storage)["bounced"] == 0) is bool(whole_blocks)
    assert errors(storage) == 0


def test_the_first_interface_is_the_second_with_the_kv_pool(open_storage: Open) -> None:
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    pool.fill(1)
    source = pool.contents()
    assert storage.batch_set_v1(keys(3), pool.indices([5, 6, 7])) == [True] * 3
    assert storage.batch_exists(keys(5)) == 3
    assert [storage.exists(name) for name in keys(4)] == [True, True, True, False]
    pool.fill(2)
    before = pool.contents()
    assert storage.batch_get_v1(keys(4), pool.indices([0, 1, 2, 3])) == [True, True, True, False]
    after = pool.moved(before, source, {0: 5, 1: 6, 2: 7})
    # What was not found left its page undefined.
    pool.page_of(pool.buffers[0], 3).copy_(pool.page_of(after[0].view(torch.bfloat16), 3))
    assert pool.holds(after)
    assert storage.metrics.get("lmkv_loaded_chunks", "file") == 3
    assert storage.metrics.get("lmkv_misses", "miss") == 1
    stats = storage.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([4], [3])
    stats = storage.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([], [])


def test_pages_that_are_stored_are_not_written_again(open_storage: Open) -> None:
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(4), pool.indices([0, 1, 2, 3])) == [True] * 4
    written = counters(storage)["written_bytes"]
    assert storage.batch_set_v1(keys(4), pool.indices([4, 5, 6, 7])) == [True] * 4
    assert counters(storage)["written_bytes"] == written
    assert storage.metrics.get("lmkv_stored_chunks", "file") == 4


@pytest.mark.parametrize("first, second", list(itertools.permutations(MHA, 2)))
def test_layouts_do_not_share_pages(open_storage: Open, first: str, second: str) -> None:
    """page_first, page_first_direct and page_head cut a page of one size into two pieces of one size."""
    pool = mha(first)
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(2), pool.indices([0, 1])) == [True] * 2
    storage.close()
    other = open_storage({PoolName.KV: mha(second)})
    assert other.batch_exists(keys(2)) == 0
    assert other.batch_get_v1(keys(2), pool.indices([0, 1])) == [False] * 2
    other.close()
    assert open_storage({PoolName.KV: mha(first)}).batch_exists(keys(2)) == 2


def test_pools_of_one_form_do_not_share_pages(open_storage: Open) -> None:
    pools = {PoolName.KV: mha("page_first"), PoolName.SWA: mha("page_first")}
    storage = open_storage(pools)
    assert move(storage.batch_set_v2, PoolName.KV, pools[PoolName.KV], keys(2), [0, 1]) == [True] * 2
    assert move(storage.batch_get_v2, PoolName.SWA, pools[PoolName.SWA], keys(2), [0, 1]) == [False] * 2


def test_a_pool_that_is_registered_late_is_served(open_storage: Open) -> None:
    storage = open_storage({PoolName.KV: mha("page_first")})
    late = mha("page_first_direct")
    assert move(storage.batch_set_v2, PoolName.SWA, late, keys(2), [0, 1]) == [False] * 2
    storage.register_mem_host_pool_v2(late.pool, PoolName.SWA)
    assert move(storage.batch_set_v2, PoolName.SWA, late, keys(2), [0, 1]) == [True] * 2


def test_all_pools_of_a_model_at_once(open_storage: Open) -> None:
    """KV, recurrent states and an indexer in one call, and what of them can be restored."""
    pools = {
        PoolName.KV: mla("page_first"),
        PoolName.INDEXER: indexer("page_first"),
        PoolName.MAMBA: mamba("page_first"),
    }
    storage = open_storage(pools)
    sources = {}
    for seed, (name, pool) in enumerate(pools.items()):
        pool.fill(seed)
        sources[name] = pool.contents()
    names = keys(6)
    stored = {PoolName.KV: [0, 1, 2, 3, 4], PoolName.INDEXER: [5, 6, 7, 8], PoolName.MAMBA: [2]}
    page_keys = {PoolName.KV: names[:5], PoolName.INDEXER: names[:4], PoolName.MAMBA: names[2:3]}

    def transfers(pages: dict[PoolName, list[int]]) -> list[PoolTransfer]:
        return [
            PoolTransfer(name=name, host_indices=pools[name].indices(pages[name]), keys=page_keys[name])
            for name in pools
        ]

    assert all(all(answer) for answer in storage.batch_set_v2(transfers(stored)).values())
    asked = [
        PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
        PoolTransfer(name=PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=names[:1]),
    ]
    found = storage.batch_exists_v2(names, asked)
    assert found.kv_hit_pages == 3
    assert found.restorable_prefix_pages == [3]
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.INDEXER: 4, PoolName.MAMBA: 3}

    loaded = {PoolName.KV: [7, 8, 9, 10, 11], PoolName.INDEXER: [0, 1, 2, 3], PoolName.MAMBA: [11]}
    before = {}
    for name, pool in pools.items():
        pool.fill(9)
        before[name] = pool.contents()
    assert all(all(answer) for answer in storage.batch_get_v2(transfers(loaded)).values())
    for name, pool in pools.items():
        where = dict(zip(loaded[name], stored[name], strict=True))
        assert pool.holds(pool.moved(before[name], sources[name], where))
    assert errors(storage) == 0


# --- what fails


def flip(directory: Path, content: bytes) -> None:
    """Damage the place in a segment file where `content` lies."""
    for segment in directory.rglob("*.seg"):
        place = segment.read_bytes().find(content)
        if place >= 0:
            with open(segment, "r+b") as file:
                file.seek(place + len(content) // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
                file.flush()
                os.fsync(file.fileno())
            return
    raise AssertionError("not found")


@pytest.mark.parametrize("heads, size", [(2, 64), (1, 20)])
def test_a_damaged_page_costs_one_page(open_storage: Open, tmp_path: Path, heads: int, size: int) -> None:
    pool = mha("page_first", heads=heads, size=size, pages=64)
    storage = open_storage({PoolName.KV: pool})
    pool.fill(1)
    source = pool.contents()
    names, damaged = keys(32), 17
    assert storage.batch_set_v1(names, pool.indices(range(32))) == [True] * 32
    flip(tmp_path, pool.page_of(source[0], damaged)[1].numpy().tobytes())  # its V

    pool.fill(2)
    before = pool.contents()
    expected = [page != damaged for page in range(32)]
    assert storage.batch_get_v1(names, pool.indices(range(32, 64))) == expected
    after = pool.moved(before, source, {32 + page: page for page in range(32) if page != damaged})
    now = pool.contents()
    for page in range(64):
        if page != 32 + damaged:
            assert torch.equal(pool.page_of(now[0], page), pool.page_of(after[0], page))
    assert storage.metrics.get("lmkv_misses", "corrupt") == 1
    assert storage.batch_exists(names) == damaged
    assert errors(storage) == 0

    # Computed and stored again, it is there again.
    pool.fill(1)
    assert storage.batch_set_v1(names[damaged:], pool.indices(range(damaged, 32))) == [True] * 15
    assert storage.batch_exists(names) == 32
    assert storage.batch_get_v1(names, pool.indices(range(32, 64))) == [True] * 32
    assert pool.holds(pool.moved(pool.contents(), source, {32 + page: page for page in range(32)}))


@pytest.mark.parametrize("malformed", ["d:" + key("x"), "not hex", "", "ab", key("x") + "00", None, 7])
def test_a_malformed_key_is_a_counted_miss(open_storage: Open, malformed: Any) -> None:
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    names = [*keys(2), malformed]
    calls: list[tuple[Callable[[], Any], Any]] = [
        (lambda: storage.batch_set_v1(names, pool.indices([0, 1, 2])), [False] * 3),
        (lambda: storage.batch_get_v1(names, pool.indices([0, 1, 2])), [False] * 3),
        (lambda: storage.batch_exists(names), 0),
        (lambda: storage.batch_exists(names, extra_info=None), 0),
        (lambda: storage.exists(malformed), False),
        (lambda: storage.exists(key=malformed), False),
        (lambda: storage.batch_exists_v2(names), compat.pages_found(0, {}, [])),
        (lambda: storage.batch_exists_v2(names, pool_transfers=None), compat.pages_found(0, {}, [])),
    ]
    for count, (call, answer) in enumerate(calls, start=1):
        assert call() == answer
        assert errors(storage) == count
    # It harms nobody else.
    assert storage.batch_set_v1(keys(2), pool.indices([0, 1])) == [True] * 2
    assert storage.batch_exists(keys(2)) == 2


@pytest.mark.parametrize("tokens", [0, 1, 2 * PAGE - 1, 2 * PAGE + 1, 3 * PAGE])
def test_wrong_numbers_of_indices_are_counted_misses(open_storage: Open, tokens: int) -> None:
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(2), pool.indices([0, 1])) == [True] * 2
    pool.fill(5)
    before = pool.contents()
    indices = torch.arange(tokens)
    assert storage.batch_set_v1(keys(2, "b"), indices) == [False] * 2
    assert storage.batch_get_v1(keys(2), indices) == [False] * 2
    assert errors(storage) == 2
    assert storage.batch_exists(keys(2, "b")) == 0
    assert pool.holds(before)


def test_empty_and_foreign_batches(open_storage: Open) -> None:
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_get_v1([], torch.arange(0)) == storage.batch_set_v1([], torch.arange(0)) == []
    assert storage.batch_exists([]) == 0
    unknown = PoolTransfer(name=PoolName.DRAFT, host_indices=pool.indices([0]), keys=keys(1))
    assert storage.batch_get_v2([unknown]) == storage.batch_set_v2([unknown]) == {PoolName.DRAFT: [False]}
    no_indices = PoolTransfer(name=PoolName.KV, keys=keys(1))
    assert storage.batch_get_v2([no_indices]) == {PoolName.KV: [False]}
    assert storage.batch_get_v1(keys(2), pool.indices([0, 1])) == [False] * 2


def failing(*_: Any) -> int:
    raise OSError(errno.EIO, "injected")


class Clock:
    """A clock for the storage that can be set forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0.0
        now = time.monotonic
        clock = SimpleNamespace(monotonic=lambda: now() + self.passed)
        monkeypatch.setattr(places, "time", clock)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_is_left_alone_for_a_while(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("lmkv.executor.FIRST_BACKOFF_S", 3000.0)
    monkeypatch.setattr("lmkv.executor.MAX_BACKOFF_S", 3000.0)
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(4), pool.indices([0, 1, 2, 3])) == [True] * 4
    with monkeypatch.context() as fault:
        fault.setattr(file_tier.os, call, failing)
        if call == "preadv":
            assert storage.batch_get_v1(keys(4), pool.indices([4, 5, 6, 7])) == [False] * 4
            assert storage.metrics.get("lmkv_misses", "unavailable") == 4
        else:
            assert storage.batch_set_v1(keys(4, "b"), pool.indices([4, 5, 6, 7])) == [False] * 4
            assert storage.metrics.get("lmkv_skipped_stores", "unavailable") == 4
    (place,) = storage._files.values()
    assert place.breaker.trips == 1
    # The disk works again, but nobody asks it before the time is over.
    before = counters(storage)
    assert storage.batch_exists(keys(4)) == 0
    assert storage.batch_exists_v2(keys(4)).kv_hit_pages == 0
    assert storage.batch_get_v1(keys(4), pool.indices([4, 5, 6, 7])) == [False] * 4
    assert storage.batch_set_v1(keys(4, "c"), pool.indices([4, 5, 6, 7])) == [False] * 4
    assert counters(storage) == before
    clock.passed = 3001.0
    assert storage.batch_exists(keys(4)) == 4
    assert storage.batch_get_v1(keys(4), pool.indices([4, 5, 6, 7])) == [True] * 4
    assert storage.batch_set_v1(keys(4, "c"), pool.indices([4, 5, 6, 7])) == [True] * 4
    assert errors(storage) == 0


def test_a_tier_that_raises_costs_its_batch(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(2), pool.indices([0, 1])) == [True] * 2
    (tier,) = (place.tier for place in storage._files.values())
    with monkeypatch.context() as fault:
        for name in ("get", "put", "contains"):
            fault.setattr(tier, name, failing)
        assert storage.batch_get_v1(keys(2), pool.indices([2, 3])) == [False] * 2
        assert storage.batch_set_v1(keys(2, "b"), pool.indices([2, 3])) == [False] * 2
        assert storage.batch_exists(keys(2)) == 0
    assert errors(storage) == 3


def test_while_a_read_hangs_nothing_new_is_begun(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(2), pool.indices([0, 1])) == [True] * 2
    begun, go_on, preadv = threading.Event(), threading.Event(), os.preadv

    def hanging(*args: Any) -> int:
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        return preadv(*args)

    monkeypatch.setattr(file_tier.os, "preadv", hanging)
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(storage.batch_get_v1, keys(2), pool.indices([2, 3]))
        try:
            assert begun.wait(TIMEOUT_S)
            assert storage.batch_exists(keys(2)) == 2  # it is not overdue yet
            clock.passed = 100.0
            assert storage.batch_exists(keys(2)) == 0
            assert storage.batch_set_v1(keys(2, "b"), pool.indices([4, 5])) == [False] * 2
            assert not read.done()
        finally:
            go_on.set()
        assert read.result(TIMEOUT_S) == [True] * 2
    assert storage.batch_exists(keys(2)) == 2  # it works: no need to wait any longer


# --- system calls


def test_a_batch_of_adjacent_pages_is_a_system_call_a_thread(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 128
    pool = mha("page_first", heads=4, size=128, pages=2 * count)
    storage = open_storage({PoolName.KV: pool}, capacity="512MiB")
    assert host_pages(pool.pool).page_bytes == 64 * 1024
    calls: list[str] = []
    for name in ("preadv", "pwritev"):
        original = getattr(os, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(file_tier.os, name, counted)
    pool.fill(1)
    source = pool.contents()
    assert storage.batch_set_v1(keys(count), pool.indices(range(count))) == [True] * count
    assert calls == ["pwritev"]
    before = pool.contents()
    assert storage.batch_get_v1(keys(count), pool.indices(range(count, 2 * count))) == [True] * count
    assert calls == ["pwritev"] + ["preadv"] * storage_module.READ_THREADS
    assert pool.holds(pool.moved(before, source, {count + page: page for page in range(count)}))
    assert counters(storage)["bounced"] == 0


# --- threads


class Recorded:
    """Between a storage and its tier: notes what was written under each key, and that a page which is read
    is one of those."""

    def __init__(self, tier: Any) -> None:
        self._put, self._get = tier.put, tier.get
        self.written: dict[bytes, set[bytes]] = {}
        self.read = 0
        self.wrong: list[bytes] = []
        self._lock = threading.Lock()
        tier.put, tier.get = self.put, self.get

    @staticmethod
    def _digest(buffer: Any) -> bytes:
        return hashlib.sha256(b"".join(buffer)).digest()

    def put(self, tier_keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        with self._lock:
            for tier_key, buffer in zip(tier_keys, buffers, strict=True):
                self.written.setdefault(tier_key, set()).add(self._digest(buffer))
        answer: list[Status] = self._put(tier_keys, buffers)
        return answer

    def get(self, tier_keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        answer: list[Status] = self._get(tier_keys, buffers)
        with self._lock:
            for tier_key, buffer, status in zip(tier_keys, buffers, answer, strict=True):
                if status is Status.OK:
                    self.read += 1
                    if self._digest(buffer) not in self.written.get(tier_key, ()):
                        self.wrong.append(tier_key)
        return answer


def pattern(number: int, size: int) -> torch.Tensor:
    """The bytes of the page with this number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


ROUNDS = 40
BATCH = 4
NUMBERS = 24


def test_queries_reads_and_writes_at_once(open_storage: Open) -> None:
    pool = mha("page_first", pages=16 * BATCH)
    storage = open_storage({PoolName.KV: pool})
    (tier,) = (place.tier for place in storage._files.values())
    recorded = Recorded(tier)
    size = pool.page_of(_raw(pool.buffers[0]), 0).numel()
    patterns = [pattern(number, size) for number in range(NUMBERS)]
    writers = [0, 2, 7]
    writing, true_reads = set(writers), itertools.count()

    def numbers(thread: int, turn: int) -> list[int]:
        return [(thread * 5 + turn * 3 + place) % NUMBERS for place in range(BATCH)]

    def page_bytes(page: int) -> torch.Tensor:
        return pool.page_of(_raw(pool.buffers[0]), page)

    def write(thread: int) -> None:
        mine = [thread * BATCH + place for place in range(BATCH)]
        for turn in range(ROUNDS):
            for page, number in zip(mine, numbers(thread, turn), strict=True):
                page_bytes(page).copy_(patterns[number].view_as(page_bytes(page)))
            stored = storage.batch_set_v1([key(n) for n in numbers(thread, turn)], pool.indices(mine))
            assert stored == [True] * BATCH
        writing.discard(thread)

    def read(thread: int, turn: int) -> None:
        mine = [thread * BATCH + place for place in range(BATCH)]
        wanted = numbers(thread, turn)
        found = storage.batch_get_v1([key(n) for n in wanted], pool.indices(mine))
        for page, number, there in zip(mine, wanted, found, strict=True):
            if there:
                next(true_reads)
                assert torch.equal(page_bytes(page).flatten(), patterns[number])

    def query(thread: int, turn: int) -> None:
        names = [key(n) for n in numbers(thread, turn)]
        assert 0 <= storage.batch_exists(names) <= BATCH
        found = storage.batch_exists_v2(names, [PoolTransfer(name=PoolName.KV)])
        assert found.restorable_prefix_pages == list(range(1, found.kv_hit_pages + 1))
        storage.get_stats()

    def forget(thread: int, turn: int) -> None:
        storage.forget("a test") if turn % 2 else storage.clear()
        time.sleep(0.02)

    def beside(call: Callable[[int, int], None], thread: int) -> None:
        for turn in itertools.count():
            call(thread, turn)
            if not writing:
                return

    with ThreadPoolExecutor(9) as threads:
        jobs = [threads.submit(write, thread) for thread in writers]
        others = {1: read, 3: read, 4: query, 5: forget, 6: query, 8: read}
        jobs += [threads.submit(beside, call, thread) for thread, call in others.items()]
        try:
            for job in jobs:
                job.result(TIMEOUT_S)
        finally:
            writing.clear()
    # And in peace: what is written now is all there.
    write(0)
    for turn in range(ROUNDS):
        read(1, turn)
    assert recorded.wrong == []
    assert recorded.read == next(true_reads) >= ROUNDS * BATCH
    assert errors(storage) == 0


def test_what_was_stored_before_forget_is_not_served(open_storage: Open) -> None:
    pool = mha("page_first")
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(2), pool.indices([0, 1])) == [True] * 2
    live.forget_all("a test")
    assert storage.batch_exists(keys(2)) == 0
    assert storage.batch_get_v1(keys(2), pool.indices([0, 1])) == [False] * 2
    assert storage.batch_set_v1(keys(2), pool.indices([2, 3])) == [True] * 2
    assert storage.batch_exists(keys(2)) == 2
    storage.close()
    # Others go on sharing what was there before.
    assert open_storage({PoolName.KV: mha("page_first")}).batch_exists(keys(2)) == 2


def test_close_while_it_is_used(open_storage: Open) -> None:
    pool = mha("page_first", pages=3 * BATCH)
    storage = open_storage({PoolName.KV: pool})
    assert storage.batch_set_v1(keys(BATCH), pool.indices(range(BATCH))) == [True] * BATCH
    started = threading.Barrier(4)
    closed = threading.Event()

    def use(call: Callable[[int], Any], nothing: Any) -> None:
        started.wait(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        for turn in itertools.count():
            was_closed = closed.is_set()
            answer = call(turn)
            if was_closed:
                assert answer == nothing
                return
            assert time.monotonic() < deadline

    def get(turn: int) -> list[bool]:
        return storage.batch_get_v1(keys(BATCH), pool.indices(range(BATCH, 2 * BATCH)))

    def put(turn: int) -> list[bool]:
        return storage.batch_set_v1(keys(BATCH, turn), pool.indices(range(2 * BATCH, 3 * BATCH)))

    def query(turn: int) -> int:
        return storage.batch_exists(keys(BATCH))

    with ThreadPoolExecutor(3) as threads:
        jobs = [
            threads.submit(use, call, nothing)
            for call, nothing in ((get, [False] * BATCH), (put, [False] * BATCH), (query, 0))
        ]
        started.wait(TIMEOUT_S)
        time.sleep(0.1)
        storage.close()
        closed.set()
        for job in jobs:
            job.result(TIMEOUT_S)
    storage.close()
    again = open_storage({PoolName.KV: pool})
    assert again.batch_exists(keys(BATCH)) == BATCH


# --- ranks and their directories


@pytest.mark.parametrize(
    "fields, replicated, name, directories, writes",
    [
        ({}, False, "tp0of1", 1, True),
        ({"tp_rank": 1, "tp_size": 2}, False, "tp1of2", 2, True),
        ({"tp_rank": 1, "tp_size": 2}, True, "replicated", 1, False),
        ({"tp_rank": 0, "tp_size": 2}, True, "replicated", 1, True),
        ({"pp_rank": 1, "pp_size": 2}, False, "tp0of1-pp1of2", 2, True),
        (
            {"tp_rank": 3, "tp_size": 4, "pp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 2},
            False,
            "tp3of4-pp0of2-cp1of2",
            16,
            True,
        ),
        ({"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2}, True, "replicated-pp1of2", 2, False),
    ],
)
def test_scopes(fields: dict[str, int], replicated: bool, name: str, directories: int, writes: bool) -> None:
    scope = scope_of(ranks(None, **fields), replicated=replicated)
    assert (scope.name, scope.directories, scope.writes) == (name, directories, writes)


def test_data_parallel_ranks_share_a_directory(open_storage: Open, tmp_path: Path) -> None:
    pools = [mha("page_first"), mha("page_first")]
    first, second = (open_storage({PoolName.KV: pool}, dp_rank=rank) for rank, pool in enumerate(pools))
    for pool in pools:  # both compute the same
        pool.fill(1)
    source = pools[0].contents()
    assert first.batch_set_v1(keys(3), pools[0].indices([0, 1, 2])) == [True] * 3
    assert second.batch_set_v1(keys(5), pools[1].indices([0, 1, 2, 3, 4])) == [True] * 5
    # One more each: a chunk that was stored at the start, to try the tier.
    assert (counters(first)["put_chunks"], counters(second)["put_chunks"]) == (1 + 3, 1 + 2)
    deadline = time.monotonic() + TIMEOUT_S
    while first.batch_exists(keys(5)) < 5:  # news are looked for twice a second
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pools[0].fill(2)
    before = pools[0].contents()
    assert first.batch_get_v1(keys(5)[3:], pools[0].indices([8, 9])) == [True] * 2
    assert pools[0].holds(pools[0].moved(before, source, {8: 3, 9: 4}))
    assert [folder.name for folder in (tmp_path / "sglang").iterdir()] == ["tp0of1"]


def test_ranks_divide_the_capacity_and_share_nothing(open_storage: Open, tmp_path: Path) -> None:
    pools = [mha("page_first"), mha("page_first")]
    storages = [
        open_storage({PoolName.KV: pool}, tp_rank=rank, tp_size=2, capacity="128MiB")
        for rank, pool in enumerate(pools)
    ]
    for rank, (pool, storage) in enumerate(zip(pools, storages, strict=True)):
        pool.fill(rank)
        source = pool.contents()
        # The other rank has stored under this name already, and differs.
        assert storage.batch_exists(keys(1)) == 0
        assert storage.batch_set_v1(keys(1), pool.indices([3])) == [True]
        pool.fill(rank + 10)
        before = pool.contents()
        assert storage.batch_get_v1(keys(1), pool.indices([0])) == [True]
        assert pool.holds(pool.moved(before, source, {0: 3}))
        (tier,) = (place.tier for place in storage._files.values())
        assert tier.info.capacity_bytes == 64 << 20
    assert sorted(folder.name for folder in (tmp_path / "sglang").iterdir()) == ["tp0of2", "tp1of2"]
    namespaces = {storage._ready["kv"].namespace.digest for storage in storages}
    assert len(namespaces) == 2


def test_what_all_ranks_hold_alike_is_written_by_one_and_read_by_all(
    open_storage: Open, tmp_path: Path
) -> None:
    writer, reader = mla("page_first"), mla("page_first")
    first = open_storage({PoolName.KV: writer}, tp_rank=0, tp_size=2, is_mla_model=True)
    second = open_storage({PoolName.KV: reader}, tp_rank=1, tp_size=2, is_mla_model=True)
    writer.fill(1)
    source = writer.contents()
    assert second.batch_set_v1(keys(2), reader.indices([0, 1])) == [False] * 2
    assert first.batch_set_v1(keys(2), writer.indices([4, 5])) == [True] * 2
    deadline = time.monotonic() + TIMEOUT_S
    while second.batch_exists(keys(2)) < 2:  # a reader looks for news twice a second
        assert time.monotonic() < deadline
        time.sleep(0.05)
    reader.fill(2)
    before = reader.contents()
    assert second.batch_get_v1(keys(2), reader.indices([8, 9])) == [True] * 2
    assert reader.holds(reader.moved(before, source, {8: 4, 9: 5}))
    assert second.batch_set_v1(keys(2), reader.indices([8, 9])) == [True] * 2
    assert second.batch_set_v1(keys(2, "b"), reader.indices([8, 9])) == [False] * 2
    assert [folder.name for folder in (tmp_path / "sglang").iterdir()] == ["replicated"]
    # The writer is gone, and this rank still does not take its place.
    first.close()
    assert second.batch_set_v1(keys(2, "b"), reader.indices([8, 9])) == [False] * 2


def test_recurrent_state_beside_replicated_kv_is_divided(open_storage: Open, tmp_path: Path) -> None:
    storage = open_storage(
        {PoolName.KV: mla("page_first"), PoolName.MAMBA: mamba("page_first")},
        tp_rank=1,
        tp_size=2,
        is_mla_model=True,
        capacity="256MiB",
    )
    assert {scope.name: place.tier.info.capacity_bytes >> 20 for scope, place in storage._files.items()} == {
        "replicated": 128,
        "tp1of2": 64,
    }


def test_too_small_a_share_is_refused_with_its_reason(open_storage: Open) -> None:
    with pytest.raises(ConfigError, match=r"67108864 bytes leave 8388608 for the directory of each rank"):
        open_storage({PoolName.KV: mha("page_first")}, tp_size=8)


def test_a_page_larger_than_a_segment_is_refused(open_storage: Open) -> None:
    with pytest.raises(ConfigError, match="--page-size") as refused:
        open_storage({PoolName.KV: mha("page_first", heads=64, size=4096, pages=1)})
    assert refused.value.setting == "[file] capacity"


# --- refusals


def refused(call: Callable[..., Any], *args: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        call(*args)
    return error.value


def extra(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    return {"interface_v1": 1, "lmkv": {"file": {"path": str(tmp_path)}}} | changed


def test_settings_that_are_refused(tmp_path: Path) -> None:
    assert checks.storage_settings(extra(tmp_path)).file.path == str(tmp_path)
    assert refused(checks.storage_settings, extra(tmp_path, lmkv={})).setting == "[file] path"
    for given in (None, {}, extra(tmp_path, interface_v1=0)):
        assert "interface_v1 is not set" in str(refused(checks.storage_settings, given))
    assert refused(checks.storage_settings, extra(tmp_path, bckend=1)).setting.endswith(": bckend")
    assert refused(checks.storage_settings, extra(tmp_path, path="x")).setting.endswith(": path")
    wrong = {"file": {"path": str(tmp_path), "capcity": "1GiB"}}
    assert refused(checks.storage_settings, extra(tmp_path, lmkv=wrong)).setting == "[file] capcity"
    assert refused(checks.linker_settings, {"interface_v1": 1}).setting.endswith(": interface_v1")


@pytest.mark.parametrize("tokens, fine", [(1, False), (15, False), (16, True), (64, True)])
def test_page_sizes(tokens: int, fine: bool) -> None:
    if fine:
        checks.check_page_size(tokens)
    else:
        assert refused(checks.check_page_size, tokens).setting == "--page-size"


def test_shapes_that_are_refused(open_storage: Open, tmp_path: Path) -> None:
    assert refused(open_storage, {PoolName.KV: mamba("page_first")}).setting == "--page-size"
    split = refused(lambda: LMKVStorage(ranks(tmp_path, tp_lcm_size=4)))
    assert split.setting.endswith("tp_lcm_size")
    empty = SimpleNamespace(page_size=64, kv_buffer=None)
    assert refused(open_storage, {PoolName.KV: HostPool(empty, [], _rows(0))}).setting == "--model-path"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An engine that is fine: flags, model, and lmkv's plugin."""
    described = SimpleNamespace(
        server=SimpleNamespace(lora_paths=None, pp_size=1, dp_size=1),
        model=SimpleNamespace(is_multimodal=False),
    )
    monkeypatch.setattr(compat, "server_args", lambda: described.server)
    monkeypatch.setattr(compat, "model_config", lambda: described.model)
    monkeypatch.setattr(live, "watched", lambda: True)
    return described


def settings(**sglang: Any) -> Config:
    return checks.linker_settings({"lmkv": {"sglang": sglang}})


def test_hashes_without_a_salt_need_a_promise(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.check_engine(settings())
    monkeypatch.setattr(compat, "HASH_HAS_SALT", False)
    assert refused(checks.check_engine, settings()).setting == "[sglang] single_tenant"
    checks.check_engine(settings(single_tenant=True))
    engine.server.lora_paths = ["an adapter"]
    assert refused(checks.check_engine, settings(single_tenant=True)).setting == "--lora-paths"
    monkeypatch.setattr(compat, "HASH_HAS_SALT", True)
    checks.check_engine(settings())


def test_engines_that_are_refused(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.model.is_multimodal = True
    assert refused(checks.check_engine, settings()).setting == "--model-path"
    engine.model.is_multimodal = False
    monkeypatch.setattr(live, "watched", lambda: False)
    assert refused(checks.check_engine, settings()).setting == "SGLANG_PLUGINS"


def test_linkers_that_are_refused(engine: SimpleNamespace) -> None:
    checks.check_linker(settings(), engine.server)
    engine.server.dp_size = 2
    assert refused(checks.check_linker, settings(), engine.server).setting == "[host] capacity"
    given = checks.linker_settings({"lmkv": {"host": {"capacity": "1GiB"}}})
    checks.check_linker(given, engine.server)
    engine.server.pp_size = 2
    assert refused(checks.check_linker, given, engine.server).setting == "--pp-size"
    engine.server.dcp_size = 2
    assert refused(checks.check_linker, given, engine.server).setting == "--dcp-size"
