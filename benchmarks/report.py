"""The form of a benchmark's result: a table on the terminal and JSON in build/bench/."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Row:
    """One figure beside its limit; `ratio` is value / limit, taken pairwise where both were measured."""

    op: str
    size_bytes: int
    value: float
    unit: str
    limit: float
    ratio: float


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write(path: Path, rows: list[Row]) -> None:
    """Print the table, ratio first, and write the JSON."""
    print(f"{'ratio':>7}  {'value':>10} {'unit':5} {'limit':>10}  {'bytes':>9}  op")
    for row in rows:
        print(
            f"{row.ratio:7.2f}  {row.value:10.3f} {row.unit:5} {row.limit:10.3f}"
            f"  {row.size_bytes:9}  {row.op}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {path}")
