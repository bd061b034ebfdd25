"""lmkv's classes against the base classes of vLLM 0.33, which has no CPU build to run on.

Its sources are parsed, not imported: the new classes beside the old ones would be one too many.
"""

import ast
import inspect
from pathlib import Path

import pytest

from lmkv.connectors.vllm.connector import LMKVConnector
from lmkv.connectors.vllm.manager import LMKVManager
from lmkv.connectors.vllm.spec import LMKVOffloadingSpec
from lmkv.connectors.vllm.worker import LMKVWorker
from tools import vllm_sources

OFFLOAD = "v1/kv_offload/base.py"
CONNECTOR = "distributed/kv_transfer/kv_connector/v1/offloading_connector.py"
PAIRS = [
    (LMKVManager, OFFLOAD, "OffloadingManager"),
    (LMKVWorker, OFFLOAD, "OffloadingWorker"),
    (LMKVOffloadingSpec, OFFLOAD, "OffloadingSpec"),
    (LMKVConnector, CONNECTOR, "OffloadingConnector"),
]


@pytest.fixture(scope="module")
def sources() -> Path:
    return vllm_sources.sources() / "vllm"


def base_methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def decorators(method: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in method.decorator_list}


@pytest.mark.parametrize(("ours", "file", "name"), PAIRS)
def test_every_abstract_method_is_there(sources: Path, ours: type, file: str, name: str) -> None:
    abstract = {n for n, m in base_methods(sources / file, name).items() if "abstractmethod" in decorators(m)}
    assert abstract <= {attribute for cls in ours.__mro__ for attribute in vars(cls)}
    assert not inspect.isabstract(ours)
    if name != "OffloadingConnector":
        assert abstract, "the base class was not found as it was read"
        assert abstract <= vars(ours).keys()


@pytest.mark.parametrize(("ours", "file", "name"), PAIRS)
def test_every_method_takes_the_new_calls(sources: Path, ours: type, file: str, name: str) -> None:
    """Our overrides take what 0.33's callers may pass: all its parameters, in order, and no more
    that are required."""
    checked = 0
    for method_name, base in base_methods(sources / file, name).items():
        if method_name not in vars(ours) or "property" in decorators(base):
            continue
        parameters = list(inspect.signature(getattr(ours, method_name)).parameters.values())
        if not decorators(base) & {"classmethod", "staticmethod"}:
            parameters = parameters[1:]  # self
        wanted = [argument.arg for argument in [*base.args.posonlyargs, *base.args.args][1:]]
        assert [p.name for p in parameters[: len(wanted)]] == wanted, method_name
        assert all(p.default is not p.empty for p in parameters[len(wanted) :]), method_name
        required = len(wanted) - len(base.args.defaults)
        assert all(p.default is not p.empty for p in parameters[required : len(wanted)]), method_name
        assert not base.args.kwonlyargs, method_name
        checked += 1
    assert checked > 1


def test_calls_of_the_connector_s_scheduler_are_known(sources: Path) -> None:
    """0.33's offloading scheduler calls nothing on its manager that 0.32's base class and lmkv lack."""
    path = sources / "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self.manager"
    }
    inherited = set(base_methods(sources / OFFLOAD, "OffloadingManager"))
    assert called <= inherited
    assert {"lookup", "prepare_load", "prepare_store", "complete_load", "complete_store"} <= called


def imported_names() -> list[tuple[str, str]]:
    """(module, name) of all that lmkv's connector imports from vLLM."""
    found = []
    for file in Path(inspect.getfile(LMKVConnector)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
                found += [(str(node.module), alias.name) for alias in node.names]
    return sorted(set(found))


@pytest.mark.parametrize(("module", "name"), imported_names())
def test_what_lmkv_imports_is_still_there(sources: Path, module: str, name: str) -> None:
    path = sources.parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    words = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            words.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            words |= {alias.asname or alias.name for alias in node.names}
    assert name in words


def test_what_lmkv_calls_is_still_there(sources: Path) -> None:
    folder = sources / "distributed/kv_transfer/kv_connector/v1/offloading"
    scheduler = base_methods(folder / "scheduler.py", "OffloadingConnectorScheduler")
    arguments = [argument.arg for argument in scheduler["get_external_cache_hit_sources"].args.args]
    assert arguments == ["self", "request", "num_external_tokens"]
    config = ast.parse((folder / "config.py").read_text())
    functions = {node.name: node for node in config.body if isinstance(node, ast.FunctionDef)}
    build = functions["build_offloading_config"]
    assert [argument.arg for argument in build.args.args][:2] == ["vllm_config", "kv_cache_config"]
