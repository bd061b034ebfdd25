"""What lmkv refuses is refused before the engine serves, by the setting's name and with the fix."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from lmkv.config import ConfigError
from lmkv.connectors.vllm.connector import LMKVConnector
from lmkv.connectors.vllm.identity import _states
from lmkv.connectors.vllm.manager import LMKVManager
from tests.engine.harness import EngineError
from tools import models

SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=256)
STATE = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
KEPT = replace(STATE, mamba_cache_mode="align")


def groups(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)],
    )


def config(
    extra: dict[str, Any], model: str = "tiny-llama", role: str = "kv_both", **options: Any
) -> VllmConfig:
    """The engine's own configuration, as its flags make it."""
    transfer = {"kv_connector": "LMKVConnector", "kv_role": role, "kv_connector_extra_config": extra}
    arguments = {"model": str(models.path(model)), "block_size": 32, "max_model_len": 512, **options}
    return EngineArgs(**arguments, kv_transfer_config=transfer).create_engine_config()


def change(path: str, value: Any = 2) -> Callable[[VllmConfig], None]:
    """Sets one field of the engine's configuration that a CPU engine does not take as a flag."""

    def apply(vllm_config: VllmConfig) -> None:
        owner, _, name = path.rpartition(".")
        target = vllm_config
        for part in owner.split(".") if owner else ():
            target = getattr(target, part)
        object.__setattr__(target, name, value)

    return apply


def keep(_: VllmConfig) -> None:
    """No change."""


LMKV: dict[str, Any] = {"lmkv": {}}
TWO = {"lmkv": {"vllm": {"blocks_per_chunk": 2}}}
EXTRA = "kv_connector_extra_config."
SHARED = {"lmkv": {"file": {"path": "/nonexistent/lmkv"}}}
XXHASH = {"prefix_caching_hash_algo": "xxhash"}
EAGLE = SimpleNamespace(method="eagle")


@pytest.mark.parametrize(
    ("extra", "options", "edit", "specs", "setting", "fix"),
    [
        ({"lmkv": {"host": {"capcity": "1GiB"}}}, {}, keep, [FULL], "[host] capcity", "capacity?"),
        ({"lmkv": {"hots": {}}}, {}, keep, [FULL], "[hots]", "host?"),
        ({"host": {"capacity": "1GiB"}}, {}, keep, [FULL], EXTRA + "host", '{"lmkv": {"host"'),
        ({"cpu_bytes_to_use": 1}, {}, keep, [FULL], EXTRA + "cpu_bytes_to_use", "[host] capacity"),
        ({"colour": 1}, {}, keep, [FULL], EXTRA + "colour", "remove it"),
        (LMKV, {"role": "kv_producer"}, keep, [FULL], "kv_role", '"kv_both"'),
        (SHARED, XXHASH, keep, [FULL], "--prefix-caching-hash", "use sha256"),
        (SHARED, {"prefix_caching_hash_algo": "xxhash_cbor"}, keep, [FULL], "--prefix-caching", "sha256"),
        (TWO, {}, keep, [FULL, WINDOW], "[vllm] blocks_per_chunk", "to 1"),
        (TWO, {}, keep, [WINDOW], "[vllm] blocks_per_chunk", "to 1"),
        (LMKV, {}, keep, [FULL, STATE], "--enable-prefix-caching", "--mamba-cache-mode align"),
        (LMKV, {}, keep, [FULL, replace(KEPT, num_speculative_blocks=2)], "--speculative-config", "leave"),
        (TWO, {}, keep, [FULL, KEPT], "[vllm] blocks_per_chunk", "to 1"),
        (LMKV, {}, change("parallel_config.nnodes"), [FULL], "--nnodes", "one node"),
        (LMKV, {}, change("parallel_config.decode_context_parallel_size"), [FULL], "--decode", "to 1"),
        (LMKV, {}, change("parallel_config.prefill_context_parallel_size"), [FULL], "--prefill", "1"),
        (LMKV, {}, change("speculative_config", EAGLE), [FULL], "--speculative-config", "ngram"),
        (LMKV, {}, change("model_config.enable_sleep_mode", True), [FULL], "--enable-sleep-mode", "leave"),
    ],
)  # fmt: skip
def test_refused_by_name(
    extra: dict[str, Any],
    options: dict[str, Any],
    edit: Callable[[VllmConfig], None],
    specs: list[Any],
    setting: str,
    fix: str,
) -> None:
    vllm_config = config(extra, **options)
    edit(vllm_config)
    with pytest.raises(ConfigError) as refused:
        LMKVConnector(vllm_config, KVConnectorRole.SCHEDULER, groups(*specs))
    assert setting in str(refused.value)
    problem, _, advice = str(refused.value).partition("Fix: ")
    assert problem
    assert fix in advice


@pytest.mark.parametrize(
    ("lmkv", "message"),
    [
        (
            {"host": {"capacity": "64KiB"}},
            "[host] capacity: 65536 bytes hold fewer than 2 chunks of this model",
        ),
        (
            {"host": {"capacity": "8MiB"}, "file": {"path": "cache"}},
            "[file] path: 'cache' is not an absolute path",
        ),
    ],
)
def test_a_real_engine_does_not_start(start: Any, lmkv: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match="ConfigError") as refused:
        start("tiny-llama", lmkv, block_size=32)
    assert message in str(refused.value)
    assert "Fix: " in str(refused.value)


def test_an_old_vllm_is_refused_by_name() -> None:
    """Before what the connector imports, which an old one may lack."""
    code = (
        "import importlib.metadata\n"
        "known = importlib.metadata.version\n"
        "importlib.metadata.version = lambda name: '0.29.0' if name.startswith('vllm') else known(name)\n"
        "import sys\n"
        "sys.modules['vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector'] = None\n"
        "from lmkv.connectors.vllm import LMKVConnector"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "version 0.29.0 is too old for lmkv. Fix: install vLLM 0.30 or newer." in done.stderr


def test_states_of_equal_size_are_told_apart() -> None:
    wide = replace(KEPT, shapes=((8, 4),), dtypes=(torch.bfloat16,))
    assert wide.page_size_bytes == KEPT.page_size_bytes
    assert _states(groups(FULL, wide)) != _states(groups(FULL, KEPT)) != _states(groups(KEPT, FULL))
    assert _states(groups(FULL, WINDOW)) == {}


class _Excluding(LMKVManager):
    def __init__(self, excluded: list[str]) -> None:
        super().__init__()
        self._excluded = excluded

    def exclude(self, req_id: str) -> None:
        self._excluded.append(req_id)


def test_images_and_embeddings_stay_out() -> None:
    """The hash of a block identifies an image by an id that the client may choose."""
    excluded: list[str] = []
    connector = LMKVConnector.__new__(LMKVConnector)
    connector._awaits = True
    connector.connector_scheduler = SimpleNamespace(
        manager=_Excluding(excluded), on_new_request=lambda request: None
    )
    plain: dict[str, Any] = {"lora_request": None, "mm_features": [], "prompt_embeds": None}
    plain["kv_transfer_params"] = None
    for number, special in enumerate(
        [{}, {"mm_features": ["image"]}, {"prompt_embeds": torch.zeros(1)}, {"lora_request": "adapter"}]
    ):
        request = SimpleNamespace(request_id=str(number), **(plain | special))
        connector.on_new_request(request)
    assert excluded == ["1", "2", "3"]
