"""Tests of the requests that a rank owes its worker, and of the end of all copies."""

import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually, running
from signals import stop

from kvferry import rank, wire
from kvferry.engine_client import EngineClient
from kvferry.memory import FD_SOCKET_NAME, Group, KvMemory, Place
from kvferry.outbox import UNNEEDED_S, Abandon, Outbox, Register, Written
from kvferry.rank import RankSession
from kvferry.silence import Silence
from kvferry.sockets import SOCKET_NAME


def rank_requests(side: Outbox) -> list[Any]:
    return list(iter(side.next, None))


def registered(side: Outbox, after: int = 0) -> None:
    assert side.next() == Register(after)
    assert side.answered(Register(after), True) == []


def test_written_pages_are_reported_after_the_registration_and_again_to_the_next_worker() -> None:
    side = Outbox()
    side.wrote(4)
    assert rank_requests(side) == [Register(0)]
    side.answered(Register(0), True)
    assert rank_requests(side) == [Written(4)]
    side.wrote(9)
    assert rank_requests(side) == [], "one request at a time"
    side.answered(Written(4), True)
    assert rank_requests(side) == [Written(9)]
    side.answered(Written(9), True)
    side.wrote(3)
    assert rank_requests(side) == []
    side.lost()
    registered(side)
    assert rank_requests(side) == [Written(9)]


def test_reports_that_nothing_waits_for_are_one_message() -> None:
    side = Outbox()
    side.wrote(4)
    registered(side)
    assert side.next(100.0) == Written(4), "there was no report for long"
    side.answered(Written(4), True)
    side.wrote(5)
    soon = 100.0 + UNNEEDED_S / 2
    assert side.next(soon) is None
    assert side.report_at(soon) == 100.0 + UNNEEDED_S
    side.wrote(6)
    assert side.reports_later
    assert not side.reports_at_once
    assert side.next(100.0 + UNNEEDED_S) == Written(6)
    side.answered(Written(6), True)
    # A store or a load waits for the next one.
    side.wrote(7)
    side.needs(7)
    assert side.reports_at_once
    assert side.next(100.1 + UNNEEDED_S) == Written(7)
    side.answered(Written(7), True)
    # For work that is not over, nothing is reported early.
    side.needs(9)
    assert not side.reports_at_once
    assert side.next(100.1 + UNNEEDED_S) is None
    # A new worker is told all of it at once.
    side.lost()
    registered(side)
    assert side.next(100.1 + UNNEEDED_S) == Written(7)


def test_an_unconfirmed_request_is_sent_again() -> None:
    side = Outbox()
    for _ in range(2):
        assert rank_requests(side) == [Register(0)]
        side.answered(Register(0), False)
    registered(side)
    side.abandon([5, 3])
    assert rank_requests(side) == [Abandon([3, 5])]
    assert side.answered(Abandon([3, 5]), False) == []
    assert rank_requests(side) == [Abandon([3, 5])]
    assert side.answered(Abandon([3, 5]), True) == [3, 5]
    assert rank_requests(side) == []


def test_written_is_not_reported_to_a_worker_that_copies_nothing() -> None:
    side = Outbox()
    side.wrote(5)
    assert rank_requests(side) == [Register(0)]
    side.answered(Register(0), True, serves=False)
    side.wrote(6)
    side.needs(6)
    assert rank_requests(side) == []
    side.abandon([5])
    assert rank_requests(side) == [Abandon([5])]
    assert side.answered(Abandon([5]), True) == [5]
    side.lost()
    assert rank_requests(side) == [Register(5)]
    side.answered(Register(5), True)
    assert rank_requests(side) == [Written(6)]


def test_abandoned_requests_are_over_for_every_later_worker() -> None:
    side = Outbox()
    registered(side)
    side.abandon([5])
    side.lost()
    assert rank_requests(side) == [Abandon([5]), Register(5)], "the abandon does not wait for the registration"
    side.abandon([8])
    assert side.answered(Abandon([5]), True) == [5]
    assert rank_requests(side) == [Abandon([8])]
    assert side.dead() == [8]
    assert rank_requests(side) == []


def test_memory_is_registered_again_with_a_worker_that_lost_it() -> None:
    side = Outbox()
    registered(side)
    side.wrote(2)
    assert rank_requests(side) == [Written(2)]
    side.memory_dropped()
    side.answered(Written(2), False)
    assert rank_requests(side) == [Register(0)]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(ranks=1, g2="16MiB") as daemon:
        yield daemon


@pytest.fixture
def session(daemon: Daemon) -> Iterator[RankSession]:
    session = begin(daemon.socket_dir / "worker-0-0")
    eventually("it is registered", lambda: session.registered)
    yield session
    session.close()


def begin(directory: Path, ranks: int = 1) -> RankSession:
    group = Group({"layer": torch.zeros(8, 2, 8, 8)}, engine_page_tokens=8, device_pages=8)
    memory = KvMemory([group], Place(rank=0, tp_size=ranks, shard=0, content=b"test"))
    return RankSession(directory, b"e" * 16, 0, 0, memory)


def over(session: RankSession, requests: list[int]) -> None:
    seen: list[int] = []

    def all_over() -> bool:
        seen.extend(session.over())
        return sorted(seen) == requests

    eventually("nothing is copied for them", all_over)


def test_an_abandoned_request_is_over_once_the_worker_confirms_it(session: RankSession) -> None:
    session.abandon([7, 9])
    over(session, [7, 9])
    assert session.over() == []


def test_pages_that_the_device_still_writes_are_not_reported_as_written(session: RankSession) -> None:
    eventually("it is registered", lambda: session.registered)
    done = {4: False, 7: False}
    looked: list[int] = []

    def when(request: int) -> Callable[[], bool]:
        def over() -> bool:
            looked.append(request)
            return done[request]

        return over

    session.wrote(4, lambda: when(4))
    session.wrote(4, lambda: when(7))
    session.wrote(7, lambda: when(7))
    session.wrote(9)
    eventually("the device is checked repeatedly", lambda: len(looked) > 3)
    assert set(looked) == {4}, "in order"
    assert session._outbox.written == 0
    done[4] = True
    eventually("the next pass is checked", lambda: 7 in looked)
    assert session._outbox.written == 4
    done[7] = True
    eventually("later passes are reported, too", lambda: session._outbox.confirmed == 9)


def test_a_device_that_does_not_answer_ends_no_session(session: RankSession, caplog: pytest.LogCaptureFixture) -> None:
    eventually("it is registered", lambda: session.registered)

    def broken() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    session.wrote(4, lambda: broken)
    eventually("the fault is logged", lambda: "unspecified launch failure" in caplog.text)
    assert session.fault == "reading the progress of the device"
    session.wrote(9, lambda: lambda: True)
    session.abandon([3])
    over(session, [3])
    assert session._outbox.written == 0, "no later pass is known to be written"


def test_memory_is_registered_with_another_worker(session: RankSession, daemon: Daemon) -> None:
    daemon.killed(daemon.pid())
    session.abandon([7])
    over(session, [7])
    daemon.pid()
    eventually("it is registered", lambda: session.registered)


def test_a_dead_worker_gives_pages_back_without_a_successor(session: RankSession, daemon: Daemon) -> None:
    daemon.kill()
    eventually("the connection broke", lambda: not session.registered)
    session.abandon([7])
    over(session, [7])


def test_without_any_worker_nothing_is_copied(tmp_path: Path) -> None:
    session = begin(tmp_path / "nobody")
    session.abandon([1])
    over(session, [1])
    session.close()


@contextlib.contextmanager
def leader_and_worker(directory: Path, **variables: str) -> Iterator[tuple[subprocess.Popen, subprocess.Popen]]:
    """No supervisor ends the worker."""
    directory.chmod(0o700)
    sides = [["leader"], ["worker", "--rank", "0"]]
    common = ["--g2", "16MiB", "--socket-dir", str(directory)]
    leader, worker = (
        subprocess.Popen([PROGRAM, *side, *common], env={**environment(), **variables}, stdin=subprocess.DEVNULL)
        for side in sides
    )
    try:
        yield leader, worker
    finally:
        for process in (leader, worker):
            process.kill()
            process.wait(TIMEOUT_S)


def test_a_paused_worker_without_a_supervisor_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is killed, so that no process ends the worker."""
    monkeypatch.setattr(rank, "KILL_AFTER_S", 1.0)
    with leader_and_worker(tmp_path) as (leader, worker), contextlib.closing(begin(tmp_path / "worker-0-0")) as session:
        eventually("it is registered", lambda: session.registered)
        stop(worker.pid)
        leader.kill()
        session.abandon([7])
        over(session, [7])
        assert worker.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_worker_of_another_user_is_left_and_the_turns_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank, "KILL_AFTER_S", 0.5)
    refused = []

    def refuse(process_fd: int, number: int) -> None:
        refused.append(number)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with leader_and_worker(tmp_path) as (_, worker), contextlib.closing(begin(tmp_path / "worker-0-0")) as session:
        eventually("it is registered", lambda: session.registered)
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        stop(worker.pid)
        session.abandon([7])
        eventually("the signal is refused", lambda: refused)
        turns: list[float] = []
        turn = session._client._turn
        session._client._turn = lambda: turns.append(time.monotonic()) or turn()  # type: ignore
        eventually("turns go on", lambda: len(turns) > 5)
        assert session.over() == [], "its pages stay in use"
        assert refused == [signal.SIGKILL]
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(lines) == 1, lines
        assert f"worker {worker.pid} gives no pages back" in lines[0]
        assert f"user {os.geteuid()} may not: its pages stay in use" in lines[0]
        worker.send_signal(signal.SIGCONT)
        over(session, [7])


def test_a_worker_is_killed_for_a_request_that_was_abandoned_again_before_its_end_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "KILL_AFTER_S", 2.0)
    with leader_and_worker(tmp_path) as (leader, worker), contextlib.closing(begin(tmp_path / "worker-0-0")) as session:
        eventually("it is registered", lambda: session.registered)
        session.abandon([7])
        assert session._any_over.wait(TIMEOUT_S), "the worker has confirmed"
        stop(worker.pid)
        leader.kill()
        session.abandon([7])
        assert session.over() == [7], "the end of the first call"
        over(session, [7])
        assert worker.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_worker_that_accepts_connections_and_answers_nothing_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection lasts for a quarter of the time: a new connection does not restart the time."""
    monkeypatch.setattr(rank, "KILL_AFTER_S", 1.0)
    tmp_path.chmod(0o700)
    command = [sys.executable, __file__, str(tmp_path), "greets"]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "listens\n"
    session = begin(tmp_path)
    try:
        eventually("the worker has the memory", lambda: session._process == worker.pid)
        session.abandon([7])
        over(session, [7])
        assert worker.wait(TIMEOUT_S) == -signal.SIGKILL
        assert next(session._client._session._links) > 6, "several connections were made and lost"
    finally:
        worker.kill()
        worker.wait(TIMEOUT_S)
        session.close()


@contextlib.contextmanager
def thread_stands_still(session: RankSession) -> Iterator[None]:
    """The rank's thread is paused between its wait and its next turn, for longer than the limit of a worker."""
    stands, goes_on = threading.Event(), threading.Event()
    drain = session._client._drain_wake

    def stand() -> None:
        drain()
        stands.set()
        goes_on.wait(TIMEOUT_S)

    session._client._drain_wake = stand  # type: ignore[method-assign]
    session._client.poke()
    assert stands.wait(TIMEOUT_S)
    session._client._drain_wake = drain  # type: ignore[method-assign]
    try:
        yield
        time.sleep(1.25 * rank.KILL_AFTER_S)
    finally:
        goes_on.set()


def test_a_rank_that_was_paused_before_it_read_the_answer_kills_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "KILL_AFTER_S", 2.0)
    with (
        leader_and_worker(tmp_path, KVFERRY_HEARTBEAT_MS="60000") as (_, worker),
        contextlib.closing(begin(tmp_path / "worker-0-0")) as session,
    ):
        eventually("it is registered", lambda: session.registered)
        stop(worker.pid)
        session.abandon([7])
        eventually("the abandon is sent", lambda: Abandon in session._outbox.sent)
        with thread_stands_still(session):
            worker.send_signal(signal.SIGCONT)
        over(session, [7])
        assert worker.poll() is None


def test_a_rank_that_was_paused_before_it_sent_its_request_kills_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "KILL_AFTER_S", 2.0)
    with (
        leader_and_worker(tmp_path, KVFERRY_HEARTBEAT_MS="60000") as (_, worker),
        contextlib.closing(begin(tmp_path / "worker-0-0")) as session,
    ):
        eventually("it is registered", lambda: session.registered)
        with thread_stands_still(session):
            session.abandon([7])
        over(session, [7])
        assert worker.poll() is None


def looks(silence: Silence, begin_s: float, seconds: float, link: Callable[[float], int]) -> float | None:
    """Checks once a second, with a request over every connection; returns when the worker is given up, or None."""
    for passed_s in range(int(seconds) + 1):
        present = link(begin_s + passed_s)
        if silence.look(begin_s + passed_s, 30.0, present):
            return passed_s
        if present:
            silence.requested(present)
    return None


def test_a_worker_is_given_up_after_a_sent_request_and_the_full_running_time() -> None:
    assert looks(Silence(), 100, 60, lambda now: 1) == 30
    assert looks(Silence(), 100, 60, lambda now: 0) == 30, "no connection to send a request over"
    assert looks(Silence(), 100, 60, lambda now: 1 if now < 128 else 2) == 38, "one more quarter over a new connection"
    assert looks(Silence(), 100, 60, lambda now: int(now)) == 45, "two more for connections that come and go"


@pytest.mark.parametrize("before_s", [0, 1, 8, 22, 29])
def test_a_thread_that_was_paused_gives_up_no_worker_in_the_next_quarter(before_s: int) -> None:
    silence = Silence()
    assert looks(silence, 100, before_s, lambda now: 1) is None
    again_s = looks(silence, 10_000, 60, lambda now: 1)
    assert again_s is not None
    assert 7.5 <= again_s <= 31
    assert looks(Silence(), 20_000, 60, lambda now: 1) == 30


def test_a_short_limit_allows_for_the_gaps_of_a_busy_machine() -> None:
    def given_up_after(gap_s: float, *, limit_s: float = 0.6) -> float | None:
        silence = Silence()
        silence.requested(1)
        return next((at for at in (gap_s * look for look in range(100)) if silence.look(at, limit_s, 1)), None)

    assert given_up_after(0.01) == pytest.approx(0.6, abs=0.02)
    assert given_up_after(0.2) == pytest.approx(0.8, abs=0.21)
    assert given_up_after(0.3) is None, "the thread did not run"


def test_the_wait_for_an_answered_request_does_not_count_for_the_next() -> None:
    silence = Silence()
    assert looks(silence, 100, 29, lambda now: 1) is None
    silence.end()
    assert looks(silence, 130, 60, lambda now: 1) == 30


def test_an_engine_leaves_nothing_behind_however_it_ends(daemon: Daemon) -> None:
    """The worker unmaps the memory of a killed engine, and maps that of the next one."""
    engine = subprocess.Popen([sys.executable, __file__, str(daemon.socket_dir)], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "registered\n"
    names = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    assert names == []
    engine.kill()
    engine.wait(TIMEOUT_S)
    daemon.wait_idle()
    eventually("the worker has unmapped the memory", lambda: not daemon.status()["ranks"][0]["attached"])
    session = begin(daemon.socket_dir / "worker-0-0")
    eventually("it is registered", lambda: session.registered)
    session.close()


def test_a_dead_engine_whose_connections_survive_in_a_child_is_released() -> None:
    """No connection closes or is silent for long enough: the worker detects the end of the process itself."""
    with running(ranks=1, g2="16MiB", variables={"KVFERRY_HEARTBEAT_MS": "60000"}) as daemon:
        command = [sys.executable, __file__, str(daemon.socket_dir), "with a child"]
        engine = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert engine.stdout is not None
        assert engine.stdout.readline() == "registered\n"
        assert daemon.status()["ranks"][0]["attached"]
        engine.kill()
        engine.wait(TIMEOUT_S)
        eventually("the worker has unmapped the memory", lambda: not daemon.status()["ranks"][0]["attached"])
        # The child ends when its standard input ends.
        engine.communicate()


def engine_memory(daemon: Daemon) -> list[str]:
    """Returns the descriptors of engine memory that the worker has open."""
    folder = Path(f"/proc/{daemon.workers[0]}/fd")
    links = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(folder / name))
    return [link for link in links if "torch_" in link]


def test_descriptors_that_an_engine_leaves_behind_are_closed(daemon: Daemon) -> None:
    """The descriptors are closed at the end of the engine, not by the timeout of unused descriptors."""
    command = [sys.executable, __file__, str(daemon.socket_dir / "worker-0-0"), "hands over"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "handed over\n"
    assert len(engine_memory(daemon)) == 1
    engine.kill()
    engine.wait(TIMEOUT_S)
    # Less than the 30 s after which the worker closes descriptors without a registration.
    eventually("they are closed", lambda: not engine_memory(daemon), 25)


def test_a_refused_rank_logs_the_reason_once(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    session = begin(daemon.socket_dir / "worker-0-0", ranks=3)
    eventually("the refusal is logged", lambda: "tp_size" in caplog.text)
    eventually("the rank has retried", lambda: session._pause_s > 0.3)
    assert caplog.text.count("is refused") == 1
    # At most one descriptor, of an open request.
    assert len(engine_memory(daemon)) <= 1
    session.close()


def hand_over(directory: Path) -> None:
    """Sends descriptors as an engine that dies before it registers."""
    group = Group({"layer": torch.zeros(4, 1, 8, 8)}, engine_page_tokens=8, device_pages=4)
    KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test")).hand_over(directory)
    print("handed over", flush=True)
    signal.pause()


def greet(directory: Path) -> None:
    """A worker that accepts connections and descriptors, and sends nothing but the welcome."""
    fds = socket.socket(socket.AF_UNIX)
    fds.bind(os.fspath(directory / FD_SOCKET_NAME))
    fds.listen()

    def take_descriptors() -> None:
        while True:
            rank, _ = fds.accept()
            with rank:
                rank.recv(1024)
                rank.sendall(b"\x01")

    threading.Thread(target=take_descriptors, daemon=True).start()
    ranks = zmq.Context().socket(zmq.ROUTER)
    ranks.bind(f"ipc://{directory / SOCKET_NAME}")
    print("listens", flush=True)
    while True:
        peer, head, _ = ranks.recv_multipart()
        if int.from_bytes(head[6:8], "big") == wire.Kind.HELLO:
            # Ranks close a connection after three heartbeats without a message.
            welcome = wire.Welcome(version=2, heartbeat_ms=20, request_credits=64, byte_credits=1 << 20)
            ranks.send_multipart([peer, wire.header(2, wire.Kind.WELCOME, 0, 0, 7), wire.body_of(welcome)])


def main(socket_dir: Path, *child: str) -> None:
    """An engine that registers, holds a lease, and waits to be killed, optionally with a child that has its sockets."""
    session = begin(socket_dir / "worker-0-0")
    eventually("it is registered", lambda: session.registered)
    Daemon(socket_dir).wait_ready()
    client = EngineClient(socket_dir / "leader", b"e" * 16, first_id=1)
    client.start()
    hashes = b"h" * 64
    for message in (
        wire.Lookup(slot=1, namespace=b"", hash_bytes=32, hashes=hashes),
        wire.Store(1, [wire.part(0, [[0, 2]])]),
        wire.Lookup(slot=2, namespace=b"", hash_bytes=32, hashes=hashes),
    ):
        pending = client.request(message, TIMEOUT_S)
        session.wrote(pending.id)
        assert pending.wait(TIMEOUT_S)
        assert pending.answer is not None, pending.failure
    if child and os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("registered", flush=True)
    signal.pause()


if __name__ == "__main__":
    if sys.argv[2:] == ["hands over"]:
        hand_over(Path(sys.argv[1]))
    elif sys.argv[2:] == ["greets"]:
        greet(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), *sys.argv[2:])
