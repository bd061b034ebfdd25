"""lmkv under vLLM: `--kv-transfer-config '{"kv_connector":"LMKVConnector","kv_role":"kv_both"}'`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv.connectors.vllm.connector import LMKVConnector

__all__ = ["LMKVConnector", "register"]


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in every process it starts."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "LMKVConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("LMKVConnector", "lmkv.connectors.vllm", "LMKVConnector")


def __getattr__(name: str) -> Any:
    # Imported on demand: the connector needs most of vLLM, which loads plugins before it is ready.
    if name == "LMKVConnector":
        # First of all: an older vLLM lacks what the connector imports.
        from lmkv.connectors.vllm.compat import check_version

        check_version()
        from lmkv.connectors.vllm.connector import LMKVConnector

        return LMKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
