"""Real SGLang engines for tests, each in processes of its own, driven by a test as if they were in it.

`Engine` is the test's side of an `sglang.Engine`, `Served` the child's; `inside` runs in the schedulers.
`Server` is `python -m sglang.launch_server`. A start takes 20 to 30 s, so tests do several things with one.
"""

import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.processes import ROOT, Child, EngineError, Group, prompt, serve
from tests.sglang import inside

__all__ = ["PAGE", "Engine", "EngineError", "Server", "hicache", "linker", "prompt"]

#: Tokens of a page in these tests.
PAGE = 16
#: Options that every engine here gets. float32: in bfloat16 a prefill that is cut in another place
#: may answer with other tokens, with or without a cache.
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "page_size": PAGE,
    "max_total_tokens": 8192,
    "context_length": 4096,
    "max_running_requests": 8,
    "random_seed": 0,
    "enable_cache_report": True,
    "log_level": "info",
}
START_TIMEOUT_S = 300
#: How a layout of HiCache's host pool is copied; the other way of copying does not know it.
IO_BACKENDS = {"page_first": "kernel", "page_head": "kernel"}


def hicache(
    directory: Path,
    *,
    layout: str = "page_first_direct",
    capacity: str = "1GiB",
    extra: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Options of an engine whose HiCache has lmkv's file tier in `directory` below it.

    `extra` is added to the storage's extra config, `options` to what is returned.
    """
    config = {
        "backend_name": "lmkv",
        "module_path": "lmkv.connectors.sglang",
        "class_name": "LMKVStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
        # Tiny models compute faster than any disk loads.
        "lmkv": {"file": {"path": str(directory), "capacity": capacity}, "sglang": {"gate": False}},
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": layout,
        "hicache_io_backend": IO_BACKENDS.get(layout, "direct"),
        "hicache_storage_backend": "dynamic",
        # Without it SGLang goes on without what is not read within a second or two.
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(config | (extra or {})),
    } | options


def linker(
    directory: Path, *, host: str = "256MiB", capacity: str = "1GiB", extra: Any = None, **options: Any
) -> dict[str, Any]:
    """Options of an engine with lmkv's direct linker: a slab of `host` and the file tier below it."""
    settings = {
        "host": {"capacity": host},
        "file": {"path": str(directory), "capacity": capacity},
        "sglang": {"gate": False},
    }
    config = {
        "linker": "LMKVLinker",
        "linker_module_path": "lmkv.connectors.sglang",
        "linker_extra_config": {"lmkv": settings} | (extra or {}),
    }
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": config,
    } | options


def _environ(cpus: str | None, more: dict[str, str] | None) -> dict[str, str]:
    """`cpus`: the cores of each rank, as "0|1"."""
    environ = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    # SGLang compiles its page hash at the first use, by default in one place for all its versions:
    # they overwrite each other's, and wait forever for the lock of a process that was killed.
    environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix, "torch_extensions"))
    if cpus is not None:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = cpus
    return environ | (more or {})


class Engine(Child):
    """An `sglang.Engine` in a child process, with the methods of `Served`. Use it as a context manager.

    `faults`: (function, argument) pairs, called in every scheduler process before the engine is made; such a
    function is one at the top of a module. `environ`: more environment variables.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        cpus: str | None = None,
        faults: list[tuple[Callable[[Any], None], Any]] | None = None,
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        named = [(_name(function), argument) for function, argument in faults or []]
        more = {inside.FAULTS: json.dumps(named)} | (environ or {})
        super().__init__("tests.sglang.harness", log, _environ(cpus, more))
        try:
            self._call(
                "start",
                options=OPTIONS | {"skip_tokenizer_init": True} | options | {"model_path": str(model)},
            )
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.child.poll() is None:
                self._call("stop")
                self.child.wait(timeout=60)
        finally:
            self.kill()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Served, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, *args, **kwargs)

    def inside(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(scheduler, *args)`, one at the top of a module, in every scheduler process, between
        two steps of its loop; returns the ranks' answers. Arguments and answers are what JSON knows."""
        answers: list[Any] = self._call("inside", _name(function), list(args))
        return answers

    def wait_written(self, timeout_s: float = 120) -> None:
        """Wait until all ranks are idle and all that they computed is written."""
        deadline = time.monotonic() + timeout_s
        while any(found := self.inside(inside.busy)):
            if time.monotonic() > deadline:
                raise EngineError(f"still busy: {found}")
            time.sleep(0.05)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


class Served:
    """The child's side: an engine, and what a test may ask of it. Prompts are token ids."""

    def start(self, options: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.numbers = itertools.count()
        self.scratch = tempfile.TemporaryDirectory()

        class WithCalls(Engine):
            run_scheduler_process_func = staticmethod(inside.run_scheduler_process)

        self.engine = WithCalls(**options)
        self.manager = self.engine.tokenizer_manager

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        *,
        salt: str | None = None,
        lora: str | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Answers to several prompts sent at once: token ids, their log-probabilities, how many tokens of the
        prompt came from a cache, and of those how many from which: {"device", "host", "storage"}."""
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True} | sampling
        kwargs: dict[str, Any] = {} if salt is None else {"cache_salt": [salt] * len(prompts)}
        if lora is not None:
            kwargs["lora_path"] = [lora] * len(prompts)
        outputs = self.engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, **kwargs
        )
        return [_answer(output) for output in outputs]

    def flush_cache(self) -> bool:
        """Empty the device's cache and the host pool, not the storage; False while anything is under way."""
        return bool(self.engine.flush_cache().success)

    def attach(self, extra_config: str, policy: str = "wait_complete") -> str:
        """Attach a dynamic storage backend to a running HiCache; returns "" or why that failed."""
        return self._ask(
            self.manager.attach_hicache_storage(
                hicache_storage_backend="dynamic",
                hicache_storage_backend_extra_config_json=extra_config,
                hicache_storage_prefetch_policy=policy,
            )
        )

    def detach(self) -> str:
        """Detach the storage backend; returns "" or why that failed."""
        return self._ask(self.manager.detach_hicache_storage())

    def clear_storage(self) -> str:
        """Have the storage backend cleared; returns "" or why that failed."""
        return self._ask(self.manager.clear_hicache_storage())

    def _ask(self, request: Any) -> str:
        answer = self.engine.loop.run_until_complete(request)
        return "" if answer.success else (getattr(answer, "message", "") or "refused")

    def update_weights(self, model: str) -> str:
        """Load other weights from a directory; returns "" or why that failed."""
        success, message, *_ = self.engine.update_weights_from_disk(model)
        return "" if success else message

    def load_lora(self, name: str, path: str) -> str:
        """Load a LoRA adapter; returns "" or why that failed."""
        answer = self.engine.load_lora_adapter(name, path)
        return "" if answer.success else answer.error_message

    def info(self, name: str) -> Any:
        """One of the engine's resolved options."""
        return self.engine.get_server_info()[name]

    def inside(self, name: str, args: list[Any]) -> list[Any]:
        """See `Engine.inside`."""
        answers = Path(self.scratch.name, str(next(self.numbers)))
        answers.mkdir()
        self.engine.collective_rpc("call_for_test", name=name, args=args, answers=str(answers))
        return [json.loads(file.read_text()) for file in sorted(answers.iterdir())]

    def stop(self) -> None:
        """Shut the engine down as a clean exit does."""
        self.engine.shutdown()


def _answer(output: dict[str, Any]) -> dict[str, Any]:
    info = output["meta_info"]
    return {
        "tokens": output["output_ids"],
        "logprobs": [logprob for logprob, *_ in info["output_token_logprobs"]],
        "cached": info["cached_tokens"],
        "sources": {"device": 0, "host": 0, "storage": 0} | _sources(info),
    }


def _sources(info: dict[str, Any]) -> dict[str, int]:
    details = info.get("cached_tokens_details") or {}
    return {name: count for name, count in details.items() if isinstance(count, int)}


class Server(Group):
    """`python -m sglang.launch_server` on a free port of the loopback. Use it as a context manager."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        cpus: str | None = None,
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        for name, value in (OPTIONS | options | {"model_path": str(model)}).items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                command.append(flag)
            elif value is not None and value is not False:
                command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_TIMEOUT_S)
        super().__init__(command, log, _environ(cpus, environ), cwd=ROOT)
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.child.poll() is None and time.monotonic() < deadline:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise self.died()

    def generate(self, ids: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """As `Served.generate` for one prompt, over HTTP; `more` is added to the body."""
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True} | more
        response = self.http.post("/generate", json=body)
        response.raise_for_status()
        return _answer(response.json())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.kill()


if __name__ == "__main__":
    serve(Served())
    os._exit(0)  # SGLang's threads may outlive its shutdown
