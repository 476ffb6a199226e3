"""Stops lookups for a while after a load or a lookup has failed, so that a sick kvferry costs the engine little."""

import time

#: First and longest pause. Each failure doubles the pause, unless a load has succeeded in
#: between or the last pause ended more than the longest pause ago.
PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 30.0


class Breaker:
    """Whether lookups are paused. For the scheduler's thread alone."""

    def __init__(self) -> None:
        self._pause_s = PAUSE_FIRST_S
        self._until = 0.0

    @property
    def pauses(self) -> bool:
        """Whether requests run without lookups now."""
        return time.monotonic() < self._until

    def failed(self) -> float:
        """Begins a pause; returns its length in seconds."""
        now = time.monotonic()
        if now - self._until > PAUSE_MAX_S:
            self._pause_s = PAUSE_FIRST_S
        pause_s = self._pause_s
        self._until = now + pause_s
        self._pause_s = min(pause_s * 2, PAUSE_MAX_S)
        return pause_s

    def worked(self) -> None:
        """Makes the next pause a short one again."""
        self._pause_s = PAUSE_FIRST_S
