"""Checks of sessions: hello, versions, credits, heartbeats, ids, repeated requests."""

import os
import time
from dataclasses import dataclass, field

import msgspec

from kvferry import wire
from kvferry.contract import bodies
from kvferry.contract.bodies import Hello, Incoming
from kvferry.contract.peers import ANSWERS_MAX, BEATS, Peer, Request, Session
from kvferry.contract.rules import Report
from kvferry.contract.server import Server
from kvferry.wire import Code, Error, Kind

#: Time in which a client that lost its connection must send hello again, and repeat its requests after that.
RETURN_S = 5.0
REPEAT_S = 3.0
#: Requests with less time left need not be repeated.
_DEADLINE_MARGIN_S = 1.0
#: A connection that its client closes this soon after something unknown was sent counts as closed for that reason.
_CLOSED_BY_S = 2.0
#: Connections that a client closes so, one after another, before its welcome counts as not understood.
_UNWELCOME_MAX = 2
#: Kinds without a meaning: a request and an answer.
UNKNOWN_REQUEST, UNKNOWN_ANSWER = 900, 901
#: Requests without an answer that are remembered for each engine.
_UNANSWERED_MAX = 65_536
#: Engines, ranks and tools that are remembered; the oldest is forgotten for a further one.
_ENGINES_MAX = 1024

_Key = tuple[str, str, bytes]


@dataclass
class _Ids:
    """What is known of the ids of one engine or rank."""

    first: int
    highest: int
    process: int
    connection: int


@dataclass
class _Unanswered:
    kind: int
    deadline: float
    number: int


@dataclass
class _Watched:
    """What is remembered of one connection."""

    #: Step of the probe that is being played: 0 none, 1 ping, 2 unknown answer, 3 unknown request, 4 all passed.
    probe: int = 0
    probed_at: float = 0.0
    messages: int = 0
    version_told: bool = False
    #: The connection lives for more heartbeats than a silent client may have.
    outlived: bool = False


@dataclass
class _Engine:
    """What is remembered of one engine or rank over its connections."""

    ids: _Ids | None = None
    unanswered: dict[int, _Unanswered] = field(default_factory=dict)
    #: Requests that must be repeated, and until when; None before the client is back.
    owed: set[int] = field(default_factory=set)
    owed_until: float | None = None
    #: Until when the client must be back, and its process.
    back_until: float | None = None
    process: int = 0
    #: Connections in a row that the client closed soon after the welcome, without a message.
    unwelcome: int = 0


class SessionChecks:
    """See the module's docstring. For the server's thread."""

    def __init__(self, report: Report, server: Server):
        self._report, self._server = report, server
        self._welcomed: set[tuple[str, int]] = set()
        self._engines: dict[_Key, _Engine] = {}
        self._watched: dict[Peer, _Watched] = {}

    @staticmethod
    def _key(peer: Peer) -> _Key:
        assert peer.hello is not None
        return peer.endpoint.name, peer.hello.role, peer.hello.engine

    def _of(self, session: Session, peer: Peer) -> _Engine:
        return self._engine((peer.endpoint.name, session.role, session.engine))

    def _engine(self, key: _Key) -> _Engine:
        if key not in self._engines and len(self._engines) >= _ENGINES_MAX:
            del self._engines[next(iter(self._engines))]
        return self._engines.setdefault(key, _Engine())

    def _seen(self, peer: Peer) -> _Watched:
        return self._watched.setdefault(peer, _Watched())

    # Hello.

    def before_hello(self, peer: Peer, message: Incoming) -> None:
        """A message came before hello."""
        again = (peer.endpoint.name, peer.connection.process) in self._welcomed
        text = f"connection {peer.number} to {peer.endpoint.name} begins with {bodies.name_of(message.kind)}"
        self._report.broken("hello-again" if again else "hello-first", text, message.number)

    def unreadable(self, peer: Peer, number: int, text: str) -> None:
        """A message cannot be read."""
        self._report.broken("well-formed", f"connection {peer.number} to {peer.endpoint.name}: {text}", number)

    def said_hello(self, peer: Peer, message: Incoming, hello: Hello | None) -> None:
        """A hello was received, None if it cannot be read."""
        report = self._report
        report.exercised("hello-first")
        problem = ""
        if hello is None:
            problem = "the body cannot be read, or engine has not 16 bytes"
        elif message.version != wire.HELLO_VERSION:
            problem = f"its header has version {message.version}: hello always has {wire.HELLO_VERSION}"
        elif hello.version_min > hello.version_max:
            problem = f"version_min is {hello.version_min}, version_max {hello.version_max}"
        if problem:
            report.broken("hello-fields", f"hello of connection {peer.number}: {problem}", message.number)
        else:
            report.exercised("hello-fields")
        if hello is None:
            return
        if len(self._welcomed) >= _ENGINES_MAX:
            self._welcomed.pop()
        self._welcomed.add((peer.endpoint.name, peer.connection.process))
        engine = self._engine((peer.endpoint.name, hello.role, hello.engine))
        engine.process = peer.connection.process
        if engine.back_until is not None:
            engine.back_until = None
            report.exercised("hello-again")
        if engine.owed and engine.owed_until is None:
            engine.owed_until = time.monotonic() + REPEAT_S

    def ended(self, peer: Peer, *, by_us: bool, reason: str) -> None:
        """A connection has ended."""
        seen = self._watched.pop(peer, _Watched())
        now = time.monotonic()
        if peer.hello is None:
            return
        silent = by_us and reason.startswith("silent")
        if silent:
            text = f"connection {peer.number} to {peer.endpoint.name}: {reason}, heartbeat_ms is "
            self._report.broken("heartbeats", f"{text}{self._server.settings.heartbeat_ms}")
        if not by_us and seen.probe in (2, 3) and now - seen.probed_at < _CLOSED_BY_S:
            rule = "unknown-answers-dropped" if seen.probe == 2 else "unknown-requests-answered"
            self._report.broken(rule, f"connection {peer.number} was closed by its client: {reason}")
        if not by_us and seen.messages == 0 and now - peer.opened_at < _CLOSED_BY_S:
            engine = self._engine(self._key(peer))
            engine.unwelcome += 1
            if engine.unwelcome == _UNWELCOME_MAX:
                text = (
                    f"{engine.unwelcome} connections were closed by their client after a welcome with an unknown field"
                )
                self._report.broken("unknown-fields-skipped", text)
        if not by_us or silent or peer.session is None or reason == "the checks ended":
            return
        if peer.session.role not in ("engine", "rank"):
            return
        engine = self._engine(self._key(peer))
        if not any(other is not peer for other in peer.session.peers):
            engine.back_until = now + RETURN_S
            wanted = (Kind.LOAD, Kind.STORE, Kind.FINISH)
            engine.owed |= {identity for identity, each in engine.unanswered.items() if each.kind in wanted}
            engine.owed_until = None

    # Messages.

    def received(self, peer: Peer, message: Incoming) -> None:
        """A message came after the hello."""
        seen = self._seen(peer)
        seen.messages += 1
        if seen.messages == 1:
            self._engine(self._key(peer)).unwelcome = 0
        if message.version == peer.version:
            self._report.exercised("agreed-version")
        elif not seen.version_told:
            seen.version_told = True
            text = f"{bodies.name_of(message.kind)} has version {message.version}, the welcome {peer.version}"
            self._report.broken("agreed-version", text, message.number)
        if wire.is_request(message.kind):
            if message.deadline_ms == 0:
                text = f"{bodies.name_of(message.kind)} {message.id} has no deadline: give at least 1 ms"
                self._report.broken("deadlines", text, message.number)
            else:
                self._report.exercised("deadlines")

    def not_accepted(self, peer: Peer, message: Incoming, text: str) -> None:
        """A request is of no kind that is accepted."""
        self._report.broken("accepted-kinds", text, message.number)

    def refused_credits(self, peer: Peer, message: Incoming, limit: str) -> None:
        """A request came beyond the credits."""
        self._report.broken("credits", f"{bodies.name_of(message.kind)} {message.id}: {limit}", message.number)

    def opened(self, request: Request) -> None:
        """A request is examined for the first time, or again after busy."""
        report, peer, session = self._report, request.peer, request.session
        report.exercised("accepted-kinds")
        report.exercised("well-formed")
        if len(peer.outstanding) + 1 >= self._server.settings.request_credits:
            report.exercised("credits")
        engine = self._of(session, peer)
        if len(engine.unanswered) < _UNANSWERED_MAX:
            engine.unanswered[request.id] = _Unanswered(request.kind, request.deadline, request.number)
        if request.id in engine.owed:
            self._was_repeated(engine, request.id)
            return
        if request.kind != Kind.STORES:
            self._new_id(engine, request, peer)

    def _new_id(self, engine: _Engine, request: Request, peer: Peer) -> None:
        ids, identity, number = engine.ids, request.id, request.number
        process = peer.connection.process
        if ids is None or (request.session.role != "engine" and peer.number != ids.connection):
            # A worker keeps no answers over connections.
            engine.ids = _Ids(identity, identity, process, peer.number)
            return
        why = ""
        if process != ids.process and identity <= ids.highest:
            why = f"process {ids.process} of the same engine used ids up to {ids.highest} before"
        elif peer.number != ids.connection and identity < ids.first:
            why = f"an earlier connection began with {ids.first}"
        elif identity + ANSWERS_MAX < ids.highest:
            why = f"ids up to {ids.highest} were used, and a leader keeps {ANSWERS_MAX} answers"
        if why:
            self._report.broken("ids-grow", f"{bodies.name_of(request.kind)} has id {identity}: {why}", number)
        elif identity > ids.highest:
            self._report.exercised("ids-grow")
        ids.highest, ids.process = max(ids.highest, identity), process

    def repeated(self, peer: Peer, message: Incoming, earlier: bytes | None) -> None:
        """An id was sent again: ``earlier`` is the body of the first message with it."""
        engine = self._engine(self._key(peer))
        self._was_repeated(engine, message.id)
        process = engine.ids.process if engine.ids else peer.connection.process
        known = peer.session is not None and message.id in peer.session.answers
        if known:
            # The answer is sent again, over this connection.
            engine.unanswered.pop(message.id, None)
        if known and process != peer.connection.process:
            text = (
                f"{bodies.name_of(message.kind)} has id {message.id}, which process {process} of the engine used before"
            )
            self._report.broken("ids-grow", text, message.number)
        elif earlier is not None and earlier != message.payload:
            rule = "ids-grow" if known else "one-request-per-id"
            text = f"{bodies.name_of(message.kind)} has id {message.id} of an earlier request with another body"
            self._report.broken(rule, text, message.number)
        else:
            self._report.exercised("one-request-per-id")

    def _was_repeated(self, engine: _Engine, identity: int) -> None:
        if identity in engine.owed:
            engine.owed.discard(identity)
            self._report.exercised("unanswered-repeated")

    def answered(self, request: Request, body: msgspec.Struct, peer: Peer) -> None:
        """A request was answered. An answer over a connection that has ended is not received."""
        engine = self._of(request.session, peer)
        if not peer.closed:
            engine.unanswered.pop(request.id, None)

    def over(self, role: str, engine_id: bytes, identity: int) -> None:
        """Every rank has given a request up: it need not be repeated."""
        engine = self._engines.get(("leader", role, engine_id))
        if engine is not None:
            engine.owed.discard(identity)
            engine.unanswered.pop(identity, None)

    # Requests of ours.

    def probe(self, peer: Peer) -> None:
        """Begins to send something unknown, step by step: each step must leave the connection usable."""
        self._next_step(peer, 1)

    def _next_step(self, peer: Peer, step: int) -> None:
        seen = self._seen(peer)
        seen.probe, seen.probed_at = step, time.monotonic()
        if step in (1, 2):
            if step == 2:
                self._server.send(peer, UNKNOWN_ANSWER, 1 << 40, wire.Empty())
            self._server.ask(peer, Kind.PING)
        elif step == 3:
            self._server.ask(peer, UNKNOWN_REQUEST)

    def answered_ours(self, peer: Peer, message: Incoming, asked: int | None) -> None:
        """An answer was received; ``asked`` is the kind of the request, None if there was none."""
        if asked is None:
            text = f"{bodies.name_of(message.kind)} {message.id} answers no request"
            self._report.broken("no-stray-answers", text, message.number)
            return
        self._report.exercised("no-stray-answers")
        step = self._seen(peer).probe
        if asked == Kind.PING:
            if message.kind != Kind.PONG:
                self._report.broken(
                    "pings-answered", f"ping was answered by {bodies.name_of(message.kind)}", message.number
                )
                return
            self._report.exercised("pings-answered")
            if step == 2:
                self._report.exercised("unknown-answers-dropped")
        else:
            try:
                error = msgspec.msgpack.decode(message.payload, type=Error)
            except (msgspec.DecodeError, msgspec.ValidationError):
                error = None
            if message.kind != Kind.ERROR or error is None or error.code != Code.UNKNOWN_KIND:
                text = (
                    f"kind {asked} was answered by {bodies.name_of(message.kind)} {error}: send error 3, unknown_kind"
                )
                self._report.broken("unknown-requests-answered", text, message.number)
            else:
                self._report.exercised("unknown-requests-answered")
        if 0 < step < 4:
            self._next_step(peer, step + 1)

    def tick(self, now: float, peers: list[Peer]) -> None:
        """Finds what is overdue."""
        for peer in peers:
            beats = (now - peer.opened_at) * 1000 / self._server.settings.heartbeat_ms
            if peer.hello is not None and beats > BEATS and not self._seen(peer).outlived:
                self._seen(peer).outlived = True
                self._report.exercised("heartbeats")
            for identity, (kind, due) in list(peer.asked.items()):
                if now > due:
                    del peer.asked[identity]
                    step = self._seen(peer).probe
                    rule = "unknown-requests-answered" if kind == UNKNOWN_REQUEST else "pings-answered"
                    if kind == Kind.PING and step == 2:
                        rule = "unknown-answers-dropped"
                    self._report.broken(rule, f"connection {peer.number}: {bodies.name_of(kind)} has no answer")
        for (name, _, _), engine in self._engines.items():
            if engine.back_until is not None and now > engine.back_until:
                engine.back_until = None
                if _lives(engine.process):
                    text = f"the client of {name} in process {engine.process} sent no hello within {RETURN_S:.0f} s"
                    self._report.broken("hello-again", text)
            if engine.owed_until is not None and now > engine.owed_until:
                self._overdue(engine, now)
            for identity, each in list(engine.unanswered.items()):
                if now > each.deadline + RETURN_S:
                    del engine.unanswered[identity]
                    engine.owed.discard(identity)

    def _overdue(self, engine: _Engine, now: float) -> None:
        for identity in engine.owed:
            each = engine.unanswered.get(identity)
            if each is not None and each.deadline > now + _DEADLINE_MARGIN_S:
                text = f"{bodies.name_of(each.kind)} {identity} was not answered before the connection was lost"
                self._report.broken("unanswered-repeated", text, each.number)
        engine.owed.clear()
        engine.owed_until = None

    def waits(self) -> bool:
        """Whether something is owed that may still come."""
        return any(
            each.back_until is not None or (each.owed_until is not None and each.owed)
            for each in self._engines.values()
        )


def _lives(process: int) -> bool:
    """Whether a process lives, as far as can be seen from here."""
    return process == 0 or os.path.exists(f"/proc/{process}")
