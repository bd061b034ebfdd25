"""Two engines share what either computed, through a Redis server.

`make demo-shared` runs this with everything it needs; by hand, in an environment with vLLM and lmkv:

    python examples/demo_shared.py --model MODEL_DIRECTORY [--redis-url URL] [--sglang-python PYTHON]

The first engine computes four prompts, the second, which shares neither memory nor a directory with it, loads
them from the server. With `--sglang-python` (an interpreter with SGLang and lmkv) a pair of SGLang engines
does the same afterwards; the two kinds of engines do not share chunks.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmkv.backends import open_tier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tools, where this is run by hand
from tools import redis_server

Result = dict[str, Any]
#: A given server keeps what the demo stored for so long. Each pair's tenant, so its namespace, is new: what
#: an earlier run stored is no hit.
TTL = "1h"


@contextmanager
def redis_running(url: str | None, directory: Path) -> Iterator[str]:
    """The URL of a server: the given one, or one that is started on loopback and killed at the end."""
    if url is not None:
        yield url
        return
    found = redis_server.find("redis-server")
    if found is None:
        raise SystemExit("there is no redis-server here: install Redis or Valkey, or give --redis-url")
    program, environment = found
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    command += ["--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
    with (directory / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if server.poll() is not None:
                    said = (directory / "redis.log").read_text()
                    raise SystemExit(f"redis-server did not start:\n{said}") from None
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


def usage(url: str) -> dict[str, tuple[int, int]]:
    """Chunks and bytes on the server, by namespace."""
    tier: Any = open_tier("redis", {"url": url})
    try:
        return dict(tier.usage())
    finally:
        tier.close()


def stored(url: str, before: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Chunks and bytes in namespaces that `before` did not have."""
    new = [used for space, used in usage(url).items() if space not in before]
    return sum(chunks for chunks, _ in new), sum(size for _, size in new)


def misses(gained: dict[str, float]) -> str:
    """Why what might have been a hit was none, from what lmkv's counters gained."""
    name = "lmkv_misses_total"
    why = {key.removeprefix(name): count for key, count in gained.items() if key.startswith(name) and count}
    return ", ".join(f"{count:,.0f} {reason}" for reason, count in why.items()) or "none"


def vllm_pair(model: Path, url: str, log: Path) -> Result:
    """The first of two vLLM engines computes, the second loads."""
    from demo_vllm import prompts_for, run_phase, serving

    prompts = prompts_for(model)
    before = usage(url)
    lmkv = {
        "host": {"capacity": "1GiB"},
        "redis": {"url": url, "ttl": TTL},
        "identity": {"tenant": secrets.token_hex(8)},
    }
    with (
        serving(model, lmkv, log, f"starting a vLLM engine (log: {log})") as first,
        serving(model, lmkv, log, "starting another vLLM engine") as second,
    ):
        block = first.block_size()
        cold = run_phase(first, "first", prompts)
        first.wait_until_written()
        chunks, size = stored(url, before)
        shared = run_phase(second, "second", prompts)
        after, _ = stored(url, before)
    print(f"chunks that the second engine missed: {misses(shared.counters)}")
    return {
        "ttft_cold_s": cold.ttft_s,
        "ttft_shared_s": shared.ttft_s,
        "prompt_tokens": sum(map(len, prompts)),
        "hit_tokens_host": shared.count("lmkv_hit_tokens_total{host}"),
        "hit_tokens_file": shared.count("lmkv_hit_tokens_total{file}"),
        "hit_tokens_redis": shared.count("lmkv_hit_tokens_total{redis}"),
        "identical": [a.tokens for a in cold.answers] == [a.tokens for a in shared.answers],
        "expected": sum(len(prompt) // block * block for prompt in prompts),
        "block": block,
        "chunks": chunks,
        "chunks_after": after,
        "bytes": size,
    }


def sglang_pair(model: Path, url: str, log: Path) -> Result:
    """The same with SGLang: its storage is the server alone."""
    from demo_sglang import hits, prompts_for, run_phase, serving, ttft_s

    prompts = prompts_for(model)
    before = usage(url)
    tenant = secrets.token_hex(8)
    lmkv = {"LMKV_REDIS_URL": url, "LMKV_REDIS_TTL": TTL, "LMKV_IDENTITY_TENANT": tenant}
    with serving(model, lmkv, log, f"starting an SGLang engine (log: {log})") as first:
        page = first.page_size()
        cold = run_phase(first, "first", prompts)
        first.flush()
        chunks, size = stored(url, before)
    with serving(model, lmkv, log, "starting another SGLang engine") as second:
        shared = run_phase(second, "second", prompts)
        second.flush()
        after, _ = stored(url, before)
    return {
        "ttft_cold_s": ttft_s(cold),
        "ttft_shared_s": ttft_s(shared),
        "prompt_tokens": sum(map(len, prompts)),
        "hit_tokens_host": hits(shared, "host"),
        "hit_tokens_file": 0,
        "hit_tokens_redis": hits(shared, "storage"),
        "identical": [answer.tokens for answer in cold] == [answer.tokens for answer in shared],
        "expected": sum((len(prompt) - 1) // page * page for prompt in prompts),
        "block": page,
        "chunks": chunks,
        "chunks_after": after,
        "bytes": size,
    }


def show(name: str, result: Result) -> None:
    """Print one pair's table; leave with an error if it did not share all."""
    cold, shared = result["ttft_cold_s"], result["ttft_shared_s"]
    print(f"\n{name}: {result['prompt_tokens']:,} prompt tokens; times are means per prompt")
    print(f"{'':9}{'TTFT':>9}{'of cold':>9}{'hits redis':>12}")
    print(f"{'first':9}{cold:>7.2f} s{1:>9.2f}{0:>12,}")
    print(f"{'second':9}{shared:>7.2f} s{shared / cold:>9.2f}{result['hit_tokens_redis']:>12,}")
    print(f"expected hits (every complete block of {result['block']} tokens): {result['expected']:,}")
    more = result["chunks_after"] - result["chunks"]
    print(
        f"on the server: {result['chunks']:,} chunks, {result['bytes'] / 2**20:,.0f} MiB; "
        f"the second engine added {more}; "
        f"outputs identical token by token: {'yes' if result['identical'] else 'NO'}"
    )
    if not result["identical"]:
        raise SystemExit("the outputs differ")
    if result["hit_tokens_redis"] != result["expected"]:
        raise SystemExit("not every complete block was a hit")


def main() -> None:
    """Run the demo and write build/demo-shared.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with the model")
    parser.add_argument("--redis-url", default=os.environ.get("LMKV_REDIS_URL"), help="a server to use")
    parser.add_argument("--sglang-python", help="interpreter with SGLang, for a second pair")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm", help=argparse.SUPPRESS)
    out = Path(__file__).resolve().parent.parent / "build" / "demo-shared.json"
    parser.add_argument("--out", type=Path, default=out, help="where to write JSON")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    log = args.out.with_suffix(".log")
    log.unlink(missing_ok=True)
    # The engines get the URL from here, not from this process's environment.
    os.environ.pop("LMKV_REDIS_URL", None)
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-demo-", dir=args.out.parent) as scratch,
        redis_running(args.redis_url, Path(scratch)) as url,
    ):
        pair = {"vllm": vllm_pair, "sglang": sglang_pair}[args.engine]
        result = pair(args.model, url, log)
        show({"vllm": "vLLM", "sglang": "SGLang"}[args.engine], result)
        if args.sglang_python is not None:
            other = args.out.with_name("demo-shared-sglang.json")
            command = [args.sglang_python, __file__, "--model", str(args.model), "--engine", "sglang"]
            subprocess.run([*command, "--redis-url", url, "--out", str(other)], check=True)
            result["sglang"] = json.loads(other.read_text())
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
