"""Counters: increments reach the engine once, and the reference follows the code."""

from pathlib import Path

from lmkv.metrics import Metrics, reference


def test_take_returns_increments_of_counters_and_values_of_gauges() -> None:
    metrics = Metrics()
    metrics.add("lmkv_hit_tokens", 3, "host")
    metrics.set("lmkv_pending_writes", 5)
    assert sorted(metrics.take()) == [(("lmkv_hit_tokens", ("host",)), 3), (("lmkv_pending_writes", ()), 5)]
    assert metrics.take() == []
    metrics.add("lmkv_hit_tokens", 2, "host")
    metrics.set("lmkv_pending_writes", 5)  # unchanged: not sent again
    assert metrics.take() == [(("lmkv_hit_tokens", ("host",)), 2)]
    assert metrics.get("lmkv_hit_tokens", "host") == 5


def test_the_reference_is_made_from_the_code() -> None:
    written = Path(__file__).parent.parent / "docs" / "metrics.md"
    assert written.read_text() == reference(), "run: python -m lmkv.metrics > docs/metrics.md"
