"""Real engines for tests, each in a process of its own, driven by a test as if they were in it.

`Engine` is the test's side: it starts this file as a child, sends it one JSON line per call and gets
one back. `Served` is the child's side: a vLLM engine and the calls a test may make. An engine is
started by a fraction of the tests' time, so tests do several things with one.
"""

import contextlib
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Options that every engine here gets. float32: in bfloat16 a prefill that is cut in another place
#: may answer with other tokens, with or without a cache.
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "disable_log_stats": False,
    "seed": 0,
}
#: An answer this late means that the child hangs: whole engines start within it on a loaded machine.
REPLY_TIMEOUT_S = 300
#: Labels that each of vLLM's metrics has.
_EVERYWHERE = ("model_name", "engine")


class EngineError(Exception):
    """The child raised, or died; the text says what."""


class Engine:
    """A vLLM engine in a child process. Use it as a context manager.

    `lmkv`: lmkv's settings, None for an engine without it. `faults`: names of `FAULTS`, put in before the
    engine starts. `processes`: let vLLM run its scheduler and ranks in processes of their own.
    A clean exit ends with `check`.
    """

    def __init__(
        self,
        model: Path,
        lmkv: dict[str, Any] | None,
        log: Path,
        *,
        transfer: dict[str, Any] | None = None,
        processes: bool = False,
        cpus: str = "0-1",
        faults: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.lmkv = lmkv is not None
        if lmkv is not None:
            transfer = {
                "kv_connector": "LMKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmkv": lmkv},
            } | (transfer or {})
        options = OPTIONS | options | {"model": str(model), "kv_transfer_config": transfer}
        self.log = log
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
        environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
            "PYTHONPATH": str(ROOT),
        }
        with open(log, "w") as stderr:
            self.child = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environ,
                text=True,
                start_new_session=True,  # so that a kill reaches its workers too
            )
        try:
            self._call("start", options=options, faults=faults or {}, processes=processes)
        except EngineError:
            self.kill()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None and self.child.poll() is None:
            if self.lmkv:
                self.check()
            self._call("stop")
            self.child.wait(timeout=60)
        self.kill()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Served, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, *args, **kwargs)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Fills the counter, at the end, with how much each of lmkv's metrics grew meanwhile. All
        transfers and writes are let finish first."""
        grown: Counter[str] = Counter()
        before = self.counters()
        yield grown
        self.flush()
        after = self.counters()
        grown.update({name: int(value - before.get(name, 0)) for name, value in after.items()})

    def check(self) -> None:
        """After everything has ended, nothing is leased or unwritten, and nothing raised inside lmkv."""
        self.flush()
        counters = self.counters()
        errors = {name: value for name, value in counters.items() if name.startswith("lmkv_errors")}
        assert errors == {}, errors
        assert counters["lmkv_leased_bytes"] == 0
        assert counters["lmkv_pending_writes"] == 0

    def kill(self) -> None:
        """SIGKILL to the engine and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def send(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a call whose answer is not waited for."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps([name, args, kwargs]) + "\n")
        self.child.stdin.flush()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self.child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.send(name, *args, **kwargs)
        alarm = signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(REPLY_TIMEOUT_S)
        try:
            line = self.child.stdout.readline()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, alarm)
        if not line:
            raise EngineError(f"the engine died:\n{self.log.read_text()[-6000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self.log.read_text()[-6000:]}")
        return answer["value"]


def _too_late(*_: object) -> None:
    raise EngineError("the engine did not answer")


# --- the child's side


class Served:
    """One engine and what a test may ask of it. Prompts are token ids."""

    def start(self, options: dict[str, Any], faults: dict[str, Any], processes: bool) -> None:
        for name, argument in faults.items():
            FAULTS[name](argument)
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.in_process = not processes
        self.numbers = itertools.count()
        self.texts: dict[str, dict[str, Any]] = {}

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, **kwargs: Any) -> list[dict[str, Any]]:
        """Answers to several prompts sent at once: token ids, their log-probabilities, and how many
        tokens of the prompt the engine did not have to compute."""
        ids = [self.submit(prompt, max_tokens, **kwargs) for prompt in prompts]
        self.run()
        return [self.texts.pop(request_id) for request_id in ids]

    def submit(
        self, prompt: list[int], max_tokens: int = 8, salt: str | None = None, lora: str | None = None
    ) -> str:
        """Add a request without running it; returns its id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        request_id = f"test-{next(self.numbers)}"
        inputs = TokensPrompt(prompt_token_ids=prompt)
        if salt is not None:
            inputs["cache_salt"] = salt
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        adapter = None if lora is None else LoRARequest("adapter", 1, lora)
        self.engine.add_request(request_id, inputs, sampling, lora_request=adapter)
        return request_id

    def step(self, count: int = 1) -> list[str]:
        """Run steps of the engine; returns the ids of requests that ended."""
        ended = []
        for _ in range(count):
            for output in self.engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    self.texts[output.request_id] = {
                        "tokens": list(answer.token_ids),
                        "logprobs": [next(iter(place.values())).logprob for place in answer.logprobs],
                        "cached": output.num_cached_tokens,
                    }
                    ended.append(output.request_id)
        return ended

    def run(self, max_steps: int | None = None) -> int:
        """Step until no request is left; returns the number of steps. With `max_steps` it stops there."""
        steps = 0
        while self.engine.has_unfinished_requests() and steps != max_steps:
            self.step()
            steps += 1
        return steps

    def answer(self, request_id: str) -> dict[str, Any]:
        """The answer of a submitted request that has ended."""
        return self.texts.pop(request_id)

    def abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)

    def flush(self) -> None:
        """Let all copies, reads and writes end. An engine in this process makes a step only when told to."""
        if not self.in_process:
            while True:
                self.generate([[5, 6, 7]], 2)
                before = self.counters()
                time.sleep(0.2)
                self.generate([[5, 6, 7]], 2)
                if before == self.counters() and before.get("lmkv_pending_writes", 0) == 0:
                    return
        store = self.connector._manager._store
        while self.core.scheduler.has_requests() or any(below.reads.pending for below in store._below):
            self.core.step_fn()
            store.end_step()
            time.sleep(0.001)

    def forget_host(self) -> None:
        """Empty the host tier, so that what was written below must come from there."""
        self.connector._manager._store.index.clear()

    def wait_for_trip(self) -> None:
        """Step until a tier that does not answer has tripped its breaker."""
        below = self.connector._manager._store._below[0]
        while below.reads.breaker.trips == 0:
            self.core.step_fn()
            below.reads.poll()
            time.sleep(0.05)

    def close_breakers(self) -> None:
        """End the pause of a tier that failed, which would otherwise last seconds."""
        for below in self.connector._manager._store._below:
            below.reads.report(True)
            below.writes.report(True)

    def forgive_errors(self) -> float:
        """Take injected errors out of what `Engine.check` looks at; returns how many there were."""
        values = self.connector._manager.metrics.values
        return float(sum(values.pop(series) for series in list(values) if series[0] == "lmkv_errors"))

    def reset_prefix_cache(self, connector: bool = False, running: bool = False) -> bool:
        """Empty the engine's own prefix cache, and with `connector` also what lmkv holds."""
        return bool(self.llm.reset_prefix_cache(running, connector))

    def counters(self) -> dict[str, float]:
        """lmkv's metrics: "name" or "name:label" -> value."""
        if self.in_process:
            values = self.connector._manager.metrics.values
            return {":".join((name, *labels)): value for (name, labels), value in values.items()}
        registry = importlib.import_module("prometheus_client").REGISTRY  # vLLM brings it

        found = {}
        for sample in (sample for metric in registry.collect() for sample in metric.samples):
            if sample.name.startswith("lmkv_") and not sample.name.endswith("_created"):
                labels = [sample.labels[name] for name in ("tier", "reason", "kind") if name in sample.labels]
                found[":".join((sample.name.removesuffix("_total"), *labels))] = sample.value
        return found

    def vllm_metrics(self) -> dict[str, float]:
        """vLLM's own counters: "name" or "name:source" -> value."""
        found = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                labels = {name: value for name, value in metric.labels.items() if name not in _EVERYWHERE}
                found[":".join((metric.name.removeprefix("vllm:"), *labels.values()))] = metric.value
        return found

    def break_(self, name: str, argument: Any) -> None:
        """Put in one of `FAULTS` now."""
        FAULTS[name](argument)

    def stop(self) -> None:
        """Shut the engine down as a clean exit does."""
        self.engine.engine_core.shutdown()

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    served = Served()
    for line in sys.stdin:
        name, args, kwargs = json.loads(line)
        try:
            answer = {"value": getattr(served, name)(*args, **kwargs)}
        except Exception as error:  # noqa: BLE001  # the test's side decides what it means
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=replies, flush=True)
        if name == "stop":
            break


# --- faults, put into the child


_originals: dict[tuple[Any, str], Any] = {}


def _replace(owner: Any, name: str, make: Any) -> None:
    """Replace `owner.name` by `make(original)`; with None put the original back."""
    original = _originals.setdefault((owner, name), getattr(owner, name))
    setattr(owner, name, original if make is None else make(original))


def _tier_sleeps(argument: tuple[str, float]) -> None:
    """Each call of the file tier's method takes so many seconds longer; 0 ends that."""
    from lmkv.backends.file import FileTier

    name, seconds = argument

    def make(original: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(seconds)
            return original(*args)

        return call

    _replace(FileTier, name, make if seconds else None)


def _system_call_fails(argument: tuple[str, str | None]) -> None:
    """`os.NAME` raises OSError with the named errno; None ends that."""
    import errno

    name, code = argument

    def make(_: Any) -> Any:
        def call(*_: Any) -> Any:
            raise OSError(getattr(errno, str(code)), f"injected {code}")

        return call

    _replace(os, name, None if code is None else make)


def _copies_wait(copies: bool) -> None:
    """Copies between blocks and slots are not reported as over until this is ended with False."""
    from lmkv.pipeline import RankPipeline

    _replace(RankPipeline, "finished", (lambda _: lambda self: []) if copies else None)


def _store_raises(name: str) -> None:
    """Every call of this method of lmkv's store raises."""
    from lmkv.store import Store

    def make(_: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"injected into Store.{name}")

        return call

    _replace(Store, name, make)


def _store_works(name: str) -> None:
    from lmkv.store import Store

    _replace(Store, name, None)


FAULTS: dict[str, Callable[[Any], None]] = {
    "tier_sleeps": _tier_sleeps,
    "system_call_fails": _system_call_fails,
    "copies_wait": _copies_wait,
    "store_raises": _store_raises,
    "store_works": _store_works,
}


def prompt(seed: int, tokens: int, first: int | None = None) -> list[int]:
    """Random token ids, optionally after a fixed first one. Of two prompts with equal seeds the shorter
    is the other's prefix; with different seeds they share nothing."""
    source = random.Random(seed)
    ids = [source.randrange(100, 4000) for _ in range(tokens)]
    return ids if first is None else [first, *ids[1:]]


def full_hit(tokens: int, block: int) -> int:
    """Tokens that a repeated prompt finds in a model with full attention only: every complete block."""
    return tokens // block * block


def window_hit(tokens: int, block: int) -> int:
    """As above for a model with windows. The last token is computed in any case, because its logits are
    needed, and vLLM only stores those blocks of a window that can precede a computed token: where a prompt
    ends with a block, its last block is none of them."""
    return (tokens - 1) // block * block


def same(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert that answers are equal token for token, and were drawn from the same distributions."""
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
    for answer, other in zip(answers, expected, strict=True):
        for ours, theirs in zip(answer["logprobs"], other["logprobs"], strict=True):
            assert abs(ours - theirs) < 1e-3, (answer["logprobs"], other["logprobs"])


if __name__ == "__main__":
    _serve()
