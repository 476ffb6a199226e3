"""The sockets of ``kvferry events`` with libzmq, and with peers that break its rules."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from daemon import TIMEOUT_S, eventually
from test_merged_events import END, FakeEngine, Merged, Router, joined, port, stored
from zmq.utils.monitor import recv_monitor_message

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


def ready(socket_type: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return b"\x04" + bytes([len(body)]) + body


#: What ended the process before, after a greeting and after a handshake: a frame that claims 2^62 bytes.
CLAIMS = [bytes([flags]) + (1 << 62).to_bytes(8, "big") for flags in (2, 3, 6)]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(0)


@contextlib.contextmanager
def published(context: zmq.Context, folder: Path) -> Iterator[tuple[FakeEngine, Merged, Router]]:
    """The command, without a leader: the engine's own events pass through."""
    engine = FakeEngine(context, port(), port())
    command = Merged(folder, engine)
    router = Router(context, command.port, engine)
    try:
        engine.subscribed()
        joined(router, engine)
        yield engine, command, router
        assert command.process.poll() is None, "the command has ended"
    finally:
        command.process.kill()
        command.process.wait(TIMEOUT_S)
        if command.process.stdout is not None:
            command.process.stdout.close()
        router.close()
        engine.close()


def serves(engine: FakeEngine, router: Router) -> None:
    numbers = len(router.numbers)
    engine.publish(stored(1, 1))
    eventually("the router reads on", lambda: len(router.read().numbers) > numbers)


def closed(peer: socket.socket) -> None:
    """Waits until the other side has closed a connection."""
    peer.settimeout(TIMEOUT_S)
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(65536):
            pass


def test_claimed_lengths_and_half_handshakes_end_nothing(context: zmq.Context, tmp_path: Path) -> None:
    with published(context, tmp_path) as (engine, command, router), contextlib.ExitStack() as stack:
        for where, socket_type in ((command.port, b"SUB"), (command.replay_port, b"DEALER")):
            starts = [GREETING, GREETING + ready(socket_type)]
            for bytes_ in [*(start + claim for start in starts for claim in CLAIMS), b"GET / HTTP/1.1\r\n\r\n" * 9]:
                with socket.create_connection(("127.0.0.1", where)) as peer:
                    peer.sendall(bytes_)
                    closed(peer)
            for _ in range(200):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", where)))
                peer.sendall(GREETING)
        serves(engine, router)


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.XSUB])
def test_subscribers_of_libzmq_with_heartbeats_stay_connected(context: zmq.Context, tmp_path: Path, kind: int) -> None:
    with published(context, tmp_path) as (engine, command, _):
        subscriber = context.socket(kind)
        monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        subscriber.setsockopt(zmq.HEARTBEAT_IVL, 50)
        subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
        subscriber.connect(f"tcp://127.0.0.1:{command.port}")
        if kind == zmq.SUB:
            for topic in (b"top", b"topic", b"other"):
                subscriber.subscribe(topic)
            subscriber.unsubscribe(b"top")
        else:
            subscriber.send(b"\x01top")

        def reads() -> bool:
            engine.publish(stored(2, 1))
            return bool(subscriber.poll(50))

        eventually("it reads", reads)
        # Several times as long as a heartbeat, in which nothing is published.
        assert not monitor.poll(1500), recv_monitor_message(monitor)
        while subscriber.poll(0):
            topic, number, payload = subscriber.recv_multipart()
            assert (topic, len(number), bool(payload)) == (b"topic", 8, True)
        if kind == zmq.SUB:
            subscriber.unsubscribe(b"topic")
        else:
            subscriber.send(b"\x00top")

        def silent() -> bool:
            while subscriber.poll(0):
                subscriber.recv_multipart()
            engine.publish(stored(3, 1))
            return not subscriber.poll(100)

        eventually("nothing is subscribed any longer", silent)
        subscriber.disable_monitor()
        monitor.close(0)
        subscriber.close(0)


def test_a_client_that_reads_no_replay_does_not_delay_the_stream(context: zmq.Context, tmp_path: Path) -> None:
    with published(context, tmp_path) as (engine, command, router):
        # More than the buffers between both sides have room for.
        for page in range(60):
            engine.publish({**stored(page, 1), "token_ids": [1 << 30] * 100_000, "block_size": 100_000})
        eventually("all are published", lambda: router.read().held.get("GPU", set()) >= set(range(60)))
        mute = context.socket(zmq.DEALER)
        mute.setsockopt(zmq.RCVHWM, 1)
        mute.connect(f"tcp://127.0.0.1:{command.replay_port}")
        for _ in range(50):
            mute.send_multipart([b"", bytes(8)])
        assert mute.poll(TIMEOUT_S * 1000), "it is answered"
        serves(engine, router)
        # Another one gets all of it meanwhile, also as REQ, which takes the first message as its answer.
        other, first = context.socket(zmq.DEALER), context.socket(zmq.REQ)
        for each in (other, first):
            each.connect(f"tcp://127.0.0.1:{command.replay_port}")
        first.send(bytes(8))
        assert first.poll(TIMEOUT_S * 1000)
        topic, number, _ = first.recv_multipart()
        assert topic == b"topic"
        other.send_multipart([b"", number])
        numbers = []
        while not numbers or numbers[-1] != END:
            assert other.poll(TIMEOUT_S * 1000)
            empty, topic, number, payload = other.recv_multipart()
            numbers.append(int.from_bytes(number, "big"))
            assert (empty, topic, bool(payload)) == (b"", *((b"", False) if numbers[-1] == END else (b"topic", True)))
        assert numbers[:-1] == list(range(numbers[0], numbers[0] + len(numbers) - 1))
        for each in (mute, other, first):
            each.close(0)
