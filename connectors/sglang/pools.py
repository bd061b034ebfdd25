"""SGLang's device pools as groups of blocks that lmkv's kernels can copy, layer by layer.

A page of a pool is a block, and all layers' parts of it are one chunk. SGLang describes the pools of some
hybrid models itself (`resolve_hybrid_device_pool_group`); those of plain models are described here in the
same way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from lmkv.config import ConfigError
from lmkv.kernels import Fragment, GroupLayout


def device_pools(kvcache: Any, params: Any, components: Any) -> DevicePoolGroup:
    """The pools of a model. Raises ConfigError for those that lmkv does not handle."""
    try:
        return resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=params.page_size, params=params, components=components
        )
    except ValueError as error:
        if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
            raise _unknown(f"it drafts with a KV pool that SGLang cannot describe ({error})") from error
    page = params.page_size
    if type(kvcache) is SWAKVPool:
        full, window = (
            {
                layer - kvcache.start_layer: place
                for layer, (place, is_window) in kvcache.layers_mapping.items()
                if is_window is wanted
            }
            for wanted in (False, True)
        )
        entries = [
            _attention(PoolName.KV, kvcache.full_kv_pool, full, page),
            _attention(PoolName.SWA, kvcache.swa_kv_pool, window, page),
        ]
    elif type(kvcache) is HybridLinearKVPool:
        entries = [
            _attention(
                PoolName.KV,
                kvcache.full_kv_pool,
                {
                    layer - kvcache.start_layer: place
                    for layer, place in kvcache.full_attention_layer_id_mapping.items()
                },
                page,
            ),
            _recurrent(params.req_to_token_pool, kvcache.start_layer),
        ]
    else:
        entries = [
            _attention(PoolName.KV, kvcache, {layer: layer for layer in range(kvcache.layer_num)}, page)
        ]
    layers = 1 + max(layer for entry in entries for layer in entry.layer_mapping)
    replicated = len(entries) == 1 and isinstance(kvcache, MLATokenToKVPool)
    return DevicePoolGroup(entries, layers, page, rank_replicated=replicated)


def _attention(name: PoolName, pool: Any, layers: dict[int, int], page_size: int) -> DevicePoolEntry:
    """A pool of K and V of heads, or of latents (MLA); `layers`: the model's layer -> the pool's."""
    mapping: dict[int, int | Sequence[int]]
    if type(pool) is MLATokenToKVPool:
        buffers, mapping = list(pool.kv_buffer), dict(layers)
    elif type(pool) is MHATokenToKVPool and pool.k_scale_buffer is None:
        buffers, count = [*pool.k_buffer, *pool.v_buffer], len(pool.k_buffer)
        mapping = {layer: (place, count + place) for layer, place in layers.items()}
    else:
        raise _unknown(f"its KV pool is a {type(pool).__name__} with scales or of another kind")
    return DevicePoolEntry(
        name=name,
        indices_from_pool=name,
        device_pool=pool,
        components=[buffers],
        layer_mapping=mapping,
        page_size=page_size,
        rows_are_pages=False,
    )


def _recurrent(requests: Any, start_layer: int) -> DevicePoolEntry:
    """The states of Mamba or linear-attention layers: one row a state, the layers' parts apart."""
    if (
        requests.mamba_ckpt_pool is not None
        or requests.short_conv_pool.enabled
        or requests.ngram_pool.enabled
    ):
        raise _unknown("its recurrent states are quantised or have others beside them")
    pool = requests.mamba_pool
    states = [state for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if state.numel()]
    return DevicePoolEntry(
        name=PoolName.MAMBA,
        indices_from_pool=PoolName.MAMBA,
        device_pool=pool,
        components=[[state[layer] for layer in range(pool.num_mamba_layers)] for state in states],
        layer_mapping={layer - start_layer: place for layer, place in requests.mamba_map.items()},
        page_size=1,
        rows_are_pages=True,
    )


def _unknown(why: str) -> ConfigError:
    fix = 'use the storage below SGLang\'s host pool ([sglang] mode = "storage").'
    return ConfigError("--model-path", f"lmkv's linker does not handle this model: {why}.", fix)


class LayeredPools(NamedTuple):
    """Device pools cut up for the kernels: one kernel group per pool and layer."""

    layout: list[GroupLayout]
    #: (place of the pool in the group, layer) -> kernel group.
    groups: dict[tuple[int, int], int]
    #: Bytes of a chunk of each pool.
    chunk_bytes: list[int]


def layered(group: DevicePoolGroup) -> LayeredPools:
    """Cut up the pools of a model. Raises ConfigError where a page does not lie in one piece."""
    layout: list[GroupLayout] = []
    groups: dict[tuple[int, int], int] = {}
    chunk_bytes: list[int] = []
    for place, entry in enumerate(group.entries):
        offset = 0
        fragments: list[list[Fragment]] = []  # by component, then buffer
        for component in entry.components:
            rows = []
            for buffer in component:
                blocks = _as_blocks(buffer, entry.page_size if not _rows_are_pages(entry) else 1)
                rows.append(Fragment(blocks, blocks.shape[1], offset))
                offset += blocks.shape[1]
            fragments.append(rows)
        for layer, mapped in entry.layer_mapping.items():
            buffers = (mapped,) if isinstance(mapped, int) else mapped
            groups[place, layer] = len(layout)
            layout.append([rows[buffer] for rows in fragments for buffer in buffers])
        chunk_bytes.append(offset)
    return LayeredPools(layout, groups, chunk_bytes)


def blocks_of(entry: DevicePoolEntry, indices: torch.Tensor) -> list[int]:
    """The kernel's blocks of the pages that `indices` (token slots or states) name."""
    rows: list[int] = entry.prepare_locations(indices)
    return rows if _rows_are_pages(entry) else [row // entry.page_size for row in rows]


def _rows_are_pages(entry: DevicePoolEntry) -> bool:
    return bool(entry._row_span == 1)


def _as_blocks(buffer: torch.Tensor, rows_per_block: int) -> torch.Tensor:
    """int8, [blocks, bytes]: the same memory."""
    count = buffer.shape[0] // rows_per_block
    if rows_per_block > 1 and not buffer.is_contiguous():
        raise _unknown("the tokens of a page do not lie in one piece")
    flat = buffer[: count * rows_per_block].view(torch.int8)
    return flat.view(count, -1)
