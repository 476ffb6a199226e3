"""Copies that rank and worker no longer wait for: their pages are free once nothing is copied for them."""

import time

from kvferry.rank import RankSession

#: Time after which a worker is killed that does not confirm while SGLang's scheduler waits. One that is alive confirms
#: within a part of a copy, 32 MiB. Its successor has the pages that it stored. Time in which the rank's thread did not
#: run does not count.
KILL_AFTER_S = 0.6
#: Longest wait for a worker to confirm, or to be gone. A worker that this rank cannot see, in another namespace of
#: processes, is killed by its supervisor, 10 s after the deadline of its copy.
CONFIRM_LIMIT_S = 60.0


class Unconfirmed(RuntimeError):
    """Pages may still be written or read by a copy, and SGLang cannot keep them from being used: the engine ends."""


class Abandoned:
    """The abandoned requests of one rank. For the scheduler's thread alone."""

    def __init__(self, session: RankSession):
        self._session = session
        #: Requests that were abandoned and are not known to be over: at most those of open copies.
        self._open: set[int] = set()

    def add(self, requests: list[int]) -> None:
        """Takes the pages of these requests back."""
        self._abandon([request for request in requests if request not in self._open], None)

    def _abandon(self, requests: list[int], kill_after_s: float | None) -> None:
        if requests:
            self._open.update(requests)
            self._session.abandon(requests, kill_after_s=kill_after_s)

    def is_over(self, request: int) -> bool:
        """Whether nothing is copied for an abandoned request any longer. Does not wait."""
        self._open.difference_update(self._session.over())
        return request not in self._open

    def wait(self, requests: list[int]) -> None:
        """Abandons requests, and waits until nothing is copied for them.

        Kills the worker that does not confirm within :data:`KILL_AFTER_S`: the scheduler waits.

        Raises:
            Unconfirmed: the worker has not confirmed within :data:`CONFIRM_LIMIT_S`.
        """
        self._abandon(requests, KILL_AFTER_S)
        until = time.monotonic() + CONFIRM_LIMIT_S
        while open_ := self._open.intersection(requests):
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise Unconfirmed(
                    f"kvferry: the worker has not confirmed for {CONFIRM_LIMIT_S:.0f} s that it copies nothing for "
                    f"{len(open_)} abandoned requests, and their pages cannot be kept: the engine must be started again"
                )
            self._open.difference_update(self._session.wait_over(left_s))
