"""A rank's copies against a byte-level oracle of the slot layout, on random layouts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv.kernels import BlockCopies, Fragment
from lmkv.kernels.cpu import CPUCopier
from lmkv.pipeline import GroupBlocks, RankPipeline
from lmkv.slab import Slab, private
from lmkv.slots import slot_bytes

NUM_BLOCKS = 12
SLAB_BYTES = 1 << 20
POISON = 0xEE


@pytest.fixture(scope="module")
def slab() -> Iterator[Slab]:
    slab = private(SLAB_BYTES)
    yield slab
    slab.close()


@dataclass
class Rank:
    """One rank's KV memory: each tensor a window on a buffer with room before, between and after."""

    layout: list[list[Fragment]]
    buffers: list[npt.NDArray[np.uint8]]

    def block(self, group: int, block: int) -> bytes:
        """A block's fragments, one after another."""
        return b"".join(
            fragment.tensor[block, : fragment.bytes].numpy().tobytes() for fragment in self.layout[group]
        )

    def block_bytes(self, group: int) -> int:
        return sum(fragment.bytes for fragment in self.layout[group])


def make_rank(groups: Sequence[Sequence[tuple[int, int]]], rng: np.random.Generator) -> Rank:
    """`groups`: of each group the (bytes, stride beyond them) of its fragments."""
    layout, buffers = [], []
    for sizes in groups:
        fragments, offset = [], 0
        for size, beyond in sizes:
            stride, lead = size + beyond, int(rng.integers(0, 9))
            buffer = rng.integers(0, 256, lead + NUM_BLOCKS * stride, dtype=np.uint8)
            flat = torch.from_numpy(buffer.view(np.int8))
            tensor = flat[lead : lead + NUM_BLOCKS * stride].view(NUM_BLOCKS, stride)
            fragments.append(Fragment(tensor, size, offset))
            buffers.append(buffer)
            offset += size
        layout.append(fragments)
    return Rank(layout, buffers)


def ended(pipeline: RankPipeline) -> list[tuple[int, int]]:
    """(job id, bytes moved) of the transfers that ended."""
    return [(job.job_id, job.bytes) for job in pipeline.finished()]


sizes = st.tuples(st.integers(1, 70), st.sampled_from([0, 0, 1, 13]))
group_shapes = st.lists(st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), shapes=group_shapes, num_ranks=st.integers(1, 3), per_chunk=st.integers(1, 4))
def test_gather_then_scatter(
    slab: Slab, data: st.DataObject, shapes: Any, num_ranks: int, per_chunk: int
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ranks = [make_rank(shapes, rng) for _ in range(num_ranks)]
    pipelines = [
        RankPipeline(slab, i, rank.layout, per_chunk, bytes([i]) * 32, ranks=num_ranks)
        for i, rank in enumerate(ranks)
    ]

    # Which blocks move, from which place in the prompt on, and the slots that they need.
    runs, offsets, free = [], [], 0
    for group in range(len(shapes)):
        count = data.draw(st.integers(0, 6))
        first = data.draw(st.integers(0, 9))
        runs.append((first, rng.permutation(NUM_BLOCKS)[:count], rng.permutation(NUM_BLOCKS)[:count]))
        chunks = len({(first + i) // per_chunk for i in range(count)})
        chunk_bytes = per_chunk * sum(rank.block_bytes(group) for rank in ranks)
        for _ in range(chunks):
            free += 4096 * int(rng.integers(0, 3))
            offsets.append(free)
            free += slot_bytes(chunk_bytes)
    shuffled = list(offsets)
    rng.shuffle(shuffled)  # slots of one size class need not ascend
    if len({rank.block_bytes(g) for rank in ranks for g in range(len(shapes))}) == 1:
        offsets = shuffled

    # The oracle: slot = ranks' pieces, piece = blocks, block = fragments.
    expected = np.full(SLAB_BYTES, POISON, np.uint8)
    memory = np.frombuffer(slab.data, np.uint8)
    memory[:] = POISON
    slots = iter(offsets)
    for group, (first, sources, _) in enumerate(runs):
        slot, last_chunk = 0, None
        for i, block in enumerate(sources):
            if (first + i) // per_chunk != last_chunk:
                last_chunk, slot = (first + i) // per_chunk, next(slots)
            place = slot
            for rank in ranks:
                bytes_ = rank.block(group, int(block))
                at = place + (first + i) % per_chunk * len(bytes_)
                expected[at : at + len(bytes_)] = np.frombuffer(bytes_, np.uint8)
                place += per_chunk * len(bytes_)

    before = [[buffer.copy() for buffer in rank.buffers] for rank in ranks]
    for rank, pipeline in zip(ranks, pipelines, strict=True):
        pipeline.store(1, 1, [GroupBlocks(sources, first) for first, sources, _ in runs], offsets)
        moved = sum(len(sources) * rank.block_bytes(group) for group, (_, sources, _) in enumerate(runs))
        assert ended(pipeline) == [(1, moved)]
    np.testing.assert_array_equal(memory, expected)
    for rank, old in zip(ranks, before, strict=True):
        for buffer, same in zip(rank.buffers, old, strict=True):
            np.testing.assert_array_equal(buffer, same)

    # Scatter into other blocks of poisoned memory.
    stored = [
        [[rank.block(group, int(block)) for block in sources] for group, (_, sources, _) in enumerate(runs)]
        for rank in ranks
    ]
    for rank, pipeline in zip(ranks, pipelines, strict=True):
        for buffer in rank.buffers:
            buffer[:] = POISON
        pipeline.load(2, 2, [GroupBlocks(targets, first) for first, _, targets in runs], offsets)
        assert [job for job, _ in ended(pipeline)] == [2]
    for rank, blocks in zip(ranks, stored, strict=True):
        for group, (_, _, targets) in enumerate(runs):
            assert [rank.block(group, int(block)) for block in targets] == blocks[group]
            for fragment in rank.layout[group]:
                fragment.tensor.numpy()[targets, : fragment.bytes] = np.uint8(POISON).view(np.int8)
        for buffer in rank.buffers:  # nothing but the targets was touched
            assert (buffer == POISON).all()
    np.testing.assert_array_equal(memory, expected)
    for pipeline in pipelines:
        pipeline.close()
    del memory


# --- jobs, tickets and failures


class FakeCopier:
    """Copies that end, or fail, when the test says so."""

    def __init__(self) -> None:
        self.over: list[bool | Exception] = []
        self.error: Exception | None = None

    def _start(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        if self.error is not None:
            raise self.error
        place = len(self.over)
        self.over.append(False)

        def over() -> bool:
            state = self.over[place]
            if isinstance(state, Exception):
                raise state
            return state

        return over

    gather = scatter = _start


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPipeline]:
    slab = private(1 << 20)
    copier = FakeCopier()
    monkeypatch.setattr("lmkv.pipeline.open_copier", lambda layout, data: copier)
    monkeypatch.setattr("lmkv.pipeline.check_copies", lambda *_: None)  # this copier copies nothing
    rank = make_rank([[(64, 0)]], np.random.default_rng(0))
    pipeline = RankPipeline(slab, 0, rank.layout, 1, bytes(32))
    yield pipeline
    copier.over = [True] * len(copier.over)
    pipeline.close()
    slab.close()


BLOCKS = [GroupBlocks(np.array([3]), 0)]


def copier_of(pipeline: RankPipeline) -> FakeCopier:
    assert isinstance(pipeline._copier, FakeCopier)
    return pipeline._copier


def test_it_registers_its_layout(pipeline: RankPipeline) -> None:
    area = pipeline._area
    assert area.registered and area.fingerprint == bytes(32) and area.group_bytes == [64]


def test_the_watermark_waits_for_every_earlier_ticket(pipeline: RankPipeline) -> None:
    over, area = copier_of(pipeline).over, pipeline._area
    for ticket in (1, 2, 3, 4):
        (pipeline.load if ticket == 2 else pipeline.store)(100 + ticket, ticket, BLOCKS, [0])
    assert ended(pipeline) == [] and area.watermark == 0
    over[2] = over[1] = True
    assert ended(pipeline) == [(102, 64), (103, 64)] and area.watermark == 0
    over[0] = True
    assert ended(pipeline) == [(101, 64)] and area.watermark == 3
    over[3] = True
    assert ended(pipeline) == [(104, 64)] and area.watermark == 4
    assert ended(pipeline) == []


def test_tickets_submitted_out_of_order(pipeline: RankPipeline) -> None:
    over, area = copier_of(pipeline).over, pipeline._area
    pipeline.store(1, 2, BLOCKS, [0])
    over[0] = True
    pipeline.finished()
    assert area.watermark == 0
    pipeline.load(2, 1, BLOCKS, [0])
    over[1] = True
    pipeline.finished()
    assert area.watermark == 2


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_failed_store_is_acknowledged_and_marked(pipeline: RankPipeline, when: str) -> None:
    copier, area = copier_of(pipeline), pipeline._area
    error = RuntimeError("copy engine")
    copier.error = error if when == "at once" else None
    pipeline.store(7, 1, BLOCKS, [0])
    if when == "later":
        assert ended(pipeline) == [] and area.failed_count == 0
        copier.over[0] = error
    # Marked before it is acknowledged: the scheduler reads the mark when it hears of the end.
    assert [job for job, _ in ended(pipeline)] == [7]
    assert area.failed_since(0) == [1]
    assert area.watermark == 1
    copier.error = None


def test_a_store_with_too_few_slots_is_marked(pipeline: RankPipeline) -> None:
    pipeline.store(7, 1, BLOCKS, [])
    assert ended(pipeline) == [(7, 0)]
    assert pipeline._area.failed_since(0) == [1]


@pytest.mark.parametrize("when", ["at once", "later", "slots"])
def test_a_failed_load_raises(pipeline: RankPipeline, when: str) -> None:
    copier = copier_of(pipeline)
    error = RuntimeError("copy engine")
    if when == "later":
        pipeline.load(7, 1, BLOCKS, [0])
        copier.over[0] = error
        with pytest.raises(RuntimeError, match="copy engine"):
            pipeline.finished()
    elif when == "at once":
        copier.error = error
        with pytest.raises(RuntimeError, match="copy engine"):
            pipeline.load(7, 1, BLOCKS, [0])
    else:
        with pytest.raises(ValueError, match="slots"):
            pipeline.load(7, 1, BLOCKS, [0, 4096])
    assert pipeline._area.watermark == 0 and pipeline._area.failed_count == 0


def test_wait_returns_when_the_jobs_are_over(pipeline: RankPipeline) -> None:
    pipeline.store(1, 1, BLOCKS, [0])
    pipeline.store(2, 2, BLOCKS, [0])
    copier_of(pipeline).over[0] = True
    pipeline.wait({1, 99})
    assert ended(pipeline) == [(1, 64)]


def test_a_later_ranks_piece_lies_behind_the_earlier_ones(slab: Slab) -> None:
    rng = np.random.default_rng(1)
    first, second = make_rank([[(10, 0)]], rng), make_rank([[(20, 0)]], rng)
    one = RankPipeline(slab, 0, first.layout, 2, bytes(32), ranks=2)
    two = RankPipeline(slab, 1, second.layout, 2, bytes(32), ranks=2)
    slab.data[:100] = bytes([POISON]) * 100
    blocks = [GroupBlocks(np.array([4, 5]), 0)]
    two.store(1, 1, blocks, [0])
    assert slab.data[:20] == bytes([POISON]) * 20
    one.store(1, 1, blocks, [0])
    expected = first.block(0, 4) + first.block(0, 5) + second.block(0, 4) + second.block(0, 5)
    assert slab.data[:60] == expected
    assert slab.data[60:100] == bytes([POISON]) * 40
    one.close()
    two.close()


# --- bounds of the copier


@pytest.mark.parametrize(
    ("blocks", "places"),
    [
        ([NUM_BLOCKS], [0]),
        ([0, -1], [0, 4096]),
        ([0], [-1]),
        ([0], [SLAB_BYTES - 63]),
        ([0, 1], [0, SLAB_BYTES]),
    ],
)
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_a_copy_outside_either_memory_is_refused(
    slab: Slab, way: str, blocks: list[int], places: list[int]
) -> None:
    rank = make_rank([[(64, 0)]], np.random.default_rng(0))
    copier = CPUCopier(rank.layout, slab.data)
    before = bytes(slab.data), rank.buffers[0].copy()
    with pytest.raises(IndexError):
        getattr(copier, way)([BlockCopies(0, blocks, places)])
    assert bytes(slab.data) == before[0]
    np.testing.assert_array_equal(rank.buffers[0], before[1])
    getattr(copier, way)([BlockCopies(0, [0], [SLAB_BYTES - 64])])  # the last place is good


def test_each_group_is_bounded_by_its_own_tensors(slab: Slab) -> None:
    rng = np.random.default_rng(0)
    rank = make_rank([[(8, 0)], [(8, 0)]], rng)
    small = Fragment(rank.layout[1][0].tensor[:4], 8, 0)
    copier = CPUCopier([rank.layout[0], [small]], slab.data)
    copier.gather([BlockCopies(0, [NUM_BLOCKS - 1], [0])])
    with pytest.raises(IndexError):
        copier.gather([BlockCopies(1, [4], [0])])
