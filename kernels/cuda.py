"""The simplest correct asynchronous copies for CUDA: one `copy_` per fragment on a side stream.

Not yet run on a GPU; the fast kernels and the registration of the slab come with issue 6. Until
then the slab is pageable memory, through which CUDA copies more slowly and partly synchronously.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lmkv.kernels import BlockCopies, GroupLayout


class CUDACopier:
    """One stream per direction; each waits for the engine's stream before it touches a block."""

    def __init__(self, layout: Sequence[GroupLayout], slab: memoryview) -> None:
        self._layout = layout
        self._slab = torch.from_numpy(np.frombuffer(slab, np.int8))
        device = layout[0][0].tensor.device
        self._device = device
        self._store_stream = torch.cuda.Stream(device)
        self._load_stream = torch.cuda.Stream(device)

    def gather(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        """See `Copier.gather`."""
        return self._copy(self._store_stream, copies, to_slab=True)

    def scatter(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        """See `Copier.scatter`."""
        return self._copy(self._load_stream, copies, to_slab=False)

    def _copy(
        self, stream: torch.cuda.Stream, copies: Sequence[BlockCopies], *, to_slab: bool
    ) -> Callable[[], bool]:
        # A store reads what the forward wrote, a load overwrites what it may still be reading.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            for copy in copies:
                for fragment in self._layout[copy.group]:
                    size, offset = fragment.bytes, fragment.offset
                    for block, place in zip(copy.blocks, copy.places, strict=True):
                        piece = self._slab[place + offset : place + offset + size]
                        row = fragment.tensor[block, :size]
                        if to_slab:
                            piece.copy_(row, non_blocking=True)
                        else:
                            row.copy_(piece, non_blocking=True)
            event.record(stream)
        return lambda: bool(event.query())
