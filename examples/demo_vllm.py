"""A real vLLM server with lmkv: cold, warm from host memory, and after a SIGKILL and a restart.

`make demo` runs this with everything it needs; by hand, in an environment with vLLM and lmkv:

    python examples/demo_vllm.py --model MODEL_DIRECTORY
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = (
    "Who may reproduce and distribute copies of the Work?",
    "What happens to the patent license when litigation is started?",
    "Which notices must a redistributor retain?",
    "Does the license grant permission to use trade names?",
)
ANSWER_TOKENS = 24
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0


@dataclass
class Answer:
    """One request's outcome."""

    ttft_s: float
    tokens: list[int]


@dataclass
class Phase:
    """One pass over all prompts, and what lmkv's counters gained meanwhile."""

    answers: list[Answer]
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Mean time to the first token, seconds."""
        return sum(answer.ttft_s for answer in self.answers) / len(self.answers)

    def count(self, name: str) -> int:
        """A counter's gain, e.g. `lmkv_hit_tokens_total{file}`."""
        return int(self.counters.get(name, 0))


class Server:
    """One `vllm serve` process group."""

    def __init__(
        self, model: Path, lmkv: dict[str, Any], log: Path, role: str = "kv_both", cpus: str | None = None
    ) -> None:
        """`lmkv`: its settings. `cpus`: the cores that an engine without a GPU computes on."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        transfer = {
            "kv_connector": "LMKVConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"lmkv": lmkv},
        }
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"),
            # float32: in bfloat16 a split prefill may round a tie the other way, with or without
            # a connector, and the demo compares token by token.
            *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "HF_HUB_OFFLINE": "1",
        }
        if cpus is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = cpus
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S)

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
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        start = time.perf_counter()
        first = None
        tokens: list[int] = []
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if choice.get("token_ids"):
                        first = first or time.perf_counter()
                        tokens += choice["token_ids"]
        if first is None:
            raise SystemExit("the server sent no token")
        return Answer(first - start, tokens)

    def counters(self) -> dict[str, float]:
        """lmkv's metrics as `name{label}` -> value."""
        values = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name.startswith("lmkv_") and not sample.name.endswith("_created"):
                    label = sample.labels.get("tier") or sample.labels.get("reason")
                    values[sample.name + (f"{{{label}}}" if label else "")] = sample.value
        return values

    def block_size(self) -> int:
        """Tokens of one block, from vLLM's own metrics."""
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == "vllm:cache_config_info":
                    return int(sample.labels["block_size"])
        raise SystemExit("vLLM does not tell its block size")

    def wait_until_written(self) -> None:
        """Block until nothing waits to be written below host memory."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while time.monotonic() < deadline:
            counters = self.counters()
            stored = counters.get("lmkv_stored_chunks_total{host}", 0)
            if stored and counters.get("lmkv_pending_writes", 1) == 0:
                return
            time.sleep(0.2)
        raise SystemExit("the tier below did not take the chunks in time")

    def kill(self) -> None:
        """SIGKILL everything the server started: no shutdown code runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.http.close()
        self._log.close()


@contextmanager
def serving(
    model: Path,
    lmkv: dict[str, Any],
    log: Path,
    what: str,
    role: str = "kv_both",
    cpus: str | None = None,
) -> Iterator[Server]:
    """A server that is killed at the end, however the block is left."""
    print(f"{what} ...", flush=True)
    server = Server(model, lmkv, log, role, cpus)
    try:
        server.wait_until_ready()
        server.ask([1, 2, 3])  # first-use costs of the engine; too short to be cached
        yield server
    finally:
        server.kill()


def run_phase(server: Server, name: str, prompts: list[list[int]]) -> Phase:
    """Send all prompts, one after the other."""
    before = server.counters()
    answers = [server.ask(prompt) for prompt in tqdm(prompts, desc=f"{name:8}", unit="prompt")]
    server.ask([1, 2, 3])  # one more step, so that the last chunks are stored and counted
    time.sleep(0.5)
    after = server.counters()
    return Phase(answers, {key: value - before.get(key, 0) for key, value in after.items()})


def prompts_for(model: Path) -> list[list[int]]:
    """Four long documents (the Apache License, begun at different places), a question about each."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    paragraphs = (ROOT / "LICENSE").read_text().split("\n\n")
    prompts = []
    for i, question in enumerate(QUESTIONS):
        start = i * len(paragraphs) // len(QUESTIONS)
        text = "\n\n".join(paragraphs[start:] + paragraphs[:start])
        prompt = f"Document {i + 1}:\n{text}\n\nQuestion: {question}\nAnswer:"
        prompts.append(tokenizer.encode(prompt)[-3500:])
    return prompts


def mib(count: int) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:,.0f} MiB"


def main() -> None:
    """Run the demo and write build/demo.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with the model")
    parser.add_argument(
        "--dir", type=Path, help="directory for the NVMe tier (default: a fresh one, removed)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo.json", help="where to write JSON")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    log = args.out.with_suffix(".log")
    log.unlink(missing_ok=True)
    prompts = prompts_for(args.model)

    with tempfile.TemporaryDirectory(prefix="lmkv-demo-", dir=args.out.parent) as scratch:
        file = {"path": str(args.dir or Path(scratch) / "kv"), "capacity": "4GiB"}
        lmkv = {"host": {"capacity": "2GiB"}, "file": file}
        with serving(args.model, lmkv, log, f"starting vLLM with lmkv (log: {log})") as server:
            block = server.block_size()
            cold = run_phase(server, "cold", prompts)
            server.wait_until_written()
            server.http.post("/reset_prefix_cache").raise_for_status()  # the engine's own, not lmkv's
            host = run_phase(server, "host", prompts)
            server.wait_until_written()
            print("killing the engine with SIGKILL", flush=True)
        with serving(args.model, lmkv, log, "starting a new engine on the same directory") as server:
            restart = run_phase(server, "restart", prompts)

    identical = [a.tokens for a in cold.answers] == [a.tokens for a in host.answers] and [
        a.tokens for a in cold.answers
    ] == [a.tokens for a in restart.answers]
    prompt_tokens = sum(map(len, prompts))
    expected = sum(len(prompt) // block * block for prompt in prompts)
    print(f"\n{len(prompts)} prompts, {prompt_tokens:,} tokens; times are means per prompt")
    print(f"{'':9}{'TTFT':>9}{'of cold':>9}{'hits host':>11}{'hits file':>11}{'loaded':>11}{'from disk':>11}")
    for name, phase in (("cold", cold), ("host", host), ("restart", restart)):
        print(
            f"{name:9}{phase.ttft_s:>7.2f} s{phase.ttft_s / cold.ttft_s:>9.2f}"
            f"{phase.count('lmkv_hit_tokens_total{host}'):>11,}{phase.count('lmkv_hit_tokens_total{file}'):>11,}"
            f"{mib(phase.count('lmkv_loaded_bytes_total{host}')):>11}"
            f"{mib(phase.count('lmkv_loaded_bytes_total{file}')):>11}"
        )
    print(f"expected hits (every complete block of {block} tokens): {expected:,}")
    written = cold.count("lmkv_stored_bytes_total{host}")
    print(f"stored once: {mib(written)}; outputs identical token by token: {'yes' if identical else 'NO'}")
    result = {
        "ttft_cold_s": cold.ttft_s,
        "ttft_host_s": host.ttft_s,
        "ttft_restart_s": restart.ttft_s,
        "prompt_tokens": prompt_tokens,
        "hit_tokens_host": host.count("lmkv_hit_tokens_total{host}"),
        "hit_tokens_file": restart.count("lmkv_hit_tokens_total{file}"),
        "hit_tokens_redis": 0,
        "identical": identical,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out}")
    if not identical:
        raise SystemExit("the outputs differ")
    if (result["hit_tokens_host"], result["hit_tokens_file"]) != (expected, expected):
        raise SystemExit("not every complete block was a hit")


if __name__ == "__main__":
    main()
