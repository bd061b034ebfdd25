"""Which prefixes `batch_exists_v2` offers: for any pattern of pages that are there and missing, what SGLang's
docstrings say, and what its own HiCacheFile answers."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer

from lmkv.connectors.sglang import LMKVStorage
from lmkv.connectors.sglang.policies import leading, windows
from lmkv.metrics import RateLimitedLog, SharedMetrics

Pages = list[bool]
POLICIES = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
SIDE_POOLS = (PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER, PoolName.DRAFT)

pages = st.lists(st.booleans(), max_size=12)
#: Mostly there, so that prefixes get long.
mostly = st.lists(st.sampled_from([True, True, True, False]), min_size=12, max_size=12)


class InMemory(LMKVStorage):
    """Its queries, over pages that are said to be there."""

    def __init__(self, present: dict[str, Pages]) -> None:
        self.metrics, self.log = SharedMetrics(), RateLimitedLog()
        self._gate = None
        self.present = present

    def _places_of(self, name: str, keys: Sequence[str]) -> list[Any]:
        there = self.present.get(name, [])
        return [self if page < len(there) and there[page] else None for page in map(int, keys)]


def names(count: int) -> list[str]:
    """Keys: the number of the page."""
    return [str(page) for page in range(count)]


def transfer(name: PoolName, policy: PoolHitPolicy, window: int | None) -> PoolTransfer:
    """SGLang says how many trailing pages it needs by as many keys."""
    return PoolTransfer(name=name, hit_policy=policy, keys=None if window is None else names(window))


def allowed(kv_pages: int, present: Pages, policy: PoolHitPolicy, window: int) -> set[int]:
    """ "all_pages": every page in [0, n) must exist; "trailing_pages": only the last `window` pages of it."""
    lengths = range(1, kv_pages + 1)
    if policy == PoolHitPolicy.ALL_PAGES:
        return {n for n in lengths if all(present[:n])}
    return {n for n in lengths if all(present[max(0, n - window) : n])}


@given(present=pages)
def test_leading(present: Pages) -> None:
    count = leading(present)
    assert all(present[:count])
    assert count == len(present) or not present[count]


@given(present=pages, window=st.integers(1, 15), data=st.data())
def test_windows(present: Pages, window: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(0, len(present)))
    assert windows(present, window, limit) == allowed(limit, present, PoolHitPolicy.TRAILING_PAGES, window)


side_pools = st.lists(
    st.tuples(
        st.sampled_from(SIDE_POOLS),
        st.sampled_from(POLICIES),
        st.one_of(st.none(), st.integers(0, 15)),
        st.one_of(mostly, st.lists(st.booleans(), min_size=12, max_size=12)),
    ),
    max_size=4,
    unique_by=lambda pool: pool[0],
)


@given(kv=st.one_of(pages, mostly), pools=side_pools)
def test_any_pattern_in_any_pools(
    kv: Pages, pools: list[tuple[PoolName, PoolHitPolicy, int | None, Pages]]
) -> None:
    storage = InMemory({"kv": kv} | {str(name): present for name, _, _, present in pools})
    asked = [transfer(name, policy, window) for name, policy, window, _ in pools]
    found = storage.batch_exists_v2(names(len(kv)), asked)

    kv_pages = next((page for page, there in enumerate(kv) if not there), len(kv))
    lengths = set(range(1, kv_pages + 1))
    hits: dict[PoolName, int] = {PoolName.KV: kv_pages} if kv_pages else {}
    for name, policy, window, present in pools:
        ours = allowed(kv_pages, present, policy, max(1, window or 0))
        lengths &= ours
        if ours:
            hits[name] = max(ours)
    assert found.restorable_prefix_pages == sorted(lengths)
    assert found.kv_hit_pages == max(lengths, default=0)
    assert found.extra_pool_hit_pages == hits

    theirs = reference(storage.present).batch_exists_v2(names(len(kv)), asked)
    assert found.restorable_prefix_pages == theirs.restorable_prefix_pages
    assert found.kv_hit_pages == theirs.kv_hit_pages
    # SGLang's looks at no further pool once nothing is left to restore.
    assert theirs.extra_pool_hit_pages.items() <= found.extra_pool_hit_pages.items()


def reference(present: dict[str, Pages]) -> Any:
    """SGLang's file backend, over pages that are said to be there."""
    backend = HiCacheFile.__new__(HiCacheFile)
    backend._get_component_key = lambda key, name=PoolName.KV: f"{name}/{key}"
    backend._collect_existing_component_keys = lambda *_: {
        f"{name}/{page}.bin"
        for name, there in present.items()
        for page, is_there in enumerate(there)
        if is_there
    }
    return backend


@given(kv=mostly, side=mostly, keys=st.integers(0, 12))
def test_a_policy_that_is_not_known_never_claims_a_page(kv: Pages, side: Pages, keys: int) -> None:
    storage = InMemory({"kv": kv, "swa": side})
    for policy in (PoolHitPolicy.BLOCK_GROUPS, SimpleNamespace(value="of a later version")):
        asked = [PoolTransfer(name=PoolName.SWA, hit_policy=policy, keys=names(keys))]
        found = storage.batch_exists_v2(names(len(kv)), asked)
        assert found.kv_hit_pages == 0
        assert found.restorable_prefix_pages == []
        assert PoolName.SWA not in found.extra_pool_hit_pages


@given(kv=pages)
def test_without_other_pools_it_is_batch_exists(kv: Pages) -> None:
    storage = InMemory({"kv": kv})
    for pools in (None, []):
        found = storage.batch_exists_v2(names(len(kv)), pools)
        assert found.kv_hit_pages == storage.batch_exists(names(len(kv))) == leading(kv)
        assert found.restorable_prefix_pages == list(range(1, leading(kv) + 1))


@pytest.mark.parametrize("pool", ["kv", "swa"])
def test_a_pool_that_nobody_registered_offers_nothing(pool: str) -> None:
    storage = InMemory({pool: [True] * 4})
    asked = [transfer(PoolName.SWA, PoolHitPolicy.TRAILING_PAGES, 1)]
    assert storage.batch_exists_v2(names(4), asked).kv_hit_pages == 0


@given(stored=st.lists(st.booleans(), min_size=6, max_size=6), window=st.integers(1, 4))
def test_hicache_file_on_a_disk_agrees(stored: Pages, window: int) -> None:
    """The reference above, with SGLang's real files."""
    with tempfile.TemporaryDirectory() as folder:
        backend = HiCacheFile.__new__(HiCacheFile)
        backend.file_path, backend.metadata_cache = folder, None
        backend.config_suffix = backend.tp_config_suffix = "_rank"
        backend._get_suffixed_key = lambda key: f"{key}_rank"
        for page in range(6):
            Path(folder, f"{page}_rank.bin").touch()
            if stored[page]:
                Path(folder, f"{page}.swa_rank.bin").touch()
        asked = [transfer(PoolName.SWA, PoolHitPolicy.TRAILING_PAGES, window)]
        theirs = backend.batch_exists_v2(names(6), asked)
    ours = InMemory({"kv": [True] * 6, "swa": stored}).batch_exists_v2(names(6), asked)
    assert ours == theirs
