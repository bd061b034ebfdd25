"""lmkv under SGLang: set LMKV_CONFIG, or give the flags for `LMKVStorage` or `LMKVLinker` (README.md)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv.connectors.sglang.linker import LMKVLinker
    from lmkv.connectors.sglang.storage import LMKVStorage

__all__ = ["LMKVLinker", "LMKVStorage", "register"]


def register() -> None:
    """Entry point `sglang.srt.plugins`; see `lmkv.connectors.sglang.plugin`."""
    from lmkv.connectors.sglang import plugin

    plugin.register()


def __getattr__(name: str) -> Any:
    # Imported on demand: both need most of SGLang, which loads plugins before it is ready.
    if name == "LMKVStorage":
        from lmkv.connectors.sglang.storage import LMKVStorage

        return LMKVStorage
    if name == "LMKVLinker":
        from lmkv.connectors.sglang.linker import LMKVLinker

        return LMKVLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
