"""One vLLM engine prefills, another decodes, `pd_proxy.py` stands in front, and Redis lies between.

`make demo-prefill-decode` runs this with everything it needs; by hand, in an environment with vLLM and lmkv:

    python examples/prefill_decode.py --model MODEL_DIRECTORY [--redis-url URL]
"""

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from demo_shared import TTL, misses, redis_running
from demo_vllm import REQUEST_TIMEOUT_S, prompts_for, serving

TOKENS = 24


def ask(url: str, prompt: list[int]) -> list[int]:
    """The tokens of an answer."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    reply.raise_for_status()
    return list(reply.json()["choices"][0]["token_ids"])


def main() -> None:
    """Run it; exit with an error unless the decode engine loaded what it could, with the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with the model")
    parser.add_argument("--redis-url", default=os.environ.pop("LMKV_REDIS_URL", None), help="a server to use")
    out = Path(__file__).resolve().parent.parent / "build" / "prefill-decode.json"
    parser.add_argument("--out", type=Path, default=out, help="where to write JSON")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    log = args.out.with_suffix(".log")
    log.unlink(missing_ok=True)
    prompts = prompts_for(args.model)[:2]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-demo-", dir=args.out.parent) as scratch,
        redis_running(args.redis_url, Path(scratch)) as url,
    ):
        lmkv = {
            "host": {"capacity": "1GiB"},
            "redis": {"url": url, "ttl": TTL},
            "identity": {"tenant": secrets.token_hex(8)},
        }
        with (
            # On cores of their own: an engine that waits spins, and by default all take the first cores.
            serving(args.model, lmkv, log, "starting the prefill engine", "kv_producer", "0") as first,
            serving(args.model, lmkv, log, "starting the decode engine", "kv_consumer", "1") as second,
        ):
            engines = ("--prefill", first.url, "--decode", second.url, "--wait-ms", "60000")
            script = str(Path(__file__).with_name("pd_proxy.py"))
            proxy = subprocess.Popen([sys.executable, script, "--port", str(port), *engines])
            try:
                address = f"http://127.0.0.1:{port}"
                while True:
                    try:
                        httpx.get(f"{address}/docs")
                        break
                    except httpx.TransportError:
                        if proxy.poll() is not None:
                            raise SystemExit("the proxy did not start") from None
                        time.sleep(0.1)
                before = second.counters()
                answers = [ask(address, prompt) for prompt in prompts]
                second.ask([1, 2, 3])  # one more step: vLLM publishes what was counted once a step
                time.sleep(1)
                gained = {key: count - before.get(key, 0) for key, count in second.counters().items()}
                hits = gained.get("lmkv_hit_tokens_total{redis}", 0)
                block = second.block_size()
                direct = [ask(first.url, prompt) for prompt in prompts]
            finally:
                proxy.kill()
                proxy.wait()
    expected = sum(len(prompt) // block * block for prompt in prompts)
    identical = answers == direct
    print(f"{sum(map(len, prompts)):,} prompt tokens; the decode engine loaded {hits:,.0f} of {expected:,}")
    print(f"chunks that it missed: {misses(gained)}")
    print(f"answers identical to the prefill engine's own: {'yes' if identical else 'NO'}")
    result = {"hit_tokens_redis": int(hits), "expected": expected, "identical": identical}
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out}")
    if not identical or hits != expected:
        raise SystemExit("the decode engine did not load all that it could, or answered otherwise")


if __name__ == "__main__":
    main()
