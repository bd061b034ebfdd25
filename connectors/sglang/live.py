"""What of lmkv serves in this process, and what it does when the engine's weights change.

SGLang's page hash does not name the weights, and its flush leaves what lies below its host pool alone.
So `lmkv.connectors.sglang.plugin` hooks every way in which weights are replaced, and calls this before and
after: before, so that nothing old is read once the new weights are there; after, so that what was still
being written meanwhile is never read either.
"""

import weakref
from typing import Protocol

from lmkv.gate import Gate


class Live(Protocol):
    """A storage or a linker."""

    def forget(self, reason: str) -> None:
        """Serve nothing older than now, and leave what other engines share alone."""


#: Whether loading beats computing here, as far as it was measured.
gate = Gate()
_serving: "weakref.WeakSet[Live]" = weakref.WeakSet()
_watched = False


def watch() -> None:
    """Note that the hooks are in place."""
    global _watched
    _watched = True


def watched() -> bool:
    """Whether this process will hear of changed weights."""
    return _watched


def add(served: Live) -> None:
    """Tell `served` about changes of the weights from now on."""
    _serving.add(served)


def forget_all(reason: str) -> None:
    """Everything that was stored so far counts as of other weights."""
    for served in list(_serving):
        served.forget(reason)
