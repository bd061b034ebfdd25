"""An engine as the store sees it, over real files and real threads, without a model."""

import random
import time
from pathlib import Path

from lmkv.backends.file import FileTier
from lmkv.below import Below
from lmkv.keys import Namespace
from lmkv.request import Request
from lmkv.slab import Slab
from lmkv.store import Lookup, Store
from lmkv.tier import Status
from tests.test_store import content, key

NAMESPACE = Namespace.of({"model": "torture"})
CHUNK_BYTES = 64 * 2**10


class Engine:
    """One rank, one KV group; prompts are lists of block numbers."""

    def __init__(self, slab: Slab, path: Path, capacity_bytes: int) -> None:
        self.slab = slab
        while not slab.fully_faulted:
            time.sleep(0.001)
        self.rank = slab.rank(0)
        self.tier = FileTier(path, capacity_bytes)
        self.store = Store(
            slab=slab,
            ranks=[self.rank],
            chunk_bytes={0: CHUNK_BYTES},
            namespace=NAMESPACE,
            below=[Below.threaded(self.tier)],
        )

    def metric(self, name: str, *labels: str) -> int:
        """Value of a counter."""
        return int(self.store.metrics.get(f"lmkv_{name}", *labels))

    def save(self, request: Request, numbers: list[int], *, success: bool = True) -> list[int]:
        """Copy chunks into the slab; those that were accepted."""
        keys = {key(number): number for number in numbers}
        accepted, transfer = self.store.prepare_store(list(keys), request)
        if transfer is None:
            return []
        for name, offset in zip(accepted, transfer.offsets, strict=True):
            self.slab.data[offset : offset + CHUNK_BYTES] = content(name, CHUNK_BYTES)
        self.rank.finish(max(transfer.ticket, self.rank.watermark))
        self.store.complete_store(accepted, request, success)
        return [keys[name] for name in accepted]

    def find(self, request: Request, numbers: list[int]) -> list[bytes] | None:
        """The leading chunks that can be loaded; None if some are on their way."""
        self.store.open_window(request)
        answers: list[Lookup] = []
        for number in numbers:
            answers.append(self.store.lookup(key(number)))
            if answers[-1] is Lookup.MISS:
                break
        if Lookup.PENDING in answers:
            return None
        return [key(number) for number in numbers[: answers.count(Lookup.HIT)]]

    def load(self, request: Request, found: list[bytes], *, aborted: bool = False) -> None:
        """Copy chunks out of the slab; what is claimed has the right bytes until that is over."""
        transfer = self.store.prepare_load(found, request)
        if aborted:
            self.store.finish_request(request)
            self.store.end_step()
        for name, offset in zip(found, transfer.offsets, strict=True):
            assert self.slab.data[offset : offset + CHUNK_BYTES] == content(name, CHUNK_BYTES), "wrong bytes"
        self.rank.finish(max(transfer.ticket, self.rank.watermark))
        self.store.complete_load(found, request)

    def serve(self, numbers: list[int], chance: random.Random, *, cancelled: bool) -> int:
        """One request from lookup to its end, or to a moment at which it is cancelled; how many chunks it
        loaded."""
        store, request = self.store, self.store.new_request()
        moment = chance.randrange(4) if cancelled else -1
        found = self.find(request, numbers)
        while found is None:
            if moment == 0:  # while its chunks are read
                store.finish_request(request)
                return 0
            store.end_step()
            time.sleep(0.0002)
            found = self.find(request, numbers)
        if moment == 1:  # with leases on what it found
            store.finish_request(request)
            return 0
        if found:
            self.load(request, found, aborted=moment == 2)
            if moment == 2:
                return len(found)
        self.save(request, numbers[len(found) :], success=moment != 3)
        store.finish_request(request)
        store.end_step()
        return len(found)

    def settle(self) -> None:
        """Let all that is under way end: then nothing is leased."""
        deadline = time.monotonic() + 60
        store = self.store
        while store.pending_work or store.pending_writes or store.index.leased_bytes:
            assert time.monotonic() < deadline, f"{store.index.leased_bytes} bytes stay leased"
            store.end_step()
            time.sleep(0.001)

    def close(self) -> None:
        """End as an engine does."""
        assert self.store.close(), "a tier hangs"
        self.slab.close()


def missing(path: Path, capacity_bytes: int, numbers: list[int]) -> int:
    """How many of these chunks a fresh tier does not serve; those that it serves are right."""
    tier = FileTier(path, capacity_bytes)
    lost = 0
    for number in numbers:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        (status,) = tier.get([NAMESPACE.digest + key(number)], [buffer])
        assert status in (Status.OK, Status.MISS), status
        assert status is Status.MISS or buffer == content(key(number), CHUNK_BYTES), "wrong bytes"
        lost += status is Status.MISS
    tier.close()
    return lost
