"""Tests of the typed clients against a real leader and worker: an engine that is written by hand, and an operator.

Each runs with the clients that have a thread, and with those of an event loop.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import zmq
from daemon import TIMEOUT_S, eventually, running
from in_loop import InLoop

from kvferry import aio, wire
from kvferry.admin import AdminClient
from kvferry.client import Failure, PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Part

ENGINE = b"e" * 16
PAGES = 8
HASHES = [number.to_bytes(16, "big") for number in range(1, 4)]


class Clients(NamedTuple):
    engine: Callable[..., Any]
    admin: Callable[..., Any]


CLIENTS = {
    "thread": Clients(EngineClient, AdminClient),
    "event loop": Clients(InLoop.of(aio.EngineClient), InLoop.of(aio.AdminClient)),
}


@pytest.fixture(params=CLIENTS)
def clients(request: pytest.FixtureRequest) -> Clients:
    return CLIENTS[request.param]


def answer_of(pending: PendingRequest) -> object:
    assert pending.wait(TIMEOUT_S)
    assert pending.failure is None, pending.failure
    return pending.answer


@pytest.mark.parametrize("version", [1, 2])
def test_an_engine_stores_and_loads_and_an_operator_resets(clients: Clients, version: int) -> None:
    tensor = torch.arange(PAGES * 8 * 4, dtype=torch.float32).reshape(PAGES, 1, 8, 4)
    memory = KvMemory(
        [Group({"layer": tensor}, engine_page_tokens=8, device_pages=PAGES)],
        Place(rank=0, tp_size=1, shard=0, content=b"test"),
    )
    with (
        running(ranks=1, wire_max=version) as daemon,
        clients.admin(daemon.socket_dir / "leader", name="test") as admin,
    ):
        assert not admin.status().ready
        rank = RankSession(daemon.socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
        engine = clients.engine(daemon.socket_dir / "leader", ENGINE, first_id=1, name="test")
        engine.start()
        try:
            eventually("lookups are served", lambda: rank.registered and admin.status().ready)
            assert rank._client._session._version == version
            assert engine._session._version == version
            assert engine.limits["stores"] == wire.STORES_MAX
            status = admin.status(check=True)
            assert (status.contradiction, status.ranks[0].attached) == ("", True)
            assert status.requests["engines"] == 1

            found = answer_of(engine.lookup(1, HASHES, namespace=b"n", timeout_s=TIMEOUT_S))
            assert found == wire.LookupAnswer(0)
            assert wire.runs([4, 5, 1]) == [[4, 2], 1], "a list that version 1 cannot name"
            store = engine.store(1, [Part(0, 0, [4, 5, 1])], timeout_s=TIMEOUT_S)
            rank.wrote(store.id)
            assert answer_of(store) == wire.StoreAnswer(stored_pages=3, present_pages=0)
            answer_of(engine.finish(1, timeout_s=TIMEOUT_S))

            expected = [tensor[page].clone() for page in (4, 5, 1)]
            found = answer_of(engine.lookup(2, HASHES, namespace=b"n", timeout_s=TIMEOUT_S))
            assert found == wire.LookupAnswer(3)
            with pytest.raises(Failure, match="hold") as refused:
                admin.reset(b"n")
            assert refused.value.code == wire.Code.LEASED
            assert answer_of(engine.load(2, [Part(0, 0, [0, 7, 2])], timeout_s=TIMEOUT_S)) == wire.LoadAnswer(3)
            for page, content in zip((0, 7, 2), expected, strict=True):
                assert torch.equal(tensor[page], content), f"page {page}"
            assert answer_of(engine.cancel_stores(timeout_s=TIMEOUT_S)) == wire.CancelStoresAnswer(0)
            answer_of(engine.finish(2, timeout_s=TIMEOUT_S))

            begun = answer_of(engine.read_events(cursor=0, namespace=b"n", timeout_s=TIMEOUT_S))
            assert (begun.lost, begun.cursor, begun.hash_bytes) == (True, None, 16)
            stored = [(record.event, record.tier, record.hashes, record.why) for record in begun.records]
            assert stored == [("stored", 2, b"".join(HASHES), None)]
            reads = engine.read_events(begun.epoch, begun.next, wait_s=20, timeout_s=TIMEOUT_S)
            other = engine.read_events(begun.epoch, begun.next, wait_s=0, timeout_s=TIMEOUT_S)
            assert answer_of(reads).records == [], "a later read ends the wait of an earlier one"
            assert answer_of(other).records == []
            reads = engine.read_events(begun.epoch, begun.next, wait_s=20, timeout_s=TIMEOUT_S)

            status = admin.status()
            assert (status.counters["hit_pages"], status.counters["hit_tokens"]) == (3, 24)
            assert (status.counters["loads_done"], status.counters["stores_done"]) == (1, 1)
            with pytest.raises(TypeError, match="namespace"):
                admin.reset()
            with pytest.raises(TypeError, match=r"namespace is None: give bytes; .* reset_all"):
                admin.reset(None)
            assert admin.reset(b"another namespace") == 0
            assert admin.reset(b"n") == 3
            gone = answer_of(reads)
            assert [(record.event, record.hashes, record.why) for record in gone.records] == [
                ("gone", b"".join(HASHES), "reset")
            ]
            assert not gone.lost
            with pytest.raises(Failure, match="start kvferry with g3"):
                admin.flush()
            found = answer_of(engine.lookup(3, HASHES, namespace=b"n", timeout_s=TIMEOUT_S))
            assert found == wire.LookupAnswer(0)

            store = engine.store(3, [Part(0, 0, [4, 5, 1])], timeout_s=TIMEOUT_S)
            rank.wrote(store.id)
            assert answer_of(store).stored_pages == 3
            answer_of(engine.finish(3, timeout_s=TIMEOUT_S))
            assert admin.reset_all() == 3
        finally:
            engine.close()
            rank.close()


def test_an_operator_reads_changes_drains_and_changes_the_log(clients: Clients) -> None:
    with running(ranks=1) as daemon, clients.admin(daemon.socket_dir / "leader", name="test") as admin:
        begun = admin.read_events(cursor=0)
        assert (begun.lost, begun.cursor, begun.records) == (True, None, [])
        changed = admin.read_events(begun.epoch, begun.next, wait_s=0.1)
        assert (changed.epoch, changed.next, changed.records) == (begun.epoch, begun.next, [])
        assert (admin.epoch, admin.listening, admin.open_requests) == (begun.epoch, True, (0, 0))

        assert admin.drain() == wire.DrainAnswer(True)
        engine = clients.engine(daemon.socket_dir / "leader", ENGINE, first_id=1, name="test")
        engine.start()
        try:
            lookup = engine.lookup(1, HASHES, timeout_s=TIMEOUT_S)
            assert lookup.wait(TIMEOUT_S)
            assert lookup.failure.code == wire.Code.DRAINING
            assert admin.drain(resume=True) == wire.DrainAnswer(False)
            lookup = engine.lookup(1, HASHES, timeout_s=TIMEOUT_S)
            assert lookup.wait(TIMEOUT_S)
            assert lookup.failure.code == wire.Code.NOT_READY, "no rank is registered"
        finally:
            engine.close()

        before = admin.set_log("debug")
        assert admin.set_log(before) == "debug"
        with pytest.raises(Failure, match="nonsense") as refused:
            admin.set_log("nonsense=nonsense")
        assert refused.value.code == wire.Code.INVALID


def test_an_operator_without_a_leader_gets_a_failure_in_time(clients: Clients) -> None:
    with running(ranks=1) as daemon:
        directory = daemon.socket_dir / "no leader"
        with clients.admin(directory) as admin, pytest.raises(Failure, match="no answer"):
            admin.status(timeout_s=0.2)


def test_a_peer_that_sends_no_welcome_delays_no_failure(clients: Clients) -> None:
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        silent = context.socket(zmq.ROUTER)
        silent.bind(f"ipc://{directory}/kvferry.sock")
        began_at = time.monotonic()
        with clients.admin(Path(directory)) as admin, pytest.raises(Failure, match="no answer"):
            admin.status(timeout_s=0.2)
        assert time.monotonic() - began_at < 1.5, "an attempt to connect takes 2 s"
        silent.close(0)


def test_stores_with_the_id_of_an_open_store_or_of_their_message_are_refused(clients: Clients) -> None:
    memory = KvMemory(
        [Group({"layer": torch.zeros((PAGES, 1, 8, 4))}, engine_page_tokens=8, device_pages=PAGES)],
        Place(rank=0, tp_size=1, shard=0, content=b"test"),
    )
    with running(ranks=1) as daemon, clients.admin(daemon.socket_dir / "leader", name="test") as admin:
        rank = RankSession(daemon.socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
        engine = clients.engine(daemon.socket_dir / "leader", ENGINE, first_id=1, name="test")
        engine.start()
        try:
            eventually("lookups are served", lambda: rank.registered and admin.status().ready)
            answer_of(engine.lookup(1, HASHES, timeout_s=TIMEOUT_S))
            # Its page is not written yet, so that it waits.
            alone = engine.store(1, [Part(0, 0, [0])], timeout_s=TIMEOUT_S)
            body = msgspec.Raw(wire.body_of(wire.Store(1, [wire.part(1, [1])])))
            # The second message has the next id but one.
            for taken in (alone.id, alone.id + 2):
                stores = wire.Stores([wire.NumberedStore(taken, 10_000, body)])
                refused = engine.request(stores, TIMEOUT_S)
                assert refused.wait(TIMEOUT_S)
                assert refused.failure is not None
                assert (refused.failure.code, refused.failure.reported) == (wire.Code.INVALID, True)
                assert f"stores.id {taken} " in refused.failure.message
            assert refused.id == taken, "its own id"
            rank.wrote(alone.id)
            assert answer_of(alone).stored_pages == 1
        finally:
            engine.close()
            rank.close()
