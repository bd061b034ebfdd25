"""A proxy that lets one vLLM engine prefill and another decode, both with lmkv and a tier that they share.

    python examples/pd_proxy.py --port 8000 --prefill http://HOST:8100 --decode http://HOST:8200

Each completion goes to the prefill engine, which computes the prompt for one token and stores its KV, and at
the same time to the decode engine, which waits until that KV is there, for `--wait-ms` at most, and answers.
If the prefill engine is dead or slow, the decode engine computes the prompt itself.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

logger = logging.getLogger("pd_proxy")
TIMEOUT_S = 600.0


def application(prefill: str, decode: str, wait_ms: int) -> FastAPI:
    """The proxy. `wait_ms`: how long the decode engine may wait for the prompt's KV."""
    app = FastAPI()
    prefiller = httpx.AsyncClient(base_url=prefill, timeout=TIMEOUT_S)
    decoder = httpx.AsyncClient(base_url=decode, timeout=TIMEOUT_S)
    under_way: set[asyncio.Task[None]] = set()

    async def compute(path: str, body: dict[str, Any]) -> None:
        one_token = {"stream": False, "stream_options": None, "n": 1, "min_tokens": 0}
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        try:
            reply = await prefiller.post(path, json=body | one_token | {limit: 1})
            reply.raise_for_status()
        except httpx.HTTPError as error:  # the decode engine goes on without it
            logger.warning("the prefill engine failed: %r", error)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()
        task = asyncio.create_task(compute(request.url.path, dict(body)))
        under_way.add(task)  # the loop keeps only weak references
        task.add_done_callback(under_way.discard)
        body["kv_transfer_params"] = {"lmkv_wait_ms": wait_ms}
        reply = await decoder.send(decoder.build_request("POST", request.url.path, json=body), stream=True)

        async def content() -> AsyncIterator[bytes]:
            async for data in reply.aiter_raw():
                yield data
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
