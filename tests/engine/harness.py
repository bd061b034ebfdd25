"""Real engines for tests, each in a process of its own, driven by a test as if they were in it.

`Engine` is the test's side: it starts this file as a child, sends it one JSON line per call and gets
one back. `Served` is the child's side: a vLLM engine and the calls a test may make. An engine is
started by a fraction of the tests' time, so tests do several things with one.
"""

import contextlib
import importlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.processes import Child, EngineError, prompt, serve

__all__ = ["FAULTS", "Engine", "EngineError", "full_hit", "prompt", "same", "state_hit", "window_hit"]

#: Options that every engine here gets. float32: in bfloat16 a prefill that is cut in another place
#: may answer with other tokens, with or without a cache.
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "disable_log_stats": False,
    "seed": 0,
}
#: Labels that each of vLLM's metrics has.
_EVERYWHERE = ("model_name", "engine")


class Engine(Child):
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
            # Tiny models compute faster than a busy disk reads, and tests count every hit.
            lmkv = lmkv | {"vllm": {"gate": False} | lmkv.get("vllm", {})}
            transfer = {
                "kv_connector": "LMKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmkv": lmkv},
            } | (transfer or {})
        options = OPTIONS | options | {"model": str(model), "kv_transfer_config": transfer}
        environ = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        }
        super().__init__("tests.engine.harness", log, environ)
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
        if self.in_process and hasattr(self.connector, "_manager"):
            # What comes before the slab's memory is there is not stored, which no test is about.
            while not self.connector._manager._slab.fully_faulted:
                time.sleep(0.01)

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, **kwargs: Any) -> list[dict[str, Any]]:
        """Answers to several prompts sent at once: token ids, their log-probabilities, and how many
        tokens of the prompt the engine did not have to compute."""
        ids = [self.submit(prompt, max_tokens, **kwargs) for prompt in prompts]
        self.run()
        return [self.texts.pop(request_id) for request_id in ids]

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        salt: str | None = None,
        lora: str | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> str:
        """Add a request without running it; returns its id. `transfer`: its `kv_transfer_params`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        request_id = f"test-{next(self.numbers)}"
        inputs = TokensPrompt(prompt_token_ids=prompt)
        if salt is not None:
            inputs["cache_salt"] = salt
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        if transfer is not None:
            sampling.extra_args = {"kv_transfer_params": transfer}
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
        while self.core.scheduler.has_requests() or any(
            executor.pending for below in store._below for executor in below.executors
        ):
            self.core.step_fn()
            store.end_step()
            time.sleep(0.001)

    def forget_host(self) -> None:
        """Empty the host tier, so that what was written below must come from there."""
        self.connector._manager._store.index.clear()

    def stored(self, tier: str) -> int:
        """Chunks of prompts that this engine put into a tier and that were not there."""
        store = self.connector._manager._store
        (below,) = (below for below in store._below if below.name == tier)
        tried_at_start = len(set(store._chunk_bytes.values()))
        return int(below.tier.stats().counters["put_chunks"]) - tried_at_start

    def wait_for_trip(self) -> None:
        """Step until a tier that does not answer has tripped its breaker."""
        below = self.connector._manager._store._below[0]
        while below.reads.breaker.trips == 0:
            self.core.step_fn()
            below.reads.poll()
            time.sleep(0.05)

    def wait_until_well(self) -> None:
        """Wait until no tier is left alone any more."""
        while any(executor.open for b in self.connector._manager._store._below for executor in b.executors):
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
                names = ("tier", "event", "reason", "kind")
                labels = [sample.labels[name] for name in names if name in sample.labels]
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


def full_hit(tokens: int, block: int) -> int:
    """Tokens that a repeated prompt finds in a model with full attention only: every complete block."""
    return tokens // block * block


def window_hit(tokens: int, block: int) -> int:
    """As above for a model with windows. The last token is computed in any case, because its logits are
    needed, and vLLM only stores those blocks of a window that can precede a computed token: where a prompt
    ends with a block, its last block is none of them."""
    return (tokens - 1) // block * block


def state_hit(tokens: int, block: int) -> int:
    """As above for a model with recurrent states: vLLM keeps that at the last end of a block from which a
    token is left to compute."""
    return window_hit(tokens, block)


def same(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert that answers are equal token for token, and were drawn from the same distributions."""
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
    for answer, other in zip(answers, expected, strict=True):
        for ours, theirs in zip(answer["logprobs"], other["logprobs"], strict=True):
            assert abs(ours - theirs) < 1e-3, (answer["logprobs"], other["logprobs"])


if __name__ == "__main__":
    serve(Served())
