"""What is built holds all four rooms, though three of them reach the package through symlinks."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WANTED = [
    "lmkv/py.typed",
    "lmkv/backends/file.py",
    "lmkv/kernels/cpu.py",
    "lmkv/connectors/vllm/connector.py",
]


def build(hook: str, source: Path, out: Path) -> Path:
    """Call a hook of the build backend, without an isolated environment and so without a network."""
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout with its symlinks, since a build writes into the source tree."""
    skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    return Path(shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=skip))


def test_wheel(source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("build_wheel", source, tmp_path / "out")) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("/METADATA"))
        (entry_points,) = (wheel.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    assert names >= set(WANTED)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"lmkv"}
    assert "[vllm.general_plugins]\nlmkv = lmkv.connectors.vllm:register" in entry_points
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert len(required) == 3
    assert not any(operator in line for line in required for operator in ("==", "<", "~=")), required


def test_sdist_and_the_wheel_made_from_it(source: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build("build_wheel", unpacked, tmp_path / "out")) as wheel:
        assert set(wheel.namelist()) >= set(WANTED)
