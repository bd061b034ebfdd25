"""The connector that vLLM loads: its own offloading connector with lmkv's manager and workers."""

import logging
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmkv import __version__
from lmkv.canary import check_tier
from lmkv.chain import chain, open_redis
from lmkv.config import Config, ConfigError, load, resolve_file_capacity, resolve_host_capacity
from lmkv.connectors.vllm import compat
from lmkv.connectors.vllm.checks import check_engine, check_extra_config, check_groups, wait_s
from lmkv.connectors.vllm.identity import namespace_of
from lmkv.connectors.vllm.manager import LMKVManager
from lmkv.connectors.vllm.spec import LMKVOffloadingSpec
from lmkv.gate import Gate
from lmkv.slab import RankArea, Slab, SlabError, create_or_join
from lmkv.slots import SLOT_ALIGNMENT, slot_bytes
from lmkv.store import Store
from lmkv.tier import Tier, open_tier

logger = logging.getLogger(__name__)
# vLLM sets up only its own logger; lmkv's messages go where vLLM's go.
logging.getLogger("lmkv").parent = logging.getLogger("vllm")

#: Ranks register before vLLM builds its scheduler; this only bounds a rank that died meanwhile.
_RANKS_TIMEOUT_S = 60.0
#: Fewer slots than this per size class could never hold a chunk that is read and one that is written.
_MIN_SLOTS = 2


class LMKVConnector(OffloadingConnector):
    """Settings: docs/configuration.md. Refuses what it cannot serve, by name, before serving."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        config = _configure(vllm_config)
        check_engine(vllm_config, config)
        check_groups(kv_cache_config, config)
        super().__init__(vllm_config, role, kv_cache_config)
        #: Whether requests may wait for another engine's prefill: not those of the one that prefills.
        self._awaits = self._kv_transfer_config.kv_role != "kv_producer"
        capacity = resolve_host_capacity(config.host)
        capacity -= capacity % SLOT_ALIGNMENT
        if self.connector_worker is not None:
            spec = self.connector_worker.spec
            assert isinstance(spec, LMKVOffloadingSpec)
            spec.attach(vllm_config, capacity)
        if self.connector_scheduler is not None:
            manager = self.connector_scheduler.manager
            assert isinstance(manager, LMKVManager)
            slab, store = _open_store(vllm_config, kv_cache_config, config, capacity)
            manager.attach(store, slab, self.scheduler)

    def on_new_request(self, request: Request) -> None:
        """Keep out of the cache what the block hash does not identify by content: LoRA adapters
        (hashed by name and path), images (hashed by an id the client may choose), embeddings."""
        if request.lora_request is not None or request.mm_features or request.prompt_embeds is not None:
            self._manager.exclude(request.request_id)
        elif self._awaits and (seconds := wait_s(request.kv_transfer_params)):
            self._manager.expect(request.request_id, seconds)
        super().on_new_request(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Counts the claimed tokens by the tier they came from."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._manager.count_hit_tokens(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Also notes when the step began, for the gate, and rests where all that is left is to wait."""
        self._manager.step_began(scheduler_output.num_scheduled_tokens.values())
        metadata = super().build_connector_meta(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            self._manager.rest()
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Also notes when the step was over."""
        self._manager.step_ended()
        super().update_connector_output(connector_output)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. vLLM asks while it builds its config, where it uses CUDA graphs: the earliest moment at
        which lmkv can refuse a bad setting, minutes before a large model is loaded."""
        _check_settings(extra_config)
        return False

    @property
    def _manager(self) -> LMKVManager:
        manager = self.scheduler.manager
        assert isinstance(manager, LMKVManager)
        return manager

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """vLLM's offloading metrics and lmkv's, in the process that serves /metrics."""
        _configure(vllm_config)
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _configure(vllm_config: VllmConfig) -> Config:
    """lmkv's settings; also tells vLLM's offloading connector, in its own terms, what they imply."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    extra = transfer.kv_connector_extra_config
    config = _check_settings(extra)
    if extra.get("spec_name") != LMKVOffloadingSpec.__name__:
        extra["spec_name"] = LMKVOffloadingSpec.__name__
        extra["spec_module_path"] = LMKVOffloadingSpec.__module__
        extra["blocks_per_chunk"] = config.vllm.blocks_per_chunk
        extra["offload_prompt_only"] = config.vllm.prompt_only
    return config


def _check_settings(extra: dict[str, Any]) -> Config:
    if extra.get("spec_name") != LMKVOffloadingSpec.__name__:  # not yet configured by another role
        check_extra_config(extra)
    return load(extra.get("lmkv"))


def _open_store(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config, capacity_bytes: int
) -> tuple[Slab, Store]:
    for warning in (compat.check_version(), compat.split_prefill_warning(vllm_config)):
        if warning is not None:
            logger.warning("lmkv: %s", warning)
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    slab = create_or_join(offloading.engine_id, capacity_bytes)
    ranks = [slab.rank(rank) for rank in range(offloading.parallel.world_size)]
    _await_ranks(ranks)
    slab.unlink()
    pieces = [rank.group_bytes for rank in ranks]
    if {len(piece) for piece in pieces} != {len(offloading.groups)}:
        raise SlabError(f"the ranks disagree about the KV groups: {[len(piece) for piece in pieces]}")
    sizes = [sum(rank_pieces) for rank_pieces in zip(*pieces, strict=True)]
    chunk_bytes = {group.group_id: size for group, size in zip(offloading.groups, sizes, strict=True)}
    classes = {slot_bytes(size) for size in sizes}
    least = _MIN_SLOTS * len(classes) * max(classes)
    if slab.capacity_bytes < least:
        raise ConfigError(
            "[host] capacity",
            f"{slab.capacity_bytes} bytes hold fewer than {_MIN_SLOTS} chunks of this model "
            f"({', '.join(f'{size} bytes' for size in sorted(classes))}).",
            f"set it to {least} bytes or more.",
        )
    fingerprints = [rank.fingerprint for rank in ranks]
    namespace = namespace_of(vllm_config, kv_cache_config, offloading, config, fingerprints)
    # A prompt needs one chunk of every group for each of its spans of this many tokens.
    span = min(group.tokens_per_block for group in offloading.groups) * offloading.cache.blocks_per_chunk
    tokens_per_chunk = span / len(offloading.groups)
    file = _open_file(config, max(sizes), tokens_per_chunk) if config.file.path is not None else None
    below = chain(config, file, open_redis(config))
    for tier in below:
        if tier.readable and tier.writable:
            check_tier(tier.tier, namespace, sizes)
    store = Store(
        slab=slab,
        ranks=ranks,
        chunk_bytes=chunk_bytes,
        namespace=namespace,
        below=below,
        gate=Gate() if config.vllm.gate else None,
        chunk_tokens={
            group.group_id: group.tokens_per_block * offloading.cache.blocks_per_chunk
            for group in offloading.groups
        },
    )
    tokens = store.room(max(sizes)) * tokens_per_chunk
    _announce("host", slab.capacity_bytes, tokens, "memory shared by the engine's processes")
    logger.info("lmkv %s: namespace %s", __version__, namespace.digest.hex()[:16])
    for name, value in namespace.fields.items():
        logger.debug("lmkv: namespace field %s = %s", name, value)
    return slab, store


def _await_ranks(ranks: list[RankArea]) -> None:
    deadline = time.monotonic() + _RANKS_TIMEOUT_S
    while not all(rank.registered for rank in ranks):
        if time.monotonic() > deadline:
            missing = [str(i) for i, rank in enumerate(ranks) if not rank.registered]
            raise SlabError(
                f"rank(s) {', '.join(missing)} did not join the host slab within {_RANKS_TIMEOUT_S:.0f} s; "
                "all ranks of an engine must run on this node, as the same user."
            )
        time.sleep(0.01)


def _open_file(config: Config, largest_chunk: int, tokens_per_chunk: float) -> Tier:
    settings = {"path": config.file.path, "capacity": resolve_file_capacity(config.file)}
    tier = open_tier("file", settings, read_only=config.file.role == "read_only")
    if largest_chunk > tier.info.max_chunk_bytes:
        tier.close()
        raise ConfigError(
            "[file] capacity",
            f"a chunk of this model has {largest_chunk} bytes and a segment of the directory holds "
            f"{tier.info.max_chunk_bytes}.",
            "set a larger capacity and use a new directory, or lower [vllm] blocks_per_chunk.",
        )
    tokens = tier.room(largest_chunk) * tokens_per_chunk
    _announce("file", tier.info.capacity_bytes, tokens, str(config.file.path))
    return tier


def _announce(tier: str, capacity_bytes: int, tokens: float, where: str) -> None:
    unit, scale = ("GiB", 2**30) if capacity_bytes >= 2**30 else ("MiB", 2**20)
    logger.info(
        "lmkv: %s tier: %.2f %s (%d bytes) = %s tokens of this model, in %s",
        tier,
        capacity_bytes / scale,
        unit,
        capacity_bytes,
        f"{int(tokens):,}",
        where,
    )
