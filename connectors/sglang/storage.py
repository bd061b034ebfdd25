"""lmkv as the storage below SGLang's host pool (`--hicache-storage-backend dynamic`).

SGLang decides what is read and written and when; lmkv moves the pages of a batch between the host pool and
the tiers below and verifies each. A page is a chunk; its key is the namespace of its pool and SGLang's page
hash, which chains over the whole prefix.

SGLang calls from several threads: one that queries, one that reads, one that writes, and its scheduler.
Calls wait for their I/O, because it goes straight into and out of the pool's memory, which SGLang reuses
afterwards.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from lmkv import __version__
from lmkv.below import READ_BATCH_BYTES, READ_THREADS, WRITE_BATCH_BYTES, WRITE_THREADS
from lmkv.boundary import guarded
from lmkv.canary import check_tier
from lmkv.chain import open_redis
from lmkv.connectors.sglang import compat, live
from lmkv.connectors.sglang.checks import (
    check_engine,
    check_page_size,
    check_pool,
    check_storage,
    storage_settings,
)
from lmkv.connectors.sglang.identity import engine_fields, pool_namespace, renewed
from lmkv.connectors.sglang.pages import HostPages, host_pages
from lmkv.connectors.sglang.places import Place
from lmkv.connectors.sglang.policies import leading, windows
from lmkv.connectors.sglang.scopes import Scope, open_scope, scope_of
from lmkv.executor import SWITCH_INTERVAL_S
from lmkv.keys import GROUP_BYTES, Namespace
from lmkv.metrics import RateLimitedLog, SharedMetrics
from lmkv.tier import Buffer, Status

logger = logging.getLogger(__name__)

#: A pool has a namespace of its own, so the group in its keys is always this one.
_GROUP = bytes(GROUP_BYTES)
_KV = "kv"
_MAMBA = "mamba"
#: Below this, a part is read sooner than another thread has begun.
_MIN_PART_BYTES = 1 << 20
#: Batches kept for SGLang's histograms until it asks, every few seconds.
_MAX_COUNTED = 4096


class _Ready(NamedTuple):
    """A registered pool that pages can be moved from and to."""

    pages: HostPages
    #: In the order in which they are asked.
    places: tuple[Place, ...]
    namespace: Namespace


#: Moves one part of a batch; a status a page.
_Mover = Callable[[_Ready, Sequence[str], torch.Tensor], list[Status]]


def _all_unavailable(ready: _Ready, keys: Sequence[str], indices: torch.Tensor) -> list[Status]:
    return [Status.UNAVAILABLE] * len(keys)


class LMKVStorage(HiCacheStorage):
    """Settings: docs/configuration.md. Refuses what it cannot serve, by name, before SGLang serves."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """`storage_config`: SGLang's `HiCacheStorageConfig` of this rank. Raises ConfigError."""
        if warning := compat.check_version():
            logger.warning("lmkv: %s", warning)
        self.metrics = SharedMetrics()
        self.log = RateLimitedLog()
        self._ranks = storage_config
        self._config = storage_settings(storage_config.extra_config)
        check_engine(self._config)
        check_storage(storage_config)
        self._fields = engine_fields(self._config)
        self._gate = live.gate if self._config.sglang.gate else None
        self._pools: dict[str, Any] = {}
        self._ready: dict[str, _Ready] = {}
        self._files: dict[Scope, Place] = {}
        self._redis = open_redis(self._config)
        self._servers: dict[bool, Place] = {}  # the Redis tier, by whether this rank stores there
        self._reads = ThreadPoolExecutor(READ_THREADS, "lmkv-read")
        self._writes = ThreadPoolExecutor(WRITE_THREADS, "lmkv-write")
        #: (pages, bytes, seconds) of each batch that was read or written since SGLang last asked.
        self._read_batches: deque[tuple[int, int, float]] = deque(maxlen=_MAX_COUNTED)
        self._written_batches: deque[tuple[int, int, float]] = deque(maxlen=_MAX_COUNTED)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        live.add(self)

    # --- pools ----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's own host pool of KV. Raises ConfigError."""
        super().register_mem_pool_host(mem_pool_host)
        check_page_size(mem_pool_host.page_size)
        self._pools[_KV] = mem_pool_host
        if not compat.ANNOUNCES_POOLS:
            self._open()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside the KV (a sliding window, recurrent state, an indexer). Raises ConfigError."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        # The KV comes again under its name in a group of pools: what was registered first is the same.
        self._pools.setdefault(str(host_pool_name), host_pool)
        if self._ready:  # registered after the others
            self._open()

    def on_host_pools_registered(self) -> None:
        """All pools are known. Raises ConfigError."""
        self._open()

    def _open(self) -> None:
        """Open the directories and name the pools that are new."""
        scopes = {name: self._scope(name, pool) for name, pool in self._pools.items()}
        parts = len({scope.replicated for scope in scopes.values()})
        for name, pool in self._pools.items():
            if name in self._ready:
                continue
            check_pool(name, pool)
            pages, scope = host_pages(pool), scopes[name]
            places = self._places(scope, pages.page_bytes, parts)
            namespace = pool_namespace(self._fields, scope.ranks, name, pool, pages.form)
            for place in places:
                if place.readable and place.writable:
                    check_tier(place.tier, namespace, [pages.page_bytes])
            self._ready[name] = _Ready(pages, places, namespace)
            logger.info(
                "lmkv %s: pool %s: pages of %d tokens = %d bytes, moved %s; namespace %s in %s",
                __version__,
                name,
                pages.page_size,
                pages.page_bytes,
                "in place" if pages.in_place else "through a bounce copy (not in multiples of 4 KiB)",
                namespace.digest.hex()[:16],
                " and ".join(place.name for place in places),
            )

    def _places(self, scope: Scope, page_bytes: int, parts: int) -> tuple[Place, ...]:
        places = []
        if self._config.file.path is not None:
            if scope not in self._files:
                tier = open_scope(self._config, scope, page_bytes, parts=parts)
                role = self._config.file.role
                self._files[scope] = Place(tier, self.log, self._gate, role=role, writes=scope.writes)
                logger.info("lmkv: files in %s", scope.directory(self._config))
            places.append(self._files[scope])
        if self._redis is not None:
            if scope.writes not in self._servers:
                role = self._config.redis.role
                place = Place(self._redis, self.log, self._gate, role=role, writes=scope.writes)
                self._servers[scope.writes] = place
            places.append(self._servers[scope.writes])
        return tuple(places)

    def _scope(self, name: str, pool: Any) -> Scope:
        alike = self._ranks.is_mla_model and self._ranks.tp_size > 1
        # Recurrent state and the heads of a draft are divided even where the model's own KV is not.
        replicated = alike and name != _MAMBA and not compat.is_mha(pool)
        return scope_of(self._ranks, replicated=replicated)

    # --- queries --------------------------------------------------------------------------------

    @guarded(lambda *_, **__: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many of the pages are stored, from the first on without a gap."""
        return leading(self._worthwhile(keys))

    @guarded(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether the page of KV is stored."""
        return self._present(_KV, (key,))[0]

    @guarded(lambda *_, **__: compat.pages_found(0, {}, []))
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Prefixes that can be restored in all pools; see `lmkv.connectors.sglang.policies`."""
        pages = leading(self._worthwhile(keys))
        hits: dict[Any, int] = {compat.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or ():
            present = self._present(str(transfer.name), keys[:pages])
            policy = str(transfer.hit_policy.value)
            if policy == "all_pages":
                allowed = set(range(1, leading(present) + 1))
            elif policy == "trailing_pages":
                allowed = windows(present, max(1, len(transfer.keys or ())), pages)
            else:  # no version up to compat.NEWEST asks for another
                allowed = set()
            if allowed:
                hits[transfer.name] = max(allowed)
            restorable &= allowed
        return compat.pages_found(max(restorable, default=0), hits, sorted(restorable))

    def _present(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Which pages any tier has; the next one is asked for what the ones before lack."""
        return [place is not None for place in self._places_of(name, keys)]

    def _places_of(self, name: str, keys: Sequence[str]) -> list[Place | None]:
        ready = self._ready.get(name)
        found: list[Place | None] = [None] * len(keys)
        if ready is None:
            return found
        names = self._keys(ready, keys)
        for place in ready.places:
            missing = [i for i, where in enumerate(found) if where is None]
            if missing:
                for i, is_there in zip(missing, place.contains([names[i] for i in missing]), strict=True):
                    found[i] = place if is_there else None
        return found

    def _worthwhile(self, keys: Sequence[str]) -> list[bool]:
        """Which pages of KV are stored where loading them beats computing them."""
        found = self._places_of(_KV, keys)
        if self._gate is None or not any(found):
            return [place is not None for place in found]
        pages = self._ready[_KV].pages
        refused = set()
        for place in {place for place in found if place is not None}:
            count = found.count(place)
            if not self._gate.worth(place.name, count * pages.page_bytes, count * pages.page_size):
                refused.add(place)
                self.metrics.add("lmkv_misses", count, "gate")
        return [place is not None and place not in refused for place in found]

    def _keys(self, ready: _Ready, keys: Sequence[str]) -> list[bytes]:
        digest, decode = ready.namespace.digest, bytes.fromhex
        return [digest + decode(key) + _GROUP for key in keys]

    # --- moving pages ---------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages of KV into the host pool; whether each was there and verified."""
        return self._get(_KV, keys, host_indices)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Write pages of KV from the host pool; whether each is stored."""
        return self._set(_KV, keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_get_v1` for several pools."""
        return {
            transfer.name: self._get(str(transfer.name), transfer.keys or (), transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_set_v1` for several pools."""
        return {
            transfer.name: self._set(str(transfer.name), transfer.keys or (), transfer.host_indices)
            for transfer in transfers
        }

    def _get(self, name: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        return self._move(name, keys, indices, self._read, self._reads, self._read_batches)

    def _set(self, name: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        return self._move(name, keys, indices, self._write, self._writes, self._written_batches)

    @guarded(lambda name, keys, *_: [False] * len(keys))
    def _move(
        self,
        name: str,
        keys: Sequence[str],
        indices: torch.Tensor,
        move: _Mover,
        threads: ThreadPoolExecutor,
        batches: "deque[tuple[int, int, float]]",
    ) -> list[bool]:
        """Cut a batch into parts, move them at once, wait for all."""
        ready = self._ready.get(name)
        if ready is None or not keys:
            return [False] * len(keys)
        tokens = ready.pages.page_size
        if len(indices) != len(keys) * tokens:
            raise ValueError(f"{len(indices)} host indices for {len(keys)} pages of {tokens}")
        page_bytes = ready.pages.page_bytes
        # Bounce copies take memory, so their parts are small.
        large = threads is self._writes and ready.pages.in_place
        step = max(1, (WRITE_BATCH_BYTES if large else READ_BATCH_BYTES) // page_bytes)
        if threads is self._reads:  # all threads share a small batch
            step = min(step, max(ceil(len(keys) / READ_THREADS), _MIN_PART_BYTES // page_bytes))
        starts = range(0, len(keys), step)
        parts = [(keys[at : at + step], indices[at * tokens : (at + step) * tokens]) for at in starts]
        began = time.monotonic()
        if len(parts) == 1:
            statuses = move(ready, *parts[0])
        else:
            moved = threads.map(partial(move, ready), *zip(*parts, strict=True))
            statuses = [status for part in moved for status in part]
        if self._ranks.enable_storage_metrics:
            batches.append((len(keys), len(keys) * page_bytes, time.monotonic() - began))
        return [status is Status.OK for status in statuses]

    @guarded(_all_unavailable)
    def _read(self, ready: _Ready, keys: Sequence[str], indices: torch.Tensor) -> list[Status]:
        """Each page from the first tier that has it."""
        names, targets = self._keys(ready, keys), ready.pages.targets(indices)
        statuses = [Status.MISS] * len(keys)
        for place in ready.places:
            missing = [i for i, status in enumerate(statuses) if status is not Status.OK]
            if not missing or not place.readable or not place.healthy():
                continue
            size = len(missing) * ready.pages.page_bytes
            found = place.get([names[i] for i in missing], [targets[i] for i in missing], size)
            for i, status in zip(missing, found, strict=True):
                # A fault says more than that another tier does not have it.
                statuses[i] = statuses[i] if status is Status.MISS else status
            loaded = found.count(Status.OK)
            self.metrics.add("lmkv_loaded_chunks", loaded, place.name)
            self.metrics.add("lmkv_loaded_bytes", loaded * ready.pages.page_bytes, place.name)
        for page, status in enumerate(statuses):
            if status is Status.OK:
                ready.pages.landed(indices, targets, page)
            else:
                self.metrics.add("lmkv_misses", 1, status.name.lower())
        return statuses

    @guarded(_all_unavailable)
    def _write(self, ready: _Ready, keys: Sequence[str], indices: torch.Tensor) -> list[Status]:
        """Each page into every tier; it is stored if one of them has it."""
        names = self._keys(ready, keys)
        sources: Sequence[Buffer] | None = None
        statuses = [Status.REJECTED] * len(keys)
        for place in ready.places:
            # SGLang writes again what it has read. A server is asked by `put` itself.
            ask = not (place.writable and place.tier.info.remote)
            there = place.contains(names) if ask else [False] * len(keys)
            statuses = [
                Status.OK if is_there else status for is_there, status in zip(there, statuses, strict=True)
            ]
            if all(there) or not place.writable or not place.healthy():
                continue
            sources = sources or ready.pages.sources(indices)
            stored = place.put(names, sources, len(keys) * ready.pages.page_bytes)
            new = stored.count(Status.OK) - there.count(True)
            for i, status in enumerate(stored):
                if status is not Status.OK:
                    self.metrics.add("lmkv_skipped_stores", 1, status.name.lower())
                if statuses[i] is not Status.OK:
                    statuses[i] = status
            self.metrics.add("lmkv_stored_chunks", new, place.name)
            self.metrics.add("lmkv_stored_bytes", new * ready.pages.page_bytes, place.name)
        return statuses

    # --- the rest -------------------------------------------------------------------------------

    def forget(self, reason: str) -> None:
        """Serve nothing older than now; what other engines share stays. Until this engine restarts its
        namespaces are its own."""
        self._ready = {
            name: ready._replace(namespace=renewed(ready.namespace)) for name, ready in self._ready.items()
        }
        self.log.warning(
            "forget", "%s; until it restarts this engine shares no stored pages with others", reason
        )

    def clear(self) -> None:
        """See `forget`: SGLang asks for it at /hicache/storage-backend/clear."""
        self.forget("the storage was cleared")

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics` since the last call: pages and GB/s of each batch."""
        return compat.storage_metrics(_drain(self._read_batches), _drain(self._written_batches))

    def close(self) -> None:
        """Finish what is under way and release the directories. Calling it again does nothing."""
        for threads in (self._reads, self._writes):
            threads.shutdown(wait=True)
        for place in (*self._files.values(), *self._servers.values()):
            place.close()
        self._ready = {}

    # SGLang uses these only without `interface_v1`, which is refused.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: see above."""

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Nothing: see above."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing: see above."""
        return False

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing: see above."""
        return False


def _drain(batches: "deque[tuple[int, int, float]]") -> list[tuple[int, int, float]]:
    return [batches.popleft() for _ in range(len(batches))]
