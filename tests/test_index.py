"""The host index and its slots: a state machine against a simple model, and the rules by example."""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmkv.eviction import LRU, Evictable
from lmkv.index import NO_OWNER, Entry, HostIndex
from lmkv.slots import SLOT_ALIGNMENT, SlotAllocator, slot_bytes

PAGE = SLOT_ALIGNMENT


def make_index(capacity_pages: int, *slot_pages: int) -> HostIndex:
    return HostIndex(SlotAllocator(capacity_pages * PAGE, [pages * PAGE for pages in slot_pages]))


def put(index: HostIndex, name: str, owner: int = 1, pages: int = 1) -> Entry:
    """Reserve, commit and release one chunk that must find room."""
    entry = index.reserve(name.encode(), pages * PAGE, owner)
    assert entry is not None, name
    index.commit(entry)
    index.release(entry)
    return entry


def names(index: HostIndex) -> str:
    return "".join(sorted(key.decode() for key in index.ready))


# --- slots


def test_slot_bytes_rounds_up() -> None:
    assert [slot_bytes(n) for n in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]


def test_slots_come_in_ascending_order() -> None:
    slots = SlotAllocator(64 * PAGE, [PAGE, 4 * PAGE])
    offsets = [slots.allocate(PAGE) for _ in range(8)]
    assert offsets == [i * PAGE for i in range(8)]


def test_one_class_wastes_less_than_a_slot() -> None:
    slots = SlotAllocator(10 * PAGE, [3 * PAGE])
    assert [slots.allocate(3 * PAGE) for _ in range(4)] == [0, 3 * PAGE, 6 * PAGE, None]


def test_usable_limit_grows() -> None:
    slots = SlotAllocator(4 * PAGE, [PAGE])
    slots.usable_extents = 0
    assert slots.allocate(PAGE) is None
    slots.usable_extents = 2
    assert [slots.allocate(PAGE) for _ in range(3)] == [0, PAGE, None]
    slots.usable_extents = 4
    assert slots.allocate(PAGE) == 2 * PAGE


@pytest.mark.parametrize("pages", [(7, 9), (1, 16), (3, 5, 7), (511, 512), (1, 1, 10), (1, 2, 10)])
def test_a_small_slab_still_has_two_slots_of_every_class(pages: tuple[int, ...]) -> None:
    index = make_index(2 * len(pages) * max(pages), *pages)
    for round_ in range(2):
        for i, size in enumerate(pages):
            assert index.reserve(bytes([i, round_]), size * PAGE, owner=1) is not None


# --- prefix, LRU and owners


def test_match_prefix_stops_at_the_first_hole() -> None:
    index = make_index(8, 1)
    for name in "abde":
        put(index, name)
    hidden = index.reserve(b"c", PAGE, 1)
    assert hidden is not None
    assert index.match_prefix([b"a", b"b", b"c", b"d"]) == 2  # reserved is not ready
    index.commit(hidden)
    assert index.match_prefix([b"a", b"b", b"c", b"d", b"x", b"e"]) == 4
    assert index.match_prefix([]) == 0
    assert index.match_prefix([b"x", b"a"]) == 0


def test_match_prefix_reads_no_further_than_needed() -> None:
    index = make_index(8, 1)
    put(index, "a")
    keys = iter([b"a", b"x", b"b", b"c"])
    assert index.match_prefix(keys) == 1
    assert list(keys) == [b"b", b"c"]


def test_least_recently_used_goes_first() -> None:
    index = make_index(4, 1)
    entries = {name: put(index, name) for name in "abcd"}
    index.touch(entries["a"], owner=2)
    put(index, "e", owner=3)
    assert names(index) == "acde"
    index.lease(entries["c"])
    put(index, "f", owner=3)
    assert names(index) == "acef"
    index.release(entries["c"])  # a lease is a use
    put(index, "g", owner=4)
    assert names(index) == "cefg"
    assert index.evictions == 3


def test_a_leased_chunk_is_never_evicted() -> None:
    index = make_index(2, 1)
    a, b = put(index, "a"), put(index, "b")
    index.lease(a)
    index.lease(b)
    assert index.reserve(b"c", PAGE, owner=2) is None
    index.release(b)
    put(index, "c", owner=2)
    assert names(index) == "ac"
    assert index.leased_bytes == PAGE


def test_a_prompt_larger_than_the_slab_keeps_its_head() -> None:
    index = make_index(4, 1)
    put(index, "x", owner=1)
    for name in "abcd":
        put(index, name, owner=2)
    assert index.reserve(b"e", PAGE, owner=2) is None
    assert names(index) == "abcd"
    put(index, "y", owner=3)  # another request may evict them
    assert names(index) == "bcdy"


def test_touching_without_owner_lets_everybody_evict() -> None:
    index = make_index(2, 1)
    a, b = put(index, "a", owner=2), put(index, "b", owner=2)
    for entry in (b, a):
        index.touch(entry, NO_OWNER)
    put(index, "c", owner=2)
    assert names(index) == "ac"


def test_a_removed_chunk_keeps_its_slot_until_its_last_lease_ends() -> None:
    index = make_index(1, 1)
    a = put(index, "a")
    index.lease(a)
    index.lease(a)
    assert index.remove(b"a")
    assert not index.remove(b"a")
    index.release(a)
    assert index.reserve(b"b", PAGE, owner=2) is None
    index.release(a)
    assert put(index, "b", owner=2).offset == a.offset
    assert names(index) == "b"


def test_a_key_stored_again_while_its_old_slot_is_leased() -> None:
    index = make_index(2, 1)
    old = put(index, "a")
    index.lease(old)
    index.clear()
    new = put(index, "a")
    assert new.offset != old.offset
    index.release(old)  # frees the old slot, not the new chunk
    assert index.ready[b"a"] is new
    put(index, "b", owner=2)
    assert names(index) == "ab"


def test_an_aborted_chunk_leaves_nothing() -> None:
    index = make_index(1, 1)
    entry = index.reserve(b"a", PAGE, 1)
    assert entry is not None and index.leased_bytes == PAGE
    index.abort(entry)
    assert index.leased_bytes == 0 and not index.ready
    put(index, "b")


def test_a_class_without_chunks_takes_an_extent_of_another() -> None:
    index = make_index(4, 1, 2)
    for i in range(4):
        put(index, "abcd"[i], owner=1)
    entry = index.reserve(b"X", 2 * PAGE, owner=2)
    assert entry is not None and entry.offset == 0
    assert names(index) == "cd"
    assert index.evictions == 2


@pytest.mark.parametrize("hold", ["lease", "owner"])
def test_an_extent_in_use_is_not_taken(hold: str) -> None:
    index = make_index(2, 1, 2)
    put(index, "a", owner=1)
    b = put(index, "b", owner=1)
    if hold == "lease":
        index.lease(b)
    else:
        index.touch(b, owner=2)
    assert index.reserve(b"X", 2 * PAGE, owner=2) is None
    assert names(index) == "ab"


class CountingLRU(LRU):
    """Counts the calls, so that their number can be compared instead of time."""

    calls: ClassVar[Counter[str]] = Counter()

    def insert(self, entry: Evictable, *, coldest: bool = False) -> None:
        self.calls["insert"] += 1
        super().insert(entry, coldest=coldest)

    def remove(self, entry: Evictable) -> None:
        self.calls["remove"] += 1
        super().remove(entry)

    def victim(self) -> Evictable | None:
        self.calls["victim"] += 1
        return super().victim()


@pytest.mark.parametrize("slots", [10, 10_000])
def test_an_eviction_costs_the_same_in_a_large_index(slots: int) -> None:
    index = HostIndex(SlotAllocator(slots * PAGE, [PAGE]), CountingLRU)
    for i in range(slots):
        entry = index.reserve(b"%d" % i, PAGE, 1)
        assert entry is not None
        index.commit(entry)
        index.release(entry)
    CountingLRU.calls.clear()
    put(index, "new", owner=2)
    assert CountingLRU.calls == {"victim": 1, "remove": 1, "insert": 1}


# --- the state machine

SIZES = [(1,), (1, 4), (2, 3), (1, 2, 5)]
KEYS = [b"%d" % i for i in range(12)]
OWNERS = st.integers(1, 3)


class IndexMachine(RuleBasedStateMachine):
    """The model: what is ready, which leases are held and by how many, and each class's LRU order."""

    @initialize(sizes=st.sampled_from(SIZES), pages=st.integers(8, 40), usable=st.integers(0, 3))
    def start(self, sizes: tuple[int, ...], pages: int, usable: int) -> None:
        self.index = make_index(pages, *sizes)
        self.slots = self.index.slots
        self.slots.usable_extents = min(usable, self.slots.num_extents)
        self.pages = sizes
        self.filling: list[Entry] = []
        self.leases: Counter[Entry] = Counter()
        self.ready: dict[bytes, Entry] = {}
        self.lru: list[Entry] = []  # unleased ready entries, oldest first

    def size(self, key: bytes) -> int:
        return self.pages[int(key) % len(self.pages)] * PAGE

    def forget(self, entry: Entry) -> None:
        del self.ready[entry.key]
        if entry in self.lru:
            self.lru.remove(entry)

    @rule(extents=st.integers(1, 10))
    def grow(self, extents: int) -> None:
        self.slots.usable_extents = min(self.slots.usable_extents + extents, self.slots.num_extents)

    @rule(key=st.sampled_from(KEYS), owner=OWNERS)
    def reserve(self, key: bytes, owner: int) -> None:
        if key in self.ready or any(entry.key == key for entry in self.filling):
            return
        size = self.size(key)
        in_class = [entry for entry in self.lru if self.size(entry.key) == size]
        evictions = self.index.evictions
        entry = self.index.reserve(key, size, owner)
        gone = [old for old in self.ready.values() if old.key not in self.index.ready]
        assert self.index.evictions - evictions == len(gone)
        assert all(not self.leases[old] and old.owner != owner for old in gone)
        if entry is None:
            assert not gone
            # Refused with a victim at hand only for the sake of what this request used itself.
            assert not in_class or in_class[0].owner == owner
            return
        if gone and in_class:
            assert gone == in_class[:1]  # the least recently used, and no more than needed
        for old in gone:
            self.forget(old)
        self.filling.append(entry)
        self.leases[entry] = 1

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), success=st.booleans())
    def fill(self, data: st.DataObject, success: bool) -> None:
        entry = data.draw(st.sampled_from(self.filling))
        self.filling.remove(entry)
        if success:
            self.index.commit(entry)
            self.ready[entry.key] = entry
        else:
            self.index.abort(entry)
            del self.leases[entry]

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        entry = self.ready[data.draw(st.sampled_from(sorted(self.ready)))]
        self.index.lease(entry)
        self.leases[entry] += 1
        if entry in self.lru:
            self.lru.remove(entry)

    def releasable(self) -> list[Entry]:
        return sorted((e for e in +self.leases if e not in self.filling), key=lambda e: e.offset)

    @precondition(lambda self: self.releasable())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.releasable()))
        self.index.release(entry)
        self.leases[entry] -= 1
        if not self.leases[entry] and self.ready.get(entry.key) is entry:
            self.lru.append(entry)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), owner=OWNERS)
    def touch(self, data: st.DataObject, owner: int) -> None:
        entry = self.ready[data.draw(st.sampled_from(sorted(self.ready)))]
        self.index.touch(entry, owner)
        if entry in self.lru:
            self.lru.remove(entry)
            self.lru.append(entry)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: bytes) -> None:
        assert self.index.remove(key) == (key in self.ready)
        if key in self.ready:
            self.forget(self.ready[key])

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.ready.clear()
        self.lru.clear()

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=6))
    def match(self, keys: list[bytes]) -> None:
        expected = 0
        while expected < len(keys) and keys[expected] in self.ready:
            expected += 1
        assert self.index.match_prefix(keys) == expected

    @invariant()
    def ready_is_exact(self) -> None:
        assert self.index.ready == self.ready

    @invariant()
    def leased_bytes_are_exact(self) -> None:
        assert self.index.leased_bytes == sum(self.size(entry.key) for entry in +self.leases)

    @invariant()
    def slots_never_overlap_and_none_is_lost(self) -> None:
        held = {*(+self.leases), *self.ready.values()}
        used = [(entry.offset, self.size(entry.key)) for entry in held]
        free = [(offset, size) for size, offsets in self.slots._free.items() for offset in offsets]
        extent = self.slots.extent_bytes
        limit = self.slots.usable_extents * extent
        end = 0
        for offset, size in sorted(used + free):
            assert offset >= end
            assert offset // extent == (offset + size - 1) // extent
            end = offset + size
        assert end <= limit
        # What has been cut into slots is all there, but for the remainder at an extent's end.
        whole = sum(extent // size * size for size in self.slots._size_of_extent if size)
        assert sum(size for _, size in used + free) == whole


IndexMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestIndexMachine = IndexMachine.TestCase
