"""lmkv directly below SGLang's device pools (`--unified-cache-external-linker-backend dynamic`, 0.5.23 on).

In the place of SGLang's host pool stands lmkv's slab, in each rank's process. Pages go from the device into
slots and from there to the file tier; back, they lie verified in slots before SGLang is told that they will
come, because a load that fails later aborts its requests. Then they are copied layer by layer, while the
forward of the first layers runs.

Two threads copy, one in each direction; the one that offloads also drives the writes to the tier below,
because SGLang's scheduler takes no steps while it is idle. All else runs on the scheduler's thread. `_lock`
holds the store together.
"""

import logging
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from lmkv import __version__
from lmkv.boundary import guarded
from lmkv.canary import check_tier
from lmkv.chain import chain, open_redis
from lmkv.config import Config, ConfigError, resolve_host_capacity
from lmkv.connectors.sglang import compat, live
from lmkv.connectors.sglang.checks import check_engine, check_linker, check_page_size, linker_settings
from lmkv.connectors.sglang.identity import engine_fields, pool_namespace
from lmkv.connectors.sglang.policies import leading, windows
from lmkv.connectors.sglang.pools import blocks_of, device_pools, layered
from lmkv.connectors.sglang.scopes import Scope, open_scope, scope_of
from lmkv.kernels import BlockCopies, open_copier
from lmkv.kernels.canary import check_copies
from lmkv.keys import GROUP_BYTES, Namespace
from lmkv.metrics import RateLimitedLog, SharedMetrics
from lmkv.request import Request
from lmkv.slab import Slab, create_or_join
from lmkv.slots import SLOT_ALIGNMENT, slot_bytes
from lmkv.store import Lookup, Presence, Store, Transfer

logger = logging.getLogger(__name__)

#: How often a load looks whether its pages have come.
_POLL_S = 0.0002
#: The first slots are usable after a third of a second; the first request should find some.
_FIRST_SLOTS_S = 10.0
#: How often the store takes a step while it writes.
_STEP_S = 0.005
#: Fewer slots than this per pool could never hold a page that is read and one that is written.
_MIN_SLOTS = 2


class _Pages(NamedTuple):
    """Pages of one pool in a transfer."""

    pool: int
    keys: list[bytes]
    #: The pages in the device pool, in the order of the keys.
    blocks: list[int]


class _Copy(NamedTuple):
    """Pages of one pool, and their slots."""

    pool: int
    blocks: Sequence[int]
    offsets: Sequence[int]


class _Load(NamedTuple):
    """Pages that are staged in slots for a request."""

    request: Request
    keys: list[bytes]
    copies: list[_Copy]


class _Offload(NamedTuple):
    """Pages on their way into slots. `copies` is empty when all were there."""

    request: Request
    keys: list[bytes]
    copies: list[_Copy]
    #: Events after which the pages are written.
    events: Sequence[Any]
    #: Whether every page will be in the cache if the copy succeeds.
    complete: bool


class LMKVLinker(UnifiedCacheLinker):
    """Settings: docs/configuration.md. Refuses what it cannot serve, by name, before SGLang serves."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        """Called by SGLang in every rank. Raises ConfigError."""
        if warning := compat.check_version():
            logger.warning("lmkv: %s", warning)
        config = linker_settings(extra_config)
        check_engine(config)
        check_linker(config, compat.server_args())
        check_page_size(params.page_size)
        self.forward_stream = forward_stream
        self.log = RateLimitedLog()
        self._groups_to_ask = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        self._all_ranks = params.tp_cache_group
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._group = device_pools(kvcache, params, components)
        self.pools = self._group.entry_map
        self._places = {entry.name: place for place, entry in enumerate(self._group.entries)}
        self._suffixes = [place.to_bytes(GROUP_BYTES, "big") for place in range(len(self._group.entries))]
        self._layered = layered(self._group)
        self._slab, self._store = self._open(config)
        self.metrics = self._store.metrics
        self._copier = open_copier(self._layered.layout, self._slab.data)
        self._try_copies()
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._lock = threading.RLock()
        self._last_ticket = 0
        self._queued: dict[str, _Load] = {}
        self._loading: dict[int, list[_Load]] = {}  # by counter index
        self._to_load: queue.Queue[tuple[int, list[_Load], Sequence[Any]] | None] = queue.Queue()
        self._to_offload: queue.Queue[_Offload | None] = queue.Queue()
        self._copied: deque[tuple[_Offload, bool]] = deque()
        self._outcomes: deque[bool] = deque()
        self._threads = [
            threading.Thread(target=work, name=f"lmkv-{name}", daemon=True)
            for name, work in (("load", self._load_thread), ("offload", self._offload_thread))
        ]
        for thread in self._threads:
            thread.start()
        live.add(self)

    def _open(self, config: Config) -> tuple[Slab, Store]:
        replicated = self._group.rank_replicated
        ranks = compat.linker_ranks(replicated)
        scope = scope_of(ranks, replicated=replicated and ranks.tp_size > 1)
        sizes = self._layered.chunk_bytes
        file = open_scope(config, scope, max(sizes), parts=1) if config.file.path is not None else None
        below = chain(config, file, open_redis(config))
        namespace = self._namespace(config, scope)
        for tier in below:
            tier.writable = tier.writable and scope.writes
            if tier.readable and tier.writable:
                check_tier(tier.tier, namespace, sizes)
        capacity = resolve_host_capacity(config.host) // (ranks.tp_size * ranks.attn_cp_size)
        capacity -= capacity % SLOT_ALIGNMENT
        classes = {slot_bytes(size) for size in sizes}
        least = _MIN_SLOTS * len(classes) * max(classes)
        if capacity < least:
            raise ConfigError(
                "[host] capacity",
                f"{capacity} bytes for each rank hold fewer than {_MIN_SLOTS} pages of this model "
                f"({', '.join(f'{size} bytes' for size in sorted(classes))}).",
                f"set it to {least * ranks.tp_size * ranks.attn_cp_size} bytes or more.",
            )
        slab = create_or_join(f"sglang {os.getpid()} {uuid.uuid4().hex}", capacity)
        slab.unlink()
        deadline = time.monotonic() + _FIRST_SLOTS_S
        while not (slab.ready_bytes or slab.fully_faulted) and time.monotonic() < deadline:
            time.sleep(0.01)
        store = Store(
            slab=slab,
            ranks=[slab.rank(0)],
            chunk_bytes=dict(enumerate(sizes)),
            namespace=namespace,
            below=below,
            gate=live.gate if config.sglang.gate else None,
            chunk_tokens=dict.fromkeys(range(len(sizes)), self._group.page_size),
            metrics=SharedMetrics(),
        )
        logger.info(
            "lmkv %s: linker: pages of %d tokens, %s; %d bytes of memory = %d tokens; namespace %s in %s",
            __version__,
            self._group.page_size,
            ", ".join(
                f"{entry.name}: {size} bytes" for entry, size in zip(self.pools.values(), sizes, strict=True)
            ),
            capacity,
            store.room(sum(sizes)) * self._group.page_size,
            namespace.digest.hex()[:16],
            scope.directory(config) if file is not None else "no files",
        )
        return slab, store

    def _try_copies(self) -> None:
        """See `lmkv.kernels.canary`. Raises CanaryError."""
        names = [
            [f"{self._group.entries[place].name} layer {layer}"] * len(self._layered.layout[group])
            for (place, layer), group in sorted(self._layered.groups.items(), key=lambda item: item[1])
        ]
        room = range(self._slab.capacity_bytes)
        check_copies(self._copier, self._layered.layout, self._slab.data, room, names)

    def _namespace(self, config: Config, scope: Scope) -> Namespace:
        described = []
        for (place, layer), group in sorted(self._layered.groups.items()):
            sizes = [fragment.bytes for fragment in self._layered.layout[group]]
            described.append(f"{self._group.entries[place].name} {layer}: {sizes}")
        form = "; ".join(described)
        pools = [entry.device_pool for entry in self._group.entries]
        names = "+".join(str(entry.name) for entry in self._group.entries)
        return pool_namespace(engine_fields(config), scope.ranks, f"linker {names}", pools[0], form)

    # --- lookup ---------------------------------------------------------------------------------

    @guarded(lambda *_, **__: [])
    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Every prefix length, in pages, that could be loaded; from the indexes alone."""
        wanted = self._group.resolve_transfers(list(transfers))
        if not wanted:
            return []
        hashes = [bytes.fromhex(key) for key in next(t.keys for t in transfers if t.name == PoolName.KV)]
        lengths: set[int] | None = None
        pages = len(hashes)
        for transfer in wanted:
            with self._lock:
                self._store.poll()
                found = self._store.presence(self._keys(transfer.name, hashes[:pages]))
            present = [where is not Presence.NOWHERE for where in found]
            if transfer.hit_policy.value == "all_pages":
                pages = min(pages, leading(present), self._promotable(transfer.name, found))
                allowed = set(range(1, pages + 1))
            else:
                allowed = windows(present, max(1, len(transfer.keys)), pages)
            lengths = allowed if lengths is None else lengths & allowed
        return sorted(lengths or ())

    def _promotable(self, name: PoolName, found: Sequence[Presence]) -> int:
        """How many leading pages can be in slots at once, if those below are read into some."""
        size = slot_bytes(self._layered.chunk_bytes[self._places[name]])
        left = self._store.promotable_bytes // size
        if found.count(Presence.BELOW) <= left:
            return len(found)
        for count, where in enumerate(found):
            if where is Presence.BELOW:
                left -= 1
                if left < 0:
                    return count
        return len(found)

    def _keys(self, name: PoolName, hashes: Sequence[bytes]) -> list[bytes]:
        suffix = self._suffixes[self._places[name]]
        return [block_hash + suffix for block_hash in hashes]

    def _pages(self, transfers: Sequence[Any]) -> list[_Pages]:
        return [
            _Pages(
                self._places[transfer.name],
                self._keys(transfer.name, [bytes.fromhex(key) for key in transfer.keys]),
                blocks_of(self.pools[transfer.name], transfer.host_indices),
            )
            for transfer in transfers
        ]

    # --- loads ----------------------------------------------------------------------------------

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Stage the pages in slots and queue their copy; False when any rank could not."""
        staged = self._stage(transfers)
        # Every rank takes the same branch: SGLang's ranks schedule in lockstep.
        if not self._agree(staged is not None):
            if staged is not None:
                self._end_load(staged)
            return False
        assert staged is not None
        self._queued[rid] = staged
        return True

    @guarded(lambda *_: None)
    def _stage(self, transfers: Sequence[Any]) -> _Load | None:
        """Read what lies below into slots, and wait for it: no longer than `Store` lets a request wait."""
        wanted = self._group.resolve_transfers(list(transfers), allow_partial=True, allow_missing_kv=True)
        pages = self._pages(wanted)
        keys = [key for part in pages for key in part.keys]
        if not keys:
            return None
        request = self._store.new_request()
        request.gated = False  # `lookup` asked the gate
        while (transfer := self._claim(request, keys)) is None:
            if request.done:
                return None
            time.sleep(_POLL_S)
        self._count_hits(request, pages)
        copies, start = [], 0
        for part in pages:
            copies.append(_Copy(part.pool, part.blocks, transfer.offsets[start : start + len(part.keys)]))
            start += len(part.keys)
        return _Load(request, keys, copies)

    def _claim(self, request: Request, keys: list[bytes]) -> Transfer | None:
        """The pages' slots once all are there. Ends the request when one of them will not come."""
        with self._lock:
            self._store.open_window(request)
            answers = {self._store.lookup(key) for key in keys}
            self._store.close_window()
            if Lookup.MISS in answers:
                self._store.finish_request(request)
            if answers != {Lookup.HIT}:
                return None
            transfer = self._store.prepare_load(keys, request)
            self._last_ticket = transfer.ticket
            return transfer

    def _count_hits(self, request: Request, pages: Sequence[_Pages]) -> None:
        """Count the tokens of the prompt once, by the tier that its KV came from."""
        for part in pages:
            if self._group.entries[part.pool].name == PoolName.KV:
                for key in part.keys:
                    tier = self._store.source(request, key)
                    self.metrics.add("lmkv_hit_tokens", self._group.page_size, tier)

    def _agree(self, ours: bool) -> bool:
        """Whether all ranks say so."""
        groups = [group for group in self._groups_to_ask if _size(group) > 1]
        if not groups and _size(self._all_ranks) > 1:
            groups = [self._all_ranks]
        verdict = torch.tensor([int(ours)], dtype=torch.int)
        for group in groups:
            torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(verdict.item())

    def start_layer_wise_loading(self) -> int:
        """Start the queued copies; the index at which the counter tells of them, -1 if there are none."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        self._loading[index] = loads
        # The slots' new owners wait for those who used the device pages before.
        self._to_load.put((index, loads, self.record_offload_ready()))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the copies are over; whether all layers have come."""
        landed = bool(self.layer_done_counter.finish(counter_index))
        for load in self._loading.pop(counter_index, ()):
            self._end_load(load)
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        """Take back a load that has not started."""
        load = self._queued.pop(rid, None)
        if load is not None:
            self._end_load(load)
        return load is not None

    @guarded(lambda *_: None)
    def _end_load(self, load: _Load) -> None:
        with self._lock:
            self._store.complete_load(load.keys, load.request)
            self._store.finish_request(load.request)

    def _load_thread(self) -> None:
        while (task := self._to_load.get()) is not None:
            index, loads, events = task
            try:
                for event in events:
                    event.synchronize()
                for layer in range(self._group.num_layers):
                    self._copy(
                        self._copier.scatter, [copy for load in loads for copy in load.copies], [layer]
                    )
                    self.layer_done_counter.complete(index, layer)
            except Exception as error:  # SGLang is told, and aborts these requests
                self.metrics.add("lmkv_errors", 1, "load")
                self.log.warning("load", "copying pages into the engine failed", exc_info=True)
                self.layer_done_counter.fail(index, error)
            finally:
                self._to_load.task_done()

    def _copy(self, move: Any, copies: Sequence[_Copy], layers: Sequence[int]) -> None:
        """Copy these layers, and wait until it is done."""
        pieces = []
        for copy in copies:
            for layer in layers:
                group = self._layered.groups.get((copy.pool, layer))
                if group is not None:
                    pieces.append(BlockCopies(group, copy.blocks, copy.offsets))
        over = move(pieces)
        while not over():
            time.sleep(50e-6)

    # --- offloads -------------------------------------------------------------------------------

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Queue pages to be copied into slots; those that are there already are not copied again."""
        wanted = self._group.resolve_transfers(list(transfers), allow_partial=True)
        if not wanted:
            return False
        # From here on every rank says True, whatever happens to it: SGLang pairs their answers.
        self._to_offload.put(self._accept(wanted))
        return True

    @guarded(lambda self, *_: _Offload(Request(0, False), [], [], (), False))
    def _accept(self, wanted: Sequence[Any]) -> _Offload:
        pages = self._pages(wanted)
        events = self.record_offload_ready()
        place = {key: position for part in pages for position, key in enumerate(part.keys)}
        with self._lock:
            request = self._store.new_request()
            accepted, transfer = self._store.prepare_store(list(place), request, place.__getitem__)
            complete = not request.store_stopped
            if transfer is None:
                self._store.finish_request(request)
                return _Offload(request, [], [], (), complete)
            self._last_ticket = transfer.ticket
        offset_of = dict(zip(accepted, transfer.offsets, strict=True))
        copies = []
        for part in pages:
            chosen = [
                (block, offset_of[key])
                for key, block in zip(part.keys, part.blocks, strict=True)
                if key in offset_of
            ]
            if chosen:
                blocks, offsets = zip(*chosen, strict=True)
                copies.append(_Copy(part.pool, blocks, offsets))
        return _Offload(request, accepted, copies, events, complete)

    def _offload_thread(self) -> None:
        layers = range(self._group.num_layers)
        while True:
            try:
                offload = self._to_offload.get(timeout=_STEP_S if self._store.pending_work else None)
            except queue.Empty:
                self._step()
                continue
            if offload is None:
                return
            copied = True
            try:
                for event in offload.events:
                    event.synchronize()
                self._copy(self._copier.gather, offload.copies, layers)
            except Exception:  # the pages are dropped, and SGLang is told
                copied = False
                self.metrics.add("lmkv_errors", 1, "offload")
                self.log.warning("offload", "copying pages out of the engine failed", exc_info=True)
            self._copied.append((offload, copied))
            self._step()
            self._to_offload.task_done()

    def num_completed_offloads(self) -> int:
        """Offloads that are over. SGLang asks in every step."""
        self._step()
        return len(self._outcomes)

    @guarded(lambda *_: None)
    def _step(self) -> None:
        """Take in what was copied, and go on with reads and writes below."""
        with self._lock:
            while self._copied:
                offload, copied = self._copied.popleft()
                self._outcomes.append(copied and offload.complete)
                if offload.keys:
                    self._store.complete_store(offload.keys, offload.request, copied)
                    self._store.finish_request(offload.request)
            self._store.end_step()

    @property
    def pending_writes(self) -> int:
        """Pages on their way to the tiers below host memory."""
        return self._store.pending_writes

    def pop_completed_offload(self) -> bool:
        """The outcome of the oldest offload that is over."""
        return self._outcomes.popleft()

    # --- the end --------------------------------------------------------------------------------

    def reset(self) -> None:
        """End all transfers. What lies in slots and below stays: SGLang's flush is about its own memory,
        and the same weights give the same KV. See `forget` for other weights."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._to_load.join()
        self._to_offload.join()
        for index in list(self._loading):
            self.finish_layer_wise_loading(index)
        self._step()
        self._outcomes.clear()
        self.layer_done_counter.reset()

    def forget(self, reason: str) -> None:
        """Serve nothing older than now; what other engines share stays."""
        self._to_load.join()
        self._to_offload.join()
        with self._lock:
            self._step()
            if not self._queued:  # all transfers are over: their slots are free at once
                self._slab.rank(0).finish(self._last_ticket)
            self._store.reset()
        self.log.warning("forget", "%s", reason)

    def close(self) -> None:
        """End all transfers, write out what is queued, give the memory back. Again: nothing."""
        if not self._threads:
            return
        self.reset()
        self._to_load.put(None)
        self._to_offload.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._store.close():
            del self._copier
            self._slab.close()


def _size(group: Any) -> int:
    return 1 if group is None else int(torch.distributed.get_world_size(group=group))
