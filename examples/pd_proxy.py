"""A proxy that lets one vLLM engine prefill and another decode, both with lmkv and a tier that they share.

    python examples/pd_proxy.py --port 8000 --prefill http://HOST:8100 --decode http://HOST:8200

Each completion goes to the prefill engine, which computes the prompt for one token and stores its KV, and at
the same time to the decode engine, which waits until that KV is there, for `--wait-ms` at most, and answers.
If the prefill engine is dead or slow, the decode engine computes the prompt itself; after a failure it no
longer waits, until the prefill engine has answered a request again.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

logger = logging.getLogger("uvicorn.error")  # the one that uvicorn shows
TIMEOUT_S = 600.0


class Prefill:
    """The prefill engine. `works`: whether it answered the last of its requests that are over."""

    def __init__(self, url: str) -> None:
        self.works = True
        self._http = client(url)
        self._tasks: set[asyncio.Task[None]] = set()  # an event loop keeps only weak references

    def begin(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Have a prompt computed and stored; nobody waits for it here."""
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        body = body | {"stream": False, "stream_options": None, "n": 1, "min_tokens": 0, limit: 1}
        task = asyncio.create_task(self._compute(path, body, headers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compute(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            reply = await self._http.post(path, json=body, headers=headers)
            works = not reply.is_server_error  # a bad request is the client's fault, and decode says so
            problem: object = reply.status_code
        except httpx.HTTPError as error:
            works, problem = False, repr(error)
        if not works:
            logger.warning("the prefill engine failed: %s", problem)
        self.works = works


def client(url: str) -> httpx.AsyncClient:
    """Connections to an engine, as many as there are requests."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


def application(prefill_url: str, decode_url: str, wait_ms: int) -> FastAPI:
    """The proxy. `wait_ms`: how long the decode engine may wait for the prompt's KV."""
    app = FastAPI()
    prefill, decode = Prefill(prefill_url), client(decode_url)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request, body: dict[str, Any]) -> StreamingResponse:
        path = request.url.path
        headers = {name: request.headers[name] for name in ("authorization",) if name in request.headers}
        prefill.begin(path, body, headers)
        body["kv_transfer_params"] = {"lmkv_wait_ms": wait_ms if prefill.works else 0}
        asked = decode.build_request("POST", path, json=body, headers=headers)
        try:
            reply = await decode.send(asked, stream=True)
        except httpx.HTTPError as error:
            raise HTTPException(502, f"the decode engine failed: {error!r}") from error

        async def content() -> AsyncIterator[bytes]:
            try:
                async for data in reply.aiter_bytes():
                    yield data
            finally:  # also where the client has left: the engine then stops
                await reply.aclose()

        return StreamingResponse(content(), reply.status_code, media_type=reply.headers.get("content-type"))

    return app


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="URL of the engine with kv_role kv_producer")
    parser.add_argument("--decode", required=True, help="URL of the engine with kv_role kv_consumer")
    parser.add_argument("--wait-ms", type=int, default=10_000, help="how long the prompt's KV is waited for")
    args = parser.parse_args()
    uvicorn.run(application(args.prefill, args.decode, args.wait_ms), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
