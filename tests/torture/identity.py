"""Namespaces: each field separates, no two sets of fields share one, and all processes agree."""

import ast
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmkv.keys import Namespace, make_key
from tests.processes import ROOT

if TYPE_CHECKING:  # new processes import this module, which is to be fast
    from tests.torture.base import Run

PROCESSES = 8


def fields_of(engine: str) -> list[str]:
    """The names of an engine's identity fields, read from the source: no engine is needed."""
    tree = ast.parse((ROOT / "connectors" / engine / "identity.py").read_text())
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    names = [key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    return sorted({name for name in names if isinstance(name, str)})


def _tuples(seed: int, number: int) -> Iterator[dict[str, str]]:
    """Sets of fields, most of which are like another but for one character, or for where a field ends."""
    chance = random.Random(seed)
    names = fields_of("vllm")
    letters = "ab0,;=:{}\0\n é\udcff"
    base = {name: name[:2] for name in names}
    for _ in range(number):
        fields = dict(base)
        for name in chance.sample(names, chance.randint(1, 4)):
            fields[name] = "".join(chance.choices(letters, k=chance.randint(0, 4)))
        match chance.randrange(4):
            case 0:  # what one field loses the next one gets
                one, other = chance.sample(names, 2)
                fields[one], fields[other] = "", fields[one] + fields[other]
            case 1:  # so does a name
                name = chance.choice(names)
                text = fields.pop(name)
                fields[name + text[:1]] = text[1:]
            case 2:
                fields.pop(chance.choice(names))
            case _:
                pass
        if chance.random() < 0.2:
            base = fields if len(fields) == len(names) and fields.keys() == base.keys() else base
        yield fields


def digest_of_all(seed: int, number: int) -> str:
    """Of all namespaces, in order."""
    whole = hashlib.sha256()
    for fields in _tuples(seed, number):
        whole.update(Namespace.of(fields).digest)
    return whole.hexdigest()


def fields_alone(run: "Run") -> str:
    """Each field of each engine's namespace, changed alone."""
    counts = []
    for engine in ("vllm", "sglang"):
        names = fields_of(engine)
        base = Namespace.of(dict.fromkeys(names, "1"))
        digests = {base.digest}
        for name in names:
            for value in ("2", "", "11", "1 "):
                other = Namespace.of(base.fields | {name: value})
                assert other.differences(base) == {name: (value, "1")}
                digests.add(other.digest)
            less = Namespace.of({field: "1" for field in names if field != name})
            assert less.differences(base) == {name: (None, "1")}
            digests.add(less.digest)
        assert len(digests) == 1 + 5 * len(names)
        counts.append(f"{len(names)}/{len(names)} of {engine}")
    assert len({make_key(base.digest, b"1", group) for group in range(100)}) == 100
    return f"{', '.join(counts)} separate"


def random_tuples(run: "Run") -> str:
    """Different sets of fields have different namespaces, in whatever order they are written down."""
    seen: dict[bytes, frozenset[tuple[str, str]]] = {}
    chance = random.Random(run.seed)
    for fields in _tuples(run.seed, run.number):
        items = list(fields.items())
        digest = Namespace.of(fields).digest
        chance.shuffle(items)
        assert Namespace.of(dict(items)).digest == digest
        assert seen.setdefault(digest, frozenset(items)) == frozenset(items), "a collision"
    expected = digest_of_all(run.seed, run.number)
    source = f"from tests.torture import identity; print(identity.digest_of_all({run.seed}, {run.number}))"
    for first in range(0, PROCESSES, 2):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", source],
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=os.environ | {"PYTHONHASHSEED": str(first + i + 1)},
            )
            for i in range(2)
        ]
        for child in children:
            answer, _ = child.communicate()
            assert answer.decode().strip() == expected, "two processes disagree"
    return f"0 collisions among {len(seen):,} that differ; {PROCESSES} processes agree"
