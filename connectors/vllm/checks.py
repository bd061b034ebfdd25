"""What lmkv refuses under vLLM, by name, before the engine serves."""

import re
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, iter_layer_specs

from lmkv.config import Config, ConfigError

#: Speculators that keep no KV of their own: the cache does not see them.
_PLAIN_SPECULATORS = {"ngram", "ngram_gpu", "suffix"}
_TABLES = {"host", "file", "redis", "identity", "security", "vllm"}
_ALLOWED_EXTRA = {"lmkv", "self_describing_kv_events"}
_NATIVE_EXTRA = {
    "cpu_bytes_to_use": "[host] capacity",
    "block_size": "[vllm] blocks_per_chunk",
    "blocks_per_chunk": "[vllm] blocks_per_chunk",
    "offload_prompt_only": "[vllm] prompt_only",
    "secondary_tiers": "[file] path and [file] capacity",
}


#: Longer than any prefill; a proxy that asks for more has mistaken the unit.
MAX_WAIT_MS = 60_000


def wait_s(transfer_params: object) -> float:
    """Seconds for which a request may wait for another engine to store its chunks: what a proxy put into
    `kv_transfer_params` as `lmkv_wait_ms`, 0 to 60,000. Anything else there counts as 0."""
    wait_ms = transfer_params.get("lmkv_wait_ms") if isinstance(transfer_params, Mapping) else None
    if isinstance(wait_ms, bool) or not isinstance(wait_ms, int | float) or not 0 <= wait_ms <= MAX_WAIT_MS:
        return 0.0
    return wait_ms / 1000


def check_extra_config(extra: Mapping[str, Any]) -> None:
    """Refuse keys of `kv_connector_extra_config` that would be silently ignored."""
    for name in extra:
        if name in _TABLES:
            raise ConfigError(
                f"kv_connector_extra_config.{name}",
                "lmkv's tables are not read from here.",
                f'put it under "lmkv": {{"lmkv": {{"{name}": ...}}}}.',
            )
        if name in _NATIVE_EXTRA:
            raise ConfigError(
                f"kv_connector_extra_config.{name}",
                "this is a setting of vLLM's own offloading.",
                f"use lmkv's {_NATIVE_EXTRA[name]}.",
            )
        if name not in _ALLOWED_EXTRA:
            raise ConfigError(
                f"kv_connector_extra_config.{name}",
                "lmkv does not know this setting.",
                'remove it; lmkv\'s settings go under "lmkv" (docs/configuration.md).',
            )


def check_engine(vllm_config: VllmConfig, config: Config) -> None:
    """Refuse engine features that lmkv does not handle."""
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    assert transfer is not None
    # vLLM tells a rank of a dense model nothing of data parallelism but this suffix of its id.
    data_parallel = parallel.data_parallel_size > 1 or re.search(r"_dp\d+$", transfer.engine_id or "")
    if data_parallel and config.host.capacity is None:
        raise ConfigError(
            "[host] capacity",
            "it has no default with --data-parallel-size: a rank does not know how many share the node.",
            "set it to what one rank may take, for example a quarter of the memory over the ranks.",
        )
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise ConfigError(
            "--nnodes / --distributed-executor-backend",
            "the ranks of one engine share the host slab and must be on one node, started by vLLM itself.",
            "use one node and the mp or uni executor; more nodes can run as separate engines.",
        )
    for flag, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(flag, "context parallelism is not supported with lmkv.", "set it to 1.")
    if speculative is not None and speculative.method not in _PLAIN_SPECULATORS:
        raise ConfigError(
            "--speculative-config",
            f"method {speculative.method!r} keeps KV of a draft model, which lmkv does not identify.",
            f"use one of {', '.join(sorted(_PLAIN_SPECULATORS))}, or serve without lmkv.",
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError(
            "--enable-sleep-mode", "sleep mode is not supported with lmkv.", "leave the flag away."
        )
    shared = config.file.path is not None or config.redis.url is not None
    if transfer.kv_role != "kv_both" and not shared:
        raise ConfigError(
            "kv_role",
            f"{transfer.kv_role} hands KV from one engine to another, and there is no tier that both see.",
            'set [file] path or [redis] url, or use "kv_role": "kv_both".',
        )
    if shared and "sha256" not in vllm_config.cache_config.prefix_caching_hash_algo:
        raise ConfigError(
            "--prefix-caching-hash-algo",
            f"{vllm_config.cache_config.prefix_caching_hash_algo} is not collision resistant and its seed "
            "changes with every process, so nothing in [file] path or [redis] url could be shared.",
            "use sha256 or sha256_cbor, or unset [file] path and [redis] url.",
        )


def check_groups(kv_cache_config: KVCacheConfig, config: Config) -> None:
    """Refuse KV groups that lmkv does not handle."""
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if any(spec.mamba_cache_mode != "align" for spec in states):
        raise ConfigError(
            "--enable-prefix-caching / --mamba-cache-mode",
            "the model keeps recurrent (Mamba or linear-attention) state, which vLLM only hands on at the "
            "ends of blocks with prefix caching on and cache mode align.",
            "set --enable-prefix-caching and --mamba-cache-mode align.",
        )
    if any(spec.num_speculative_blocks for spec in states):
        raise ConfigError(
            "--speculative-config",
            "speculation is not supported with lmkv for a model that keeps recurrent state.",
            "leave the flag away, or serve without lmkv.",
        )
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise ConfigError("--attention-config", "HiSparse is not supported with lmkv.", "turn it off.")
    plain = len(groups) == 1 and all(isinstance(spec, FullAttentionSpec) for spec in specs)
    if config.vllm.blocks_per_chunk > 1 and not plain:
        raise ConfigError(
            "[vllm] blocks_per_chunk",
            f"{config.vllm.blocks_per_chunk} blocks a chunk work only for models with one full-attention "
            f"group; this one has {len(groups)} KV group(s), not all of them full attention.",
            "set it to 1.",
        )
