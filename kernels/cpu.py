"""Copies for an engine whose KV memory is host memory: one memmove per fragment."""

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lmkv.kernels import BlockCopies, Fragment, GroupLayout


def _over() -> bool:
    return True


def _bytes_of(fragment: Fragment) -> memoryview:
    """All memory between the first and the last row of a fragment's tensor."""
    tensor = fragment.tensor
    size = (tensor.shape[0] - 1) * tensor.stride(0) + fragment.bytes
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


class CPUCopier:
    """Copies at once, on the caller's thread.

    Slices of memoryviews, because nothing reachable from Python moves a fragment with less around it
    (0.1 us, against 0.2 us for a call of memmove through ctypes). The GIL is kept: a fragment takes a few
    microseconds, and a thread that gives the GIL up may wait much longer to get it back.
    """

    def __init__(self, layout: Sequence[GroupLayout], slab: memoryview) -> None:
        self._tensors = layout  # keeps the memory behind the views alive
        self._views = [
            [(_bytes_of(f), f.tensor.stride(0), f.bytes, f.offset) for f in group] for group in layout
        ]
        self._num_blocks = [min(f.tensor.shape[0] for f in group) for group in layout]
        self._slab = slab

    def gather(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        """See `Copier.gather`."""
        slab = self._slab
        for copy in copies:
            for view, starts, places, size in self._fragments(copy):
                for start, place in zip(starts, places, strict=True):
                    slab[place : place + size] = view[start : start + size]
        return _over

    def scatter(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        """See `Copier.scatter`."""
        slab = self._slab
        for copy in copies:
            for view, starts, places, size in self._fragments(copy):
                for start, place in zip(starts, places, strict=True):
                    view[start : start + size] = slab[place : place + size]
        return _over

    def _fragments(self, copy: BlockCopies) -> Iterator[tuple[memoryview, list[int], list[int], int]]:
        """Each fragment's memory, and where in it and in the slab every block's piece begins."""
        blocks = np.asarray(copy.blocks, np.int64)
        places = np.asarray(copy.places, np.int64)
        if not blocks.size:
            return
        num_blocks = self._num_blocks[copy.group]
        if blocks.min() < 0 or blocks.max() >= num_blocks:
            raise IndexError(f"block {blocks.max()} is outside the engine's {num_blocks} blocks")
        end = max(offset + size for _, _, size, offset in self._views[copy.group])
        if places.min() < 0 or places.max() + end > self._slab.nbytes:
            raise IndexError(f"slot at {places.max()} is outside the slab of {self._slab.nbytes} bytes")
        for view, stride, size, offset in self._views[copy.group]:
            yield view, (blocks * stride).tolist(), (places + offset).tolist(), size
