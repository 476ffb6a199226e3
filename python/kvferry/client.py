"""A session with one process of kvferry: hello, requests with deadlines, retries over reconnects, heartbeats.

A :class:`Client` has one thread of its own, which owns the sockets. A caller gets a :class:`Question`, the handle of a
request, at once, and may wait for its end. Each request ends exactly once and by its own deadline: with the peer's
answer, or with a :class:`Failure` that states whether any part of the request may still run.
"""

import collections
import contextlib
import heapq
import itertools
import logging
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry import wire
from kvferry.wire import Code, Hello, Kind

logger = logging.getLogger(__name__)

#: Most requests without an answer; one more is refused at once. Their bodies take at most 32 GiB, with 8 MiB each, the
#: longest body of the wire; with the hashes of 4,096 pages each, 512 MiB.
OPEN_MAX = 4096
#: Longest path of a Unix socket, in bytes.
SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME = "kvferry.sock"

_BACKOFF_FIRST_S = 0.02
_BACKOFF_MAX_S = 1.0
#: Longest wait for a connection and its welcome.
_CONNECT_LIMIT_S = 2.0
_CLOSE_LIMIT_S = 2.0
#: Request credits of a connection that are reserved for urgent requests, and byte credits for each of them.
_URGENT_CREDITS = 4
_URGENT_BYTES = 256
_GONE_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Failure(Exception):
    """Why a request has no answer.

    ``said``: the peer sent this error. ``over``: no part of the request runs or will run, because the leader has
    reported so or no peer received the request. Only then may the pages of a load or a store be used again. Otherwise
    the request's outcome is unknown.
    """

    def __init__(self, code: int, message: str, *, said: bool, retry: bool = False, over: bool = False):
        super().__init__(message)
        self.code = code
        self.message = message
        self.said = said
        self.over = over
        self.retry = retry


class Question:
    """One request and, once :attr:`done`, its answer or failure."""

    __slots__ = (
        "_ended",
        "answer",
        "body",
        "expires",
        "failure",
        "id",
        "kind",
        "link",
        "sent_bytes",
        "told",
        "until",
        "urgent",
    )

    def __init__(self, identity: int, message: msgspec.Struct, told: float, expires: float, link: int | None):
        self.id = identity
        self.kind = wire.KINDS[type(message)]
        self.body = wire.body_of(message)
        #: Deadlines of the request, on the monotonic clock: the one that the peer receives, and our own.
        self.told = told
        self.expires = expires
        self.link = link
        #: Byte credits of the connection that the request uses; None before the request is sent over it.
        self.sent_bytes: int | None = None
        self.answer: msgspec.Struct | None = None
        self.failure: Failure | None = None
        self.until: Callable[[Question], None] | None = None
        self.urgent = False
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the request has ended, at most ``timeout_s``; returns whether it has."""
        return self._ended.wait(timeout_s)

    def _end(self, answer: msgspec.Struct | None, failure: Failure | None) -> None:
        self.answer, self.failure = answer, failure
        self.body = b""
        self._ended.set()
        if self.until is not None:
            self.until(self)


class Client:
    """A client of the process that listens in ``directory``, from :meth:`start` to :meth:`close`.

    ``turn`` is called on the client's thread whenever something may have changed: after a welcome, a loss, an answer, a
    :meth:`poke`, and at the time that its last call returned (``None``: not before the next such event). ``turn`` may
    call :meth:`ask`. ``listening``: the peer's welcome has been received over the present connection.
    """

    def __init__(
        self,
        directory: Path,
        hello: Hello,
        *,
        first_id: int,
        turn: Callable[[], float | None] | None = None,
    ):
        self.directory = directory
        self._hello = hello
        self._turn = turn
        self._ids = itertools.count(first_id)
        self._open: dict[int, Question] = {}
        self._unsent: collections.deque[Question] = collections.deque()
        self._urgent: collections.deque[Question] = collections.deque()
        self._new: collections.deque[Question] = collections.deque()
        self._expiry: list[tuple[float, int]] = []
        self._lock = threading.Lock()
        self._count = 0
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        #: Number of the present connection; 0 without one.
        self.link = 0
        #: Epoch of the peer's leader, from the last welcome.
        self.epoch = 0
        #: Features that both sides support beyond the version, from the last welcome.
        self.features = 0
        #: When the connection was lost, on the monotonic clock; None while there is one.
        self.lost_at: float | None = time.monotonic()
        #: Why the last attempt to connect failed, for logs.
        self.problem = ""
        self._links = itertools.count(1)
        self._next_turn: float | None = None
        self._credits = (1, 1)
        self._in_flight = self._in_flight_bytes = 0
        #: When the last message was sent over the present connection.
        self._said = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kvferry {hello.role} {hello.rank}", daemon=True)

    # Methods for any thread.

    def start(self) -> None:
        """Starts the client's thread, which connects; ``turn`` is called from now on."""
        self._thread.start()

    @property
    def listening(self) -> bool:
        """Whether there is a connection over which the peer has sent its welcome."""
        return self.link != 0

    def ask(
        self,
        message: msgspec.Struct,
        timeout_s: float,
        *,
        patience_s: float = 0.0,
        link: int | None = None,
        until: Callable[[Question], None] | None = None,
        urgent: bool = False,
    ) -> Question:
        """Sends a request; returns at once. An ``urgent`` one overtakes those that wait for credits of the connection.

        The peer must carry the request out within ``timeout_s``, and may answer up to ``patience_s`` later. Over a new
        connection the request is sent again under the same id, unless it is bound to one connection, ``link``.
        ``until`` is called with the ended request, on the client's thread, or by this call if the request is refused.
        """
        now = time.monotonic()
        with self._lock:
            question = Question(next(self._ids), message, now + timeout_s, now + timeout_s + patience_s, link)
            question.until = until
            question.urgent = urgent
            full = self._count >= OPEN_MAX or self._closing
            if not full:
                self._count += 1
                self._new.append(question)
        if full:
            text = f"{OPEN_MAX} questions wait for an answer"
            question._end(None, Failure(Code.BUSY, text, said=False, retry=True, over=True))
        else:
            self.poke()
        return question

    def draw(self) -> int:
        """Draws a request id, above those of all earlier requests and below those of all later ones."""
        with self._lock:
            return next(self._ids)

    def poke(self) -> None:
        """Wakes the client's thread, so that it calls ``turn``."""
        with self._lock:
            if not self._closing:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Closes the connection. Requests without an answer fail."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_LIMIT_S)

    # The client's own thread.

    def _run(self) -> None:
        context = zmq.Context()
        backoff_s = _BACKOFF_FIRST_S
        try:
            while not self._closing:
                try:
                    if self._connect_and_converse(context):
                        backoff_s = _BACKOFF_FIRST_S
                except (OSError, zmq.ZMQError, wire.Malformed, Failure) as error:
                    self._set_problem(str(error))
                except Exception:
                    logger.exception("kvferry: the conversation with %s failed", self.directory)
                self._set_lost()
                until = time.monotonic() + backoff_s
                while not self._closing and time.monotonic() < until:
                    self._meanwhile(until)
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
        finally:
            with self._lock:
                self._closing = True
                os.close(self._wake)
            self._take_new()
            for question in list(self._open.values()):
                self._settle(question, None, Failure(Code.DRAINING, "the conversation was closed", said=False))
            context.destroy(linger=0)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            logger.debug("kvferry: %s: %s", self.directory, problem)
        self.problem = problem

    def _set_lost(self) -> None:
        if self.lost_at is None:
            self.lost_at = time.monotonic()
        self.link = 0
        self._in_flight = self._in_flight_bytes = 0
        for question in self._open.values():
            question.sent_bytes = None
        for question in [question for question in self._open.values() if question.link is not None]:
            self._settle(question, None, Failure(Code.DEADLINE, "the connection broke", said=False, retry=True))
        self._take_turn()

    def _meanwhile(self, until: float) -> None:
        """Waits for a request, a poke or a deadline while there is no connection."""
        self._take_new()
        self._expire()
        self._take_turn()
        timeout_s = self._until_next(until) - time.monotonic()
        wake = select.poll()
        wake.register(self._wake, select.POLLIN)
        wake.poll(max(timeout_s, 0.0) * 1000)
        self._drain_wake()

    def _connect_and_converse(self, context: zmq.Context) -> bool:
        """Runs one connection until it ends; returns True. Raises if no welcome is received."""
        path = self.directory / SOCKET_NAME
        check_directory(self.directory)
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise OSError(f"{path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket's path")
        if not path.exists():
            raise OSError(f"nobody listens at {path}")
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.BODY_BYTES_MAX)
            socket.setsockopt(zmq.SNDHWM, 0)
            # A send without a peer would wait for one for ever, and the peer is gone.
            socket.setsockopt(zmq.SNDTIMEO, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            monitor = socket.get_monitor_socket(_GONE_EVENTS)
            try:
                socket.connect(f"ipc://{path}")
                welcome = self._say_hello(socket, monitor)
                self._converse(socket, monitor, welcome)
                return True
            finally:
                socket.disable_monitor()
        finally:
            socket.close(0)

    def _say_hello(self, socket: zmq.Socket, monitor: zmq.Socket) -> wire.Welcome:
        deadline = time.monotonic() + _CONNECT_LIMIT_S
        head = wire.header(wire.HELLO_VERSION, Kind.HELLO, 0, int(_CONNECT_LIMIT_S * 1000), 0)
        socket.send_multipart([head, wire.body_of(self._hello)])
        poller = self._poller(socket, monitor)
        while (left_s := deadline - time.monotonic()) > 0 and not self._closing:
            self._take_new()
            self._expire()
            ready = dict(poller.poll(int(left_s * 1000) + 1))
            if self._wake in ready:
                self._drain_wake()
            if socket in ready:
                envelope = wire.read(socket.recv_multipart(zmq.NOBLOCK))
                if isinstance(welcome := envelope.body, wire.Welcome):
                    if not self._hello.version_min <= welcome.version <= self._hello.version_max:
                        text = (
                            f"{self.directory} says version {welcome.version}, this side speaks "
                            f"{self._hello.version_min} to {self._hello.version_max}: update the older side"
                        )
                        raise Failure(Code.UNSUPPORTED_VERSION, text, said=True)
                    self.epoch = envelope.epoch
                    return welcome
                raise Failure(Code.NOT_READY, f"{self.directory} does not say welcome: {envelope.body}", said=True)
            if monitor in ready and self._gone(monitor):
                raise OSError(f"nobody listens at {self.directory / SOCKET_NAME}")
        raise OSError(f"{self.directory} said no welcome within {_CONNECT_LIMIT_S:.0f} s")

    def _poller(self, socket: zmq.Socket, monitor: zmq.Socket) -> zmq.Poller:
        poller = zmq.Poller()
        for what in (socket, monitor, self._wake):
            poller.register(what, zmq.POLLIN)
        return poller

    @staticmethod
    def _gone(monitor: zmq.Socket) -> bool:
        gone = False
        while monitor.poll(0):
            gone |= bool(recv_monitor_message(monitor, zmq.NOBLOCK)["event"] & _GONE_EVENTS)
        return gone

    def _converse(self, socket: zmq.Socket, monitor: zmq.Socket, welcome: wire.Welcome) -> None:
        self._version = welcome.version
        self.features = welcome.features
        self._credits = (max(welcome.request_credits, 1), max(welcome.byte_credits, 1))
        self._in_flight = self._in_flight_bytes = 0
        self._unsent.clear()
        self._urgent.clear()
        for _, question in sorted(self._open.items()):
            question.sent_bytes = None
            self._queue(question)
        self.problem = ""
        self.lost_at = None
        self.link = next(self._links)
        beat_s = max(welcome.heartbeat_ms, 10) / 1000
        heard, pinged = time.monotonic(), False
        self._said = heard
        poller = self._poller(socket, monitor)
        while not self._closing:
            self._take_new()
            self._take_turn()
            self._take_new()
            self._send_unsent(socket)
            # Pings after one heartbeat in which nothing was sent, however much was received: the peer closes a client
            # that sends nothing for three. Pings also when nothing was received, to find out whether the peer is alive.
            next_beat = min(self._said + beat_s, heard + beat_s * (3 if pinged else 1))
            timeout_s = self._until_next(next_beat) - time.monotonic()
            ready = dict(poller.poll(max(int(timeout_s * 1000 + 0.999), 0)))
            if self._wake in ready:
                self._drain_wake()
            if socket in ready:
                heard, pinged = time.monotonic(), False
                self._read_all(socket)
            if monitor in ready and self._gone(monitor):
                return
            self._expire()
            if socket not in ready and pinged and time.monotonic() >= heard + beat_s * 3:
                self._set_problem(f"{self.directory} was silent for three heartbeats")
                return
            if time.monotonic() >= next_beat:
                pinged = True
                head = wire.header(self._version, Kind.PING, 0, max(int(beat_s * 1000), 1), self.epoch)
                self._say(socket, head, wire.body_of(wire.Empty()))

    def _say(self, socket: zmq.Socket, head: bytes, body: bytes) -> None:
        socket.send_multipart([head, body])
        self._said = time.monotonic()

    def _read_all(self, socket: zmq.Socket) -> None:
        """Reads received messages, at most 256, so that deadlines and our own requests are not starved."""
        for _ in range(256):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = wire.read(parts)
            if wire.is_request(envelope.kind):
                self._answer(socket, envelope)
                continue
            question = self._open.get(envelope.correlation)
            if question is None or (envelope.body is None and not envelope.required):
                # No request waits for this answer, or its kind is unknown here.
                continue
            if isinstance(envelope.body, wire.Error):
                error = envelope.body
                failure = Failure(error.code, error.message, said=True, retry=error.retry, over=error.over)
                self._settle(question, None, failure)
            elif envelope.kind == question.kind + 1 and envelope.body is not None:
                self._settle(question, envelope.body, None)
            else:
                text = (
                    f"kind {envelope.kind}, with bits {envelope.required:#x}, is no answer to kind {int(question.kind)}"
                )
                self._settle(question, None, Failure(Code.INTERNAL, text, said=False))

    def _answer(self, socket: zmq.Socket, asked: wire.Envelope) -> None:
        """Answers a request of the peer. The peer's ids are independent of our own."""
        kind, body = Kind.PONG, wire.body_of(wire.Empty())
        if asked.required:
            kind, text = Kind.ERROR, f"bits {asked.required:#x} of the header's bytes 20 and 21 are not known here"
            body = wire.body_of(wire.Error(Code.UNSUPPORTED, text))
        elif asked.kind != Kind.PING:
            kind, text = Kind.ERROR, f"kind {asked.kind} is not for an engine to answer"
            body = wire.body_of(wire.Error(Code.UNKNOWN_KIND, text))
        self._say(socket, wire.header(self._version, kind, asked.correlation, 0, self.epoch), body)

    def _send_unsent(self, socket: zmq.Socket) -> None:
        requests, byte_credits = self._credits
        while queue := self._urgent or self._unsent:
            question = queue[0]
            if question.done:
                queue.popleft()
                continue
            # Some credits are reserved for urgent requests, which are few and small.
            kept = 0 if question.urgent else min(_URGENT_CREDITS, requests // 64)
            too_much = self._in_flight_bytes + len(question.body) > byte_credits - kept * _URGENT_BYTES
            if self._in_flight > 0 and (self._in_flight >= requests - kept or too_much):
                return
            queue.popleft()
            question.sent_bytes = len(question.body)
            self._in_flight += 1
            self._in_flight_bytes += question.sent_bytes
            left_ms = max(int((question.told - time.monotonic()) * 1000), 1)
            head = wire.header(self._version, question.kind, question.id, left_ms, self.epoch)
            self._say(socket, head, question.body)

    def _take_new(self) -> None:
        while self._new:
            question = self._new.popleft()
            self._open[question.id] = question
            heapq.heappush(self._expiry, (question.expires, question.id))
            if len(self._expiry) > 4 * OPEN_MAX:
                self._expiry = [(each.expires, each.id) for each in self._open.values()]
                heapq.heapify(self._expiry)
            if question.link is not None and question.link != self.link:
                failure = Failure(Code.DEADLINE, "the connection broke", said=False, retry=True, over=True)
                self._settle(question, None, failure)
            else:
                self._queue(question)

    def _queue(self, question: Question) -> None:
        (self._urgent if question.urgent else self._unsent).append(question)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._expiry and self._expiry[0][0] <= now:
            _, identity = heapq.heappop(self._expiry)
            question = self._open.get(identity)
            if question is not None:
                self._settle(question, None, Failure(Code.DEADLINE, "no answer came in time", said=False, retry=True))

    def _settle(self, question: Question, answer: msgspec.Struct | None, failure: Failure | None) -> None:
        if self._open.pop(question.id, None) is None:
            return
        if question.sent_bytes is not None:
            self._in_flight -= 1
            self._in_flight_bytes -= question.sent_bytes
        with self._lock:
            self._count -= 1
        question._end(answer, failure)

    def _take_turn(self) -> None:
        if self._turn is None:
            return
        try:
            self._next_turn = self._turn()
        except Exception:
            logger.exception("kvferry: %s: a turn failed", self.directory)
            self._next_turn = time.monotonic() + _BACKOFF_MAX_S

    def _until_next(self, at: float) -> float:
        if self._expiry:
            at = min(at, self._expiry[0][0])
        if self._next_turn is not None:
            at = min(at, self._next_turn)
        return at

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def check_directory(directory: Path) -> None:
    """Refuses a socket directory that another user could access or replace.

    Raises:
        OSError: naming the directory, what is wrong with it, and the remedy.
    """
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        raise OSError(f"{directory} does not exist: is kvferry running with this socket_dir?") from None
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{directory} is a link or no directory: name a directory itself")
    if found.st_uid != os.geteuid():
        raise OSError(f"{directory} belongs to uid {found.st_uid}: run the engine and kvferry as one user")
    if stat.S_IMODE(found.st_mode) & 0o777 != 0o700:
        raise OSError(f"{directory} must be open to its owner alone; run chmod 700 {directory}")
