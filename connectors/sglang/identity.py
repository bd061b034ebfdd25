"""The namespaces of one SGLang rank."""

import hashlib
import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from lmkv.config import Config
from lmkv.connectors.sglang import compat
from lmkv.identity import Memory, config_digest, local_model, weights_digest
from lmkv.keys import Namespace

logger = logging.getLogger(__name__)

#: A pool's own description of how it lays out a page, as far as it has these attributes.
_POOL_ATTRIBUTES = (
    *("layout", "dtype", "page_size", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank"),
    *("qk_rope_head_dim", "kv_cache_dim", "start_layer", "end_layer", "temporal_dtype", "conv_dtype"),
)


def engine_fields(config: Config) -> dict[str, str]:
    """What this engine's namespaces have in common.

    The engine's version is a field: a newer SGLang may order or compute KV differently without any flag
    that says so. What cannot be identified gives the engine namespaces of its own.
    """
    server, model = compat.server_args(), compat.model_config()
    whole = Memory.of_user() if config.identity.weights == "whole" else None
    weights = _digest("weights", server.model_path, server.revision, str(server.load_format), whole)
    draft = getattr(server, "speculative_draft_model_path", None)
    return {
        "record": "1",
        "tenant": config.identity.tenant,
        "engine": f"sglang-{compat.sglang_version()}",
        "weights": weights,
        "revision": str(server.revision),
        # The effective config: RoPE scaling, sliding window and overrides from flags included.
        "config": config_digest(model.hf_config.to_dict()),
        "context_length": str(model.context_len),
        "quantization": str(model.quantization),
        "weights_dtype": str(model.dtype),
        "kv_dtype": str(server.kv_cache_dtype),
        # A drafting engine hashes pairs of tokens and may pack the draft's KV beside the target's.
        "speculation": str(server.speculative_algorithm),
        "draft": _digest("draft weights", draft, None, "", whole) if draft else "none",
        "adapters": _adapters(getattr(server, "lora_paths", None), whole),
        "hash_algorithm": "sglang-sha256",
    }


def pool_namespace(
    fields: Mapping[str, str], ranks: Iterable[tuple[str, str]], name: str, pool: Any, form: str
) -> Namespace:
    """The namespace of one pool. `ranks`: whose bytes they are (`Scope.ranks`); `form`: how a page lies in
    a chunk."""
    described = {
        attribute: str(getattr(pool, attribute)) for attribute in _POOL_ATTRIBUTES if hasattr(pool, attribute)
    }
    return Namespace.of(
        {
            **fields,
            **dict(ranks),
            "pool": name,
            "pool_class": type(pool).__name__,
            "pool_layout": json.dumps(described, sort_keys=True),
            "form": form,
        }
    )


def renewed(namespace: Namespace) -> Namespace:
    """A namespace that nobody else has, for what is stored from now on."""
    return Namespace.of({**namespace.fields, "reset": uuid.uuid4().hex})


def _digest(what: str, path: str, revision: str | None, load_format: str, whole: Memory | None) -> str:
    model = None if load_format.endswith("dummy") else local_model(path, revision)
    digest = weights_digest(model, whole=whole) if model is not None else None
    if digest is None:
        logger.warning(
            "lmkv: the %s of %s cannot be identified (load format %s); nothing is shared with other engines "
            "or across restarts. Fix: serve a directory with safetensors files.",
            what,
            path,
            load_format or "auto",
        )
        return f"unidentified-{uuid.uuid4().hex}"
    return digest


def _adapters(adapters: Any, whole: Memory | None) -> str:
    """Digest of the adapters named at start: SGLang's page hash holds their names and paths, not their
    content. One that is loaded later gets an id that no other process has."""
    if not adapters:
        return "none"
    parts = [
        (adapter.lora_name, adapter.lora_path, _digest("adapter", adapter.lora_path, None, "", whole))
        for adapter in adapters
    ]
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()
