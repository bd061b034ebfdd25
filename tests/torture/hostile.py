"""Names and links that somebody planted in the directory: nothing outside of it is written to."""

import contextlib
import os
import random
import socket
import stat
from pathlib import Path

from lmkv.backends.file import FileTier
from lmkv.config import ConfigError
from lmkv.tier import Status
from tests.test_file_tier import MiB, get, key, put
from tests.torture.base import Run, hasty

CAPACITY = 40 * MiB  # four segments
#: Names that the tier uses, and names that look like it.
OURS = (
    *(f"w0-{segment:05}.seg" for segment in range(5)),
    *("w0.journal", "w0.journal.tmp", "FORMAT", "FORMAT.tmp", "writer.lock"),
)
ALIKE = (
    *(
        "w0-65535.seg",
        "w0-65536.seg",
        "w0-99999.seg",
        "w0-1.seg",
        "w1-00000.seg",
        "w0-00000.seg\n",
        "probe.1.2",
    ),
    *(
        "w0-\u0660\u0660\u0660\u0660\u0661.seg",
        "-rf",
        "..seg",
        "...",
        " ",
        "a\nb",
        "\x1b[2J",
        "%s%n",
        "$(touch x)",
        "w1.journal",
    ),
    *("x" * 255, os.fsdecode(b"\xff\xfe.seg"), "probe.99999999999999999999.1"),
)
KINDS = (
    *("link to a file", "link to a directory", "link to nothing", "hard link", "link to itself"),
    *("directory", "pipe", "socket", "file", "large file"),
)


class Outside:
    """What lies beside the directory, and must stay as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "folder").mkdir(parents=True)
        for name in ("precious", "folder/inside"):
            (path / name).write_bytes(b"do not touch " * 10_000)
        self._before = self._state()

    def _state(self) -> dict[str, tuple[object, ...]]:
        state: dict[str, tuple[object, ...]] = {}
        for root, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                path = Path(root) / name
                status = path.lstat()
                content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
                shape = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_blocks)
                state[str(path)] = (*shape, content)
        return state

    def check(self) -> None:
        """Nothing was written, created or deleted."""
        after = self._state()
        changed = [name for name in self._before.keys() | after if self._before.get(name) != after.get(name)]
        assert not changed, f"written outside: {changed}"

    def plant(self, place: Path, kind: str) -> None:
        """Put something of this kind in a place, whatever is there now."""
        with contextlib.suppress(OSError):
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
        with contextlib.suppress(OSError):  # some names are too long for some kinds
            match kind:
                case "link to a file":
                    place.symlink_to(self.path / "precious")
                case "link to a directory":
                    place.symlink_to(self.path / "folder")
                case "link to nothing":
                    place.symlink_to(self.path / "folder" / "new")
                case "hard link":
                    place.hardlink_to(self.path / "precious")
                case "link to itself":
                    place.symlink_to(place)
                case "directory":
                    place.mkdir()
                case "pipe":
                    os.mkfifo(place)
                case "socket":
                    with socket.socket(socket.AF_UNIX) as bound:
                        bound.bind(str(place))
                case "file":
                    place.write_bytes(b"not yours" * 100)
                case "large file":
                    place.write_bytes(bytes(10 * MiB))


def _use(tier: FileTier, chance: random.Random, first: int) -> None:
    """Store some, or enough to take and recycle all there is."""
    for n in range(first, first + chance.choice((40, 40, 160)), 20):
        numbers = list(range(n, n + 20))
        put(tier, numbers)
        get(tier, numbers)  # what is served is right
        tier.remove([key(chance.choice(numbers))])


def names_and_links(run: Run) -> str:
    """Some are there before the directory is opened, some come while it is in use."""
    refused = stored = 0
    with hasty():
        for chance in run.rounds():
            outside = Outside(run.path / str(run.at) / "outside")
            path = run.path / str(run.at) / "kv"
            if chance.random() < 0.7:
                tier = FileTier(path, CAPACITY)
                put(tier, list(range(40)))
                tier.close()
            else:
                path.mkdir(mode=0o700)
            for _ in range(chance.randint(1, 4)):
                outside.plant(
                    path / chance.choice(OURS if chance.random() < 0.7 else ALIKE), chance.choice(KINDS)
                )
            try:
                tier = FileTier(path, CAPACITY)
            except ConfigError:
                refused += 1
                outside.check()
                continue
            _use(tier, chance, 1000)
            for _ in range(chance.randint(0, 3)):
                outside.plant(path / chance.choice(OURS), chance.choice(KINDS))
            _use(tier, chance, 2000)
            stored += put(tier, [3000]) == [Status.OK]
            tier.close()
            with contextlib.suppress(ConfigError):
                FileTier(path, CAPACITY).close()
            outside.check()
    return f"0 writes outside; {refused} directories were refused, {stored} were used"
