"""The sockets and sessions of the scripted leader and workers: hello, credits, repeated requests, heartbeats.

One thread owns everything. Other threads use :meth:`Server.call`.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry import wire
from kvferry.contract import bodies, zmtp
from kvferry.contract.bodies import Incoming
from kvferry.contract.loop import TICK_S, Loop
from kvferry.contract.peers import (
    ANSWERS_MAX,
    AWAY_S,
    BEATS,
    CONNECTIONS_MAX,
    DEADLINE_MAX_S,
    HELLO_LIMIT_S,
    Batch,
    Endpoint,
    Peer,
    Request,
    Session,
    Settings,
)
from kvferry.contract.zmtp import ZmtpConnection
from kvferry.wire import Code, Error, Kind

if TYPE_CHECKING:
    from kvferry.contract.checks import Checks
    from kvferry.contract.worker import Tickets

#: A longer time between two ticks means that the thread did not run.
_STALL_S = 0.2
#: Time after which the stores of one message that have ended do not wait for the others.
_STORES_WAIT_S = 0.1


class Server(Loop):
    """Runs endpoints on one thread."""

    def __init__(
        self,
        settings: Settings,
        watcher: "Checks",
        record: Callable[[dict[str, Any]], None] | None = None,
        lies: frozenset[str] = frozenset(),
    ):
        super().__init__()
        self.settings = settings
        self.watcher = watcher
        self.epoch = int(time.time())
        self.endpoints: list[Endpoint] = []
        #: Fields that no client knows are added to every answer.
        self.unknown_fields = True
        #: Mistakes that are played on purpose, to see that the checks of leaders find them.
        self.lies = lies
        self._record = record
        self._numbers = itertools.count(1)
        self._connections = itertools.count(1)
        self._own_ids = itertools.count(1)
        self._ticked_at = time.monotonic()

    # Methods for any thread.

    def start(self, listeners: "Sequence[Tickets]" = ()) -> None:
        """Listens, also with these, and starts the thread."""
        for endpoint in self.endpoints:
            endpoint.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._listen(endpoint)
        for listener in listeners:
            listener.listen()
        self.begin()

    def stop(self) -> None:
        """Closes every connection, and ends the thread."""
        self.end_loop()

    # The server's thread.

    def _ended(self) -> None:
        for endpoint in self.endpoints:
            for peer in list(endpoint.peers):
                self.close(peer, "the checks ended")
            if endpoint.listener is not None:
                endpoint.listener.close()
                (endpoint.directory / "kvferry.sock").unlink(missing_ok=True)

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
            for key, session in list(endpoint.sessions.items()):
                if not session.peers and now - session.away_since > AWAY_S:
                    del endpoint.sessions[key]
                    endpoint.service.forgotten(session)

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
        self.watch(accepted, lambda: self._readable(peer))

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
            self.later(TICK_S, lambda: self._flush(peer))

    def _flush(self, peer: Peer) -> None:
        if peer.closed:
            return
        try:
            peer.connection.flush()
        except zmtp.Ended as ended:
            self._end(peer, by_us=False, reason=str(ended))
            return
        if peer.connection.wants_to_send:
            self.later(TICK_S, lambda: self._flush(peer))

    def close(self, peer: Peer, reason: str) -> None:
        """Closes a connection."""
        self._end(peer, by_us=True, reason=reason)

    def _end(self, peer: Peer, *, by_us: bool, reason: str) -> None:
        if peer.closed:
            return
        peer.closed = True
        self.unwatch(peer.connection.socket)
        peer.connection.close()
        peer.endpoint.peers.discard(peer)
        self.watcher.ended(peer, by_us=by_us, reason=reason)
        session = peer.session
        if session is not None:
            session.peers.discard(peer)
            if not session.peers:
                session.away_since = time.monotonic()
                if not peer.endpoint.service.keeps_answers:
                    session.open.clear()
                    session.answers.clear()
                    session.payloads.clear()
                peer.endpoint.service.left(session)

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
            self.later(TICK_S, lambda: self._flush(peer))

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
        if hello.version_min > hello.version_max:
            versions = f"version_min is {hello.version_min} and version_max {hello.version_max}"
            self.refuse(peer, message.id, Code.INVALID, f"{versions}: give the oldest and the newest version")
            return
        if hello.version_min > wire.VERSION or hello.version_max < wire.VERSION_MIN:
            both = f"versions {hello.version_min} to {hello.version_max}"
            text = f"{both}: this side supports {wire.VERSION_MIN} to {wire.VERSION}"
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
        session = peer.endpoint.sessions.setdefault(key, Session(hello.role, key[1], peer.connection.process))
        session.process = peer.connection.process
        session.peers.add(peer)
        peer.session = session
        peer.version = min(hello.version_max, wire.VERSION)
        settings = self.settings
        welcome = wire.Welcome(
            peer.version,
            settings.heartbeat_ms,
            settings.request_credits,
            settings.byte_credits,
            deadline_max_ms=int(DEADLINE_MAX_S * 1000),
            features=hello.features & service.features,
        )
        self.send(peer, Kind.WELCOME, message.id, welcome)
        self.watcher.welcomed(peer)

    def _request(self, peer: Peer, message: Incoming) -> None:
        session = peer.session
        assert session is not None
        if message.id in session.open:
            earlier = session.open[message.id]
            self.watcher.repeated(peer, message, earlier.payload)
            earlier.peer = peer
            if earlier.batch is not None and message.kind == Kind.STORE:
                earlier.batch = None
            peer.outstanding[message.id] = len(message.payload)
            return
        if message.id in session.answers and "forgets_answers" not in self.lies:
            self.watcher.repeated(peer, message, session.payloads.get(message.id))
            kind, payload = session.answers[message.id]
            self._send_payload(peer, kind, message.id, payload)
            return
        if "no_credits" not in self.lies and (limit := self._beyond_credits(peer, message)) is not None:
            self.watcher.refused_credits(peer, message, limit)
            self.refuse(peer, message.id, Code.BUSY, f"{limit}: retry when a request is answered", retry=True)
            return
        if message.id in session.payloads:
            self.watcher.repeated(peer, message, session.payloads[message.id])
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
        assert peer.session is not None
        deadline = time.monotonic() + min(deadline_ms / 1000, DEADLINE_MAX_S)
        request = Request(identity, kind, peer.session, peer, number, body, deadline, payload)
        request.again = identity in peer.session.payloads
        peer.session.open[identity] = request
        return request

    def _begin(self, request: Request) -> None:
        self.watcher.opened(request)
        request.peer.endpoint.service.handle(request)

    def _stores(self, request: Request) -> None:
        peer, session = request.peer, request.session
        batch = Batch(request, [each.id for each in request.body.stores])
        for each in request.body.stores:
            payload = bytes(each.store)
            if each.id in session.open:
                self.watcher.repeated(peer, self._inner(request, each.id, payload), session.open[each.id].payload)
                session.open[each.id].batch, session.open[each.id].peer = batch, peer
                continue
            if each.id in session.answers:
                self.watcher.repeated(peer, self._inner(request, each.id, payload), session.payloads.get(each.id))
                kind, answered = session.answers[each.id]
                batch.results[each.id] = _result(kind, answered)
                continue
            if each.id in session.payloads:
                self.watcher.repeated(peer, self._inner(request, each.id, payload), session.payloads[each.id])
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
        session, peer = request.session, request.peer
        if session.open.get(request.id) is not request:
            # The leader that had the request is gone.
            return
        self.watcher.answered(request, body, peer)
        del session.open[request.id]
        kind = Kind.ERROR if isinstance(body, Error) else request.kind + 1
        fields = msgspec.to_builtins(body, builtin_types=(bytes,))
        payload = msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not None})
        if opened:
            session.answers[request.id] = kind, payload
        session.payloads[request.id] = request.payload
        while len(session.answers) > ANSWERS_MAX:
            session.answers.popitem(last=False)
        while len(session.payloads) > ANSWERS_MAX:
            session.payloads.popitem(last=False)
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
        for session in endpoint.sessions.values():
            session.open.clear()
        for peer in list(endpoint.peers):
            self.close(peer, "a scripted restart")
        endpoint.sessions.clear()
        self.epoch += 1


def _result(kind: int, payload: bytes) -> wire.StoreResult:
    if kind == Kind.ERROR:
        return wire.StoreResult(error=msgspec.msgpack.decode(payload, type=Error))
    return wire.StoreResult(answer=msgspec.msgpack.decode(payload, type=wire.StoreAnswer))
