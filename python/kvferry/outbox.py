"""Requests that a rank owes its worker: to register memory, to report written pages, to take pages back.

Connections break and workers die: a request stays owed until a worker has confirmed it. A dead worker copies nothing,
and its successor, which has received no orders yet, confirms so at once.
"""

import math
from dataclasses import dataclass, field

from kvferry import wire

#: Shortest time between two reports of written work if no store and no load waits for the second one: the reports of
#: several steps are one message.
UNNEEDED_S = 0.1


@dataclass
class Register:
    """Registers the memory; the engine gives up all requests up to ``abandoned_through``."""

    abandoned_through: int


@dataclass
class Written:
    """Everything up to this number is written: pages that stores read, and work that loads wait for."""

    through: int


@dataclass
class Abandon:
    """Requests the end of all copies for these requests."""

    requests: list[int]


RankRequest = Register | Written | Abandon


@dataclass
class Outbox:
    """The owed requests of one rank. Plain data; not thread-safe."""

    #: Whether the worker has the memory.
    registered: bool = False
    #: Whether the worker copies for the memory that it has: it answers `written` of other memory with a refusal.
    serves: bool = True
    sent: set[type] = field(default_factory=set)
    #: Everything up to this request is written, and what of it the worker has confirmed since the registration.
    written: int = 0
    confirmed: int = 0
    #: Up to which number some store or load waits for a report, and when the last one was sent.
    needed: int = 0
    reported_at: float = -math.inf
    #: The highest request that was ever abandoned: a worker must not copy for it after a later registration.
    abandoned_through: int = 0
    abandoned: set[int] = field(default_factory=set)
    #: Most requests in one ``abandon`` to the present worker, at least 1; further ones follow in the next.
    abandoned_max: int = wire.ABANDONED_MAX

    def lost(self) -> None:
        """Handles a broken connection: the worker drops the memory."""
        self.registered = False
        self.confirmed = 0
        self.sent.clear()

    def wrote(self, through: int) -> None:
        """Records that everything up to this number is written."""
        self.written = max(self.written, through)

    def needs(self, through: int) -> None:
        """Records that some store or load waits for the report of this number."""
        self.needed = max(self.needed, through)

    @property
    def reports_at_once(self) -> bool:
        """Whether something written and not reported is waited for."""
        return min(self.needed, self.written) > self.confirmed

    @property
    def reports_later(self) -> bool:
        """Whether something written and not reported is not waited for."""
        return self.written > max(self.needed, self.confirmed)

    def report_at(self, now: float) -> float | None:
        """Returns when a report can be due that nothing waits for; None if it is due as soon as there is one."""
        at = self.reported_at + UNNEEDED_S
        return at if at > now else None

    def wrote_last(self, through: int) -> None:
        """Withdraws reports after this request: later pages will never be known to be written."""
        self.written = min(self.written, through)

    def abandon(self, requests: list[int]) -> None:
        """Records that the engine takes the pages of these requests back."""
        self.abandoned_through = max([self.abandoned_through, *requests])
        self.abandoned.update(requests)

    def next(self, now: float = math.inf) -> RankRequest | None:
        """Returns the next request to send at this time; at most one of a kind is open at a time."""
        # Before the registration, which may fail before it is sent, and take as long as a leader is away.
        if self.abandoned and Abandon not in self.sent:
            self.sent.add(Abandon)
            return Abandon(sorted(self.abandoned)[: self.abandoned_max])
        if not self.registered and Register not in self.sent:
            self.sent.add(Register)
            return Register(self.abandoned_through)
        due = self.reports_at_once or (self.written > self.confirmed and self.report_at(now) is None)
        if self.registered and self.serves and due and Written not in self.sent:
            self.sent.add(Written)
            self.reported_at = now if now < math.inf else self.reported_at
            return Written(self.written)
        return None

    def answered(self, rank_request: RankRequest, confirmed: bool, *, serves: bool = True) -> list[int]:
        """Handles the end of a request, which is retried unless confirmed. Returns abandoned requests that are over.

        ``serves``: of a registration, whether the worker copies for the memory.
        """
        self.sent.discard(type(rank_request))
        if not confirmed:
            return []
        match rank_request:
            case Register():
                self.registered, self.serves = True, serves
            case Written(through):
                self.confirmed = through
            case Abandon(requests):
                over = [request for request in requests if request in self.abandoned]
                self.abandoned.difference_update(over)
                return over
        return []

    def memory_dropped(self) -> None:
        """Handles the worker's report that it has no memory of this rank."""
        self.registered = False
        self.confirmed = 0

    def dead(self) -> list[int]:
        """Handles the death of the only process that could copy. Returns abandoned requests, which are over thereby."""
        over = sorted(self.abandoned)
        self.abandoned.clear()
        return over
