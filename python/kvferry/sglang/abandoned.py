"""Copies that rank and worker no longer wait for: their pages are free once nothing is copied for them."""

import time

from kvferry.rank import RankSession

#: Longest wait for a worker to confirm. One that is alive does so within a part of a copy, 32 MiB; one that does not
#: is killed by its supervisor after 10 s, or by this rank after 51 s at most.
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
        new = [request for request in requests if request not in self._open]
        if new:
            self._open.update(new)
            self._session.abandon(new)

    def is_over(self, request: int) -> bool:
        """Whether nothing is copied for an abandoned request any longer. Does not wait."""
        self._open.difference_update(self._session.over())
        return request not in self._open

    def wait(self, requests: list[int]) -> None:
        """Abandons requests, and waits until nothing is copied for them.

        Raises:
            Unconfirmed: the worker has not confirmed within :data:`CONFIRM_LIMIT_S`.
        """
        self.add(requests)
        until = time.monotonic() + CONFIRM_LIMIT_S
        while open_ := self._open.intersection(requests):
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise Unconfirmed(
                    f"kvferry: the worker has not confirmed for {CONFIRM_LIMIT_S:.0f} s that it copies nothing for "
                    f"{len(open_)} abandoned requests, and their pages cannot be kept: the engine must be started again"
                )
            self._open.difference_update(self._session.wait_over(left_s))
