"""Engines for the tests of this directory, and the answers of engines without lmkv."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.harness import Engine, Server
from tools import models

#: Reference engines kept running; each takes 1 to 2 GB.
MAX_REFERENCES = 1


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names for the engines' logs."""
    folder = tmp_path_factory.mktemp("logs")
    return (folder / f"{number}.log" for number in itertools.count())


@pytest.fixture(scope="session")
def start(logs: Iterator[Path]) -> Callable[..., Engine]:
    """Start an engine: `start(model, **options)`, see `Engine`."""
    return lambda model, **options: Engine(models.path(model), next(logs), **options)


@pytest.fixture(scope="session")
def serve(logs: Iterator[Path]) -> Callable[..., Server]:
    """Start a server: `serve(model, **options)`, see `Server`."""
    return lambda model, **options: Server(models.path(model), next(logs), **options)


@pytest.fixture(scope="session")
def reference(start: Callable[..., Engine]) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """What an engine without lmkv answers: `reference(model, prompts, max_tokens, **options)`. Each prompt is
    sent alone, to an empty cache; answers are kept for the session."""
    answers: dict[str, dict[str, Any]] = {}
    engines: dict[str, Engine] = {}
    with contextlib.ExitStack() as stack:

        def ask(
            model: str, prompts: list[list[int]], max_tokens: int = 8, lora: str | None = None, **options: Any
        ) -> list[dict[str, Any]]:
            engine_key = repr((model, sorted(options.items())))
            out = []
            for prompt in prompts:
                key = f"{engine_key} {max_tokens} {lora} {prompt}"
                if key not in answers:
                    engine = engines.pop(engine_key, None)
                    if engine is None:
                        if len(engines) == MAX_REFERENCES:
                            engines.pop(next(iter(engines))).kill()
                        # Asleep between requests: it would spin and take a core from the engine under test.
                        engine = stack.enter_context(start(model, sleep_on_idle=True, **options))
                    engines[engine_key] = engine
                    assert engine.flush_cache()
                    (answers[key],) = engine.generate([prompt], max_tokens, lora=lora)
                out.append(answers[key])
            return out

        yield ask
