"""The boundary to an engine: the one place where lmkv catches everything."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from lmkv.metrics import Metrics, RateLimitedLog

F = TypeVar("F", bound=Callable[..., Any])


class Guarded(Protocol):
    """What an object needs whose methods are guarded."""

    metrics: Metrics
    log: RateLimitedLog


def guarded(default: Callable[..., Any]) -> Callable[[F], F]:
    """Turn whatever a method raises into a counted miss: what `default`, called with the same
    arguments, returns goes back to the engine."""

    def decorate(call: F) -> F:
        @wraps(call)
        def guard(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, *args, **kwargs)
            except Exception:  # the boundary: no fault of lmkv's may fail a request
                self.metrics.add("lmkv_errors", 1, call.__name__)
                self.log.warning(call.__name__, "error in %s", call.__name__, exc_info=True)
                return default(*args, **kwargs)

        return cast(F, guard)

    return decorate
