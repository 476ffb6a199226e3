"""Stores that share a message."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from daemon import TIMEOUT_S, Daemon, running
from test_client import ENGINE, LOOKUP, WITH_A_THREAD, Fake, client_type, directory, ended, talking
from test_memory import CONTENT, PAGE_TOKENS, PAGES, Talk, group
from test_scheduler import Engine, found, request

from kvferry import batches, wire
from kvferry.client import Client, PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.served import Part
from kvferry.wire import Code, Kind

__all__ = ["client_type", "directory"]

STORED = wire.StoreAnswer(1, 0)


def send(client: Client, count: int, *, timeout_s: float = TIMEOUT_S, hashes: int = 0) -> list[PendingRequest]:
    """Sends stores of one step."""
    store = wire.Store(slot=7, parts=[wire.part(0, [3])], hash_bytes=16, more_hashes=b"h" * 16 * hashes)
    stores = [client.request(store, timeout_s, wake=False) for _ in range(count)]
    client.poke()
    return stores


def receive(server: Fake) -> tuple[bytes, int, list[int]]:
    """Returns the next message with several stores: its sender, its id, and those of the stores."""
    peer, identity, body = server.receive_bytes(Kind.STORES)
    return peer, identity, [store["id"] for store in msgspec.msgpack.decode(body)["stores"]]


def results(*ends: Any) -> wire.StoresAnswer:
    return wire.StoresAnswer(
        [wire.StoreResult(error=end) if isinstance(end, wire.Error) else wire.StoreResult(end) for end in ends]
    )


def test_each_store_of_a_message_has_its_own_end(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        stores = send(client, 3)
        peer, identity, ids = receive(server)
        assert ids == [store.id for store in stores]
        assert identity not in ids
        ends = results(STORED, wire.Error(Code.BUSY, "full", True, True), STORED)
        server.say(peer, Kind.STORES_ANSWER, identity, ends)
        assert [ended(store).answer for store in stores] == [STORED, None, STORED]
        failure = stores[1].failure
        assert failure is not None
        assert (failure.code, failure.reported, failure.retry, failure.over) == (Code.BUSY, True, True, True)


class Watching:
    recording = True

    def requested(self, pending: PendingRequest) -> None: ...

    def ended(self, pending: PendingRequest) -> None: ...


@WITH_A_THREAD
def test_stores_of_a_recorded_client_have_messages_of_their_own(directory: Path) -> None:
    """The replay needs the answers in the order of the leader's decisions."""
    server = Fake(directory)
    watch = Watching()
    with talking(directory, watch=watch) as client:
        server.greet(client)
        stores = send(client, 3)
        assert [server.receive_bytes(Kind.STORE)[1] for _ in stores] == [store.id for store in stores]
        # The recording has ended, by its size for example.
        watch.recording = False
        stores = send(client, 3)
        assert receive(server)[2] == [store.id for store in stores]


def test_other_requests_and_single_stores_have_messages_of_their_own(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        (first,) = send(client, 1)
        assert server.receive_bytes(Kind.STORE)[1] == first.id
        stores = [
            client.request(wire.Store(slot=7, parts=[wire.part(0, [3])]), TIMEOUT_S, wake=False) for _ in range(2)
        ]
        client.request(LOOKUP, TIMEOUT_S, wake=False)
        long = send(client, 2, hashes=batches.STORE_BYTES_MAX // 16)
        assert receive(server)[2] == [store.id for store in stores]
        assert server.receive_bytes(Kind.LOOKUP)
        assert [server.receive_bytes(Kind.STORE)[1] for _ in long] == [store.id for store in long]


def test_a_message_has_a_limited_number_of_stores_and_none_that_has_ended(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        # There is no welcome yet: the first stores end before they could be sent.
        expired = send(client, 2, timeout_s=0.05)
        stores = send(client, wire.STORES_MAX + 2)
        for store in expired:
            assert ended(store).failure is not None
        server.greet(client)
        assert len(receive(server)[2]) == wire.STORES_MAX
        assert receive(server)[2] == [store.id for store in stores[-2:]]


@pytest.mark.parametrize("code", [Code.UNKNOWN_KIND, Code.LIMIT])
def test_stores_of_a_refused_message_are_sent_alone(directory: Path, code: Code) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        stores = send(client, 2)
        peer, identity, _ = receive(server)
        server.say(peer, Kind.ERROR, identity, wire.Error(code, "not so"))
        for store in stores:
            assert server.receive_bytes(Kind.STORE)[1] == store.id
            server.say(peer, Kind.STORE_ANSWER, store.id, STORED)
            assert ended(store).answer == STORED
        # A peer that does not know the kind is sent single stores from then on.
        later = send(client, 2)
        if code == Code.UNKNOWN_KIND:
            assert [server.receive_bytes(Kind.STORE)[1] for _ in later] == [store.id for store in later]
        else:
            assert receive(server)[2] == [store.id for store in later]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        *((Kind.STORES_ANSWER, each) for each in (results(STORED), results(STORED, STORED, STORED), b"\x81", b"\xc1")),
        (Kind.STORE_ANSWER, STORED),
        (Kind.LOOKUP_ANSWER, b"\xc1"),
    ],
)
def test_stores_whose_answer_does_not_fit_are_sent_alone_over_the_same_connection(
    directory: Path, kind: Kind, answer: Any
) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        stores = send(client, 2)
        peer, identity, _ = receive(server)
        # An answer of an unknown kind is dropped.
        server.say(peer, 201, identity, results(STORED, STORED))
        server.say(peer, kind, identity, answer)
        for store in stores:
            assert server.receive_bytes(Kind.STORE)[:2] == (peer, store.id)
            server.say(peer, Kind.STORE_ANSWER, store.id, STORED)
            assert ended(store).answer == STORED


def test_stores_are_sent_again_after_a_broken_connection(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        stores = send(client, 2)
        peer, identity, ids = receive(server)
        server.close()
        server.open()
        peer, again, repeated = receive(server)
        assert repeated == ids
        assert again != identity
        # The answer of the first message has no meaning any longer.
        server.say(peer, Kind.STORES_ANSWER, identity, results(STORED, STORED))
        server.say(peer, Kind.STORES_ANSWER, again, results(STORED, wire.Error(Code.BUSY, "full")))
        assert ended(stores[0]).answer == STORED
        assert ended(stores[1]).failure is not None


def test_a_store_may_be_answered_before_the_others_of_its_message(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        stores = send(client, 2)
        peer, identity, ids = receive(server)
        server.say(peer, Kind.STORE_ANSWER, ids[1], STORED)
        assert ended(stores[1]).answer == STORED
        assert not stores[0].done
        server.say(peer, Kind.STORES_ANSWER, identity, results(STORED, wire.Error(Code.BUSY, "full")))
        assert ended(stores[0]).answer == STORED
        assert stores[1].answer == STORED


def test_a_message_has_one_credit(directory: Path) -> None:
    server = Fake(directory, request_credits=1)
    with talking(directory) as client:
        server.greet(client)
        send(client, 2)
        peer, identity, _ = receive(server)
        asked = client.request(LOOKUP, TIMEOUT_S)
        assert not asked.wait(0.1)
        server.say(peer, Kind.STORES_ANSWER, identity, results(STORED, STORED))
        assert server.receive_bytes(Kind.LOOKUP)[1] == asked.id


@WITH_A_THREAD
def test_a_store_that_waits_to_be_sent_has_the_pages_of_its_call(directory: Path) -> None:
    server = Fake(directory)
    with EngineClient(directory, ENGINE, first_id=1) as client:
        server.greet(client)
        pages = [3, 9]
        client.store(7, [Part(0, 0, pages)], timeout_s=TIMEOUT_S, wake=False)
        pages[:] = [5, 6]
        client.poke()
        body = msgspec.msgpack.decode(server.receive_bytes(Kind.STORE)[2])
        assert body["parts"][0]["pages"] == [3, 9]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(ranks=1, g2="16MiB") as daemon:
        yield daemon


@WITH_A_THREAD
def test_a_daemon_copies_the_stores_of_a_message(daemon: Daemon) -> None:
    tensors = {"layer": torch.zeros(PAGES, 1, PAGE_TOKENS, CONTENT)}
    talk = Talk(daemon, group(tensors))
    try:
        daemon.wait_ready()
        assert talk.lookup(3, slot=1).hit_pages == 0
        asked = [(1, 0, [4]), (9, 0, [2]), (1, 1, [5, 1])]
        stores = [
            talk.scheduler.request(wire.Store(slot, [wire.part(first, wire.runs(pages))]), TIMEOUT_S, wake=False)
            for slot, first, pages in asked
        ]
        talk.rank.wrote(talk.scheduler.draw())
        talk.scheduler.poke()
        one, unknown, two = (ended(store) for store in stores)
        assert (one.answer, two.answer) == (wire.StoreAnswer(1, 0), wire.StoreAnswer(2, 0))
        assert unknown.failure is not None
        assert (unknown.failure.code, unknown.failure.over) == (Code.UNKNOWN_SLOT, True)
        assert talk.lookup(3, slot=2).hit_pages == 3
    finally:
        talk.close()


@WITH_A_THREAD
def test_the_stores_of_a_step_are_sent_together() -> None:
    engine = Engine()
    found(engine, 0)
    running = {request(name, 8): 8 for name in "abc"}
    for number, asking in enumerate(running):
        engine.side.matched_tokens(asking, 0)  # type: ignore[arg-type]
        engine.tables[asking.request_id] = [4 * number + page for page in range(1, 3)]
    engine.step(running)
    assert engine.leader.count(wire.Store) == 3
    assert engine.leader.pokes == 1
    engine.step({})
    assert engine.leader.pokes == 1, "nothing waits"
