"""What the rows are made of: rounds with seeds, forked children, checks of a directory, memory."""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple
from unittest.mock import patch

from lmkv.backends import file as file_module
from lmkv.backends import journal as journal_module
from lmkv.backends import redis as redis_module
from lmkv.backends import segments as segments_module
from lmkv.backends import servers as servers_module
from lmkv.backends.file import FileTier
from lmkv.backends.journal import ENTRY_BYTES
from lmkv.tier import Status
from tests.processes import die_with_parent
from tests.test_file_tier import disk_bytes, get

#: A child that has not ended after this hangs.
HANG_S = 120.0
#: What a row may add to this process's memory.
MAX_GROWTH_BYTES = 64 * 2**20


@dataclass
class Run:
    """One run of a row."""

    number: int
    seed: int
    #: An empty directory.
    path: Path
    #: How many times as long as promised something may take: on a machine that does other things too.
    patience: float = 1.0
    #: The round that is under way.
    at: int = 0

    def rounds(self, number: int | None = None) -> Iterator[random.Random]:
        """A generator of chance for each round, made from the round's number."""
        for seed in range(self.seed, self.seed + (self.number if number is None else number)):
            self.at = seed
            yield random.Random(seed)


class Row(NamedTuple):
    """One row of the table. `run` raises on a breach, and else says what it saw."""

    name: str
    what: str
    number: int
    run: Callable[[Run], str]
    #: However small the share of `number` is.
    least: int = 1

    def part(self, share: float) -> int:
        """So much of the number, as far as that makes sense."""
        return max(self.least, round(self.number * share))

    def tried(self, number: int, seed: int, path: Path, patience: float = 1.0) -> str:
        """Run it in a new directory under `path`; what was seen."""
        run = Run(number, seed, Path(tempfile.mkdtemp(dir=path)), patience)
        try:
            return self.run(run)
        except Exception as error:
            # Processes and threads run as they like, and some rounds build on those before them.
            again = f"python -m tests.torture --seed {run.at} --number 1 {self.name}"
            error.add_note(f"round {run.at}; to see it again: {again}")
            raise
        finally:
            for child in list(Fork.running):
                child.signal(signal.SIGKILL)
                child.wait()
            shutil.rmtree(run.path, ignore_errors=True)


class Fork:
    """A child that begins as a copy of this process, and runs `work`, which gets a way to say words."""

    running: ClassVar[set["Fork"]] = set()

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        # Memory, not a pipe: it never fills up, and what a killed child has said stays.
        self._said = os.memfd_create("lmkv-torture")
        self._read = 0
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                die_with_parent()
                work(lambda words: _write_line(self._said, words))
                code = 0
            except BaseException:  # noqa: BLE001  # nothing may return into the parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
        self.status: int | None = None
        self.running.add(self)

    def __del__(self) -> None:
        os.close(self._said)

    def signal(self, number: int) -> None:
        """Send a signal, unless it ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; it must not have failed before that."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, "a child failed"

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it); None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.running.discard(self)
        return self.status

    def wait(self, timeout_s: float = HANG_S) -> int:
        """The same when it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"a child hung for {timeout_s} s")
            time.sleep(0.0005)
        assert self.status is not None
        return self.status

    def line(self) -> str:
        """What it says next; it must not end before."""
        deadline = time.monotonic() + HANG_S
        while not (end := os.pread(self._said, 4096, self._read).find(b"\n") + 1):
            assert self.poll() is None and time.monotonic() < deadline, "a child ended or hung"
            time.sleep(0.0005)
        line = os.pread(self._said, end - 1, self._read).decode()
        self._read += end
        return line

    def said(self) -> list[str]:
        """All that it said so far."""
        text = os.pread(self._said, os.fstat(self._said).st_size, 0).decode()
        return text.split("\n")[:-1]


def _write_line(fd: int, words: str) -> None:
    os.write(fd, f"{words}\n".encode())


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """A loaded machine is no dead server, and no stopped process."""
    with (
        patch.object(redis_module, "DEADLINE_S", HANG_S),
        patch.object(servers_module, "CONNECT_S", HANG_S),
        patch.object(segments_module, "LOCK_WAIT_S", HANG_S),
    ):
        yield


@contextlib.contextmanager
def hasty() -> Iterator[None]:
    """Tiers that look for each other's news all the time, and compact their journal all the time."""
    with (
        patient(),
        patch.object(file_module, "POLL_S", 0.0),
        patch.object(journal_module, "LOOK_S", 0.0),
        patch.object(journal_module, "_SLACK_BYTES", 64 * ENTRY_BYTES),
    ):
        yield


def known(tier: FileTier) -> list[int]:
    """The numbers of all chunks that a tier offers (see `tests.test_file_tier.key`)."""
    with tier._catalog.lock:
        spaces = [list(space) for space in tier._catalog.index.spaces.values()]
    return [int.from_bytes(rest[:32], "little") for rests in spaces for rest in rests]


def check_tidy(path: Path, tier: FileTier, capacity: int) -> None:
    """A directory that was just opened again is within its capacity and holds nothing that nobody knows."""
    assert disk_bytes(path) <= capacity, "larger than its capacity"
    names = {name for name in os.listdir(path) if not name.startswith("probe.")}  # these live for a minute
    names -= {"FORMAT", "writer.lock", "w0.journal"}
    segments = {f"w0-{segment:05}.seg" for segment in tier._catalog.index.segments}
    assert names <= segments, f"orphans: {names - segments}"


def check_served(tier: FileTier, numbers: list[int], size: int) -> int:
    """All of these chunks are served, and right."""
    for first in range(0, len(numbers), 64):
        some = numbers[first : first + 64]
        statuses = get(tier, some, size)
        bad = [pair for pair in zip(some, statuses, strict=True) if pair[1] is not Status.OK]
        assert not bad, f"not served: {bad[:5]}"
    return len(numbers)


def peak_bytes() -> int:
    """The most memory that this process had since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> int:
    """Forget the peak; the memory of this process now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not here: the peak so far is the baseline
        return peak_bytes()
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
