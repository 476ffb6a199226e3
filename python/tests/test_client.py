"""Tests of the client's side of a session."""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from daemon import TIMEOUT_S, eventually, running
from in_loop import InLoop
from raw_peer import LONG, MORE, Closed, RawPeer

from kvferry import aio, wire
from kvferry.client import Client, Failure, Later, PendingRequest
from kvferry.sockets import SOCKET_NAME, Connection, inside, open_directory
from kvferry.wire import Code, Kind

ENGINE = b"e" * 16
LOOKUP = wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=b"h" * 32)
FOUND = wire.LookupAnswer(2)


#: The servers of a test, which end with it.
FAKES: list["Fake"] = []


class Fake:
    """A server whose messages are chosen by the test."""

    def __init__(self, directory: Path, **welcome: int):
        self.path = directory / "kvferry.sock"
        self.welcome = {
            "version": 2,
            "heartbeat_ms": 1000,
            "request_credits": 1024,
            "byte_credits": 64 << 20,
            **welcome,
        }
        self.context = zmq.Context()
        FAKES.append(self)
        self.open()

    def open(self) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{self.path}")

    def close(self) -> None:
        self.socket.close(0)
        self.path.unlink(missing_ok=True)

    def receive(self, *, pings: bool = False) -> tuple[bytes, wire.Envelope]:
        """Returns the next message, without hellos, and without pings unless they are wanted."""
        peer, kind, parts = self._receive(pings=pings)
        return peer, wire.Envelope(kind, int.from_bytes(parts[0][8:16], "big"), 0, None)

    def receive_bytes(self, kind: int) -> tuple[bytes, int, bytes]:
        """Returns the next message, which must be of this kind: its sender, its id, and its body."""
        peer, received, parts = self._receive()
        assert received == kind, received
        return peer, int.from_bytes(parts[0][8:16], "big"), parts[1]

    def receive_refusal(self) -> wire.Envelope:
        """Returns the next error."""
        _, _, parts = self._receive()
        envelope = wire.read(parts)
        assert isinstance(envelope.body, wire.Error), envelope
        return envelope

    def _receive(self, *, pings: bool = False) -> tuple[bytes, int, list[bytes]]:
        until = time.monotonic() + 10
        while True:
            left_s = until - time.monotonic()
            assert left_s > 0, "received only hellos and pings"
            assert self.socket.poll(left_s * 1000), "received nothing"
            peer, *parts = self.socket.recv_multipart()
            kind = int.from_bytes(parts[0][6:8], "big")
            if kind == Kind.HELLO:
                self.say(peer, Kind.WELCOME, 0, wire.Welcome(**self.welcome), epoch=7)
            elif kind == Kind.PING and not pings:
                self.say(peer, Kind.PONG, 0, wire.Empty())
            else:
                return peer, kind, parts

    def greet(self, client: Client) -> None:
        """Sends the welcome, and waits until the client has received it."""
        peer, *_ = self.socket.recv_multipart()
        self.say(peer, Kind.WELCOME, 0, wire.Welcome(**self.welcome), epoch=7)
        eventually("a welcome", lambda: client.listening)

    def say(self, peer: bytes, kind: int, correlation: int, body: object, epoch: int = 0) -> None:
        head = wire.header(2, kind, correlation, 0, epoch)
        self.socket.send_multipart([peer, head, body if isinstance(body, bytes) else wire.body_of(body)])


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    own = tmp_path / "d"
    own.mkdir(mode=0o700)
    yield own
    while FAKES:
        FAKES.pop().context.destroy(linger=0)


#: The clients that keep the same rules, and which of them a test uses now.
CLIENTS = {"thread": Client, "event loop": InLoop.of(aio.Client)}
USED = {"client": Client}
#: For tests of what only the client with a thread has.
WITH_A_THREAD = pytest.mark.parametrize("client_type", ["thread"], indirect=True)


@pytest.fixture(autouse=True, params=CLIENTS)
def client_type(request: pytest.FixtureRequest) -> None:
    """Runs each test with each client."""
    USED["client"] = CLIENTS[request.param]


@contextlib.contextmanager
def talking(directory: Path, **turn: object) -> Iterator[Client]:
    client = USED["client"](directory, wire.Hello(role="engine", engine=ENGINE), first_id=100, **turn)
    client.start()
    try:
        yield client
    finally:
        client.close()


def ended(pending: PendingRequest) -> PendingRequest:
    assert pending.wait(TIMEOUT_S), "the request did not end"
    return pending


def test_a_request_ends_with_an_answer_a_refusal_or_a_failure_for_a_wrong_kind(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        first, second, third = (client.request(LOOKUP, TIMEOUT_S) for _ in range(3))
        assert [pending.id for pending in (first, second, third)] == [100, 101, 102]
        for _ in range(3):
            peer, envelope = server.receive()
            match envelope.correlation:
                case 100:
                    server.say(peer, Kind.LOOKUP_ANSWER, 100, FOUND)
                case 101:
                    server.say(peer, Kind.ERROR, 101, wire.Error(Code.NOT_READY, "not yet", True))
                case 102:
                    server.say(peer, Kind.STORE_ANSWER, 102, wire.StoreAnswer(1, 1))
        assert ended(first).answer == FOUND
        failure = ended(second).failure
        assert failure is not None
        assert (failure.code, failure.message, failure.reported, failure.retry) == (
            Code.NOT_READY,
            "not yet",
            True,
            True,
        )
        assert not failure.over, "the error does not state `over`"
        failure = ended(third).failure
        assert failure is not None
        assert not failure.over, "whatever that was, nobody knows how the request ended"
        assert client.epoch == 7


def test_a_message_that_cannot_be_sent_fails_alone(directory: Path) -> None:
    """Messages are encoded on the client's thread, where an exception must not end the conversation."""

    def fails() -> wire.Lookup:
        raise ValueError("no message")

    server = Fake(directory)
    with talking(directory) as client:
        huge = wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=bytes(wire.BODY_BYTES_MAX))
        for message, why in ((Later(Kind.LOOKUP, fails), "no message"), (huge, "more than the 8388608")):
            failure = ended(client.request(message, TIMEOUT_S)).failure
            assert failure is not None
            assert failure.over
            assert why in failure.message
        good = client.request(Later(Kind.LOOKUP, lambda: LOOKUP), TIMEOUT_S)
        assert server.receive_bytes(Kind.LOOKUP)[1:] == (good.id, wire.body_of(LOOKUP))
        assert client.link == 1, "the connection broke"


def test_an_error_states_whether_the_request_still_runs(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        asked = client.request(LOOKUP, 20)
        assert server.receive()[1].correlation == asked.id
        # The connection breaks, and the request is sent again: `busy` then does not cover the first sending.
        server.close()
        server.open()
        peer, envelope = server.receive()
        assert envelope.correlation == asked.id
        server.say(peer, Kind.ERROR, asked.id, wire.Error(Code.BUSY, "too many requests wait", True))
        failure = ended(asked).failure
        assert failure is not None
        assert (failure.code, failure.reported, failure.over) == (Code.BUSY, True, False)
        asked = client.request(LOOKUP, 20)
        peer, envelope = server.receive()
        server.say(peer, Kind.ERROR, asked.id, wire.Error(Code.COPY_FAILED, "it failed", True, over=True))
        failure = ended(asked).failure
        assert failure is not None
        assert failure.over


def test_a_request_without_a_listener_fails_at_its_deadline(directory: Path) -> None:
    with talking(directory) as client:
        begun = time.monotonic()
        failure = ended(client.request(LOOKUP, 0.2, grace_s=0.1)).failure
        assert failure is not None
        assert (failure.code, failure.reported) == (Code.DEADLINE, False)
        assert 0.3 <= time.monotonic() - begun < TIMEOUT_S
        assert "no process listens" in client.problem
        assert not client.listening


def test_an_unanswered_request_is_sent_again_under_its_id(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        kept = client.request(LOOKUP, TIMEOUT_S)
        bound = client.request(LOOKUP, TIMEOUT_S, link=client.link)
        link = client.link
        assert [server.receive()[1].correlation for _ in range(2)] == [kept.id, bound.id]
        server.close()
        failure = ended(bound).failure
        assert failure is not None
        assert not failure.over, "the request may have been carried out"
        server.open()
        peer, envelope = server.receive()
        assert envelope.correlation == kept.id
        server.say(peer, Kind.LOOKUP_ANSWER, kept.id, FOUND)
        assert ended(kept).answer == FOUND
        assert client.link > link
        stale = ended(client.request(LOOKUP, TIMEOUT_S, link=link)).failure
        assert stale is not None
        assert stale.over, "the request was never sent"


def test_a_send_over_a_lost_connection_does_not_block(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket without a peer takes no message: a send must not wait for a peer."""
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        monkeypatch.setattr(Connection, "gone", lambda connection: False)
        server.close()
        questions = []

        def noticed() -> bool:
            questions.append(client.request(LOOKUP, 2 * TIMEOUT_S))
            return not client.listening

        eventually("the loss is noticed", noticed)
        server.open()
        for pending in questions:
            peer, envelope = server.receive()
            assert envelope.correlation == pending.id
            server.say(peer, Kind.LOOKUP_ANSWER, pending.id, FOUND)
        assert all(ended(pending).answer == FOUND for pending in questions)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80\x80", b"\xff" * 100, b"\x81\xa9hit_pages\xa1x"])
def test_an_answer_that_cannot_be_read_ends_its_request_alone(directory: Path, garbage: bytes) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        first, second = (client.request(LOOKUP, TIMEOUT_S) for _ in range(2))
        peer, _ = server.receive()
        assert server.receive()[1].correlation == second.id
        server.say(peer, Kind.LOOKUP_ANSWER, first.id, garbage)
        failure = ended(first).failure
        assert failure is not None
        assert (failure.code, failure.over) == (Code.INTERNAL, False)
        # The same connection.
        server.say(peer, Kind.LOOKUP_ANSWER, second.id, FOUND)
        assert ended(second).answer == FOUND


@pytest.mark.parametrize("parts", [[b"\xff" * 32, b"\x80"], [b"KVFY", b"\x80"], [b""]])
def test_bytes_that_are_no_message_break_only_the_connection(directory: Path, parts: list[bytes]) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        pending = client.request(LOOKUP, TIMEOUT_S)
        peer, _ = server.receive()
        server.socket.send_multipart([peer, *parts])
        peer, envelope = server.receive()
        assert envelope.correlation == pending.id
        server.say(peer, Kind.LOOKUP_ANSWER, pending.id, FOUND)
        assert ended(pending).answer == FOUND


@pytest.mark.parametrize("length", [1 << 62, wire.BODY_BYTES_MAX + 1])
def test_a_frame_that_claims_to_be_too_long_breaks_only_the_connection(directory: Path, length: int) -> None:
    """Before memory is allocated for it."""
    path = directory / SOCKET_NAME
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as hostile:
        hostile.bind(os.fspath(path))
        hostile.listen(8)
        hostile.settimeout(TIMEOUT_S)
        with talking(directory) as client:
            pending = client.request(LOOKUP, TIMEOUT_S)
            for _ in range(3):
                with RawPeer(hostile.accept()[0], b"ROUTER") as peer:
                    peer.receive_parts()
                    peer.write(struct.pack(">BQ", LONG | MORE, length) + bytes(100))
                    sent_at = time.monotonic()
                    with pytest.raises(Closed):
                        peer.receive_parts()
                    assert time.monotonic() - sent_at < 1.5, "a client without a welcome closes after 2 s"
            hostile.close()
            path.unlink()
            server = Fake(directory)
            peer, envelope = server.receive()
            server.say(peer, Kind.LOOKUP_ANSWER, envelope.correlation, FOUND)
            assert ended(pending).answer == FOUND


def test_an_answer_that_comes_late_or_twice_ends_nothing_else(directory: Path) -> None:
    """Nor does it change what the caller knows: a late answer is dropped."""
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        link = client.link
        late = client.request(LOOKUP, 0.05)
        peer, _ = server.receive()
        assert ended(late).failure.code == Code.DEADLINE
        for _ in range(2):
            server.say(peer, Kind.LOOKUP_ANSWER, late.id, FOUND)
        asked = client.request(LOOKUP, 20)
        server.receive()
        for pages in (2, 7):
            server.say(peer, Kind.LOOKUP_ANSWER, asked.id, wire.LookupAnswer(pages))
        server.say(peer, Kind.ERROR, asked.id, wire.Error(Code.BUSY, "busy"))
        last = client.request(LOOKUP, 20)
        assert server.receive()[1].correlation == last.id
        server.say(peer, Kind.LOOKUP_ANSWER, last.id, FOUND)
        assert ended(last).answer == FOUND
        assert (asked.answer, asked.failure) == (wire.LookupAnswer(2), None)
        assert (late.answer, late.failure.code) == (None, Code.DEADLINE)
        assert client.link == link


def test_a_leader_that_never_answers_delays_no_request_beyond_its_time(directory: Path) -> None:
    server = Fake(directory, heartbeat_ms=20_000)
    with talking(directory) as client:
        server.greet(client)
        requests = [client.request(LOOKUP, 0.1 + number / 100, grace_s=0.1) for number in range(40)]
        for pending in requests:
            assert ended(pending).failure.code == Code.DEADLINE
            assert 0 <= pending.ended_at - pending.expires < 1
        assert client.open_requests == (0, 40), "their credits are used until they are answered"
        assert all(pending.pages_in_use for pending in requests)


def test_pages_are_in_use_until_an_answer_or_an_error_with_over(directory: Path) -> None:
    load = wire.Load(1, [wire.part(0, [3])])
    server = Fake(directory)
    with talking(directory) as client:
        ends = [
            (Kind.LOAD_ANSWER, wire.LoadAnswer(0), False),
            (Kind.ERROR, wire.Error(Code.COPY_FAILED, "failed", over=True), False),
            (Kind.ERROR, wire.Error(Code.BUSY, "busy", retry=True), True),
            (Kind.LOOKUP_ANSWER, FOUND, True),
        ]
        for kind, body, in_use in ends:
            pending = client.request(load, TIMEOUT_S)
            peer, envelope = server.receive()
            assert pending.pages_in_use
            server.say(peer, kind, envelope.correlation, body)
            assert ended(pending).pages_in_use is in_use
        again = client.request(load, TIMEOUT_S, identity=pending.id)
        peer, envelope = server.receive()
        assert envelope.correlation == pending.id
        server.say(peer, Kind.LOAD_ANSWER, pending.id, wire.LoadAnswer(1))
        assert not ended(again).pages_in_use


@WITH_A_THREAD
def test_a_header_of_another_length_or_magic_is_no_message() -> None:
    good = wire.header(2, Kind.PONG, 1, 0, 0)
    for parts in ([], [good], [good, b"\x80", b""], [good[:-1], b"\x80"], [b"X" + good[1:], b"\x80"]):
        with pytest.raises(wire.Malformed):
            wire.read(parts)


def test_unknown_messages_end_neither_the_connection_nor_a_request(directory: Path) -> None:
    """A server may be newer: ids of its requests are independent of ours, and its unknown answers are ignored."""
    server = Fake(directory)
    with talking(directory) as client:
        pending = client.request(LOOKUP, 20)
        peer, envelope = server.receive()
        link = client.link
        unknown_requests, unknown_answers = (998, Kind.LOOKUP), (999, 63)
        for kind in (*unknown_answers, *unknown_requests):
            server.say(peer, kind, pending.id, b"\xc1")
        for _ in unknown_requests:
            refused = server.receive_refusal()
            assert (refused.correlation, refused.body.code) == (pending.id, Code.UNKNOWN_KIND)
        assert not pending.done
        server.say(peer, Kind.PING, pending.id, wire.Empty())
        assert server.receive()[1].kind == Kind.PONG
        server.say(peer, Kind.LOOKUP_ANSWER, envelope.correlation, FOUND)
        assert ended(pending).answer == FOUND
        assert client.link == link


def test_unknown_required_bits_are_refused(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        pending = client.request(LOOKUP, 20)
        peer, _ = server.receive()
        link = client.link
        for kind in (Kind.PING, Kind.LOOKUP_ANSWER):
            head = bytearray(wire.header(2, kind, pending.id, 0, 0))
            head[20:24] = b"\x00\x01\xff\xff"
            server.socket.send_multipart([peer, bytes(head), wire.body_of(FOUND)])
        assert server.receive_refusal().body.code == Code.UNSUPPORTED
        failure = ended(pending).failure
        assert failure is not None
        assert not failure.reported, "whatever that was, nobody knows how the request ended"
        assert client.link == link


@WITH_A_THREAD
def test_unknown_optional_bytes_of_the_header_are_skipped() -> None:
    head = bytearray(wire.header(2, Kind.LOOKUP_ANSWER, 1, 0, 0))
    head[22:24] = b"\xff\xff"
    assert wire.read([bytes(head), wire.body_of(FOUND)]).body == FOUND


def test_a_version_that_was_not_offered_is_refused_with_the_reason(directory: Path) -> None:
    server = Fake(directory, version=3)
    with talking(directory) as client:

        def refused() -> bool:
            if server.socket.poll(0):
                peer, *_ = server.socket.recv_multipart()
                server.say(peer, Kind.WELCOME, 0, wire.Welcome(**server.welcome))
            return "has chosen version 3, this side supports 1 to 2" in client.problem

        eventually("the reason is logged", refused)
        assert not client.listening


def test_a_leader_that_refuses_the_version_is_asked_again(directory: Path) -> None:
    """Until another one listens: an update of kvferry beside a running engine."""
    server = Fake(directory)
    with talking(directory) as client:
        pending = client.request(LOOKUP, TIMEOUT_S)
        refusal = wire.Error(Code.UNSUPPORTED_VERSION, "this side supports 8 to 9: update the client")

        def refused() -> bool:
            if server.socket.poll(0):
                peer, *_ = server.socket.recv_multipart()
                server.say(peer, Kind.ERROR, 0, refusal)
            return "this side supports 8 to 9" in client.problem

        eventually("the reason is known", refused)
        assert (client.listening, pending.done) == (False, False)
        peer, envelope = server.receive()
        server.say(peer, Kind.LOOKUP_ANSWER, envelope.correlation, FOUND)
        assert ended(pending).answer == FOUND
        assert client.problem == ""


def test_a_silent_connection_counts_as_lost(directory: Path) -> None:
    server = Fake(directory, heartbeat_ms=20)
    with talking(directory) as client:
        eventually(
            "a welcome", lambda: client.listening or (server.socket.poll(0) and server.receive(pings=True) and False)
        )
        link = client.link
        eventually("the connection is lost", lambda: client.link != link)
        assert "silent for three heartbeats" in client.problem


def test_a_client_that_only_listens_pings(directory: Path) -> None:
    """Answers arrive for ten seconds while the client sends no request: a server closes a client that sends nothing."""
    server = Fake(directory, heartbeat_ms=1000)
    with talking(directory) as client:
        server.greet(client)
        link = client.link
        questions = [client.request(LOOKUP, 60) for _ in range(40)]
        asked = [server.receive() for _ in questions]
        said, longest_s = time.monotonic(), 0.0
        for peer, envelope in asked:
            server.say(peer, Kind.LOOKUP_ANSWER, envelope.correlation, FOUND)
            until = time.monotonic() + 0.25
            while (left_s := until - time.monotonic()) > 0:
                if server.socket.poll(left_s * 1000):
                    server.receive(pings=True)
                    server.say(peer, Kind.PONG, 0, wire.Empty())
                    said = time.monotonic()
                longest_s = max(longest_s, time.monotonic() - said)
        assert longest_s < 3, f"the client sent nothing for {longest_s:.1f} s"
        assert all(ended(pending).answer == FOUND for pending in questions)
        assert client.link == link


def test_a_client_stays_within_its_credits(directory: Path) -> None:
    server = Fake(directory, request_credits=2)
    with talking(directory) as client:
        questions = [client.request(LOOKUP, TIMEOUT_S) for _ in range(5)]
        received = [server.receive() for _ in range(2)]
        assert not server.socket.poll(100), "at most two requests may wait"
        for left in (3, 2, 1, 0, 0):
            peer, envelope = received.pop(0)
            server.say(peer, Kind.LOOKUP_ANSWER, envelope.correlation, FOUND)
            if left:
                received.append(server.receive())
        assert all(ended(pending).answer == FOUND for pending in questions)


def test_a_request_uses_its_credit_until_it_is_answered(directory: Path) -> None:
    server = Fake(directory, request_credits=2)
    with talking(directory) as client:
        late = [client.request(LOOKUP, 0.05) for _ in range(2)]
        received = [server.receive() for _ in late]
        assert all(ended(pending).failure.code == Code.DEADLINE for pending in late)
        waiting = client.request(LOOKUP, 20)
        assert not server.socket.poll(100), "the server still counts two requests"
        peer, envelope = received[0]
        server.say(peer, Kind.LOOKUP_ANSWER, envelope.correlation, FOUND)
        peer, envelope = server.receive()
        assert envelope.correlation == waiting.id
        server.say(peer, Kind.LOOKUP_ANSWER, waiting.id, FOUND)
        assert ended(waiting).answer == FOUND


def test_an_urgent_request_overtakes_requests_that_wait_for_credits(directory: Path) -> None:
    server = Fake(directory, request_credits=128)
    with talking(directory) as client:
        questions = [client.request(LOOKUP, 20) for _ in range(200)]
        received = [server.receive() for _ in range(126)]
        assert not server.socket.poll(100), "the other requests wait"
        urgent = client.request(wire.CancelStores(), 20, urgent=True)
        peer, envelope = server.receive()
        assert (envelope.kind, envelope.correlation) == (Kind.CANCEL_STORES, urgent.id)
        server.say(peer, Kind.CANCEL_STORES_ANSWER, urgent.id, wire.CancelStoresAnswer(3))
        assert ended(urgent).answer == wire.CancelStoresAnswer(3)
        for number in range(200):
            peer, envelope = received[number]
            server.say(peer, Kind.LOOKUP_ANSWER, envelope.correlation, FOUND)
            if len(received) < 200:
                received.append(server.receive())
        assert all(ended(pending).answer == FOUND for pending in questions)


def test_the_time_in_the_queue_is_known(directory: Path) -> None:
    server = Fake(directory, request_credits=1)
    with talking(directory) as client:
        first = client.request(LOOKUP, 20)
        peer, _ = server.receive()
        second = client.request(LOOKUP, 20)
        assert (first.took_s, second.queued_s) == (None, None)
        assert not server.socket.poll(100), "the second one waits"
        assert client.open_requests == (1, 1)
        for pending in (first, second):
            server.say(peer, Kind.LOOKUP_ANSWER, pending.id, FOUND)
            ended(pending)
            if pending is first:
                server.receive()
        assert client.open_requests == (0, 0)
        assert 0 <= first.queued_s <= first.took_s
        assert 0.1 <= second.queued_s <= second.took_s


def test_a_directory_that_others_can_reach_is_refused(directory: Path) -> None:
    Fake(directory)
    directory.chmod(0o755)
    with talking(directory) as client:
        eventually("the reason is logged", lambda: "chmod 700" in client.problem)
        assert not client.listening


def test_what_is_opened_through_a_directory_lies_in_the_one_that_was_checked(directory: Path) -> None:
    """Whoever can write to a directory above can put another one in its place after the check."""
    (directory / "file").write_text("own")
    opened = open_directory(directory)
    directory.rename(directory.with_name("moved"))
    directory.mkdir()
    (directory / "file").write_text("another's")
    assert Path(inside(opened, "file")).read_text() == "own"
    os.close(opened)


def test_closing_ends_every_request(directory: Path) -> None:
    with talking(directory) as client:
        pending = client.request(LOOKUP, 60)
        client.close()
        failure = ended(pending).failure
        assert isinstance(failure, Failure)
        late = ended(client.request(LOOKUP, 60)).failure
        assert isinstance(late, Failure)
        for each in (failure, late):
            assert (each.code, each.reported, each.retry, each.over) == (Code.DRAINING, False, False, True)


def test_closing_leaves_pages_in_use_of_a_request_that_was_sent(directory: Path) -> None:
    server = Fake(directory)
    with talking(directory) as client:
        server.greet(client)
        pending = client.request(LOOKUP, 60)
        server.receive()
        client.close()
        failure = ended(pending).failure
        assert failure is not None
        assert (failure.code, failure.retry, failure.over) == (Code.DRAINING, False, False)


@WITH_A_THREAD
def test_turn_is_called_on_events_and_at_its_time(directory: Path) -> None:
    turns: list[float] = []

    def turn() -> float:
        turns.append(time.monotonic())
        return turns[-1] + 0.05

    with talking(directory, turn=turn):
        eventually("some turns", lambda: len(turns) > 10)


@WITH_A_THREAD
def test_turn_is_called_at_its_time_while_a_peer_sends_no_welcome(directory: Path) -> None:
    """And no more often: a time that has passed must not be waited for again and again."""
    turns: list[float] = []

    def turn() -> float:
        turns.append(time.monotonic())
        return turns[-1] + 0.05

    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.bind(f"ipc://{directory / SOCKET_NAME}")
        with talking(directory, turn=turn) as client:
            eventually("the client waits for the welcome", lambda: silent.poll(0))
            first = len(turns)
            begun, busy = time.monotonic(), time.process_time()
            eventually("some turns", lambda: len(turns) > first + 10)
            assert time.monotonic() - begun < 1.5, "less than the wait for a welcome"
            assert time.process_time() - busy < 0.5
            assert not client.listening


def test_a_client_reconnects_to_a_restarted_leader() -> None:
    with running(ranks=1) as daemon, talking(daemon.socket_dir / "leader") as client:
        failure = ended(client.request(LOOKUP, TIMEOUT_S)).failure
        assert failure is not None
        assert (failure.code, failure.over) == (Code.NOT_READY, True)
        first, epoch = client.link, client.epoch
        daemon.killed(daemon.leader)
        eventually("another leader", lambda: client.link > first)
        assert client.epoch > epoch
        assert ended(client.request(LOOKUP, TIMEOUT_S)).failure is not None


@WITH_A_THREAD
def test_consecutive_pages_are_encoded_as_runs() -> None:
    assert wire.runs([3, 5, 6, 7, 9, 8]) == [3, [5, 3], 9, 8]
    assert wire.runs([]) == []
