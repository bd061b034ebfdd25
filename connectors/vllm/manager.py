"""The scheduler's side under vLLM: translates between vLLM's calls and the store.

This is the boundary to the engine; see `lmkv.boundary`.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from lmkv.boundary import guarded
from lmkv.connectors.vllm import compat
from lmkv.connectors.vllm.worker import SlotsSpec
from lmkv.index import Entry
from lmkv.metrics import METRICS, Metrics, RateLimitedLog
from lmkv.request import Request
from lmkv.slab import Slab
from lmkv.store import Lookup, Store

_HIT = LookupResult.HIT
_RESULTS = {
    Lookup.MISS: LookupResult.MISS,
    Lookup.HIT: LookupResult.HIT,
    # The chunk is on its way. RETRY would reset the run of hits in a sliding window.
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.UNKNOWN: LookupResult.RETRY,
}


#: A request with fewer tokens in a step is not in its prefill, or at its end.
_PREFILL_TOKENS = 32
#: More steps than any engine has in flight.
_MAX_STEPS = 16


def _find_nothing(_: object) -> None:
    return None


class LMKVManager(OffloadingManager):
    """Attached to its store by `LMKVConnector` before the engine serves."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.log = RateLimitedLog()
        self._requests: dict[str, Request] = {}
        self._uncacheable: set[str] = set()
        self._expected: dict[str, float] = {}  # seconds to wait, by request
        #: Prompt tokens and beginning of each step whose outcome is still to come.
        self._steps: deque[tuple[int, float]] = deque(maxlen=_MAX_STEPS)
        self._step_ended = 0.0
        self._context: ReqContext | None = None  # whose lookup window is open
        # The window's two calls for a chunk that is ready, see `Store.open_window`.
        self._find: Callable[[bytes], Entry | None] = _find_nothing
        self._found: Callable[[Entry], None] = _find_nothing

    def attach(self, store: Store, slab: Slab, scheduler: OffloadingConnectorScheduler) -> None:
        """Start serving from `store`. `scheduler` is the caller of all that follows."""
        self._store = store
        self._slab = slab
        self.metrics = store.metrics
        self._scheduler = scheduler
        self._by_position = len(scheduler.config.kv_group_configs) > 1

    # --- requests

    def exclude(self, req_id: str) -> None:
        """Keep the request that will be announced as `req_id` out of the cache."""
        self._uncacheable.add(req_id)

    def expect(self, req_id: str, seconds: float) -> None:
        """Let the request that will be announced as `req_id` wait for another engine to store its chunks."""
        self._expected[req_id] = seconds

    @guarded(lambda *_: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See `OffloadingManager`."""
        cacheable = req_context.req_id not in self._uncacheable
        self._uncacheable.discard(req_context.req_id)
        wait_s = self._expected.pop(req_context.req_id, 0.0)
        self._requests[req_context.req_id] = self._store.new_request(cacheable, wait_s)
        return RequestOffloadingContext()

    @guarded(lambda *_: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """See `OffloadingManager`. Transfers of the request may still be under way."""
        request = self._request(req_context)
        if self._context is req_context:
            self._close_window()
        self._store.finish_request(request)
        req_context.set_state(request)  # for the completions that follow
        self._requests.pop(req_context.req_id, None)

    def _request(self, req_context: ReqContext) -> Request:
        request = self._requests.get(req_context.req_id) or req_context.get_state(Request)
        return request if request is not None else self._store.new_request(cacheable=False)

    # --- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See `OffloadingManager`. Called for every chunk of every waiting request."""
        if req_context is self._context:
            entry = self._find(key)
            if entry is not None:
                self._found(entry)
                return _HIT
        return self._lookup_slowly(key, req_context)

    @guarded(lambda *_: LookupResult.MISS)
    def _lookup_slowly(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if req_context is not self._context:
            self._find, self._found = self._store.open_window(self._request(req_context))
            self._context = req_context
        return _RESULTS[self._store.lookup(key)]

    def _close_window(self) -> None:
        self._store.close_window()
        self._context = None

    @guarded(lambda *_: compat.UNKNOWN_SOURCE)
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """See `OffloadingManager`; asked from 0.32 on."""
        tier = self._store.source(self._request(req_context), key)
        return compat.HIT_SOURCES.get(tier, compat.UNKNOWN_SOURCE)

    @guarded(lambda *_: None)
    def count_hit_tokens(self, vllm_request: Any, claimed_tokens: int) -> None:
        """Count the tokens that a request claims with the load just prepared, by the tier they came from."""
        request = self._requests[vllm_request.request_id]
        tier_of = partial(self._store.source, request)
        tiers = compat.hit_tokens(self._scheduler, vllm_request, claimed_tokens, tier_of)
        for tier, tokens in tiers.items():
            self.metrics.add("lmkv_hit_tokens", tokens, tier)

    # --- loads and stores

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """See `OffloadingManager`. Not guarded: without slots the engine's blocks stay unfilled."""
        self._context = None
        return SlotsSpec(self._store.prepare_load(keys, self._request(req_context)))

    @guarded(lambda *_: None)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """See `OffloadingManager`."""
        self._store.complete_load(keys, self._request(req_context))

    @guarded(lambda *_: PrepareStoreOutput([], SlotsSpec(None), []))
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """See `OffloadingManager`. Accepts what fits and never None, which vLLM would retry every step."""
        position = compat.key_position(self._scheduler, req_context) if self._by_position else None
        accepted, transfer = self._store.prepare_store(list(keys), self._request(req_context), position)
        return PrepareStoreOutput([OffloadKey(key) for key in accepted], SlotsSpec(transfer), [])

    @guarded(lambda *_: None)
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """See `OffloadingManager`."""
        self._store.complete_store(keys, self._request(req_context), success)

    # --- the step

    @guarded(lambda *_: None)
    def step_began(self, scheduled_tokens: Collection[int]) -> None:
        """A step with so many tokens of each request was handed to the engine."""
        prompt = sum(tokens for tokens in scheduled_tokens if tokens >= _PREFILL_TOKENS)
        # A step that is mostly something else says nothing of the speed of a prefill.
        self._steps.append((prompt if 2 * prompt >= sum(scheduled_tokens) else 0, time.monotonic()))

    @guarded(lambda *_: None)
    def rest(self) -> None:
        """Pause a step that computes nothing: vLLM would go round as fast as it can, and take the processor
        from the threads, or from the other engine, that are waited for."""
        time.sleep(self._store.rest_s)

    @guarded(lambda *_: None)
    def step_ended(self) -> None:
        """The oldest such step is over."""
        if not self._steps:
            return
        tokens, began = self._steps.popleft()
        now = time.monotonic()
        if tokens:  # with two steps in flight, the second begins when the first ends
            self._store.computed(tokens, now - max(began, self._step_ended))
        self._step_ended = now

    @guarded(lambda *_: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """See `OffloadingManager`."""
        self._context = None
        self._store.end_step()

    @guarded(lambda *_: False)
    def has_pending_work(self) -> bool:
        """Keeps the engine stepping, gently, while writes below are under way."""
        return self._store.pending_work

    @guarded(lambda *_: None)
    def reset_cache(self) -> None:
        """See `OffloadingManager` and `Store.reset`. Requests that are alive now hold KV computed
        before the reset, so they stay out of the cache until they end."""
        self._context = None
        for request in self._requests.values():
            request.cacheable = False
        self._store.reset()

    @guarded(lambda *_: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call."""
        changes = self.metrics.take()
        if not changes:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), value in changes:
            if METRICS[name].gauge:
                stats.set_gauge(name, value, labels)
            else:
                stats.increase_counter(name, value, labels)
        return stats

    @guarded(lambda *_: None)
    def shutdown(self) -> None:
        """Write out what is queued and give the memory back."""
        if self._store.close():
            self._slab.close()
