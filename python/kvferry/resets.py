"""Namespaces that a reset has left: the leader is asked to forget their pages, one namespace after another.

Only those are named, so that pages of other engines and models stay. The engine finds nothing of them in any case: what
it stores and looks up has other names by then. See :mod:`kvferry.namespaces`.
"""

import time

from kvferry import wire
from kvferry.client import Client, Question

#: How long the leader may take for one namespace; after a refusal it is asked again so much later.
RESET_LIMIT_S = 1.0
#: Namespaces that wait to be forgotten; of one more the oldest is left to be evicted. 32 bytes each.
FORGET_MAX = 8192
_PAUSE_S = 0.02


class Forgetting:
    """See the module. For the scheduler's thread alone."""

    def __init__(self, client: Client):
        self._client = client
        #: In order, each once.
        self._owed: dict[bytes, None] = {}
        self._asked: tuple[bytes, Question] | None = None
        self._not_before = 0.0
        #: Some will never be confirmed.
        self._gave_up = False
        #: Why the leader did not confirm the last one that it was asked for, for people.
        self.trouble = ""

    def owe(self, namespaces: list[bytes]) -> None:
        """These are to be forgotten, whatever the leader has confirmed before."""
        self._owed.update(dict.fromkeys(namespaces))
        self._not_before = 0.0
        if self._asked is not None and self._asked[0] in namespaces:
            # Its answer may be about what was there before.
            self._asked = None
        while len(self._owed) > FORGET_MAX:
            self._owed.pop(next(iter(self._owed)))
            self._gave_up = True

    @property
    def done(self) -> bool:
        """Whether the leader has confirmed every namespace that was ever left."""
        return not self._owed and not self._gave_up

    def turn(self) -> None:
        """Takes an answer that has come, and asks for the next namespace. Does not wait."""
        if self._asked is not None and self._asked[1].done:
            namespace, question = self._asked
            self._asked = None
            if question.answer is not None:
                self._owed.pop(namespace, None)
            else:
                self.trouble = str(question.failure)
                self._not_before = time.monotonic() + RESET_LIMIT_S
        if self._owed and self._asked is None and time.monotonic() >= self._not_before and self._client.listening:
            namespace = next(iter(self._owed))
            self._asked = namespace, self._client.ask(wire.Reset(namespace), RESET_LIMIT_S)

    def wait(self, limit_s: float) -> bool:
        """Takes turns for so long at most; returns whether every namespace is forgotten."""
        until = time.monotonic() + limit_s
        self.trouble = "" if self._client.listening else "there is no leader"
        while self._owed and self._client.listening and (left_s := until - time.monotonic()) > 0:
            self.turn()
            if self._asked is not None:
                self._asked[1].wait(left_s)
                self.turn()
            failed = self._asked is None and self._not_before > time.monotonic()
            if failed:
                time.sleep(min(_PAUSE_S, left_s))
                self._not_before = 0.0
        return self.done
