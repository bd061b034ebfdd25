"""The Redis tier against raw sockets that speak to the same server, in the same run.

    python -m benchmarks.redis_tier [--url redis://...] [--sizes 1048576,...] [--json FILE]

Without --url a server is started on loopback. Chunks lie in one slab of huge pages and are moved through
the executor, with the store's numbers of threads and sizes of batches; every chunk read is verified. The
limit does nothing but send commands and receive values of known length into the same memory, with as many
connections, one value at a time (stores: all of a batch at once); it verifies nothing. redis-py, used as its
manual shows, is recorded beside it. They take turns; ratios are medians over the rounds. With two cores the
server has one and the busy thread the other, so the limit beside the same busy thread is recorded too.
"""

import argparse
import contextlib
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import redis

from benchmarks.file_tier import busy_thread, key, median_row, move, slab
from benchmarks.report import Row, write
from lmkv.backends.redis import RedisTier
from lmkv.backends.resp import command
from lmkv.below import READ_THREADS, WRITE_THREADS
from lmkv.executor import ThreadedExecutor
from tools import redis_server

RUNNERS = ("raw", "ours", "redis-py")
LOOKUP_KEYS = 1000
LOOKUP_LIMIT_MS = 1.0
#: The project's bars on the ratios.
BARS = {
    "redis load / raw sockets": 0.9,
    "redis store / raw sockets": 0.9,
    "redis load, busy / idle": 0.75,
    "redis store, busy / idle": 0.75,
}


class Raw:
    """GET and SET with nothing around them, a connection for each thread."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "localhost", parts.port or 6379
        self._local = threading.local()

    def _socket(self) -> socket.socket:
        if not hasattr(self._local, "socket"):
            self._local.socket = socket.create_connection(self._address)
            self._local.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected: socket.socket = self._local.socket
        return connected

    def get(self, keys: list[bytes], buffers: list[memoryview]) -> list[int]:
        """0 for each value received."""
        sock = self._socket()
        for name, buffer in zip(keys, buffers, strict=True):
            sock.sendall(command(b"GET", name))  # asked for at once, they come at half the speed
            head, end = bytearray(len(b"$%d\r\n" % buffer.nbytes)), bytearray(2)
            want = len(head) + buffer.nbytes + len(end)
            # One system call for each value.
            if sock.recvmsg_into([head, buffer, end], 0, socket.MSG_WAITALL)[0] != want or end != b"\r\n":
                raise SystemExit("the server did not answer with the value")
        return [0] * len(keys)

    def put(self, keys: list[bytes], buffers: list[memoryview]) -> list[int]:
        """0 for each value stored."""
        sock = self._socket()
        parts: list[bytes | memoryview] = []
        for name, buffer in zip(keys, buffers, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, buffer.nbytes)
            parts += [head, buffer, b"\r\n"]
        left = sum(memoryview(part).nbytes for part in parts)
        while left:
            sent = sock.sendmsg(parts)
            left -= sent
            while left and sent:
                step = min(sent, memoryview(parts[0]).nbytes)
                parts[0] = memoryview(parts[0])[step:]
                sent -= step
                if not parts[0].nbytes:
                    parts.pop(0)
        self._expect(sock, b"+OK\r\n" * len(keys))
        return [0] * len(keys)

    def _expect(self, sock: socket.socket, reply: bytes) -> None:
        got = sock.recv(len(reply), socket.MSG_WAITALL)
        if got != reply:
            raise SystemExit(f"the server answered {got!r} instead of {reply!r}")


class Client:
    """redis-py, one command a chunk, as its manual shows."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def get(self, keys: list[bytes], buffers: list[memoryview]) -> list[int]:
        """0 for each value received and copied to where it belongs."""
        for name, buffer in zip(keys, buffers, strict=True):
            value: Any = self._client.get(name)
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(value, np.uint8))
        return [0] * len(keys)

    def put(self, keys: list[bytes], buffers: list[memoryview]) -> list[int]:
        """0 for each value stored."""
        for name, buffer in zip(keys, buffers, strict=True):
            self._client.set(name, buffer)
        return [0] * len(keys)

    def remove(self, keys: list[bytes]) -> None:
        """Make room."""
        self._client.delete(*keys)

    def flush(self) -> None:
        """Remove all that is on the server."""
        self._client.flushdb()


@contextlib.contextmanager
def server(url: str | None, room_bytes: int) -> Iterator[str]:
    """The URL of the server to measure, which is started if none is given."""
    if url is not None:
        yield url
        return
    found = redis_server.find("redis-server")
    if found is None:
        raise SystemExit("no redis-server here: install Redis or Valkey, or give --url")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="lmkv-bench-") as directory:
        limits = ["--maxmemory", str(room_bytes), "--maxmemory-policy", "allkeys-lru"]
        settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory, *limits]
        process = subprocess.Popen([found[0], *settings], env=found[1], stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(port=port)
            for _ in range(500):
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    break
                time.sleep(0.01)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def bandwidth(url: str, memory: memoryview, size: int, rounds: int) -> list[Row]:
    """Store and load of chunks of one size."""
    buffers = [memory[i : i + size] for i in range(0, memory.nbytes - size + 1, size)]
    keys = [key(i) for i in range(len(buffers))]
    reads = ThreadedExecutor("read", READ_THREADS, 10_000)
    writes = ThreadedExecutor("write", WRITE_THREADS, 10_000)
    tier, raw, client = RedisTier.open({"url": url}), Raw(url), Client(url)
    store = {
        "ours": lambda: move(tier.put, keys, buffers, writes),
        "raw": lambda: move(raw.put, keys, buffers, writes),
        "redis-py": lambda: move(client.put, keys, buffers, writes),
    }
    load = {
        "ours": lambda: move(tier.get, keys, buffers, reads),
        "raw": lambda: move(raw.get, keys, buffers, reads),
        "redis-py": lambda: move(client.get, keys, buffers, reads),
    }
    remove = {"ours": tier.remove, "raw": client.remove, "redis-py": client.remove}
    samples: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        figures: dict[str, float] = {}
        for who in (*RUNNERS[turn % 3 :], *RUNNERS[: turn % 3]):  # each comes first in turn
            figures[f"{who} store"] = store[who]()
            figures[f"{who} load"] = load[who]()
            if who != "redis-py":
                with busy_thread():
                    figures[f"{who} busy load"] = load[who]()
                    remove[who](keys)
                    figures[f"{who} busy store"] = store[who]()
            remove[who](keys)
        if turn == 0:  # the server's memory and the connections are new
            continue
        for operation in ("store", "load"):
            ours, busy = figures[f"ours {operation}"], figures[f"ours busy {operation}"]
            name = f"redis {operation}"
            samples.setdefault(f"{name} / raw sockets", []).append((ours, figures[f"raw {operation}"]))
            samples.setdefault(f"{name} / redis-py", []).append((ours, figures[f"redis-py {operation}"]))
            samples.setdefault(f"{name}, busy / idle", []).append((busy, ours))
            limit = figures[f"raw busy {operation}"]
            samples.setdefault(f"{name}, busy / raw sockets, busy", []).append((busy, limit))
    if tier.stats().counters["corrupt"] or tier.stats().counters["io_errors"]:
        raise SystemExit(f"chunks were lost: {tier.stats().counters}")
    reads.close(1.0)
    writes.close(1.0)
    tier.close()
    return [median_row(op, size, pairs) for op, pairs in samples.items()]


def lookup(url: str) -> list[Row]:
    """1,000 keys of which every other one is there."""
    tier = RedisTier.open({"url": url})
    keys = [key(i) for i in range(LOOKUP_KEYS)]
    tier.put(keys[::2], [memoryview(bytes(4096))] * len(keys[::2]))

    def ask(times: int) -> float:
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            found = tier.contains(keys)
            taken.append((time.perf_counter() - start) * 1e3)
            assert found == [i % 2 == 0 for i in range(LOOKUP_KEYS)]
        return statistics.median(taken)

    ask(20)
    rows = [("redis contains, 1,000 keys", ask(200))]
    with busy_thread():
        rows.append(("redis contains, 1,000 keys, busy", ask(50)))
    tier.remove(keys)
    tier.close()
    return [Row(op, 4096, taken, "ms", LOOKUP_LIMIT_MS, taken / LOOKUP_LIMIT_MS) for op, taken in rows]


def judge(row: Row) -> str | None:
    """Whether a row meets its bar; None where there is none."""
    if (bar := BARS.get(row.op)) is not None:
        met = "met" if row.ratio >= bar else "MISSED"
        return f"{met}: {row.op}, {row.size_bytes} bytes: {row.ratio:.2f}, at least {bar}"
    if row.op == "redis contains, 1,000 keys":
        return f"{'met' if row.ratio <= 1 else 'MISSED'}: {row.op} {row.value:.2f} ms, at most {row.limit}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="of a server without password; default: one is started")
    parser.add_argument("--sizes", default="1048576,2097152,4194304", help="chunk sizes in bytes")
    parser.add_argument("--total", type=int, default=512 * 2**20, help="bytes moved per round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, default=Path("build/bench/redis_tier.json"))
    args = parser.parse_args()
    rows: list[Row] = []
    with server(args.url, 4 * args.total) as url:
        memory = slab(args.total)
        for size in map(int, args.sizes.split(",")):
            rows += bandwidth(url, memory, size, args.rounds)
        rows += lookup(url)
    write(args.json, rows)
    print("\n".join(verdict for row in rows if (verdict := judge(row))))


if __name__ == "__main__":
    main()
