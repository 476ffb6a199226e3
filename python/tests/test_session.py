"""Tests of the rules of a session, in virtual time and without sockets."""

import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry import wire
from kvferry.requests import Failure, PendingRequest
from kvferry.session import CONNECT_LIMIT_S, Session
from kvferry.wire import Code, Kind

DIRECTORY = Path("/kvferry/leader")
LOOKUP = wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=b"h" * 32)
FOUND = wire.LookupAnswer(2)


class Talk:
    """A session, the time, and what its peer has received."""

    def __init__(self, **welcome: Any):
        self.now = 100.0
        self.ids = itertools.count(1)
        self.ended: list[int] = []
        hello = wire.Hello(role="engine", engine=b"e" * 16)
        self.session = Session(DIRECTORY, hello, lambda: next(self.ids), now=self.now)
        self.welcome = {"version": 2, "heartbeat_ms": 1000, "request_credits": 8, "byte_credits": 1 << 20, **welcome}

    def connect(self, epoch: int = 7) -> None:
        self.session.welcomed(message(Kind.WELCOME, 0, wire.Welcome(**self.welcome), epoch), self.now)

    def request(self, timeout_s: float, *, body: Any = LOOKUP, link: int | None = None) -> PendingRequest:
        made = PendingRequest(next(self.ids), body, self.now + timeout_s, self.now + timeout_s, link)
        made.until = lambda pending: self.ended.append(pending.id)
        self.session.add(made)
        return made

    def sent(self) -> list[tuple[int, int, int]]:
        """Kind, id and milliseconds of every message that is sent now."""
        found = []
        while (each := self.session.next_message(self.now)) is not None:
            head = each[0]
            found.append((number(head, 6, 8), number(head, 8, 16), number(head, 16, 20)))
        return found

    def answer(self, pending: PendingRequest, body: Any = FOUND, kind: Kind = Kind.LOOKUP_ANSWER) -> None:
        assert self.session.received(message(kind, pending.id, body), self.now) is None


def number(head: bytes, start: int, end: int) -> int:
    return int.from_bytes(head[start:end], "big")


def message(kind: int, correlation: int, body: Any, epoch: int = 0) -> list[bytes]:
    return [wire.header(2, kind, correlation, 0, epoch), body if isinstance(body, bytes) else wire.body_of(body)]


def test_hello_has_a_version_of_its_own_and_a_deadline() -> None:
    head, body = Talk().session.hello()
    assert (number(head, 4, 6), number(head, 6, 8)) == (wire.HELLO_VERSION, Kind.HELLO)
    assert number(head, 16, 20) == CONNECT_LIMIT_S * 1000
    assert b"engine" in body


def test_unanswered_requests_are_sent_again_with_their_ids_and_the_time_that_is_left() -> None:
    talk = Talk()
    first, second, third = talk.request(5), talk.request(4), talk.request(3)
    assert talk.sent() == [], "there is no connection"
    talk.connect()
    assert talk.sent() == [(Kind.LOOKUP, 1, 5000), (Kind.LOOKUP, 2, 4000), (Kind.LOOKUP, 3, 3000)]
    talk.answer(second)
    talk.session.lost(talk.now)
    assert talk.session.lost_at == talk.now
    talk.now += 2
    talk.connect()
    assert talk.sent() == [(Kind.LOOKUP, 1, 3000), (Kind.LOOKUP, 3, 1000)]
    assert talk.session.lost_at is None
    talk.now += 0.9995
    talk.session.lost(talk.now)
    talk.connect()
    assert talk.sent()[1] == (Kind.LOOKUP, 3, 1), "a request has at least 1 ms"
    talk.now += 1
    talk.session.expire(talk.now)
    assert talk.ended == [second.id, third.id]
    talk.answer(first)
    assert talk.ended == [second.id, third.id, first.id]


def test_an_order_is_not_repeated_over_the_next_connection() -> None:
    talk = Talk()
    talk.connect()
    drain, log, lookup = (talk.request(5, body=body) for body in (wire.Drain(False), wire.SetLog("warn"), LOOKUP))
    assert [kind for kind, *_ in talk.sent()] == [Kind.DRAIN, Kind.SET_LOG, Kind.LOOKUP]
    talk.session.lost(talk.now)
    assert talk.ended == [drain.id, log.id]
    assert drain.failure is not None
    assert drain.failure.code == Code.DEADLINE
    unsent = talk.request(5, body=wire.Drain(False))
    talk.connect()
    assert talk.sent() == [(Kind.LOOKUP, lookup.id, 5000), (Kind.DRAIN, unsent.id, 5000)]


@pytest.mark.parametrize("role", ["engine", "rank"])
def test_an_engine_has_a_name(role: str) -> None:
    with pytest.raises(ValueError, match="engine is zero: give 16 random bytes"):
        Session(Path("nowhere"), wire.Hello(role=role, engine=bytes(16)), lambda: 1, now=0.0)


def test_the_answer_of_a_message_does_not_end_a_store_that_was_repeated_meanwhile() -> None:
    talk = Talk()
    talk.connect()
    store = talk.request(5)
    talk.answer(store, wire.Error(Code.BUSY, "full", retry=True, over=False), Kind.ERROR)
    again = PendingRequest(store.id, LOOKUP, talk.now + 5, talk.now + 5, None)
    talk.session.add(again)
    talk.session._store_ended(store, wire.Error(Code.BUSY, "full", retry=True, over=False))
    assert not again.done
    assert talk.ended == [store.id]
    talk.answer(again)
    assert again.done
    assert again.failure is None


def test_pings_are_sent_when_nothing_was_sent_or_received_for_a_heartbeat() -> None:
    talk = Talk()
    talk.connect()
    begun = talk.now
    assert talk.session.next_beat == begun + 1
    talk.now = begun + 0.99
    assert talk.session.beat(talk.now) is None
    # Messages of the peer do not count for what the peer counts.
    for _ in range(5):
        talk.now += 0.5
        talk.session.received(message(Kind.PONG, 0, wire.Empty()), talk.now)
        ping = talk.session.beat(talk.now)
        if ping is not None:
            assert number(ping[0], 6, 8) == Kind.PING
            assert talk.session.next_beat == talk.now + 1
        assert talk.now <= talk.session.next_beat <= talk.now + 1
    # Nor do our own messages for what the peer says.
    received, pings = talk.now, 0
    while not talk.session.silent(talk.now):
        talk.now += 0.1
        talk.request(60)
        talk.sent()
        pings += talk.session.beat(talk.now) is not None
    assert pings >= 1
    assert 3 <= talk.now - received < 3.2


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (wire.Welcome(3, 1, 1, 1), Kind.WELCOME, "has chosen version 3, this side supports 1 to 2: update the older"),
        (wire.Error(Code.NOT_READY, "in use by process 7", True), Kind.ERROR, "no welcome: in use by process 7"),
        (FOUND, Kind.LOOKUP_ANSWER, "sent no welcome"),
        (b"\x81", Kind.WELCOME, "kind 2"),
    ],
)
def test_another_answer_to_hello_makes_no_connection(body: Any, kind: Kind, text: str) -> None:
    talk = Talk()
    with pytest.raises((Failure, wire.Malformed), match=text):
        talk.session.welcomed(message(kind, 0, body), talk.now)
    assert (talk.session.link, talk.sent()) == (0, [])


def test_a_request_beyond_the_limits_of_the_peer_fails_alone() -> None:
    talk = Talk(limits={"body_bytes": 300, "stores": 2, "of_a_later_version": 1})
    long = wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=b"h" * 320)
    stores = [talk.request(5, body=wire.Store(1, [wire.part(0, [3])])) for _ in range(3)]
    first, again = talk.request(5, body=long), talk.request(5, body=long)
    again.repeated = True
    talk.connect()
    assert [kind for kind, *_ in talk.sent()] == [Kind.STORES, Kind.STORE]
    for pending, over in ((first, True), (again, False)):
        assert pending.failure is not None
        assert pending.failure.code == Code.LIMIT
        assert pending.failure.over is over, "an earlier request with this id may have been sent"
        assert "more than the 300 of a message" in pending.failure.message
    assert not any(store.done for store in stores)
    assert talk.session.limits["of_a_later_version"] == 1


@pytest.mark.parametrize("body", [b"\x93\x01\x02\x03", b"\x84", b"", msgspec.msgpack.encode({"hit_pages": "no"})])
@pytest.mark.parametrize("kind", [Kind.LOOKUP_ANSWER, Kind.ERROR])
def test_an_answer_that_cannot_be_read_ends_its_request_alone(kind: Kind, body: bytes) -> None:
    talk = Talk(request_credits=1)
    talk.connect()
    first, second = talk.request(5), talk.request(5)
    assert [identity for _, identity, _ in talk.sent()] == [first.id]
    link = talk.session.link
    talk.answer(first, body, kind)
    assert first.failure is not None
    assert (first.failure.code, first.failure.over) == (Code.INTERNAL, False)
    assert talk.session.link == link
    # Its credit is free.
    assert [identity for _, identity, _ in talk.sent()] == [second.id]
    talk.answer(second)
    assert second.answer == FOUND


@pytest.mark.parametrize("word", ["moved", {"moved": {"to": [1, 2]}}])
def test_words_of_later_versions_are_read(word: Any) -> None:
    record = {"event": word, "tier": 2, "why": word}
    events = msgspec.msgpack.encode({"epoch": 1, "next": 2, "lost": False, "hash_bytes": 16, "records": [record]})
    read = wire.read(message(Kind.EVENTS, 1, events)).body
    assert isinstance(read, wire.Events)
    assert (read.records[0].event, read.records[0].why) == (word, word)
    disk = msgspec.msgpack.encode({"health": word})
    assert msgspec.msgpack.decode(disk, type=wire.DiskStatus).health == word


def garbage(rng: random.Random, open_ids: list[int]) -> list[bytes]:
    """Bytes that a peer may send: wrong lengths, kinds, ids, flags and bodies, also nearly right ones."""
    kind = rng.choice([*Kind, 998, 999, rng.randrange(1 << 16)])
    correlation = rng.choice([*open_ids, 0, rng.randrange(1 << 64)])
    head = bytearray(wire.header(rng.choice([1, 2, 9]), kind, correlation, 0, rng.randrange(9)))
    if rng.random() < 0.3:
        head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
    body = rng.choice([b"", b"\x80", b"\xc1", rng.randbytes(rng.randrange(40)), wire.body_of(FOUND)])
    parts = [bytes(head), body]
    return rng.choice([parts, parts, parts, parts[:1], [*parts, b""], [bytes(head)[:-1], body]])


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_and_in_time_whatever_the_peer_does(seed: int) -> None:
    rng = random.Random(seed)
    talk = Talk(request_credits=rng.choice([1, 3, 200]), byte_credits=rng.choice([100, 1 << 20]))
    made: list[PendingRequest] = []
    bodies = [LOOKUP, wire.Finish(1), wire.Store(1, [wire.part(0, [3])]), wire.Load(1, [wire.part(0, [3])])]
    answers = {Kind.LOOKUP: FOUND, Kind.STORE: wire.StoreAnswer(1, 0), Kind.LOAD: wire.LoadAnswer(1)}
    received: dict[int, PendingRequest] = {}
    batches: dict[int, int] = {}
    over_this: set[int] = set()
    for _ in range(400):
        talk.now += rng.random() * 0.1
        talk.session.expire(talk.now)
        match rng.randrange(8):
            case 0 | 1:
                link = talk.session.link if rng.random() < 0.2 else None
                made.append(talk.request(rng.random() * 2, body=rng.choice(bodies), link=link))
            case 2 if talk.session.link == 0:
                over_this.clear()
                talk.connect()
            case 3 if rng.random() < 0.3:
                talk.session.lost(talk.now)
                received.clear()
                batches.clear()
            case 4 | 5 if talk.session.link and (received or batches):
                if batches and rng.random() < 0.5:
                    identity, count = batches.popitem()
                    results = [wire.StoreResult(wire.StoreAnswer(1, 0)) for _ in range(count)]
                    talk.session.received(message(Kind.STORES_ANSWER, identity, wire.StoresAnswer(results)), talk.now)
                elif received:
                    pending = received.pop(rng.choice(list(received)))
                    refusal = wire.Error(rng.choice([*Code, 99]), "no", over=rng.random() < 0.5)
                    refused = rng.random() < 0.3
                    kind = Kind.ERROR if refused else pending.kind + 1
                    answer = refusal if refused else answers.get(pending.kind, wire.Empty())
                    talk.session.received(message(kind, pending.id, answer), talk.now)
            case 6 if talk.session.link:
                try:
                    talk.session.received(garbage(rng, [each.id for each in made]), talk.now)
                except wire.Malformed:
                    talk.session.lost(talk.now)
                    received.clear()
                    batches.clear()
        if talk.session.link:
            by_id = {pending.id: pending for pending in made}
            for kind, identity, left_ms in talk.sent():
                assert left_ms >= 1
                if kind == Kind.STORES:
                    batches[identity] = len(talk.session._batches._open[identity])
                    continue
                assert identity not in over_this or kind == Kind.STORE, "sent twice over one connection"
                over_this.add(identity)
                assert not by_id[identity].done, "a request is sent that has ended"
                received[identity] = by_id[identity]
            assert len(talk.session._in_flight) <= talk.welcome["request_credits"]
        assert len(talk.ended) == len(set(talk.ended)), "a request ended twice"
        for pending in made:
            assert pending.done or pending.expires > talk.now - 0.1
    talk.now += 3
    talk.session.expire(talk.now)
    assert sorted(talk.ended) == [pending.id for pending in made]
    assert talk.session.open == {}
    assert all((pending.answer is None) != (pending.failure is None) for pending in made)


def test_a_peer_of_version_1_gets_pages_one_by_one_and_stores_alone() -> None:
    talk = Talk(version=1)
    parts = [wire.part(0, wire.runs([7, 3, 4, 5])), wire.part(9, [[1, 2]])]
    load = talk.request(5, body=wire.Load(1, parts))
    first, second = (talk.request(5, body=wire.Store(1, parts)) for _ in range(2))
    talk.connect()
    for request in (load, first, second):
        sent = talk.session.next_message(talk.now)
        assert sent is not None
        head, body = sent
        assert (number(head, 4, 6), number(head, 6, 8), number(head, 8, 16)) == (1, request.kind, request.id)
        assert [part["pages"] for part in msgspec.msgpack.decode(body)["parts"]] == [[7, 3, 4, 5], [1, 2]]
    # Version 2 again: the requests are repeated with runs, the stores in one message.
    talk.session.lost(talk.now)
    talk.welcome["version"] = 2
    talk.connect()
    assert [kind for kind, _, _ in talk.sent()] == [Kind.LOAD, Kind.STORES]


@pytest.mark.parametrize("sent_before", [False, True])
def test_pages_that_version_1_cannot_name_are_refused_before_they_are_sent(sent_before: bool) -> None:
    talk = Talk()
    load = talk.request(5, body=wire.Load(1, [wire.part(0, [[0, wire.PAGE_ITEMS_MAX + 1]])]))
    next_one = talk.request(5)
    if sent_before:
        talk.connect()
        assert len(talk.sent()) == 2
        talk.session.lost(talk.now)
    talk.welcome["version"] = 1
    talk.connect()
    assert [identity for _, identity, _ in talk.sent()] == [next_one.id]
    assert load.failure is not None
    assert load.failure.code == Code.LIMIT
    assert "131073 pages of one part: version 1 of the protocol names at most 131072" in load.failure.message
    # A peer of version 2 may have it.
    assert load.failure.over is not sent_before


@pytest.mark.parametrize("how", ["expires", "closed", "the connection broke"])
@pytest.mark.parametrize(("sent", "repeated"), [(False, False), (True, False), (False, True)])
def test_only_a_request_that_no_peer_has_received_is_over(how: str, sent: bool, repeated: bool) -> None:
    talk = Talk()
    talk.connect()
    pending = talk.request(1, link=talk.session.link if how == "the connection broke" else None)
    pending.repeated = repeated
    if sent:
        assert len(talk.sent()) == 1
    if how == "expires":
        talk.now += 1
        talk.session.expire(talk.now)
    elif how == "closed":
        talk.session.closed()
    else:
        talk.session.lost(talk.now)
    assert pending.failure is not None
    assert pending.failure.over is not (sent or repeated)
    assert pending.pages_in_use is (sent or repeated)


def test_a_request_that_was_sent_before_the_connection_broke_is_not_over() -> None:
    talk = Talk()
    talk.connect()
    pending = talk.request(1)
    assert len(talk.sent()) == 1
    talk.session.lost(talk.now)
    talk.now += 1
    talk.session.expire(talk.now)
    assert pending.failure is not None
    assert not pending.failure.over
