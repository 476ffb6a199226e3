"""Looks at files from a thread of its own, so that storage that is slow or hangs keeps nobody waiting for long.

Files may lie on a share of the network, and a look at one that hangs cannot be ended.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("vllm.kvferry")

#: How long one step of the scheduler may wait for looks, in all. A folder on a disk takes 0.1 ms.
LOOKS_S = 0.05
#: After a look that took longer, nothing is looked at for this time.
PAUSE_S = 1.0
#: Looks that took longer are told again after so long.
_TELL_S = 60.0

Seen = TypeVar("Seen")


class Looks(Generic[Seen]):
    """See the module. One look at a time; for one thread, which says when a step is over."""

    def __init__(self, look: Callable[[str], Seen | None]):
        self._look = look
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Seen | None, float]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: A look has been given up, and its answer is still to come. When it was asked for.
        self._late = False
        self._asked_at = 0.0
        self._left_s = LOOKS_S
        self._not_before = 0.0
        #: What was seen in this step.
        self._seen: dict[str, Seen | None] = {}
        self._tell_at = 0.0

    def next_step(self) -> None:
        """What was seen before is looked at anew."""
        self._seen.clear()
        self._left_s = LOOKS_S

    def at(self, path: str) -> Seen | None:
        """What is seen at a path now, in this step; None when it is nothing, or takes too long."""
        if path not in self._seen:
            self._seen[path] = self._in_time(path)
        return self._seen[path]

    def _in_time(self, path: str) -> Seen | None:
        if self._thread is None:
            # A daemon: a look that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="kvferry-looks", daemon=True)
            self._thread.start()
        before = time.monotonic()
        if before < self._not_before or self._left_s <= 0:
            return None
        try:
            if self._late:
                _, took_s = self._answers.get_nowait()
                self._late = False
                if self._too_long(path, took_s):
                    return None
            self._asked.put(path)
            self._asked_at, self._late = before, True
            found, _ = self._answers.get(timeout=self._left_s)
            self._late = False
        except queue.Empty:
            self._too_long(path, time.monotonic() - self._asked_at)
            return None
        finally:
            self._left_s -= time.monotonic() - before
        return found

    def _run(self) -> None:
        while True:
            path = self._asked.get()
            before = time.monotonic()
            try:
                found = self._look(path)
            except Exception:
                logger.exception("kvferry: %s could not be looked at", path)
                found = None
            self._answers.put((found, time.monotonic() - before))

    def _too_long(self, path: str, took_s: float) -> bool:
        """Whether a look that was given up took too long by itself, not with others of its step: then, a pause."""
        too_long = took_s >= LOOKS_S / 2
        if too_long:
            self._not_before = time.monotonic() + PAUSE_S
            self._tell(path)
        return too_long

    def _tell(self, path: str) -> None:
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_S
            logger.warning(
                "kvferry: looking at %s takes longer than %.0f ms: requests of all adapters run without the "
                "cache meanwhile; keep adapters on a disk of this machine",
                path,
                LOOKS_S * 1000,
            )
