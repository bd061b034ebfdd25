"""Copies between the engine's paged KV memory and slots of the host slab."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Fragment:
    """One tensor's piece of a block: the first `bytes` bytes of row `block`."""

    #: int8, shape [num_blocks, at least `bytes`], contiguous within a row.
    tensor: torch.Tensor
    bytes: int
    #: Where the piece lies in a rank's copy of the block.
    offset: int


#: The fragments of one KV group's block, in the order of their offsets.
GroupLayout = Sequence[Fragment]


class Copier(Protocol):
    """Moves whole blocks. A copy runs asynchronously; the returned function says whether it is
    over, and raises what the copy raised."""

    def gather(self, copies: Sequence["BlockCopies"]) -> Callable[[], bool]:
        """Copy blocks into the slab, after the work the engine has submitted so far."""

    def scatter(self, copies: Sequence["BlockCopies"]) -> Callable[[], bool]:
        """Copy from the slab into blocks, after the work the engine has submitted so far."""


@dataclass(frozen=True)
class BlockCopies:
    """Blocks of one group and where each lies in the slab (byte offsets, same length)."""

    group: int
    blocks: Sequence[int]
    places: Sequence[int]


def open_copier(layout: Sequence[GroupLayout], slab: memoryview) -> Copier:
    """The copier for the device that the layout's tensors are on."""
    device = layout[0][0].tensor.device.type
    if device == "cpu":
        from lmkv.kernels.cpu import CPUCopier

        return CPUCopier(layout, slab)
    if device == "cuda":
        from lmkv.kernels.cuda import CUDACopier

        return CUDACopier(layout, slab)
    raise ValueError(f"lmkv cannot copy KV on a {device!r} device; it handles cuda and cpu")
