"""Slots of the host slab: which bytes are free, in size classes.

A slot is named by its byte offset in the slab's data. Each size class (one per distinct chunk
size of the model's KV groups) takes whole extents on demand and cuts them into slots.
"""

from array import array
from collections.abc import Iterable

SLOT_ALIGNMENT = 4096  # what O_DIRECT and page-wise registration need
#: An extent holds at most this many of the largest slots; more would make taking one back dear.
_MAX_SLOTS_PER_EXTENT = 16


def slot_bytes(chunk_bytes: int) -> int:
    """Bytes of the slot that holds a chunk: the next multiple of `SLOT_ALIGNMENT`."""
    return -(-chunk_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class SlotAllocator:
    """Hands out slots below a limit that may grow while the slab is being faulted in."""

    def __init__(self, capacity_bytes: int, sizes: Iterable[int]) -> None:
        """`sizes`: slot bytes of each class, multiples of `SLOT_ALIGNMENT`."""
        self.sizes = sorted(set(sizes))
        self.extent_bytes = _extent_bytes(self.sizes, capacity_bytes)
        self.num_extents = capacity_bytes // self.extent_bytes
        #: Extents below this index may be used.
        self.usable_extents = self.num_extents
        self._next_extent = 0
        self._free: dict[int, list[int]] = {size: [] for size in self.sizes}
        self._size_of_extent = array("q", bytes(8 * self.num_extents))

    def room(self, size: int) -> int:
        """How many slots of the class `size` fit if it has the slab to itself."""
        return self.num_extents * (self.extent_bytes // size)

    def spare(self, size: int) -> int:
        """How many slots of the class `size` can be handed out before it needs an eviction."""
        extents = max(0, self.usable_extents - self._next_extent)
        return len(self._free[size]) + extents * (self.extent_bytes // size)

    def allocate(self, size: int) -> int | None:
        """A free slot of the class `size`, None when the class needs an eviction."""
        free = self._free[size]
        if not free:
            if self._next_extent >= self.usable_extents:
                return None
            self._cut(self._next_extent, size)
            self._next_extent += 1
        return free.pop()

    def free(self, offset: int) -> None:
        """Take back a slot."""
        self._free[self._size_of_extent[offset // self.extent_bytes]].append(offset)

    def extent_slots(self, offset: int) -> list[int]:
        """All slots of the extent that holds the slot `offset`."""
        extent = offset // self.extent_bytes
        size = self._size_of_extent[extent]
        start = extent * self.extent_bytes
        return [start + i * size for i in range(self.extent_bytes // size)]

    def reassign(self, offset: int, size: int) -> None:
        """Give the extent that holds `offset`, all of whose slots are free, to the class `size`."""
        extent = offset // self.extent_bytes
        gone = set(self.extent_slots(offset))
        old = self._size_of_extent[extent]
        self._free[old] = [slot for slot in self._free[old] if slot not in gone]
        self._cut(extent, size)

    def _cut(self, extent: int, size: int) -> None:
        self._size_of_extent[extent] = size
        start = extent * self.extent_bytes
        # Reversed, so that slots are handed out in ascending order: neighbours in memory move in
        # one piece to and from a disk.
        slots = range(start, start + self.extent_bytes - size + 1, size)
        self._free[size].extend(reversed(slots))


def _extent_bytes(sizes: list[int], capacity_bytes: int) -> int:
    """The multiple of the largest slot that wastes the smallest share of any class.

    In a small slab extents are small too, so that every class can have two of them.
    """

    def waste(extent: int) -> float:
        return max(extent % size / extent for size in sizes)

    largest = sizes[-1]
    most = min(capacity_bytes // (largest * 2 * len(sizes)), _MAX_SLOTS_PER_EXTENT)
    return min((largest * k for k in range(1, max(most, 1) + 1)), key=waste)
