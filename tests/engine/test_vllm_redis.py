"""Engines that share a Redis server, also while it is in trouble, and engines that prefill for others."""

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import EngineError, full_hit, prompt, same
from tests.redis_servers import Proxy, Server, cluster, running

MODEL = "tiny-llama"
BLOCK = 32
OPTIONS: dict[str, Any] = {"block_size": BLOCK}
IDS = prompt(1, 330)
HIT = full_hit(len(IDS), BLOCK)
#: Complete blocks of the prompt and the eight tokens of its answer.
CHUNKS = (330 + 7) // BLOCK
#: Steps of a request that waits for nothing: the prompt, and seven more tokens.
STEPS = 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    limits = {"maxmemory": "3gb", "maxmemory_policy": "allkeys-lru", "proto_max_bulk_len": "2gb"}
    with running(tmp_path / "redis", **limits) as server:
        yield server


def settings(server: Server, **redis: Any) -> dict[str, Any]:
    return {"host": {"capacity": "64MiB"}, "redis": {"url": server.url} | redis}


@pytest.fixture
def expected(reference: Any) -> list[dict[str, Any]]:
    return reference(MODEL, [IDS], **OPTIONS)  # type: ignore[no-any-return]


def ask(engine: Any, expected: list[dict[str, Any]]) -> tuple[Any, int]:
    """The prompt once more, with everything forgotten but what lies on the server: what lmkv counted
    meanwhile, and how many steps it took."""
    engine.flush()
    engine.reset_prefix_cache()
    engine.forget_host()
    with engine.counting() as counted:
        request = engine.submit(IDS)
        steps = engine.run()
        same([engine.answer(request)], expected)
    return counted, steps


def test_what_one_engine_computed_another_loads(start: Any, expected: Any, server: Server) -> None:
    with start(MODEL, settings(server), **OPTIONS) as first:
        with first.counting() as cold:
            same(first.generate([IDS]), expected)
        assert cold["lmkv_hit_tokens:redis"] == 0
        assert cold["lmkv_stored_chunks:redis"] == server.client().dbsize() == CHUNKS
        with start(MODEL, settings(server), **OPTIONS) as second:
            with second.counting() as shared:
                same(second.generate([IDS]), expected)
            second.flush()
            assert second.stored("redis") == 0
    assert shared["lmkv_hit_tokens:redis"] == HIT
    assert shared["lmkv_hit_tokens:host"] == 0
    assert server.client().dbsize() == CHUNKS


def test_engines_that_write_one_directory_and_one_server(
    start: Any, reference: Any, expected: Any, server: Server, tmp_path: Path
) -> None:
    both = settings(server) | {"file": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}}
    prompts = [prompt(seed, 330) for seed in (2, 3)]
    with start(MODEL, both, **OPTIONS) as first, start(MODEL, both, **OPTIONS) as second:
        same(first.generate([IDS]), expected)
        same(second.generate(prompts[:1]), reference(MODEL, prompts[:1], **OPTIONS))
        from_files, _ = ask(second, expected)
        assert from_files["lmkv_hit_tokens:file"] == HIT
        asked = [(engine, engine.submit(prompts[1])) for engine in (first, second)]  # both compute it
        for engine, request in asked:
            engine.run()
            same([engine.answer(request)], reference(MODEL, prompts[1:], **OPTIONS))
            engine.flush()
        with first.counting() as counted:
            same(first.generate(prompts[:1]), reference(MODEL, prompts[:1], **OPTIONS))
        assert counted["lmkv_hit_tokens:file"] == HIT
        assert [engine.stored("file") for engine in (first, second)] == [2 * CHUNKS, CHUNKS]
        assert [engine.stored("redis") for engine in (first, second)] == [2 * CHUNKS, CHUNKS]
        assert server.client().dbsize() == 3 * CHUNKS
        first.kill()
        again, _ = ask(second, expected)
        assert again["lmkv_hit_tokens:file"] == HIT


def test_roles(start: Any, expected: Any, server: Server) -> None:
    with start(MODEL, settings(server, role="read_only"), **OPTIONS) as engine:
        same(engine.generate([IDS]), expected)
    assert server.client().dbsize() == 0
    with start(MODEL, settings(server, role="write_only"), **OPTIONS) as engine:
        same(engine.generate([IDS]), expected)
        again, steps = ask(engine, expected)
    assert server.client().dbsize() == CHUNKS
    assert again["lmkv_hit_tokens:redis"] == 0 and steps == STEPS


def test_demoted_to_the_server(start: Any, reference: Any, server: Server) -> None:
    small = {"host": {"capacity": "8MiB"}, "redis": {"url": server.url, "policy": "demote"}}
    prompts = [prompt(seed, 330) for seed in range(20, 44)]
    with start(MODEL, small, **OPTIONS) as engine:
        for ids in prompts:
            same(engine.generate([ids]), reference(MODEL, [ids], **OPTIONS))
            engine.flush()
        counters = engine.counters()
        assert counters["lmkv_evictions"] > 0
        stored = server.client().dbsize()
        assert counters["lmkv_evictions"] <= stored < 24 * CHUNKS
        engine.reset_prefix_cache()
        with engine.counting() as again:
            same(engine.generate([prompts[0]]), reference(MODEL, [prompts[0]], **OPTIONS))
        assert again["lmkv_hit_tokens:redis"] == HIT


def test_trouble(start: Any, expected: Any, server: Server) -> None:
    """One engine, many troubles: every request is answered with the same tokens, waits at most once, and the
    tier comes back by itself."""
    with start(MODEL, settings(server), **OPTIONS) as engine:
        same(engine.generate([IDS]), expected)

        def well() -> None:
            engine.wait_until_well()
            found, _ = ask(engine, expected)
            if found["lmkv_hit_tokens:redis"] != HIT:  # an empty server: it was stored anew just now
                found, _ = ask(engine, expected)
            assert found["lmkv_hit_tokens:redis"] == HIT

        def given_up(trips: int) -> None:
            first, _ = ask(engine, expected)
            assert first["lmkv_hit_tokens:redis"] == 0
            assert engine.counters()["lmkv_breaker_trips:redis"] == trips
            for _ in range(2):
                later, steps = ask(engine, expected)
                assert steps == STEPS, "a request waited although the breaker is open"
                assert later["lmkv_hit_tokens:redis"] == 0
            assert engine.counters()["lmkv_breaker_trips:redis"] == trips

        well()
        server.kill()
        given_up(1)
        server.start()  # empty
        well()
        server.client().save()
        server.kill()
        given_up(2)
        server.start()  # with all it had
        while server.client().info("persistence")["loading"]:
            time.sleep(0.01)
        engine.wait_until_well()
        found, _ = ask(engine, expected)
        assert found["lmkv_hit_tokens:redis"] == HIT
        server.stop()
        given_up(3)
        server.go_on()
        well()

        client = server.client()
        client.flushall()  # the engine believes that all is there
        flushed, _ = ask(engine, expected)
        assert flushed["lmkv_hit_tokens:redis"] == 0
        assert flushed["lmkv_misses:miss"] > 0
        well()

        names = {name: client.get(name) for name in client.scan_iter("lmkv:*")}
        damaged = sorted(names)[3]
        client.set(damaged, bytes(len(names[damaged])))
        found, _ = ask(engine, expected)
        assert found["lmkv_misses:corrupt"] == 1
        assert found["lmkv_tier_events:redis:corrupt"] <= 1  # read once a second
        assert found["lmkv_hit_tokens:redis"] < HIT and found["lmkv_hit_tokens:redis"] % BLOCK == 0
        well()

        client.setrange(damaged, 2**30 - 1, b"x")
        ask(engine, expected)
        client.delete(damaged)
        well()

        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        client.flushall()
        engine.wait_until_well()
        full, _ = ask(engine, expected)
        assert full["lmkv_skipped_stores:rejected"] > 0 or full["lmkv_stored_chunks:redis"] == CHUNKS
        client.config_set("maxmemory", "3gb")
        well()


def test_a_server_that_trickles_and_one_that_evicts_at_random(
    start: Any, expected: Any, server: Server
) -> None:
    proxy = Proxy(server.port)
    lmkv = settings(server) | {"redis": {"url": f"redis://127.0.0.1:{proxy.port}/0"}}
    with start(MODEL, lmkv, **OPTIONS) as engine, contextlib.closing(proxy):
        same(engine.generate([IDS]), expected)
        found, _ = ask(engine, expected)
        assert found["lmkv_hit_tokens:redis"] == HIT
        client = server.client()
        connections, memory = len(client.client_list()), resident_bytes(engine)

        proxy.slow.set()  # a byte per 50 ms
        first, _ = ask(engine, expected)
        assert first["lmkv_hit_tokens:redis"] == 0 and first["lmkv_misses:unavailable"] <= HIT // BLOCK
        assert engine.counters()["lmkv_breaker_trips:redis"] == 1
        for _ in range(2):
            later, steps = ask(engine, expected)
            assert steps == STEPS and later["lmkv_hit_tokens:redis"] == 0
        proxy.slow.clear()
        engine.wait_until_well()
        found, _ = ask(engine, expected)
        assert found["lmkv_hit_tokens:redis"] == HIT

        client.config_set("maxmemory-policy", "allkeys-random")
        for _ in range(5):
            limit = client.info("memory")["used_memory"]
            while client.dbsize() == CHUNKS:
                limit -= 4096
                client.config_set("maxmemory", limit)
            left = client.dbsize()
            client.config_set("maxmemory", "3gb")
            found, _ = ask(engine, expected)
            hits = found["lmkv_hit_tokens:redis"]
            assert hits % BLOCK == 0 and hits <= left * BLOCK
            assert found["lmkv_misses:miss"] > 0 or hits == HIT  # the chunk of the answer is not asked for
            engine.flush()
            assert client.dbsize() == CHUNKS  # what was lost was computed and stored again
        # No connection is left behind by what was given up, nor memory.
        assert len(client.client_list()) <= connections + 1
        assert resident_bytes(engine) < memory + (64 << 20)


def resident_bytes(engine: Any) -> int:
    status = Path("/proc", str(engine.child.pid), "status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10


def test_a_cluster_that_is_resharded_below_a_running_engine(
    start: Any, expected: Any, tmp_path: Path
) -> None:
    with cluster(tmp_path) as servers, start(MODEL, settings(servers[2]), **OPTIONS) as engine:
        same(engine.generate([IDS]), expected)
        found, _ = ask(engine, expected)
        assert found["lmkv_hit_tokens:redis"] == HIT
        assert sum(server.client().dbsize() for server in servers) == CHUNKS
        clients = [server.client() for server in servers]
        source = next(client for client in clients if client.dbsize())
        target, port = next(
            (client, server.port)
            for client, server in zip(clients, servers, strict=True)
            if client is not source
        )
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (source, target)]
        for name in list(source.scan_iter("lmkv:*}")):
            slot = source.execute_command("CLUSTER KEYSLOT", name)
            target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
            source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", name)
            asked, _ = ask(engine, expected)  # ASK
            assert asked["lmkv_hit_tokens:redis"] == HIT
            for client in clients:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        moved, _ = ask(engine, expected)  # MOVED
        assert moved["lmkv_hit_tokens:redis"] == HIT
        assert source.dbsize() == 0


def test_version_6_and_its_password(start: Any, expected: Any, tmp_path: Path) -> None:
    files = {word: tmp_path / word for word in ("falsch", "geheim")}
    for word, file in files.items():
        file.write_text(word)
        file.chmod(0o600)
    with running(tmp_path / "redis", kind="redis-6", requirepass="geheim") as old:
        with pytest.raises(EngineError, match=r"\[redis\] password.*Fix: ") as refused:
            start(MODEL, settings(old, password_file=str(files["falsch"])), **OPTIONS)
        assert "the server refuses the login" in str(refused.value)
        with start(MODEL, settings(old, password_file=str(files["geheim"])), **OPTIONS) as engine:
            same(engine.generate([IDS]), expected)
            found, _ = ask(engine, expected)
        assert found["lmkv_hit_tokens:redis"] == HIT


@pytest.mark.parametrize("shared", ["redis", "file"])
def test_one_engine_prefills_for_another(
    start: Any, reference: Any, expected: Any, server: Server, tmp_path: Path, shared: str
) -> None:
    lmkv = settings(server)
    if shared == "file":
        lmkv = {"host": lmkv["host"], "file": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}}
    roles = [{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}]
    with (
        start(MODEL, lmkv, transfer=roles[0], **OPTIONS) as producer,
        start(MODEL, lmkv, transfer=roles[1], **OPTIONS) as consumer,
    ):
        with consumer.counting() as counted:
            # It is asked before the other has begun.
            request = consumer.submit(IDS, transfer={"lmkv_wait_ms": 50_000})
            assert consumer.run(max_steps=50) == 50
            # Passed on by a careless proxy, the same words do not make the one wait that prefills.
            prefill = producer.submit(IDS, 1, transfer={"lmkv_wait_ms": 50_000})
            producer.run()
            producer.answer(prefill)
            producer.flush()
            consumer.run()
            same([consumer.answer(request)], expected)
        assert counted[f"lmkv_hit_tokens:{shared}"] == HIT
        if shared == "redis":
            same([read_again(producer, consumer, server)], reference(MODEL, [prompt(9, 330)], **OPTIONS))
        # Nobody prefills: it waits once, then computes. What is no number of milliseconds counts as none.
        producer.kill()
        for seed, wait_ms in enumerate((300, "soon", -1, True, 1e9, None), 2):
            ids = prompt(seed, 330)
            with consumer.counting() as alone:
                request = consumer.submit(ids, transfer={"lmkv_wait_ms": wait_ms})
                steps = consumer.run()
                same([consumer.answer(request)], reference(MODEL, [ids], **OPTIONS))
            assert alone[f"lmkv_hit_tokens:{shared}"] == 0
            if shared == "file":  # a server is asked in any case, which takes a step or more
                assert (steps > STEPS) == (wait_ms == 300)


def read_again(producer: Any, consumer: Any, server: Server) -> dict[str, Any]:
    """The answer to a request that waits, whose chunks are there and cannot be read at first."""

    def asked() -> int:
        return int(server.client().info("commandstats").get("cmdstat_exists", {"calls": 0})["calls"])

    prefill = producer.submit(prompt(9, 330), 1)
    producer.run()
    producer.answer(prefill)
    producer.flush()
    with consumer.counting() as counted:
        before = asked()
        request = consumer.submit(prompt(9, 330), transfer={"lmkv_wait_ms": 50_000})
        consumer.step()
        while asked() == before:
            time.sleep(0.01)
        server.stop()
        while consumer.counters().get("lmkv_misses:unavailable", 0) == 0:
            assert consumer.run(max_steps=5) == 5
        server.go_on()
        consumer.run()
    assert counted["lmkv_hit_tokens:redis"] == HIT
    return dict(consumer.answer(request))


def test_a_role_without_a_shared_tier_is_refused(start: Any) -> None:
    with pytest.raises(EngineError, match=r"kv_role: kv_producer hands KV from one engine to another"):
        start(MODEL, {"host": {"capacity": "64MiB"}}, transfer={"kv_role": "kv_producer"}, **OPTIONS)
