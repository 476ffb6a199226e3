"""The limits of a peer, which its clients keep: what is longer is divided, or refused before it is sent."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import wire_table
from daemon import TIMEOUT_S, eventually, running
from test_client import Fake, directory, ended, talking
from test_session import Talk, message

from kvferry import limits, wire
from kvferry.aio import EngineClient as EngineInLoop
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.requests import PendingRequest
from kvferry.session import ENGINE_BYTES
from kvferry.wire import Code, Kind

__all__ = ["directory"]

ENGINE, RANK, ADMIN = "engine", "rank", "admin"
ALL = {ENGINE, RANK, ADMIN}


class Kept(NamedTuple):
    """How clients keep a limit, and which clients have a message that could exceed it."""

    how: str
    clients: set[str]


REFUSES, DIVIDES = "is refused before it is sent", "is divided"

#: Every limit of a welcome.
KEPT = {
    "abandoned_requests": Kept(DIVIDES, {RANK}),
    "body_bytes": Kept(REFUSES, ALL),
    "byte_credits": Kept("in the welcome, which counts; requests wait", ALL),
    "content_bytes": Kept(REFUSES, {RANK}),
    "copies": Kept("in orders of leaders alone", set()),
    "deadline_max_ms": Kept("the peer cuts longer deadlines, and answers then", ALL),
    "depth": Kept("messages of these clients have at most 5 levels, a registration at most 8", ALL),
    "event_pages": Kept("the leader divides its answers, whatever `most` is", {ENGINE, ADMIN}),
    "namespace_bytes": Kept(REFUSES, {ENGINE, ADMIN}),
    "page_hashes": Kept(REFUSES, {ENGINE, ADMIN}),
    "page_items": Kept(REFUSES, {ENGINE}),
    "pages": Kept(REFUSES, {ENGINE}),
    "pairs": Kept("in orders of leaders alone", set()),
    "parts": Kept(REFUSES, {ENGINE}),
    "request_credits": Kept("in the welcome, which counts; requests wait", ALL),
    "small_body_bytes": Kept("a hello is refused by its name, which is shorter", ALL),
    "stores": Kept(DIVIDES, {ENGINE}),
    "text_bytes": Kept("of a filter, is refused before it is sent; a longer name makes no client", ALL),
}


def lookup(hashes: int = 1, namespace: int = 0) -> wire.Lookup:
    return wire.Lookup(slot=1, namespace=b"n" * namespace, hash_bytes=16, hashes=b"h" * 16 * hashes)


def load(*parts: list[Any]) -> wire.Load:
    return wire.Load(1, [wire.part(at, pages) for at, pages in enumerate(parts)])


def store(parts: list[list[Any]], hashes: int = 0) -> wire.Store:
    return wire.Store(1, [wire.part(at, pages) for at, pages in enumerate(parts)], 16, b"h" * 16 * hashes)


def reset(hashes: int = 0, namespace: int = 0) -> wire.Reset:
    return wire.reset(b"n" * namespace, hash_bytes=16, hashes=b"h" * 16 * hashes)


def register(content: int) -> wire.Register:
    return wire.Register(0, b"e" * 16, {"content": b"c" * content})


def pages(count: int) -> list[int]:
    return [2 * page for page in range(count)]


#: For each limit, messages with that much of it.
MESSAGES: list[tuple[str, Callable[[int], msgspec.Struct]]] = [
    ("abandoned_requests", lambda count: wire.Abandon(list(range(count)))),
    ("content_bytes", register),
    ("namespace_bytes", lambda count: lookup(namespace=count)),
    ("namespace_bytes", lambda count: reset(namespace=count)),
    ("namespace_bytes", lambda count: wire.ReadEvents(0, 0, 1, namespace=b"n" * count)),
    ("page_hashes", lookup),
    ("page_hashes", reset),
    ("page_hashes", lambda count: store([[1]], count)),
    ("page_items", lambda count: load(pages(1), pages(count))),
    ("page_items", lambda count: store([pages(count)])),
    ("pages", lambda count: load([1], [[3, count - 1]])),
    ("pages", lambda count: store([[[3, count]]])),
    ("parts", lambda count: load(*([1] for _ in range(count)))),
    ("parts", lambda count: store([[1]] * count)),
    ("text_bytes", lambda count: wire.SetLog("f" * count)),
    ("text_bytes", lambda count: wire.SetLog("\u00e4" * (count // 2) + "f" * (count % 2))),
]


def test_the_table_has_every_limit_and_every_reason_is_true() -> None:
    table = wire_table.table()
    assert KEPT.keys() == table["limits"].keys()
    refused = {name for name, kept in KEPT.items() if REFUSES in kept.how}
    divided = {name for name, kept in KEPT.items() if kept.how == DIVIDES}
    assert refused | divided == limits.TABLE.keys()
    assert refused == {name for name, _ in MESSAGES} - divided | {"body_bytes"}
    senders: dict[str, set[str]] = {name: set() for name in KEPT}
    for name, made in MESSAGES:
        kind = wire.KINDS[type(made(4))].name.lower()
        (row,) = [row for row in table["kinds"] if row["name"] == kind]
        senders[name] |= ALL & set(row["said_by"])
    for name in senders:
        assert senders[name] <= KEPT[name].clients, f"{name}: more clients can exceed it"
    assert 5 < deepest(msgspec.to_builtins(described())) <= 8 < table["limits"]["depth"]
    for _, made in MESSAGES:
        assert deepest(msgspec.to_builtins(made(4))) <= 5
    assert deepest(msgspec.to_builtins(load([1, [3, 2]]))) == 5


def described() -> wire.Register:
    group = Group({"layer": torch.zeros((4, 1, 8, 4))}, engine_page_tokens=8, device_pages=4)
    memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"content"))
    try:
        return wire.Register(0, b"e" * 16, memory.describe([b"t" * 16], timeline=False))
    finally:
        memory.close()


def deepest(value: Any) -> int:
    """Levels of maps and lists."""
    match value:
        case dict():
            return 1 + max(map(deepest, value.values()), default=0)
        case list() | tuple():
            return 1 + max(map(deepest, value), default=0)
    return 0


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("name", "made"), MESSAGES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_request_beyond_a_limit_of_the_peer_is_refused_with_its_numbers(name: str, made: Any, version: int) -> None:
    talk = Talk(version=version, limits={name: 6})
    fits, exceeds = talk.request(5, body=made(6)), talk.request(5, body=made(7))
    talk.connect()
    assert [identity for _, identity, _ in talk.sent()] == [fits.id]
    refused(exceeds, over=True)
    assert exceeds.failure is not None
    text = "version 1 of the protocol names at most 6" if version == 1 and name == "page_items" else "more than the 6 "
    assert text in exceeds.failure.message
    assert "7" in exceeds.failure.message


def refused(pending: PendingRequest, *, over: bool) -> None:
    failure = pending.failure
    assert failure is not None
    assert (failure.code, failure.reported, failure.retry, failure.over) == (Code.LIMIT, False, False, over)


@pytest.mark.parametrize(("name", "made"), MESSAGES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_request_beyond_a_limit_of_the_table_fails_at_once(name: str, made: Any) -> None:
    """Also without a connection, and whatever the peer allows."""
    most = limits.TABLE[name]
    talk = Talk(limits={name: 10 * most})
    fits = talk.request(5, body=made(most))
    refused(talk.request(5, body=made(most + 1)), over=True)
    again = PendingRequest(fits.id + 7, made(most + 1), talk.now + 5, talk.now + 5, None)
    again.repeated = True
    talk.session.add(again)
    refused(again, over=False)
    assert not fits.done
    talk.connect()
    assert [identity for _, identity, _ in talk.sent()] == [fits.id]


def test_a_request_that_was_sent_may_still_run_when_the_next_peer_allows_less() -> None:
    talk = Talk()
    asked = talk.request(5, body=lookup(hashes=7))
    talk.connect()
    assert len(talk.sent()) == 1
    talk.session.lost(talk.now)
    talk.welcome["limits"] = {"page_hashes": 6}
    talk.connect()
    assert talk.sent() == []
    refused(asked, over=False)


@pytest.mark.parametrize(
    ("allowed", "body", "most"),
    [
        ({"stores": 3}, store([[1]]), 3),
        ({"stores": 0}, store([[1]]), 1),
        ({"parts": 7}, store([[1], [3]]), 3),
        ({"pages": 10}, store([[[1, 5]]]), 2),
        ({"page_hashes": 9}, store([[1]], 2), 4),
        ({"body_bytes": 600}, store([[1]], 2), 5),
    ],
)
def test_stores_share_a_message_within_the_limits_of_the_peer(allowed: dict, body: Any, most: int) -> None:
    """Limits on pages, parts and hashes hold for all stores of a message together."""
    talk = Talk(limits=allowed, request_credits=100)
    stores = [talk.request(5, body=body) for _ in range(12)]
    talk.connect()
    named: list[int] = []
    while (each := talk.session.next_message(talk.now)) is not None:
        head, encoded = each
        assert len(encoded) <= allowed.get("body_bytes", wire.BODY_BYTES_MAX)
        kind, identity = (int.from_bytes(head[at : at + size], "big") for at, size in ((6, 2), (8, 8)))
        ids = [identity]
        if kind == Kind.STORES:
            ids = [each["id"] for each in msgspec.msgpack.decode(encoded)["stores"]]
        assert len(ids) <= most
        named += ids
    assert named == [pending.id for pending in stores]
    assert len(talk.session._in_flight) <= -(-12 // most) + (most == 5), "few stores share a message"


def test_a_store_beyond_a_limit_keeps_no_other_store_from_its_message() -> None:
    talk = Talk(limits={"page_items": 3, "parts": 8})
    first, long, *others = [talk.request(5, body=store([pages(count)])) for count in (3, 4, 3, 3)]
    talk.connect()
    assert [kind for kind, *_ in talk.sent()] == [Kind.STORE, Kind.STORES]
    refused(long, over=True)
    assert not any(pending.done for pending in (first, *others))
    answer = wire.StoresAnswer([wire.StoreResult(wire.StoreAnswer(3, 0))] * 2)
    identity = max(talk.session._in_flight)
    talk.session.received(message(Kind.STORES_ANSWER, identity, answer), talk.now)
    assert all(pending.answer == wire.StoreAnswer(3, 0) for pending in others)


@pytest.mark.parametrize("made", [EngineClient, EngineInLoop])
def test_a_hello_that_every_peer_would_refuse_makes_no_client(made: Any, directory: Path) -> None:
    for engine, name, text in [
        (b"e" * 15, "", "engine has 15 bytes: give 16"),
        (b"e" * 16, "\u00e4" * 2049, "name has 4098 bytes: give at most 4096"),
    ]:
        with pytest.raises(ValueError, match=text):
            made(directory, engine, first_id=1, name=name)
    assert len(os.urandom(ENGINE_BYTES)) == 16


# The whole way, to a server and to a real leader.


def rank_of(directory: Path, content: bytes = b"limits") -> RankSession:
    group = Group({"layer": torch.zeros((4, 1, 8, 4))}, engine_page_tokens=8, device_pages=4)
    return RankSession(directory, b"e" * 16, 0, 0, KvMemory([group], Place(0, 1, 0, content)))


@pytest.mark.parametrize(("allowed", "most"), [(3, 3), (9999, wire.ABANDONED_MAX), (0, 0)])
def test_a_rank_divides_what_it_abandons(directory: Path, allowed: int, most: int) -> None:
    server = Fake(directory, limits={"abandoned_requests": allowed})
    with rank_of(directory) as rank:
        # A process that received the memory, and that cannot be seen to be dead.
        rank._process = None
        wanted = set(range(1, wire.ABANDONED_MAX + 3)) if allowed > 100 else set(range(1, 9))
        rank.abandon(sorted(wanted))
        over: set[int] = set()
        while over < wanted and most:
            peer, identity, body = server.receive_bytes(Kind.ABANDON)
            named = msgspec.msgpack.decode(body)["requests"]
            assert 0 < len(named) <= most
            server.say(peer, Kind.ABANDON_ANSWER, identity, wire.Empty())
            over |= set(eventually("they are over", rank.over))
        if not most:
            server.greet(rank._client)
            eventually("a first attempt", lambda: rank._not_before > 0)
            assert rank.over() == [], "nothing was sent, so that nothing is known to be over"
            assert not server.socket.poll(100)


def test_a_content_that_no_worker_takes_is_logged_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with running(ranks=1) as daemon, rank_of(daemon.socket_dir / "worker-0-0", b"c" * 1025) as rank:
        text = "is refused, requests run without the cache: the register has 1025 content bytes, more than the 1024"
        eventually("the reason is logged", lambda: text in caplog.text)
        eventually("another attempt", lambda: rank._pause_s > 0.2)
        assert caplog.text.count(text) == 1


def test_a_leader_refuses_what_a_client_refuses(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader reads what is at a limit, and refuses what a client without these rules sends beyond it."""
    with running(ranks=1) as daemon, talking(daemon.socket_dir / "leader") as client:
        for name, made in MESSAGES:
            if wire.KINDS[type(made(4))] in (Kind.ABANDON, Kind.REGISTER, Kind.SET_LOG):
                # Of ranks and operators.
                continue
            most = limits.TABLE[name]
            failure = ended(client.request(made(most), TIMEOUT_S)).failure
            assert failure is None or (failure.reported and failure.code != Code.LIMIT), f"{name}: {failure}"
            with monkeypatch.context() as without:
                without.setattr(limits, "exceeded", lambda *_: None)
                failure = ended(client.request(made(most + 1), TIMEOUT_S)).failure
            assert failure is not None
            assert (failure.code, failure.reported) == (Code.LIMIT, True), f"{name}: {failure}"
