"""How fast this process computes prompts: hooks around the batches of SGLang's scheduler.

A batch begins in `run_batch` and is over in `process_batch_result`. With overlap the next one begins before;
the result that goes from one to the other tells which is which.
"""

import time
import weakref
from collections import deque
from typing import Any, NamedTuple

from lmkv.boundary import guarded
from lmkv.connectors.sglang import compat, live
from lmkv.metrics import RateLimitedLog, SharedMetrics

#: A batch of fewer prompt tokens is all overhead, and tells nothing of long prompts.
_PREFILL_TOKENS = 32


class _Step(NamedTuple):
    result: "weakref.ref[Any]"
    tokens: int
    began: float


class Steps:
    """The batches under way in this process."""

    def __init__(self) -> None:
        self.metrics = SharedMetrics()
        self.log = RateLimitedLog()
        #: Some results are never processed (idle batches of data-parallel attention).
        self._under_way: deque[_Step] = deque(maxlen=8)
        self._ended = 0.0

    def run_batch(self, run: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `Scheduler.run_batch`."""
        began = time.monotonic()
        result = run(scheduler, batch, *args, **kwargs)
        self._began(batch, result, began)
        return result

    def process_batch_result(
        self, process: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `Scheduler.process_batch_result`."""
        try:
            return process(scheduler, batch, result, *args, **kwargs)
        finally:
            self._end(result)

    @guarded(lambda *_: None)
    def _began(self, batch: Any, result: Any, began: float) -> None:
        if result is not None:
            self._under_way.append(_Step(weakref.ref(result), compat.prompt_tokens(batch), began))

    @guarded(lambda *_: None)
    def _end(self, result: Any) -> None:
        now = time.monotonic()
        for step in self._under_way:
            if step.result() is result:
                self._under_way.remove(step)
                if (
                    step.tokens >= _PREFILL_TOKENS
                ):  # with two under way, the second begins when the first ends
                    live.gate.computed(step.tokens, now - max(step.began, self._ended))
                break
        self._ended = now
