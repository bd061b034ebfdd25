"""A rank's side of lmkv: copies blocks to and from its pieces of the slots.

A slot holds, one after another, every rank's piece of the chunk; a piece holds the chunk's
blocks, and a block its fragments (one a layer, or one for layers that share memory).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmkv.kernels import BlockCopies, GroupLayout, open_copier
from lmkv.kernels.canary import check_copies
from lmkv.metrics import RateLimitedLog
from lmkv.slab import RankArea, Slab


@dataclass(frozen=True)
class GroupBlocks:
    """A run of consecutive blocks of one KV group that a transfer touches."""

    blocks: npt.NDArray[np.int64]
    #: Place of the first one in the prompt, in blocks; a run may begin inside a chunk.
    first: int


class Ended(NamedTuple):
    """A transfer that is over."""

    job_id: int
    bytes: int
    seconds: float


class _Job:
    """A transfer under way, or over and not yet reported."""

    def __init__(self, job_id: int, ticket: int, over: Callable[[], bool], size: int, started: float) -> None:
        self.job_id = job_id
        self.ticket = ticket
        self._is_over = over
        self._started = started
        self.bytes = size
        #: Seconds from the submission until the end was seen; None before that.
        self.seconds: float | None = None
        self.over()

    def over(self) -> bool:
        """Whether the transfer has ended."""
        if self.seconds is None and self._is_over():
            self.seconds = time.perf_counter() - self._started
        return self.seconds is not None


class RankPipeline:
    """Runs one rank's part of the transfers and tells the scheduler through the control page."""

    def __init__(
        self,
        slab: Slab,
        rank: int,
        layout: Sequence[GroupLayout],
        blocks_per_chunk: int,
        fingerprint: bytes,
        *,
        ranks: int = 1,
        names: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Tries the copies, then tells the scheduler what this rank registered. Raises CanaryError.

        `fingerprint`: 32 bytes over all that decides how this rank's bytes lie in a block. `ranks`: how many
        share the slab. `names`: what the fragments of each group are called.
        """
        self._slab = slab
        self._rank = rank
        self._area = slab.rank(rank)
        self._blocks_per_chunk = blocks_per_chunk
        self._block_bytes = [sum(fragment.bytes for fragment in group) for group in layout]
        self._piece_offsets: list[int] | None = None
        self._copier = open_copier(layout, slab.data)
        self._jobs: list[_Job] = []
        self._watermark = 0
        self._over_early: set[int] = set()
        self._log = RateLimitedLog()
        share = slab.capacity_bytes // ranks  # all of them try at the same time, and nobody else uses it yet
        check_copies(self._copier, layout, slab.data, range(rank * share, (rank + 1) * share), names)
        self._area.register(fingerprint, [size * blocks_per_chunk for size in self._block_bytes])

    def store(self, job_id: int, ticket: int, groups: Sequence[GroupBlocks], offsets: Sequence[int]) -> None:
        """Start copying blocks into the slots at `offsets` (one a chunk, group after group).

        A copy that fails is noted for the scheduler, which will drop the chunks; the engine is
        told it succeeded, because it has no other way to hear of it.
        """
        started = time.perf_counter()
        try:
            copies, size = self._plan(groups, offsets)
            over = self._copier.gather(copies)
        except Exception:  # noqa: BLE001  # the engine asserts that stores succeed; this one is dropped instead
            self._fail(ticket)
            over, size = _over, 0
        self._jobs.append(_Job(job_id, ticket, self._guarded(over, ticket), size, started))

    def load(self, job_id: int, ticket: int, groups: Sequence[GroupBlocks], offsets: Sequence[int]) -> None:
        """Start copying the slots at `offsets` into blocks.

        Raises what the copy raises: a block that was not filled must never be used, so this is
        the one fault that may fail the engine.
        """
        started = time.perf_counter()
        copies, size = self._plan(groups, offsets)
        self._jobs.append(_Job(job_id, ticket, self._copier.scatter(copies), size, started))

    def finished(self) -> list[Ended]:
        """The transfers that ended since the last call."""
        if not self._jobs:
            return []
        ended, running = [], []
        for job in self._jobs:
            if job.over() and job.seconds is not None:
                ended.append(Ended(job.job_id, job.bytes, job.seconds))
                self._over_early.add(job.ticket)
            else:
                running.append(job)
        self._jobs = running
        while self._watermark + 1 in self._over_early:
            self._watermark += 1
            self._over_early.remove(self._watermark)
        self._area.finish(self._watermark)
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Block until these transfers have ended. `finished` still returns them."""
        for job in self._jobs:
            while job.job_id in job_ids and not job.over():
                time.sleep(50e-6)  # a copy of a few blocks that the engine needs now

    def close(self) -> None:
        """Let go of the engine's tensors and of the slab, once nothing is being copied."""
        self.wait({job.job_id for job in self._jobs})
        self._jobs.clear()
        del self._copier, self._area

    def _guarded(self, over: Callable[[], bool], ticket: int) -> Callable[[], bool]:
        def check() -> bool:
            try:
                return over()
            except Exception:  # noqa: BLE001  # as in `store`
                self._fail(ticket)
                return True

        return check

    def _fail(self, ticket: int) -> None:
        self._area.fail(ticket)
        self._log.warning("store", "copying KV out of the engine failed; it is not stored", exc_info=True)

    def _plan(self, groups: Sequence[GroupBlocks], offsets: Sequence[int]) -> tuple[list[BlockCopies], int]:
        per_chunk = self._blocks_per_chunk
        slots = np.asarray(offsets, np.int64)
        pieces = self._pieces()
        copies, size, first_chunk = [], 0, 0
        for group, run in enumerate(groups):
            if not run.blocks.size:
                continue
            skip = run.first % per_chunk
            places_in_run = np.arange(skip, skip + run.blocks.size)
            chunks = places_in_run // per_chunk
            block_bytes = self._block_bytes[group]
            places = slots[first_chunk + chunks] + (pieces[group] + places_in_run % per_chunk * block_bytes)
            copies.append(BlockCopies(group, run.blocks.tolist(), places.tolist()))
            size += run.blocks.size * block_bytes
            first_chunk += int(chunks[-1]) + 1
        if first_chunk != slots.size:
            raise ValueError(f"{slots.size} slots were given for {first_chunk} chunks")
        return copies, size

    def _pieces(self) -> list[int]:
        """Where this rank's piece begins in a slot, a group each. All lower ranks registered before
        the scheduler handed out the first slot."""
        if self._piece_offsets is None:
            areas: list[RankArea] = [self._slab.rank(rank) for rank in range(self._rank)]
            self._piece_offsets = [
                sum(area.group_bytes[group] for area in areas) for group in range(len(self._block_bytes))
            ]
        return self._piece_offsets


def _over() -> bool:
    return True
