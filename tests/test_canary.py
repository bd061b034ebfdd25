"""The boot canary of the tiers."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.file import FileTier
from lmkv.canary import check_tier
from lmkv.config import ConfigError
from lmkv.keys import Namespace
from lmkv.tier import Buffer, Status

NAMESPACE = Namespace.of({"model": "m"})
SIZES = [5000, 100_000, 5000]


class Faulty(FileTier):
    """`spoils`: what becomes of a chunk that was read well; `statuses`: what `put` answers instead."""

    spoils: Any = None
    refuses: Status | None = None

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        statuses = super().get(keys, buffers)
        if self.spoils is not None:
            buffers[0][len(buffers[0]) - 1] ^= 1  # type: ignore[index,operator]  # one memoryview
            return [self.spoils]
        return statuses

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[Status]:
        return [self.refuses] if self.refuses is not None else super().put(keys, buffers)


@pytest.fixture
def tier(tmp_path: Path) -> Any:
    tier = Faulty(tmp_path / "kv", 64 << 20)
    yield tier
    tier.close()


def test_a_good_tier_is_as_before(tier: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    check_tier(tier, NAMESPACE, [*SIZES, 1 << 30])  # more than it can hold
    stats = tier.stats()
    assert stats.chunks == 0 and stats.counters["put_chunks"] == stats.counters["get_hits"] == 2
    assert not caplog.records


@pytest.mark.parametrize("status", [Status.OK, Status.CORRUPT])
def test_other_bytes_are_refused(tier: Faulty, status: Status) -> None:
    tier.spoils = status
    with pytest.raises(ConfigError, match=r"\[file\] path: a test chunk of 5000 bytes.* Fix: check the disk"):
        check_tier(tier, NAMESPACE, SIZES)


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.REJECTED])
def test_who_does_not_answer_now_is_served_without(
    tier: Faulty, status: Status, caplog: pytest.LogCaptureFixture
) -> None:
    tier.refuses = status
    with caplog.at_level(logging.WARNING):
        check_tier(tier, NAMESPACE, SIZES)
    assert f"could not be tried with a chunk of 5000 bytes: {status.name.lower()}" in caplog.text


def test_a_chunk_that_is_gone_at_once_is_no_fault(tier: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    tier.spoils = Status.MISS  # evicted by another engine
    with caplog.at_level(logging.WARNING):
        check_tier(tier, NAMESPACE, SIZES)
    assert "5000 bytes: miss" in caplog.text
