"""Copies for an engine whose KV memory is host memory: one memmove per fragment."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from lmkv.kernels import BlockCopies, GroupLayout

# PyDLL, not CDLL: the GIL is kept. A fragment takes about 10 us, and a thread that gives up the
# GIL every 10 us waits up to 5 ms to get it back whenever another thread computes in Python.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


def _over() -> bool:
    return True


class CPUCopier:
    """Copies at once, on the caller's thread."""

    def __init__(self, layout: Sequence[GroupLayout], slab: memoryview) -> None:
        self._layout = layout  # keeps the tensors alive: only their addresses are used below
        self._addresses = [
            [(f.tensor.data_ptr(), f.tensor.stride(0), f.bytes, f.offset) for f in group] for group in layout
        ]
        self._slab = np.frombuffer(slab, np.uint8)
        self._slab_address = self._slab.ctypes.data
        self._num_blocks = [min(f.tensor.shape[0] for f in group) for group in layout]

    def gather(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        """See `Copier.gather`."""
        for copy in copies:
            for block_addresses, slab_addresses, size in self._fragments(copy):
                for block, place in zip(block_addresses, slab_addresses, strict=True):
                    _memmove(place, block, size)
        return _over

    def scatter(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        """See `Copier.scatter`."""
        for copy in copies:
            for block_addresses, slab_addresses, size in self._fragments(copy):
                for block, place in zip(block_addresses, slab_addresses, strict=True):
                    _memmove(block, place, size)
        return _over

    def _fragments(self, copy: BlockCopies) -> list[tuple[list[int], list[int], int]]:
        """Addresses of each fragment of all blocks, checked against both ends of both memories."""
        blocks = np.asarray(copy.blocks, np.int64)
        places = np.asarray(copy.places, np.int64)
        if not blocks.size:
            return []
        group = self._addresses[copy.group]
        end = max(offset + size for _, _, size, offset in group)
        num_blocks = self._num_blocks[copy.group]
        if blocks.min() < 0 or blocks.max() >= num_blocks:
            raise IndexError(f"block {blocks.max()} is outside the engine's {num_blocks} blocks")
        if places.min() < 0 or places.max() + end > self._slab.nbytes:
            raise IndexError(f"slot at {places.max()} is outside the slab of {self._slab.nbytes} bytes")
        return [
            (
                (blocks * stride + base).tolist(),
                (places + (self._slab_address + offset)).tolist(),
                size,
            )
            for base, stride, size, offset in group
        ]
