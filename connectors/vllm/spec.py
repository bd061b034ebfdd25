"""The offloading spec: how vLLM's offloading connector gets lmkv's manager and workers."""

import hashlib
import json
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from lmkv.connectors.vllm import compat
from lmkv.connectors.vllm.manager import LMKVManager
from lmkv.connectors.vllm.worker import LMKVWorker
from lmkv.kernels import Fragment
from lmkv.metrics import METRICS
from lmkv.pipeline import RankPipeline
from lmkv.slab import create_or_join


class LMKVOffloadingSpec(OffloadingSpec):
    """`LMKVConnector` calls `attach` before vLLM asks for a worker."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """lmkv's metrics, for vLLM's /metrics."""
        return {
            name: (OffloadingGaugeMetadata if metric.gauge else OffloadingCounterMetadata)(
                documentation=metric.help, labelnames=metric.labels
            )
            for name, metric in METRICS.items()
        }

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._vllm_config: VllmConfig | None = None
        self._capacity_bytes = 0

    def attach(self, vllm_config: VllmConfig, capacity_bytes: int) -> None:
        """Give a rank's spec what vLLM does not pass on."""
        self._vllm_config = vllm_config
        self._capacity_bytes = capacity_bytes

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side; `LMKVConnector` gives it its store."""
        return LMKVManager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A rank's side: joins the slab and publishes the layout of the rank's KV tensors."""
        assert self._vllm_config is not None
        layout, names = [], []
        for group, refs in zip(self.config.groups, kv_caches.group_data_refs, strict=True):
            # Layers may share a tensor, and one layer may have several.
            alike = len(group.layer_names) == len(refs)
            names.append(list(group.layer_names) if alike else [f"{group.layer_names}"] * len(refs))
            fragments, offset = [], 0
            for ref in refs:
                tensor = kv_caches.tensors[ref.tensor_idx].tensor
                fragments.append(Fragment(tensor, ref.page_size_bytes, offset))
                offset += ref.page_size_bytes
            layout.append(fragments)
        slab = create_or_join(self.config.engine_id, self._capacity_bytes)
        rank = self.config.parallel.rank
        fingerprint = self._fingerprint(kv_caches, self._vllm_config)
        pipeline = RankPipeline(
            slab,
            rank,
            layout,
            self.blocks_per_chunk,
            fingerprint,
            ranks=self.config.parallel.world_size,
            names=names,
        )
        return LMKVWorker(slab, pipeline)

    def _fingerprint(self, kv_caches: CanonicalKVCaches, vllm_config: VllmConfig) -> bytes:
        """SHA-256 over all that decides what a byte of this rank's piece of a slot means."""
        layers = vllm_config.compilation_config.static_forward_context
        described = {
            "kv_cache_layout": self.config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout,
            "dtype": self.config.model.dtype,
            "rank": self.config.parallel.rank,
            "groups": [
                {
                    "tokens_per_block": group.tokens_per_block,
                    "layers": list(group.layer_names),
                    "backends": [compat.backend_name(layers.get(name)) for name in group.layer_names],
                    "order": [compat.cpu_block_order(layers.get(name)) for name in group.layer_names],
                    "fragments": [(ref.tensor_idx, ref.page_size_bytes) for ref in refs],
                }
                for group, refs in zip(self.config.groups, kv_caches.group_data_refs, strict=True)
            ],
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()
