"""A real SGLang server with lmkv: cold, from the host's memory, and after a SIGKILL and a restart.

`make demo-sglang` runs this with everything it needs; by hand, in an environment with SGLang and lmkv:

    python examples/demo_sglang.py --model MODEL_DIRECTORY

lmkv is turned on by its settings alone, here environment variables. It is the storage below HiCache, SGLang's
own cache in host memory. So the second pass is SGLang's work: its device pool holds one of the prompts, and
the others come back from its host pool. What is there after the restart was written and is read by lmkv.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from demo_vllm import ANSWER_TOKENS, REQUEST_TIMEOUT_S, ROOT, START_TIMEOUT_S, prompts_for
from tqdm import tqdm

#: Tokens of the device pool: one prompt and its answer, but not two.
DEVICE_TOKENS = 4096
#: The host pool's size as a multiple of that: all prompts.
HOST_RATIO = 4
SOURCES = ("device", "host", "storage")


@dataclass
class Answer:
    """One request's outcome; `hits` has the prompt's tokens that SGLang took from each source."""

    ttft_s: float
    tokens: list[int]
    hits: dict[str, int]


class Server:
    """One `sglang.launch_server` process group."""

    def __init__(self, model: Path, lmkv: dict[str, str], log: Path) -> None:
        """`lmkv`: its settings, environment variables."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-cache-report"),
            # float32 and plain torch: in bfloat16 a split prefill may round a tie the other way, with or
            # without a cache, and the demo compares token by token.
            *("--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--max-total-tokens", str(DEVICE_TOKENS), "--context-length", str(DEVICE_TOKENS)),
            *("--max-running-requests", "1", "--hicache-ratio", str(HOST_RATIO)),
            # SGLang's default goes on without what was not read by the time the request could run.
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        ]
        environment = os.environ | lmkv | {"HF_HUB_OFFLINE": "1"}
        if torch.cuda.is_available():
            command.append("--disable-cuda-graph")
        else:
            command += ["--device", "cpu"]
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_TIMEOUT_S)

    def wait_until_ready(self) -> None:
        """Block until the server answers; raise with the log's place if it died."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start; see {self._log.name}")
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)

    def ask(self, prompt: list[int]) -> Answer:
        """Send one prompt and time its first token."""
        sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        start = time.perf_counter()
        first = None
        last: dict[str, Any] = {}
        with self.http.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    first = first or time.perf_counter()
                    last = json.loads(line.removeprefix("data: "))  # each has all tokens so far
        if first is None:
            raise SystemExit("the server sent no token")
        details = last["meta_info"].get("cached_tokens_details") or {}
        hits = {source: details.get(source, 0) for source in SOURCES}
        return Answer(first - start, last["output_ids"], hits)

    def page_size(self) -> int:
        """Tokens of a page, which lmkv's plugin has set."""
        return int(self.http.get("/server_info").json()["page_size"])

    def flush(self) -> None:
        """Wait until everything is written, then empty SGLang's device and host pools."""
        self.http.post("/flush_cache", params={"timeout": REQUEST_TIMEOUT_S}).raise_for_status()

    def kill(self) -> None:
        """SIGKILL everything the server started: no shutdown code runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.http.close()
        self._log.close()


@contextmanager
def serving(model: Path, lmkv: dict[str, str], log: Path, what: str) -> Iterator[Server]:
    """A server that is killed at the end, however the block is left."""
    print(f"{what} ...", flush=True)
    server = Server(model, lmkv, log)
    try:
        server.wait_until_ready()
        server.ask([1, 2, 3])  # first-use costs of the engine; too short to be cached
        yield server
    finally:
        server.kill()


def run_phase(server: Server, name: str, prompts: list[list[int]]) -> list[Answer]:
    """Send all prompts, one after the other."""
    return [server.ask(prompt) for prompt in tqdm(prompts, desc=f"{name:8}", unit="prompt")]


def ttft_s(answers: list[Answer]) -> float:
    """Mean time to the first token, seconds."""
    return sum(answer.ttft_s for answer in answers) / len(answers)


def hits(answers: list[Answer], source: str) -> int:
    """Tokens of all prompts that came from `source`."""
    return sum(answer.hits[source] for answer in answers)


def main() -> None:
    """Run the demo and write build/demo-sglang.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with the model")
    parser.add_argument("--dir", type=Path, help="directory for lmkv's files (default: a fresh one, removed)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "demo-sglang.json", help="where to write JSON"
    )
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    log = args.out.with_suffix(".log")
    log.unlink(missing_ok=True)
    prompts = prompts_for(args.model)

    with tempfile.TemporaryDirectory(prefix="lmkv-demo-", dir=args.out.parent) as scratch:
        lmkv = {"LMKV_FILE_PATH": str(args.dir or Path(scratch) / "kv"), "LMKV_FILE_CAPACITY": "4GiB"}
        with serving(args.model, lmkv, log, f"starting SGLang with lmkv (log: {log})") as server:
            page = server.page_size()
            cold = run_phase(server, "cold", prompts)
            host = run_phase(server, "host", prompts)
            server.flush()
            print("killing the engine with SIGKILL", flush=True)
        with serving(args.model, lmkv, log, "starting a new engine on the same directory") as server:
            restart = run_phase(server, "restart", prompts)

    tokens = [answer.tokens for answer in cold]
    identical = all(tokens == [answer.tokens for answer in phase] for phase in (host, restart))
    prompt_tokens = sum(map(len, prompts))
    # SGLang computes at least a prompt's last token.
    expected = sum((len(prompt) - 1) // page * page for prompt in prompts)
    print(f"\n{len(prompts)} prompts, {prompt_tokens:,} tokens; times are means per prompt")
    print(f"{'':9}{'TTFT':>9}{'of cold':>9}{'hits in SGLang host pool':>27}{'hits in lmkv files':>21}")
    for name, phase in (("cold", cold), ("host", host), ("restart", restart)):
        print(
            f"{name:9}{ttft_s(phase):>7.2f} s{ttft_s(phase) / ttft_s(cold):>9.2f}"
            f"{hits(phase, 'host'):>27,}{hits(phase, 'storage'):>21,}"
        )
    print(f"expected hits (every complete page of {page} tokens): {expected:,}")
    print(f"outputs identical token by token: {'yes' if identical else 'NO'}")
    result = {
        "ttft_cold_s": ttft_s(cold),
        "ttft_host_s": ttft_s(host),
        "ttft_restart_s": ttft_s(restart),
        "prompt_tokens": prompt_tokens,
        "hit_tokens_host": hits(host, "host"),
        "hit_tokens_file": hits(restart, "storage"),
        "hit_tokens_redis": 0,
        "identical": identical,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out}")
    if not identical:
        raise SystemExit("the outputs differ")
    if (result["hit_tokens_host"], result["hit_tokens_file"]) != (expected, expected):
        raise SystemExit("not every complete page was a hit")


if __name__ == "__main__":
    main()
