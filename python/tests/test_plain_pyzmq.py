"""Every pattern of sockets that kvferry uses, with pyzmq and msgpack alone at the other side.

`docs/clients.md` lists the patterns. An engine and its rank are in `examples/connector.py`. The package stores pages of
which events tell, and takes no other part.
"""

import contextlib
import itertools
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually, running
from test_merged_events import END, NAMESPACE, FakeEngine, Merged, Stores, number_of, port, stored
from vllm.distributed.kv_events import BlockStored, EventBatch, KVEventBatch, ZmqEventPublisher

HEADER = struct.Struct(">4sHHQIHHQ")
HELLO, WELCOME, ERROR, PING, PONG, EVENTS_READ, STATUS, MEASURE, PROBE = 1, 2, 3, 4, 5, 30, 64, 68, 70
GOLDEN = Path(__file__).parents[2] / "schema" / "golden" / "v2"


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(ranks=1, g2="64MiB") as daemon:
        yield daemon


def socket_of(context: zmq.Context, kind: int, endpoint: str | Path) -> zmq.Socket:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
    made.setsockopt(zmq.SNDTIMEO, int(TIMEOUT_S * 1000))
    made.connect(f"ipc://{endpoint}" if isinstance(endpoint, Path) else endpoint)
    return made


class Peer:
    """A DEALER that is connected to a leader or a worker."""

    def __init__(self, context: zmq.Context, directory: Path, role: str):
        self.socket = socket_of(context, zmq.DEALER, directory / "kvferry.sock")
        self._ids = itertools.count(1)
        hello = {"version_min": 1, "version_max": 2, "role": role, "engine": os.urandom(16)}
        self.kind, self.welcome = self.ask(HELLO, hello, version=1)

    def ask(self, kind: int, body: dict[str, Any], version: int = 2) -> tuple[int, dict[str, Any]]:
        number = next(self._ids)
        head = HEADER.pack(b"KVFY", version, kind, number, 5000, 0, 0, 0)
        self.socket.send_multipart([head, msgpack.packb(body)])
        while True:
            head, answer = self.socket.recv_multipart()
            magic, _, found, to, *_ = HEADER.unpack(head)
            assert magic == b"KVFY"
            if found == PING:
                self.socket.send_multipart([HEADER.pack(b"KVFY", 2, PONG, to, 0, 0, 0, 0), b"\x80"])
            elif to == number:
                return found, msgpack.unpackb(answer)


# Leader and workers: DEALER.


def test_a_dealer_is_an_operator_of_a_leader(context: zmq.Context, daemon: Daemon) -> None:
    peer = Peer(context, daemon.socket_dir / "leader", "admin")
    assert (peer.kind, peer.welcome["version"]) == (WELCOME, 2)
    kind, status = peer.ask(STATUS, {})
    assert (kind, len(status["ranks"])) == (STATUS + 1, 1)
    kind, events = peer.ask(EVENTS_READ, {"epoch": 0, "from": 0, "most": 10, "cursor": 0})
    assert (kind, events["epoch"], events["lost"]) == (EVENTS_READ + 1, status["epoch"], True)
    for kind in (MEASURE, PROBE):
        assert peer.ask(kind, {})[0] == kind + 1
    kind, error = peer.ask(998, {})
    assert (kind, error["code"]) == (ERROR, 3)


def test_a_dealer_is_an_operator_of_a_worker(context: zmq.Context, daemon: Daemon) -> None:
    peer = Peer(context, daemon.socket_dir / "worker-0-0", "admin")
    assert peer.kind == WELCOME
    for kind in (MEASURE, PROBE):
        assert peer.ask(kind, {})[0] == kind + 1


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.SUB, zmq.PULL, zmq.ROUTER, zmq.PAIR], ids=lambda each: each.name)
def test_another_socket_gets_no_answer_and_keeps_no_dealer_out(
    context: zmq.Context, daemon: Daemon, kind: zmq.SocketType
) -> None:
    other = socket_of(context, kind, daemon.socket_dir / "leader" / "kvferry.sock")
    if kind == zmq.SUB:
        other.subscribe(b"")
    body = msgpack.packb({"version_min": 1, "version_max": 2, "role": "admin", "engine": bytes(16)})
    if kind in (zmq.REQ, zmq.PAIR):
        with contextlib.suppress(zmq.Again):
            other.send_multipart([HEADER.pack(b"KVFY", 1, HELLO, 1, 5000, 0, 0, 0), body], zmq.NOBLOCK)
    assert not other.poll(500)
    assert Peer(context, daemon.socket_dir / "leader", "admin").kind == WELCOME


# The clients of kvferry: their leader is a ROUTER.


def bind(context: zmq.Context, socket_dir: Path) -> zmq.Socket:
    (socket_dir / "leader").mkdir(parents=True, mode=0o700)
    socket_dir.chmod(0o700)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
    router.bind(f"ipc://{socket_dir}/leader/kvferry.sock")
    return router


def received(router: zmq.Socket, wanted: int) -> tuple[bytes, int, dict[str, Any]]:
    """Answers hellos and pings until a message of this kind arrives; returns its sender, id and body."""
    welcome = {"version": 2, "heartbeat_ms": 1000, "request_credits": 64, "byte_credits": 1 << 20}
    while True:
        peer, head, body = router.recv_multipart()
        _, _, kind, number, *_ = HEADER.unpack(head)
        if kind == wanted:
            return peer, number, msgpack.unpackb(body)
        if kind == HELLO:
            answer(router, peer, WELCOME, number, msgpack.packb(welcome), 1)
        elif kind == PING:
            answer(router, peer, PONG, number, b"\x80")


def answer(router: zmq.Socket, peer: bytes, kind: int, number: int, body: bytes, version: int = 2) -> None:
    router.send_multipart([peer, HEADER.pack(b"KVFY", version, kind, number, 0, 0, 0, 7), body])


def test_a_router_is_the_leader_of_a_command(context: zmq.Context, tmp_path: Path) -> None:
    router = bind(context, tmp_path / "s")
    command = [PROGRAM, "status", "--json", "--socket-dir", str(tmp_path / "s")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as status:
        peer, number, _ = received(router, STATUS)
        body = bytes.fromhex((GOLDEN / "status_answer.hex").read_text().split()[1])
        answer(router, peer, STATUS + 1, number, body)
        out, errors = status.communicate(timeout=TIMEOUT_S)
    assert status.returncode == 0, errors
    assert json.loads(out)["version"] == msgpack.unpackb(body)["version"]


def test_a_router_is_the_leader_of_a_worker(context: zmq.Context, tmp_path: Path) -> None:
    router = bind(context, tmp_path / "s")
    flags = ["--socket-dir", str(tmp_path / "s"), "--rank", "0", "--g2", "16MiB"]
    worker = subprocess.Popen([PROGRAM, "worker", *flags], env=environment(), stdin=subprocess.DEVNULL)
    try:
        _, _, attach = received(router, 48)
        assert (attach["replica"], attach["rank"], attach["ranks"]) == (0, 0, 1)
    finally:
        worker.terminate()
        assert worker.wait(TIMEOUT_S) == 0


# `kvferry events`: SUB, DEALER and REQ at its streams; PUB and ROUTER as its source.


class Subscriber:
    """A SUB socket at the merged stream."""

    def __init__(self, context: zmq.Context, command: Merged, topic: bytes = b""):
        self.socket = socket_of(context, zmq.SUB, f"tcp://127.0.0.1:{command.port}")
        self.socket.subscribe(topic)
        self.batches: dict[int, list[Any]] = {}

    def read(self) -> dict[int, list[Any]]:
        while self.socket.poll(20):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"topic"
            self.batches[int.from_bytes(number, "big")] = msgpack.unpackb(payload)
        return self.batches

    def media(self) -> dict[str, set[int]]:
        """The numbers of the pages of each medium."""
        found: dict[str, set[int]] = {}
        for _, batch in sorted(self.read().items()):
            for event in batch[1]:
                pages = found.setdefault(event["medium"], set())
                (pages.update if event["type"] == "BlockStored" else pages.difference_update)(event["block_hashes"])
        return {medium: pages for medium, pages in found.items() if pages}


@pytest.fixture
def merged(context: zmq.Context, daemon: Daemon) -> Iterator[tuple[FakeEngine, Merged]]:
    source = FakeEngine(context, port(), port())
    command = Merged(daemon.socket_dir, source, namespace=NAMESPACE.hex())
    try:
        source.subscribed()
        yield source, command
    finally:
        command.stop()
        source.close()


def published(source: FakeEngine, reader: Subscriber, pages: int) -> None:
    """Publishes pages, each in a batch, that the subscriber receives."""
    first = len(source.batches)
    for page in range(first, first + pages):
        source.publish(stored(page, 1))

    def all_there() -> bool:
        source.answer_replays()
        return {number_of(page) for page in range(first, first + pages)} <= reader.media().get("GPU", set())

    eventually("all batches are published", all_there)


def test_a_sub_receives_batches_and_a_topic_chooses_them(
    context: zmq.Context, merged: tuple[FakeEngine, Merged]
) -> None:
    source, command = merged
    all_, none = Subscriber(context, command, b"top"), Subscriber(context, command, b"another")
    first = Subscriber(context, command)

    def subscribed() -> bool:
        source.publish(stored(len(source.batches), 1))
        return bool(all_.read() and first.read())

    eventually("the subscriptions have arrived", subscribed)
    published(source, all_, 3)
    assert none.read() == {}
    numbers = sorted(all_.batches)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def replayed(socket: zmq.Socket, first: int, *, dealer: bool) -> list[tuple[int, bytes]]:
    """Requests the batches from a number on, and reads what a socket of this kind can."""
    socket.send_multipart([*([b""] if dealer else []), first.to_bytes(8, "big")])
    found = []
    while True:
        parts = socket.recv_multipart()
        if dealer:
            assert parts.pop(0) == b""
        topic, number, payload = parts
        if int.from_bytes(number, "big") == END:
            assert payload == b""
            return found
        assert topic == b"topic"
        found.append((int.from_bytes(number, "big"), payload))
        if not dealer:
            return found


def test_a_dealer_gets_a_replay_and_a_req_gets_it_batch_by_batch(
    context: zmq.Context, merged: tuple[FakeEngine, Merged]
) -> None:
    source, command = merged
    reader = Subscriber(context, command)

    def subscribed() -> bool:
        source.publish(stored(len(source.batches), 1))
        return bool(reader.read())

    eventually("the subscription has arrived", subscribed)
    published(source, reader, 4)
    endpoint = f"tcp://127.0.0.1:{command.replay_port}"
    whole = replayed(socket_of(context, zmq.DEALER, endpoint), 0, dealer=True)
    assert len(whole) >= 4
    assert {number: msgpack.unpackb(payload) for number, payload in whole}.items() >= reader.batches.items()
    last = whole[-2][0]
    assert replayed(socket_of(context, zmq.DEALER, endpoint), last, dealer=True) == whole[-2:]
    # A REQ takes the first answer alone. The others would be taken as answers to its next request.
    found, next_one = [], 0
    while batch := replayed(socket_of(context, zmq.REQ, endpoint), next_one, dealer=False):
        found += batch
        next_one = batch[0][0] + 1
    assert found == whole
    # The stream goes on.
    published(source, reader, 2)


class Vllm:
    """vLLM's own publisher, as `kvferry events` sees it."""

    def __init__(self) -> None:
        live, replay = port(), port()
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}"
        # vLLM's publisher binds addresses with a star, and connects to others.
        self.publisher = ZmqEventPublisher(0, endpoint=f"tcp://*:{live}", replay_endpoint=f"tcp://*:{replay}")

    def publish(self, page: int) -> None:
        event = stored(page, 1)
        del event["type"]
        self.publisher.publish(KVEventBatch(ts=1.5, events=[BlockStored(**event)]))


def test_the_publisher_of_vllm_is_a_source_with_a_replay(context: zmq.Context, daemon: Daemon) -> None:
    source = Vllm()
    # Published before `kvferry events` listens: they come by the replay.
    for page in range(3):
        source.publish(page)
    command = Merged(daemon.socket_dir, source, namespace=NAMESPACE.hex())  # type: ignore[arg-type]
    stores = Stores(daemon)
    try:
        reader, count = Subscriber(context, command), itertools.count(3)

        def subscribed() -> bool:
            source.publish(next(count))
            return bool(reader.read())

        eventually("the streams are joined", subscribed)
        late = dict(replayed(socket_of(context, zmq.DEALER, f"tcp://127.0.0.1:{command.replay_port}"), 0, dealer=True))
        announced = {
            each for payload in late.values() for event in msgpack.unpackb(payload)[1] for each in event["block_hashes"]
        }
        assert {number_of(page) for page in range(3)} <= announced
        stores.store(0, 1)
        wanted = {number_of(page) for page in (0, 1)}
        eventually("the pages in kvferry are announced", lambda: reader.media().get("CPU") == wanted)
    finally:
        stores.close()
        source.publisher.shutdown()
        command.stop()
    assert issubclass(KVEventBatch, EventBatch)
