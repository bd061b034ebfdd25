"""The proxy of examples/, in front of two stand-ins for engines that tell what they were asked.

What real engines make of `lmkv_wait_ms` is tested in test_vllm_redis.py.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from queue import Queue
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from examples.pd_proxy import application
from tests.redis_servers import free_port

WAIT_MS = 1234
TIMEOUT_S = 60.0
BODY = {
    "model": "m",
    "prompt": "Who?",
    "max_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@contextlib.contextmanager
def serving(app: FastAPI, port: int) -> Iterator[str]:
    """The URL of an application that runs in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)


class Stub:
    """Stands in for an engine. `asked`: path, body and authorization of each request; a streamed answer ends
    after `go` is set; `left` is set when a client leaves before that."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.port = free_port()
        self.asked: Queue[tuple[str, dict[str, Any], str | None]] = Queue()
        self.status = 200
        self.go = threading.Event()
        self.left = threading.Event()
        for path in ("/v1/completions", "/v1/chat/completions"):
            self.app.post(path)(self._complete)

    async def _complete(self, request: Request) -> Any:
        body = await request.json()
        self.asked.put((request.url.path, body, request.headers.get("authorization")))
        if self.status != 200 or not body["stream"]:
            return JSONResponse({"answer": "whole"}, self.status)

        async def events() -> Any:
            try:
                yield "data: first\n\n"
                while not self.go.is_set():
                    await asyncio.sleep(0.01)
                yield "data: last\n\n"
            except asyncio.CancelledError:
                self.left.set()
                raise

        return StreamingResponse(events(), media_type="text/event-stream")

    def next(self) -> dict[str, Any]:
        """The body of the next request."""
        return self.asked.get(timeout=TIMEOUT_S)[1]

    def running(self) -> contextlib.AbstractContextManager[str]:
        return serving(self.app, self.port)


@pytest.fixture
def prefill() -> Stub:
    return Stub()


@pytest.fixture
def decode() -> Stub:
    return Stub()


@pytest.fixture
def proxy(prefill: Stub, decode: Stub) -> Iterator[httpx.Client]:
    """A client of the proxy. The stand-ins are started by the tests."""
    addresses = [f"http://127.0.0.1:{stub.port}" for stub in (prefill, decode)]
    with (
        serving(application(*addresses, WAIT_MS), free_port()) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
    ],
)
def test_both_are_asked_and_the_answer_is_streamed(
    prefill: Stub, decode: Stub, proxy: httpx.Client, path: str, limit: str
) -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens"} | {limit: 9, "n": 2}
    with prefill.running(), decode.running():
        headers = {"Authorization": "Bearer key"}
        with proxy.stream("POST", path, json=body, headers=headers) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = reply.iter_lines()
            assert next(lines) == "data: first"  # the engine has not written the last yet
            decode.go.set()
            assert [line for line in lines if line] == ["data: last"]
        one_token = {"stream": False, "stream_options": None, "n": 1, "min_tokens": 0, limit: 1}
        waits = {"kv_transfer_params": {"lmkv_wait_ms": WAIT_MS}}
        assert prefill.asked.get(timeout=TIMEOUT_S) == (path, body | one_token, "Bearer key")
        assert decode.asked.get(timeout=TIMEOUT_S) == (path, body | waits, "Bearer key")


def test_nobody_waits_for_a_prefill_engine_that_failed(
    prefill: Stub, decode: Stub, proxy: httpx.Client
) -> None:
    body = BODY | {"stream": False}

    def waited_ms() -> int:
        reply = proxy.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()) == (200, {"answer": "whole"})
        return int(decode.next()["kv_transfer_params"]["lmkv_wait_ms"])

    def until(expected: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while waited_ms() != expected:  # what became of a request is known a moment after it
            assert time.monotonic() < deadline

    with decode.running():
        assert waited_ms() == WAIT_MS  # it is dead, which is not known yet
        until(0)
        with prefill.running():
            until(WAIT_MS)
            prefill.status = 400  # such a request is wrong; the engine is well
            until(WAIT_MS)
            while prefill.asked.qsize():
                prefill.asked.get()
            assert waited_ms() == WAIT_MS
            prefill.next()
            assert waited_ms() == WAIT_MS
            prefill.status = 500
            until(0)


def test_errors_of_the_decode_engine_are_passed_on(prefill: Stub, decode: Stub, proxy: httpx.Client) -> None:
    assert proxy.post("/v1/completions", json=BODY).status_code == 502
    decode.status = 429
    with decode.running():
        reply = proxy.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.json()) == (429, {"answer": "whole"})
        no_object = proxy.post("/v1/completions", content=json.dumps([1]))
        assert no_object.is_client_error


def test_an_engine_stops_when_the_client_leaves(prefill: Stub, decode: Stub, proxy: httpx.Client) -> None:
    with prefill.running(), decode.running():
        with proxy.stream("POST", "/v1/completions", json=BODY) as reply:
            assert next(reply.iter_lines()) == "data: first"
        assert decode.left.wait(TIMEOUT_S)
