"""The scheduler's side of lmkv: answers lookups, hands out slots, promotes and writes through.

One `Store` serves one engine, on the engine's scheduler thread; nothing here blocks. It owns the
host index and drives the tiers below through their executors. Chunks are named by *local keys*
(block hash and group); the namespace is added where a tier needs it.

The rules it keeps (ARCHITECTURE.md says why):

- `HIT` is only said of chunks that lie, verified, in host memory.
- A request's hits and promoted chunks are leased to it until it claims them, ends, or its
  deadline passes; one request promotes at most half the slab.
- Lower-tier writes lease at most half the slab; beyond that write-through is skipped and counted.
- A chunk whose promotion failed is a miss for that request at once; one that waits for another engine asks a
  tier that did not answer again.
"""

import enum
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from lmkv.below import (
    ASK_DEADLINE_S,
    READ_BATCH_BYTES,
    TIER_DEADLINE_S,
    WRITE_BATCH_BYTES,
    WRITE_THREADS,
    Below,
)
from lmkv.executor import Executor, Job
from lmkv.gate import Gate
from lmkv.index import NO_OWNER, Entry, HostIndex
from lmkv.keys import GROUP_BYTES, Namespace, make_key
from lmkv.metrics import Metrics, RateLimitedLog
from lmkv.request import Request
from lmkv.slab import RankArea
from lmkv.slots import SlotAllocator, slot_bytes
from lmkv.tier import Status

logger = logging.getLogger(__name__)

#: A request waits at most this long plus its bytes at the slowest useful speed.
DEFER_S = 0.25
DEFER_BYTES_PER_S = 0.5e9
#: How long a clean shutdown waits for queued writes.
FLUSH_S = 5.0

#: How often a request that waits for another engine has a server asked again.
WAIT_POLL_S = 0.02
#: Pauses of an engine that waits for another one, and for its own reads.
_REST_S, _SHORT_REST_S = 0.004, 0.0005
#: One in so many of all slots is kept ready to be evicted where chunks are demoted.
_DEMOTE_SHARE = 8

#: How often the tiers' own counters are read.
_EVENTS_S = 1.0

_NOTHING: dict[bytes, Entry] = {}


class Lookup(enum.IntEnum):
    """Answer to one lookup."""

    MISS = 0
    #: In host memory, verified.
    HIT = 1
    #: On its way into host memory; ask again.
    PENDING = 2
    #: A server is being asked where it is, or another engine is expected to store it; ask again.
    UNKNOWN = 3


class Presence(enum.IntEnum):
    """Where a chunk lies, as far as the indexes say."""

    NOWHERE = 0
    BELOW = 1
    HOST = 2


class SlabView(Protocol):
    """What the store needs of the slab."""

    capacity_bytes: int
    data: memoryview

    @property
    def ready_bytes(self) -> int:
        """Leading bytes of `data` that may be used."""

    @property
    def fully_faulted(self) -> bool:
        """Whether `ready_bytes` is final."""


@dataclass(eq=False)
class Promotion:
    """One chunk on its way from a lower tier into a reserved slot."""

    entry: Entry
    below: Below
    waiters: list[Request]
    stale: bool = False


@dataclass(eq=False)
class Reading:
    """The chunks of one lookup window that are read from one tier, in several jobs."""

    begun: float
    jobs: int = 0
    loaded_bytes: int = 0


class Filling(NamedTuple):
    """One chunk whose slot the ranks are filling. `number` comes first: sorting restores the order
    in which the chunks were accepted, which is that of the prompt."""

    number: int
    entry: Entry
    ticket: int
    request: Request


@dataclass(frozen=True)
class Transfer:
    """Slots of one copy between the engine's blocks and the slab, for the ranks."""

    #: Consecutive over all transfers of this store, starting at 1.
    ticket: int
    #: Byte offset in the slab of each chunk's slot, in the order of the keys.
    offsets: list[int]


class Store:
    """See the module's text. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        *,
        slab: SlabView,
        ranks: Sequence[RankArea],
        chunk_bytes: Mapping[int, int],
        namespace: Namespace,
        below: Sequence[Below] = (),
        gate: Gate | None = None,
        chunk_tokens: Mapping[int, int] | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk_bytes`: KV group -> bytes of one of its chunks, all ranks' pieces together.
        `gate`: keeps loads that do not pay away; it needs `chunk_tokens`, the tokens of a chunk.
        """
        self.metrics = metrics if metrics is not None else Metrics()
        self.namespace = namespace
        self._slab = slab
        self._ranks = ranks
        self._below = list(below)
        self._clock = clock
        self._log = RateLimitedLog()
        self._chunk_bytes = {group.to_bytes(GROUP_BYTES, "big"): size for group, size in chunk_bytes.items()}
        self._gate = gate
        self._chunk_tokens = {
            group.to_bytes(GROUP_BYTES, "big"): tokens for group, tokens in (chunk_tokens or {}).items()
        }
        self._slots = SlotAllocator(slab.capacity_bytes, map(slot_bytes, chunk_bytes.values()))
        self.index = HostIndex(self._slots)
        self._half_bytes = 0  # of the usable slab, see `_grow`
        self._slab_growing = True
        self._requests = 0
        self._ticket = 0
        self._promotions: dict[bytes, Promotion] = {}
        #: Slot bytes of all promotions in flight; at most half the slab, so that a tier that hangs
        #: in reads cannot take all of it.
        self._promoting_bytes = 0
        self._unread: list[Promotion] = []
        self._stores: dict[bytes, Filling] = {}
        self._stores_begun = 0
        self._loading: set[Request] = set()
        self._failed_seen = [rank.failed_count for rank in ranks]
        self._failed_tickets: set[int] = set()
        self._all_failed_below = 0
        self._next_events = 0.0
        self._parked: list[tuple[int, list[Entry]]] = []
        self._waiting: set[Request] = set()  # requests that hold leases or wait
        # The lookup window: the lookups of one request between two steps.
        self._window: Request | None = None
        self._window_hits: list[Entry] = []
        self._window_leased = 0
        self._window_pending = False
        #: Tokens of the chunks that the request waits for, by group.
        self._window_tokens: Counter[bytes] = Counter()
        self._window_now = 0.0
        self._view = _NOTHING
        #: On whose account chunks are demoted.
        self._demoting = self.new_request()
        self._grow()

    def room(self, chunk_bytes: int) -> int:
        """How many chunks of this size the slab holds when it is full of them."""
        return self._slots.room(slot_bytes(chunk_bytes))

    def computed(self, tokens: int, seconds: float) -> None:
        """Note how fast the engine computes prompt tokens, for the gate."""
        if self._gate is not None:
            self._gate.computed(tokens, seconds)

    # --- requests -------------------------------------------------------------------------------

    def new_request(self, cacheable: bool = True, wait_s: float = 0.0) -> Request:
        """Start a request. `cacheable=False` keeps it out of the cache altogether. `wait_s`: for how
        long another engine may still be about to store its chunks."""
        self._requests += 1
        return Request(self._requests, cacheable, self._clock() + wait_s if wait_s > 0 else None)

    def finish_request(self, request: Request) -> None:
        """End a request: its leases go, and its chunks become the most recently used, the head
        of the prefix last of all, so that a prefix is evicted from its tail."""
        if self._window is request:
            self.close_window()
        request.done = True
        self._release(request)
        if request.busy == 0:
            self._settle(request)

    def _settle(self, request: Request) -> None:
        ready = self.index.ready
        for entry in reversed(request.used):
            if ready.get(entry.key) is entry:
                # Another request that has used it since goes on protecting it from itself.
                ours = entry.owner == request.number
                self.index.touch(entry, NO_OWNER if ours else entry.owner)
        request.used.clear()

    def _less_busy(self, request: Request, count: int) -> None:
        request.busy -= count
        if request.busy == 0 and request.done:
            self._settle(request)

    # --- lookups --------------------------------------------------------------------------------

    def open_window(
        self, request: Request
    ) -> tuple[Callable[[bytes], Entry | None], Callable[[Entry], None]]:
        """The lookups that follow are `request`'s, until another window or the step's end.

        Returns the two calls that `lookup` makes for a chunk that is ready (find it, note it), for
        callers that cannot afford a third. They are good until the window closes.
        """
        if self._window is not None:
            self.close_window()
        self.poll()
        self._window = request
        self._window_now = self._clock()
        self._view = self.index.ready if request.cacheable else _NOTHING
        return self._view.get, self._window_hits.append

    def lookup(self, key: bytes) -> Lookup:
        """Whether the window's request can have `key`. Starts a promotion where that helps."""
        entry = self._view.get(key)
        if entry is not None:
            self._window_hits.append(entry)
            return Lookup.HIT
        return self._lookup_below(key)

    def close_window(self) -> None:
        """End the window: if anything is pending, the request keeps what it already found."""
        request = self._window
        if request is None:
            return
        if self._window_pending:
            self._lease_hits(request)
            self._bound_wait(request)
        request.offered = not self._window_pending
        if self._window_pending or request.hit_leases or request.promoted_leases:
            self._waiting.add(request)
        self._window = None
        self._window_hits = []
        self._window_leased = 0
        self._window_pending = False
        self._view = _NOTHING
        if self._unread:
            self._submit_reads()
        for below in self._below:
            if below.unasked:
                self._submit_ask(below)

    def _bound_wait(self, request: Request) -> None:
        """Nobody waits for longer than computing would take, if that is known."""
        tokens = max(self._window_tokens.values(), default=0)
        self._window_tokens.clear()
        if self._gate is None or request.deadline is None or not request.gated:
            return
        recompute_s = self._gate.recompute_s(tokens)
        if recompute_s is not None:
            request.deadline = min(request.deadline, self._window_now + recompute_s)

    def presence(self, keys: Sequence[bytes]) -> list[Presence]:
        """Where each chunk of one group lies, as far as that is known now: a server is asked, for the next
        time. What the gate leaves alone is nowhere."""
        ready = self.index.ready
        found = [Presence.HOST if key in ready else Presence.NOWHERE for key in keys]
        now = self._clock()
        for below in self._below:
            missing = [i for i, where in enumerate(found) if where is Presence.NOWHERE]
            if not missing or not below.readable or below.reads.open:
                continue
            names = [self._tier_key(keys[i]) for i in missing]
            if below.asks is None:
                there: Sequence[bool | None] = below.tier.contains(names)
            else:
                there = [below.answers.has(name, now) for name in names]
                unknown = (name for name, known in zip(names, there, strict=True) if known is None)
                below.unasked |= dict.fromkeys(name for name in unknown if name not in below.asking)
                self._submit_ask(below)
            here = [i for i, is_there in zip(missing, there, strict=True) if is_there]
            if here and not self._worth(below, [keys[i] for i in here]):
                self.metrics.add("lmkv_misses", len(here), "gate")
                continue
            for i in here:
                found[i] = Presence.BELOW
        return found

    @property
    def promotable_bytes(self) -> int:
        """Slot bytes that may be promoted at once now; see `_promote`."""
        return self._half_bytes - self._promoting_bytes

    def source(self, request: Request, key: bytes) -> str:
        """Tier that `key` came from for this request: "host", or the tier it was promoted from."""
        return request.promoted.get(key, "host")

    def _lookup_below(self, key: bytes) -> Lookup:
        request = self._window
        if request is None or not request.cacheable or key in request.failed:
            return Lookup.MISS
        waits = request.waits(self._window_now)
        promotion = self._promotions.get(key)
        if promotion is not None:
            if (promotion.below.reads.open and not waits) or self._overdue(request):
                return Lookup.MISS
            added = 0
            if request not in promotion.waiters:
                promotion.waiters.append(request)
                added = promotion.entry.chunk_bytes
                request.promoted_bytes += slot_bytes(added)
            return self._defer(request, key, added)
        if key in self._stores:
            return Lookup.MISS if self._overdue(request) else self._defer(request, key, 0)
        tier_key = self._tier_key(key)
        for below in self._below:
            if not below.readable or below.reads.open:
                continue
            is_there = below.has(tier_key, self._window_now, *((WAIT_POLL_S,) if waits else ()))
            if is_there:
                return self._promote(below, key, request)
            if is_there is None:
                if self._overdue(request):
                    return Lookup.MISS
                if tier_key not in below.asking:
                    below.unasked[tier_key] = None
                self._defer(request, key, 0)
                return Lookup.UNKNOWN
        if waits:
            self._defer(request, key, 0)
            return Lookup.UNKNOWN
        return Lookup.MISS

    def _overdue(self, request: Request) -> bool:
        if request.deadline is None or self._window_now <= request.deadline:
            return False
        self.metrics.add("lmkv_misses", 1, "deadline")
        return True

    def _defer(self, request: Request, key: bytes, added_bytes: int) -> Lookup:
        """Have the request wait for `key`, for longer by the time that `added_bytes` may take."""
        if request.deadline is None:
            request.deadline = max(self._window_now + DEFER_S, request.wait_until or 0.0)
        request.deadline += added_bytes / DEFER_BYTES_PER_S
        self._window_pending = True
        if self._gate is not None:
            self._window_tokens[key[-GROUP_BYTES:]] += self._chunk_tokens[key[-GROUP_BYTES:]]
        return Lookup.PENDING

    def _promote(self, below: Below, key: bytes, request: Request) -> Lookup:
        if self._overdue(request):
            return Lookup.MISS
        self._lease_hits(request)  # a promotion must not evict what this lookup has found
        chunk_bytes = self._chunk_bytes[key[-GROUP_BYTES:]]
        size = slot_bytes(chunk_bytes)
        entry = None
        if max(request.promoted_bytes, self._promoting_bytes) + size <= self._half_bytes:
            entry = self.index.reserve(key, chunk_bytes, request.number)
        if entry is None:
            self.metrics.add("lmkv_misses", 1, "no_room")
            return Lookup.MISS
        promotion = Promotion(entry, below, [request])
        self._promotions[key] = promotion
        self._unread.append(promotion)
        request.promoted_bytes += size
        self._promoting_bytes += size
        return self._defer(request, key, chunk_bytes)

    def _lease_hits(self, request: Request) -> None:
        for entry in self._window_hits[self._window_leased :]:
            if entry.key not in request.hit_leases and entry.key not in request.promoted_leases:
                self.index.lease(entry)
                request.hit_leases[entry.key] = entry
        self._window_leased = len(self._window_hits)

    def _release(self, request: Request) -> None:
        for entry in request.promoted_leases.values():
            request.promoted_bytes -= slot_bytes(entry.chunk_bytes)
        for leases in (request.promoted_leases, request.hit_leases):
            for entry in leases.values():
                self.index.release(entry)
            leases.clear()
        request.deadline = None
        self._waiting.discard(request)

    # --- loads ----------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[bytes], request: Request) -> Transfer:
        """Claim chunks that lookups of this step answered with HIT. Leased until `complete_load`.

        Raises KeyError for any other key: there are no bytes to fill the engine's block with.
        """
        if self._window is request:
            self.close_window()
        entries = [self.index.ready[key] for key in keys]
        for key, entry in zip(keys, entries, strict=True):
            self.index.lease(entry)
            entry.owner = request.number
            request.loading[key] = entry
            self.metrics.add("lmkv_loaded_bytes", entry.chunk_bytes, "host")
        self.metrics.add("lmkv_loaded_chunks", len(entries), "host")
        request.used.extend(entries)
        self._loading.add(request)
        self._release(request)
        return self._transfer(entries)

    def complete_load(self, keys: Collection[bytes], request: Request) -> None:
        """All ranks have copied these chunks."""
        for key in keys:
            entry = request.loading.pop(key, None)
            if entry is not None:
                self.index.release(entry)
        if not request.loading:
            self._loading.discard(request)

    # --- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self,
        keys: Sequence[bytes],
        request: Request,
        position: Callable[[bytes], int] | None = None,
    ) -> tuple[list[bytes], Transfer | None]:
        """Reserve slots for the chunks among `keys` that are not there yet.

        `position` gives a key's place in the prompt, for keys that do not come in that order. What
        does not fit is dropped from the end of the prompt. Returns the accepted keys in the order
        given, and their transfer (None if there is nothing to copy).
        """
        if self._window is not None:
            self._lease_hits(self._window)  # a store must not evict what a lookup has just found
        ready, stores, promotions = self.index.ready, self._stores, self._promotions
        ordered = keys if position is None else sorted(keys, key=position)
        reserved: dict[bytes, Entry] = {}
        for key in ordered:
            entry = ready.get(key)
            if entry is not None:
                request.used.append(entry)
                entry.owner = request.number
                continue
            if key in stores or key in promotions or key in reserved or not request.cacheable:
                continue
            if not request.store_stopped:
                entry = self.index.reserve(key, self._chunk_bytes[key[-GROUP_BYTES:]], request.number)
            if entry is None:
                # A later chunk without this one could never be loaded: its prefix has a hole.
                request.store_stopped = True
                self.metrics.add("lmkv_skipped_stores", 1, "slab_full")
                continue
            reserved[key] = entry
        if not reserved:
            return [], None
        accepted = list(reserved) if position is None else [key for key in keys if key in reserved]
        transfer = self._transfer([reserved[key] for key in accepted])
        for key, entry in reserved.items():
            self._stores_begun += 1
            stores[key] = Filling(self._stores_begun, entry, transfer.ticket, request)
        request.busy += len(reserved)
        return accepted, transfer

    def complete_store(self, keys: Collection[bytes], request: Request, success: bool = True) -> None:
        """All ranks have filled these slots, or reported that they could not."""
        self._read_failures()
        stored = bytes_stored = 0
        # One that began before a reset may end beside another one's store of the same chunk.
        stores = self._stores
        begun = [stores.pop(key) for key in keys if key in stores and stores[key].request is request]
        # In the order of the prompt, so that a prefix lies in one piece below.
        for _, entry, ticket, _ in sorted(begun):
            if not success or ticket in self._failed_tickets or ticket <= self._all_failed_below:
                self.index.abort(entry)
                self.metrics.add("lmkv_skipped_stores", 1, "copy_failed")
                continue
            self.index.commit(entry)
            request.used.append(entry)
            for below in self._below:
                if below.writable and not below.demote:
                    self._queue_write(below, entry, request)
            self.index.release(entry)
            stored += 1
            bytes_stored += entry.chunk_bytes
        if stored:
            self.metrics.add("lmkv_stored_chunks", stored, "host")
            self.metrics.add("lmkv_stored_bytes", bytes_stored, "host")
        self._less_busy(request, len(begun))

    def _read_failures(self) -> None:
        for i, rank in enumerate(self._ranks):
            count = rank.failed_count
            if count == self._failed_seen[i]:
                continue
            tickets = rank.failed_since(self._failed_seen[i])
            self._failed_seen[i] = count
            if tickets is None:
                self._all_failed_below = self._ticket
            else:
                self._failed_tickets.update(tickets)
            self._log.warning("copy", "rank %d could not copy KV out of the engine; not stored", i)
        if self._failed_tickets:
            over = min(rank.watermark for rank in self._ranks)
            in_use = {filling.ticket for filling in self._stores.values()}
            self._failed_tickets = {t for t in self._failed_tickets if t > over or t in in_use}

    def _demote(self) -> None:
        """Queue what is evicted next, while there is time to write it."""
        for below in self._below:
            if not (below.writable and below.demote) or below.writes.open:
                continue
            for entry in self.index.next_victims(_DEMOTE_SHARE):
                if not entry.demoted:
                    entry.demoted = self._queue_write(below, entry, self._demoting)

    def _queue_write(self, below: Below, entry: Entry, request: Request) -> bool:
        size = slot_bytes(entry.chunk_bytes)
        if below.writing_bytes + size > self._half_bytes:
            self.metrics.add("lmkv_skipped_stores", 1, "write_queue_full")
            return False
        if below.writes.open:
            self.metrics.add("lmkv_skipped_stores", 1, "breaker_open")
            return False
        self.index.lease(entry)
        request.busy += 1
        below.queue.append((entry, request))
        below.queued_bytes += size
        below.writing_chunks += 1
        below.writing_bytes += size
        return True

    def _transfer(self, entries: list[Entry]) -> Transfer:
        self._ticket += 1
        return Transfer(self._ticket, [entry.offset for entry in entries])

    # --- the step -------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Once a scheduler step: submit reads and writes, end leases that were not claimed."""
        self.close_window()
        self.poll()
        if self._waiting:
            now = self._clock()
            for request in list(self._waiting):
                # Offered but not claimed in this step: the engine had no free blocks, and the
                # request will look its chunks up again.
                if request.offered or request.deadline is None or now > request.deadline:
                    self._end_wait(request)
        if any(below.demote for below in self._below):
            self._demote()
        for below in self._below:
            while below.queue and self._may_write(below) and self._submit_write(below):
                pass
        self._update_gauges()

    def poll(self) -> None:
        """Take in what the executors finished and what the slab gained."""
        if self._slab_growing:
            self._grow()
        for below in self._below:
            if below.reads.pending:
                for job in below.reads.poll():
                    self._end_read_job(below, job)
            if below.writes.pending:
                for job in below.writes.poll():
                    self._finish_write(below, job.tag, self._outcome(below, below.writes, job, len(job.tag)))
            if below.asks is not None and below.asks.pending:
                for job in below.asks.poll():
                    self._finish_ask(below, below.asks, job)
        if self._parked:
            self._free_parked(min(rank.watermark for rank in self._ranks))

    @property
    def rest_s(self) -> float:
        """How long the engine may pause when it has nothing to compute: not, if no request waits."""
        waits = [request.wait_until is not None for request in self._waiting if request.deadline is not None]
        if not waits:
            return 0.0
        return _REST_S if all(waits) else _SHORT_REST_S

    @property
    def pending_work(self) -> bool:
        """Whether `end_step` should go on being called although no request runs."""
        return bool(self._parked) or any(b.queue or b.writes.pending for b in self._below)

    def _end_wait(self, request: Request) -> None:
        deadline = request.deadline
        self._release(request)
        request.deadline = deadline  # its waiting time is spent

    def _grow(self) -> None:
        final = self._slab.fully_faulted
        ready = self._slab.ready_bytes
        self._slots.usable_extents = min(ready // self._slots.extent_bytes, self._slots.num_extents)
        self._half_bytes = ready // 2
        self._slab_growing = not final
        self.metrics.set("lmkv_ready_bytes", ready)

    def _update_gauges(self) -> None:
        self.metrics.set("lmkv_pending_writes", self.pending_writes)
        self.metrics.set("lmkv_host_chunks", len(self.index.ready))
        self.metrics.set("lmkv_leased_bytes", self.index.leased_bytes)
        if (now := self._clock()) >= self._next_events:
            self._next_events = now + _EVENTS_S
            self._update_events()
        evicted = self.index.evictions - self.metrics.get("lmkv_evictions")
        if evicted:
            self.metrics.add("lmkv_evictions", evicted)
        for below in self._below:
            counted = self.metrics.get("lmkv_breaker_trips", below.name)
            if below.trips > counted:
                self.metrics.add("lmkv_breaker_trips", below.trips - counted, below.name)

    def _update_events(self) -> None:
        """Take over what the tiers counted of themselves, and the gate's speeds."""
        for below in self._below:
            for event, count in below.tier.stats().counters.items():
                counted = self.metrics.get("lmkv_tier_events", below.name, event)
                if count > counted:
                    self.metrics.add("lmkv_tier_events", count - counted, below.name, event)
        if self._gate is not None:
            if speed := self._gate.prefill.per_s:
                self.metrics.set("lmkv_prefill_tokens_per_s", round(speed))
            for tier, load in self._gate.loads.items():
                self.metrics.set("lmkv_load_bytes_per_s", round(load.per_s or 0), tier)

    @property
    def pending_writes(self) -> int:
        """Chunks queued for, or being written to, the tiers below."""
        return sum(below.writing_chunks for below in self._below)

    # --- traffic with the tiers below -----------------------------------------------------------

    def _tier_key(self, key: bytes) -> bytes:
        return make_key(self.namespace.digest, key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big"))

    def _buffer(self, entry: Entry) -> memoryview:
        return self._slab.data[entry.offset : entry.offset + entry.chunk_bytes]

    def _submit_ask(self, below: Below) -> None:
        """Ask a server for all that the window did not know of."""
        keys, below.unasked = list(below.unasked), {}
        ask = partial(below.tier.contains, keys)
        if keys and below.asks is not None and below.asks.submit(ask, keys, ASK_DEADLINE_S):
            below.asking.update(keys)

    def _finish_ask(self, below: Below, asks: Executor, job: Job) -> None:
        below.asking.difference_update(job.tag)
        if job.error is not None:
            self._log.warning(below.name, "the %s tier does not answer: %s", below.name, job.error)
            asks.report(False)
            return
        now = self._clock()
        for key, is_there in zip(job.tag, job.result, strict=True):
            below.answers.note(key, is_there, now)

    def _submit_reads(self) -> None:
        unread, self._unread = self._unread, []
        for below in self._below:
            wanted = [promotion for promotion in unread if promotion.below is below]
            if wanted and not self._pays(below, wanted):
                self._finish_read(below, wanted, [Status.REJECTED] * len(wanted), "gate")
                continue
            reading = Reading(self._clock())
            for batch in _batches(wanted, READ_BATCH_BYTES):
                keys = [self._tier_key(promotion.entry.key) for promotion in batch]
                buffers = [self._buffer(promotion.entry) for promotion in batch]
                size = sum(buffer.nbytes for buffer in buffers)
                deadline_s = TIER_DEADLINE_S + size / DEFER_BYTES_PER_S
                run = partial(below.tier.get, keys, buffers)
                if below.reads.submit(run, (batch, reading), deadline_s):
                    reading.jobs += 1
                else:
                    self._finish_read(below, batch, [Status.REJECTED] * len(batch), "rejected")

    def _pays(self, below: Below, wanted: list[Promotion]) -> bool:
        """Whether the gate lets these chunks be read."""
        gated = all(request.gated for promotion in wanted for request in promotion.waiters)
        return not gated or self._worth(below, [promotion.entry.key for promotion in wanted])

    def _worth(self, below: Below, keys: Sequence[bytes]) -> bool:
        """Whether loading these chunks beats computing them."""
        if self._gate is None:
            return True
        groups = Counter(key[-GROUP_BYTES:] for key in keys)  # chunks of several hold the same tokens
        size = sum(count * self._chunk_bytes[group] for group, count in groups.items())
        tokens = max(count * self._chunk_tokens[group] for group, count in groups.items())
        return self._gate.worth(below.name, size, tokens)

    def _end_read_job(self, below: Below, job: Job) -> None:
        batch, reading = job.tag
        statuses = self._outcome(below, below.reads, job, len(batch))
        self._finish_read(below, batch, statuses)
        if below.asks is not None:
            now = self._clock()
            for promotion, status in zip(batch, statuses, strict=True):
                if status in (Status.MISS, Status.CORRUPT):
                    below.answers.note(self._tier_key(promotion.entry.key), False, now)
        reading.jobs -= 1
        reading.loaded_bytes += sum(
            p.entry.chunk_bytes for p, status in zip(batch, statuses, strict=True) if status is Status.OK
        )
        if self._gate is not None and reading.jobs == 0 and reading.loaded_bytes:
            self._gate.loaded(below.name, reading.loaded_bytes, self._clock() - reading.begun)

    def _finish_read(
        self, below: Below, batch: list[Promotion], statuses: list[Status], reason: str | None = None
    ) -> None:
        """End promotions. `reason`: why they failed, in the metrics, if it is not the status."""
        loaded = bytes_loaded = 0
        now = self._clock()
        for promotion, status in zip(batch, statuses, strict=True):
            entry = promotion.entry
            size = slot_bytes(entry.chunk_bytes)
            self._promoting_bytes -= size
            if not promotion.stale:
                del self._promotions[entry.key]
            if status != Status.OK or promotion.stale:
                self.index.abort(entry)
                for request in promotion.waiters:
                    request.promoted_bytes -= size
                    # A tier that recovers while the request waits anyway is asked again.
                    if status != Status.UNAVAILABLE or not request.waits(now):
                        request.failed.add(entry.key)
                self.metrics.add("lmkv_misses", 1, reason or (status.name.lower() if status else "reset"))
                continue
            self.index.commit(entry)
            for request in promotion.waiters:
                if request.done or request not in self._waiting:
                    request.promoted_bytes -= size
                else:
                    self.index.lease(entry)
                    request.promoted_leases[entry.key] = entry
                request.promoted[entry.key] = below.name
            self.index.release(entry)
            loaded += 1
            bytes_loaded += entry.chunk_bytes
        if loaded:
            self.metrics.add("lmkv_loaded_chunks", loaded, below.name)
            self.metrics.add("lmkv_loaded_bytes", bytes_loaded, below.name)

    def _may_write(self, below: Below) -> bool:
        """Whether another write job is due. Asked before one is put together: when all threads are
        at work, that would be done again every step."""
        jobs = below.writes.pending
        return jobs == 0 or (jobs < WRITE_THREADS and below.queued_bytes >= WRITE_BATCH_BYTES)

    def _submit_write(self, below: Below) -> bool:
        """Start one write job; False when the executor refuses it.

        What it takes stays queued until the job has it: an engine that is told to end may raise SystemExit
        from a signal handler anywhere in here, and `close` then still writes all of it.
        """
        batch: list[tuple[Entry, Request]] = []
        there: list[tuple[Entry, Request]] = []
        keys: list[bytes] = []
        size = 0
        for entry, request in below.queue:
            if size >= WRITE_BATCH_BYTES:
                break
            key = self._tier_key(entry.key)
            if below.has(key, self._clock()):  # another engine, or this one before a restart
                there.append((entry, request))
                continue
            batch.append((entry, request))
            keys.append(key)
            size += entry.chunk_bytes
        if batch:
            buffers = [self._buffer(entry) for entry, _ in batch]
            deadline_s = TIER_DEADLINE_S + size / DEFER_BYTES_PER_S
            if not below.writes.submit(partial(below.tier.put, keys, buffers), batch, deadline_s):
                if below.writes.open:
                    self._drop_queue(below, "breaker_open")
                return False
        for _ in range(len(batch) + len(there)):
            entry, _request = below.queue.popleft()
            below.queued_bytes -= slot_bytes(entry.chunk_bytes)
        for entry, request in there:
            self._end_write(below, entry, request)
        return True

    def _drop_queue(self, below: Below, reason: str) -> None:
        for entry, request in below.queue:
            self._end_write(below, entry, request)
            self.metrics.add("lmkv_skipped_stores", 1, reason)
        below.queue.clear()
        below.queued_bytes = 0

    def _end_write(self, below: Below, entry: Entry, request: Request) -> None:
        below.writing_chunks -= 1
        below.writing_bytes -= slot_bytes(entry.chunk_bytes)
        self.index.release(entry, coldest=request is self._demoting)
        self._less_busy(request, 1)

    def _finish_write(self, below: Below, batch: list[tuple[Entry, Request]], statuses: list[Status]) -> None:
        stored = bytes_stored = 0
        now = self._clock()
        for (entry, request), status in zip(batch, statuses, strict=True):
            self._end_write(below, entry, request)
            if status == Status.OK:
                stored += 1
                bytes_stored += entry.chunk_bytes
                if below.asks is not None:
                    below.answers.note(self._tier_key(entry.key), True, now)
            else:
                self.metrics.add("lmkv_skipped_stores", 1, status.name.lower())
        if stored:
            self.metrics.add("lmkv_stored_chunks", stored, below.name)
            self.metrics.add("lmkv_stored_bytes", bytes_stored, below.name)

    def _outcome(self, below: Below, executor: Executor, job: Job, count: int) -> list[Status]:
        """The job's statuses, `count` of them; tells the breaker, and makes a raised error UNAVAILABLE."""
        statuses: list[Status] = job.result
        if job.error is not None:
            self._log.warning(below.name, "the %s tier failed: %r", below.name, job.error)
            statuses = [Status.UNAVAILABLE] * count
        healthy = Status.UNAVAILABLE not in statuses
        if not healthy:
            self._log.warning(below.name, "the %s tier fails; it is left alone for a while", below.name)
        executor.report(healthy)
        return statuses

    # --- reset and end --------------------------------------------------------------------------

    def reset(self) -> None:
        """Serve nothing older than now, and leave what other engines share alone.

        From here on this engine uses a namespace of its own until it restarts, because what lies
        below under the old one may be what the caller wants to be rid of (old weights).
        """
        self.close_window()
        for promotion in self._promotions.values():
            promotion.stale = True
        self._promotions.clear()
        for below in self._below:
            self._drop_queue(below, "reset")
        for request in list(self._waiting):
            self._release(request)
        # vLLM before 0.33 never completes jobs that are in flight now: their slots are parked
        # until the ranks have finished every transfer up to the present ticket.
        parked = []
        for filling in self._stores.values():
            parked.append(filling.entry)
            self._less_busy(filling.request, 1)
        self._stores.clear()
        for request in self._loading:
            parked.extend(request.loading.values())
            request.loading.clear()
        self._loading.clear()
        self.index.clear()
        if parked:
            self._parked.append((self._ticket, parked))
        fields = {**self.namespace.fields, "reset": uuid.uuid4().hex}
        self.namespace = Namespace.of(fields)
        self._log.warning(
            "reset",
            "the cache was reset; until it restarts this engine shares nothing with others (namespace %s)",
            self.namespace.digest.hex()[:16],
        )

    def _free_parked(self, watermark: int) -> None:
        still = []
        for ticket, entries in self._parked:
            if ticket > watermark:
                still.append((ticket, entries))
                continue
            for entry in entries:
                self.index.release(entry)
        self._parked = still

    def close(self) -> bool:
        """Write out what is queued, within `FLUSH_S`, and close the tiers.

        False when a tier still hangs in a job: the slab must stay mapped then.
        """
        self.close_window()
        deadline = time.monotonic() + FLUSH_S
        while any(b.queue or b.writes.pending for b in self._below):
            left = deadline - time.monotonic()
            if left <= 0 or not all(b.writes.drain(left) for b in self._below):
                self._log.warning("flush", "shutting down with %d chunks unwritten", self.pending_writes)
                break
            self.end_step()
        quiet = True
        for below in self._below:
            quiet = below.close() and quiet
        return quiet


def _batches(promotions: list[Promotion], limit: int) -> list[list[Promotion]]:
    """Cut into runs of at most `limit` bytes (at least one chunk each)."""
    out: list[list[Promotion]] = []
    size = limit
    for promotion in promotions:
        chunk = promotion.entry.chunk_bytes
        if size + chunk > limit:
            out.append([])
            size = 0
        out[-1].append(promotion)
        size += chunk
    return out
