"""lmkv's classes against the interfaces of vLLM releases: the installed one and the newest, by signature.

The newest has no CPU build. Its Python sources are enough to import the interfaces and lmkv's classes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import vllm_sources

ROOT = Path(__file__).resolve().parents[2]
#: Prints what differs between a base class's methods and lmkv's, and what lmkv leaves abstract.
PROBE = """
import inspect, json
import vllm
from vllm.v1.kv_offload import base
from lmkv.connectors.vllm.compat import check_version
from lmkv.connectors.vllm.connector import LMKVConnector
from lmkv.connectors.vllm.manager import LMKVManager
from lmkv.connectors.vllm.spec import LMKVOffloadingSpec
from lmkv.connectors.vllm.worker import LMKVWorker

differences = []
for parent, child in (
    (base.OffloadingManager, LMKVManager),
    (base.OffloadingWorker, LMKVWorker),
    (base.OffloadingSpec, LMKVOffloadingSpec),
):
    differences += [f"{child.__name__}.{name} is missing" for name in child.__abstractmethods__]
    for name, method in vars(parent).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            wanted = list(inspect.signature(method).parameters.values())
            found = list(inspect.signature(getattr(child, name)).parameters.values())
            extra = found[len(wanted):]
            if [p.name for p in found[:len(wanted)]] != [p.name for p in wanted] or any(
                p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in extra
            ):
                differences.append(f"{child.__name__}.{name}: {found} instead of {wanted}")
print(json.dumps([vllm.__version__, check_version(), differences]))
"""


@pytest.mark.parametrize("release", ["installed", vllm_sources.RELEASE])
def test_signatures_fit(release: str) -> None:
    path = [str(ROOT)] if release == "installed" else [str(vllm_sources.sources()), str(ROOT)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    version, warning, differences = json.loads(done.stdout.splitlines()[-1])
    assert release in ("installed", version)
    assert warning is None
    assert differences == []
