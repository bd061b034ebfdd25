"""The Redis tier on real servers: the conformance suite, and what servers and neighbours do to it."""

import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from lmkv.backends.redis import RedisTier
from lmkv.backends.servers import MAX_IDLE, Address, Servers
from lmkv.config import Config, ConfigError, RedisConfig, Size, Url, load
from lmkv.record import HEADER_BYTES
from lmkv.testing import TierConformance, chunk_bytes, chunk_key, run_threads
from lmkv.tier import Status, Tier, Unavailable
from tests.redis_servers import (
    KIND,
    Proxy,
    SentinelServer,
    Server,
    certificates,
    cluster,
    free_port,
    running,
)

PART = 64 * 2**10
ROOT = Path(__file__).resolve().parent.parent


def settings(url: str, **more: Any) -> RedisConfig:
    return load({"redis": {"url": url, "part_size": PART, **more}}, {}).redis


def open_tier(server: Server, **more: Any) -> RedisTier:
    return RedisTier(settings(server.url, **more))


def chunks(count: int, length: int = 3 * PART + 5, first: int = 0) -> dict[bytes, bytes]:
    """Several parts each, and a last one that is not whole."""
    return {(key := chunk_key(i)): chunk_bytes(key, length) for i in range(first, first + count)}


def put(tier: Tier, wanted: dict[bytes, bytes]) -> list[Status]:
    return tier.put(list(wanted), [memoryview(content) for content in wanted.values()])


def get(tier: Tier, wanted: dict[bytes, bytes]) -> list[Status]:
    """The statuses; what is OK has the right bytes."""
    buffers = [memoryview(bytearray(len(content))) for content in wanted.values()]
    statuses = tier.get(list(wanted), buffers)
    for content, buffer, status in zip(wanted.values(), buffers, statuses, strict=True):
        assert status is not Status.OK or buffer == content
    return statuses


def all_of(status: Status, wanted: dict[bytes, bytes]) -> list[Status]:
    return [status] * len(wanted)


def set_deadline(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("lmkv.backends.redis.DEADLINE_S", seconds)
    monkeypatch.setattr("lmkv.backends.servers.CONNECT_S", seconds)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine is no dead server."""
    set_deadline(monkeypatch, 20.0)


@pytest.fixture(scope="class")
def shared_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    limits = {"maxmemory": "64mb", "maxmemory_policy": "allkeys-lru"}
    with running(tmp_path_factory.mktemp("redis"), kind=request.cls.kind, **limits) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "server", maxmemory="1gb", maxmemory_policy="allkeys-lru") as server:
        yield server


class Conformance(TierConformance):
    """On one server for all tests; each directory of a test is a new beginning."""

    counts_chunks = False
    #: jemalloc's classes are an eighth apart at most, and a name has 150 bytes.
    overhead_bytes_per_chunk = 80 * 2**10
    part_bytes = PART
    kind = KIND
    server: Server

    @pytest.fixture(autouse=True)
    def _server(self, shared_server: Server) -> None:
        type(self).server = shared_server

    def make_tier(self, tmp_path: Path) -> RedisTier:
        if not (tmp_path / "begun").exists():
            (tmp_path / "begun").touch()
            self.server.client().flushall()
        return open_tier(self.server, part_size=self.part_bytes)

    def damage(self, tier: Tier, tmp_path: Path) -> None:
        client = self.server.client()
        for name in client.scan_iter("lmkv:*}"):
            value = bytearray(client.get(name))
            value[random.randrange(len(value))] ^= 1 << random.randrange(8)
            client.set(name, bytes(value))


class TestParts(Conformance):
    """Chunks above 64 KiB in several values."""

    def test_reopen_after_eviction(self, tmp_path: Path) -> None:
        pytest.skip("the server evicts single parts, which a lookup does not see; tested below")


class TestWhole(Conformance):
    """Each chunk in one value, on a server of version 6."""

    part_bytes = 4 * 2**20
    kind = "redis-6"


class TestValkey(TestWhole):
    """The same on Valkey."""

    kind = "valkey"


# --- sharing


def test_what_one_process_stored_another_finds_once(server: Server) -> None:
    first, second = open_tier(server), open_tier(server)
    wanted = chunks(5)
    assert put(first, wanted) == all_of(Status.OK, wanted)
    assert second.contains(list(wanted)) == [True] * 5
    assert put(second, wanted) == all_of(Status.OK, wanted)
    assert get(second, wanted) == all_of(Status.OK, wanted)
    assert first.stats().counters["put_chunks"] == second.stats().counters["put_dedup"] == 5
    assert second.stats().counters["written_bytes"] == 0
    assert server.client().dbsize() == 5 * 4
    length = 3 * PART + 5
    space = next(iter(wanted))[:32].hex()
    assert second.usage() == {space: (5, 5 * (length + HEADER_BYTES))}
    first.close()
    second.close()


def test_threads_that_store_the_same_chunks_send_them_once(server: Server) -> None:
    tier = open_tier(server)
    wanted = chunks(8)
    barrier = threading.Barrier(4)

    def store() -> None:
        barrier.wait()
        assert put(tier, wanted) == all_of(Status.OK, wanted)

    run_threads([store] * 4)
    assert tier.stats().counters["put_chunks"] == 8
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()


def test_processes_that_store_the_same_chunks_leave_one_good_copy(server: Server) -> None:
    code = (
        "from tests.test_redis_tier import *\n"
        f"tier = RedisTier(settings({server.url!r})); wanted = chunks(40)\n"
        "print(flush=True); input(); assert put(tier, wanted) == all_of(Status.OK, wanted)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    children = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(3)]  # type: ignore[call-overload]  # keywords in a dict
    for child in children:
        child.stdout.readline()
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    assert [child.wait() for child in children] == [0, 0, 0]
    tier = open_tier(server)
    assert get(tier, chunks(40)) == all_of(Status.OK, chunks(40))
    assert server.client().dbsize() == 40 * 4
    tier.close()


def test_another_part_size_is_a_miss_and_destroys_nothing(server: Server) -> None:
    ours, theirs = open_tier(server), open_tier(server, part_size=2 * PART)
    wanted = chunks(3)
    put(ours, wanted)
    assert get(theirs, wanted) == all_of(Status.MISS, wanted)
    assert theirs.stats().counters["part_size_differs"] == 3
    assert get(ours, wanted) == all_of(Status.OK, wanted)
    assert theirs.remove(list(wanted)) == all_of(Status.OK, wanted)
    assert server.client().dbsize() == 0
    ours.close()
    theirs.close()


def test_roles(server: Server) -> None:
    writer, reader = open_tier(server), open_tier(server, role="read_only")
    wanted, more = chunks(2), chunks(2, first=10)
    put(writer, wanted)
    assert put(reader, wanted | more) == [Status.OK] * 2 + [Status.REJECTED] * 2
    assert get(reader, wanted) == all_of(Status.OK, wanted)
    assert server.client().dbsize() == 8
    writer.close()
    reader.close()


def test_chunks_expire(server: Server) -> None:
    tier = open_tier(server, ttl="1h")
    put(tier, chunks(1))
    client = server.client()
    assert all(3500 < client.ttl(name) <= 3600 for name in client.scan_iter("lmkv:*"))
    for name in client.scan_iter("lmkv:*"):
        client.pexpire(name, 1)
    time.sleep(0.01)
    assert get(tier, chunks(1)) == [Status.MISS]
    tier.close()


# --- what others do to our values


def test_a_part_that_the_server_evicted_is_a_miss_and_the_chunk_can_be_stored_again(server: Server) -> None:
    tier = open_tier(server)
    wanted = chunks(4)
    client = server.client()
    for evicted in (b":1", b":3", b"}"):
        assert put(tier, wanted) == all_of(Status.OK, wanted)
        before = tier.stats().counters
        gone = [name for name in client.scan_iter("lmkv:*") if name.endswith(evicted)][:2]
        client.delete(*gone)
        assert get(tier, wanted).count(Status.MISS) == 2
        assert tier.contains(list(wanted)).count(True) == 2
        assert tier.stats().counters["parts_missing"] - before["parts_missing"] == 2
        assert tier.stats().counters["corrupt"] == 0
    assert put(tier, wanted) == all_of(Status.OK, wanted)
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    # Who only writes heals it too: its readers may not.
    client.delete(*gone)
    assert put(tier, wanted) == all_of(Status.OK, wanted)
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()


def test_all_of_it_flushed_between_lookup_and_load(server: Server) -> None:
    tier = open_tier(server)
    wanted = chunks(3)
    put(tier, wanted)
    assert tier.contains(list(wanted)) == [True] * 3
    server.client().flushall()
    assert get(tier, wanted) == all_of(Status.MISS, wanted)
    assert tier.stats().counters["parts_missing"] == 0
    tier.close()


@pytest.mark.parametrize(
    "value", [b"", b"x", bytes(HEADER_BYTES), bytes(2 * PART), os.urandom(HEADER_BYTES + PART)], ids=len
)
@pytest.mark.parametrize("part", [b"}", b":2"])
def test_garbage_in_place_of_a_value(server: Server, value: bytes, part: bytes) -> None:
    tier = open_tier(server)
    wanted = chunks(3)
    put(tier, wanted)
    client = server.client()
    name = sorted(name for name in client.scan_iter("lmkv:*") if name.endswith(part))[1]
    client.set(name, value)
    assert sorted(get(tier, wanted)) == [Status.OK, Status.OK, Status.CORRUPT]
    assert tier.stats().counters["corrupt"] == 1
    assert tier.contains(list(wanted)).count(True) == 2
    assert put(tier, wanted) == all_of(Status.OK, wanted)
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()


def test_a_value_of_another_type(server: Server) -> None:
    tier = open_tier(server)
    wanted = chunks(1, length=100)
    put(tier, wanted)
    client = server.client()
    (name,) = client.scan_iter("lmkv:*")
    client.delete(name)
    client.rpush(name, "x")
    assert get(tier, wanted) == [Status.CORRUPT]
    assert put(tier, wanted) == [Status.OK]
    tier.close()


def test_a_gigabyte_under_our_name_is_not_read(tmp_path: Path) -> None:
    with running(tmp_path / "server", maxmemory="3gb", proto_max_bulk_len="2gb") as server:
        tier = open_tier(server)
        wanted = chunks(2, length=PART)
        put(tier, wanted)
        client = server.client()
        name = next(client.scan_iter("lmkv:*"))
        client.setrange(name, 2**30 - 1, b"x")
        peak = peak_bytes()
        statuses = get(tier, wanted)
        assert Status.OK not in statuses[statuses.index(Status.UNAVAILABLE) :]
        assert peak_bytes() - peak < 32 * 2**20
        client.delete(name)
        assert sorted(get(tier, wanted)) == [Status.OK, Status.MISS]
        tier.close()


def peak_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def test_a_full_server_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    with running(tmp_path / "server", maxmemory="4mb", maxmemory_policy="noeviction") as server:
        tier = open_tier(server)
        wanted = chunks(30)
        statuses = [put(tier, {key: content})[0] for key, content in wanted.items()]
        assert set(statuses) == {Status.OK, Status.REJECTED}
        assert tier.stats().counters["server_full"] == statuses.count(Status.REJECTED)
        assert [s is Status.OK for s in get(tier, wanted)] == [s is Status.OK for s in statuses]
        # Of no refused chunk is a part there.
        assert server.client().dbsize() == 4 * statuses.count(Status.OK)
        tier.close()


def test_a_server_that_evicts_at_random(tmp_path: Path) -> None:
    with running(tmp_path / "server", maxmemory="11mb", maxmemory_policy="allkeys-random") as server:
        tier = open_tier(server)
        wanted = chunks(60)
        assert set(put(tier, wanted)) <= {Status.OK, Status.REJECTED}
        first = get(tier, wanted)
        assert set(first) <= {Status.OK, Status.MISS} and Status.OK in first and Status.MISS in first
        assert tier.stats().counters["parts_missing"] > 0
        assert get(tier, wanted).count(Status.OK) == tier.contains(list(wanted)).count(True)
        tier.close()


# --- servers that die, hang or crawl


def assert_dead(tier: RedisTier, wanted: dict[bytes, bytes]) -> None:
    assert get(tier, wanted) == all_of(Status.UNAVAILABLE, wanted)
    assert put(tier, chunks(2, first=50)) == [Status.UNAVAILABLE] * 2
    assert tier.remove(list(wanted)) == all_of(Status.UNAVAILABLE, wanted)
    with pytest.raises(Unavailable):
        tier.contains(list(wanted))


def test_killed_and_restarted_empty(server: Server) -> None:
    tier = open_tier(server)
    wanted = chunks(3)
    put(tier, wanted)
    server.kill()
    assert_dead(tier, wanted)
    server.start()
    assert get(tier, wanted) == all_of(Status.MISS, wanted)
    assert put(tier, wanted) == all_of(Status.OK, wanted)
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()


def test_killed_and_restarted_with_what_it_had(tmp_path: Path) -> None:
    with running(tmp_path / "server", appendonly="yes", appendfsync="always") as server:
        tier = open_tier(server)
        wanted = chunks(3)
        put(tier, wanted)
        server.kill()
        assert_dead(tier, wanted)
        server.start()
        deadline = time.monotonic() + 30
        while get(tier, wanted) != all_of(Status.OK, wanted):  # it loads its file first, and says so
            assert time.monotonic() < deadline
        tier.close()


def test_a_restart_between_two_calls_goes_unnoticed(server: Server) -> None:
    tier = open_tier(server)
    put(tier, chunks(1))
    server.kill()
    server.start()
    assert put(tier, chunks(1)) == [Status.OK]
    assert tier.stats().counters["io_errors"] == 0
    tier.close()


def test_a_stopped_server_is_given_up_and_taken_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(server)
    wanted = chunks(3)
    put(tier, wanted)
    server.stop()
    set_deadline(monkeypatch, 0.3)
    try:
        assert_dead(tier, wanted)
        assert tier.stats().counters["timeouts"] > 0
    finally:
        server.go_on()
    set_deadline(monkeypatch, 20.0)
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()


def test_a_reply_that_trickles_in_is_given_up_at_the_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(server.port)
    tier = RedisTier(settings(f"redis://127.0.0.1:{proxy.port}/0"))
    wanted = chunks(2)
    assert put(tier, wanted) == all_of(Status.OK, wanted)
    proxy.slow.set()
    set_deadline(monkeypatch, 0.3)
    # A byte every 50 ms: no single receive ever times out.
    assert get(tier, wanted) == all_of(Status.UNAVAILABLE, wanted)
    with pytest.raises(Unavailable):
        tier.contains([chunk_key(i) for i in range(100)])
    assert tier.stats().counters["timeouts"] >= 2
    proxy.slow.clear()
    set_deadline(monkeypatch, 20.0)
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()
    proxy.close()


def test_a_server_that_is_down_at_the_start_is_used_when_it_comes(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    tier = open_tier(server)
    assert "does not answer yet" in caplog.text
    assert_dead(tier, chunks(1))
    server.start()
    assert put(tier, chunks(1)) == [Status.OK]
    assert get(tier, chunks(1)) == [Status.OK]
    tier.close()


def test_replies_are_never_taken_for_anothers(server: Server) -> None:
    """Connections are cut at random while threads read chunks of equal length."""
    tier = open_tier(server)
    wanted = chunks(16)
    put(tier, wanted)
    done = threading.Event()

    def cut() -> None:
        client = server.client()
        try:
            for _ in range(60):
                client.client_kill_filter(_type="normal", skipme=True)
                time.sleep(0.005)
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            assert set(get(tier, wanted)) <= {Status.OK, Status.UNAVAILABLE}

    run_threads([cut, read, read, read])
    assert tier.stats().counters["corrupt"] == 0
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()


def test_connections_and_threads_are_bounded_and_given_back(server: Server) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    tier = open_tier(server)
    wanted = chunks(2)
    run_threads([lambda: (put(tier, wanted), get(tier, wanted), None)[2]] * 24)
    assert len(server.client().client_list()) <= MAX_IDLE + 1
    tier.close()
    deadline = time.monotonic() + 30
    while threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > files + 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_forked_child_uses_connections_of_its_own(server: Server) -> None:
    tier = open_tier(server)
    wanted = chunks(4)
    put(tier, wanted)
    child = os.fork()
    if child == 0:
        os._exit(0 if get(tier, wanted) == all_of(Status.OK, wanted) else 1)
    for _ in range(50):
        assert get(tier, wanted) == all_of(Status.OK, wanted)
    assert os.waitpid(child, 0)[1] == 0
    tier.close()


def test_garbled_replies_are_never_served(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are changed, lost or added on the way from the server."""
    set_deadline(monkeypatch, 0.05)
    proxy = Proxy(server.port)
    tier = RedisTier(settings(f"redis://127.0.0.1:{proxy.port}/0"))
    wanted = chunks(3)
    keys = list(wanted)
    assert put(tier, wanted) == all_of(Status.OK, wanted)
    proxy.garble = random.Random(1)
    outcomes = set()
    for turn in range(300):
        outcomes.update(get(tier, wanted))  # looks at the bytes of what is OK
        tier.put([chunk_key(turn % 7 + 100)], [memoryview(bytes(100))])
        tier.remove([chunk_key(turn % 7 + 100)])
        with contextlib.suppress(Unavailable):
            assert len(tier.contains(keys)) == 3
    assert outcomes >= {Status.OK, Status.UNAVAILABLE, Status.CORRUPT}
    proxy.garble = None
    set_deadline(monkeypatch, 20.0)
    assert put(tier, wanted) == all_of(Status.OK, wanted)
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    tier.close()
    proxy.close()


MALFORMED = [
    *(
        b":x\r\n",
        b"$9999999999999\r\n",
        b"$x\r\n",
        b"?\r\n",
        b"\r\n",
        b"-\r\n",
        b"+OK\r\n",
        b"*-1\r\n",
        b"$-1\r\n",
    ),
    *(b"-MOVED\r\n", b"-MOVED 1 nowhere:x\r\n", b"-ASK 1 [::\r\n", b"$3\r\nabcde", b"*1\r\n:1\r\n"),
    *(b"*2\r\n" * 99, b"x" * 70_000, b":" + b"9" * 5000 + b"\r\n"),
]


@pytest.mark.parametrize("reply", MALFORMED, ids=range(len(MALFORMED)))
def test_no_reply_is_more_than_an_error(
    server: Server, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_deadline(monkeypatch, 0.05)
    tier = open_tier(server)
    put(tier, chunks(2))
    one = chunks(1, length=10, first=20)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # The next connection is to somebody who knows one answer.
        def answer() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer, contextlib.suppress(OSError):
                    while peer.recv(1 << 16):
                        peer.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        tier._servers._hosts = [Address("127.0.0.1", listener.getsockname()[1])]
        for wanted in (one, chunks(2)):
            assert Status.OK not in get(tier, wanted)
            tier.put(list(wanted), [memoryview(content) for content in wanted.values()])
            tier.remove(list(wanted))
            with contextlib.suppress(Unavailable):
                tier.contains(list(wanted))
        with contextlib.suppress(Unavailable):
            tier.usage(0.05)
        listener.shutdown(socket.SHUT_RDWR)
    tier.close()


def test_a_replica_is_read_and_stores_nothing(tmp_path: Path, server: Server) -> None:
    with running(tmp_path / "replica", replicaof=f"127.0.0.1 {server.port}", maxmemory="100mb") as replica:
        tier, copy = open_tier(server), open_tier(replica)
        wanted = chunks(3)
        put(tier, wanted)
        deadline = time.monotonic() + 30
        while replica.client().dbsize() < 12:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert get(copy, wanted) == all_of(Status.OK, wanted)
        assert put(copy, chunks(1, first=10)) == [Status.REJECTED]
        assert copy.remove(list(wanted)) == all_of(Status.UNAVAILABLE, wanted)
        assert copy.contains(list(wanted)) == [True] * 3
        tier.close()
        copy.close()


def test_what_a_user_of_the_server_needs_to_be_allowed(server: Server) -> None:
    words = "get mget set exists unlink getrange strlen multi exec info scan"
    commands = [f"+{word}" for word in words.split()]
    server.client().acl_setuser("lmkv", True, passwords=["+geheim"], keys=["lmkv:*"], commands=commands)
    config = {"redis": {"url": server.url, "part_size": PART, "username": "lmkv"}}
    tier = RedisTier(load(config, {"LMKV_REDIS_PASSWORD": "geheim"}).redis)
    wanted = chunks(3) | chunks(2, length=10, first=10)
    assert put(tier, wanted) == get(tier, wanted) == all_of(Status.OK, wanted)
    assert tier.contains(list(wanted)) == [True] * 5
    assert sum(count for count, _ in tier.usage().values()) == 5
    server.client().acl_setuser("lmkv", True, commands=["-set"])
    assert put(tier, chunks(1, first=50)) == [Status.REJECTED]
    assert get(tier, wanted) == all_of(Status.OK, wanted)
    assert tier.remove(list(wanted)) == all_of(Status.OK, wanted)
    tier.close()


# --- settings


def test_a_wrong_password_is_refused_and_shown_by_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running(tmp_path / "server", requirepass="geheim") as server:
        tier = RedisTier(load({"redis": {"url": server.url}}, {"LMKV_REDIS_PASSWORD": "geheim"}).redis)
        assert put(tier, chunks(1)) == [Status.OK]
        tier.close()
        (tmp_path / "password").write_text("geheim\nmore\n")
        tier = open_tier(server, password_file=str(tmp_path / "password"))
        assert get(tier, chunks(1)) == [Status.MISS]  # another part size is none of ours
        tier.close()
        inside = {"LMKV_REDIS_URL": f"redis://default:geheim@127.0.0.1:{server.port}/0"}
        tier = RedisTier(load(None, inside).redis)
        assert get(tier, chunks(1)) == [Status.OK]
        tier.close()
        wrong = {"LMKV_REDIS_PASSWORD": "falsch!"}
        for environ in ({}, wrong, wrong | {"LMKV_REDIS_USERNAME": "x"}):
            config = load({"redis": {"url": server.url}}, environ).redis
            message = r"\[redis\] password: the server refuses the login.*Fix: "
            with pytest.raises(ConfigError, match=message) as caught:
                RedisTier(config)
            assert "falsch!" not in str(caught.value) + repr(config)
        server.kill()
        tier = RedisTier(load(None, inside).redis)
        assert get(tier, chunks(1)) == [Status.UNAVAILABLE]
        tier.close()
    assert "geheim" not in caplog.text and "falsch!" not in caplog.text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h:99999/0", "Port"),
        ("redis+sentinel://h:1", "no Sentinel service"),
        ("redis+sentinel://h:x/s/0", "Port"),
    ],
)
def test_a_bad_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[redis\] url: .*{words}"):
        RedisTier(settings(url))


@pytest.mark.skipif(KIND == "valkey", reason="the package's Valkey is built without TLS")
def test_certificates(tmp_path: Path) -> None:
    made = certificates(tmp_path / "tls")

    def tls(name: str, **more: str) -> Any:
        files = {"tls_cert_file": str(made[f"{name}.pem"]), "tls_key_file": str(made[f"{name}.key"])}
        options = {"tls_ca_cert_file": str(made["ca.pem"]), "tls_auth_clients": "no"} | files | more
        port = {"tls_port": str(free)}
        return running(tmp_path / name, port=0, **options, **port)

    ca = {"ca_file": str(made["ca.pem"])}
    wanted = chunks(3)
    free = free_port()
    url = f"rediss://127.0.0.1:{free}/0"
    with tls("server"):
        tier = RedisTier(settings(url, **ca))
        assert put(tier, wanted) == get(tier, wanted) == all_of(Status.OK, wanted)
        tier.close()
        with pytest.raises(ConfigError, match=r"\[redis\] ca_file: .*not trusted"):
            RedisTier(settings(url, ca_file=str(made["stranger.pem"])))
        with pytest.raises(ConfigError, match=r"\[redis\] ca_file: .*not trusted"):
            RedisTier(settings(url))
    free = free_port()
    url = f"rediss://127.0.0.1:{free}/0"
    with tls("elsewhere"):
        with pytest.raises(ConfigError, match=r"\[redis\] url: .*for another host"):
            RedisTier(settings(url, **ca))
        tier = RedisTier(settings(url, check_hostname=False, **ca))
        assert put(tier, chunks(1)) == [Status.OK]
        tier.close()
    free = free_port()
    url = f"rediss://127.0.0.1:{free}/0"
    with tls("expired"), pytest.raises(ConfigError, match=r"\[redis\] ca_file: .*not trusted.*expired"):
        RedisTier(settings(url, **ca))
    free = free_port()
    url = f"rediss://127.0.0.1:{free}/0"
    with tls("server", tls_auth_clients="yes"):
        with pytest.raises(ConfigError, match=r"\[redis\] cert_file: the server refuses the client"):
            RedisTier(settings(url, **ca))
        client = {"cert_file": str(made["client.pem"]), "key_file": str(made["client.key"])}
        tier = RedisTier(settings(url, **ca, **client))
        assert put(tier, wanted) == get(tier, wanted) == all_of(Status.OK, wanted)
        tier.close()
    files = {name: str(path) for name, path in made.items()}
    for setting, wrong in (
        ("cert_file", {"cert_file": files["client.csr"]}),
        ("cert_file", {"cert_file": files["client.pem"], "key_file": files["server.key"]}),
        ("cert_file", {"cert_file": files["client.pem"]}),
        ("ca_file", {"ca_file": files["client.key"]}),
        ("key_file", {"key_file": files["client.key"]}),
    ):
        with pytest.raises(ConfigError, match=rf"\[redis\] {setting}: .*Fix: "):
            RedisTier(settings(url, **wrong))
    with pytest.raises(ConfigError, match=r"\[redis\] ca_file: set, but the URL does not ask for TLS"):
        RedisTier(settings("redis://127.0.0.1/0", **ca))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxmemory": "100mb", "maxmemory_policy": "noeviction"}, "once full it stores no more"),
        ({"maxmemory": "100mb", "maxmemory_policy": "volatile-lru"}, "set [redis] ttl"),
        ({}, "has no maxmemory"),
    ],
)
def test_how_the_server_evicts_is_looked_at(
    tmp_path: Path, options: dict[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running(tmp_path / "server", **options) as server:
        tier = open_tier(server)
        assert words in caplog.text
        product = "Valkey 9" if KIND == "valkey" else "Redis 7"
        assert f"redis://127.0.0.1:{server.port}/0: {product}" in caplog.text
        assert options.get("maxmemory_policy", "noeviction") in caplog.text
        tier.close()


def test_a_password_over_the_network_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for host, warned in (("127.0.0.1", False), ("localhost", False), ("192.0.2.1", True)):
        caplog.clear()
        config = RedisConfig(url=Url(f"redis://u:geheim@{host}"), part_size=Size(PART))
        Servers(config)
        assert ("crosses the network in plain text" in caplog.text) == warned
        assert "geheim" not in caplog.text


def test_opened_by_the_settings_of_an_engine(server: Server) -> None:
    from lmkv.chain import open_redis

    assert open_redis(Config()) is None
    tier = open_redis(load({"redis": {"url": server.url}}, {}))
    assert tier is not None and tier.info.remote and tier.info.shared
    assert tier.info.capacity_bytes == 2**30
    assert msgspec.structs.asdict(settings(server.url))["part_size"] == PART
    tier.close()


# --- several servers


def test_a_cluster_that_is_resharded_meanwhile(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers:
        tier = open_tier(servers[0])
        wanted = chunks(60)
        assert put(tier, wanted) == all_of(Status.OK, wanted)
        assert min(server.client().dbsize() for server in servers) > 0
        assert get(tier, wanted) == all_of(Status.OK, wanted)
        assert sum(count for count, _ in tier.usage().values()) == 60
        # Half of the slots of the first move to the second, one after the other, while chunks are read.
        source, target = servers[0].client(), servers[1].client()
        names = [name for name in source.scan_iter("lmkv:*}")]
        slots = sorted({source.execute_command("CLUSTER KEYSLOT", name) for name in names})[::2]
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (source, target)]
        for slot in slots:
            target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
            source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            keys = source.execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
            moved = ["MIGRATE", "127.0.0.1", servers[1].port, "", 0, 5000, "KEYS"]
            source.execute_command(*moved, *keys)
            statuses = get(tier, wanted)  # ASK
            assert statuses == all_of(Status.OK, wanted)
            for server in servers:
                server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        assert get(tier, wanted) == all_of(Status.OK, wanted)  # MOVED
        assert tier.stats().counters["redirects"] > 0
        more = chunks(60, first=100)
        assert put(tier, more) == all_of(Status.OK, more)
        assert get(tier, more) == all_of(Status.OK, more)
        assert tier.contains(list(more)) == [True] * 60
        # A dead server costs what it holds.
        servers[2].kill()
        statuses = get(tier, wanted)
        assert set(statuses) == {Status.OK, Status.UNAVAILABLE}
        tier.close()


def test_a_replica_that_takes_over_its_part_of_a_cluster_is_found(tmp_path: Path) -> None:
    options = {"cluster_enabled": "yes", "cluster_config_file": "nodes.conf", "cluster_node_timeout": "1000"}
    with cluster(tmp_path, node_timeout_ms=1000) as servers, running(tmp_path / "spare", **options) as spare:
        tier = open_tier(servers[2])
        wanted = chunks(40)
        assert put(tier, wanted) == all_of(Status.OK, wanted)
        lost = servers[0].client()
        spare.client().execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)
        name = lost.execute_command("CLUSTER MYID")
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(redis.ResponseError):  # it does not know that node yet
                spare.client().execute_command("CLUSTER REPLICATE", name)
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while spare.client().info("replication")["master_link_status"] != "up":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for server in (*servers, spare):  # who did not hear of the others does not vote, or is not voted for
            while True:
                nodes = server.client().execute_command("CLUSTER NODES")
                if len(nodes) == 4 and "slave" in str(nodes.get(f"127.0.0.1:{spare.port}")):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
        servers[0].kill()
        while get(tier, wanted) != all_of(Status.OK, wanted):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        more = chunks(40, first=100)
        assert put(tier, more) == all_of(Status.OK, more)
        tier.close()


def test_sentinel_names_the_master_also_after_a_failover(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with running(tmp_path / "one") as first:
        replica = {"replicaof": f"127.0.0.1 {first.port}"}
        with running(tmp_path / "two", **replica) as second:
            watcher = SentinelServer(tmp_path / "sentinel", first)
            request.addfinalizer(watcher.kill)
            with pytest.raises(ConfigError, match=r"\[redis\] url: .*knows no service 'mian'"):
                RedisTier(settings(f"redis+sentinel://127.0.0.1:{watcher.port}/mian/0"))
            hosts = f"127.0.0.1:{free_port()},127.0.0.1:{watcher.port}"  # the first Sentinel is down
            tier = RedisTier(settings(f"redis+sentinel://{hosts}/main/0"))
            wanted = chunks(3)
            assert put(tier, wanted) == all_of(Status.OK, wanted)
            assert first.client().dbsize() == 12
            deadline = time.monotonic() + 60
            while second.client().dbsize() < 12:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            client = watcher.client()
            while client.execute_command("SENTINEL CKQUORUM main") is None or not client.execute_command(
                "SENTINEL REPLICAS main"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            first.kill()
            while get(tier, wanted) != all_of(Status.OK, wanted):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            more = chunks(2, first=10)
            while put(tier, more) != all_of(Status.OK, more):  # the replica becomes writable last
                assert time.monotonic() < deadline
                time.sleep(0.1)
            tier.close()
