"""The boot canary of a rank: what it finds, and that it leaves nothing behind."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from lmkv.kernels import BlockCopies
from lmkv.kernels import cpu as cpu_module
from lmkv.kernels.canary import CanaryError, check_copies
from lmkv.kernels.cpu import CPUCopier
from lmkv.pipeline import RankPipeline
from lmkv.slab import Slab, private
from tests.engine.test_pipeline import SLAB_BYTES, Rank, make_rank

NAMES = [["model.layers.0", "model.layers.1"], ["model.layers.2"]]
SHAPES = [[(64, 0), (64, 7)], [(100, 0)]]


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = private(SLAB_BYTES)
    yield slab
    slab.close()


@pytest.fixture
def rank() -> Rank:
    return make_rank(SHAPES, np.random.default_rng(1))


class Faulty(CPUCopier):
    """`fault(place or start, number of the fragment) -> where it copies instead`."""

    def __init__(self, rank: Rank, slab: Slab, *, gathers: Any = None, scatters: Any = None) -> None:
        super().__init__(rank.layout, slab.data)
        self._faults = {"gather": gathers, "scatter": scatters}
        self._fault: Any = None

    def gather(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        self._fault = self._faults["gather"]
        return super().gather(copies)

    def scatter(self, copies: Sequence[BlockCopies]) -> Callable[[], bool]:
        self._fault = self._faults["scatter"]
        return super().scatter(copies)

    def _fragments(self, copy: BlockCopies) -> Iterator[tuple[memoryview, list[int], list[int], int]]:
        for number, (view, starts, places, size) in enumerate(super()._fragments(copy)):
            if self._fault is not None:
                starts, places, size = self._fault(copy.group, number, starts, places, size)
            yield view, starts, places, size


def test_good_copies_leave_nothing_behind(slab: Slab, rank: Rank) -> None:
    before = [buffer.copy() for buffer in rank.buffers]
    room = range(5000, 6000)
    slab.data[:] = b"\x07" * SLAB_BYTES
    check_copies(CPUCopier(rank.layout, slab.data), rank.layout, slab.data, room, NAMES)
    assert all(map(np.array_equal, rank.buffers, before))
    assert set(slab.data[: room.start]) == set(slab.data[room.stop :]) == {7}
    assert set(slab.data[room.start : room.stop]) != {7}


def shifted(group: int, number: int, starts: Any, places: Any, size: int) -> Any:
    return starts, [place + 1 for place in places] if (group, number) == (0, 1) else places, size


def short(group: int, number: int, starts: Any, places: Any, size: int) -> Any:
    return starts, places, size - 1 if (group, number) == (1, 0) else size


def without_stride(group: int, number: int, starts: Any, places: Any, size: int) -> Any:
    return ([start // 71 * 64 for start in starts] if (group, number) == (0, 1) else starts), places, size


def same_block(group: int, number: int, starts: Any, places: Any, size: int) -> Any:
    return [starts[0]] * len(starts), places, size


@pytest.mark.parametrize("fault", [shifted, short, without_stride, same_block])
@pytest.mark.parametrize("direction", ["gathers", "scatters"])
def test_a_faulty_copy_is_refused_by_the_layer_s_name(
    slab: Slab, rank: Rank, fault: Any, direction: str
) -> None:
    before = [buffer.copy() for buffer in rank.buffers]
    copier = Faulty(rank, slab, **{direction: fault})
    where = {"gathers": "on its way into", "scatters": "on its way back from"}[direction]
    layer = {shifted: 1, short: 2, without_stride: 1, same_block: 0}[fault]
    if (fault, direction) == (shifted, "gathers"):
        layer = 0  # whose next block it runs into
    with pytest.raises(CanaryError, match=rf"model\.layers\.{layer} changed {where} host memory.* Fix: "):
        check_copies(copier, rank.layout, slab.data, range(SLAB_BYTES), NAMES)
    if direction == "gathers":  # nothing was written elsewhere
        assert all(map(np.array_equal, rank.buffers, before))


def test_a_copy_that_never_ends_is_refused(slab: Slab, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.kernels.canary._TIMEOUT_S", 0.01)
    monkeypatch.setattr(cpu_module, "_over", lambda: False)
    with pytest.raises(CanaryError, match="was not over"):
        check_copies(CPUCopier(rank.layout, slab.data), rank.layout, slab.data, range(SLAB_BYTES))


def test_what_does_not_fit_is_left_out(slab: Slab, rank: Rank) -> None:
    copier = Faulty(rank, slab, gathers=shifted)  # in group 0, of which two blocks have 256 bytes
    check_copies(copier, rank.layout, slab.data, range(255))
    with pytest.raises(CanaryError, match="group 0, layer 0"):
        check_copies(copier, rank.layout, slab.data, range(257))


def test_a_rank_that_fails_it_never_registers(
    slab: Slab, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.pipeline.open_copier", lambda layout, _: Faulty(rank, slab, scatters=short))
    with pytest.raises(CanaryError):
        RankPipeline(slab, 1, rank.layout, 2, bytes(32), ranks=2, names=NAMES)
    assert not slab.rank(1).registered
    monkeypatch.undo()
    slab.data[:] = b"\x07" * SLAB_BYTES
    RankPipeline(slab, 1, rank.layout, 2, bytes(32), ranks=2, names=NAMES)
    assert slab.rank(1).registered
    assert set(slab.data[: SLAB_BYTES // 2]) == {7}  # where another rank tries
