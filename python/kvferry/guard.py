"""Keeps exceptions of the connector's hooks out of vLLM's step, most of whose calls would end the engine.

After the first one the connector begins nothing any more: no lookups, loads or stores. Hooks that report what is open,
or give pages back, go on. Every hook that can fail has :func:`guarded` around it.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("vllm.kvferry")

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Faults:
    """Whether a hook has failed, or something that the hooks rely on, and what first."""

    #: Name of the hook, or words for what else failed; empty while nothing has.
    fault = ""

    def failed(self, hook: str) -> None:
        """Notes an exception, which is the current one; the first is told."""
        if self.fault:
            logger.debug("kvferry: %s failed, too", hook, exc_info=True)
            return
        self.fault = hook
        logger.exception("kvferry: %s failed: requests run without the cache until the engine is started again", hook)


def _nothing() -> None:
    return None


def guarded(
    *,
    default: Callable[[], Any] = _nothing,
    instead: Callable[..., Any] | None = None,
    begins: bool = False,
) -> Callable[[_Hook], _Hook]:
    """A decorator for a hook.

    When the hook raises, ``instead`` is called with the same arguments and what it returns is returned; what that does
    may have been done by the hook in part, or entirely. When that raises too, or there is none, the result is
    ``default()``. A hook that ``begins`` something is not called any more after any hook of its connector has failed.
    """

    def around(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def call(self: Faults, *arguments: Any, **named: Any) -> Any:
            try:
                if not (begins and self.fault):
                    return call.__wrapped__(self, *arguments, **named)  # type: ignore[attr-defined]
            except Exception:
                self.failed(hook.__name__)
            try:
                return instead(self, *arguments, **named) if instead is not None else default()
            except Exception:
                self.failed(f"{hook.__name__}, and what is done instead,")
            return default()

        call.guarded = True  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return around
