"""What differs between SGLang versions, and nothing else.

Version by version (read from the released wheels, run by `make compat`): 0.5.11 has plugins
(`sglang.srt.plugins`), the dynamic storage backend with `interface_v1`, sidecar pools (v2) and runtime
attach; 0.5.13 moves the update of weights; 0.5.19 resolves flags in a method of its own; 0.5.20 puts
cache_salt and LoRA into the page hash; 0.5.21 names the data-parallel rank; 0.5.22 outlives a storage that
raises (before, its thread ends); 0.5.23 has the external linker and tells a storage when all pools are
registered.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from sglang.srt.mem_cache import hicache_storage

from lmkv.config import ConfigError

OLDEST = (0, 5, 11)
#: Newest version whose interface was read; later ones are tried with a warning.
NEWEST = (0, 5, 23)


def sglang_version() -> str:
    """Version of the installed SGLang."""
    return version("sglang")


def _release() -> tuple[int, ...]:
    numbers = sglang_version().split(".")[:3]
    return tuple(int("".join(filter(str.isdigit, number)) or 0) for number in numbers)


#: Page hashes differ between salts and adapters.
HASH_HAS_SALT = _release() >= (0, 5, 20)
#: `HiCacheStorage.on_host_pools_registered` is called.
ANNOUNCES_POOLS = hasattr(hicache_storage.HiCacheStorage, "on_host_pools_registered")
#: The method before which flags can still be set.
RESOLVE = "resolve_once" if _release() >= (0, 5, 19) else "__post_init__"
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
#: Methods of a scheduler that replace weights.
UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    if _release() >= (0, 5, 13)
    else "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
)
UPDATES = tuple(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))


def check_version() -> str | None:
    """A warning for versions newer than those read; ConfigError for older ones."""
    release = _release()
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        fix = f"install SGLang {oldest} or newer."
        raise ConfigError("SGLang", f"version {sglang_version()} is too old for lmkv.", fix)
    if release > NEWEST:
        newest = ".".join(map(str, NEWEST))
        return f"SGLang {sglang_version()} is newer than the versions lmkv was made for (up to {newest})"
    return None


def server_args() -> Any:
    """The flags of this process, as they are in effect."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # before 0.5.19
        from sglang.srt.server_args import get_global_server_args

        return get_global_server_args()
    return resolving_view(get_server_args())


def prompt_tokens(batch: Any) -> int:
    """Prompt tokens that a `ScheduleBatch` computes; 0 if it does something else."""
    return int(batch.extend_num_tokens or 0) if batch.forward_mode.name in ("EXTEND", "MIXED") else 0


def model_config() -> Any:
    """SGLang's `ModelConfig` for the served model, overrides by flags included."""
    from sglang.srt.configs.model_config import ModelConfig

    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # before 0.5.15
        return ModelConfig.from_server_args(server_args())
    return ModelConfig.from_server_args(get_server_args())


def pages_found(pages: int, hits: dict[Any, int], restorable: Sequence[int]) -> Any:
    """SGLang's `PoolTransferResult`; its list of lengths came with 0.5.19."""
    kind = hicache_storage.PoolTransferResult
    if "restorable_prefix_pages" in kind.__dataclass_fields__:
        return kind(pages, hits, list(restorable))
    return kind(pages, hits)


#: SGLang's name of the pool with the model's own KV.
KV = hicache_storage.PoolName.KV


def storage_metrics(read: Sequence[tuple[int, int, float]], written: Sequence[tuple[int, int, float]]) -> Any:
    """SGLang's `StorageMetrics` of batches (pages, bytes, seconds)."""
    from sglang.srt.observability.metrics_collector import StorageMetrics

    return StorageMetrics(
        prefetch_pgs=[pages for pages, _, _ in read],
        backup_pgs=[pages for pages, _, _ in written],
        prefetch_bandwidth=[size / seconds / 1e9 for _, size, seconds in read],
        backup_bandwidth=[size / seconds / 1e9 for _, size, seconds in written],
    )


def is_mha(pool: Any) -> bool:
    """Whether a host pool holds K and V of heads, which tensor parallelism divides."""
    return any(base.__name__ == "MHATokenToKVPoolHost" for base in type(pool).__mro__)


def linker_ranks(rank_replicated: bool) -> Any:
    """This rank as a storage would be told of it; for the linker, which came with 0.5.23."""
    from types import SimpleNamespace

    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return SimpleNamespace(
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        attn_cp_rank=parallel.attn_cp_rank,
        attn_cp_size=parallel.attn_cp_size,
        dp_rank=parallel.attn_dp_rank,
        is_mla_model=rank_replicated,
    )
