"""HiCache's copies between the device pool and the host pool, as its kernels do them, with torch on a CPU.

Names and arguments are those of `sgl_kernel.kvcacheio`. Indices are of tokens, whole pages in order. The
device pool is layer first: a tensor [tokens, heads, head size] per layer. The host pool, K and V apart:

    layer_first         [layer, token, head, size]
    page_first          [token, layer, head, size]
    page_first_direct   [page, layer, token of the page, head, size]
    page_head           [page, head, token of the page, layer, size]

The all-layer operations of the "kernel" backend get tables of addresses in place of the device's tensors.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _rows(address: int, count: int, row_bytes: int) -> Tensor:
    """`count` rows of `row_bytes` at `address`, as bytes [count, row_bytes]. Not a copy."""
    memory = (ctypes.c_uint8 * (count * row_bytes)).from_address(int(address))
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, row_bytes)


def _bytes(tensor: Tensor, *shape: int) -> Tensor:
    """A contiguous tensor's memory as bytes of `shape`."""
    return tensor.reshape(-1).view(torch.uint8).view(*shape)


def _count(indices: Tensor) -> int:
    """How many rows a table of addresses must reach."""
    return int(indices.max()) + 1


def _pages(indices: Tensor, page_size: int) -> Tensor:
    return indices.view(-1, page_size)[:, 0] // page_size


# --- the "direct" backend


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """layer_first, both ways."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from page_first_direct."""
    pages = _pages(src_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """All layers to page_first_direct: the sources are all layers' K, then all layers' V."""
    pages = _pages(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        part, layer = divmod(number, layers)
        dst_ptrs[part][pages, layer] = source[src_indices].unflatten(0, (-1, page_size))


# --- the "kernel" backend, layer_first


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: Any
) -> None:
    """One layer of one buffer from layer_first."""
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """One layer from layer_first."""
    dst_k[dst_indices] = src_k[src_indices]
    dst_v[dst_indices] = src_v[src_indices]


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers of one buffer to layer_first; both are tables of addresses."""
    for layer in range(num_layers):
        target = _rows(dst_layers[layer], _count(dst_indices), item_size)
        target[dst_indices] = _rows(src_layers[layer], _count(src_indices), item_size)[src_indices]


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers to layer_first."""
    transfer_kv_all_layer_mla(src_k_layers, dst_k_layers, src_indices, dst_indices, item_size, num_layers)
    transfer_kv_all_layer_mla(src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers)


# --- the "kernel" backend, page_first


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer of one buffer from page_first."""
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer from page_first."""
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers of one buffer to page_first."""
    target = _bytes(dst, -1, num_layers, item_size)
    for layer in range(num_layers):
        target[dst_indices, layer] = _rows(src_layers[layer], _count(src_indices), item_size)[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers to page_first."""
    for layers, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            layers, target, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


# --- the "kernel" backend, page_head


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    """One layer from page_head."""
    pages = _pages(src_indices, page_size)
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        # [page, head, token, size] -> [page, token, head, size]
        target[dst_indices] = source[pages, :, :, layer_id].transpose(1, 2).flatten(0, 1)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    """All layers to page_head."""
    pages = _pages(dst_indices, page_size)
    for layers, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        target = _bytes(host, -1, head_num, page_size, num_layers, item_size // head_num)
        for layer in range(num_layers):
            rows = _rows(layers[layer], _count(src_indices), item_size)[src_indices]
            source = rows.view(-1, page_size, head_num, item_size // head_num)
            target[pages, :, :, layer] = source.transpose(1, 2)


OPERATIONS: dict[str, Callable[..., None]] = {
    name: function for name, function in globals().items() if name.startswith("transfer_kv_")
}
