"""Keeps exceptions of the connector's hooks out of vLLM's step, where most of them would end the engine.

After the first exception the connector begins no lookups, loads or stores. Hooks that report open copies or free pages
still run. Every hook that can fail is decorated with :func:`guarded`, which also measures the time of each call.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvferry.vllm.meters import Meters

logger = logging.getLogger("vllm.kvferry")

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Records(Protocol):
    """Records calls of hooks: a :class:`kvferry.vllm.calls.Calls`. Its methods neither wait nor raise."""

    def called(self, hook: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
        """A hook is called; returns the number of the call."""

    def returned(self, call: int, hook: str, arguments: tuple[Any, ...], named: dict[str, Any], answer: Any) -> None:
        """A hook returns. It may have put its answer into an argument."""


class Faults:
    """The first failure of a hook, or of a part that the hooks rely on."""

    #: Name of the failed hook, or a description of another failure; empty without a failure.
    fault = ""
    #: Where the calls of hooks are recorded; None: nowhere.
    calls: Records | None = None

    @functools.cached_property
    def meters(self) -> Meters:
        """The statistics of the connector, with the times of its hooks."""
        return Meters()

    def failed(self, hook: str) -> None:
        """Records the current exception; logs the first one as an error, later ones for debugging."""
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

    When the hook raises, ``instead`` is called with the same arguments, and its result is returned; the hook may
    already have done all or part of the work of ``instead``. When that raises too, or there is none, the result is
    ``default()``. A hook that ``begins`` something is no longer called after any hook of its connector has failed.
    """

    def around(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def call(self: Faults, *arguments: Any, **named: Any) -> Any:
            calls = self.calls
            if calls is None:
                return run(self, arguments, named)
            number = calls.called(hook.__name__, arguments, named)
            answer = run(self, arguments, named)
            calls.returned(number, hook.__name__, arguments, named, answer)
            return answer

        def run(self: Faults, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            began = time.perf_counter()
            try:
                if not (begins and self.fault):
                    return call.__wrapped__(self, *arguments, **named)  # type: ignore[attr-defined]
            except Exception:
                self.failed(hook.__name__)
            finally:
                self.meters.hook(hook.__name__, time.perf_counter() - began)
            try:
                return instead(self, *arguments, **named) if instead is not None else default()
            except Exception:
                self.failed(f"{hook.__name__}, and what is done instead,")
            return default()

        call.guarded = True  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return around
