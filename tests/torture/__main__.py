"""Run rows and print what became of them, as the table of docs/reliability.md. Exit code 1 on any breach.

Row: see tests/torture/rows.py. A breach names its round, which --seed ROUND --number 1 runs again.
"""

import argparse
import faulthandler
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from tests.torture.base import Row
from tests.torture.rows import ROWS

#: A row that takes longer hangs: where, is printed.
HANG_S = 3600


def main() -> None:
    """See the module's text."""
    rows = {row.name: row for row in ROWS}
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("row", nargs="*", help=f"all by default: {', '.join(rows)}")
    parser.add_argument("--share", type=float, default=1.0, help="of each row's number (default: all of it)")
    parser.add_argument("--number", type=int, help="of each row, instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments = parser.parse_args()
    if unknown := set(arguments.row) - rows.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    logging.getLogger("lmkv").setLevel(logging.CRITICAL)  # it speaks of every injected fault
    print("| row | what | number | outcome | seconds |\n|---|---|---|---|---|", flush=True)
    failed = []
    with tempfile.TemporaryDirectory(prefix="lmkv-torture-") as path:
        for name in arguments.row or rows:
            row = rows[name]
            number = arguments.number or row.part(arguments.share)
            if not passed(row, number, arguments.seed, Path(path)):
                failed.append(name)
    sys.exit(f"breached: {', '.join(failed)}" if failed else 0)


def passed(row: Row, number: int, seed: int, path: Path) -> bool:
    """Run one row and print its line."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    begun, good = time.monotonic(), True
    try:
        outcome = row.tried(number, seed, path)
    except pytest.skip.Exception as skipped:
        outcome = f"not run: {skipped}"
    except Exception as error:  # noqa: BLE001  # the other rows are run all the same
        traceback.print_exc()
        outcome, good = f"BREACH: {type(error).__name__}: {error}".replace("\n", " ")[:300], False
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - begun
    print(f"| `{row.name}` | {row.what} | {number:,} | {outcome} | {seconds:.0f} |", flush=True)
    return good


if __name__ == "__main__":
    main()
