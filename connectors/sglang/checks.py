"""What lmkv refuses under SGLang, by name, before the engine serves."""

from collections.abc import Mapping
from typing import Any

from lmkv.config import Config, ConfigError, load
from lmkv.connectors.sglang import compat, live

#: A page is a chunk: below this many tokens the bookkeeping of a chunk costs more than its bytes are worth.
MIN_PAGE_TOKENS = 16
_STORAGE_FLAG = "--hicache-storage-backend-extra-config"
_LINKER_FLAG = "--unified-cache-external-linker-config"
#: What SGLang itself reads from the storage's extra config.
_SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}


def storage_settings(extra: Mapping[str, Any] | None) -> Config:
    """lmkv's settings from the storage's extra config and the other sources. Raises ConfigError."""
    extra = extra or {}
    _check_keys(_STORAGE_FLAG, extra, _SGLANG_KEYS | {"lmkv"})
    if not extra.get("interface_v1"):
        raise ConfigError(
            _STORAGE_FLAG,
            "interface_v1 is not set: SGLang would copy every page twice.",
            'add "interface_v1": 1.',
        )
    config = load(extra.get("lmkv"))
    check_storage_settings(config)
    return config


def check_storage_settings(config: Config) -> None:
    """Refuse settings that mean nothing below SGLang's host pool. Raises ConfigError."""
    if config.file.path is None and config.redis.url is None:
        problem = "not set: below SGLang's host pool lmkv has nothing to store in."
        raise ConfigError("[file] path", problem, "name a directory on a local disk, or set [redis] url.")
    for table, settings in (("file", config.file), ("redis", config.redis)):
        if settings.policy != "write_through":
            raise ConfigError(
                f"[{table}] policy",
                "SGLang itself decides when pages leave its host pool.",
                "leave it away, and see SGLang's --hicache-write-policy.",
            )


def linker_settings(extra: Mapping[str, Any] | None) -> Config:
    """lmkv's settings from the linker's extra config and the other sources. Raises ConfigError."""
    extra = extra or {}
    _check_keys(_LINKER_FLAG, extra, {"lmkv"})
    return load(extra.get("lmkv"))


def _check_keys(flag: str, extra: Mapping[str, Any], allowed: set[str]) -> None:
    for name in extra:
        if name not in allowed:
            raise ConfigError(
                f"{flag}: {name}",
                "lmkv does not know this setting.",
                'remove it; lmkv\'s settings go under "lmkv" (docs/configuration.md).',
            )


def check_engine(config: Config) -> None:
    """Refuse what lmkv cannot identify or keep apart. Raises ConfigError."""
    if not compat.HASH_HAS_SALT and not config.sglang.single_tenant:
        raise ConfigError(
            "[sglang] single_tenant",
            f"SGLang {compat.sglang_version()} names stored pages by their tokens alone: requests with "
            "another cache_salt or LoRA adapter would be served each other's KV.",
            "use SGLang 0.5.20 or newer, or set it to true if no request has a cache_salt, an extra_key or "
            "an adapter.",
        )
    server = compat.server_args()
    if not compat.HASH_HAS_SALT and getattr(server, "lora_paths", None):
        raise ConfigError(
            "--lora-paths",
            f"SGLang {compat.sglang_version()} does not tell adapters apart in stored pages.",
            "use SGLang 0.5.20 or newer, or serve without adapters.",
        )
    if compat.model_config().is_multimodal:
        raise ConfigError(
            "--model-path",
            "the model takes images or audio, which SGLang's page hash names by a few bits of their content.",
            "serve it without lmkv.",
        )
    if not live.watched():
        raise ConfigError(
            "SGLANG_PLUGINS",
            "lmkv's plugin is not loaded, so changes of the weights would go unnoticed.",
            "add lmkv to the list, or unset the variable.",
        )


def check_page_size(tokens: int) -> None:
    """Refuse pages that are too small. Raises ConfigError."""
    if tokens < MIN_PAGE_TOKENS:
        raise ConfigError(
            "--page-size",
            f"{tokens} token(s) a page make one stored chunk of every {tokens} token(s).",
            f"set --page-size 64 (at least {MIN_PAGE_TOKENS}).",
        )


def check_storage(ranks: Any) -> None:
    """Refuse shapes of the host pool that lmkv does not handle. Raises ConfigError."""
    if getattr(ranks, "should_split_heads", False) or getattr(ranks, "tp_lcm_size", None):
        raise ConfigError(
            f"{_STORAGE_FLAG}: tp_lcm_size",
            "pages shared between different tensor-parallel sizes are not supported.",
            "remove it.",
        )


def check_pool(name: str, pool: Any) -> None:
    """Refuse pools that hold no bytes of their own. Raises ConfigError."""
    if name == "kv" and getattr(pool, "kv_buffer", None) is None:
        raise ConfigError(
            "--model-path",
            "the model's host pool has no KV of its own, only compressed parts, which lmkv does not handle.",
            "serve it without lmkv.",
        )


def check_linker(config: Config, server: Any) -> None:
    """Refuse ways to run the linker that lmkv does not handle. Raises ConfigError."""
    if getattr(server, "dcp_size", 1) > 1:
        raise ConfigError(
            "--dcp-size",
            "ranks that hold different tokens of a page (decode context parallelism) are not told apart.",
            "set it to 1.",
        )
    if server.pp_size > 1:
        raise ConfigError(
            "--pp-size",
            "the linker's ranks agree on a load within a pipeline stage only.",
            'set it to 1, or use the storage below SGLang\'s host pool ([sglang] mode = "storage").',
        )
    if server.dp_size > 1 and config.host.capacity is None:
        raise ConfigError(
            "[host] capacity",
            "it has no default with --dp-size: a rank does not know how many share the node.",
            "set it to what one data-parallel rank may take.",
        )
