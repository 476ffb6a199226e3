"""Requests in the name of another process, which lives: an engine's name, a worker's seat, a rank's memory and number.

Each gets one answer, which names that process or both values, and is counted; the other process is served as before.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from daemon import Daemon, eventually, running
from raw_peer import RawPeer
from test_every_message import BY_NAME, FIRST_WORDS, Expected, Side, example, fields, measured, outcome, rows

from kvferry import wire
from kvferry.client import Client
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession

NAME, OTHER = b"o" * 16, b"p" * 16
PAGES = 8


@contextlib.contextmanager
def other_process(begin: Callable[[], contextlib.AbstractContextManager]) -> Iterator[int]:
    """A process that has begun something, and holds it until it is killed; yields its id."""
    begun, beginning = os.pipe()
    kept, keeping = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(keeping)
            with begin():
                os.write(beginning, b"!")
                # Ends with the process of the test.
                os.read(kept, 1)
        finally:
            os._exit(0)
    try:
        os.close(beginning)
        os.close(kept)
        assert os.read(begun, 1) == b"!", "the other process has begun"
        yield child
    finally:
        os.close(begun)
        os.close(keeping)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def registered(worker: Path, engine: bytes) -> Iterator[None]:
    """Memory of a rank that is registered, in a session with heartbeats."""
    group = Group({"layer": torch.zeros(PAGES, 1, 8, 4)}, engine_page_tokens=8, device_pages=PAGES)
    memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
    session = RankSession(worker, engine, 0, 0, memory)
    try:
        eventually("the memory is registered", lambda: session.registered)
        yield
    finally:
        session.close()


@contextlib.contextmanager
def connected(leader: Path, engine: bytes) -> Iterator[None]:
    """A scheduler that is connected, and sends heartbeats."""
    hello = wire.Hello(role="engine", engine=engine, name="other")
    client = Client(leader, hello, first_id=1)
    client.start()
    try:
        eventually("the scheduler is welcomed", lambda: client.link)
        yield
    finally:
        client.close()


def number(name: str) -> int:
    return BY_NAME[name]["number"]


def check_engine(leader: Path) -> None:
    with other_process(lambda: connected(leader, NAME)) as process, RawPeer.connect(leader) as peer:
        side = Side(peer, peer.hello("engine", NAME).epoch)
        expected = Expected(leader)
        for kind, is_request, allowed in rows("engine", "leader"):
            if not (is_request and allowed) or kind in FIRST_WORDS:
                continue
            answer = peer.ask(number(kind), example(kind))
            assert outcome([answer]) == "error not_ready", f"{kind} under another's name: {answer.body}"
            assert str(process) in answer.body["message"], answer.body
            assert not answer.body.get("over"), "the other's copies may run"
            assert side.barrier() == []
            expected.errors["not_ready"] += 1
        expected.check("an engine with another's name")


def check_worker(daemon: Daemon) -> None:
    leader = daemon.socket_dir / "leader"
    with RawPeer.connect(leader) as peer:
        side = Side(peer, peer.hello("worker", rank=0, replica=0).epoch)
        expected = Expected(leader)
        for kind, is_request, allowed in rows("worker", "leader"):
            if not (is_request and allowed) or kind in FIRST_WORDS:
                continue
            answer = peer.ask(number(kind), example(kind))
            assert outcome([answer]) == "error not_ready", f"{kind} in another's seat: {answer.body}"
            assert str(daemon.workers[0]) in answer.body["message"], answer.body
            assert side.barrier() == []
            expected.errors["not_ready"] += 1
        expected.check("a worker in another's seat")


def registration(engine: bytes, rank: int) -> bytes:
    given = fields("register")
    described = {**given["registration"], "rank": rank, "shard": 0, "tp_size": 1}
    return msgspec.msgpack.encode({**given, "engine": engine, "registration": described})


def check_rank(worker: Path, process: int) -> None:
    """While another process has the seat of the rank's memory."""
    seat, mine = ("error not_ready", str(process)), "register your memory first"
    for engine, rank, requests in (
        # Of the same engine: nothing may be done in its name.
        (
            NAME,
            0,
            {
                "register": (registration(NAME, 0), *seat),
                "written": (example("written"), "error invalid", mine),
                "abandon": (example("abandon"), *seat),
                "unregister": (example("unregister"), *seat),
            },
        ),
        # Of another engine: its own requests touch nothing of the first.
        (
            OTHER,
            0,
            {
                "register": (registration(OTHER, 0), *seat),
                "written": (example("written"), "error invalid", mine),
                "abandon": (example("abandon"), "abandon_answer", ""),
                "unregister": (example("unregister"), "unregistered", ""),
            },
        ),
        (NAME, 1, {"register": (registration(NAME, 0), *seat)}),
    ):
        with RawPeer.connect(worker) as peer:
            side = Side(peer, peer.hello("rank", engine, rank=rank).epoch)
            expected = Expected(worker)
            for name, (body, code, text) in requests.items():
                answer = peer.ask(number(name), body)
                assert outcome([answer]) == code, f"{name}: {answer.body}"
                assert text in answer.body.get("message", ""), answer.body
                assert side.barrier() == []
                expected.received(code)
            expected.check(f"a rank {rank} of engine {engine!r}")


def check_other_values(worker: Path) -> None:
    """A registration that is not that of the hello, where the seat is free."""
    for engine, rank, body, named in (
        (OTHER, 0, registration(NAME, 0), (f"register.engine is {NAME.hex()}", OTHER.hex())),
        (NAME, 1, registration(NAME, 0), ("registration.rank is 0", "connection 1")),
        (NAME, 1, registration(NAME, 1), ("registration.rank is 1", "this worker serves rank 0")),
    ):
        with RawPeer.connect(worker) as peer:
            side = Side(peer, peer.hello("rank", engine, rank=rank).epoch)
            expected = Expected(worker)
            answer = peer.ask(number("register"), body)
            assert outcome([answer]) == "error invalid", answer.body
            assert all(each in answer.body["message"] for each in named), answer.body
            assert side.barrier() == []
            expected.errors["invalid"] += 1
            expected.check("a registration with other values than the hello")


def check_open_request(daemon: Daemon) -> None:
    """A request that comes again while it is open, until its deadline: one answer, and one repeated request."""
    leader = daemon.socket_dir / "leader"
    counters: dict[str, Any] = daemon.status()["counters"]
    with RawPeer.connect(leader) as peer:
        side = Side(peer, peer.hello("engine", NAME).epoch)
        hashes = {"namespace": b"", "hash_bytes": 16, "hashes": b"h" * 16, "have_pages": 0}
        found = peer.ask(number("lookup"), msgspec.msgpack.encode({"slot": 1, **hashes}))
        assert outcome([found]) == "lookup_answer", found.body
        expected = Expected(leader)
        before = measured(leader)["connections"]["repeated_requests"]
        # No rank reports that the page is written.
        store = msgspec.msgpack.encode({"slot": 1, "parts": [{"first_page": 0, "pages": [3], "count": 1}]})
        id_ = peer.send(number("store"), store, deadline_ms=1000)
        for _ in range(3):
            peer.send(number("store"), store, deadline_ms=1000, id=id_)
        assert side.barrier() == [], "the store is open"
        assert measured(leader)["connections"]["repeated_requests"] == before + 3
        answer = peer.answer_to(id_)
        assert outcome([answer]) == "store_answer"
        assert (answer.body["failed_pages"], answer.body["stored_pages"]) == (1, 0), answer.body
        assert side.barrier() == [], "one answer"
        expected.check("an open request that comes again")
        counted = daemon.status()["counters"]
        grown = {name: counted[name] - counters[name] for name in ("stores_failed", "late_copies", "failed_pages")}
        assert grown == {"stores_failed": 1, "late_copies": 1, "failed_pages": 1}
        assert outcome([peer.ask(number("finish"), b"\x81\xa4slot\x01")]) == "finish_answer"


def test_a_request_in_the_name_of_a_process_that_lives_is_refused_and_counted() -> None:
    with running(ranks=1) as daemon:
        leader, worker = daemon.socket_dir / "leader", daemon.socket_dir / "worker-0-0"
        eventually("the worker is attached", lambda: daemon.status()["ranks"][0]["host_bytes"] > 0)
        check_engine(leader)
        check_worker(daemon)
        with other_process(lambda: registered(worker, NAME)) as process:
            daemon.wait_ready()
            check_rank(worker, process)
            check_open_request(daemon)
            # A session that was silent on a busy machine registers again.
            eventually("the memory is registered", lambda: daemon.status()["ranks"][0]["attached"])
        eventually("the memory is released", lambda: not daemon.status()["ranks"][0]["attached"])
        check_other_values(worker)
