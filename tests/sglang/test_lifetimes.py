"""What holds over an engine's life: kills, faults, damage on disk, other weights, tenants, refusals."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lmkv.record import HEADER_BYTES, decode_header
from tests.sglang import probes
from tests.sglang.harness import PAGE, EngineError, hicache, linker, prompt
from tests.sglang.test_models import ask, same
from tools import models

MODEL = "tiny-llama"
IDS = prompt(1, 32 * PAGE + 5)
HIT = 32 * PAGE
MODES = {"storage": hicache, "linker": linker}


@pytest.fixture(params=MODES)
def flags(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options that turn lmkv on, in each of its two ways."""
    return MODES[request.param](tmp_path / "cache")


@pytest.fixture
def expected(reference: Any) -> list[dict[str, Any]]:
    return reference(MODEL, [IDS])  # type: ignore[no-any-return]


def test_killed_while_it_writes(start: Any, expected: Any, flags: dict[str, Any]) -> None:
    others = [prompt(seed, 500) for seed in range(2, 10)]
    engine = start(MODEL, **flags)
    try:
        same(ask(engine, [IDS]), expected)
        engine.send("generate", others)
    finally:
        engine.kill()
    with start(MODEL, **flags) as engine:
        again = ask(engine, [IDS])
        same(again, expected)
        assert again[0]["cached"] % PAGE == 0
        engine.wait_written()
        assert engine.flush_cache()
        found = ask(engine, [IDS])
        same(found, expected)
        assert found[0]["cached"] == HIT


def test_a_damaged_page_of_32(start: Any, expected: Any, flags: dict[str, Any], tmp_path: Path) -> None:
    with start(MODEL, **flags) as engine:
        same(ask(engine, [IDS]), expected)
        engine.wait_written()
    damage_page(tmp_path / "cache", 1 + 20)  # the first one was stored at the start, to try the tier
    with start(MODEL, **flags) as engine:
        damaged = ask(engine, [IDS])
        same(damaged, expected)
        # SGLang's storage takes the pages before the damaged one; its linker loads all or nothing.
        assert damaged[0]["cached"] == (20 * PAGE if "hicache_storage_backend" in flags else 0)
        engine.wait_written()
        assert engine.flush_cache()
        found = ask(engine, [IDS])  # the page was computed and stored again
        same(found, expected)
        assert found[0]["cached"] == HIT


def damage_page(cache: Path, page: int) -> None:
    """Flip a bit in the payload of the record that was written as number `page`."""
    (segment,) = (cache / "sglang" / "tp0of1").glob("*.seg")
    data = bytearray(segment.read_bytes())
    blocks = range(0, len(data), 4096)
    records = [at for at in blocks if decode_header(data[at : at + HEADER_BYTES]) is not None]
    data[records[page] + 4096 + 100] ^= 1
    segment.write_bytes(data)


def test_sglangs_own_fault_wrapper(start: Any, reference: Any, tmp_path: Path) -> None:
    prompts = [prompt(seed, 200) for seed in range(20, 24)]
    expected = reference(MODEL, prompts)
    environ = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    }
    with start(MODEL, environ=environ, **hicache(tmp_path / "cache")) as engine:
        hits = 0
        for _ in range(6):
            answers = ask(engine, prompts)
            same(answers, expected)
            hits += sum(answer["sources"]["storage"] for answer in answers)
            engine.wait_written()
            assert engine.flush_cache()
        assert hits > 0


def test_other_weights_serve_nothing_old(
    start: Any, expected: Any, flags: dict[str, Any], tmp_path: Path
) -> None:
    other = other_weights(tmp_path / "other")
    with start(MODEL, **flags) as engine:
        same(ask(engine, [IDS]), expected)
        engine.wait_written()
        (before,) = engine.inside(probes.namespaces)
        assert engine.update_weights(str(other)) == ""
        (new,) = ask(engine, [IDS])
        assert new["cached"] == 0
        assert new["tokens"] != expected[0]["tokens"]
        (after,) = engine.inside(probes.namespaces)
        assert not set(before) & set(after)
        engine.wait_written()
        assert engine.flush_cache()
        (found,) = ask(engine, [IDS])  # what came after is served
        same([found], [new])
        assert found["cached"] == HIT
        # The old weights again: what is of the new ones is not theirs.
        assert engine.update_weights(str(models.path(MODEL))) == ""
        back = ask(engine, [IDS])
        same(back, expected)
        assert back[0]["cached"] == 0
    with start(MODEL, **flags) as engine:  # and what others share was left alone
        restarted = ask(engine, [IDS])
        same(restarted, expected)
        assert restarted[0]["cached"] == HIT


def other_weights(path: Path) -> Path:
    """The model with its weights doubled in one layer."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(models.path(MODEL), path)
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    for name in weights:
        if "layers.0.self_attn.v_proj" in name:
            weights[name] = weights[name] * -2
    save_file(weights, file, metadata={"format": "pt"})
    return path


def test_flush_leaves_and_clear_forgets(start: Any, expected: Any, tmp_path: Path) -> None:
    with start(MODEL, **hicache(tmp_path / "cache")) as engine:
        same(ask(engine, [IDS]), expected)
        engine.wait_written()
        assert engine.flush_cache()
        flushed = ask(engine, [IDS])
        same(flushed, expected)
        assert flushed[0]["sources"]["storage"] == HIT
        assert engine.flush_cache()
        assert engine.clear_storage() == ""
        cleared = ask(engine, [IDS])
        same(cleared, expected)
        assert cleared[0]["cached"] == 0


def test_salts_keep_pages_apart(start: Any, expected: Any, flags: dict[str, Any]) -> None:
    with start(MODEL, **flags) as engine:
        engine.generate([IDS], salt="a")
        engine.wait_written()
        assert engine.flush_cache()
        for salt, hit in (("b", 0), (None, 0), ("a", HIT)):
            (answer,) = engine.generate([IDS], salt=salt)
            same([answer], expected)
            assert answer["cached"] == hit


def test_two_engines_at_once(start: Any, expected: Any, tmp_path: Path) -> None:
    """The first writes; the second, while the first lives, finds what it wrote."""
    flags = hicache(tmp_path / "cache")
    with start(MODEL, **flags) as first:
        same(ask(first, [IDS]), expected)
        first.wait_written()
        with start(MODEL, **flags) as second:
            found = ask(second, [IDS])
            same(found, expected)
            assert found[0]["sources"]["storage"] == HIT


def test_a_server_turned_on_by_one_setting(serve: Any, expected: Any, tmp_path: Path) -> None:
    """LMKV_CONFIG alone; then detached and attached again over HTTP."""
    toml = tmp_path / "lmkv.toml"
    toml.write_text(f'[file]\npath = "{tmp_path / "cache"}"\ncapacity = "256MiB"\n')
    options = {
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_storage_prefetch_policy": "wait_complete",
        "admin_api_key": "secret",
    }
    with serve(MODEL, environ={"LMKV_CONFIG": str(toml)}, **options) as server:
        log = server.log.read_text()
        assert "lmkv: turned on as the storage below SGLang's host pool" in log
        assert str(toml) in log
        same([server.generate(IDS)], expected)
        admin = {"headers": {"Authorization": "Bearer secret"}}
        url = "/hicache/storage-backend"
        _until_idle(server)
        status = server.http.get(url, **admin)
        assert status.json()["hicache_storage_backend"] == "dynamic", status.text
        assert server.http.delete(url, **admin).status_code == 200
        _until_idle(server)
        extra = json.loads(hicache(tmp_path / "cache")["hicache_storage_backend_extra_config"])
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(extra),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        attached = server.http.put(url, json=body, **admin)
        assert attached.status_code == 200, attached.text
        _until_idle(server)
        found = server.generate(IDS)
        same([found], expected)
        assert found["sources"]["storage"] == HIT


def _until_idle(server: Any) -> None:
    """Flush the cache; SGLang refuses that until everything is written."""
    for _ in range(600):
        if server.http.post("/flush_cache", headers={"Authorization": "Bearer secret"}).status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError("the server is not getting idle")


def test_small_pages_are_refused(start: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ConfigError: --page-size"):
        start(MODEL, **hicache(tmp_path / "cache") | {"page_size": 1})
