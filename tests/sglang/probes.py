"""What tests ask of lmkv inside SGLang's scheduler processes (`Engine.inside`)."""

from typing import Any

from lmkv.connectors.sglang import live


def serving(scheduler: Any) -> Any:
    """The storage or the linker of this rank."""
    cache = scheduler.tree_cache
    linker = getattr(cache, "linker", None)
    if linker is not None:
        return linker.cache_linker
    backend = cache.cache_controller.storage_backend
    return getattr(backend, "_backend", backend)  # SGLang's own fault wrapper


def counters(scheduler: Any) -> dict[str, float]:
    """lmkv's counters of this rank, as "name label"."""
    values = serving(scheduler).metrics.values
    return {" ".join((name, *labels)): value for (name, labels), value in values.items()}


def prefill_speed(scheduler: Any) -> float:
    """Prompt tokens a second, as this rank measured it; 0 if it did not."""
    return live.gate.prefill.per_s or 0.0


def stored_chunks(scheduler: Any) -> int:
    """Chunks in this rank's directories."""
    return sum(tier.stats().chunks for tier in _tiers(serving(scheduler)))


def namespaces(scheduler: Any) -> list[str]:
    """This rank's namespace digests, hex."""
    ours = serving(scheduler)
    if hasattr(ours, "_store"):
        return [ours._store.namespace.digest.hex()]
    return sorted(ready.namespace.digest.hex() for ready in ours._ready.values())


def _tiers(ours: Any) -> list[Any]:
    if hasattr(ours, "_store"):
        return [below.tier for below in ours._store._below]
    return [place.tier for place in ours._files.values()]
