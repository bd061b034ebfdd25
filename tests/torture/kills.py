"""Processes that are killed while they store, two on one directory."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lmkv.backends.chunks import Index
from lmkv.backends.file import FileTier
from lmkv.tier import Status
from tests.test_file_tier import MiB, disk_bytes, get, key, put
from tests.torture.base import Fork, Run, check_served, check_tidy, hasty, known

#: Each directory is used for so many rounds.
ROUNDS = 10
#: Capacity and chunk size of a directory that evicts nothing meanwhile, and of one that always does.
ROOMY, TIGHT = (960 * MiB, 9000), (88 * MiB, 256 * 1024)
#: So many chunks fit into the first for sure.
ROOM = 40_000
#: Numbers that both processes store; their own begin at a multiple of OWN.
COMMON, OWN = 400, 1_000_000

Say = Callable[[str], None]


def store_for_ever(
    path: Path, kind: tuple[int, int], chance: random.Random, first: int, say: Say, opened: Callable[[], None]
) -> None:
    """Store, read and remove; says what was begun (b, r) and what was acknowledged (p, x)."""
    capacity, size = kind
    tier = FileTier(path, capacity)
    opened()
    number = first
    while True:
        mine = list(range(number, number := number + chance.randrange(1, 12)))
        say(f"b {mine[0]} {number}")
        statuses = put(tier, [*mine, chance.randrange(COMMON)], size)
        assert statuses == [Status.OK] * len(statuses), statuses
        say(f"p {mine[0]} {number}")
        assert set(get(tier, [chance.randrange(COMMON), mine[0]], size)) <= {Status.OK, Status.MISS}
        if chance.random() < 0.3:
            gone = chance.randrange(first, number)
            say(f"r {gone} {gone + 1}")
            statuses = tier.remove([key(gone), key(chance.randrange(COMMON))])
            assert Status.UNAVAILABLE not in statuses
            say(f"x {gone} {gone + 1}")
        if chance.random() < 0.03:
            with tier._catalog.changing():
                tier._catalog._compact()


class Ledger:
    """What the processes of one directory said."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}

    def note(self, lines: list[str]) -> None:
        for line in lines:
            event, first, end = line.split()
            self._last |= dict.fromkeys(range(int(first), int(end)), event)

    @property
    def begun(self) -> int:
        """How many chunks there may be."""
        return len(self._last)

    def numbers(self, event: str) -> list[int]:
        """Those of which this was said last."""
        return [number for number, last in self._last.items() if last == event]


class Place:
    """A directory, and what must hold in it after every kill."""

    def __init__(self, path: Path, kind: tuple[int, int]) -> None:
        self.path, self.kind, self.ledger = path, kind, Ledger()
        self.checked = 0

    def writer(
        self,
        chance: random.Random,
        first: int,
        begun: Callable[[], None] = lambda: None,
        opened: Callable[[], None] = lambda: None,
    ) -> Fork:
        """A child that stores for ever. It calls `begun` first of all, and `opened` when it has opened the
        directory."""
        seed = chance.random()

        def work(say: Say) -> None:
            begun()
            store_for_ever(self.path, self.kind, random.Random(seed), first, say, opened)

        return Fork(work)

    def check(self, first: int = 0) -> None:
        """All chunks from this number on, which are those of the last round, and some of the others."""
        capacity, size = self.kind
        assert not self.path.exists() or disk_bytes(self.path) <= capacity
        tier = FileTier(self.path, capacity)
        try:
            check_tidy(self.path, tier, capacity)
            numbers = known(tier)
            old = [number for number in numbers if number < first]
            numbers = list({*numbers} - {*old}) + random.sample(old, min(len(old), 200))
            self.checked += check_served(tier, numbers, size)
            assert not set(known(tier)) & set(self.ledger.numbers("x")), "what was removed is there"
            if self.kind is ROOMY and self.ledger.begun < ROOM:
                assert set(self.ledger.numbers("p")) <= set(known(tier)), "what was acknowledged is lost"
            counters = tier.stats().counters
            assert counters["corrupt"] == counters["races"] == counters["io_errors"] == 0
        finally:
            tier.close()


def random_moments(run: Run) -> str:
    """Two processes; one is killed at a random moment, the other goes on, and is killed too."""
    with hasty():
        place = Place(run.path / "0", ROOMY)
        checked = kept = 0
        for done, chance in enumerate(run.rounds()):
            if done % ROUNDS == 0 and done:
                place.check()
                checked, kept = checked + place.checked, kept + len(place.ledger.numbers("p"))
                place = Place(run.path / str(done), TIGHT if done // ROUNDS % 2 else ROOMY)
            firsts = (OWN * (2 * run.at + 1), OWN * (2 * run.at + 2))
            children = [place.writer(chance, first) for first in firsts]
            for child in children:
                time.sleep(chance.random() * 0.04)
                child.kill()
            for child in children:
                place.ledger.note(child.said())
            place.check(firsts[0])
        place.check()
        checked, kept = checked + place.checked, kept + len(place.ledger.numbers("p"))
    return f"0 bad, 0 orphans, within capacity; {checked:,} reads, {kept:,} stores were acknowledged"


#: Where a store passes from one state to the next: of whom the function is, and which.
STEPS: list[tuple[Any, str, str]] = [
    (owner, name, when)
    for owner, name, whens in (
        (os, "pwritev", ("before", "half", "after")),  # data
        (os, "fdatasync", ("before", "after")),  # of data, a compacted journal, removals
        (os, "pwrite", ("before", "half", "after")),  # the journal
        (Index, "insert", ("before", "after")),
        (Index, "discard", ("before", "after")),
        (Index, "recycle", ("before", "after")),
        (os, "posix_fallocate", ("before", "after")),  # a new segment
        (os, "rename", ("before", "after")),  # a compacted journal, FORMAT
    )
    for when in whens
]


def die_at(owner: Any, name: str, when: str, count: int) -> None:
    """Have this process kill itself at the `count`th call of a function."""
    real = getattr(owner, name)
    left = count

    def call(*arguments: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left > 0:
            return real(*arguments, **more)
        if when == "half":
            fd, data, offset = arguments
            # Of the vectors the first ones, of the journal an entry and a half, or less.
            real(fd, data[: len(data) // 2] if name == "pwritev" else data[: min(96, len(data) // 2)], offset)
        elif when == "after":
            real(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it was killed")

    setattr(owner, name, call)


def publish_steps(run: Run) -> str:
    """One process kills itself at a step of a store, beside another that goes on."""
    with hasty():
        places: dict[tuple[int, bool], Place] = {}
        for done, chance in enumerate(run.rounds()):
            owner, name, when = STEPS[run.at % len(STEPS)]
            at = done // (2 * ROUNDS), done % 2 == 1
            place = places.setdefault(at, Place(run.path / "{}{}".format(*at), TIGHT if at[1] else ROOMY))
            count = chance.randrange(1, 3 if name in ("rename", "posix_fallocate") else 12)
            other = place.writer(chance, OWN * (2 * run.at + 1))
            die = partial(die_at, owner, name, when, count)
            # An index is built, and a first journal and FORMAT written, while a directory is opened.
            moment = "begun" if owner is os and chance.random() < 0.5 else "opened"
            dying = place.writer(chance, OWN * (2 * run.at + 2), **{moment: die})
            assert dying.wait() == -signal.SIGKILL, f"it failed before {name}"
            time.sleep(chance.random() * 0.01)
            other.kill()
            for child in (other, dying):
                place.ledger.note(child.said())
            place.check(OWN * (2 * run.at + 1))
        checked = sum(place.checked for place in places.values())
    return f"0 bad, 0 orphans, within capacity; {checked:,} reads at {min(run.number, len(STEPS))} steps"
