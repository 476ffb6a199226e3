"""Which passes of a rank its device has finished: by marks in the device's timeline, else by a check of each pass.

A mark costs the engine's thread one call of the driver, and this process does not wait for it: the worker reads the
timeline. A check needs an event of its own in each pass, and is repeated until it succeeds. The session's thread reads
the timeline itself only where an earlier pass was marked and the worker does not read it, or the engine's stream
changed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvferry.memory import KvMemory

logger = logging.getLogger("kvferry")

#: Shortest and longest pause between two checks of a pass. In between, the pause is an eighth of the time for which the
#: pass has been the first: a report comes at most 5 ms or an eighth of the pass late, and never more than 50 ms.
_PAUSE_MIN_S, _PAUSE_MAX_S, _PAUSE_PART = 0.005, 0.05, 8


def _at_once() -> bool:
    return True


class Progress:
    """The passes of one rank, by number. Uses the lock of its session, and never calls the device under it."""

    def __init__(self, memory: KvMemory, lock: threading.Lock):
        self._memory = memory
        self._lock = lock
        #: Everything up to this number is written.
        self.known = 0
        #: Passes that need a check, in order: number, and a check that must not wait. At most those that the engine
        #: has submitted and the device has not finished, which are a few: 200 bytes each.
        self._open: deque[tuple[int, Callable[[], bool]]] = deque()
        #: The last pass that the device marks in its timeline.
        self._marked = 0
        #: The stream of the last pass.
        self._stream: int | None = None
        #: Whether the worker reads the timeline. Assumed until one is known.
        self._reads = True
        #: When the first open pass became the first, and when it is checked next.
        self._since = self._due = 0.0

    # The engine's thread.

    def mark(self, stream: int | None, through: int) -> bool:
        """Submits a mark to the device's timeline; False if the pass needs a check.

        All streams share one timeline word, so a stream may write it only when no earlier pass runs on another stream.
        After a change of the stream nothing is marked until all passes before the change are known to be over.
        """
        if stream is None:
            return False
        changed = self._stream is not None and self._stream != stream
        self._stream = stream
        if changed or self._open or not self._reads or not self._memory.has_timeline:
            return False
        try:
            self._memory.mark(stream, through)
        except OSError as error:
            logger.debug("kvferry: the device cannot mark its progress: %s", error)
            return False
        return True

    def submitted(self, through: int, marked: bool, check: Callable[[], bool] | None) -> bool:
        """Records a pass; returns whether it may be reported already. The caller holds the lock.

        A pass may be reported when the worker waits for its mark, or when it is over: passes without a check are over
        when those before them are.
        """
        if marked:
            self._marked = through
            if self._reads:
                return True
            check = partial(self._is_marked, through)
        elif check is None and not self._open:
            self.known = through
            return True
        elif not self._open and self._marked > self.known:
            # This pass is over only when the marked ones before it are.
            self._append(self._marked, partial(self._is_marked, self._marked))
        self._append(through, check or _at_once)
        return False

    # The session's thread.

    def worker(self, reads_timeline: bool) -> None:
        """Records whether the worker reads the timeline. If not, marked passes are checked here. The lock is held."""
        self._reads = reads_timeline
        if not reads_timeline and not self._open and self._marked > self.known:
            self._append(self._marked, partial(self._is_marked, self._marked))

    def look(self, now: float) -> bool:
        """Checks the open passes if that is due; returns whether more is known.

        Raises:
            Exception: of a check: the device's progress can no longer be read.
        """
        if not self._open or now < self._due:
            return False
        known = self.known
        self._memory.bind_thread()
        # The check runs without the lock, which the engine's threads take: only this thread removes passes.
        while self._open and self._open[0][1]():
            with self._lock:
                self.known = self._open.popleft()[0]
                self._since = now
        pause_s = (now - self._since) / _PAUSE_PART
        self._due = now + min(max(pause_s, _PAUSE_MIN_S), _PAUSE_MAX_S)
        return self.known > known

    def next_look(self) -> float | None:
        """Returns when passes are checked next; None if none needs a check."""
        return self._due if self._open else None

    def _append(self, through: int, check: Callable[[], bool]) -> None:
        if not self._open:
            self._since = time.monotonic()
            self._due = self._since + _PAUSE_MIN_S
        self._open.append((through, check))

    def _is_marked(self, through: int) -> bool:
        return self._memory.marked() >= through
