"""lmkv: tiered KV-cache storage that bolts onto vLLM and SGLang."""

__version__ = "0.1.0"
