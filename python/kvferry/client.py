"""A session with one process of kvferry: hello, requests with deadlines, retries over reconnects, heartbeats.

A :class:`Client` has one thread of its own, which owns the sockets. A caller gets a :class:`PendingRequest`, the handle
of a request, at once, and may wait for its end. Each request ends exactly once and by its own deadline: with the peer's
answer, or with a :class:`Failure` that states whether any part of the request may still run.
"""

import collections
import contextlib
import ctypes
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import zmq

from kvferry import session, wire
from kvferry.base_client import BaseClient
from kvferry.requests import Failure, Later, PendingRequest, Watch
from kvferry.session import OPEN_MAX, Session
from kvferry.sockets import SOCKET_NAME, Connection
from kvferry.wire import Hello

logger = logging.getLogger("kvferry")

#: As ``os.eventfd_write``, but keeps Python's lock meanwhile: otherwise the thread that is woken takes it, and the
#: caller, in a step of the engine, waits to get it back. The call does not wait: the counter cannot reach its limit.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)

_CLOSE_LIMIT_S = 2.0


class Client(BaseClient):
    """A client of the process that listens in ``directory``, from :meth:`start` to :meth:`close`.

    ``turn`` is called on the client's thread whenever something may have changed: after a welcome, a loss, an answer, a
    :meth:`poke`, and at the time that its last call returned (``None``: not before the next such event). ``turn`` may
    call :meth:`request`. ``at_end`` is called on that thread once ``turn`` is not called any more, whether or not
    :meth:`close` still waits. ``listening``: the peer's welcome has been received over the present connection.
    """

    def __init__(
        self,
        directory: Path,
        hello: Hello,
        *,
        first_id: int,
        turn: Callable[[], float | None] | None = None,
        watch: Watch | None = None,
        at_end: Callable[[], None] | None = None,
    ):
        super().__init__(directory, first_id=first_id)
        self._turn = turn
        self._watch = watch
        self._at_end = at_end
        self._session = Session(
            directory,
            hello,
            self.draw,
            now=time.monotonic(),
            ended=self._ended,
            # A recording needs the answers in the order of the leader's decisions; that of a shared message comes late.
            alone=(lambda: watch.recording) if watch is not None else None,
        )
        self._new: collections.deque[PendingRequest] = collections.deque()
        self._lock = threading.Lock()
        self._count = 0
        self._started = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        #: For the descriptor alone: whoever wakes the thread must not wait for what the thread does.
        self._wake_lock = threading.Lock()
        self._wakes = True
        self._next_turn: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvferry {hello.role} {hello.rank}", daemon=True)

    # Methods for any thread.

    def start(self) -> None:
        """Starts the client's thread, which connects; ``turn`` is called from now on."""
        with self._lock:
            if self._closing or self._started:
                raise RuntimeError("a client is started once: make another one")
            self._thread.start()
            self._started = True

    def __enter__(self) -> Self:
        if not self._started:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

        Raises:
            RuntimeError: before :meth:`start`.
        """
        with self._lock:
            if not self._started:
                raise RuntimeError("the client was not started: call `start`, or enter it by `with`")
            pending = self._made(PendingRequest, message, timeout_s, grace_s, link, urgent, identity)
            pending.until = until
            pending.watch = self._watch
            if self._watch is not None:
                self._watch.requested(pending)
            full = self._count >= OPEN_MAX or self._closing
            if not full:
                self._count += 1
                self._new.append(pending)
        if full:
            self._refuse(pending)
        elif wake and threading.get_ident() != self._thread.ident:
            # The client's own thread sends what ``turn`` has requested before it waits again.
            self.poke()
        return pending

    @property
    def _open_count(self) -> int:
        return self._count

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
        """Closes the connection. Requests without an answer fail.

        Waits at most 2 s for the client's thread, which ends then, or when a call of ``turn`` or ``until`` returns.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            started = self._started
        if not started:
            self._end()
            return
        self.poke()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_LIMIT_S)

    # The client's own thread.

    def _run(self) -> None:
        context = zmq.Context()
        backoff_s = session.BACKOFF_FIRST_S
        try:
            while not self._closing:
                try:
                    if self._connect_and_converse(context):
                        backoff_s = session.BACKOFF_FIRST_S
                except (OSError, zmq.ZMQError, wire.Malformed, Failure) as error:
                    self._set_problem(str(error))
                except Exception:
                    logger.exception("kvferry: the conversation with %s failed", self.directory)
                if self._closing:
                    # Before the end of the connection, which would be the reason of fewer requests.
                    self._session.closed()
                self._session.lost(time.monotonic())
                self._take_turn()
                until = time.monotonic() + backoff_s
                while not self._closing and time.monotonic() < until:
                    self._meanwhile(until)
                backoff_s = min(backoff_s * 2, session.BACKOFF_MAX_S)
        finally:
            with self._lock:
                self._closing = True
            self._end()
            context.destroy(linger=0)

    def _end(self) -> None:
        with self._wake_lock:
            self._wakes = False
            os.close(self._wake)
        self._take_new()
        self._session.closed()
        if self._at_end is not None:
            self._at_end()

    def _meanwhile(self, until: float) -> None:
        """Waits for a request, a poke or a deadline while there is no connection."""
        self._session.expire(time.monotonic())
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
        connection = Connection(context, self.directory)
        try:
            poller = zmq.Poller()
            for what in (connection.socket, connection.monitor, self._wake):
                poller.register(what, zmq.POLLIN)
            self._say_hello(connection, poller)
            self._converse(connection, poller)
            return True
        finally:
            connection.close()

    def _say_hello(self, connection: Connection, poller: zmq.Poller) -> None:
        deadline = time.monotonic() + session.CONNECT_LIMIT_S
        connection.send(self._session.hello())
        while (left_s := deadline - time.monotonic()) > 0 and not self._closing:
            self._session.expire(time.monotonic())
            # Turns are taken and deadlines of requests are heeded also while the peer is silent.
            self._take_turn()
            self._take_new()
            next_s = self._until_next(time.monotonic() + left_s) - time.monotonic()
            ready = dict(poller.poll(max(int(next_s * 1000) + 1, 0)))
            if self._wake in ready:
                self._drain_wake()
            if connection.socket in ready and (parts := connection.receive()) is not None:
                self._session.welcomed(parts, time.monotonic())
                self.problem = ""
                return
            if connection.monitor in ready and connection.gone():
                raise OSError(f"no process listens at {self.directory / SOCKET_NAME}")
        raise OSError(f"{self.directory} sent no welcome within {session.CONNECT_LIMIT_S:.0f} s")

    def _converse(self, connection: Connection, poller: zmq.Poller) -> None:
        while not self._closing:
            self._take_new()
            self._take_turn()
            self._take_new()
            while (message := self._session.next_message(time.monotonic())) is not None:
                connection.send(message)
            timeout_s = self._until_next(self._session.next_beat) - time.monotonic()
            ready = dict(poller.poll(max(int(timeout_s * 1000 + 0.999), 0)))
            if self._wake in ready:
                self._drain_wake()
            if connection.socket in ready:
                self._read_all(connection)
            if connection.monitor in ready and connection.gone():
                return
            self._session.expire(time.monotonic())
            if self._session.silent(time.monotonic()):
                self._set_problem(f"{self.directory} was silent for three heartbeats")
                return
            if (ping := self._session.beat(time.monotonic())) is not None:
                connection.send(ping)

    def _read_all(self, connection: Connection) -> None:
        for _ in range(session.READ_AT_ONCE):
            if (parts := connection.receive()) is None:
                return
            if (reply := self._session.received(parts, time.monotonic())) is not None:
                connection.send(reply)

    def _take_new(self) -> None:
        while self._new:
            self._session.add(self._new.popleft())

    def _ended(self) -> None:
        with self._lock:
            self._count -= 1

    def _take_turn(self) -> None:
        if self._turn is None:
            return
        try:
            self._next_turn = self._turn()
        except Exception:
            logger.exception("kvferry: %s: a turn failed", self.directory)
            self._next_turn = time.monotonic() + session.BACKOFF_MAX_S

    def _until_next(self, at: float) -> float:
        if (expiry := self._session.next_expiry) is not None:
            at = min(at, expiry)
        if self._next_turn is not None:
            at = min(at, self._next_turn)
        return at

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
