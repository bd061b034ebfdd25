"""The seeded simulation of the store (tests/test_store.py), for as many seeds as there is time for.

To see one again: python -m tests.torture --seed SEED --number 1 simulation
"""

import logging
from collections import Counter

from tests.test_store import Simulation
from tests.torture.base import Run


def seeds(run: Run) -> str:
    """Consecutive seeds."""
    total: Counter[str] = Counter()
    logger = logging.getLogger("lmkv")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        for _ in run.rounds():
            simulation = Simulation(run.at)
            simulation.run()
            total += simulation.counts
    finally:
        logger.setLevel(level)
    hits, chunks, promoted = total["hits"], total["chunks"], total["file"] + total["redis"]
    return f"0 breaches; {hits:,} of {chunks:,} chunks hit, {promoted:,} promoted; {total['resets']:,} resets"
