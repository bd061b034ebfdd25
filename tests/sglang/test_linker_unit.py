"""LMKVLinker over SGLang's real device pools, on the CPU, without an engine.

Pools of MHA, MLA, a sliding window beside full attention, and recurrent states; of the last SGLang's own pool
needs more of an engine than there is, so it is described by its tensors.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolGroup
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from lmkv.backends import file as file_tier
from lmkv.config import ConfigError
from lmkv.connectors.sglang import LMKVLinker, compat, live
from lmkv.connectors.sglang import linker as linker_module
from lmkv.connectors.sglang.pools import _recurrent, blocks_of, device_pools, layered
from lmkv.kernels import BlockCopies, open_copier
from tests.sglang.test_storage_unit import PAGE, TIMEOUT_S, failing, flip, key, keys

PAGES = 12
LAYERS = 3
FULL, SWA = {ComponentType.FULL}, {ComponentType.FULL, ComponentType.SWA}
#: Bytes of a page of `mha`.
PAGE_BYTES = LAYERS * 2 * PAGE * 2 * 64 * 2


# --- device pools


def mha(layers: int = LAYERS) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=(PAGES - 1) * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def mla() -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=(PAGES - 1) * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=20,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def window() -> SWAKVPool:
    """Layers 0 and 3 see everything, 1, 2 and 4 a window; the latter's pool is smaller."""
    return SWAKVPool(
        size=(PAGES - 1) * PAGE,
        size_swa=(PAGES - 4) * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=24,
        swa_attention_layer_ids=[1, 2, 4],
        full_attention_layer_ids=[0, 3],
        device="cpu",
    )


def buffers_of(pool: Any) -> dict[int, list[torch.Tensor]]:
    """layer -> its tensors of a plain pool, [token, ...] each."""
    if isinstance(pool, MLATokenToKVPool):
        return {layer: [buffer] for layer, buffer in enumerate(pool.kv_buffer)}
    return {layer: [k, v] for layer, (k, v) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True))}


def layers_of(pool: Any) -> list[tuple[PoolName, dict[int, list[torch.Tensor]]]]:
    """The pools of a model: name, and for each of its layers the tensors."""
    if isinstance(pool, SWAKVPool):
        full, swa = buffers_of(pool.full_kv_pool), buffers_of(pool.swa_kv_pool)
        return [
            (PoolName.KV, {0: full[0], 3: full[1]}),
            (PoolName.SWA, {1: swa[0], 2: swa[1], 4: swa[2]}),
        ]
    return [(PoolName.KV, buffers_of(pool))]


def raw(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8)


def page_of(buffer: torch.Tensor, page: int) -> torch.Tensor:
    """The bytes of a page in one tensor."""
    return raw(buffer)[page * PAGE : (page + 1) * PAGE]


def tensors(pool: Any) -> list[torch.Tensor]:
    return [buffer for _, layers in layers_of(pool) for parts in layers.values() for buffer in parts]


def fill(pool: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in tensors(pool):
        raw(buffer).copy_(torch.randint(0, 256, raw(buffer).shape, dtype=torch.uint8, generator=generator))


def contents(pool: Any) -> list[torch.Tensor]:
    return [raw(buffer).clone() for buffer in tensors(pool)]


def indices(pages: Sequence[int]) -> torch.Tensor:
    slots = [torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages]
    return torch.cat(slots) if slots else torch.arange(0)


def parameters(pool: Any, **changed: Any) -> SimpleNamespace:
    """What of SGLang's `CacheInitParams` a linker uses."""
    fields = {
        "page_size": PAGE,
        "attn_cp_cache_group": None,
        "attn_tp_cache_group": None,
        "tp_cache_group": None,
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: pool),
        "req_to_token_pool": None,
        "mtp_draft_device_pools": (),
        "sidecar_draft_device_pools": (),
    }
    return SimpleNamespace(**fields | changed)


# --- pools as blocks


@pytest.mark.parametrize("make, components", [(mha, FULL), (mla, FULL), (window, SWA)])
def test_a_chunk_holds_every_layer_of_a_page_once(make: Callable[[], Any], components: Any) -> None:
    """Each layer of a page is copied out alone, into memory that is otherwise empty: it must be that layer's
    tensors that arrive, side by side, where no other layer's go, and they must come back to another page."""
    pool = make()
    group = device_pools(pool, parameters(pool), components)
    cut = layered(group)
    assert group.num_layers == 1 + max(layer for _, layers in layers_of(pool) for layer in layers)
    assert [entry.name for entry in group.entries] == [name for name, _ in layers_of(pool)]
    for place, (_, layers) in enumerate(layers_of(pool)):
        entry, size = group.entries[place], cut.chunk_bytes[place]
        assert size == sum(page_of(buffer, 0).numel() for parts in layers.values() for buffer in parts)
        assert blocks_of(entry, indices([5, 2, 7])) == [5, 2, 7]
        assert {layer for at, layer in cut.groups if at == place} == set(layers)
        # As long as there are bytes that differ, an empty place shows.
        memory = torch.zeros(3 * size, dtype=torch.uint8)
        copier = open_copier(cut.layout, memoryview(memory.numpy()))
        taken = torch.zeros(size, dtype=torch.bool)
        for layer, parts in layers.items():
            for buffer in parts:
                raw(buffer).copy_(torch.randint(1, 256, raw(buffer).shape, dtype=torch.uint8))
            expected = [page_of(buffer, 5).flatten() for buffer in parts]
            memory.zero_()
            assert copier.gather([BlockCopies(cut.groups[place, layer], [5], [2 * size])])()
            assert not memory[: 2 * size].any()
            chunk = memory[2 * size :]
            mine = chunk != 0
            assert not (taken & mine).any()
            taken |= mine
            assert sorted(chunk[mine].tolist()) == sorted(torch.cat(expected).tolist())
            before = [page_of(buffer, 4).clone() for buffer in parts]
            assert copier.scatter([BlockCopies(cut.groups[place, layer], [1], [2 * size])])()
            for buffer, part, untouched in zip(parts, expected, before, strict=True):
                assert torch.equal(page_of(buffer, 1).flatten(), part)
                assert torch.equal(page_of(buffer, 4), untouched)
        assert taken.all()


def test_recurrent_states_are_rows_of_their_own() -> None:
    temporal = torch.randn(2, 6, 5, 4)  # [layer, state, ...]
    convolutions = [torch.randn(2, 6, 3, 2).to(torch.bfloat16), torch.empty(2, 6, 0)]
    requests = SimpleNamespace(
        mamba_ckpt_pool=None,
        short_conv_pool=SimpleNamespace(enabled=False),
        ngram_pool=SimpleNamespace(enabled=False),
        mamba_pool=SimpleNamespace(
            mamba_cache=SimpleNamespace(temporal=temporal, conv=convolutions), num_mamba_layers=2
        ),
        mamba_map={11: 0, 13: 1},
    )
    entry = _recurrent(requests, 10)
    cut = layered(DevicePoolGroup([entry], 4, PAGE))
    assert blocks_of(entry, torch.tensor([4, 1])) == [4, 1]
    assert set(cut.groups) == {(0, 1), (0, 3)}
    memory = torch.zeros(cut.chunk_bytes[0], dtype=torch.uint8)
    assert memory.numel() == 2 * (5 * 4 * 4 + 3 * 2 * 2)
    copier = open_copier(cut.layout, memoryview(memory.numpy()))
    for layer, row in ((1, 0), (3, 1)):
        assert copier.gather([BlockCopies(cut.groups[0, layer], [4], [0])])()
        for fragment, state in zip(
            cut.layout[cut.groups[0, layer]], (temporal, convolutions[0]), strict=True
        ):
            piece = memory[fragment.offset : fragment.offset + fragment.bytes]
            assert torch.equal(piece, state[row, 4].flatten().view(torch.uint8))


def test_pools_that_cannot_be_described_are_refused() -> None:
    pool = mha()
    pool.k_scale_buffer = [torch.zeros(1)]
    with pytest.raises(ConfigError, match="does not handle this model"):
        device_pools(pool, parameters(pool), FULL)
    with pytest.raises(ConfigError, match="it drafts"):
        device_pools(mha(), parameters(mha(), mtp_draft_device_pools=(mha(1),)), FULL)


# --- the linker


class Linker:
    """A linker and its pool, with SGLang's side of its calls."""

    def __init__(self, linker: LMKVLinker, pool: Any) -> None:
        self.linker, self.pool = linker, pool

    def counter(self, name: str, *labels: str) -> float:
        return self.linker.metrics.get(name, *labels)

    def leased(self) -> int:
        """Bytes of slots that are in use."""
        return self.linker._store.index.leased_bytes

    def errors(self) -> float:
        found = self.linker.metrics.values.items()
        return sum(value for (name, _), value in found if name == "lmkv_errors")

    def offload(self, *transfers: PoolTransfer) -> bool:
        """Offload and wait for the outcome."""
        assert self.linker.offload(list(transfers))
        return self.outcome()

    def outcome(self) -> bool:
        wait(lambda: self.linker.num_completed_offloads() > 0)
        return self.linker.pop_completed_offload()

    def written(self) -> None:
        """Wait until all lies on the disk."""

        def idle() -> bool:
            self.linker.num_completed_offloads()
            return self.linker.pending_writes == 0 and not self.linker._store.pending_work

        wait(idle)

    def land(self) -> bool:
        """Run the loads that are queued."""
        index = self.linker.start_layer_wise_loading()
        assert index >= 0
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(self.linker.layer_done_counter.num_layers):
            self.linker.layer_done_counter.wait_until(layer)
        return self.linker.finish_layer_wise_loading(index)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kv(page_keys: list[str], pages: Sequence[int] | None = None) -> PoolTransfer:
    """Of a lookup, or of a load or offload to and from these pages."""
    slots = None if pages is None else indices(pages)
    return PoolTransfer(name=PoolName.KV, keys=page_keys, device_indices=slots)


def swa(page_keys: list[str], pages: Sequence[int] | None = None) -> PoolTransfer:
    slots = None if pages is None else indices(pages)
    policy = PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(name=PoolName.SWA, keys=page_keys, device_indices=slots, hit_policy=policy)


def moved(
    before: list[torch.Tensor], source: list[torch.Tensor], where: dict[int, int]
) -> list[torch.Tensor]:
    """What a pool must hold when pages of `source` came to it: target page -> source page."""
    after = [buffer.clone() for buffer in before]
    for target, page in where.items():
        for new, old in zip(after, source, strict=True):
            page_of(new, target).copy_(page_of(old, page))
    return after


def holds(pool: Any, expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, contents(pool), expected))


Open = Callable[..., Linker]


@pytest.fixture
def open_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """`open_linker(pool, components, host=..., file=...)`: `file=False` for memory alone."""
    monkeypatch.setattr(linker_module, "check_engine", lambda config: None)
    monkeypatch.setattr(linker_module, "engine_fields", lambda config: {"tenant": config.identity.tenant})
    monkeypatch.setattr(compat, "server_args", lambda: SimpleNamespace(pp_size=1, dp_size=1))
    for limit in ("DEFER_S", "TIER_DEADLINE_S", "FLUSH_S"):  # a busy machine is not a fault
        monkeypatch.setattr(f"lmkv.store.{limit}", float(TIMEOUT_S))
    rank = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    opened: list[Linker] = []

    def open_one(
        pool: Any, components: Any = FULL, *, host: str = "32MiB", file: bool = True, **changed: Any
    ) -> Linker:
        monkeypatch.setattr(
            compat,
            "linker_ranks",
            lambda replicated: SimpleNamespace(**rank | changed, dp_rank=0, is_mla_model=replicated),
        )
        settings: dict[str, Any] = {"host": {"capacity": host}}
        if file:
            settings["file"] = {"path": str(tmp_path), "capacity": "64MiB"}
        linker = LMKVLinker(
            None,
            parameters(pool),
            components=components,
            extra_config={"lmkv": settings},
            forward_stream=None,
        )
        opened.append(Linker(linker, pool))
        # Slots are there when the slab has been faulted in.
        wait(lambda: bool(linker._slab.fully_faulted))
        linker._store.poll()
        return opened[-1]

    yield open_one
    for linker in opened:
        linker.linker.close()


@pytest.mark.parametrize("make", [mha, mla])
def test_pages_come_back_to_other_places_from_memory_and_from_disk(
    open_linker: Open, make: Callable[[], Any]
) -> None:
    pool = make()
    ours = open_linker(pool)
    names, stored, loaded = keys(5), [7, 2, 3, 9, 11], [1, 10, 4, 0]
    fill(pool, 1)
    source = contents(pool)
    assert ours.linker.lookup("a", [kv(names)]) == []
    assert ours.offload(kv(names, stored))
    assert ours.linker.lookup("a", [kv([*names, key("other")])]) == [1, 2, 3, 4, 5]
    assert ours.linker.lookup("a", [kv([key("other"), *names])]) == []
    fill(pool, 2)
    before = contents(pool)
    assert ours.linker.load("a", [kv(names[:4], loaded)])
    assert holds(pool, before)  # not before SGLang starts it
    assert ours.land()
    after = moved(before, source, dict(zip(loaded, stored, strict=False)))
    assert holds(pool, after)
    assert ours.counter("lmkv_hit_tokens", "host") == 4 * PAGE
    ours.written()
    assert ours.leased() == 0
    assert ours.errors() == 0
    ours.linker.close()

    again = open_linker(pool)
    assert again.linker.lookup("b", [kv(names)]) == [1, 2, 3, 4, 5]
    fill(pool, 2)
    assert again.linker.load("b", [kv(names[:4], loaded)])
    assert again.land()
    assert holds(pool, after)
    assert again.counter("lmkv_hit_tokens", "file") == 4 * PAGE
    assert again.counter("lmkv_hit_tokens", "host") == 0
    again.written()
    assert again.leased() == 0
    assert again.errors() == 0


def test_a_window_beside_full_attention(open_linker: Open) -> None:
    """Of the window only the pages at the end are there: no other length can be restored."""
    pool = window()
    ours = open_linker(pool, SWA)
    fill(pool, 1)
    source = contents(pool)
    names = keys(6)
    assert ours.offload(kv(names[:5], [0, 1, 2, 3, 4]), swa(names[3:5], [6, 7]))
    assert ours.linker.lookup("a", [kv(names), swa(names[:2])]) == [5]
    assert ours.linker.lookup("a", [kv(names), swa(names[:1])]) == [4, 5]
    assert ours.linker.lookup("a", [kv(names), swa(names[:3])]) == []
    assert ours.linker.lookup("a", [kv(names)]) == []  # SGLang asks for both or for nothing
    fill(pool, 2)
    before = contents(pool)
    assert ours.linker.load("a", [kv(names[:5], [7, 8, 9, 10, 11]), swa(names[3:5], [1, 2])])
    assert ours.land()
    split = len(buffers_of(pool.full_kv_pool)) * 2  # tensors of the pool of full attention come first
    full = moved(before[:split], source[:split], dict(zip(range(7, 12), range(5), strict=True)))
    near = moved(before[split:], source[split:], {1: 6, 2: 7})
    assert holds(pool, full + near)
    assert ours.counter("lmkv_hit_tokens", "host") == 5 * PAGE
    assert ours.errors() == 0


def test_what_is_there_is_not_copied_again(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool)
    fill(pool, 1)
    source = contents(pool)
    assert ours.offload(kv(keys(4), [0, 1, 2, 3]))
    assert ours.counter("lmkv_stored_chunks", "host") == 4
    copied: list[int] = []
    gather = ours.linker._copier.gather
    ours.linker._copier.gather = lambda pieces: (copied.append(len(pieces)), gather(pieces))[1]  # type: ignore[method-assign]  # counts
    fill(pool, 2)
    assert ours.offload(kv(keys(4), [0, 1, 2, 3]))
    assert sum(copied) == 0
    assert ours.counter("lmkv_stored_chunks", "host") == 4
    assert ours.linker.load("a", [kv(keys(4), [4, 5, 6, 7])])
    before = contents(pool)
    assert ours.land()
    assert holds(pool, moved(before, source, {4: 0, 5: 1, 6: 2, 7: 3}))
    # Of a longer prefix only what is new.
    fill(pool, 3)
    assert ours.offload(kv(keys(6), [0, 1, 2, 3, 8, 9]))
    assert ours.counter("lmkv_stored_chunks", "host") == 6


def test_a_load_that_is_cancelled_frees_its_slots(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool)
    assert ours.offload(kv(keys(4), [0, 1, 2, 3]))
    ours.written()
    assert ours.leased() == 0
    before = contents(pool)
    assert ours.linker.load("a", [kv(keys(4), [4, 5, 6, 7])])
    assert ours.leased() > 0
    assert ours.linker.cancel_queued_load("a")
    assert not ours.linker.cancel_queued_load("a")
    assert ours.leased() == 0
    assert ours.linker.start_layer_wise_loading() == -1
    assert holds(pool, before)
    assert ours.linker.lookup("b", [kv(keys(4))]) == [1, 2, 3, 4]


def test_several_loads_start_together(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool)
    fill(pool, 1)
    source = contents(pool)
    assert ours.offload(kv(keys(3), [0, 1, 2]))
    fill(pool, 2)
    before = contents(pool)
    assert ours.linker.load("a", [kv(keys(3), [4, 5, 6])])
    assert ours.linker.load("b", [kv(keys(2), [8, 9])])
    assert ours.linker.load("c", [kv(keys(1), [11])])
    assert ours.linker.cancel_queued_load("c")
    assert ours.land()
    assert holds(pool, moved(before, source, {4: 0, 5: 1, 6: 2, 8: 0, 9: 1}))
    ours.written()
    assert ours.leased() == 0


def test_loads_of_what_is_not_there_are_declined(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool)
    before = contents(pool)
    assert not ours.linker.load("a", [kv(keys(3), [0, 1, 2])])
    assert ours.offload(kv(keys(2), [0, 1]))
    assert not ours.linker.load("a", [kv(keys(3), [0, 1, 2])])  # all or nothing
    ours.written()
    assert ours.leased() == 0
    assert ours.linker.start_layer_wise_loading() == -1
    assert holds(pool, before)
    assert ours.errors() == 0


@pytest.mark.parametrize("malformed", ["d:" + key("x"), "not hex", "ab"])
def test_malformed_names_are_misses(open_linker: Open, malformed: str) -> None:
    ours = open_linker(mha())
    assert ours.linker.lookup("a", [kv([malformed])]) == []
    assert not ours.linker.load("a", [kv([malformed], [1])])
    assert ours.linker.offload([kv([malformed], [1])])
    ours.outcome()
    assert ours.offload(kv(keys(2), [0, 1]))
    assert ours.linker.lookup("a", [kv(keys(2))]) == [1, 2]


def test_indices_that_are_not_whole_pages_are_counted(open_linker: Open) -> None:
    ours = open_linker(mha())
    crooked = PoolTransfer(name=PoolName.KV, keys=keys(1), device_indices=torch.arange(3, 3 + PAGE))
    assert ours.linker.offload([crooked])
    assert not ours.outcome()
    assert not ours.linker.load("a", [crooked])
    assert ours.errors() == 2
    assert ours.linker.lookup("a", [kv(keys(1))]) == []


def test_a_full_slab_keeps_what_fits_and_goes_on(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool, host=f"{4 * PAGE_BYTES}B", file=False)
    room = ours.linker._store.room(PAGE_BYTES)
    assert 2 <= room < 8
    fill(pool, 1)
    source = contents(pool)
    assert not ours.offload(kv(keys(8), range(8)))
    assert ours.counter("lmkv_skipped_stores", "slab_full") == 8 - room
    assert ours.linker.lookup("a", [kv(keys(8))]) == list(range(1, room + 1))
    fill(pool, 2)
    before = contents(pool)
    assert ours.linker.load("a", [kv(keys(room), range(4, 4 + room))])
    assert ours.land()
    assert holds(pool, moved(before, source, {4 + page: page for page in range(room)}))
    # Others take the place of the oldest.
    assert ours.offload(kv(keys(2, "b"), [0, 1]))
    assert ours.linker.lookup("b", [kv(keys(2, "b"))]) == [1, 2]
    assert ours.leased() == 0
    assert ours.errors() == 0


def test_a_slab_that_is_all_leased_takes_no_more(open_linker: Open) -> None:
    ours = open_linker(mha(), host=f"{4 * PAGE_BYTES}B", file=False)
    room = ours.linker._store.room(PAGE_BYTES)
    assert ours.offload(kv(keys(room), range(room)))
    assert ours.linker.load("a", [kv(keys(room), range(4, 4 + room))])
    assert not ours.offload(kv(keys(1, "b"), [0]))
    assert ours.linker.cancel_queued_load("a")
    assert ours.offload(kv(keys(1, "b"), [0]))
    assert ours.linker.lookup("b", [kv(keys(1, "b"))]) == [1]


def test_a_damaged_page_on_disk_costs_its_load(open_linker: Open, tmp_path: Path) -> None:
    pool = mha()
    ours = open_linker(pool)
    fill(pool, 1)
    source = contents(pool)
    assert ours.offload(kv(keys(6), range(6)))
    ours.written()
    ours.linker.close()
    flip(tmp_path, page_of(source[0], 3).numpy().tobytes())

    again = open_linker(pool)
    before = contents(pool)
    assert again.linker.lookup("a", [kv(keys(6))]) == [1, 2, 3, 4, 5, 6]
    assert not again.linker.load("a", [kv(keys(6), range(6, 12))])
    assert holds(pool, before)
    assert again.counter("lmkv_misses", "corrupt") == 1
    again.written()
    assert again.leased() == 0
    assert again.linker.start_layer_wise_loading() == -1
    # Nobody is offered it again, and what comes before it is served.
    assert again.linker.lookup("b", [kv(keys(6))]) == [1, 2, 3]
    assert again.linker.load("b", [kv(keys(3), [6, 7, 8])])
    assert again.land()
    assert holds(pool, moved(before, source, {6: 0, 7: 1, 8: 2}))
    assert again.errors() == 0


def test_a_disk_that_cannot_be_read_costs_its_load(
    open_linker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv.executor.FIRST_BACKOFF_S", 3000.0)
    monkeypatch.setattr("lmkv.executor.MAX_BACKOFF_S", 3000.0)
    pool = mha()
    ours = open_linker(pool)
    assert ours.offload(kv(keys(4), range(4)))
    ours.written()
    ours.linker.close()
    again = open_linker(pool)
    monkeypatch.setattr(file_tier.os, "preadv", failing)
    assert again.linker.lookup("a", [kv(keys(4))]) == [1, 2, 3, 4]
    assert not again.linker.load("a", [kv(keys(4), range(4, 8))])
    assert again.counter("lmkv_misses", "unavailable") == 4
    assert again.linker.lookup("a", [kv(keys(4))]) == []  # it is left alone for a while
    # Memory alone serves what is computed now.
    assert again.offload(kv(keys(2, "b"), [0, 1]))
    assert again.linker.load("b", [kv(keys(2, "b"), [4, 5])])
    assert again.land()
    assert again.errors() == 0


def test_a_read_that_hangs_is_waited_for_no_longer_than_its_deadline(
    open_linker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = mha()
    ours = open_linker(pool)
    assert ours.offload(kv(keys(4), range(4)))
    ours.written()
    ours.linker.close()
    again = open_linker(pool)
    monkeypatch.setattr("lmkv.store.DEFER_S", 0.25)
    go_on, preadv = threading.Event(), os.preadv

    def hanging(*args: Any) -> int:
        assert go_on.wait(TIMEOUT_S)
        return preadv(*args)

    monkeypatch.setattr(file_tier.os, "preadv", hanging)
    try:
        assert not again.linker.load("a", [kv(keys(4), range(4, 8))])
        assert again.counter("lmkv_misses", "deadline") > 0
    finally:
        go_on.set()
    wait(lambda: again.linker.num_completed_offloads() == 0 and again.leased() == 0)
    monkeypatch.setattr("lmkv.store.DEFER_S", float(TIMEOUT_S))
    assert again.linker.load("a", [kv(keys(4), range(4, 8))])
    assert again.land()


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_a_copy_that_fails_costs_its_pages(open_linker: Open, way: str) -> None:
    pool = mha()
    ours = open_linker(pool)
    assert ours.offload(kv(keys(2), [0, 1]))
    ours.written()
    original = getattr(ours.linker._copier, way)
    setattr(ours.linker._copier, way, failing)
    if way == "gather":
        assert not ours.offload(kv(keys(2, "b"), [0, 1]))
        assert ours.counter("lmkv_skipped_stores", "copy_failed") == 2
        assert ours.linker.lookup("b", [kv(keys(2, "b"))]) == []
    else:
        assert ours.linker.load("a", [kv(keys(2), [4, 5])])
        assert not ours.land()
    assert ours.errors() == 1
    setattr(ours.linker._copier, way, original)
    ours.written()
    assert ours.leased() == 0
    assert ours.offload(kv(keys(2, "b"), [0, 1]))
    assert ours.linker.load("b", [kv(keys(2, "b"), [6, 7])])
    assert ours.land()


def test_reset_ends_everything(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool)
    assert ours.offload(kv(keys(4), range(4)))
    assert ours.linker.load("started", [kv(keys(2), [4, 5])])
    assert ours.linker.start_layer_wise_loading() >= 0
    assert ours.linker.load("queued", [kv(keys(2), [6, 7])])
    assert ours.linker.offload([kv(keys(2, "b"), [0, 1])])
    ours.linker.reset()
    assert ours.linker.num_completed_offloads() == 0
    assert not ours.linker.cancel_queued_load("queued")
    assert ours.linker.start_layer_wise_loading() == -1
    ours.written()
    assert ours.leased() == 0
    # SGLang's flush is about its own memory.
    assert ours.linker.lookup("a", [kv(keys(4))]) == [1, 2, 3, 4]
    assert ours.linker.load("a", [kv(keys(4), [4, 5, 6, 7])])
    assert ours.land()
    assert ours.errors() == 0


def test_forget_serves_nothing_old(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool)
    fill(pool, 1)
    first = contents(pool)
    assert ours.offload(kv(keys(3), [0, 1, 2]))
    ours.written()
    assert ours.linker.offload([kv(keys(2, "late"), [3, 4])])  # under way
    live.forget_all("a test")
    assert ours.outcome() in (True, False)
    for names in (keys(3), keys(2, "late")):
        assert ours.linker.lookup("a", [kv(names)]) == []
        assert not ours.linker.load("a", [kv(names, range(4, 4 + len(names)))])
    ours.written()
    assert ours.leased() == 0
    # The same names stand for what is computed now.
    fill(pool, 2)
    source = contents(pool)
    assert ours.offload(kv(keys(3), [0, 1, 2]))
    assert ours.linker.load("a", [kv(keys(3), [6, 7, 8])])
    assert ours.land()
    assert holds(pool, moved(source, source, {6: 0, 7: 1, 8: 2}))
    ours.written()
    ours.linker.close()
    # What others share is still there, and still what it was.
    again = open_linker(pool)
    before = contents(pool)
    assert again.linker.load("a", [kv(keys(3), [9, 10, 11])])
    assert again.land()
    assert holds(pool, moved(before, first, {9: 0, 10: 1, 11: 2}))


def test_close_writes_out_what_is_queued(open_linker: Open) -> None:
    pool = mha()
    ours = open_linker(pool)
    assert ours.linker.offload([kv(keys(8), range(8))])
    ours.linker.close()
    ours.linker.close()
    again = open_linker(pool)
    assert again.linker.lookup("a", [kv(keys(8))]) == list(range(1, 9))


def test_a_slab_for_no_page_is_refused(open_linker: Open) -> None:
    with pytest.raises(ConfigError) as refused:
        open_linker(mha(), host=f"{PAGE_BYTES}B", file=False)
    assert refused.value.setting == "[host] capacity"


def test_ranks_that_hold_the_same_share_a_directory(open_linker: Open, tmp_path: Path) -> None:
    pool = mla()
    first = open_linker(pool, tp_rank=0, tp_size=2)
    fill(pool, 1)
    source = contents(pool)
    assert first.offload(kv(keys(2), [0, 1]))
    first.written()
    second = open_linker(pool, tp_rank=1, tp_size=2)
    assert second.linker.lookup("a", [kv(keys(2))]) == [1, 2]
    fill(pool, 2)
    before = contents(pool)
    assert second.linker.load("a", [kv(keys(2), [4, 5])])
    assert second.land()
    assert holds(pool, moved(before, source, {4: 0, 5: 1}))
    assert [folder.name for folder in (tmp_path / "sglang").iterdir()] == ["replicated"]
