"""Finished requests whose end the leader has not confirmed. Each uses one of the 65,536 slots of an engine.

The leader keeps an engine's slots over a broken connection. A ``finish`` that was not answered in time, or not sent
because too many requests were open, is therefore retried. A new leader has no slots, and needs no ``finish``.
"""

import collections
import time

from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.wire import Code

FINISH_LIMIT_S = 30.0
#: Most slots that wait to be finished, 0.2 KB each: 13 MB. Beyond that the oldest is dropped, and its slot stays open
#: until the session ends. The leader has as many slots.
RETRIES_MAX = 65_536
#: Most retries at a time, so that they do not displace other requests.
AGAIN_AT_ONCE = 64
#: Pause of the retries after a ``finish`` that was not answered.
AGAIN_PAUSE_S = 1.0


class Finishes:
    """Sends and retries ``finish``. For the scheduler's thread alone."""

    def __init__(self, client: EngineClient):
        self._client = client
        #: Slots that wait for a retry, each with the leader's epoch in which it was opened, the oldest first. None: the
        #: request that opens it had no answer, and may have been sent again to a later leader.
        self._to_retry: dict[int, int | None] = {}
        #: Requests without an answer, by id, each with slot, epoch, and whether it is a retry.
        self._open: dict[int, tuple[int, int | None, bool]] = {}
        self._again = 0
        self._ended: collections.deque[PendingRequest] = collections.deque()
        self._not_before = 0.0

    def finish(self, slot: int, epoch: int | None) -> None:
        """Finishes a slot that was opened at the leader of this epoch, or, with None, of this one or a later one."""
        self._send(slot, epoch, again=False)

    def turn(self) -> None:
        """Processes received answers, and retries. Does not wait."""
        while self._ended:
            pending = self._ended.popleft()
            slot, epoch, again = self._open.pop(pending.id)
            self._again -= again
            failure = pending.failure
            if failure is not None and (failure.retry or failure.code == Code.DEADLINE):
                self._retry_later(slot, epoch)
        if not self._to_retry or not self._client.listening or time.monotonic() < self._not_before:
            return
        while self._to_retry and self._again < AGAIN_AT_ONCE:
            slot = next(iter(self._to_retry))
            epoch = self._to_retry.pop(slot)
            if epoch in (None, self._client.epoch) and self._send(slot, epoch, again=True).failure is not None:
                # Too many requests are open still.
                return

    def _retry_later(self, slot: int, epoch: int | None) -> None:
        self._to_retry[slot] = epoch
        self._not_before = time.monotonic() + AGAIN_PAUSE_S
        if len(self._to_retry) > RETRIES_MAX:
            del self._to_retry[next(iter(self._to_retry))]

    def _send(self, slot: int, epoch: int | None, *, again: bool) -> PendingRequest:
        # A request that is refused at once ends before its id is known here: answers are therefore queued.
        pending = self._client.finish(slot, timeout_s=FINISH_LIMIT_S, until=self._ended.append)
        self._open[pending.id] = slot, epoch, again
        self._again += again
        return pending
