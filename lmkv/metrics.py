"""Counters and gauges of one engine process, in Prometheus' terms.

The connectors hand them to the engine's own metrics endpoint; lmkv opens no socket.
"""

import logging
import threading
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Metric:
    """What one metric means. `labels` are label names; a counter is exported with `_total`."""

    help: str
    labels: tuple[str, ...] = ()
    gauge: bool = False


METRICS = {
    "lmkv_hit_tokens": Metric("Prompt tokens whose KV was loaded, by the tier they came from.", ("tier",)),
    "lmkv_stored_chunks": Metric("Chunks stored in a tier.", ("tier",)),
    "lmkv_stored_bytes": Metric("Bytes stored in a tier.", ("tier",)),
    "lmkv_loaded_chunks": Metric(
        "Chunks read from a tier: host = loaded into the engine, below = promoted into the host tier.",
        ("tier",),
    ),
    "lmkv_loaded_bytes": Metric("Bytes read from a tier.", ("tier",)),
    "lmkv_misses": Metric("Chunks that lay in a tier but were not served, by reason.", ("reason",)),
    "lmkv_skipped_stores": Metric("Chunks that were not stored, by reason.", ("reason",)),
    "lmkv_evictions": Metric("Chunks evicted from the host tier."),
    "lmkv_errors": Metric("Exceptions caught at the boundary to the engine, by call.", ("kind",)),
    "lmkv_breaker_trips": Metric("Times a tier failed or hung and was left alone for a while.", ("tier",)),
    "lmkv_pending_writes": Metric("Chunks waiting to be written below the host tier.", gauge=True),
    "lmkv_host_chunks": Metric("Chunks in the host tier.", gauge=True),
    "lmkv_tier_events": Metric("What a tier counted of itself; docs/metrics.md.", ("tier", "event")),
    "lmkv_prefill_tokens_per_s": Metric("How fast prompts are computed, as measured.", gauge=True),
    "lmkv_load_bytes_per_s": Metric("How fast a tier loads, as measured.", ("tier",), gauge=True),
    "lmkv_leased_bytes": Metric("Bytes of host slots that are in use by transfers.", gauge=True),
    "lmkv_ready_bytes": Metric("Bytes of the host slab that are faulted in and usable.", gauge=True),
}

Series = tuple[str, tuple[str, ...]]


class Metrics:
    """Running values of `METRICS`. Used from the owner's thread only."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}
        self._taken: dict[Series, float] = {}
        self._changed: set[Series] = set()

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Increase a counter."""
        series = (name, labels)
        self.values[series] = self.values.get(series, 0) + amount
        self._changed.add(series)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        series: Series = (name, labels)
        if self.values.get(series) != value:
            self.values[series] = value
            self._changed.add(series)

    def get(self, name: str, *labels: str) -> float:
        """The present value; 0 if it was never touched."""
        return self.values.get((name, labels), 0)

    def take(self) -> list[tuple[Series, float]]:
        """What changed since the last call: increments of counters, values of gauges."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, set()
        out = []
        for series in changed:
            value = self.values[series]
            if METRICS[series[0]].gauge:
                out.append((series, value))
            else:
                out.append((series, value - self._taken.get(series, 0)))
                self._taken[series] = value
        return out


class SharedMetrics(Metrics):
    """Metrics that several threads add to."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """See `Metrics.add`."""
        with self._lock:
            super().add(name, amount, *labels)


class RateLimitedLog:
    """Logs each kind of message at most once a period, with a count of those left out."""

    def __init__(self, period_s: float = 10.0) -> None:
        self._period_s = period_s
        self._last: dict[str, float] = {}
        self._dropped: dict[str, int] = {}

    def warning(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        """Log `message` unless one of this kind was logged within the period."""
        now = time.monotonic()
        if now - self._last.get(kind, -self._period_s) < self._period_s:
            self._dropped[kind] = self._dropped.get(kind, 0) + 1
            return
        self._last[kind] = now
        dropped = self._dropped.pop(kind, 0)
        suffix = f" ({dropped} more like it were not logged)" if dropped else ""
        logger.warning("lmkv: " + message + suffix, *args, exc_info=exc_info)


_INTRODUCTION = """\
# Metrics

<!-- Made by `python -m lmkv.metrics > docs/metrics.md`; a test compares the two. -->

They appear on vLLM's own `/metrics` beside its `vllm:kv_offload_*` (bytes, seconds and sizes of the copies
between blocks and slots, and lookup delays). Counters end in `_total` there.

| metric | kind | labels | meaning |
|---|---|---|---|
"""

_LABELS = """\

`tier` is `host`, `file` or `redis`; of `lmkv_hit_tokens` also `window`: tokens before a sliding window, which
count as hit although nothing had to be loaded for them.

`reason` of `lmkv_misses`: `deadline` (it did not come in time), `no_room` (all slots leased, or the request's
half of the slab is full), `corrupt`, `unavailable` (I/O error, dead server), `miss` (recycled or evicted
meanwhile), `rejected` (too many reads queued), `gate` (computing it again is faster), `reset`. A chunk counts
each time the engine asks for it; one that lies nowhere does not.

`reason` of `lmkv_skipped_stores`: `slab_full`, `copy_failed` (between block and slot), and below the host
tier `write_queue_full` (half the slab is waiting to be written: a larger slab helps), `breaker_open`,
`unavailable`, `rejected` (no room, or a tier for reading only), `reset`.

`event` of `lmkv_tier_events` is what the tier counts itself, such as `corrupt`, `io_errors`, `evicted` of the
files and `parts_missing`, `server_full`, `timeouts` of Redis; read once a second. Among the chunks put, read
and removed is one of each size with which the tier was tried at the start.

vLLM publishes once per engine step, so on an idle engine gauges keep the value of the last step.
"""


def reference() -> str:
    """The text of docs/metrics.md."""
    rows = []
    for name, metric in METRICS.items():
        kind, shown = ("gauge", name) if metric.gauge else ("counter", f"{name}_total")
        rows.append(f"| `{shown}` | {kind} | {', '.join(metric.labels) or '-'} | {metric.help} |\n")
    return _INTRODUCTION + "".join(rows) + _LABELS


if __name__ == "__main__":
    print(reference(), end="")
