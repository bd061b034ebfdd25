"""A rank's side under vLLM."""

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from lmkv.pipeline import GroupBlocks, RankPipeline
from lmkv.slab import Slab
from lmkv.store import Transfer


class SlotsSpec(LoadStoreSpec):
    """Slots of one transfer, sent from the scheduler to the ranks."""

    def __init__(self, transfer: Transfer | None) -> None:
        self.ticket = 0 if transfer is None else transfer.ticket
        self.offsets: npt.NDArray[np.int64] = np.array(
            [] if transfer is None else transfer.offsets, dtype=np.int64
        )


class LMKVWorker(OffloadingWorker):
    """Translates vLLM's jobs for the pipeline."""

    def __init__(self, slab: Slab, pipeline: RankPipeline) -> None:
        self._slab = slab
        self._pipeline = pipeline

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Blocks to slots. Never fails towards vLLM; see `RankPipeline.store`."""
        assert isinstance(dst_spec, SlotsSpec)
        self._pipeline.store(job_id, dst_spec.ticket, self._groups(src_spec), dst_spec.offsets.tolist())
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Slots to blocks. `expedited` (0.33) needs nothing: loads never queue behind stores."""
        assert isinstance(src_spec, SlotsSpec)
        self._pipeline.load(job_id, src_spec.ticket, self._groups(dst_spec), src_spec.offsets.tolist())
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers that ended."""
        return [
            TransferResult(ended.job_id, True, ended.bytes, ended.seconds)
            for ended in self._pipeline.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these transfers have ended."""
        self._pipeline.wait(job_ids)

    def shutdown(self) -> None:
        """Leave the slab."""
        self._pipeline.close()
        self._slab.close()

    def _groups(self, spec: GPULoadStoreSpec) -> list[GroupBlocks]:
        groups, start = [], 0
        for size, first in zip(spec.group_sizes, spec.block_indices, strict=True):
            blocks = spec.block_ids[start : start + size].astype(np.int64)
            groups.append(GroupBlocks(blocks, first))
            start += size
        return groups
