"""A session with one process of kvferry: hello, requests with deadlines, retries over reconnects, heartbeats.

A :class:`Client` has one thread of its own, which owns the sockets. A caller gets a :class:`PendingRequest`, the handle
of a request, at once, and may wait for its end. Each request ends exactly once and by its own deadline: with the peer's
answer, or with a :class:`Failure` that states whether any part of the request may still run.
"""

import collections
import contextlib
import ctypes
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
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry import wire
from kvferry.batches import StoreBatches
from kvferry.wire import Code, Hello, Kind

logger = logging.getLogger("kvferry")

#: Most requests without an answer; one more is refused at once. With the hashes of 4,096 pages each, their bodies take
#: 512 MiB. A body has at most 8 MiB.
OPEN_MAX = 4096
#: Longest path of a Unix socket, in bytes.
SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME = "kvferry.sock"

#: As ``os.eventfd_write``, but keeps Python's lock meanwhile: otherwise the thread that is woken takes it, and the
#: caller, in a step of the engine, waits to get it back. The call does not wait: the counter cannot reach its limit.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)

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
        "requested_at",
        "sent_at",
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
        #: Deadlines of the request, on the monotonic clock: the one that the peer receives, and our own.
        self.deadline = deadline
        self.expires = expires
        self.link = link
        self.answer: msgspec.Struct | None = None
        self.failure: Failure | None = None
        self.until: Callable[[PendingRequest], None] | None = None
        self.watch: Watch | None = None
        self.urgent = False
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
        message = self._message
        if message is not None:
            self._body = wire.body_of(message.build() if isinstance(message, Later) else message)
            self._message = None
        return self._body

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


class Client:
    """A client of the process that listens in ``directory``, from :meth:`start` to :meth:`close`.

    ``turn`` is called on the client's thread whenever something may have changed: after a welcome, a loss, an answer, a
    :meth:`poke`, and at the time that its last call returned (``None``: not before the next such event). ``turn`` may
    call :meth:`request`. ``listening``: the peer's welcome has been received over the present connection.
    """

    def __init__(
        self,
        directory: Path,
        hello: Hello,
        *,
        first_id: int,
        turn: Callable[[], float | None] | None = None,
        watch: Watch | None = None,
    ):
        self.directory = directory
        self._hello = hello
        self._turn = turn
        self._watch = watch
        self._ids = itertools.count(first_id)
        self._open: dict[int, PendingRequest] = {}
        self._unsent: collections.deque[PendingRequest] = collections.deque()
        self._urgent: collections.deque[PendingRequest] = collections.deque()
        self._new: collections.deque[PendingRequest] = collections.deque()
        self._expiry: list[tuple[float, int]] = []
        self._lock = threading.Lock()
        self._count = 0
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        #: For the descriptor alone: whoever wakes the thread must not wait for what the thread does.
        self._wake_lock = threading.Lock()
        self._wakes = True
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
        #: Bytes of each request that was sent over the present connection and not answered. A request whose caller no
        #: longer waits uses its credits until it is answered.
        self._in_flight: dict[int, int] = {}
        self._in_flight_bytes = 0
        # A recording needs the answers in the order of the leader's decisions; that of a shared message comes late.
        self._batches = StoreBatches(alone=(lambda: watch.recording) if watch is not None else None)
        #: When the last message was sent over the present connection.
        self._sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kvferry {hello.role} {hello.rank}", daemon=True)

    # Methods for any thread.

    def start(self) -> None:
        """Starts the client's thread, which connects; ``turn`` is called from now on."""
        self._thread.start()

    @property
    def listening(self) -> bool:
        """Whether there is a connection over which the peer has sent its welcome."""
        return self.link != 0

    def request(
        self,
        message: msgspec.Struct | Later,
        timeout_s: float,
        *,
        grace_s: float = 0.0,
        link: int | None = None,
        until: Callable[[PendingRequest], None] | None = None,
        urgent: bool = False,
        wake: bool = True,
        identity: int | None = None,
    ) -> PendingRequest:
        """Sends a request; returns at once. An ``urgent`` one overtakes those that wait for credits of the connection.

        The message is encoded on the client's thread, and must not change; a message that cannot be encoded fails. With
        a ``watch`` that reads the body it is encoded here.
        The peer must carry the request out within ``timeout_s``, and may answer up to ``grace_s`` later. Over a new
        connection the request is sent again under the same id, unless it is bound to one connection, ``link``.
        ``until`` is called with the ended request, on the client's thread, or by this call if the request is refused.
        ``identity`` is the id of a load or a store that has ended, because the peer refused it as busy and did not
        examine it: the same message is sent again as the same request, by a client without a ``watch``, which sees ids
        in their order. By default the id is a new and the highest one.
        Without ``wake`` the request is sent when the thread wakes next, at the latest by :meth:`poke`: stores that are
        sent at one time share a message.
        """
        now = time.monotonic()
        with self._lock:
            number = next(self._ids) if identity is None else identity
            pending = PendingRequest(number, message, now + timeout_s, now + timeout_s + grace_s, link)
            pending.until = until
            pending.urgent = urgent
            pending.watch = self._watch
            if self._watch is not None:
                self._watch.requested(pending)
            full = self._count >= OPEN_MAX or self._closing
            if not full:
                self._count += 1
                self._new.append(pending)
        if full:
            text = "the client closes" if self._closing else f"{OPEN_MAX} requests wait for an answer"
            # A repeated request may have been sent before.
            over = identity is None
            pending._end(None, Failure(Code.BUSY, text, reported=False, retry=True, over=over))
        elif wake and threading.get_ident() != self._thread.ident:
            # The client's own thread sends what ``turn`` has requested before it waits again.
            self.poke()
        return pending

    @property
    def open_requests(self) -> tuple[int, int]:
        """Numbers of requests without an answer that wait to be sent, and that were sent. May lag behind."""
        sent = len(self._in_flight) + self._batches.more
        return max(self._count - sent, 0), sent

    def draw(self) -> int:
        """Draws a request id, above those of all earlier requests and below those of all later ones."""
        with self._lock:
            return next(self._ids)

    def poke(self) -> None:
        """Wakes the client's thread, so that it calls ``turn``."""
        with self._wake_lock:
            if self._wakes:
                _eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Closes the connection. Requests without an answer fail."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self.poke()
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
            with self._wake_lock:
                self._wakes = False
                os.close(self._wake)
            self._take_new()
            for pending in list(self._open.values()):
                self._settle(pending, None, Failure(Code.DRAINING, "the conversation was closed", reported=False))
            context.destroy(linger=0)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            logger.debug("kvferry: %s: %s", self.directory, problem)
        self.problem = problem

    def _set_lost(self) -> None:
        if self.lost_at is None:
            self.lost_at = time.monotonic()
        self.link = 0
        self._forget_in_flight()
        for pending in [pending for pending in self._open.values() if pending.link is not None]:
            self._settle(pending, None, Failure(Code.DEADLINE, "the connection broke", reported=False, retry=True))
        self._take_turn()

    def _forget_in_flight(self) -> None:
        self._batches.lost()
        self._in_flight.clear()
        self._in_flight_bytes = 0

    def _meanwhile(self, until: float) -> None:
        """Waits for a request, a poke or a deadline while there is no connection."""
        self._expire()
        self._take_turn()
        # Also what a turn has requested, whose deadlines count from now on.
        self._take_new()
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
            raise OSError(f"no process listens at {path}")
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
            self._expire()
            # Turns are taken and deadlines of requests are heeded also while the peer is silent.
            self._take_turn()
            self._take_new()
            next_s = self._until_next(time.monotonic() + left_s) - time.monotonic()
            ready = dict(poller.poll(max(int(next_s * 1000) + 1, 0)))
            if self._wake in ready:
                self._drain_wake()
            if socket in ready:
                envelope = wire.read(socket.recv_multipart(zmq.NOBLOCK))
                if isinstance(welcome := envelope.body, wire.Welcome):
                    if not self._hello.version_min <= welcome.version <= self._hello.version_max:
                        text = (
                            f"{self.directory} has chosen version {welcome.version}, this side supports "
                            f"{self._hello.version_min} to {self._hello.version_max}: update the older side"
                        )
                        raise Failure(Code.UNSUPPORTED_VERSION, text, reported=True)
                    self.epoch = envelope.epoch
                    return welcome
                raise Failure(Code.NOT_READY, f"{self.directory} sent no welcome: {envelope.body}", reported=True)
            if monitor in ready and self._gone(monitor):
                raise OSError(f"no process listens at {self.directory / SOCKET_NAME}")
        raise OSError(f"{self.directory} sent no welcome within {_CONNECT_LIMIT_S:.0f} s")

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
        self._forget_in_flight()
        self.problem = ""
        self.lost_at = None
        self.link = next(self._links)
        self._unsent.clear()
        self._urgent.clear()
        for _, pending in sorted(self._open.items()):
            self._queue(pending)
        beat_s = max(welcome.heartbeat_ms, 10) / 1000
        received_at, pinged = time.monotonic(), False
        self._sent_at = received_at
        poller = self._poller(socket, monitor)
        while not self._closing:
            self._take_new()
            self._take_turn()
            self._take_new()
            self._send_unsent(socket)
            # Pings after one heartbeat in which nothing was sent, however much was received: the peer closes a client
            # that sends nothing for three. Pings also when nothing was received, to find out whether the peer is alive.
            next_beat = min(self._sent_at + beat_s, received_at + beat_s * (3 if pinged else 1))
            timeout_s = self._until_next(next_beat) - time.monotonic()
            ready = dict(poller.poll(max(int(timeout_s * 1000 + 0.999), 0)))
            if self._wake in ready:
                self._drain_wake()
            if socket in ready:
                received_at, pinged = time.monotonic(), False
                self._read_all(socket)
            if monitor in ready and self._gone(monitor):
                return
            self._expire()
            if socket not in ready and pinged and time.monotonic() >= received_at + beat_s * 3:
                self._set_problem(f"{self.directory} was silent for three heartbeats")
                return
            if time.monotonic() >= next_beat:
                pinged = True
                head = wire.header(self._version, Kind.PING, 0, max(int(beat_s * 1000), 1), self.epoch)
                self._send_now(socket, head, wire.body_of(wire.Empty()))

    def _send_now(self, socket: zmq.Socket, head: bytes, body: bytes) -> None:
        socket.send_multipart([head, body])
        self._sent_at = time.monotonic()

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
            self._in_flight_bytes -= self._in_flight.pop(envelope.correlation, 0)
            for store, end in self._batches.ends(envelope.correlation, envelope.kind, envelope.body):
                self._store_ended(store, end)
            pending = self._open.get(envelope.correlation)
            if pending is None or (envelope.body is None and not envelope.required):
                # No request waits for this answer, or its kind is unknown here.
                continue
            if isinstance(envelope.body, wire.Error):
                self._refused(pending, envelope.body)
            elif envelope.kind == pending.kind + 1 and envelope.body is not None:
                self._settle(pending, envelope.body, None)
            else:
                text = (
                    f"kind {envelope.kind}, with bits {envelope.required:#x}, is no answer to kind {int(pending.kind)}"
                )
                self._settle(pending, None, Failure(Code.INTERNAL, text, reported=False))

    def _refused(self, pending: PendingRequest, error: wire.Error) -> None:
        failure = Failure(error.code, error.message, reported=True, retry=error.retry, over=error.over)
        self._settle(pending, None, failure)

    def _store_ended(self, store: PendingRequest, end: wire.StoreAnswer | wire.Error | None) -> None:
        """Handles the end of a store that shared a message."""
        if isinstance(end, wire.Error):
            self._refused(store, end)
        elif end is not None:
            self._settle(store, end, None)
        elif not store.done:
            self._queue(store)

    def _answer(self, socket: zmq.Socket, request: wire.Envelope) -> None:
        """Answers a request of the peer. The peer's ids are independent of our own."""
        kind, body = Kind.PONG, wire.body_of(wire.Empty())
        if request.required:
            kind, text = Kind.ERROR, f"bits {request.required:#x} of the header's bytes 20 and 21 are unknown here"
            body = wire.body_of(wire.Error(Code.UNSUPPORTED, text))
        elif request.kind != Kind.PING:
            kind, text = Kind.ERROR, f"kind {request.kind} is no request to an engine"
            body = wire.body_of(wire.Error(Code.UNKNOWN_KIND, text))
        self._send_now(socket, wire.header(self._version, kind, request.correlation, 0, self.epoch), body)

    def _send_unsent(self, socket: zmq.Socket) -> None:
        requests, byte_credits = self._credits
        while queue := self._urgent or self._unsent:
            pending = queue[0]
            if pending.done:
                queue.popleft()
                continue
            # Some credits are reserved for urgent requests, which are few and small.
            kept = 0 if pending.urgent else min(_URGENT_CREDITS, requests // 64)
            too_much = self._in_flight_bytes + len(pending.body) > byte_credits - kept * _URGENT_BYTES
            if self._in_flight and (len(self._in_flight) >= requests - kept or too_much):
                return
            now = time.monotonic()
            if stores := self._batches.take(queue, byte_credits - self._in_flight_bytes):
                identity, kind = self.draw(), Kind.STORES
                left_ms, body = self._batches.message(identity, stores, now)
            else:
                queue.popleft()
                identity, kind, body = pending.id, pending.kind, pending.body
                left_ms = max(int((pending.deadline - now) * 1000), 1)
            for sent in stores or [pending]:
                sent.sent_at = sent.sent_at or now
            self._in_flight[identity] = len(body)
            self._in_flight_bytes += len(body)
            head = wire.header(self._version, kind, identity, left_ms, self.epoch)
            self._send_now(socket, head, body)

    def _take_new(self) -> None:
        while self._new:
            pending = self._new.popleft()
            self._open[pending.id] = pending
            heapq.heappush(self._expiry, (pending.expires, pending.id))
            if len(self._expiry) > 4 * OPEN_MAX:
                self._expiry = [(each.expires, each.id) for each in self._open.values()]
                heapq.heapify(self._expiry)
            if (failure := _not_encoded(pending)) is not None:
                self._settle(pending, None, failure)
            elif pending.link is not None and pending.link != self.link:
                failure = Failure(Code.DEADLINE, "the connection broke", reported=False, retry=True, over=True)
                self._settle(pending, None, failure)
            else:
                self._queue(pending)

    def _queue(self, pending: PendingRequest) -> None:
        # A new connection begins with all open requests.
        if self.link:
            (self._urgent if pending.urgent else self._unsent).append(pending)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._expiry and self._expiry[0][0] <= now:
            _, identity = heapq.heappop(self._expiry)
            pending = self._open.get(identity)
            # A request that is repeated under its id has another time than before.
            if pending is not None and pending.expires <= now:
                self._settle(
                    pending, None, Failure(Code.DEADLINE, "no answer came in time", reported=False, retry=True)
                )

    def _settle(self, pending: PendingRequest, answer: msgspec.Struct | None, failure: Failure | None) -> None:
        if self._open.pop(pending.id, None) is None:
            return
        with self._lock:
            self._count -= 1
        pending._end(answer, failure)

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


def _not_encoded(pending: PendingRequest) -> Failure | None:
    """Encodes a request; returns why it could not be encoded."""
    try:
        size = len(pending.body)
    except Exception as error:
        logger.exception("kvferry: a request of kind %d could not be encoded", pending.kind)
        text = f"the request could not be encoded: {error}"
        # To be retried at intervals, not at once.
        return Failure(Code.INTERNAL, text, reported=False, retry=True, over=True)
    if size > wire.BODY_BYTES_MAX:
        text = f"the request has {size} bytes, more than the {wire.BODY_BYTES_MAX} of a message"
        return Failure(Code.INTERNAL, text, reported=False, retry=True, over=True)
    return None


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
