"""Pages of SGLang's host pools as buffers.

A page that the pool can name by addresses (`get_page_buffer_meta`) is moved in place: one piece per
segment, such as K and V, or K and V of every layer. Of a pool that cannot, pages are copied out and in by
the pool itself (`get_data_page`, `set_from_flat_data_page`). The order of bytes differs between the two and
between layouts; `form` says which it is and is part of the namespace.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lmkv.tier import Buffer

#: Unit of the file tier's direct I/O: what is not a multiple of it takes a bounce copy.
ALIGNMENT_BYTES = 4096

_FIRST_ADDRESS = 4096
#: All that a process can address. A slice of it costs a fifth of a view made by ctypes.
_MEMORY = memoryview((ctypes.c_ubyte * (1 << 56)).from_address(_FIRST_ADDRESS)).cast("B")


class HostPages(Protocol):
    """Pages of one host pool. `indices`: token slots, `page_size` consecutive ones a page."""

    #: Token slots of a page.
    page_size: int
    #: Bytes of a page.
    page_bytes: int
    #: How the bytes of a page lie in a chunk.
    form: str
    #: Whether pages move without a copy in host memory.
    in_place: bool

    def sources(self, indices: torch.Tensor) -> Sequence[Buffer]:
        """One buffer a page, to store."""

    def targets(self, indices: torch.Tensor) -> Sequence[Buffer]:
        """One writable buffer a page, to load into."""

    def landed(self, indices: torch.Tensor, targets: Sequence[Buffer], page: int) -> None:
        """The buffer of this page (its place in `indices`) was filled and verified."""


class PagesInPlace:
    """Pages that the pool names by addresses."""

    def __init__(self, pool: Any, segments: Sequence[int], first_address: int) -> None:
        """`segments`: bytes of each segment of a page, in the pool's order."""
        self._pool = pool
        self._segments = len(segments)
        self.page_size = _page_size(pool)
        self.page_bytes = sum(segments)
        self.form = "segments " + ",".join(map(str, segments))
        self.in_place = not any(number % ALIGNMENT_BYTES for number in (*segments, first_address))

    def sources(self, indices: torch.Tensor) -> Sequence[Buffer]:
        """See `HostPages.sources`."""
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        pieces = [
            _MEMORY[pointer - _FIRST_ADDRESS : pointer - _FIRST_ADDRESS + size]
            for pointer, size in zip(pointers, sizes, strict=True)
        ]
        step = self._segments
        return [pieces[start : start + step] for start in range(0, len(pieces), step)]

    targets = sources

    def landed(self, indices: torch.Tensor, targets: Sequence[Buffer], page: int) -> None:
        """See `HostPages.landed`: nothing is left to do."""


class PagesByCopy:
    """Pages that only the pool itself can copy out of and into its memory."""

    in_place = False

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_size = _page_size(pool)
        page = pool.get_dummy_flat_data_page()
        self._dtype = page.dtype
        self.page_bytes = page.nbytes
        self.form = f"flat {self.page_bytes}"

    def sources(self, indices: torch.Tensor) -> Sequence[Buffer]:
        """See `HostPages.sources`."""
        return [_bytes_of(self._pool.get_data_page(first, flat=True)) for first in self._firsts(indices)]

    def targets(self, indices: torch.Tensor) -> Sequence[Buffer]:
        """See `HostPages.targets`."""
        return [_bytes_of(self._pool.get_dummy_flat_data_page()) for _ in self._firsts(indices)]

    def landed(self, indices: torch.Tensor, targets: Sequence[Buffer], page: int) -> None:
        """See `HostPages.landed`."""
        filled = torch.frombuffer(targets[page], dtype=torch.uint8)
        self._pool.set_from_flat_data_page(self._firsts(indices)[page], filled.view(self._dtype))

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        firsts: list[int] = indices[:: self.page_size].tolist()
        return firsts


def host_pages(pool: Any) -> HostPages:
    """The pages of a host pool, in place where the pool can name them by addresses."""
    try:
        pointers, sizes = pool.get_page_buffer_meta(torch.arange(_page_size(pool)))
    except (AttributeError, NotImplementedError, TypeError, ValueError):  # a layout without addresses
        return PagesByCopy(pool)
    return PagesInPlace(pool, sizes, pointers[0])


def _page_size(pool: Any) -> int:
    return int(getattr(pool, "page_size", 1) or 1)


def _bytes_of(page: torch.Tensor) -> memoryview:
    flat = page.detach().contiguous().view(torch.uint8).reshape(-1)
    return memoryview(flat.numpy())
