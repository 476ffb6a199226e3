"""All checks of a connector, as the scripted leader and workers call them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kvferry.contract.bodies import Hello, Incoming
from kvferry.contract.connector_rules import CONNECTOR_RULES
from kvferry.contract.hash_checks import HashChecks
from kvferry.contract.page_checks import PageChecks
from kvferry.contract.pages import MappedMemory
from kvferry.contract.peers import Peer, Request
from kvferry.contract.rules import Report
from kvferry.contract.script import Script
from kvferry.contract.server import Server
from kvferry.contract.session_checks import RETURN_S, SessionChecks
from kvferry.contract.worker import Worker
from kvferry.wire import Kind

if TYPE_CHECKING:
    from kvferry.contract.leader import Copy, Leader

#: Time after a registration in which a rank reports again what it has reported before.
WRITTEN_AGAIN_S = 3.0


class Checks:
    """Passes what is seen to the checks that it concerns. For the server's thread."""

    sessions: SessionChecks
    leader: "Leader"

    def __init__(self) -> None:
        self.report = Report(CONNECTOR_RULES)
        self.hashes = HashChecks(self.report)
        self.pages = PageChecks(self.report, self.hashes)
        self.workers: Sequence[Worker] = ()
        self.script = Script(())
        #: What each rank had reported as written before it lost its connection, and until when it must have done so
        #: again: None before it has registered.
        self._lost: dict[Worker, tuple[int, float | None]] = {}
        self._lost_at: dict[Worker, float] = {}
        self._now = 0.0

    def serve(self, server: Server, workers: Sequence[Worker], leader: "Leader") -> None:
        """Sets what is checked."""
        self.sessions = SessionChecks(self.report, server)
        self.workers, self.leader, self.script = workers, leader, leader.script

    def _memories(self) -> list[MappedMemory] | None:
        memories = [worker.memory for worker in self.workers if worker.memory is not None]
        return memories if self.workers and len(memories) == len(self.workers) else None

    def _written(self) -> int:
        return min((worker.written for worker in self.workers), default=0)

    # Sessions.

    def before_hello(self, peer: Peer, message: Incoming) -> None:
        """See :class:`SessionChecks`, as for the next ones."""
        self.sessions.before_hello(peer, message)

    def unreadable(self, peer: Peer, number: int, text: str) -> None:
        """A message cannot be read."""
        self.sessions.unreadable(peer, number, text)

    def said_hello(self, peer: Peer, message: Incoming, hello: Hello | None) -> None:
        """A hello was received."""
        self.sessions.said_hello(peer, message, hello)

    def welcomed(self, peer: Peer) -> None:
        """A welcome was sent."""
        if peer.hello is None or peer.hello.role not in ("engine", "rank"):
            return
        event = self.script.next("hello")
        if event is not None:
            self.sessions.probe(peer)

    def received(self, peer: Peer, message: Incoming) -> None:
        """A message was received."""
        self.sessions.received(peer, message)

    def opened(self, request: Request) -> None:
        """A request is examined."""
        self.sessions.opened(request)
        self.pages.opened(request)

    def repeated(self, peer: Peer, message: Incoming, earlier: bytes | None) -> None:
        """A request was repeated."""
        self.sessions.repeated(peer, message, earlier)

    def refused_credits(self, peer: Peer, message: Incoming, limit: str) -> None:
        """A request came beyond the credits."""
        self.sessions.refused_credits(peer, message, limit)

    def not_accepted(self, peer: Peer, message: Incoming, text: str) -> None:
        """A request is of no kind that is accepted."""
        self.sessions.not_accepted(peer, message, text)

    def answered(self, request: Request, body: msgspec.Struct, peer: Peer) -> None:
        """A request is answered."""
        self.sessions.answered(request, body, peer)
        if request.kind in (Kind.LOOKUP, Kind.LOAD, Kind.STORE):
            self.pages.answered(request, body, self._memories(), self._written())

    def answered_ours(self, peer: Peer, message: Incoming, asked: int | None) -> None:
        """A request of ours is answered."""
        self.sessions.answered_ours(peer, message, asked)

    def ended(self, peer: Peer, *, by_us: bool, reason: str) -> None:
        """A connection has ended."""
        self.sessions.ended(peer, by_us=by_us, reason=reason)
        if by_us and peer.hello is not None and peer.hello.role == "rank" and reason != "the checks ended":
            worker = next((each for each in self.workers if each.rank == peer.hello.rank), None)
            if worker is not None and worker.memory is not None:
                self._lost[worker] = worker.written, None
                self._lost_at[worker] = self._now

    def tick(self, now: float, peers: list[Peer]) -> None:
        """Time passes."""
        self._now = now
        self.sessions.tick(now, peers)
        if self.pages.busy_stores():
            self.pages.tick(self._memories(), self._written())
        for worker, (through, until) in list(self._lost.items()):
            if until is None and now > self._lost_at[worker] + 2 * RETURN_S:
                del self._lost[worker]
                text = (
                    f"rank {worker.rank} has not registered within {2 * RETURN_S:.0f} s after its connection was lost"
                )
                self.report.broken("registers-again", text)
            elif until is not None and worker.written >= through > 0:
                del self._lost[worker]
                self.report.exercised("written-again")
            elif until is not None and now > until:
                del self._lost[worker]
                if self.leader.waits_for(through):
                    text = f"rank {worker.rank} had reported {through}, and {worker.written} since it registered again"
                    self.report.broken("written-again", text)

    # Workers.

    def registered(self, request: Request, worker: Worker, memory: MappedMemory) -> None:
        """A rank's memory is mapped."""
        for rule in ("registration-consistent", "registration-proven", "content-given"):
            self.report.exercised(rule)
        self.pages.content, self.pages.page_tokens = memory.content, memory.hash_tokens
        if worker in self._lost:
            self._lost[worker] = self._lost[worker][0], self._now + WRITTEN_AGAIN_S
            self.report.exercised("registers-again")

    def wrote(self, worker: Worker, request: Request) -> None:
        """A rank has reported work as written, and is not answered yet."""
        if self.pages.busy_stores():
            self.pages.tick(self._memories(), self._written())

    def gave_up(self, worker: Worker) -> None:
        """A rank has given up requests."""

        def by_all(identity: int, engine: bytes) -> bool:
            return all(each.gives_up(identity, engine) for each in self.workers)

        for engine, identity in self.pages.gave_up(by_all, self._memories()):
            self.sessions.over("engine", engine, identity)

    # Copies.

    def started(self, copy: "Copy") -> None:
        """The pages of a copy have been read or written."""
        memories = self._memories()
        if memories is not None:
            self.pages.started(copy, memories)

    def settles(self, copy: "Copy", memories: list[MappedMemory]) -> None:
        """Some time has passed since a copy."""
        self.pages.settles(copy, memories)

    # The end.

    def waits(self) -> bool:
        """Whether something is owed that may still come."""
        return bool(self.pages.open_slots()) or self.sessions.waits() or bool(self._lost)

    def finish(self, peers: list[Peer]) -> None:
        """The run is over: draws the conclusions that need all of it."""
        self.pages.finish(peers)
        for event in self.script.left():
            self.report.note(f"not played, because too few came: {event.do} at {event.on} {event.number}")
