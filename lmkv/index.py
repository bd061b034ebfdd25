"""What lies in the host tier: key -> slot, leases, and eviction.

Pure Python, deterministic, single-threaded: only the scheduler's thread calls it. A chunk is
reserved, filled, committed, and from then on found; a lease keeps it from being evicted.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from lmkv.eviction import LRU, Evictable, EvictionPolicy
from lmkv.slots import SlotAllocator, slot_bytes

#: Owner that never equals a request's number.
NO_OWNER = 0


class Entry(Evictable):
    """One chunk in the host tier."""

    __slots__ = ("chunk_bytes", "demoted", "key", "leases", "offset")

    def __init__(self, key: bytes, offset: int, chunk_bytes: int) -> None:
        super().__init__()
        self.key = key
        #: The slot: byte offset in the slab's data.
        self.offset = offset
        self.chunk_bytes = chunk_bytes
        #: Holders that keep the slot; an entry without any is evictable.
        self.leases = 1
        #: It was given to the tiers that take what is about to be evicted.
        self.demoted = False


class HostIndex:
    """Chunks of one namespace in the slab."""

    def __init__(self, slots: SlotAllocator, policy: Callable[[], EvictionPolicy] = LRU) -> None:
        self.slots = slots
        #: Chunks that may be loaded. Read it directly on hot paths; change it only through methods.
        self.ready: dict[bytes, Entry] = {}
        self.evictions = 0
        #: Bytes of all slots that are leased (being filled, read or written out).
        self.leased_bytes = 0
        self._policies = {size: policy() for size in slots.sizes}
        self._by_offset: dict[int, Entry] = {}  # evictable and leased alike, only with several classes

    def match_prefix(self, keys: Iterable[bytes]) -> int:
        """How many leading keys are ready."""
        ready = self.ready
        count = 0
        for key in keys:
            if key not in ready:
                break
            count += 1
        return count

    def reserve(self, key: bytes, chunk_bytes: int, owner: int) -> Entry | None:
        """A leased slot to fill for `key`, evicting if need be. Invisible until `commit`.

        None when every slot is leased, or when only chunks that `owner` itself used last could
        be evicted: a prompt larger than the slab keeps its head instead of eating it.
        """
        size = slot_bytes(chunk_bytes)
        offset = self.slots.allocate(size)
        if offset is None:
            offset = self._evict(size, owner)
            if offset is None:
                return None
        entry = Entry(key, offset, chunk_bytes)
        entry.owner = owner
        self.leased_bytes += size
        if len(self._policies) > 1:
            self._by_offset[offset] = entry
        return entry

    def commit(self, entry: Entry) -> None:
        """Make a filled entry visible. Its lease stays with the caller."""
        self.ready[entry.key] = entry

    def abort(self, entry: Entry) -> None:
        """Give back a reserved entry that was not filled."""
        self.leased_bytes -= slot_bytes(entry.chunk_bytes)
        self._free(entry)

    def lease(self, entry: Entry) -> None:
        """Keep `entry` from being evicted until the matching `release`."""
        if entry.leases == 0:
            size = slot_bytes(entry.chunk_bytes)
            self._policies[size].remove(entry)
            self.leased_bytes += size
        entry.leases += 1

    def release(self, entry: Entry, *, coldest: bool = False) -> None:
        """End one lease. The last one makes the entry evictable, or frees it if it was removed.

        `coldest`: it was leased to be demoted, so it is among the next to be evicted and not the last.
        """
        entry.leases -= 1
        if entry.leases == 0:
            size = slot_bytes(entry.chunk_bytes)
            self.leased_bytes -= size
            if self.ready.get(entry.key) is entry:
                self._policies[size].insert(entry, coldest=coldest)
            else:
                self._free(entry)

    def touch(self, entry: Entry, owner: int) -> None:
        """Note that the request `owner` used `entry`."""
        entry.owner = owner
        if entry.leases == 0:
            policy = self._policies[slot_bytes(entry.chunk_bytes)]
            policy.remove(entry)
            policy.insert(entry)

    def next_victims(self, share: int) -> list[Entry]:
        """What the next reservations would evict, if one in `share` of all slots of each class were
        reserved now; the first victim first."""
        victims: list[Entry] = []
        for size, policy in self._policies.items():
            ahead = self.slots.room(size) // share - self.slots.spare(size)
            for entry in islice(policy.oldest_first(), max(0, ahead)):
                assert isinstance(entry, Entry)
                victims.append(entry)
        return victims

    def remove(self, key: bytes) -> bool:
        """Forget a ready chunk; its slot is freed now or when its last lease ends."""
        entry = self.ready.pop(key, None)
        if entry is None:
            return False
        if entry.leases == 0:
            self._policies[slot_bytes(entry.chunk_bytes)].remove(entry)
            self._free(entry)
        return True

    def clear(self) -> None:
        """Forget every ready chunk."""
        for key in list(self.ready):
            self.remove(key)

    def _free(self, entry: Entry) -> None:
        self._by_offset.pop(entry.offset, None)
        self.slots.free(entry.offset)

    def _evict(self, size: int, owner: int) -> int | None:
        victim = self._policies[size].victim()
        if victim is None:
            return self._steal_extent(size, owner)
        assert isinstance(victim, Entry)
        if victim.owner == owner:
            return None
        self.remove(victim.key)
        self.evictions += 1
        return self.slots.allocate(size)

    def _steal_extent(self, size: int, owner: int) -> int | None:
        """Evict all chunks of another class's extent for a class that has nothing to evict."""
        for other, policy in self._policies.items():
            victim = policy.victim()
            if other == size or victim is None:
                continue
            assert isinstance(victim, Entry)
            held = [self._by_offset.get(slot) for slot in self.slots.extent_slots(victim.offset)]
            entries = [entry for entry in held if entry is not None]
            if any(entry.leases or entry.owner == owner for entry in entries):
                continue
            for entry in entries:
                self.remove(entry.key)
                self.evictions += 1
            self.slots.reassign(victim.offset, size)
            return self.slots.allocate(size)
        return None
