"""The namespace of one vLLM engine."""

import hashlib
import logging
import uuid
from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, iter_layer_specs
from vllm.v1.kv_offload.config import OffloadingConfig

from lmkv.config import Config
from lmkv.connectors.vllm import compat
from lmkv.identity import Memory, config_digest, local_model, weights_digest
from lmkv.keys import Namespace

logger = logging.getLogger(__name__)


def namespace_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    offloading: OffloadingConfig,
    config: Config,
    rank_fingerprints: Sequence[bytes],
) -> Namespace:
    """All that must match for this engine's KV bytes to be interchangeable with another's.

    The engine's version is a field: a newer vLLM may order or compute KV differently without any
    flag that says so. Weights that cannot be identified give the engine a namespace of its own.
    """
    model, parallel = vllm_config.model_config, offloading.parallel
    weights = _weights(vllm_config, whole=config.identity.weights == "whole")
    if weights is None:
        logger.warning(
            "lmkv: the weights of %s cannot be identified (load format %s); nothing is shared with other "
            "engines or across restarts. Fix: serve a directory with safetensors files.",
            model.model,
            vllm_config.load_config.load_format,
        )
        weights = f"unidentified-{uuid.uuid4().hex}"
    return Namespace.of(
        {
            "record": "1",
            "tenant": config.identity.tenant,
            "engine": f"vllm-{compat.vllm_version()}",
            "weights": weights,
            "revision": str(model.revision),
            # The effective config: RoPE scaling, sliding window and overrides from flags included.
            "config": config_digest(model.hf_config.to_dict()),
            "quantization": str(model.quantization),
            "weights_dtype": str(model.dtype),
            "kv_dtype": offloading.model.dtype,
            "tokens_per_block": ",".join(str(group.tokens_per_block) for group in offloading.groups),
            "tokens_per_hash": str(offloading.cache.tokens_per_hash),
            "blocks_per_chunk": str(offloading.cache.blocks_per_chunk),
            "tp_size": str(parallel.tp_size),
            "pp_size": str(parallel.pp_size),
            "layout": hashlib.sha256(b"".join(rank_fingerprints)).hexdigest(),
            "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
            "hash_seed": compat.hash_seed(vllm_config.cache_config.prefix_caching_hash_algo),
            **_states(kv_cache_config),
        }
    )


def _states(kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """The recurrent states of a model that has any: their types follow flags, and vLLM pads their pages to
    the size of the others, so the layout does not tell them apart."""
    states = [
        f"{group_id} {spec.mamba_type} {spec.shapes} {spec.dtypes}"
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        for spec in iter_layer_specs(group.kv_cache_spec)
        if isinstance(spec, MambaSpec)
    ]
    return {"states": "; ".join(states)} if states else {}


def _weights(vllm_config: VllmConfig, *, whole: bool) -> str | None:
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        return None
    path = local_model(model.model, model.revision)
    return None if path is None else weights_digest(path, whole=Memory.of_user() if whole else None)
