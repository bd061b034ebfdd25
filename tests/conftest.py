"""Shared by all tests: Hypothesis without wall-clock limits, and which tests need an engine."""

import importlib.util

import pytest
from hypothesis import settings

# A deadline is a wall-clock limit, and a busy machine breaks those. (Where CI is set, Hypothesis is
# deterministic by itself; this profile keeps that.)
settings.register_profile("lmkv", deadline=None)
settings.load_profile("lmkv")

# Without an engine the files in tests/engine cannot even be imported.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["engine"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/engine as needing an engine."""
    for item in items:
        if "engine" in item.path.parts:
            item.add_marker(pytest.mark.engine)
