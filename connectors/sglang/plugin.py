"""Entry point `sglang.srt.plugins`: SGLang calls `register` in every process it starts.

It turns lmkv on by SGLang's own flags where lmkv is configured and no flag speaks of it, and has SGLang tell
lmkv when weights change and how fast prompts are computed.
"""

import json
import logging
import os
from typing import Any

from lmkv.config import NOT_SETTINGS, Config, ConfigError, load
from lmkv.connectors.sglang import live

logger = logging.getLogger(__name__)

_MODULE = "lmkv.connectors.sglang"
#: Small enough that short prompts fill pages, large enough for few and large I/O; what most backends take.
PAGE_TOKENS = 64
#: SGLang reads from the storage only if at least so many tokens are there; below, computing them is faster.
PREFETCH_TOKENS = 64


def register() -> None:
    """Hook the resolution of flags, every way in which weights are replaced, and the scheduler's batches."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from lmkv.connectors.sglang import compat
    from lmkv.connectors.sglang.steps import Steps

    HookRegistry.register(f"{compat.SERVER_ARGS}.{compat.RESOLVE}", _resolve, HookType.BEFORE)
    for method in compat.UPDATES:
        HookRegistry.register(f"{compat.UPDATER}.{method}", _update_weights, HookType.AROUND)
    steps = Steps()
    HookRegistry.register(f"{compat.SCHEDULER}.run_batch", steps.run_batch, HookType.AROUND)
    HookRegistry.register(
        f"{compat.SCHEDULER}.process_batch_result", steps.process_batch_result, HookType.AROUND
    )
    live.watch()


def _update_weights(update: Any, *args: Any, **kwargs: Any) -> Any:
    live.forget_all("the weights change")
    try:
        return update(*args, **kwargs)
    finally:
        live.forget_all("the weights changed")


def _resolve(server: Any, *args: Any, **kwargs: Any) -> None:
    """Set the flags that turn lmkv on, before SGLang works out all others. Raises ConfigError."""
    if getattr(server, "_resolution_finished", False) or not _configured():
        return
    if server.hicache_storage_backend is not None or getattr(
        server, "enable_unified_cache_external_linker", False
    ):
        return  # explicit flags
    config = load()
    if config.sglang.mode == "linker":
        _turn_on_linker(server)
    else:
        _turn_on_storage(server, config)
    if server.page_size is None:
        server.page_size = PAGE_TOKENS
    logger.info(
        "lmkv: turned on as %s: --page-size %d, settings from %s",
        "the external linker" if config.sglang.mode == "linker" else "the storage below SGLang's host pool",
        server.page_size,
        os.environ.get("LMKV_CONFIG") or "the environment",
    )


def _configured() -> bool:
    """Whether anything in the environment asks for lmkv."""
    names = {name for name, value in os.environ.items() if name.startswith("LMKV_") and value}
    return "LMKV_CONFIG" in names or bool(names - NOT_SETTINGS)


def _turn_on_storage(server: Any, config: Config) -> None:
    from lmkv.connectors.sglang.checks import check_storage_settings

    check_storage_settings(config)
    server.enable_hierarchical_cache = True
    server.hicache_storage_backend = "dynamic"
    server.hicache_storage_backend_extra_config = json.dumps(
        {
            "backend_name": "lmkv",
            "module_path": _MODULE,
            "class_name": "LMKVStorage",
            "interface_v1": 1,
            "prefetch_threshold": PREFETCH_TOKENS,
        }
    )
    # A page in one or two pieces, so that it moves by few large system calls; SGLang's default for the
    # storage, layer by layer, cuts it into two pieces a layer.
    if server.hicache_mem_layout == "layer_first":
        server.hicache_mem_layout = "page_first"


def _turn_on_linker(server: Any) -> None:
    if not hasattr(server, "unified_cache_external_linker_config"):
        from lmkv.connectors.sglang import compat

        raise ConfigError(
            "[sglang] mode",
            f"SGLang {compat.sglang_version()} has no external linker.",
            'set it to "storage", or install SGLang 0.5.23 or newer.',
        )
    server.enable_unified_cache_external_linker = True
    server.unified_cache_external_linker_backend = "dynamic"
    server.unified_cache_external_linker_config = {
        "linker": "LMKVLinker",
        "linker_module_path": _MODULE,
        "linker_extra_config": {},
    }
