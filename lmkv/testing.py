"""The conformance suite that every tier passes, lmkv's own and third-party ones.

    class TestMyTier(TierConformance):
        def make_tier(self, tmp_path):
            return MyTier.open({"path": str(tmp_path), "capacity": "64MiB"})

A module for tests: it imports pytest and Hypothesis, which lmkv itself does not depend on.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmkv.keys import KEY_BYTES, Namespace, make_key
from lmkv.tier import Buffer as TierBuffer
from lmkv.tier import Status, Tier

PAGE_BYTES = 4096
#: From one byte to the size at which the benchmarks run, and one length that no alignment divides.
SIZES = (1, PAGE_BYTES, PAGE_BYTES + 1, 64 * 2**10, 2 * 2**20)
#: Written on both sides of every buffer that a tier fills; a tier that writes beyond is caught.
_GUARD = 0xA5
_GUARD_BYTES = 64

NAMESPACES = tuple(Namespace.of({"model": model}).digest for model in ("a", "b"))


def chunk_key(index: int, namespace: int = 0, group: int = 0) -> bytes:
    """Key number `index` of one of two namespaces; equal indices have equal block hashes."""
    return make_key(NAMESPACES[namespace], index.to_bytes(32, "big"), group)


def chunk_bytes(key: bytes, length: int, version: int = 0) -> bytes:
    """The content that the suite stores under `key`: pseudo-random, so no two chunks share a page."""
    return np.random.default_rng([version, length, *key]).bytes(length)


def _multiples(length: int, count: int) -> list[int]:
    """Where the second of `count` like pieces begins, and so on: at page boundaries if there are some."""
    step = -(-length // count)
    step = -(-step // PAGE_BYTES) * PAGE_BYTES if length > PAGE_BYTES else step
    return [min(step * i, length) for i in range(1, count)]


#: How a chunk of some length is handed over: None as one memoryview, otherwise where its second and
#: further pieces begin.
CUTS: dict[str, Callable[[int], list[int] | None]] = {
    "whole": lambda length: None,
    "one piece": lambda length: [],
    "keys and values": lambda length: _multiples(length, 2),
    "layers": lambda length: _multiples(length, 16),
    "ragged": lambda length: [0, length // 3, length // 3, length - 1],  # the first and third are empty
    "scattered": lambda length: list(range(1024, length, 1024)),  # at 2 MiB too many for a system call
}


class Buffer:
    """Writable memory for `length` bytes between guards, at page boundaries or just off them.

    `given` is what a tier takes: one memoryview, or a list of pieces that do not touch (see `CUTS`).
    """

    def __init__(self, length: int, *, aligned: bool = True, cut: str = "whole") -> None:
        begins = CUTS[cut](length)
        self._edges = [0, *(begins or ()), length]
        room = (length + 3 * PAGE_BYTES) + 2 * PAGE_BYTES * len(self._edges)
        self._array = np.full(room, _GUARD, np.uint8)
        self.pieces: list[memoryview] = []
        self._gaps: list[NDArray[np.uint8]] = []
        at = -self._array.ctypes.data % PAGE_BYTES
        end = 0
        for begin, stop in pairwise(self._edges):
            start = at + PAGE_BYTES + (0 if aligned else 1)
            self._gaps.append(self._array[max(end, start - _GUARD_BYTES) : start])
            end = start + stop - begin
            self._gaps.append(self._array[end : end + _GUARD_BYTES])
            self.pieces.append(self._array.data[start:end])
            at += -(-(end - at) // PAGE_BYTES) * PAGE_BYTES
        self.given: memoryview | list[memoryview] = self.pieces[0] if begins is None else self.pieces

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)

    def fill(self, content: bytes) -> None:
        for piece, (begin, stop) in zip(self.pieces, pairwise(self._edges), strict=True):
            piece[:] = content[begin:stop]

    def check_guards(self) -> None:
        assert all((gap == _GUARD).all() for gap in self._gaps), "the tier wrote outside the buffer"

    @classmethod
    def of(cls, content: bytes, *, aligned: bool = True, cut: str = "whole") -> "Buffer":
        buffer = cls(len(content), aligned=aligned, cut=cut)
        buffer.fill(content)
        return buffer


def put(
    tier: Tier, chunks: Sequence[tuple[bytes, bytes]], *, aligned: bool = True, cut: str = "whole"
) -> list[Status]:
    """Store (key, content) pairs in one call."""
    buffers = [Buffer.of(content, aligned=aligned, cut=cut) for _, content in chunks]
    statuses = tier.put([key for key, _ in chunks], [buffer.given for buffer in buffers])
    for buffer, (_, content) in zip(buffers, chunks, strict=True):
        assert buffer.content == content, "put changed the caller's buffer"
    assert len(statuses) == len(chunks)
    return statuses


def get(
    tier: Tier, wanted: Sequence[tuple[bytes, int]], *, aligned: bool = True, cut: str = "whole"
) -> list[tuple[Status, bytes | None]]:
    """Read (key, length) pairs in one call: each status, and the bytes where it is OK."""
    buffers = [Buffer(length, aligned=aligned, cut=cut) for _, length in wanted]
    statuses = tier.get([key for key, _ in wanted], [buffer.given for buffer in buffers])
    assert len(statuses) == len(wanted)
    for buffer in buffers:
        buffer.check_guards()
    return [
        (status, buffer.content if status == Status.OK else None)
        for status, buffer in zip(statuses, buffers, strict=True)
    ]


def disk_bytes(directory: Path) -> int:
    """What the files below `directory` occupy on the disk, as `du` counts it."""
    occupied = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed by the tier meanwhile
                occupied += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return occupied


def check_bounds(tier: Tier, directory: Path) -> None:
    """The tier is within its capacity, by its own account and by that of the disk."""
    assert tier.stats().used_bytes <= tier.info.capacity_bytes
    assert disk_bytes(directory) <= tier.info.capacity_bytes


class TierConformance:
    """Subclass it, name the subclass `Test...` and define `make_tier`.

    The tier should have 16 to 256 MiB of capacity: the suite writes three times as much.
    """

    #: What a tier may spend on a chunk beyond its payload (header, rounding). Half the capacity
    #: must hold chunks of that total without losing one.
    overhead_bytes_per_chunk = 2 * PAGE_BYTES
    #: Whether `stats().chunks` is exact. A server that evicts, or that others store on, does not tell.
    counts_chunks = True
    #: Each example opens a tier of its own, which bounds their number.
    state_machine_settings = hypothesis.settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def make_tier(self, tmp_path: Path) -> Tier:
        """Open a tier; persistent ones keep their data below `tmp_path` and find it there again."""
        raise NotImplementedError

    def reopen(self, tier: Tier, tmp_path: Path) -> Tier:
        """The same persistent tier as a new process would find it."""
        tier.close()
        return self.make_tier(tmp_path)

    def damage(self, tier: Tier, tmp_path: Path) -> None:
        """Flip bits in every chunk that lies on the medium, behind the back of the open tier."""
        pytest.skip("this tier has no damage hook")

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(tmp_path)
        yield tier
        tier.close()

    # Round trips.

    def test_info(self, tier: Tier) -> None:
        info = tier.info
        assert info.name
        assert 16 * 2**20 <= info.capacity_bytes <= 256 * 2**20, "the suite needs 16 to 256 MiB"
        assert info.alignment_bytes >= 1

    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("length", SIZES)
    def test_round_trip(self, tier: Tier, length: int, aligned: bool) -> None:
        key = chunk_key(1)
        content = chunk_bytes(key, length)
        assert put(tier, [(key, content)], aligned=aligned) == [Status.OK]
        assert tier.contains([key]) == [True]
        assert get(tier, [(key, length)], aligned=aligned) == [(Status.OK, content)]
        assert get(tier, [(key, length)], aligned=not aligned) == [(Status.OK, content)]

    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("cut", CUTS)
    def test_how_a_buffer_is_cut_makes_no_difference(self, tier: Tier, cut: str, aligned: bool) -> None:
        chunks = [(key := chunk_key(i), chunk_bytes(key, length)) for i, length in enumerate(SIZES)]
        wanted = [(key, len(content)) for key, content in chunks]
        assert put(tier, chunks, aligned=aligned, cut=cut) == [Status.OK] * len(chunks)
        for other in CUTS:
            found = get(tier, wanted, aligned=aligned, cut=other)
            assert found == [(Status.OK, content) for _, content in chunks]
        assert put(tier, chunks) == [Status.OK] * len(chunks)
        assert tier.stats().chunks == len(chunks)

    def test_a_batch_of_buffers_cut_in_different_ways(self, tier: Tier) -> None:
        chunks = [(key := chunk_key(i), chunk_bytes(key, 64 * 2**10)) for i in range(4 * len(CUTS))]
        keys = [key for key, _ in chunks]
        for turn in range(2):
            buffers = [
                Buffer.of(content, aligned=i % 3 > 0, cut=[*CUTS][(i + turn) % len(CUTS)])
                for i, (_, content) in enumerate(chunks)
            ]
            if turn == 0:
                assert tier.put(keys, [buffer.given for buffer in buffers]) == [Status.OK] * len(keys)
            else:
                for buffer in buffers:
                    buffer.fill(bytes(64 * 2**10))
                assert tier.get(keys, [tuple(buffer.pieces) for buffer in buffers]) == [Status.OK] * len(keys)
            assert [buffer.content for buffer in buffers] == [content for _, content in chunks]

    @pytest.mark.parametrize("empty", [memoryview(b""), (), [memoryview(b""), memoryview(b"")]])
    def test_a_chunk_of_no_bytes_is_rejected(self, tier: Tier, empty: TierBuffer) -> None:
        key, other = chunk_key(1), chunk_key(2)
        content = chunk_bytes(other, PAGE_BYTES)
        statuses = tier.put([key, other], [empty, memoryview(content)])
        assert statuses == [Status.REJECTED, Status.OK]
        assert tier.contains([key]) == [False]
        assert tier.get([key], [empty]) == [Status.MISS]
        assert tier.get([other], [empty]) == [Status.CORRUPT]

    def test_a_batch_keeps_its_order_with_duplicates_and_misses(self, tier: Tier) -> None:
        chunks = [(key := chunk_key(i), chunk_bytes(key, length)) for i, length in enumerate(SIZES)]
        chunks.append(chunks[1])
        assert put(tier, chunks) == [Status.OK] * len(chunks)
        assert tier.stats().chunks == len(SIZES)
        missing = chunk_key(99)
        order = [chunks[i] for i in (4, 1, 0, 3, 1, 2)]
        wanted = [(missing, 7), *((key, len(content)) for key, content in order), (missing, 7)]
        miss = (Status.MISS, None)
        assert get(tier, wanted) == [miss, *((Status.OK, content) for _, content in order), miss]
        assert tier.contains([key for key, _ in wanted]) == [False, *([True] * 6), False]

    def test_empty_batches(self, tier: Tier) -> None:
        assert tier.contains([]) == []
        assert tier.get([], []) == []
        assert tier.put([], []) == []
        assert tier.remove([]) == []

    def test_a_large_batch(self, tier: Tier) -> None:
        chunks = [(key := chunk_key(i), chunk_bytes(key, PAGE_BYTES)) for i in range(500)]
        assert put(tier, chunks) == [Status.OK] * 500
        assert get(tier, [(key, PAGE_BYTES) for key, _ in chunks]) == [(Status.OK, c) for _, c in chunks]

    def test_put_takes_read_only_buffers(self, tier: Tier) -> None:
        key = chunk_key(1)
        content = chunk_bytes(key, PAGE_BYTES)
        assert tier.put([key], [memoryview(content)]) == [Status.OK]
        assert get(tier, [(key, PAGE_BYTES)]) == [(Status.OK, content)]

    def test_put_does_not_keep_the_callers_buffer(self, tier: Tier) -> None:
        key = chunk_key(1)
        content = chunk_bytes(key, PAGE_BYTES)
        buffer = Buffer.of(content)
        assert tier.put([key], [buffer.given]) == [Status.OK]
        buffer.fill(bytes(PAGE_BYTES))
        assert get(tier, [(key, PAGE_BYTES)]) == [(Status.OK, content)]

    def test_surplus_buffers_are_left_alone(self, tier: Tier) -> None:
        key = chunk_key(1)
        content = chunk_bytes(key, PAGE_BYTES)
        assert put(tier, [(key, content)]) == [Status.OK]
        buffers = [Buffer(PAGE_BYTES), Buffer(PAGE_BYTES)]
        assert tier.get([key], [buffer.given for buffer in buffers]) == [Status.OK]
        assert buffers[0].content == content
        assert buffers[1].content == bytes([_GUARD]) * PAGE_BYTES

    # Keys.

    def test_put_is_repeatable_without_a_second_copy(self, tier: Tier) -> None:
        chunk = (key := chunk_key(1), chunk_bytes(key, 64 * 2**10))
        assert put(tier, [chunk]) == [Status.OK]
        used = tier.stats().used_bytes
        for _ in range(20):
            assert put(tier, [chunk]) == [Status.OK]
        assert tier.stats().chunks == 1
        assert tier.stats().used_bytes == used
        assert get(tier, [(key, 64 * 2**10)]) == [(Status.OK, chunk[1])]

    def test_other_content_under_the_same_key_is_never_mixed(self, tier: Tier) -> None:
        key, length = chunk_key(1), 3 * PAGE_BYTES
        versions = [chunk_bytes(key, length, version) for version in (0, 1)]
        for content in versions:
            put(tier, [(key, content)])
        assert get(tier, [(key, length)])[0] in [(Status.OK, content) for content in versions]

    def test_namespaces_and_groups_are_apart(self, tier: Tier) -> None:
        keys = [chunk_key(1, namespace, group) for namespace in (0, 1) for group in (0, 1)]
        put(tier, [(key, chunk_bytes(key, PAGE_BYTES)) for key in keys[:1]])
        assert tier.contains(keys) == [True, False, False, False]
        assert [status for status, _ in get(tier, [(key, PAGE_BYTES) for key in keys[1:]])] == [
            Status.MISS
        ] * 3
        put(tier, [(key, chunk_bytes(key, PAGE_BYTES)) for key in keys])
        assert tier.remove([keys[2]]) == [Status.OK]
        found = get(tier, [(key, PAGE_BYTES) for key in keys])
        for key, result in zip(keys, found, strict=True):
            gone = key == keys[2]
            assert result == ((Status.MISS, None) if gone else (Status.OK, chunk_bytes(key, PAGE_BYTES)))

    def test_remove(self, tier: Tier) -> None:
        keys = [chunk_key(i) for i in range(4)]
        chunks = [(key, chunk_bytes(key, PAGE_BYTES)) for key in keys]
        put(tier, chunks[:3])
        gone, never = keys[1], keys[3]
        assert tier.remove([gone, never, gone]) == [Status.OK, Status.MISS, Status.MISS]
        assert tier.stats().chunks == 2
        assert tier.contains(keys) == [True, False, True, False]
        statuses = [status for status, _ in get(tier, [(key, PAGE_BYTES) for key in keys])]
        assert statuses == [Status.OK, Status.MISS, Status.OK, Status.MISS]
        assert put(tier, [chunks[1]]) == [Status.OK]
        assert get(tier, [(gone, PAGE_BYTES)]) == [(Status.OK, chunks[1][1])]

    # Wrong use and wrong lengths.

    @pytest.mark.parametrize("stored", [1, PAGE_BYTES, PAGE_BYTES + 1])
    @pytest.mark.parametrize("asked", [2, PAGE_BYTES - 1, PAGE_BYTES + 2, 2 * PAGE_BYTES])
    def test_another_length_is_corrupt_and_not_offered_again(
        self, tier: Tier, stored: int, asked: int
    ) -> None:
        key, other = chunk_key(1), chunk_key(2)
        put(tier, [(key, chunk_bytes(key, stored)), (other, chunk_bytes(other, stored))])
        found = get(tier, [(key, asked), (other, stored)])
        assert found == [(Status.CORRUPT, None), (Status.OK, chunk_bytes(other, stored))]
        assert tier.contains([key]) == [False]
        assert get(tier, [(key, stored)]) == [(Status.MISS, None)]
        assert tier.stats().counters["corrupt"] == 1
        content = chunk_bytes(key, asked)
        assert put(tier, [(key, content)]) == [Status.OK]
        assert get(tier, [(key, asked)]) == [(Status.OK, content)]

    @pytest.mark.parametrize("length", [0, KEY_BYTES - 1, KEY_BYTES + 1])
    def test_a_key_of_the_wrong_length_raises(self, tier: Tier, length: int) -> None:
        keys, buffers = [chunk_key(1), bytes(length)], [Buffer(8).given, Buffer(8).given]
        for call in (
            lambda: tier.contains(keys),
            lambda: tier.get(keys, buffers),
            lambda: tier.put(keys, buffers),
            lambda: tier.remove(keys),
        ):
            with pytest.raises(ValueError):
                call()

    def test_fewer_buffers_than_keys_raise(self, tier: Tier) -> None:
        keys, buffers = [chunk_key(1), chunk_key(2)], [Buffer(8).given]
        with pytest.raises(ValueError):
            tier.get(keys, buffers)
        with pytest.raises(ValueError):
            tier.put(keys, buffers)

    def test_a_buffer_of_another_form_raises_and_harms_nothing(self, tier: Tier) -> None:
        key, other = chunk_key(1), chunk_key(2)
        content = chunk_bytes(other, 64)
        good = Buffer.of(content).given
        for bad in (memoryview(bytearray(128))[::2], memoryview(bytearray(64)).cast("I")):
            for buffer in (bad, [bad], [memoryview(bytearray(64)), bad]):
                with pytest.raises(ValueError):
                    tier.put([other, key], [good, buffer])
                with pytest.raises(ValueError):
                    tier.get([other, key], [good, buffer])
        with pytest.raises(ValueError):
            tier.get([key], [memoryview(bytes(64))])
        assert put(tier, [(other, content)]) == [Status.OK]
        assert get(tier, [(other, 64)]) == [(Status.OK, content)]

    def test_use_after_close_raises(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path)
        tier.close()
        tier.close()
        keys, buffers = [chunk_key(1)], [Buffer(8).given]
        for call in (
            lambda: tier.contains(keys),
            lambda: tier.get(keys, buffers),
            lambda: tier.put(keys, buffers),
            lambda: tier.remove(keys),
        ):
            with pytest.raises((ValueError, RuntimeError)):
                call()

    # Bounds.

    def test_a_chunk_larger_than_the_tier_is_rejected_and_costs_no_other(self, tier: Tier) -> None:
        small, large = chunk_key(1), chunk_key(2)
        content = chunk_bytes(small, PAGE_BYTES)
        put(tier, [(small, content)])
        other = chunk_key(3)
        oversize = bytes(tier.info.capacity_bytes + 1)
        statuses = tier.put([large, other], [memoryview(oversize), memoryview(content)])
        assert statuses == [Status.REJECTED, Status.OK]
        assert tier.contains([large]) == [False]
        found = get(tier, [(small, PAGE_BYTES), (other, PAGE_BYTES), (large, PAGE_BYTES)])
        assert found == [(Status.OK, content), (Status.OK, content), (Status.MISS, None)]

    @pytest.mark.parametrize("length", [256 * 2**10, PAGE_BYTES + 1])
    def test_three_times_the_capacity_stays_within_it(self, tier: Tier, tmp_path: Path, length: int) -> None:
        count = 3 * tier.info.capacity_bytes // length
        keys = [chunk_key(i) for i in range(count)]
        batch = 16 if length > PAGE_BYTES + 1 else 256
        for start in range(0, count, batch):
            chunks = [(key, chunk_bytes(key, length)) for key in keys[start : start + batch]]
            assert set(put(tier, chunks)) <= {Status.OK, Status.REJECTED}
            check_bounds(tier, tmp_path)
        assert any(tier.contains(keys[-16:])), "nothing of the newest chunks is left"
        hits = 0
        for start in range(0, count, batch):
            part = keys[start : start + batch]
            for key, (status, content) in zip(part, get(tier, [(key, length) for key in part]), strict=True):
                assert status in (Status.OK, Status.MISS)
                hits += status == Status.OK
                assert content is None or content == chunk_bytes(key, length)
        assert hits == tier.stats().chunks or not self.counts_chunks
        assert hits * length <= tier.info.capacity_bytes

    def test_mixed_lengths_beyond_the_capacity(self, tier: Tier, tmp_path: Path) -> None:
        lengths: dict[bytes, int] = {}
        written = 0
        while written < 2 * tier.info.capacity_bytes:
            key = chunk_key(len(lengths))
            lengths[key] = SIZES[len(lengths) % len(SIZES)] + len(lengths) % 3
            written += lengths[key]
            assert put(tier, [(key, chunk_bytes(key, lengths[key]))]) == [Status.OK]
            check_bounds(tier, tmp_path)
            if len(lengths) % 7 == 0:
                tier.remove([chunk_key(len(lengths) // 2)])
        for key, length in lengths.items():
            ((status, content),) = get(tier, [(key, length)])
            assert (status, content) in [(Status.OK, chunk_bytes(key, length)), (Status.MISS, None)]

    def test_counters_never_decrease(self, tier: Tier) -> None:
        before = tier.stats().counters
        key = chunk_key(1)
        for step in (
            lambda: put(tier, [(key, chunk_bytes(key, 10))]),
            lambda: get(tier, [(key, 10), (chunk_key(2), 10)]),
            lambda: get(tier, [(key, 11)]),
            lambda: tier.remove([key]),
        ):
            step()
            after = tier.stats().counters
            assert all(after[name] >= count for name, count in before.items())
            before = dict(after)

    # Threads.

    def test_concurrent_threads(self, tier: Tier, tmp_path: Path) -> None:
        keys = [chunk_key(i) for i in range(24)]
        lengths = {key: SIZES[i % 4] for i, key in enumerate(keys)}
        contents = {key: chunk_bytes(key, length) for key, length in lengths.items()}

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(200):
                chosen = [keys[i] for i in random.integers(0, len(keys), 4)]
                action = random.integers(0, 8)
                if action < 4:
                    assert put(tier, [(key, contents[key]) for key in chosen]) == [Status.OK] * 4
                elif action < 6:
                    for key, found in zip(chosen, get(tier, [(k, lengths[k]) for k in chosen]), strict=True):
                        assert found in [(Status.OK, contents[key]), (Status.MISS, None)]
                else:
                    assert set(tier.remove(chosen)) <= {Status.OK, Status.MISS}
                    tier.contains(chosen)
                    tier.stats()

        run_threads([lambda seed=seed: work(seed) for seed in range(4)])  # type: ignore[misc]  # default binds
        check_bounds(tier, tmp_path)
        assert put(tier, list(contents.items())) == [Status.OK] * len(keys)
        assert get(tier, list(lengths.items())) == [(Status.OK, contents[key]) for key in keys]
        assert tier.stats().chunks == len(keys)

    def test_a_reader_sees_all_of_a_chunk_or_nothing(self, tier: Tier) -> None:
        # Large enough that readers fall into the copy (lmkv's own tiers let go of the GIL above 1 MiB); one
        # repeated byte, so that a mix shows.
        keys, length = [chunk_key(1), chunk_key(2)], 2**20 + PAGE_BYTES
        done = threading.Event()
        reads = [0, 0]

        def write() -> None:
            buffers = [Buffer.of(bytes([version]) * length) for version in (1, 2)]
            try:
                for turn in range(150):
                    # Each place gets other content than it had.
                    views = [buffers[turn % 2].given, buffers[1 - turn % 2].given]
                    assert tier.put(keys, views) == [Status.OK] * 2
                    assert tier.remove(keys) == [Status.OK] * 2
            finally:
                done.set()

        def read(reader: int) -> None:
            buffer = Buffer(length)
            whole = [bytes([version]) * length for version in (1, 2)]
            while not done.is_set():
                for key in keys:
                    (status,) = tier.get([key], [buffer.given])
                    assert status == Status.MISS or (status == Status.OK and buffer.content in whole)
                reads[reader] += 1

        run_threads([write, lambda: read(0), lambda: read(1)])
        assert min(reads) > 0

    # Persistence and damage.

    def test_reopen(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path)
        if not tier.info.persistent:
            tier.close()
            pytest.skip("not a persistent tier")
        chunks = [(key := chunk_key(i), chunk_bytes(key, SIZES[i % len(SIZES)])) for i in range(20)]
        put(tier, chunks)
        removed = [chunks[i][0] for i in (0, 7, 19)]
        tier.remove(removed)
        expected = [
            (Status.MISS, None) if key in removed else (Status.OK, content) for key, content in chunks
        ]
        for _ in range(3):
            tier = self.reopen(tier, tmp_path)
            check_bounds(tier, tmp_path)
            assert tier.stats().chunks == 17 or not self.counts_chunks
            assert tier.contains([key for key, _ in chunks]) == [key not in removed for key, _ in chunks]
            assert get(tier, [(key, len(content)) for key, content in chunks]) == expected
        tier.close()

    def test_reopen_after_eviction(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path)
        if not tier.info.persistent:
            tier.close()
            pytest.skip("not a persistent tier")
        length = 256 * 2**10
        keys = [chunk_key(i) for i in range(2 * tier.info.capacity_bytes // length)]
        for key in keys:
            put(tier, [(key, chunk_bytes(key, length))])
        kept = [key for key in keys if tier.contains([key])[0]]
        tier = self.reopen(tier, tmp_path)
        check_bounds(tier, tmp_path)
        assert [key for key in keys if tier.contains([key])[0]] == kept
        for key in kept:
            assert get(tier, [(key, length)]) == [(Status.OK, chunk_bytes(key, length))]
        tier.close()

    @pytest.mark.parametrize("reopened", [False, True])
    def test_damage_is_found_and_healed(self, tmp_path: Path, reopened: bool) -> None:
        tier = self.make_tier(tmp_path)
        try:
            chunks = [(key := chunk_key(i), chunk_bytes(key, SIZES[i % 4])) for i in range(20)]
            put(tier, chunks)
            self.damage(tier, tmp_path)
            if reopened:
                tier = self.reopen(tier, tmp_path)
            wanted = [(key, len(content)) for key, content in chunks]
            found = get(tier, wanted)
            # Where a whole index was damaged the chunks are unknown to a new process: MISS.
            allowed = {Status.CORRUPT, Status.MISS} if reopened else {Status.CORRUPT}
            assert {status for status, _ in found} <= allowed
            assert tier.contains([key for key, _ in chunks]) == [False] * 20
            assert get(tier, wanted) == [(Status.MISS, None)] * 20
            if not reopened:
                assert tier.stats().counters["corrupt"] == 20
            assert put(tier, chunks) == [Status.OK] * 20
            assert get(tier, wanted) == [(Status.OK, content) for _, content in chunks]
        finally:
            tier.close()

    # The state machine.

    def test_state_machine(self) -> None:
        machine = state_machine_for(
            self.make_tier, self.reopen, self.overhead_bytes_per_chunk, counts_chunks=self.counts_chunks
        )
        stateful.run_state_machine_as_test(machine, settings=self.state_machine_settings)


def run_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run each in its own thread and raise the first failure."""
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:  # noqa: BLE001  raised again in the caller's thread
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the default, 5 ms, hides most races between short calls
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]


def state_machine_for(
    make_tier: Callable[[Path], Tier],
    reopen: Callable[[Tier, Path], Tier],
    overhead_bytes_per_chunk: int = 2 * PAGE_BYTES,
    *,
    counts_chunks: bool = True,
) -> type[stateful.RuleBasedStateMachine]:
    """A Hypothesis state machine that compares a tier with a dict.

    While all that was ever put fits half the capacity, nothing may be missing; beyond that a chunk
    may be gone but never wrong. A removed chunk stays gone, over a reopen too.
    """
    indices = st.integers(0, 15)
    #: The last divides the capacity a few times, so that a run reaches eviction.
    sizes = st.sampled_from([1, 511, PAGE_BYTES, PAGE_BYTES + 1, 2**20, 0])
    references = st.builds(chunk_key, indices, st.integers(0, 1))
    batches = st.lists(references, min_size=1, max_size=6)
    #: Not "scattered", which makes thousands of pieces of the longest.
    cuts = st.sampled_from([cut for cut in CUTS if cut != "scattered"])

    class Machine(stateful.RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.directory = tempfile.TemporaryDirectory(prefix="lmkv-tier-")
            self.path = Path(self.directory.name)
            self.tier = make_tier(self.path)
            self.model: dict[bytes, bytes] = {}
            self.written_bytes = 0

        @property
        def nothing_evicted(self) -> bool:
            return self.written_bytes <= self.tier.info.capacity_bytes // 2

        @stateful.rule(keys=batches, size=sizes, aligned=st.booleans(), cut=cuts)
        def put(self, keys: list[bytes], size: int, aligned: bool, cut: str) -> None:
            # A key names one content, so a key that was stored once keeps its length.
            size = size or self.tier.info.capacity_bytes // 20
            chunks = [(key, self.model.get(key) or chunk_bytes(key, size)) for key in keys]
            new = {key: content for key, content in chunks if not self.tier.contains([key])[0]}
            self.written_bytes += sum(len(content) + overhead_bytes_per_chunk for content in new.values())
            statuses = put(self.tier, chunks, aligned=aligned, cut=cut)
            for (key, content), status in zip(chunks, statuses, strict=True):
                if self.nothing_evicted:
                    assert status == Status.OK
                assert status in (Status.OK, Status.REJECTED)
                if status == Status.OK:
                    self.model[key] = content

        @stateful.rule(keys=batches, aligned=st.booleans(), cut=cuts)
        def get(self, keys: list[bytes], aligned: bool, cut: str) -> None:
            wanted = [(key, len(self.model.get(key, b"12345678"))) for key in keys]
            found = get(self.tier, wanted, aligned=aligned, cut=cut)
            for key, (status, content) in zip(keys, found, strict=True):
                if key not in self.model or not self.nothing_evicted:
                    assert status in (Status.MISS, Status.OK)
                else:
                    assert status == Status.OK
                if status == Status.OK:
                    assert content == self.model[key]

        @stateful.rule(keys=batches)
        def contains(self, keys: list[bytes]) -> None:
            for key, there in zip(keys, self.tier.contains(keys), strict=True):
                if self.nothing_evicted or key not in self.model:
                    assert there == (key in self.model)

        @stateful.rule(keys=batches)
        def remove(self, keys: list[bytes]) -> None:
            statuses = self.tier.remove(keys)
            for key, status in zip(keys, statuses, strict=True):
                known = self.model.pop(key, None) is not None
                if self.nothing_evicted or not known:
                    assert status == (Status.OK if known else Status.MISS)
            assert self.tier.contains(keys) == [False] * len(keys)

        @stateful.precondition(lambda self: self.tier.info.persistent)
        @stateful.rule()
        def reopen(self) -> None:
            self.tier = reopen(self.tier, self.path)

        @stateful.invariant()
        def within_bounds(self) -> None:
            check_bounds(self.tier, self.path)
            chunks = self.tier.stats().chunks
            if not counts_chunks:
                return
            assert chunks == len(self.model) if self.nothing_evicted else chunks <= len(self.model)

        def teardown(self) -> None:
            self.tier.close()
            self.directory.cleanup()

    return Machine
