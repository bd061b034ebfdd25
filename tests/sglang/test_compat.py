"""What has to hold with every SGLang that lmkv supports: `make compat` runs this file with each.

Computed, then found in storage, then found by another process in which the plugin alone turned lmkv on: the
answers must equal those of an engine without lmkv, and the hits the number that follows from prompt and
page size.
"""

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache import utils

from tests.sglang import probes
from tests.sglang.harness import PAGE, Engine, EngineError, hicache, prompt
from tools import models

MODEL = "tiny-llama"
SIZES = (200, 333)
#: From 0.5.20 on SGLang's names of pages in storage begin with salt and adapter.
TELLS_TENANTS = hasattr(utils, "get_storage_hash_str")


def storage_hit(tokens: int) -> int:
    """Whole pages of a prompt, of which SGLang computes at least the last token."""
    return (tokens - 1) // PAGE * PAGE


def same(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)


def with_lmkv(directory: Path, *, single_tenant: bool = not TELLS_TENANTS) -> dict[str, Any]:
    file = {"path": str(directory), "capacity": "512MiB"}
    sglang = {"single_tenant": single_tenant, "gate": False}
    return hicache(directory, extra={"lmkv": {"file": file, "sglang": sglang}})


def test_cold_then_storage_then_restart(tmp_path: Path) -> None:
    prompts = [prompt(seed, tokens) for seed, tokens in enumerate(SIZES)]
    hits = [storage_hit(tokens) for tokens in SIZES]
    cache = tmp_path / "cache"
    with Engine(models.path(MODEL), tmp_path / "reference.log") as engine:
        expected = [engine.generate([ids])[0] for ids in prompts]

    with Engine(models.path(MODEL), tmp_path / "cold.log", **with_lmkv(cache)) as engine:
        cold = [engine.generate([ids])[0] for ids in prompts]
        same(cold, expected)
        assert [answer["cached"] for answer in cold] == [0, 0]
        assert all(speed > 0 for speed in engine.inside(probes.prefill_speed))
        engine.wait_written()
        assert engine.flush_cache()
        found = [engine.generate([ids])[0] for ids in prompts]
        same(found, expected)
        assert [answer["sources"]["storage"] for answer in found] == hits

    # In another process, and without a flag that names lmkv.
    environ = {"LMKV_FILE_PATH": str(cache), "LMKV_FILE_CAPACITY": "512MiB", "LMKV_SGLANG_GATE": "false"}
    environ |= {} if TELLS_TENANTS else {"LMKV_SGLANG_SINGLE_TENANT": "true"}
    options = {"hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct"}
    options["hicache_storage_prefetch_policy"] = "wait_complete"
    with Engine(models.path(MODEL), tmp_path / "restart.log", environ=environ, **options) as engine:
        restarted = [engine.generate([ids])[0] for ids in prompts]
        same(restarted, expected)
        assert [answer["sources"]["storage"] for answer in restarted] == hits


@pytest.mark.skipif(TELLS_TENANTS, reason="not needed")
def test_several_tenants_are_refused(tmp_path: Path) -> None:
    """Where SGLang does not tell tenants apart in storage."""
    with pytest.raises(EngineError, match="ConfigError") as refused:
        Engine(models.path(MODEL), tmp_path / "log", **with_lmkv(tmp_path / "cache", single_tenant=False))
    assert "single_tenant" in str(refused.value)
    assert "use SGLang 0.5.20 or newer" in str(refused.value)


@pytest.mark.skipif(not TELLS_TENANTS, reason="not kept apart by SGLang")
def test_cache_salts_are_kept_apart(tmp_path: Path) -> None:
    ids = prompt(0, SIZES[0])
    with Engine(models.path(MODEL), tmp_path / "log", **with_lmkv(tmp_path / "cache")) as engine:
        (first,) = engine.generate([ids], salt="a")
        engine.wait_written()
        assert engine.flush_cache()
        for salt, hit in (("b", 0), (None, 0), ("a", storage_hit(len(ids)))):
            (answer,) = engine.generate([ids], salt=salt)
            same([answer], [first])
            assert answer["sources"]["storage"] == answer["cached"] == hit
