"""A client of the checks of a running kvferry: one connection at a time, without repeats of its own.

The checks send what they want, in the order that they want, also what a good client never sends.
"""

import contextlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry import wire
from kvferry.contract.pages import OwnMemory
from kvferry.wire import Envelope, Error, Kind

#: Longest wait for an answer, if a check names no other.
ANSWER_LIMIT_S = 20.0
#: Sockets of a worker: for messages, and for descriptors.
WORKER_SOCKETS = ("kvferry.sock", "fds.sock")
#: Messages that wait to be read by a check; more means that kvferry sends without end.
UNREAD_MAX = 16_384
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Broken(Exception):
    """A rule is broken; the text says how."""


class Unavailable(Exception):
    """The checks cannot run against this kvferry; the text has the remedy."""


class Connection:
    """A connection to the process that listens in ``directory``."""

    _contexts = zmq.Context.instance

    def __init__(self, directory: Path, role: str, engine: bytes, *, rank: int = 0, replica: int = 0):
        self.directory = directory
        self.role, self.engine, self.rank, self.replica = role, engine, rank, replica
        self.version = wire.HELLO_VERSION
        self.epoch = 0
        self.welcome: wire.Welcome | None = None
        self.welcome_version = 0
        self.gone = False
        #: A check failed over this connection, and may have left answers unread.
        self.spoiled = False
        #: Other connections, which stay alive while a check waits for this one; and whether this one sends no pings.
        self.beside: list[Connection] = []
        self.silent = False
        #: Answers that no check has read yet, and the errors among all of them.
        self.unread: list[Envelope] = []
        self.errors: list[Error] = []
        self.answers = 0
        self._sent_at = 0.0
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.SNDTIMEO, 5000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor = self._socket.get_monitor_socket(_GONE)
        path = directory / "kvferry.sock"
        if not path.exists():
            self.close()
            raise Unavailable(f"no process listens at {path}: start kvferry with this socket_dir")
        self._socket.connect(f"ipc://{path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def send(
        self,
        kind: int,
        identity: int,
        body: msgspec.Struct | dict[str, Any] | bytes,
        *,
        deadline_ms: int = 10_000,
        version: int | None = None,
        required: int = 0,
    ) -> None:
        """Sends a message as it is described."""
        if isinstance(body, msgspec.Struct):
            payload = wire.body_of(body)
        else:
            payload = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        head = wire.header(version or self.version, kind, identity, deadline_ms, self.epoch)
        head = head[:20] + required.to_bytes(2, "big") + head[22:]
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([head, payload])
        self._sent_at = time.monotonic()

    def hello(self, **fields: Any) -> Envelope:
        """Sends hello and returns the first answer; ``fields`` replace those of a correct hello."""
        body = {
            "version_min": 1,
            "version_max": wire.VERSION,
            "role": self.role,
            "engine": self.engine,
            "rank": self.rank,
            "replica": self.replica,
            "name": "kvferry.contract",
            **fields,
        }
        self.send(Kind.HELLO, 0, body, version=wire.HELLO_VERSION)
        answer = self.next(lambda envelope: envelope.correlation == 0)
        if isinstance(answer.body, wire.Welcome):
            self.welcome, self.version, self.epoch = answer.body, answer.body.version, answer.epoch
        return answer

    def opened(self) -> Self:
        """Sends hello, and returns itself if it is welcomed."""
        answer = self.hello()
        if self.welcome is None:
            raise Unavailable(f"{self.directory} sent no welcome: {answer.body}")
        return self

    def _read(self, timeout_s: float) -> None:
        """Reads what arrives within this time, at least once. Sends pings, also over the other connections."""
        for each in self.beside:
            each.beat()
        self.beat()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(max(int(timeout_s * 1000), 0)))
        while self._socket in ready:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._take(wire.read(parts), parts)
            except wire.Malformed as error:
                raise Broken(f"{self.directory} sent a message that cannot be read: {error}") from error
        if self._monitor in ready:
            while self._monitor.poll(0):
                self.gone |= bool(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"] & _GONE)

    def beat(self) -> None:
        """Sends ping, if nothing was sent for a heartbeat."""
        if self.welcome is None or self.gone or self.silent or self._socket.closed:
            return
        if time.monotonic() - self._sent_at > self.welcome.heartbeat_ms / 1000:
            self.send(Kind.PING, 0, wire.Empty())

    def _take(self, envelope: Envelope, parts: list[bytes]) -> None:
        if envelope.kind == Kind.PING:
            self.send(Kind.PONG, envelope.correlation, wire.Empty(), deadline_ms=0)
            return
        if envelope.kind == Kind.PONG and envelope.correlation == 0:
            return
        if wire.is_request(envelope.kind):
            body = Error(wire.Code.UNKNOWN_KIND, f"kind {envelope.kind} is no request to an engine")
            self.send(Kind.ERROR, envelope.correlation, body, deadline_ms=0)
            return
        if envelope.kind == Kind.WELCOME:
            self.welcome_version = int.from_bytes(parts[0][4:6], "big")
        if isinstance(envelope.body, Error):
            self.errors.append(envelope.body)
        self.answers += 1
        if len(self.unread) < UNREAD_MAX:
            self.unread.append(envelope)

    def next(
        self, wanted: Callable[[Envelope], bool], *, limit_s: float = ANSWER_LIMIT_S, what: str = "an answer"
    ) -> Envelope:
        """Returns the next message that is wanted.

        Raises:
            Broken: none came within the limit, or the connection was closed.
        """
        until = time.monotonic() + limit_s
        while True:
            for at, envelope in enumerate(self.unread):
                if wanted(envelope):
                    return self.unread.pop(at)
            left_s = until - time.monotonic()
            if self.gone:
                raise Broken(f"{self.directory} closed the connection instead of sending {what}")
            if left_s <= 0:
                raise Broken(f"{self.directory} did not send {what} within {limit_s:.0f} s")
            self._read(min(left_s, 0.1))

    def answer(self, identity: int, *, limit_s: float = ANSWER_LIMIT_S) -> Any:
        """Returns the body of the answer to a request."""
        what = f"an answer to request {identity}"
        return self.next(lambda envelope: envelope.correlation == identity, limit_s=limit_s, what=what).body

    def ask(self, kind: int, identity: int, body: msgspec.Struct | dict[str, Any] | bytes, **how: Any) -> Any:
        """Sends a request, and returns the body of its answer."""
        self.send(kind, identity, body, **how)
        return self.answer(identity)

    def answered(self, identity: int) -> bool:
        """Whether an answer to this request has arrived; reads what is there after a round trip.

        The server handles the messages of a connection in their order, so that the answer to everything before the
        ping has arrived, as far as it was sent at once.
        """
        mark = secrets.randbits(40) | 1 << 41
        self.send(Kind.PING, mark, wire.Empty())
        self.next(lambda envelope: envelope.kind == Kind.PONG and envelope.correlation == mark, what="pong")
        return any(envelope.correlation == identity for envelope in self.unread)

    def ends(self, limit_s: float) -> bool:
        """Whether the server closes the connection within this time. Sends nothing meanwhile."""
        until = time.monotonic() + limit_s
        while not self.gone and time.monotonic() < until:
            self._read(0.1)
        return self.gone


def worker_dir(socket_dir: Path, rank: int, replica: int) -> Path:
    """Returns the directory in which the worker of a rank listens."""
    return socket_dir / f"worker-{replica}-{rank}"


class Rank:
    """One rank: its memory, and its connection to its worker."""

    def __init__(self, socket_dir: Path, engine: bytes, memory: OwnMemory, rank: int, replica: int):
        self.directory = worker_dir(socket_dir, rank, replica)
        self.memory = memory
        self.connection = Connection(self.directory, "rank", engine, rank=rank, replica=replica).opened()
        self.name = engine
        self._ids = itertools.count(1)

    def hand_over(self) -> bytes:
        """Sends the descriptor of the memory, and returns its ticket."""
        ticket = secrets.token_bytes(16)
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sender:
            sender.settimeout(ANSWER_LIMIT_S)
            sender.connect(os.fspath(self.directory / "fds.sock"))
            socket.send_fds(sender, [ticket], [self.memory.fd])
            if sender.recv(1) != b"\x01":
                raise Broken(
                    f"{self.directory}/fds.sock: one ticket and its descriptor were not answered by one byte, 1"
                )
        return ticket

    def register(self, change: Callable[[dict[str, Any]], None] | None = None, *, after: int = 0) -> Any:
        """Registers the memory, with a description that ``change`` has changed; returns the answer."""
        registration = self.memory.describe(self.hand_over())
        if change is not None:
            change(registration)
        return self.ask(Kind.REGISTER, wire.Register(after, self.name, registration))

    def ask(self, kind: int, body: msgspec.Struct) -> Any:
        """Sends a request to the worker, and returns its answer."""
        return self.connection.ask(kind, next(self._ids), body, deadline_ms=int(ANSWER_LIMIT_S * 1000))

    def wrote(self, through: int) -> Any:
        """Reports work as written."""
        return self.ask(Kind.WRITTEN, wire.Written(through))

    def close(self) -> None:
        """Closes the connection, which ends what the registration began."""
        self.connection.close()
        self.memory.close()
