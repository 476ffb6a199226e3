"""Requests to the leader to remove the pages of namespaces that a reset has left, one namespace after another.

A request names one namespace, so that pages of other engines and models stay. The engine cannot find the pages in any
case: its stores and lookups use other namespaces by then. See :mod:`kvferry.vllm.namespaces`.
"""

import time

from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient

#: Deadline for one namespace, and pause before the retry of a failed request.
RESET_LIMIT_S = 1.0
#: Most namespaces that wait for a reset, 32 bytes each. Beyond that the oldest is dropped: its pages are only evicted.
FORGET_MAX = 8192
_PAUSE_S = 0.02


class Forgetting:
    """Sends and retries the resets of left namespaces. For the scheduler's thread alone."""

    def __init__(self, client: EngineClient):
        self._client = client
        #: Namespaces to reset, in order, each once.
        self._to_reset: dict[bytes, None] = {}
        self._open: tuple[bytes, PendingRequest] | None = None
        self._not_before = 0.0
        #: Some namespace was dropped and will never be confirmed.
        self._dropped = False
        #: Why the leader did not confirm the last request, for logs.
        self.problem = ""

    def add(self, namespaces: list[bytes]) -> None:
        """Adds namespaces to reset, also if the leader has confirmed them before."""
        self._to_reset.update(dict.fromkeys(namespaces))
        self._not_before = 0.0
        if self._open is not None and self._open[0] in namespaces:
            # The running request may answer for pages from before this call only.
            self._open = None
        while len(self._to_reset) > FORGET_MAX:
            self._to_reset.pop(next(iter(self._to_reset)))
            self._dropped = True

    @property
    def done(self) -> bool:
        """Whether the leader has confirmed the reset of every namespace that was ever left."""
        return not self._to_reset and not self._dropped

    def turn(self) -> None:
        """Processes a received answer, and sends the request for the next namespace. Does not wait."""
        if self._open is not None and self._open[1].done:
            namespace, pending = self._open
            self._open = None
            if pending.answer is not None:
                self._to_reset.pop(namespace, None)
            else:
                self.problem = str(pending.failure)
                self._not_before = time.monotonic() + RESET_LIMIT_S
        if self._to_reset and self._open is None and time.monotonic() >= self._not_before and self._client.listening:
            namespace = next(iter(self._to_reset))
            self._open = namespace, self._client.reset(namespace, timeout_s=RESET_LIMIT_S)

    def wait(self, limit_s: float) -> bool:
        """Waits at most ``limit_s`` for all resets; returns whether the leader has confirmed every one."""
        until = time.monotonic() + limit_s
        self.problem = "" if self._client.listening else "there is no leader"
        while self._to_reset and self._client.listening and (left_s := until - time.monotonic()) > 0:
            self.turn()
            if self._open is not None:
                self._open[1].wait(left_s)
                self.turn()
            failed = self._open is None and self._not_before > time.monotonic()
            if failed:
                time.sleep(min(_PAUSE_S, left_s))
                self._not_before = 0.0
        return self.done
