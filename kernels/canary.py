"""The boot canary of a rank: blocks go into the slab and come back, before any request does.

It finds what no later check can: a layout that lmkv misunderstands, or a copy that misses or shifts bytes,
would be stored with a good checksum.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from lmkv.kernels import BlockCopies, Copier, Fragment, GroupLayout

#: A copy of two blocks takes microseconds.
_TIMEOUT_S = 30.0


class CanaryError(RuntimeError):
    """Bytes did not come back as they were: nothing may be served. The message names the layer."""


def check_copies(
    copier: Copier,
    layout: Sequence[GroupLayout],
    slab: memoryview,
    room: range,
    names: Sequence[Sequence[str]] | None = None,
) -> None:
    """Copy two blocks of each group into the slab and back in each other's place, with bytes that differ in
    every layer.

    The bytes `room` of the slab are overwritten, the blocks are as before afterwards. What does not fit into
    the room is left out. `names`: what the fragments of each group are called. Raises CanaryError.
    """
    names = names or [[f"group {i}, layer {j}" for j in range(len(group))] for i, group in enumerate(layout)]
    for group, (fragments, named) in enumerate(zip(layout, names, strict=True)):
        block_bytes = max(fragment.offset + fragment.bytes for fragment in fragments)
        last = min(fragment.tensor.shape[0] for fragment in fragments) - 1
        if 2 * block_bytes > len(room) or last < 1:
            continue
        blocks, places = (last, last // 2), (room.start, room.start + block_bytes)
        with _kept(fragments, blocks):
            patterns = [[_pattern(i, block, f.bytes) for block in (0, 1)] for i, f in enumerate(fragments)]
            for fragment, pattern in zip(fragments, patterns, strict=True):
                for block, content in zip(blocks, pattern, strict=True):
                    fragment.tensor[block, : fragment.bytes] = torch.from_numpy(content)
            _wait(copier.gather([BlockCopies(group, blocks, places)]))
            for name, fragment, pattern in zip(named, fragments, patterns, strict=True):
                for place, content in zip(places, pattern, strict=True):
                    start = place + fragment.offset
                    if bytes(slab[start : start + fragment.bytes]) != content.tobytes():
                        raise CanaryError(_said(name, "on its way into host memory"))
            _wait(copier.scatter([BlockCopies(group, blocks, places[::-1])]))
            for name, fragment, pattern in zip(named, fragments, patterns, strict=True):
                for block, content in zip(blocks, pattern[::-1], strict=True):
                    if not np.array_equal(fragment.tensor[block, : fragment.bytes].cpu().numpy(), content):
                        raise CanaryError(_said(name, "on its way back from host memory"))


def _pattern(fragment: int, block: int, size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Bytes that nothing else in the check has: neither another layer nor a place shifted by some bytes."""
    return np.random.default_rng([fragment, block]).integers(-128, 128, size_bytes, np.int8)


@contextmanager
def _kept(fragments: Sequence[Fragment], blocks: Sequence[int]) -> Iterator[None]:
    rows = [(f.tensor, block, f.bytes) for f in fragments for block in blocks]
    kept = [tensor[block, :size].clone() for tensor, block, size in rows]
    try:
        yield
    finally:
        for (tensor, block, size), content in zip(rows, kept, strict=True):
            tensor[block, :size] = content


def _wait(over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not over():
        if time.monotonic() > deadline:
            raise CanaryError(f"a test copy of two blocks was not over after {_TIMEOUT_S:.0f} s.")
        time.sleep(50e-6)


def _said(name: str, where: str) -> str:
    return (
        f"test bytes in the KV memory of {name} changed {where}: lmkv does not understand its layout, and "
        "would serve wrong tokens. Fix: start the engine without lmkv, and report this with the engine's "
        "version, model and attention backend."
    )
