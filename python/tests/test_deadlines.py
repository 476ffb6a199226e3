"""Every call of every client ends by its deadline, with a typed failure, whatever the process at the other end does."""

import asyncio
import contextlib
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import proxy
import pytest
import torch
from daemon import TIMEOUT_S, Daemon, eventually, running
from in_loop import InLoop, loop
from proxy import GREETED, MODES, SLOW_ANSWERS, TORN, WELL, Proxy
from test_wire_table import ARGUMENTS, OTHERS

from kvferry import aio, rank, wire
from kvferry.admin import AdminClient
from kvferry.client import Client
from kvferry.engine_client import EngineClient, EngineRequests
from kvferry.memory import FD_SOCKET_NAME, Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.requests import Failure, PendingRequest
from kvferry.wire import Code

#: Deadline of the calls, and by how much later they may end on a busy machine: together less than the 2 s that an
#: attempt to connect takes.
LIMIT_S, MARGIN_S = 0.2, 1.5
#: Longest time for which other tasks of an event loop may wait for a client's, and a caller for a call that waits for
#: nothing.
STALL_S = 1.0


class Kind(NamedTuple):
    made: Callable[[Path], Any]
    #: What has the calls.
    calls: type


def engine(made: Callable[..., Any]) -> Callable[[Path], Any]:
    return lambda directory: made(directory, os.urandom(16), first_id=1, name="test")


KINDS = {
    "engine, thread": Kind(engine(EngineClient), EngineRequests),
    "engine, event loop": Kind(engine(InLoop.of(aio.EngineClient)), aio.EngineClient),
    "admin, thread": Kind(AdminClient, AdminClient),
    "admin, event loop": Kind(InLoop.of(aio.AdminClient), aio.AdminClient),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(ranks=1, g2="64MiB") as daemon:
        yield daemon


@pytest.fixture
def between(daemon: Daemon, tmp_path: Path) -> Iterator[Proxy]:
    with proxy.before(daemon.socket_dir / "leader", tmp_path / "p") as made:
        yield made


class Ended(NamedTuple):
    call: str
    result: Any
    took_s: float


def calls(kind: Kind, client: Any, timeout_s: float) -> dict[str, Callable[[], Any]]:
    """All calls of a client. Each returns the answer, or the failure."""
    made = {}
    for name, method in vars(kind.calls).items():
        if name.startswith("_") or name in OTHERS:
            continue
        known = {key: ARGUMENTS[key] for key in inspect.signature(method).parameters if key in ARGUMENTS}
        known["timeout_s"] = timeout_s

        def call(name: str = name, given: dict[str, Any] = known) -> Any:
            try:
                result = getattr(client, name)(**given)
            except Failure as failure:
                return failure
            if isinstance(result, PendingRequest):
                if not result.wait(timeout_s + TIMEOUT_S):
                    return "has not ended"
                return result.failure or result.answer
            return result

        made[name] = call
    return made


def at_once(made: dict[str, Callable[[], Any]], ended: list[Ended] | None = None) -> list[Ended]:
    """Makes the calls at one time, each in a thread. Adds each to ``ended`` when it has ended."""
    ended = [] if ended is None else ended

    def run(name: str, call: Callable[[], Any]) -> None:
        began_at = time.monotonic()
        try:
            result = call()
        except BaseException as error:
            result = error
        ended.append(Ended(name, result, time.monotonic() - began_at))

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in made.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert len(ended) == len(made)
    return ended


@contextlib.contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    began_at = time.monotonic()
    yield
    took_s = time.monotonic() - began_at
    assert took_s < limit_s, f"{what} took {took_s:.2f} s"


@contextlib.contextmanager
def no_stall() -> Iterator[None]:
    """Checks that the event loop of the clients runs on."""
    longest, stop = [0.0], threading.Event()

    async def watch() -> None:
        while not stop.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest.append(time.monotonic() - before)

    watching = asyncio.run_coroutine_threadsafe(watch(), loop())
    yield
    stop.set()
    watching.result(TIMEOUT_S)
    assert max(longest) < STALL_S, "a client has stopped its event loop"


#: Calls that are sent once, and end with their connection.
ORDERS = ("drain", "set_log")
#: Modes in which a client is welcomed.
GREETED_MODES = (GREETED, SLOW_ANSWERS, TORN)


def broke(ended: Ended) -> bool:
    """Whether a call is an order that was sent, and ended with its connection: orders are sent once."""
    if ended.call not in ORDERS:
        return False
    failure = ended.result
    return isinstance(failure, Failure) and (failure.code, failure.message) == (Code.DEADLINE, "the connection broke")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_ends_by_its_deadline_and_works_once_the_server_is_well(
    between: Proxy, kind: str, mode: str
) -> None:
    between.turns(mode)
    with contextlib.ExitStack() as all_:
        all_.enter_context(no_stall())
        with within(MARGIN_S, "to make the client"):
            client = KINDS[kind].made(between.directory)
            client.__enter__()
        try:
            for ended in at_once(calls(KINDS[kind], client, LIMIT_S)):
                assert isinstance(ended.result, Failure), ended
                assert (ended.result.code, ended.result.reported) == (Code.DEADLINE, False), ended
                assert ended.took_s < LIMIT_S + MARGIN_S, ended
                assert ended.took_s >= LIMIT_S or (mode == TORN and broke(ended)), ended
            if mode in GREETED_MODES:
                assert client.limits, "the welcome was sent"
            between.turns(WELL)
            # The client gives the old connection up after 2 s without a welcome, or after three heartbeats of 1 s.
            for ended in at_once(calls(KINDS[kind], client, TIMEOUT_S)):
                worked = not isinstance(ended.result, BaseException) or ended.result.reported
                # Orders that went over the old connection end with it.
                assert worked or (mode in GREETED_MODES and broke(ended)), ended
                assert ended.took_s < 10, ended
            assert client.listening
        finally:
            with within(MARGIN_S, "to close the client"):
                client.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_a_client_ends_its_calls(between: Proxy, kind: str, mode: str) -> None:
    """Those of other threads, too, and at once."""
    between.turns(mode)
    client = KINDS[kind].made(between.directory)
    made = calls(KINDS[kind], client, TIMEOUT_S)
    ended: list[Ended] = []
    with client:
        waiting = threading.Thread(target=at_once, args=(made, ended), daemon=True)
        waiting.start()
        # An order ends with its connection, which this mode tears.
        eventually("all are made", lambda: sum(client.open_requests) + len(ended) >= len(made))
        left_at = time.monotonic()
    with within(MARGIN_S, "to end the calls"):
        waiting.join(TIMEOUT_S)
    assert time.monotonic() - left_at < MARGIN_S, "leaving ends the calls"
    for each in ended:
        assert isinstance(each.result, Failure), each
        assert not each.result.reported, each
        assert "closed" in each.result.message or (mode == TORN and broke(each)), each
    assert len(ended) == len(made)


def test_closing_a_client_waits_for_a_turn_at_most_2_s(between: Proxy) -> None:
    """A turn of an engine that stands still must not stop the engine's end."""
    go, stands = threading.Event(), threading.Event()
    ends: list[str] = []

    def turn() -> None:
        if client.listening:
            stands.set()
            go.wait(TIMEOUT_S)

    hello = wire.Hello(role="engine", engine=b"e" * 16)
    client = Client(between.directory, hello, first_id=1, turn=turn, at_end=lambda: ends.append("ended"))
    with within(2.0 + MARGIN_S, "to close"), client:
        assert stands.wait(TIMEOUT_S)
        pending = client.request(wire.Finish(1), TIMEOUT_S)
    assert (pending.done, ends) == (False, []), "the turn has not returned"
    go.set()
    assert pending.wait(TIMEOUT_S)
    assert pending.failure is not None
    eventually("the end is reported", lambda: ends)


def test_a_client_that_was_not_started_takes_no_request(between: Proxy) -> None:
    """Nothing would end it."""
    client = engine(EngineClient)(between.directory)
    with pytest.raises(RuntimeError, match="was not started: call `start`, or enter it by `with`"):
        client.finish(1, timeout_s=LIMIT_S)
    descriptors = len(os.listdir("/proc/self/fd"))
    client.close()
    client.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    for again in (client.start, client.__enter__):
        with pytest.raises(RuntimeError, match="started once"):
            again()
    with engine(EngineClient)(between.directory) as other, pytest.raises(RuntimeError, match="started once"):
        other.start()


# Ranks.


def memory() -> KvMemory:
    group = Group({"layer": torch.zeros((4, 1, 8, 4))}, engine_page_tokens=8, device_pages=4)
    return KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"deadlines"))


@pytest.fixture
def worker(daemon: Daemon, tmp_path: Path) -> Iterator[Proxy]:
    behind = daemon.socket_dir / "worker-0-0"
    with proxy.before(behind, tmp_path / "p") as made:
        (made.directory / FD_SOCKET_NAME).symlink_to(behind / FD_SOCKET_NAME)
        yield made


def rank_calls(session: RankSession) -> None:
    """Makes the calls of an engine's threads, none of which waits but the one that is told for how long."""
    with within(STALL_S, "to report work"):
        session.needs(5)
        session.wrote(5)
        session.abandon([3, 4])
        session.over()
    with within(LIMIT_S + MARGIN_S, "to wait for pages"):
        session.wait_over(LIMIT_S)


@pytest.mark.parametrize("mode", MODES)
def test_no_call_of_a_rank_waits_for_its_worker(worker: Proxy, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    worker.turns(mode)
    with within(MARGIN_S, "to begin the session"):
        session = RankSession(worker.directory, os.urandom(16), 0, 0, memory())
    try:
        rank_calls(session)
        assert not session.registered
        worker.turns(WELL)
        eventually("it is registered", lambda: session.registered, 15)
        session.wrote(9)
        session.abandon([7])
        eventually("the pages are free", lambda: 7 in session.over())
        eventually("the work is reported", lambda: session._outbox.confirmed == 9)
    finally:
        with within(MARGIN_S, "to close the session"):
            session.close()
    assert [each for each in caplog.records if each.exc_info] == []


@pytest.mark.parametrize("mode", [*MODES, WELL])
def test_closing_a_rank_waits_at_most_5_s(worker: Proxy, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which 3 s are for a worker that must unmap a device's memory."""
    session = RankSession(worker.directory, os.urandom(16), 0, 0, memory())
    eventually("it is registered", lambda: session.registered)
    monkeypatch.setattr(KvMemory, "on_device", True)
    worker.turns(mode)
    # The connection ends, and the next ones are as the mode says.
    if mode != WELL:
        for each in worker._sockets:
            worker._shut(each)
    with within(rank._LET_GO_LIMIT_S + 2.0 + MARGIN_S, "to close the session"):
        session.close()
    assert not session._client._thread.is_alive()
    assert session._memory._pieces == []


def test_a_worker_that_takes_no_descriptors_keeps_nothing_waiting(
    daemon: Daemon, worker: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Handing the memory over waits on the session's thread, which also sends what the rank abandons."""
    stuck = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    (worker.directory / FD_SOCKET_NAME).unlink()
    with contextlib.closing(stuck):
        stuck.bind(os.fspath(worker.directory / FD_SOCKET_NAME))
        stuck.listen(8)
        session = RankSession(worker.directory, os.urandom(16), 0, 0, memory())
        # A process that received the memory, and that cannot be seen to be dead.
        session._process = None
        rank_calls(session)
        over: set[int] = set()
        eventually("the pages are free", lambda: over.update(session.over()) or over == {3, 4})
        with within(2.0 + MARGIN_S, "to close the session"):
            session.close()
        eventually("its thread has ended", lambda: not session._client._thread.is_alive())
        assert session._memory._pieces == []
    assert [each for each in caplog.records if each.exc_info] == []
