"""What runs inside SGLang's scheduler processes when a test's engine is an `sglang.Engine`.

SGLang lets a caller of `Engine` call any method of its schedulers, one per rank, but brings no answer back.
So the method below puts each rank's answer into a file.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any

#: JSON [[name, argument], ...]: functions that each scheduler process calls, before its engine is made.
FAULTS = "TEST_FAULTS"


def named(name: str) -> Any:
    """The function "module:name"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """SGLang's own, after the method was added and the faults were put in."""
    from sglang.srt.managers import scheduler

    scheduler.Scheduler.call_for_test = _call
    for name, argument in json.loads(os.environ.get(FAULTS, "[]")):
        named(name)(argument)
    return scheduler.run_scheduler_process(*args, **kwargs)


def _call(scheduler: Any, name: str, args: list[Any], answers: str) -> None:
    """Call `name(scheduler, *args)` and leave the answer in `answers`/<rank>."""
    answer = json.dumps(named(name)(scheduler, *args))
    rank = f"{scheduler.tp_group.rank_in_group:03}-{os.getpid()}"
    Path(answers, rank).write_text(answer)


def busy(scheduler: Any) -> list[str]:
    """What this rank has not ended yet: requests, copies and writes."""
    found = [] if scheduler.is_fully_idle() else ["scheduler"]
    linker = getattr(scheduler.tree_cache, "linker", None)
    if linker is not None:
        found += ["offloads"] if linker.pending_offloads else []
        # lmkv's linker writes to the tiers below its slab on its own.
        found += ["writes"] if getattr(linker.cache_linker, "pending_writes", 0) else []
    return found
