"""A child process that is driven over its standard streams, for harnesses of real engines.

`Child` is the test's side: one JSON line per call, one back. `serve` is the child's side: it calls the
methods of an object. What the child prints goes to its log.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: An answer this late means that the child hangs: whole engines start within it on a loaded machine.
REPLY_TIMEOUT_S = 300


class EngineError(Exception):
    """The child raised, or died; the text says what."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the tests are killed themselves. Engines do so with theirs."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Group:
    """A command in a session of its own, so that a kill reaches all processes that it starts.

    `environ` is added to this process's environment, from which lmkv's settings are taken out.
    """

    def __init__(self, command: list[str], log: Path, environ: dict[str, str], **streams: Any) -> None:
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
        with open(log, "w") as file:
            self.child = subprocess.Popen(
                command,
                stderr=file,
                env=inherited | {"PYTHONPATH": str(ROOT)} | environ,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
                **({"stdout": file} | streams),
            )

    def kill(self) -> None:
        """SIGKILL to the engine and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def died(self) -> EngineError:
        """The error to raise when the child is gone."""
        return EngineError(f"the engine died:\n{self.log.read_text()[-6000:]}")


class Child(Group):
    """A child that runs `serve`: `module` is what `python -m` starts."""

    def __init__(self, module: str, log: Path, environ: dict[str, str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__([sys.executable, "-m", module], log, environ, cwd=ROOT, **pipes)

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
            raise self.died()
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self.log.read_text()[-6000:]}")
        return answer["value"]


def _too_late(*_: object) -> None:
    raise EngineError("the engine did not answer")


def serve(served: Any) -> None:
    """Answer calls of `served`'s methods until `stop` was called or the test's side is gone."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
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


def prompt(seed: int, tokens: int, first: int | None = None) -> list[int]:
    """Random token ids, optionally after a fixed first one. Of two prompts with equal seeds the shorter
    is the other's prefix; with different seeds they share nothing."""
    source = random.Random(seed)
    ids = [source.randrange(100, 4000) for _ in range(tokens)]
    return ids if first is None else [first, *ids[1:]]
