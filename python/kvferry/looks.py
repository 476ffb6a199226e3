"""Checks files on a separate thread, so that slow or hanging storage does not block the caller for long.

Files may lie on a network share, and a check that hangs there cannot be cancelled.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("kvferry")

#: Longest total wait of one scheduler step for checks. A folder on a disk takes 0.1 ms.
LOOKS_S = 0.05
#: Pause of all checks after one that took too long.
PAUSE_S = 1.0
#: Shortest time between two warnings about slow checks.
_TELL_S = 60.0

Seen = TypeVar("Seen")


class Looks(Generic[Seen]):
    """Runs one check at a time. For one thread, which calls :meth:`next_step` at the end of each step."""

    def __init__(self, look: Callable[[str], Seen | None]):
        self._look = look
        self._paths: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Seen | None, float]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Whether the answer of a check that was given up is still pending, and when that check was requested.
        self._late = False
        self._requested_at = 0.0
        self._left_s = LOOKS_S
        self._not_before = 0.0
        #: Results of this step, by path.
        self._seen: dict[str, Seen | None] = {}
        self._tell_at = 0.0

    def next_step(self) -> None:
        """Drops the results of the last step, and renews the time budget."""
        self._seen.clear()
        self._left_s = LOOKS_S

    def at(self, path: str) -> Seen | None:
        """Returns the result for a path in this step; None when there is nothing, or the check takes too long."""
        if path not in self._seen:
            self._seen[path] = self._in_time(path)
        return self._seen[path]

    def _in_time(self, path: str) -> Seen | None:
        if self._thread is None:
            # A daemon thread: a check that hangs must not keep the process from exiting.
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
            self._paths.put(path)
            self._requested_at, self._late = before, True
            found, _ = self._answers.get(timeout=self._left_s)
            self._late = False
        except queue.Empty:
            self._too_long(path, time.monotonic() - self._requested_at)
            return None
        finally:
            self._left_s -= time.monotonic() - before
        return found

    def _run(self) -> None:
        while True:
            path = self._paths.get()
            before = time.monotonic()
            try:
                found = self._look(path)
            except Exception:
                logger.exception("kvferry: %s could not be looked at", path)
                found = None
            self._answers.put((found, time.monotonic() - before))

    def _too_long(self, path: str, took_s: float) -> bool:
        """Whether a check that was given up took too long on its own, not only its step's sum: then begins a pause."""
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
                LOOKS_S / 2 * 1000,
            )
