"""Keeps exceptions of the connector's hooks out of the executor, which most of them would end.

After the first exception the connector begins no lookups, loads or stores. Copies in flight are still reported.
A hook that reports loads is not guarded: pages that were promised must not be reported as in place by accident, and a
request must not wait for ever.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("kvferry")

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Faults:
    """The first failure of a hook."""

    #: Name of the failed hook; empty without a failure.
    fault = ""

    def failed(self, hook: str) -> None:
        """Records the current exception; logs the first one as an error, later ones for debugging."""
        if self.fault:
            logger.debug("kvferry: %s failed, too", hook, exc_info=True)
            return
        self.fault = hook
        logger.exception("kvferry: %s failed: requests run without the cache until the engine is started again", hook)


def guarded(*, instead: Callable[..., Any], begins: bool = False) -> Callable[[_Hook], _Hook]:
    """A decorator for a hook.

    When the hook raises, ``instead`` is called with the same arguments, and its result is returned. A hook that
    ``begins`` something is no longer called after any hook of its object has failed.
    """

    def around(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def call(self: Faults, *arguments: Any, **named: Any) -> Any:
            if begins and self.fault:
                return instead(self, *arguments, **named)
            try:
                return hook(self, *arguments, **named)
            except Exception:
                self.failed(hook.__name__)
            return instead(self, *arguments, **named)

        call.guarded = True  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return around
