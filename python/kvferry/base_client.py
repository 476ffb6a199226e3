"""What the clients with a thread and those of an event loop have in common."""

import itertools
import logging
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry.requests import Later, PendingRequest, refuse_closing, refuse_full
from kvferry.session import OPEN_MAX, Session

logger = logging.getLogger("kvferry")

Made = TypeVar("Made", bound=PendingRequest)


class BaseClient:
    """Makes requests, and shows the state of a session, which the class below makes and runs."""

    def __init__(self, directory: Path, *, first_id: int):
        self.directory = directory
        #: Why the last attempt to connect failed, for logs.
        self.problem = ""
        self._ids = itertools.count(first_id)
        self._session: Session
        self._closing = False

    @property
    def link(self) -> int:
        """Number of the present connection; 0 without one."""
        return self._session.link

    @property
    def listening(self) -> bool:
        """Whether there is a connection over which the peer has sent its welcome."""
        return self.link != 0

    @property
    def lost_at(self) -> float | None:
        """When the connection was lost, on the monotonic clock; None while there is one."""
        return self._session.lost_at

    @property
    def epoch(self) -> int:
        """Epoch of the peer's leader, from the last welcome."""
        return self._session.epoch

    @property
    def features(self) -> int:
        """Features that both sides support beyond the version, from the last welcome."""
        return self._session.features

    @property
    def limits(self) -> dict[str, int]:
        """Limits of the peer, by their names in ``schema/messages.json``, from the last welcome."""
        return self._session.limits

    @property
    def open_requests(self) -> tuple[int, int]:
        """Numbers of requests without an answer that wait to be sent, and that were sent. May lag behind."""
        sent = self._session.sent_requests
        return max(self._open_count - sent, 0), sent

    @property
    def _open_count(self) -> int:
        return len(self._session.open)

    def _made(
        self,
        made: type[Made],
        message: msgspec.Struct | Later,
        timeout_s: float,
        grace_s: float,
        link: int | None,
        urgent: bool,
        identity: int | None,
    ) -> Made:
        """Makes a request of this type, with a new id if it has none."""
        now = time.monotonic()
        number = next(self._ids) if identity is None else identity
        pending = made(number, message, now + timeout_s, now + timeout_s + grace_s, link)
        pending.urgent = urgent
        pending.repeated = identity is not None
        return pending

    def _refuse(self, pending: PendingRequest) -> None:
        """Ends a request that is not sent, because the client closes or has too many without an answer."""
        if self._closing:
            refuse_closing(pending)
        else:
            refuse_full(pending, OPEN_MAX)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            logger.debug("kvferry: %s: %s", self.directory, problem)
        self.problem = problem
