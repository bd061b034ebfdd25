"""What lets SGLang and its HiCache run on a machine without a GPU: for lmkv's tests and demo there only.

Not product code: lmkv never imports it. tools/env.py copies this package into the SGLang environment that
it makes, as the distribution `lmkv-sglang-cpu`, in two parts:

- `early` is called by a .pth file when an interpreter starts: SGLang imports what is missing at once.
- `register` is an entry point of the group `sglang.srt.plugins`, which SGLang calls in every process.

No path of `--attention-backend torch_native` calls SGLang's own kernels, so a stand-in that raises will do
for them; what HiCache needs of them is written out with torch in `transfers`.
"""

import importlib
import inspect
from typing import Any


def register() -> None:
    """Give SGLang's host pools what they lack on a CPU, and MLA a way through torch_native."""
    import torch

    if torch.cuda.is_available():
        return
    from . import transfers

    _host_pools(transfers.OPERATIONS)
    _sliding_window_pools()
    _multi_head_latent_attention()


#: Modules of `sglang.srt.mem_cache` with the host pools; before 0.5.19 some or all were in the first.
_POOLS = (
    "memory_pool_host",
    *(f"pool_host.{name}" for name in ("base", "common", "mha", "mla", "dsa", "mamba")),
)


def _host_pools(operations: dict[str, Any]) -> None:
    """Plain memory in place of pinned memory, and copies in place of kernels.

    The modules of the pools have no such names off a GPU: they import them there only.
    """

    def allocate(
        dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any, **__: Any
    ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    for module in filter(None, map(_module, _POOLS)):
        if hasattr(module, "ALLOC_MEMORY_FUNCS"):
            module.ALLOC_MEMORY_FUNCS["cpu"] = allocate
        for operation, function in operations.items():
            setattr(module, operation, function)
    base = _module("pool_host.base") or _module("memory_pool_host")
    # SGLang makes no host pool unless that much memory stays free: more than a test's machine may have.
    for module in (base, _module("memory_pool_host")):
        if hasattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
            module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    original = base.HostKVCache.__init__
    signature = inspect.signature(original)

    def unpinned(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    base.HostKVCache.__init__ = unpinned


def _module(name: str) -> Any:
    return _module_of(f"mem_cache.{name}")


def _module_of(name: str) -> Any:
    try:
        return importlib.import_module(f"sglang.srt.{name}")
    except ModuleNotFoundError:
        return None


class _TranslatedTokens:
    """A pool of requests whose tokens name slots of the sliding window's pool."""

    def __init__(self, req_to_token: Any) -> None:
        self.req_to_token = req_to_token


def _sliding_window_pools() -> None:
    """torch_native writes a window's KV to the slots of the pool of its own, but reads it by the slots of the
    full pool; the two are alike only while nothing was freed."""
    backend = _module_of("layers.attention.torch_native_backend")
    if backend is None or not hasattr(backend, "SWAKVPool"):
        return

    def translated(forward: Any) -> Any:
        def wrapper(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            requests, pool = self.req_to_token_pool, self.token_to_kv_pool
            if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
                return forward(self, q, k, v, layer, *args, **kwargs)
            slots = pool.translate_loc_from_full_to_swa(requests.req_to_token.long())
            self.req_to_token_pool = _TranslatedTokens(slots)
            try:
                return forward(self, q, k, v, layer, *args, **kwargs)
            finally:
                self.req_to_token_pool = requests

        return wrapper

    for name in ("forward_extend", "forward_decode"):
        method = getattr(backend.TorchNativeAttnBackend, name)
        setattr(backend.TorchNativeAttnBackend, name, translated(method))


def _multi_head_latent_attention() -> None:
    """torch_native computes MLA in its absorbed form, but is not in SGLang's table of who does."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    handler.AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)

    # DeepSeek's models have a rotary embedding of their own on a CPU, which only knows scaled ones.
    scaled = factory.get_rope_cpu

    def get_rope_cpu(*args: Any) -> Any:
        *shape, scaling, dtype, partial, device = args
        if scaling is None:
            return factory.get_rope(*shape, scaling, dtype, partial)
        return scaled(*shape, scaling, dtype, partial, device)

    factory.get_rope_cpu = get_rope_cpu
