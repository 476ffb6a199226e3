"""Counts the changes of an engine's weights.

SGLang changes the weights of a running engine with or without a flush of its cache, and calls no method of a linker for
it. The methods that change them are therefore wrapped, on rank 0, whose namespace decides for all ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

_changes = 0


def count() -> int:
    """Returns how often the weights of engines in this process may have changed."""
    return _changes


def watch(updater: type, methods: tuple[str, ...]) -> None:
    """Counts each call of these methods. Wraps each method once."""
    for name in methods:
        method = getattr(updater, name)
        if not hasattr(method, "kvferry_counts"):
            setattr(updater, name, _counting(method))


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        global _changes
        _changes += 1
        return method(*arguments, **named)

    call.kvferry_counts = True  # type: ignore[attr-defined]
    return call
