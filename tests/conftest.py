"""Shared by all tests: Hypothesis without wall-clock limits, and which tests need an engine."""

import importlib.util

import pytest
from hypothesis import settings

# A deadline is a wall-clock limit, and a busy machine breaks those. (Where CI is set, Hypothesis is
# deterministic by itself; this profile keeps that.)
settings.register_profile("lmkv", deadline=None)
settings.load_profile("lmkv")

#: Where the tests of each engine lie. Without that engine their files cannot even be imported.
ENGINES = {"vllm": "engine", "sglang": "sglang"}
collect_ignore = [folder for engine, folder in ENGINES.items() if importlib.util.find_spec(engine) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need an engine."""
    for item in items:
        if item.path.parent.name in ENGINES.values():
            item.add_marker(pytest.mark.engine)
