"""Clients for programs with an event loop: the calls of an engine's scheduler and of an operator, to be awaited.

They keep the rules of :mod:`kvferry.session`, as the clients with a thread do: deadlines, heartbeats, and retries over
reconnects. All of a client runs in the event loop in which it was entered, without a thread of Python::

    async with aio.EngineClient(directory, os.urandom(16), first_id=1) as engine:
        found = await engine.lookup(1, hashes, timeout_s=1.0)

A rank has :class:`kvferry.rank.RankSession`, which has a thread: it must answer while a step of the engine runs.
"""

import asyncio
import logging
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec
import zmq

from kvferry import engine_messages, session, wire
from kvferry.base_client import BaseClient
from kvferry.requests import Failure, Later, PendingRequest
from kvferry.served import Part
from kvferry.session import OPEN_MAX, Session
from kvferry.sockets import Connection
from kvferry.wire import Hello

logger = logging.getLogger("kvferry")

Answer = TypeVar("Answer")


class Request(PendingRequest, Generic[Answer]):
    """A request that can be awaited for its answer, several times and by several tasks.

    Awaiting raises a :class:`kvferry.requests.Failure` where there is no answer, at the request's deadline at the
    latest. **Cancelling a task ends its wait, and not the request**, which is on its way: it ends by its deadline, its
    answer is dropped if no task waits for it, and until then :attr:`pages_in_use` is true. Await it again for its end.
    """

    __slots__ = ("_waiters",)

    def __init__(
        self, identity: int, message: msgspec.Struct | Later, deadline: float, expires: float, link: int | None
    ):
        super().__init__(identity, message, deadline, expires, link)
        self._waiters: set[asyncio.Future[None]] = set()

    def __await__(self) -> Generator[Any, None, Answer]:
        if not self.done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                yield from waiter
            finally:
                self._waiters.discard(waiter)
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        return self.answer  # type: ignore[return-value]

    def wait(self, timeout_s: float) -> bool:
        """Refuses to stop the event loop, and waits in other threads."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return super().wait(timeout_s)
        raise RuntimeError("wait would stop the event loop, which receives the answer: await the request")

    def _end(self, answer: msgspec.Struct | None, failure: Failure | None) -> None:
        super()._end(answer, failure)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Client(BaseClient):
    """A client of the process that listens in ``directory``, while it is entered by ``async with``.

    For one event loop: its methods are called by tasks and callbacks of that loop, and do not wait; what they return is
    awaited. Requests without an answer fail when the client is left, or its loop ends.
    """

    def __init__(self, directory: Path, hello: Hello, *, first_id: int):
        super().__init__(directory, first_id=first_id)
        self._session = Session(directory, hello, self.draw, now=time.monotonic())
        self._name = f"kvferry {hello.role}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        #: Something has changed: a request was made, a message received, or a time has come.
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError("a client is entered once: make another one")
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name=self._name)
        # Not at the end of the task itself: one that is cancelled before its first turn has none.
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Requests without an answer fail."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def draw(self) -> int:
        """Draws a request id, above those of all earlier requests and below those of all later ones."""
        return next(self._ids)

    def request(
        self,
        message: msgspec.Struct | Later,
        timeout_s: float,
        *,
        grace_s: float = 0.0,
        link: int | None = None,
        urgent: bool = False,
        identity: int | None = None,
    ) -> Request[Any]:
        """Sends a request; returns it at once. The arguments are those of :meth:`kvferry.client.Client.request`.

        The message is encoded here. Requests are sent when the event loop continues: stores that are requested before
        share a message.

        Raises:
            RuntimeError: in another event loop, or before the client was entered.
        """
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("the client belongs to no or another event loop: enter it by `async with` in this one")
        pending = self._made(Request, message, timeout_s, grace_s, link, urgent, identity)
        if self._closing or len(self._session.open) >= OPEN_MAX:
            self._refuse(pending)
        else:
            self._session.add(pending)
            self._changed.set()
        return pending

    # The client's own task.

    async def _run(self) -> None:
        context = zmq.Context()
        backoff_s = session.BACKOFF_FIRST_S
        try:
            while True:
                try:
                    if await self._connect_and_converse(context):
                        backoff_s = session.BACKOFF_FIRST_S
                except (OSError, zmq.ZMQError, wire.Malformed, Failure) as error:
                    self._set_problem(str(error))
                except Exception:
                    logger.exception("kvferry: the conversation with %s failed", self.directory)
                self._session.lost(time.monotonic())
                until = time.monotonic() + backoff_s
                while time.monotonic() < until:
                    self._session.expire(time.monotonic())
                    await self._wait(until)
                backoff_s = min(backoff_s * 2, session.BACKOFF_MAX_S)
        finally:
            context.destroy(linger=0)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._closing = True
        self._session.closed()
        self._session.lost(time.monotonic())

    async def _connect_and_converse(self, context: zmq.Context) -> bool:
        """Runs one connection until it ends; returns True. Raises if no welcome is received."""
        connection = Connection(context, self.directory)
        loop = asyncio.get_running_loop()
        descriptors = connection.descriptors
        try:
            for each in descriptors:
                loop.add_reader(each, self._changed.set)
            await self._say_hello(connection)
            await self._converse(connection)
            return True
        finally:
            # A loop that was closed with its tasks has no readers any longer.
            for each in () if loop.is_closed() else descriptors:
                loop.remove_reader(each)
            connection.close()

    async def _say_hello(self, connection: Connection) -> None:
        deadline = time.monotonic() + session.CONNECT_LIMIT_S
        connection.send(self._session.hello())
        while time.monotonic() < deadline:
            self._session.expire(time.monotonic())
            await self._wait(deadline, connection)
            if (parts := connection.receive()) is not None:
                self._session.welcomed(parts, time.monotonic())
                self.problem = ""
                return
            if connection.gone():
                raise OSError(f"{self.directory}: the process that listened there is gone")
        raise OSError(f"{self.directory} sent no welcome within {session.CONNECT_LIMIT_S:.0f} s")

    async def _converse(self, connection: Connection) -> None:
        while True:
            while (message := self._session.next_message(time.monotonic())) is not None:
                connection.send(message)
            await self._wait(self._session.next_beat, connection)
            for _ in range(session.READ_AT_ONCE):
                if (parts := connection.receive()) is None:
                    break
                if (reply := self._session.received(parts, time.monotonic())) is not None:
                    connection.send(reply)
            if connection.gone():
                return
            self._session.expire(time.monotonic())
            if self._session.silent(time.monotonic()):
                self._set_problem(f"{self.directory} was silent for three heartbeats")
                return
            if (ping := self._session.beat(time.monotonic())) is not None:
                connection.send(ping)

    async def _wait(self, until: float, connection: Connection | None = None) -> None:
        """Waits for a message, a request, or a deadline. Other tasks always get a turn."""
        if self._changed.is_set() or (connection is not None and connection.readable):
            await asyncio.sleep(0)
        else:
            if (expiry := self._session.next_expiry) is not None:
                until = min(until, expiry)
            timer = asyncio.get_running_loop().call_later(max(until - time.monotonic(), 0.0), self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
        self._changed.clear()


class EngineClient(Client):
    """The connection of an engine's scheduler to the leader whose socket is in ``directory``.

    ``engine``: 16 random bytes, drawn at each start, the same as that of its ranks. ``first_id``: above every id that
    an engine of the same name has used, for example from the clock. Each call sends one request, and its result is
    awaited for the answer; its ``id`` is known at once. Sequences of hashes and pages are copied in the call.
    """

    def __init__(self, directory: Path, engine: bytes, *, first_id: int, replica: int = 0, name: str = ""):
        super().__init__(directory, engine_messages.engine_hello(engine, replica, name), first_id=first_id)

    @property
    def finds_tails(self) -> bool:
        """Whether the leader finds pages where the first hash of a lookup is in the middle of a sequence."""
        return bool(self.features & wire.FEATURE_TAILS)

    def lookup(
        self,
        slot: int,
        hashes: Sequence[bytes],
        *,
        namespace: bytes = b"",
        have_pages: int = 0,
        limit_pages: int | None = None,
        timeout_s: float,
    ) -> Request[wire.LookupAnswer]:
        """Finds the pages of a prompt: see :meth:`kvferry.engine_client.EngineRequests.lookup`."""
        message = engine_messages.lookup(slot, hashes, namespace, have_pages, limit_pages)
        return self.request(message, timeout_s)

    def load(
        self,
        slot: int,
        parts: Sequence[Part],
        *,
        after: int = 0,
        timeout_s: float,
        grace_s: float = 0.0,
        identity: int | None = None,
    ) -> Request[wire.LoadAnswer]:
        """Copies pages that a lookup found: see :meth:`kvferry.engine_client.EngineRequests.load`.

        The pages of ``parts`` are in use while :attr:`Request.pages_in_use` is true.
        """
        message = engine_messages.load(slot, parts, after)
        return self.request(message, timeout_s, grace_s=grace_s, identity=identity)

    def store(
        self,
        slot: int,
        parts: Sequence[Part],
        *,
        more: Sequence[bytes] = (),
        more_from: int = 0,
        after: int = 0,
        timeout_s: float,
        grace_s: float = 0.0,
        identity: int | None = None,
    ) -> Request[wire.StoreAnswer]:
        """Copies device pages to kvferry: see :meth:`kvferry.engine_client.EngineRequests.store`.

        The pages of ``parts`` are in use while :attr:`Request.pages_in_use` is true.
        """
        message = engine_messages.store(slot, parts, more, more_from, after)
        return self.request(message, timeout_s, grace_s=grace_s, identity=identity)

    def finish(self, slot: int, *, timeout_s: float) -> Request[wire.Empty]:
        """Ends a running request: frees its slot and its holds."""
        return self.request(wire.Finish(slot), timeout_s)

    def cancel_stores(self, slot: int | None = None, *, timeout_s: float) -> Request[wire.CancelStoresAnswer]:
        """Stops the stores of a slot, or of the whole engine. The answer comes when they have ended."""
        return self.request(wire.CancelStores(slot), timeout_s, urgent=True)

    def reset(
        self, namespace: bytes, *, hashes: Sequence[bytes] | None = None, timeout_s: float
    ) -> Request[wire.ResetAnswer]:
        """Removes the pages of a namespace; with ``hashes``, equally long, only the pages that have one of them."""
        return self.request(engine_messages.reset(namespace, hashes), timeout_s)

    def read_events(
        self,
        epoch: int = 0,
        from_: int = 0,
        *,
        cursor: int | None = None,
        namespace: bytes | None = None,
        most: int = 4096,
        wait_s: float = 0.0,
        timeout_s: float,
    ) -> Request[wire.Events]:
        """Reads which pages the tiers gained and lost: see :meth:`kvferry.engine_client.EngineRequests.read_events`."""
        message = engine_messages.read_events(epoch, from_, cursor, namespace, most, wait_s)
        return self.request(message, wait_s + timeout_s)


class AdminClient(Client):
    """The connection of an operator, or of a probe, to the leader whose socket is in ``directory``.

    The calls are those of :class:`kvferry.admin.AdminClient`. Cancelling one ends its wait, not its request.
    """

    def __init__(self, directory: Path, *, name: str = ""):
        super().__init__(directory, engine_messages.admin_hello(name), first_id=1)

    async def status(self, *, check: bool = False, timeout_s: float = 5.0) -> wire.StatusAnswer:
        """Returns the state of the leader: see :meth:`kvferry.admin.AdminClient.status`."""
        return await self.request(wire.Status(check), timeout_s)

    async def reset(self, namespace: bytes, *, tier: int = 0, timeout_s: float = 30.0) -> int:
        """Removes the pages of a namespace: see :meth:`kvferry.admin.AdminClient.reset`."""
        message = engine_messages.reset(namespace, tier=tier)
        answer: wire.ResetAnswer = await self.request(message, timeout_s)
        return answer.pages

    async def reset_all(self, *, tier: int = 0, timeout_s: float = 30.0) -> int:
        """Removes the pages of all namespaces: see :meth:`kvferry.admin.AdminClient.reset_all`."""
        answer: wire.ResetAnswer = await self.request(wire.reset(tier=tier), timeout_s)
        return answer.pages

    async def flush(self, *, timeout_s: float = 30.0) -> int:
        """Makes what is stored durable on the disk: see :meth:`kvferry.admin.AdminClient.flush`."""
        answer: wire.FlushAnswer = await self.request(wire.Flush(), timeout_s)
        return answer.pages

    async def read_events(
        self,
        epoch: int = 0,
        from_: int = 0,
        *,
        cursor: int | None = None,
        namespace: bytes | None = None,
        most: int = 4096,
        wait_s: float = 0.0,
        timeout_s: float = 5.0,
    ) -> wire.Events:
        """Reads which pages the tiers gained and lost: see :meth:`kvferry.admin.AdminClient.read_events`."""
        message = engine_messages.read_events(epoch, from_, cursor, namespace, most, wait_s)
        return await self.request(message, wait_s + timeout_s)

    async def drain(self, *, resume: bool = False, timeout_s: float = 5.0) -> wire.DrainAnswer:
        """Begins or ends a drain, and returns what still runs: see :meth:`kvferry.admin.AdminClient.drain`."""
        return await self.request(wire.Drain(resume), timeout_s)

    async def set_log(self, filter_: str, *, timeout_s: float = 5.0) -> str:
        """Changes the filter of the leader's log: see :meth:`kvferry.admin.AdminClient.set_log`."""
        answer: wire.SetLogAnswer = await self.request(wire.SetLog(filter_), timeout_s)
        return answer.before
