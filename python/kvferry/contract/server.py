"""The sockets and sessions of the scripted leader and workers: hello, credits, repeated requests, heartbeats.

One thread owns everything. Other threads use :meth:`Server.call`.
"""

import collections
import contextlib
import heapq
import itertools
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from kvferry import wire
from kvferry.contract import bodies, zmtp
from kvferry.contract.bodies import Hello, Incoming
from kvferry.contract.zmtp import ZmtpConnection
from kvferry.wire import Code, Error, Kind

if TYPE_CHECKING:
    from kvferry.contract.checks import Checks

#: Answers of one engine that are kept for repeated requests.
ANSWERS_MAX = 4096
#: Connections of one endpoint; one more is closed.
CONNECTIONS_MAX = 64
#: Time without a hello after which a connection is closed, and time after which an engine that stays away is forgotten.
HELLO_LIMIT_S = 5.0
AWAY_S = 10.0
#: Longest deadline of a request, as the welcome says.
DEADLINE_MAX_S = 120.0
#: Heartbeats without a message after which a client counts as silent.
BEATS = 3
#: Longest wait for the server's thread by another one.
CALL_LIMIT_S = 60.0
_TICK_S = 0.02
#: A longer time between two ticks means that the thread did not run.
_STALL_S = 0.2
_STORES_WAIT_S = 0.1


@dataclass(frozen=True)
class Settings:
    """Numbers of the welcome, and of the kvferry that is played."""

    ranks: int = 1
    heartbeat_ms: int = 500
    request_credits: int = 32
    byte_credits: int = 64 << 20
    #: Time between a copy and its answer, in which the pages of the copy must not change.
    settle_ms: int = 30
    #: Bytes of pages that are kept, all ranks together: further pages of stores are refused.
    stored_bytes_max: int = 1 << 30


@dataclass(eq=False)
class Party:
    """One engine or tool at one endpoint, over all its connections."""

    role: str
    engine: bytes
    process: int
    open: dict[int, "Request"] = field(default_factory=dict)
    answers: "collections.OrderedDict[int, tuple[int, bytes]]" = field(default_factory=collections.OrderedDict)
    #: The body of each request that was answered or refused as busy, to compare repeated ones.
    payloads: "collections.OrderedDict[int, bytes]" = field(default_factory=collections.OrderedDict)
    peers: "set[Peer]" = field(default_factory=set)
    away_since: float = 0.0


@dataclass(eq=False)
class Peer:
    """One connection."""

    endpoint: "Endpoint"
    connection: ZmtpConnection
    number: int
    opened_at: float
    received_at: float
    hello: Hello | None = None
    party: Party | None = None
    version: int = wire.HELLO_VERSION
    #: Bytes of each request that is not answered over this connection.
    outstanding: dict[int, int] = field(default_factory=dict)
    #: Requests of ours: kind, and when the answer is due.
    asked: dict[int, tuple[int, float]] = field(default_factory=dict)
    closed: bool = False


@dataclass(eq=False)
class Batch:
    """A ``stores`` message, and the results of its stores."""

    request: "Request"
    ids: list[int]
    results: dict[int, wire.StoreResult] = field(default_factory=dict)
    alone: bool = False


@dataclass(eq=False)
class Request:
    """One request that is not answered."""

    id: int
    kind: int
    party: Party
    peer: Peer
    number: int
    body: Any
    deadline: float
    payload: bytes
    batch: Batch | None = None
    #: The answer is held back by this many seconds.
    late_s: float = 0.0
    done: bool = False


class Service(Protocol):
    """What an endpoint does beyond its sessions."""

    roles: tuple[str, ...]
    kinds: ClassVar[dict[str, tuple[int, ...]]]
    #: Answers are kept over connections, for repeated requests.
    keeps_answers: bool

    def handle(self, request: Request) -> None:
        """Carries a request out, now or later; it is answered by :meth:`Server.answer`."""

    def admits(self, peer: Peer, hello: Hello) -> Error | None:
        """Returns why a peer is refused."""

    def left(self, party: Party) -> None:
        """Handles the end of the last connection of a party."""

    def forgotten(self, party: Party) -> None:
        """Handles a party that stayed away."""


class Listens(Protocol):
    """A further socket of the server."""

    def listen(self) -> None:
        """Begins to listen."""


@dataclass(eq=False)
class Endpoint:
    """The sockets of the leader, or of one worker."""

    name: str
    directory: Path
    service: Service
    listener: socket.socket | None = None
    peers: "set[Peer]" = field(default_factory=set)
    parties: dict[tuple[str, bytes], Party] = field(default_factory=dict)


class Server:
    """Runs endpoints on one thread."""

    def __init__(
        self,
        settings: Settings,
        watcher: "Checks",
        record: Callable[[dict[str, Any]], None] | None = None,
        lies: frozenset[str] = frozenset(),
    ):
        self.settings = settings
        self.watcher = watcher
        self.epoch = int(time.time())
        self.endpoints: list[Endpoint] = []
        #: Fields that no client knows are added to every answer.
        self.unknown_fields = True
        #: Mistakes that are played on purpose, to see that the checks of leaders find them.
        self.lies = lies
        self._record = record
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count(1)
        self._connections = itertools.count(1)
        self._own_ids = itertools.count(1)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_ids = itertools.count()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._called)
        self._stopping = False
        self._ticked_at = time.monotonic()
        #: An exception of the thread: a defect of these checks.
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry contract", daemon=True)

    # Methods for any thread.

    def start(self, listeners: "Sequence[Listens]" = ()) -> None:
        """Listens, also with these, and starts the thread."""
        for endpoint in self.endpoints:
            endpoint.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._listen(endpoint)
        for listener in listeners:
            listener.listen()
        self._thread.start()

    def call(self, action: Callable[[], Any]) -> Any:
        """Runs an action on the server's thread, and returns its result."""
        done = threading.Event()
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(action())
            finally:
                done.set()

        self._calls.put(run)
        os.eventfd_write(self._wake, 1)
        until = time.monotonic() + CALL_LIMIT_S
        while not done.wait(0.1):
            if not self._thread.is_alive() or time.monotonic() > until:
                raise RuntimeError(f"the thread of the contract's server does not answer: {self.fault!r}")
        if not results:
            raise RuntimeError(f"the call failed: {self.fault!r}")
        return results[0]

    def stop(self) -> None:
        """Closes every connection, and ends the thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CALL_LIMIT_S)
        os.close(self._wake)

    # The server's thread.

    def watch(self, readable: socket.socket, action: Callable[[], None]) -> None:
        """Calls ``action`` whenever the socket is readable."""
        self._selector.register(readable, selectors.EVENT_READ, action)

    def unwatch(self, readable: socket.socket) -> None:
        """Ends :meth:`watch`."""
        self._selector.unregister(readable)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Calls ``action`` after a delay."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_ids), action))

    def _called(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._calls.empty():
            self._calls.get()()

    def _run(self) -> None:
        try:
            next_tick = 0.0
            while not self._stopping:
                now = time.monotonic()
                if now >= next_tick:
                    self._tick(now)
                    next_tick = now + _TICK_S
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
                until = min([next_tick, *(self._timers[0][:1])] if self._timers else [next_tick])
                for key, _ in self._selector.select(max(until - time.monotonic(), 0.0)):
                    key.data()
        except BaseException as error:
            self.fault = error
            raise
        finally:
            for endpoint in self.endpoints:
                for peer in list(endpoint.peers):
                    self.close(peer, "the checks ended")
                if endpoint.listener is not None:
                    endpoint.listener.close()
                    (endpoint.directory / "kvferry.sock").unlink(missing_ok=True)
            self._selector.close()

    def _tick(self, now: float) -> None:
        peers = self.peers()
        if now - self._ticked_at > _STALL_S:
            # This thread did not run: messages wait in the sockets.
            for peer in peers:
                peer.received_at += now - self._ticked_at
        self._ticked_at = now
        self.watcher.tick(now, peers)
        for peer in peers:
            silent_s = now - peer.received_at
            if peer.hello is None:
                if now - peer.opened_at > HELLO_LIMIT_S:
                    self.close(peer, "no hello came in time")
            elif silent_s > BEATS * self.settings.heartbeat_ms / 1000:
                self.close(peer, f"silent for {silent_s:.1f} s")
        for endpoint in self.endpoints:
            for key, party in list(endpoint.parties.items()):
                if not party.peers and now - party.away_since > AWAY_S:
                    del endpoint.parties[key]
                    endpoint.service.forgotten(party)

    def peers(self) -> list[Peer]:
        """Returns all open connections."""
        return [peer for endpoint in self.endpoints for peer in endpoint.peers]

    def _listen(self, endpoint: Endpoint) -> None:
        listener = endpoint.listener = zmtp.listen(endpoint.directory / "kvferry.sock")
        self.watch(listener, lambda: self._accept(endpoint))

    def _accept(self, endpoint: Endpoint) -> None:
        if endpoint.listener is None:
            return
        try:
            accepted, _ = endpoint.listener.accept()
        except OSError:
            return
        now = time.monotonic()
        try:
            peer = Peer(endpoint, ZmtpConnection(accepted), next(self._connections), now, now)
        except (OSError, zmtp.Ended):
            accepted.close()
            return
        if len(endpoint.peers) >= CONNECTIONS_MAX:
            accepted.close()
            return
        endpoint.peers.add(peer)
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._readable(peer))

    def _readable(self, peer: Peer) -> None:
        if peer.closed:
            return
        try:
            messages = peer.connection.receive()
        except zmtp.Ended as ended:
            self._end(peer, by_us=False, reason=str(ended))
            return
        for parts in messages:
            if peer.closed:
                return
            self._message(peer, parts)
        if not peer.closed and peer.connection.wants_to_send:
            self.later(_TICK_S, lambda: self._flush(peer))

    def _flush(self, peer: Peer) -> None:
        if peer.closed:
            return
        try:
            peer.connection.flush()
        except zmtp.Ended as ended:
            self._end(peer, by_us=False, reason=str(ended))
            return
        if peer.connection.wants_to_send:
            self.later(_TICK_S, lambda: self._flush(peer))

    def close(self, peer: Peer, reason: str) -> None:
        """Closes a connection."""
        self._end(peer, by_us=True, reason=reason)

    def _end(self, peer: Peer, *, by_us: bool, reason: str) -> None:
        if peer.closed:
            return
        peer.closed = True
        self._selector.unregister(peer.connection.socket)
        peer.connection.close()
        peer.endpoint.peers.discard(peer)
        self.watcher.ended(peer, by_us=by_us, reason=reason)
        party = peer.party
        if party is not None:
            party.peers.discard(peer)
            if not party.peers:
                party.away_since = time.monotonic()
                if not peer.endpoint.service.keeps_answers:
                    party.open.clear()
                    party.answers.clear()
                    party.payloads.clear()
                peer.endpoint.service.left(party)

    # Messages.

    def send(self, peer: Peer, kind: int, identity: int, body: msgspec.Struct, *, deadline_ms: int = 0) -> None:
        """Sends a message, if the connection is open."""
        fields = msgspec.to_builtins(body, builtin_types=(bytes,))
        payload = {name: value for name, value in fields.items() if value is not None}
        if self.unknown_fields and kind not in (Kind.PING, Kind.PONG):
            payload["contract_unknown_field"] = 1
        self._send_payload(peer, kind, identity, msgspec.msgpack.encode(payload), deadline_ms)

    def _send_payload(self, peer: Peer, kind: int, identity: int, payload: bytes, deadline_ms: int = 0) -> None:
        if peer.closed:
            return
        version = peer.version if peer.hello is not None and kind != Kind.WELCOME else wire.HELLO_VERSION
        self._write_down("sent", peer, 0, kind, identity, payload)
        try:
            peer.connection.send([wire.header(version, kind, identity, deadline_ms, self.epoch), payload])
        except zmtp.Ended as ended:
            self._end(peer, by_us=False, reason=str(ended))
            return
        if peer.connection.wants_to_send:
            self.later(_TICK_S, lambda: self._flush(peer))

    def ask(self, peer: Peer, kind: int) -> None:
        """Sends a request of our own, which the client must answer within three heartbeats."""
        identity = next(self._own_ids)
        limit_ms = BEATS * self.settings.heartbeat_ms
        peer.asked[identity] = kind, time.monotonic() + limit_ms / 1000
        self.send(peer, kind, identity, wire.Empty(), deadline_ms=limit_ms)

    def _write_down(self, what: str, peer: Peer, number: int, kind: int, identity: int, payload: bytes) -> None:
        if self._record is None:
            return
        try:
            body = msgspec.msgpack.decode(payload)
        except msgspec.DecodeError:
            body = payload
        self._record(
            {
                "at": time.time(),
                what: bodies.name_of(kind),
                "number": number,
                "socket": peer.endpoint.name,
                "connection": peer.number,
                "id": identity,
                "body": body,
            }
        )

    def refuse(self, peer: Peer, identity: int, code: int, text: str, *, retry: bool = False) -> None:
        """Answers a request that was not opened by an error."""
        self.send(peer, Kind.ERROR, identity, Error(code, text, retry))

    def _message(self, peer: Peer, parts: list[bytes]) -> None:
        number = next(self._numbers)
        peer.received_at = time.monotonic()
        try:
            message = bodies.incoming(number, parts)
        except wire.Malformed as error:
            self.watcher.unreadable(peer, number, str(error))
            return
        self._write_down("received", peer, number, message.kind, message.id, message.payload)
        if peer.hello is None:
            if message.kind != Kind.HELLO:
                self.watcher.before_hello(peer, message)
                self.refuse(peer, message.id, 15, f"{bodies.name_of(message.kind)} came before hello: send hello first")
            else:
                self._hello(peer, message)
            return
        self.watcher.received(peer, message)
        if not wire.is_request(message.kind):
            asked = peer.asked.pop(message.id, None)
            self.watcher.answered_ours(peer, message, asked[0] if asked else None)
            return
        if message.required:
            self.watcher.not_accepted(peer, message, f"bits {message.required:#x} of bytes 20 and 21 are unknown")
            self.refuse(
                peer, message.id, Code.UNSUPPORTED, f"bits {message.required:#x} are unknown: send without them"
            )
            return
        if message.kind == Kind.PING:
            self.send(peer, Kind.PONG, message.id, wire.Empty())
            return
        if message.kind not in peer.endpoint.service.kinds[peer.hello.role]:
            text = f"{bodies.name_of(message.kind)} is no request of a {peer.hello.role} to {peer.endpoint.name}"
            self.watcher.not_accepted(peer, message, text)
            self.refuse(peer, message.id, Code.UNKNOWN_KIND, text)
            if "closes_unknown" in self.lies:
                self.close(peer, text)
            return
        self._request(peer, message)

    def _hello(self, peer: Peer, message: Incoming) -> None:
        try:
            hello = message.body()
            if len(hello.engine) != 16:
                raise wire.Malformed(f"hello: engine has {len(hello.engine)} bytes: give 16")
        except wire.Malformed as error:
            self.watcher.said_hello(peer, message, None)
            self.refuse(peer, message.id, Code.INVALID, str(error))
            return
        self.watcher.said_hello(peer, message, hello)
        service = peer.endpoint.service
        if (
            not hello.version_min <= wire.VERSION <= hello.version_max
            and not hello.version_min <= 1 <= hello.version_max
        ):
            text = f"versions {hello.version_min} to {hello.version_max}: this side supports 1 to {wire.VERSION}"
            self.refuse(peer, message.id, Code.UNSUPPORTED_VERSION, text)
            return
        if hello.role not in service.roles:
            text = f"role is {hello.role!r}: {peer.endpoint.name} welcomes {', '.join(service.roles)}"
            self.refuse(peer, message.id, Code.INVALID, text)
            return
        if (why := service.admits(peer, hello)) is not None:
            self.send(peer, Kind.ERROR, message.id, why)
            return
        peer.hello = hello
        key = hello.role, hello.engine if any(hello.engine) else peer.number.to_bytes(16, "big")
        party = peer.endpoint.parties.setdefault(key, Party(hello.role, key[1], peer.connection.process))
        party.process = peer.connection.process
        party.peers.add(peer)
        peer.party = party
        peer.version = min(hello.version_max, wire.VERSION)
        settings = self.settings
        welcome = wire.Welcome(
            peer.version,
            settings.heartbeat_ms,
            settings.request_credits,
            settings.byte_credits,
            deadline_max_ms=int(DEADLINE_MAX_S * 1000),
        )
        self.send(peer, Kind.WELCOME, message.id, welcome)
        self.watcher.welcomed(peer)

    def _request(self, peer: Peer, message: Incoming) -> None:
        party = peer.party
        assert party is not None
        if message.id in party.open:
            earlier = party.open[message.id]
            self.watcher.repeated(peer, message, earlier.payload)
            earlier.peer = peer
            if earlier.batch is not None and message.kind == Kind.STORE:
                earlier.batch = None
            peer.outstanding[message.id] = len(message.payload)
            return
        if message.id in party.answers and "forgets_answers" not in self.lies:
            self.watcher.repeated(peer, message, party.payloads.get(message.id))
            kind, payload = party.answers[message.id]
            self._send_payload(peer, kind, message.id, payload)
            return
        if "no_credits" not in self.lies and (limit := self._beyond_credits(peer, message)) is not None:
            self.watcher.refused_credits(peer, message, limit)
            self.refuse(peer, message.id, Code.BUSY, f"{limit}: retry when a request is answered", retry=True)
            return
        if message.id in party.payloads:
            self.watcher.repeated(peer, message, party.payloads[message.id])
        try:
            body = message.body()
        except wire.Malformed as error:
            self.watcher.unreadable(peer, message.number, str(error))
            self.refuse(peer, message.id, 1, str(error))
            return
        request = self._open(peer, message.id, message.kind, message.number, body, message.deadline_ms, message.payload)
        peer.outstanding[message.id] = len(message.payload)
        if message.kind == Kind.STORES:
            self._stores(request)
        else:
            self._begin(request)

    def _beyond_credits(self, peer: Peer, message: Incoming) -> str | None:
        waiting = peer.outstanding
        if len(waiting) >= self.settings.request_credits:
            return f"{len(waiting)} requests wait for answers, request_credits is {self.settings.request_credits}"
        total = sum(waiting.values()) + len(message.payload)
        if waiting and total > self.settings.byte_credits:
            return f"{total} bytes wait for answers, byte_credits is {self.settings.byte_credits}"
        return None

    def _open(
        self, peer: Peer, identity: int, kind: int, number: int, body: Any, deadline_ms: int, payload: bytes
    ) -> Request:
        assert peer.party is not None
        deadline = time.monotonic() + min(deadline_ms / 1000, DEADLINE_MAX_S)
        request = Request(identity, kind, peer.party, peer, number, body, deadline, payload)
        peer.party.open[identity] = request
        return request

    def _begin(self, request: Request) -> None:
        self.watcher.opened(request)
        request.peer.endpoint.service.handle(request)

    def _stores(self, request: Request) -> None:
        peer, party = request.peer, request.party
        batch = Batch(request, [each.id for each in request.body.stores])
        for each in request.body.stores:
            payload = bytes(each.store)
            if each.id in party.open:
                self.watcher.repeated(peer, self._inner(request, each.id, payload), party.open[each.id].payload)
                party.open[each.id].batch, party.open[each.id].peer = batch, peer
                continue
            if each.id in party.answers:
                self.watcher.repeated(peer, self._inner(request, each.id, payload), party.payloads.get(each.id))
                kind, answered = party.answers[each.id]
                batch.results[each.id] = _result(kind, answered)
                continue
            if each.id in party.payloads:
                self.watcher.repeated(peer, self._inner(request, each.id, payload), party.payloads[each.id])
            try:
                body = bodies.decode(Kind.STORE, payload)
            except wire.Malformed as error:
                self.watcher.unreadable(peer, request.number, str(error))
                batch.results[each.id] = wire.StoreResult(error=Error(1, str(error)))
                continue
            store = self._open(peer, each.id, Kind.STORE, request.number, body, each.deadline_ms, payload)
            store.batch = batch
            self._begin(store)
            if peer.closed:
                return
        self.later(_STORES_WAIT_S, lambda: self._hurry(batch))
        self._end_batch(batch)

    @staticmethod
    def _inner(request: Request, identity: int, payload: bytes) -> Incoming:
        return Incoming(request.number, request.peer.version, Kind.STORE, identity, 1, 0, 0, payload)

    def _hurry(self, batch: Batch) -> None:
        if batch.request.done:
            return
        batch.alone = True
        for identity, result in batch.results.items():
            self._send_result(batch.request.peer, identity, result)

    def _send_result(self, peer: Peer, identity: int, result: wire.StoreResult) -> None:
        if result.answer is not None:
            self.send(peer, Kind.STORE_ANSWER, identity, result.answer)
        elif result.error is not None:
            self.send(peer, Kind.ERROR, identity, result.error)

    def _end_batch(self, batch: Batch) -> None:
        if not batch.request.done and all(identity in batch.results for identity in batch.ids):
            self.answer(batch.request, wire.StoresAnswer([batch.results[identity] for identity in batch.ids]))

    def answer(self, request: Request, body: msgspec.Struct, *, opened: bool = True) -> None:
        """Answers a request. Not ``opened``: it was not examined, and may be sent again under its id."""
        if request.done:
            return
        request.done = True
        if request.late_s > 0:
            self.later(request.late_s, lambda: self._answer(request, body, opened=opened))
        else:
            self._answer(request, body, opened=opened)

    def _answer(self, request: Request, body: msgspec.Struct, *, opened: bool) -> None:
        party, peer = request.party, request.peer
        if party.open.get(request.id) is not request:
            # The leader that had the request is gone.
            return
        self.watcher.answered(request, body, peer)
        del party.open[request.id]
        kind = Kind.ERROR if isinstance(body, Error) else request.kind + 1
        fields = msgspec.to_builtins(body, builtin_types=(bytes,))
        payload = msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not None})
        if opened:
            party.answers[request.id] = kind, payload
        party.payloads[request.id] = request.payload
        while len(party.answers) > ANSWERS_MAX:
            party.answers.popitem(last=False)
        while len(party.payloads) > ANSWERS_MAX:
            party.payloads.popitem(last=False)
        peer.outstanding.pop(request.id, None)
        batch = request.batch
        if batch is None:
            self.send(peer, kind, request.id, body)
            if "answers_twice" in self.lies and kind == Kind.STORE_ANSWER:
                self.send(peer, kind, request.id, body)
            return
        result = wire.StoreResult(error=body) if isinstance(body, Error) else wire.StoreResult(answer=body)
        batch.results[request.id] = result
        if batch.alone:
            self._send_result(peer, request.id, result)
        self._end_batch(batch)

    def restart(self, endpoint: Endpoint) -> None:
        """Plays the end of a process and the start of its successor, with a later epoch for a leader."""
        for party in endpoint.parties.values():
            party.open.clear()
        for peer in list(endpoint.peers):
            self.close(peer, "a scripted restart")
        endpoint.parties.clear()
        self.epoch += 1


def _result(kind: int, payload: bytes) -> wire.StoreResult:
    if kind == Kind.ERROR:
        return wire.StoreResult(error=msgspec.msgpack.decode(payload, type=Error))
    return wire.StoreResult(answer=msgspec.msgpack.decode(payload, type=wire.StoreAnswer))
