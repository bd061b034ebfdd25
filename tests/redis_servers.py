"""Real Redis servers on loopback for tests, and a proxy that makes one slow."""

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.processes import die_with_parent
from tools import redis_server

START_TIMEOUT_S = 30
#: Of the servers of which a test does not say what they are. "valkey" runs all tests with Valkey.
KIND = os.environ.get("LMKV_TEST_REDIS", "redis-server")


def free_port() -> int:
    """One that is free together with the port 10,000 above it, where a node of a cluster listens too.

    None of those that the system gives to connections by itself.
    """
    while True:
        port = random.randrange(11_000, 22_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


class Server:
    """One server. `kind`: the distribution's redis-server, or one of `redis_server.SHIPPED`; `options`: its
    settings, such as `maxmemory="128mb"`."""

    def __init__(self, directory: Path, *, kind: str = KIND, port: int | None = None, **options: str) -> None:
        found = redis_server.find(kind) if kind == "redis-server" else redis_server.shipped(kind)
        if found is None:
            pytest.skip(f"no {kind} here")
        program, environment = found
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "dir": str(directory)}
        self.options |= {"repl-diskless-sync-delay": "0"}  # else a replica waits for others for 5 s
        self.options |= {name.replace("_", "-"): value for name, value in options.items()}
        self._command = [program]
        for name, value in self.options.items():
            self._command += [f"--{name}", *(value.split() if value else [""])]
        self._environment = os.environ | environment
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        self.wait()

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=START_TIMEOUT_S, **options)

    def wait(self) -> None:
        """Until it takes connections."""
        deadline = time.monotonic() + START_TIMEOUT_S
        port = int(self.options.get("tls-port", self.port))
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((self.directory / "log").read_text()[-2000:])
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it where it is; it keeps its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class SentinelServer(Server):
    """A Sentinel that watches one master as `main`: the same program, with a file that it writes to."""

    def __init__(self, directory: Path, master: Server) -> None:
        found = redis_server.find(KIND) if KIND == "redis-server" else redis_server.shipped(KIND)
        assert found is not None  # the master runs
        directory.mkdir()
        self.directory, self.port, self.options = directory, free_port(), {}
        settings = directory / "sentinel.conf"
        settings.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n"
        )
        self._command = [found[0], str(settings), "--sentinel"]
        self._environment = os.environ | found[1]
        self.start()


class Proxy:
    """Passes bytes between its clients and a server; what the server sends trickles while `slow`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.slow = threading.Event()
        #: Changes what the server sends while it is set.
        self.garble: random.Random | None = None
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with (
            client,
            socket.create_connection(("127.0.0.1", self._target)) as server,
            contextlib.suppress(OSError),
        ):
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 if ready is server and self.slow.is_set() else 1 << 16)
                    if not data:
                        return
                    if ready is server and self.slow.is_set():
                        time.sleep(0.05)
                    if ready is server and self.garble is not None:
                        data = garbled(data, self.garble)
                    (client if ready is server else server).sendall(data)

    def close(self) -> None:
        self._closed = True
        self._listener.close()


def garbled(data: bytes, chance: random.Random) -> bytes:
    """Once in four times with a byte changed, or some bytes lost or added, mostly near the beginning."""
    at = chance.randrange(min(len(data), chance.choice([8, 300, 1 << 20])))
    some = chance.randbytes(chance.choice([1, 2, 9]))
    match chance.randrange(12):
        case 0:
            return data[:at] + some[:1] + data[at + 1 :]
        case 1:
            return data[:at] + data[at + len(some) :]
        case 2:
            return data[:at] + some + data[at:]
        case _:
            return data


@contextlib.contextmanager
def running(directory: Path, **options: Any) -> Iterator[Server]:
    """A server that ends with the block."""
    server = Server(directory, **options)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def cluster(directory: Path, nodes: int = 3, node_timeout_ms: int = 2000) -> Iterator[list[Server]]:
    """A cluster whose slots are spread evenly, without replicas."""
    tool = redis_server.find("redis-cli")
    if tool is None:
        pytest.skip("no redis-cli here")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                running(
                    directory / f"node{number}",
                    cluster_enabled="yes",
                    cluster_config_file="nodes.conf",
                    cluster_node_timeout=str(node_timeout_ms),
                )
            )
            for number in range(nodes)
        ]
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        create = [tool[0], "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(create, env=os.environ | tool[1], check=True, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(s.client().execute_command("CLUSTER INFO")["cluster_state"] == "ok" for s in servers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield servers


def certificates(directory: Path) -> dict[str, Path]:
    """An authority, certificates that it signed, and another authority; the files by name."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    directory.mkdir(parents=True, exist_ok=True)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    def made(name: str, suffix: str) -> tuple[str, ...]:
        return (
            *curve,
            "-subj",
            f"/CN={name}",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.{suffix}",
        )

    def signed(name: str, alternative: str, days: str = "2") -> None:
        run("req", *made(name, "csr"))
        (directory / f"{name}.ext").write_text(f"subjectAltName={alternative}\n")
        issuer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", days)
        run("x509", "-req", "-in", f"{name}.csr", *issuer, "-extfile", f"{name}.ext", "-out", f"{name}.pem")

    for authority in ("ca", "stranger"):
        run("req", "-x509", "-days", "2", *made(authority, "pem"))
    signed("server", "IP:127.0.0.1")
    signed("elsewhere", "DNS:example.org")
    signed("expired", "IP:127.0.0.1", days="-1")
    signed("client", "DNS:client")
    return {path.name: path for path in directory.iterdir()}
