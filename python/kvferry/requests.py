"""Requests to a process of kvferry, and how they end: once, with an answer or with a failure."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvferry import limits, wire
from kvferry.wire import Code, Kind


class Failure(Exception):
    """Why a request has no answer.

    ``reported``: the peer sent this error. ``over``: no part of the request runs or will run, because the leader has
    reported so or no peer received the request. Only then may the pages of a load or a store be used again. Otherwise
    the request's outcome is unknown.
    """

    def __init__(self, code: int, message: str, *, reported: bool, retry: bool = False, over: bool = False):
        super().__init__(message)
        self.code = code
        self.message = message
        self.reported = reported
        self.over = over
        self.retry = retry


class Later:
    """A message that is built when it is encoded, on the client's thread, from values that do not change meanwhile.

    To pack thousands of hashes or pages takes a fraction of a millisecond. The scheduler's thread does not do it, and
    waits only if both threads need Python's lock at once.
    """

    __slots__ = ("build", "kind")

    def __init__(self, kind: Kind, build: Callable[[], msgspec.Struct]):
        self.kind = kind
        self.build = build


class PendingRequest:
    """One request and, once :attr:`done`, its answer or failure."""

    __slots__ = (
        "_body",
        "_event",
        "_message",
        "alone",
        "answer",
        "deadline",
        "done",
        "ended_at",
        "expires",
        "failure",
        "id",
        "kind",
        "link",
        "repeated",
        "requested_at",
        "sent_at",
        "sizes",
        "until",
        "urgent",
        "watch",
    )

    def __init__(
        self, identity: int, message: msgspec.Struct | Later, deadline: float, expires: float, link: int | None
    ):
        self.id = identity
        self.kind = message.kind if isinstance(message, Later) else wire.KINDS[type(message)]
        self._message: msgspec.Struct | Later | None = message
        self._body = b""
        #: What the message has of that which limits bound, once it is encoded: see :func:`kvferry.limits.sizes`.
        self.sizes: dict[str, int] = {}
        #: Deadlines of the request, on the monotonic clock: the one that the peer receives, and our own.
        self.deadline = deadline
        self.expires = expires
        self.link = link
        self.answer: msgspec.Struct | None = None
        self.failure: Failure | None = None
        self.until: Callable[[PendingRequest], None] | None = None
        self.watch: Watch | None = None
        self.urgent = False
        #: An earlier request had the same id, and may have been sent.
        self.repeated = False
        #: Not sent together with others.
        self.alone = False
        #: When the request was made, first sent, and when it ended, on the monotonic clock.
        self.requested_at = time.monotonic()
        self.sent_at: float | None = None
        self.ended_at: float | None = None
        #: Whether the request has ended.
        self.done = False
        #: What :meth:`wait` waits for; most requests are never waited for.
        self._event: threading.Event | None = None

    @property
    def body(self) -> bytes:
        """The encoded message; empty when the request has ended. For one thread at a time."""
        self.encode()
        return self._body

    def encode(self) -> None:
        """Builds and encodes the message, once. For one thread at a time."""
        message = self._message
        if message is None:
            return
        if isinstance(message, Later):
            message = message.build()
        self._body = wire.body_of(message)
        self.sizes = {"body_bytes": len(self._body), **limits.sizes(message)}
        self._message = None

    @property
    def never_sent(self) -> bool:
        """Whether no peer can have received the request, or an earlier one under its id."""
        return self.sent_at is None and not self.repeated

    @property
    def pages_in_use(self) -> bool:
        """Whether the pages of a load or a store may still be read or written.

        They are until an answer, or a failure with ``over``. After any other failure they are in use until every rank
        has abandoned the request: :meth:`kvferry.rank.RankSession.abandon`.
        """
        return not self.done or (self.failure is not None and not self.failure.over)

    @property
    def queued_s(self) -> float | None:
        """Time for which the request waited before it was sent; None if it was not."""
        return None if self.sent_at is None else self.sent_at - self.requested_at

    @property
    def took_s(self) -> float | None:
        """Time from the request to its end; None before the end."""
        return None if self.ended_at is None else self.ended_at - self.requested_at

    def wait(self, timeout_s: float) -> bool:
        """Waits until the request has ended, at most ``timeout_s``; returns whether it has. For one thread alone."""
        if not self.done:
            if self._event is None:
                self._event = threading.Event()
            # The end is looked at after the event is there, and the event after the end: one of both sides sees it.
            if not self.done:
                self._event.wait(timeout_s)
        return self.done

    def _end(self, answer: msgspec.Struct | None, failure: Failure | None) -> None:
        """Ends the request: called once, by its client."""
        self.answer, self.failure = answer, failure
        self._message, self._body = None, b""
        self.ended_at = time.monotonic()
        if self.watch is not None:
            self.watch.ended(self)
        self.done = True
        if self._event is not None:
            self._event.set()
        if self.until is not None:
            self.until(self)


class Watch(Protocol):
    """Sees every request of a client in the order of their ids. Its methods neither wait nor raise."""

    @property
    def recording(self) -> bool:
        """Whether requests are recorded still. Once false, it stays false."""

    def requested(self, pending: PendingRequest) -> None:
        """A request was made, and cannot have been answered yet."""

    def ended(self, pending: PendingRequest) -> None:
        """A request has ended, and no caller knows it yet."""


def refuse_closing(pending: PendingRequest) -> None:
    """Ends a request that its client does not send because it closes, so that no later one is sent either."""
    failure = Failure(Code.DRAINING, "the client closes", reported=False, over=pending.never_sent)
    pending._end(None, failure)


def refuse_full(pending: PendingRequest, most: int) -> None:
    """Ends a request that its client does not send because this many wait for an answer."""
    text = f"{most} requests wait for an answer"
    pending._end(None, Failure(Code.BUSY, text, reported=False, retry=True, over=pending.never_sent))
