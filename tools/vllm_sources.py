"""The Python sources of a vLLM release that has no CPU build, to check lmkv against its interfaces.

    python -m tools.vllm_sources        prints the directory that holds the package `vllm` of RELEASE

The release is a CUDA wheel (336 MB); only its .py files are kept. They are read, and where they need no
compiled extension imported, never run as an engine.
"""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.env import cache_dir, locked, pip, say

RELEASE = "0.33.0"


def sources() -> Path:
    """The directory to put on sys.path; downloaded first if it is not there yet."""
    target = cache_dir() / f"vllm-{RELEASE}-src"
    with locked(target.name):
        if not target.exists():
            say(f"making {target} (a download of 336 MB)")
            with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
                wheels, out = Path(scratch) / "wheels", Path(scratch) / "out"
                where = ("--no-deps", "--only-binary", ":all:", "-d", str(wheels))
                pip(Path(sys.executable), "download", "-qq", *where, f"vllm=={RELEASE}")
                (wheel,) = wheels.iterdir()
                with zipfile.ZipFile(wheel) as archive:
                    files = [name for name in archive.namelist() if name.endswith(".py")]
                    archive.extractall(out, files)
                shutil.rmtree(wheels)
                out.rename(target)
    return target


if __name__ == "__main__":
    print(sources())
