"""``kvferry events``: a fake engine publishes, a real kvferry stores, and a router reads the merged stream."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
import torch
import zmq
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually, running

from kvferry import present_namespace
from kvferry.admin import AdminClient
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Part

ENGINE = b"e" * 16
PAGES = 64
PAGE_TOKENS = 8
NAMESPACE = b"the engine's namespace"
END = (1 << 64) - 1


def hash_of(page: int) -> bytes:
    return bytes([page]) * 8 + number_of(page).to_bytes(8, "big")


def number_of(page: int) -> int:
    return (page + 1) << 56 | 0xABCDEF


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def stored(first: int, count: int, medium: str | None = "GPU") -> dict[str, Any]:
    pages = range(first, first + count)
    return {
        "type": "BlockStored",
        "block_hashes": [number_of(page) for page in pages],
        "parent_block_hash": number_of(first - 1) if first else None,
        "token_ids": [page * 100 + at for page in pages for at in range(PAGE_TOKENS)],
        "block_size": PAGE_TOKENS,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def removed(*pages: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [number_of(page) for page in pages], "medium": medium}


class FakeEngine:
    """An engine's publisher, with numbers and replay as vLLM's."""

    def __init__(self, context: zmq.Context, port: int, replay_port: int):
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
        self.events, self.replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        # Shows each subscription, also where another peer has the same one.
        self.events.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.events.bind(self.endpoint)
        self.replay.bind(self.replay_endpoint)
        self.batches: list[bytes] = []
        self.requested: list[int] = []

    def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([1.5, list(events), 3])
        self.batches.append(payload)
        if not lost:
            self.events.send_multipart([b"", (len(self.batches) - 1).to_bytes(8, "big"), payload])

    def subscribed(self) -> None:
        """Waits for the subscriber."""
        subscribed = b""
        while subscribed != b"\x01":
            assert self.events.poll(TIMEOUT_S * 1000)
            subscribed = self.events.recv()

    def answer_replays(self) -> None:
        while self.replay.poll(0):
            peer, empty, start = self.replay.recv_multipart()
            first = int.from_bytes(start, "big")
            self.requested.append(first)
            for number, payload in enumerate(self.batches):
                if number >= first:
                    self.replay.send_multipart([peer, empty, b"", number.to_bytes(8, "big"), payload])
            self.replay.send_multipart([peer, empty, b"", END.to_bytes(8, "big"), b""])

    def close(self) -> None:
        self.events.close(0)
        self.replay.close(0)


class Router:
    """A subscriber: pages by medium, and the numbers of the batches."""

    def __init__(self, context: zmq.Context, port: int, engine: "FakeEngine | None" = None):
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.engine = engine
        self.held: dict[str | None, set[int]] = {}
        #: Media whose last page was removed at some time.
        self.emptied: set[str | None] = set()
        self.numbers: list[int] = []
        self.ranks: set[int | None] = set()

    def read(self) -> "Router":
        while self.socket.poll(10):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"topic"
            self.apply(int.from_bytes(number, "big"), payload)
        if self.engine is not None:
            self.engine.answer_replays()
        return self

    def apply(self, number: int, payload: bytes) -> None:
        if self.numbers:
            assert number > self.numbers[-1]
        self.numbers.append(number)
        _, events, rank = msgspec.msgpack.decode(payload)
        self.ranks.add(rank)
        for event in events:
            if isinstance(event, list):
                names = ("type", "block_hashes") if event[0] == "BlockRemoved" else ("type", "block_hashes", "parent")
                event = dict(zip(names, event, strict=False))
            pages = self.held.setdefault(event.get("medium"), set())
            numbers = {each >> 56 for each in event["block_hashes"]}
            if event["type"] == "BlockStored":
                pages |= {number - 1 for number in numbers}
            else:
                assert event["type"] == "BlockRemoved", event
                pages -= {number - 1 for number in numbers}
                if not pages:
                    self.emptied.add(event.get("medium"))

    def reaches(self, **media: set[int]) -> None:
        """Waits until these media have these pages, and the others none."""
        wanted = {medium if medium != "NONE" else None: pages for medium, pages in media.items()}

        def equal() -> bool:
            self.read()
            return {medium: pages for medium, pages in self.held.items() if pages} == wanted

        try:
            eventually("the router has these pages", equal)
        except AssertionError as error:
            raise AssertionError(f"{self.held} instead of {wanted}") from error

    def close(self) -> None:
        self.socket.close(0)


class Stores:
    """A scheduler and a rank that store pages."""

    def __init__(self, daemon: Daemon):
        self.tensor = torch.zeros(PAGES, 1, PAGE_TOKENS, 4)
        memory = KvMemory(
            [Group({"layer": self.tensor}, engine_page_tokens=PAGE_TOKENS, device_pages=PAGES)],
            Place(rank=0, tp_size=1, shard=0, content=b"test"),
        )
        self.rank = RankSession(daemon.socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
        self.engine = EngineClient(daemon.socket_dir / "leader", ENGINE, first_id=1, name="test")
        self.engine.start()
        self._slot = 0
        daemon.wait_ready()

    def store(self, *pages: int, namespace: bytes = NAMESPACE) -> None:
        self._slot += 1
        hashes = [hash_of(page) for page in pages]
        self._end(self.engine.lookup(self._slot, hashes, namespace=namespace, timeout_s=TIMEOUT_S))
        store = self.engine.store(self._slot, [Part(0, 0, list(pages))], timeout_s=TIMEOUT_S)
        self.rank.wrote(store.id)
        self._end(store)
        self._end(self.engine.finish(self._slot, timeout_s=TIMEOUT_S))

    def _end(self, pending: Any) -> None:
        assert pending.wait(TIMEOUT_S)
        assert pending.failure is None, pending.failure

    def close(self) -> None:
        self.engine.close()
        self.rank.close()


class Merged:
    """The command."""

    def __init__(self, socket_dir: Path, engine: FakeEngine, stderr: IO[bytes] | None = None, **settings: Any):
        self.port, self.replay_port = port(), port()
        self.stderr = stderr
        given = {
            "socket_dir": socket_dir,
            "engine": engine.endpoint,
            "engine_replay": engine.replay_endpoint,
            "publish": f"tcp://127.0.0.1:{self.port}",
            "replay": f"tcp://127.0.0.1:{self.replay_port}",
            "topic": "topic",
            **settings,
        }
        self.flags = [
            text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value)) if value != ""
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [PROGRAM, "events", *self.flags],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"publishing at ")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(TIMEOUT_S) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(0)


@contextlib.contextmanager
def merged(context: zmq.Context, daemon: Daemon, **settings: Any) -> Iterator[tuple[FakeEngine, Merged, Router]]:
    engine = FakeEngine(context, port(), port())
    command = Merged(daemon.socket_dir, engine, **settings)
    router = Router(context, command.port, engine)
    try:
        engine.subscribed()
        yield engine, command, router
    finally:
        command.process.kill()
        command.process.wait(TIMEOUT_S)
        if command.process.stdout is not None:
            command.process.stdout.close()
        router.close()
        engine.close()


def joined(router: Router, engine: FakeEngine) -> None:
    """Publishes until the router reads: a new subscription takes a moment."""

    def reads() -> bool:
        engine.publish(stored(60, 1))
        return bool(router.read().numbers)

    eventually("the router reads", reads)


def test_pages_of_both_are_announced_in_their_media(context: zmq.Context) -> None:
    with running(ranks=1) as daemon, merged(context, daemon) as (engine, _, router):
        stores = Stores(daemon)
        joined(router, engine)
        engine.publish(removed(60))
        # Pages whose tokens no event has named are not announced.
        present_namespace.write(daemon.socket_dir, 0, NAMESPACE)
        stores.store(0, 1, 2)
        stores.store(20, namespace=b"another namespace")
        engine.publish(stored(0, 2), stored(20, 1))
        router.reaches(GPU={0, 1, 20}, CPU={0, 1})
        engine.publish(stored(2, 1), removed(0, 1))
        router.reaches(GPU={2, 20}, CPU={0, 1, 2})
        engine.publish({"type": "AllBlocksCleared"})
        router.reaches(CPU={0, 1, 2})
        # Another namespace from now on, as after a change of weights.
        present_namespace.write(daemon.socket_dir, 0, b"another namespace")
        engine.publish(stored(20, 1))
        router.reaches(GPU={20}, CPU={20})
        with AdminClient(daemon.socket_dir / "leader", name="test") as admin:
            admin.reset(b"another namespace")
        router.reaches(GPU={20})
        assert router.ranks == {3}
        stores.close()


def test_a_gap_is_healed_and_a_restart_is_noticed(context: zmq.Context) -> None:
    with running(ranks=1) as daemon, merged(context, daemon) as (engine, command, router):
        joined(router, engine)
        engine.publish(stored(0, 3), lost=True)
        engine.publish(removed(1), lost=True)
        engine.publish(removed(60))
        router.reaches(GPU={0, 2})
        assert engine.requested, "the gap was not noticed"
        # The engine starts again, and its numbers from 0.
        engine.batches.clear()
        engine.publish(stored(10, 1))
        router.reaches(GPU={10})
        # The command starts again: subscribers see a gap, and the engine's replay restores its pages.
        before = router.numbers[-1]
        command.stop()
        command.start()
        engine.subscribed()
        late = Router(context, command.port, engine)

        def reads() -> bool:
            engine.publish(stored(11, 1))
            return bool(late.read().numbers)

        eventually("the router reads", reads)
        assert late.numbers[0] > before
        # The subscriber came late: the kept batches have the rest.
        again = Router(context, command.port)
        request = context.socket(zmq.DEALER)
        request.connect(f"tcp://127.0.0.1:{command.replay_port}")
        request.send_multipart([b"", bytes(8)])
        while True:
            assert request.poll(TIMEOUT_S * 1000)
            *_, number, payload = request.recv_multipart()
            if int.from_bytes(number, "big") == END:
                break
            again.apply(int.from_bytes(number, "big"), payload)
        assert again.held["GPU"] == {10, 11}
        for each in (late, again):
            each.close()
        request.close(0)


def test_routers_without_tiers_read_each_page_once(context: zmq.Context) -> None:
    with (
        running(ranks=1) as daemon,
        merged(context, daemon, mode="blind", shape="array", namespace=NAMESPACE.hex()) as (engine, _, router),
    ):
        stores = Stores(daemon)
        joined(router, engine)
        engine.publish(removed(60), stored(0, 3))
        router.reaches(NONE={0, 1, 2})
        stores.store(0, 1)
        engine.publish(removed(0, 1, 2))
        router.reaches(NONE={0, 1})
        engine.publish(stored(0, 1))
        with AdminClient(daemon.socket_dir / "leader", name="test") as admin:
            admin.reset(NAMESPACE)
        router.reaches(NONE={0})
        stores.close()


@pytest.mark.skipif(not os.environ.get("KVFERRY_VLLM_FULL"), reason="takes more than half a minute")
def test_a_replay_that_never_ends_does_not_count_as_an_absent_leader(context: zmq.Context) -> None:
    with running(ranks=1) as daemon, merged(context, daemon, namespace=NAMESPACE.hex()) as (engine, _, router):
        stores = Stores(daemon)
        joined(router, engine)
        stores.store(0, 1)
        engine.publish(stored(0, 2), removed(60))
        router.reaches(GPU={0, 1}, CPU={0, 1})
        numbers = len(router.numbers)
        # A gap, and a replay that sends one batch again and again: the command waits for its end until its limit.
        engine.publish(stored(2, 1), lost=True)
        engine.publish(removed(1))
        router.engine = None
        assert engine.replay.poll(TIMEOUT_S * 1000)
        peer, empty, start = engine.replay.recv_multipart()
        first = int.from_bytes(start, "big")
        until = time.monotonic() + 35
        while time.monotonic() < until and len(router.read().numbers) == numbers:
            engine.replay.send_multipart([peer, empty, b"", first.to_bytes(8, "big"), engine.batches[first]])
        assert len(router.numbers) > numbers, "the replay did not end"
        router.engine = engine
        # The engine's pages are removed, because its batches are missing. No page of kvferry was removed, not even for
        # a moment: a removal would be published before the page returns.
        engine.publish(stored(5, 1))
        router.reaches(GPU={5}, CPU={0, 1})
        assert "CPU" not in router.emptied
        stores.close()


def test_a_missing_file_of_the_namespace_is_told_once(context: zmq.Context, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(ranks=1) as daemon, log.open("wb") as stderr, merged(context, daemon, stderr=stderr):
        missing = "does not exist: no page in kvferry is announced: check --socket-dir and --replica"
        eventually("the log names the missing file", lambda: missing in log.read_text())
        assert log.read_text().count(missing) == 1


def test_a_signal_ends_the_wait_for_an_engine(tmp_path: Path) -> None:
    flags = ["--socket-dir", tmp_path, "--engine", f"tcp://127.0.0.1:{port()}", "--publish"]
    at = f"tcp://127.0.0.1:{port()}"
    command = [PROGRAM, "events", *map(str, flags), at, "--log", "info"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "waits until the engine publishes there" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0
    process.stderr.close()


def test_wrong_flags_are_refused() -> None:
    both = ["--engine", "tcp://a:1", "--publish", "tcp://b:1"]
    for flags, text in (
        (["--engine", "127.0.0.1:1"], "give tcp://HOST:PORT"),
        (["--engine", "tcp://127.0.0.1"], "with a port from 1 to 65535"),
        (["--engine", "tcp://127.0.0.1:0"], "with a port from 1 to 65535"),
        (["--engine", "tcp://127.0.0.1:1", "--publish", "tcp://*:1"], "tcp://0.0.0.0:PORT for every address"),
        ([*both, "--namespace", "xyz"], "hexadecimal"),
        ([*both, "--namespace", "00", "--groups", "1,1"], "different numbers"),
        ([*both, "--groups", "1"], "--namespace"),
    ):
        ended = subprocess.run([PROGRAM, "events", *flags], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert ended.returncode == 2
        assert text in ended.stderr
