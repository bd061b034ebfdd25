"""The conformance suite over lmkv's own tiers, and what only the host tier promises."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings

import lmkv.tier
from lmkv.backends import open_tier, register_tier
from lmkv.backends.host import HostTier
from lmkv.record import MAGIC
from lmkv.testing import PAGE_BYTES, TierConformance, chunk_bytes, chunk_key, get, put
from lmkv.tier import Buffer, Status, Tier, buffer_bytes, pieces


class TestHostTier(TierConformance):
    def make_tier(self, tmp_path: Path) -> Tier:
        return open_tier("host", {"capacity": "32MiB"})

    def test_evicts_the_least_recently_used_and_no_more(self, tier: Tier) -> None:
        length = 2**20
        keys = [chunk_key(i) for i in range(34)]
        assert put(tier, [(key, chunk_bytes(key, length)) for key in keys[:32]]) == [Status.OK] * 32
        assert tier.stats().used_bytes == tier.info.capacity_bytes
        get(tier, [(keys[0], length)])
        put(tier, [(keys[1], chunk_bytes(keys[1], length))])
        put(tier, [(keys[32], bytes(length)), (keys[33], bytes(length))])
        assert [i for i, there in enumerate(tier.contains(keys)) if not there] == [2, 3]
        assert tier.stats().counters["evictions"] == 2

    def test_freed_memory_is_joined(self, tier: Tier) -> None:
        capacity, key = tier.info.capacity_bytes, chunk_key(9999)
        for order in (0, 1, 2):
            keys = [chunk_key(i) for i in range(capacity // (16 * PAGE_BYTES))]
            put(tier, [(key, bytes(16 * PAGE_BYTES)) for key in keys])
            if order == 1:
                keys.reverse()
            elif order == 2:
                random.Random(0).shuffle(keys)
            assert tier.remove(keys) == [Status.OK] * len(keys)
            assert tier.stats().used_bytes == 0
            assert tier.put([key], [memoryview(bytes(capacity))]) == [Status.OK]
            assert tier.remove([key]) == [Status.OK]
        assert "evictions" not in tier.stats().counters


class TestFileTier(TierConformance):
    def make_tier(self, tmp_path: Path) -> Tier:
        return open_tier("file", {"path": str(tmp_path / "kv"), "capacity": "64MiB"})

    def damage(self, tier: Tier, tmp_path: Path) -> None:
        """Flip a bit in each block of payload; damaged headers have tests of their own."""
        segments = sorted((tmp_path / "kv").glob("*.seg"))
        assert segments
        for path in segments:
            blocks = np.fromfile(path, np.uint8).reshape(-1, PAGE_BYTES)
            payload = (blocks[:, : len(MAGIC)] != np.frombuffer(MAGIC, np.uint8)).any(axis=1)
            blocks[payload, 0] ^= 1
            with path.open("r+b") as stream:  # in place: the tier has the file open
                stream.write(blocks.tobytes())


# The suite itself: each of these faults must be found by the state machine.


class ForgetsToRemove(HostTier):
    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        return [Status.OK if there else Status.MISS for there in self.contains(keys)]


class IgnoresTheNamespace(HostTier):
    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        return super().put([bytes(32) + key[32:] for key in keys], buffers)

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        return super().get([bytes(32) + key[32:] for key in keys], buffers)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return super().contains([bytes(32) + key[32:] for key in keys])

    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        return super().remove([bytes(32) + key[32:] for key in keys])


class LosesTheLastByte(HostTier):
    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        statuses = super().get(keys, buffers)
        for buffer in buffers:
            if buffer_bytes(buffer) == PAGE_BYTES + 1:
                pieces(buffer)[-1][-1] ^= 1
        return statuses


class RepeatsTheFirstPiece(HostTier):
    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        return super().put(keys, [[*pieces(buffer)[:1], *pieces(buffer)[:-1]] for buffer in buffers])


class ClaimsToStore(HostTier):
    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        super().put(keys[:4], buffers[:4])
        return [Status.OK] * len(keys)


KINDS = [ForgetsToRemove, IgnoresTheNamespace, LosesTheLastByte, RepeatsTheFirstPiece, ClaimsToStore]


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_machine_finds_faults(kind: type[HostTier]) -> None:
    class Suite(TierConformance):
        # Found is enough: shrinking to the smallest example would take half a minute.
        state_machine_settings = settings(
            TierConformance.state_machine_settings, derandomize=True, database=None, phases=[Phase.generate]
        )

        def make_tier(self, tmp_path: Path) -> Tier:
            return kind(16 * 2**20)

    with pytest.raises((AssertionError, ExceptionGroup)):
        Suite().test_state_machine()


# The registry.


def test_a_tier_of_somebody_else_is_opened_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmkv.tier, "_TIERS", dict(lmkv.tier._TIERS))
    register_tier("theirs", f"{__name__}:ForgetsToRemove")
    register_tier("theirs", f"{__name__}:ForgetsToRemove")
    tier = open_tier("theirs", {"capacity": "1MiB"})
    assert type(tier).__name__ == "ForgetsToRemove"
    tier.close()
    with pytest.raises(ValueError, match="already registered"):
        register_tier("host", "theirs:Tier")


def test_an_unknown_tier_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"no tier is named 'tape'; known tiers: file, host"):
        open_tier("tape", {})
