"""Requests that are over, until the leader knows it: each keeps one of its slots, of which an engine has 65,536.

The leader keeps an engine's slots over a broken connection, so that a ``finish`` that was not answered in time, or not
even asked because too many questions were open, is asked again. A new leader has no slots: nothing is owed to it.
"""

import collections
import time

from kvferry import wire
from kvferry.client import Client, Question
from kvferry.wire import Code

FINISH_LIMIT_S = 30.0
#: Slots that wait to be finished, 0.2 KB each: 13 MB. Of one more the oldest is left to the end of the session. The
#: leader has as many.
OWED_MAX = 65_536
#: Of those so many are asked at a time, so that they do not take the place of other questions.
AGAIN_AT_ONCE = 64
#: After one that was not answered, the others wait for so long.
AGAIN_PAUSE_S = 1.0


class Finishes:
    """See the module. For the scheduler's thread alone."""

    def __init__(self, client: Client):
        self._client = client
        #: Slots that are not asked for now, each with the leader's epoch in which it was opened. In order.
        self._owed: dict[int, int] = {}
        #: Questions without an answer, by their ids, each with slot, epoch, and whether it is asked again.
        self._asked: dict[int, tuple[int, int, bool]] = {}
        self._again = 0
        self._ended: collections.deque[Question] = collections.deque()
        self._not_before = 0.0

    def finish(self, slot: int, epoch: int) -> None:
        """The request that the leader of this epoch knows by this slot is over."""
        self._ask(slot, epoch, again=False)

    def turn(self) -> None:
        """Takes answers that have come, and asks again for what was not answered. Does not wait."""
        while self._ended:
            question = self._ended.popleft()
            slot, epoch, again = self._asked.pop(question.id)
            self._again -= again
            failure = question.failure
            if failure is not None and (failure.retry or failure.code == Code.DEADLINE):
                self._owe(slot, epoch)
        if not self._owed or not self._client.listening or time.monotonic() < self._not_before:
            return
        while self._owed and self._again < AGAIN_AT_ONCE:
            slot = next(iter(self._owed))
            epoch = self._owed.pop(slot)
            if epoch == self._client.epoch and self._ask(slot, epoch, again=True).failure is not None:
                # Still too many questions are open.
                return

    def _owe(self, slot: int, epoch: int) -> None:
        self._owed[slot] = epoch
        self._not_before = time.monotonic() + AGAIN_PAUSE_S
        if len(self._owed) > OWED_MAX:
            del self._owed[next(iter(self._owed))]

    def _ask(self, slot: int, epoch: int, *, again: bool) -> Question:
        # One that is refused at once has ended before its id is known here.
        question = self._client.ask(wire.Finish(slot), FINISH_LIMIT_S, until=self._ended.append)
        self._asked[question.id] = slot, epoch, again
        self._again += again
        return question
