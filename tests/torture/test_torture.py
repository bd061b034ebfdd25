"""A small part of every row of the torture table; `make torture` runs all of it."""

from pathlib import Path

import pytest

from tests.torture.base import Row
from tests.torture.rows import ROWS

SHARE = 0.03
#: No test fails because the machine is slow.
PATIENCE = 20.0


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_row(row: Row, tmp_path: Path) -> None:
    row.tried(row.part(SHARE), 0, tmp_path, PATIENCE)
