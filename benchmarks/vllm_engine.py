"""lmkv inside a real vLLM engine on the CPU: what it costs when nothing hits, what it saves when all does.

    python -m benchmarks.vllm_engine --model MODEL_DIRECTORY [--json build/bench/vllm_engine.json]

`make bench` runs it in the engine environment. Each engine runs in a process of its own; engines
without and with lmkv take turns (A-B-A). lmkv's own CPU time is also counted directly, around
every call of the engine into lmkv and on lmkv's threads.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Row, write

PROMPTS = 8
PROMPT_TOKENS = 1000
ANSWER_TOKENS = 16
LONG_PROMPT_TOKENS = 2000
ROUNDS = 3


def prompt(seed: int, tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(100, 40_000) for _ in range(tokens)]


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, model: str, directory: str | None) -> None:
        from vllm import LLM

        transfer = None
        if directory is not None:
            tables = {"host": {"capacity": "1GiB"}, "file": {"path": directory, "capacity": "2GiB"}}
            transfer = {
                "kv_connector": "LMKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmkv": tables},
            }
        self.llm = LLM(
            model, enforce_eager=True, max_model_len=4096, kv_transfer_config=transfer, disable_log_stats=True
        )
        self.ask(prompt(1, 64), 2)
        # Faulting in the slab is work of the start, on a thread of its own: not what is measured here.
        while directory is not None and not self.manager._slab.fully_faulted:
            time.sleep(0.1)

    def ask(self, tokens: list[int], answer: int = 1) -> float:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        start = time.perf_counter()
        self.llm.generate(
            [TokensPrompt(prompt_token_ids=tokens)],
            SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True),
            use_tqdm=False,
        )
        return time.perf_counter() - start

    @property
    def manager(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector._manager

    def flush(self) -> None:
        """Step with short prompts until all stores are written below."""
        for seed in range(1000):
            self.ask(prompt(seed, 32), 1)
            if seed > 2 and self.manager._store.pending_writes == 0:
                return
            time.sleep(0.01)
        raise RuntimeError("writes did not end")


class CPUClock:
    """CPU seconds spent in lmkv, on the engine's thread and on lmkv's own."""

    def __init__(self) -> None:
        from lmkv import executor
        from lmkv.connectors.vllm.manager import LMKVManager
        from lmkv.connectors.vllm.worker import LMKVWorker

        self.seconds = 0.0
        self._depth = 0
        for cls in (LMKVManager, LMKVWorker):
            for name, call in list(vars(cls).items()):
                if callable(call) and not name.startswith("_"):
                    setattr(cls, name, self._timed(call))
        executor._run = self._timed_job(executor._run)

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.thread_time() - start

        return timed

    def _timed_job(self, call: Any) -> Any:
        def timed(job: Any) -> None:
            start = time.thread_time()
            call(job)
            self.seconds += time.thread_time() - start

        return timed


def never_hit(model: str, directory: str | None) -> dict[str, float]:
    """CPU and wall seconds of prompts that are all different."""
    clock = CPUClock() if directory is not None else None
    engine = Engine(model, directory)
    spent = clock.seconds if clock else 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    seed = random.randrange(1 << 40)
    for i in range(PROMPTS):
        engine.ask(prompt(seed + i, PROMPT_TOKENS), ANSWER_TOKENS)
    result = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    if clock is not None:
        engine.flush()
        result["lmkv"] = clock.seconds - spent
    return result


def first_token(model: str, directory: str) -> dict[str, float]:
    """Seconds to the first token of one long prompt: cold, from host memory, from the engine's own
    prefix cache, and of just the tokens that a hit leaves to compute."""
    engine = Engine(model, directory)
    cold, host, own, rest = [], [], [], []
    for i in range(ROUNDS):
        tokens = prompt(10 + i, LONG_PROMPT_TOKENS)
        cold.append(engine.ask(tokens))
        engine.flush()
        engine.llm.reset_prefix_cache()
        host.append(engine.ask(tokens))
        own.append(engine.ask(tokens))
        rest.append(engine.ask(prompt(50 + i, LONG_PROMPT_TOKENS % 128)))
    engine.flush()
    return {
        name: statistics.median(times)
        for name, times in (("cold", cold), ("host", host), ("own", own), ("rest", rest))
    }


def after_restart(model: str, directory: str) -> dict[str, float]:
    """The same prompts in a new process, from disk."""
    engine = Engine(model, directory)
    times = [engine.ask(prompt(10 + i, LONG_PROMPT_TOKENS)) for i in range(ROUNDS)]
    return {"file": statistics.median(times)}


def calls(model: str, directory: str) -> dict[str, float]:
    """Seconds of the manager's calls: one step with nothing to do, and a lookup of 1,000 keys."""
    from vllm.v1.kv_offload.base import OffloadingManager, ReqContext, ScheduleEndContext

    engine = Engine(model, directory)
    engine.flush()
    manager = engine.manager
    context = ScheduleEndContext((), ())

    def step(of: Any) -> float:
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            of.on_schedule_end(manager, context)
            of.has_pending_work(manager)
            of.get_stats(manager)
            of.take_events(manager)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    idle = step(type(manager)) - step(OffloadingManager)
    store = manager._store
    chunk = next(iter(store._chunk_bytes.values()))
    count = min(1000, store._slab.capacity_bytes // chunk - 4)
    keys = [i.to_bytes(32, "big") + bytes(4) for i in range(count)]
    request = store.new_request()
    store.poll()
    store.prepare_store(keys, request)
    store.complete_store(keys, request)
    assert store.index.match_prefix(keys) == count
    lookups = []
    for i in range(200):
        req_context = ReqContext(f"bench-{i}")
        manager.on_new_request(req_context)
        start = time.perf_counter()
        for key in keys:
            manager.lookup(key, req_context)
        lookups.append((time.perf_counter() - start) / count * 1000)
        manager.on_request_finished(req_context)
    return {"idle": idle, "lookup_1000": statistics.median(lookups)}


def run(mode: str, model: str, directory: str | None) -> dict[str, float]:
    """Run one mode in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vllm_engine", "--model", model, "--mode", mode]
    if directory is not None:
        command += ["--dir", directory]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
            return result
    raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory with SmolLM2-135M or another model")
    parser.add_argument("--json", type=Path, default=Path("build/bench/vllm_engine.json"))
    parser.add_argument("--mode", help="internal: what to run in this process")
    parser.add_argument("--dir", help="internal: directory of the NVMe tier")
    args = parser.parse_args()
    if args.mode is not None:
        modes = {
            "never_hit": never_hit,
            "first_token": first_token,
            "after_restart": after_restart,
            "calls": calls,
        }
        print("RESULT " + json.dumps(modes[args.mode](args.model, args.dir)), flush=True)
        return

    args.json.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.json.parent.resolve()) as scratch:
        ratios, own, shares = [], [], []
        before = run("never_hit", args.model, None)
        for i in range(ROUNDS):
            with_lmkv = run("never_hit", args.model, f"{scratch}/never-{i}")
            after = run("never_hit", args.model, None)
            ratios.append(with_lmkv["cpu"] / ((before["cpu"] + after["cpu"]) / 2))
            own.append(with_lmkv["lmkv"])
            shares.append(with_lmkv["lmkv"] / with_lmkv["cpu"])
            before = after
        share = statistics.median(shares)
        rows.append(
            Row("no hits: lmkv's CPU time / the engine's (counted)", 0, share * 100, "%", 1.0, share * 100)
        )
        spread = f"{min(ratios):.3f}..{max(ratios):.3f}"
        rows.append(
            Row(
                f"no hits: CPU time with / without lmkv (A-B-A, {spread})",
                0,
                statistics.median(ratios),
                "",
                1.01,
                statistics.median(ratios) / 1.01,
            )
        )
        directory = f"{scratch}/ttft"
        ttft = run("first_token", args.model, directory) | run("after_restart", args.model, directory)
        for name in ("host", "file", "own", "rest"):
            what = {
                "host": "from host memory",
                "file": "from disk in a new process",
                "own": "from the engine's own prefix cache",
                "rest": "only the tokens a hit leaves to compute",
            }[name]
            rows.append(
                Row(
                    f"TTFT of {LONG_PROMPT_TOKENS} tokens {what} / cold",
                    0,
                    ttft[name],
                    "s",
                    ttft["cold"],
                    ttft[name] / ttft["cold"],
                )
            )
        direct = run("calls", args.model, f"{scratch}/calls")
        rows.append(
            Row("a step with nothing to do", 0, direct["idle"] * 1e6, "us", 20, direct["idle"] * 1e6 / 20)
        )
        lookup = direct["lookup_1000"] * 1e3
        rows.append(Row("lookup of 1,000 keys through vLLM's manager", 0, lookup, "ms", 0.3, lookup / 0.3))
    write(args.json, rows)


if __name__ == "__main__":
    main()
