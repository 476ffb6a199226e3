"""Tests of the thread of the KV events, of its two sinks, and of their settings."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import TIMEOUT_S, eventually
from engine import free_port
from fake_log import Block, FakeLog
from router import Router, Subscriber
from test_connector import config
from test_event_batches import FULL, request
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, ZmqEventPublisher

from kvferry.served import Served, StoreCursor
from kvferry.vllm import compat, connector, event_publisher, events
from kvferry.vllm.event_publisher import EventStream
from kvferry.vllm.events import KvEvents, StepQueue
from kvferry.vllm.settings import Settings
from kvferry.vllm.tracked import Tracked

NAMESPACE = b"the namespace of the engine     "


def tracked(asking: Any) -> Tracked:
    return Tracked(asking, 1, NAMESPACE, StoreCursor(Served.one(2, 1)))


def stored(number: int, place: int = 0, *, pages: int = 1, tier: int = 2) -> Block:
    hashes = tuple(request([number + at]).block_hashes[0][-16:] for at in range(pages))
    return Block(tier, NAMESPACE, 0, place, hashes)


class Log(FakeLog):
    """A log that answers by itself, on another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            with self.lock:
                self.turn()

    def request(self, *arguments: Any, **named: Any) -> Any:
        with self.lock:
            return super().request(*arguments, **named)

    def store(self, block: Block) -> None:
        with self.lock:
            super().store(block)

    def remove(self, block: Block) -> None:
        with self.lock:
            super().remove(block)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.stop()


@pytest.fixture
def running(log: Log) -> Iterator[KvEvents]:
    running = KvEvents([FULL], 2, StepQueue())
    running.start(log)
    running.follow([NAMESPACE])
    yield running
    running.close()
    assert not running._thread.is_alive()


def taken(running: KvEvents, router: Router, pages: int, medium: str = "CPU") -> None:
    """Takes events until the subscriber has this number of pages of a medium."""

    def enough() -> bool:
        router.take(running.take())
        return sum(page[0] == medium for page in router.pages()) == pages

    eventually(f"{pages} pages are announced", enough)


def test_pages_are_announced_in_full_if_their_request_was_described_before(log: Log, running: KvEvents) -> None:
    router, asking = Router(), tracked(request([1, 2, 3]))
    running.describe(asking, 2)
    running.describe(asking, 3)
    running.describe(asking, 3)
    log.store(stored(1, pages=3))
    taken(running, router, 3)
    assert [event.token_ids for event in router.events] == [[1, 2, 3, 4, 5, 6]]
    log.remove(log.slab[0])
    taken(running, router, 0)
    eventually("no step is needed any more", lambda: not running.waiting)


def test_pages_are_announced_again_behind_a_reset_of_the_engine(log: Log, running: KvEvents) -> None:
    """vLLM puts ``AllBlocksCleared`` before the connector's events of a step; routers then forget every medium."""
    router = Router()
    running.describe(tracked(request([1, 2])), 2)
    log.store(stored(1, pages=2))
    taken(running, router, 2)
    log.store(stored(7, 10))
    eventually("a batch waits", lambda: len(running._sink))
    running.engine_was_reset()
    router.take([AllBlocksCleared(), *running.take()])
    taken(running, router, 3)
    running.engine_was_reset()
    router.take([AllBlocksCleared(), *running.take()])
    log.remove(log.slab[0])
    taken(running, router, 1)


def test_an_engine_that_takes_nothing_holds_a_limited_number_of_batches(
    log: Log, running: KvEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "WAITING_BATCHES_MAX", 3)
    for number in range(300):
        log.store(stored(10 * number + 1, 10 * number, pages=4))
        if number % 10 == 0:
            time.sleep(0.005)
    eventually("the queue is full", lambda: not running._sink.has_room)
    for block in list(log.slab)[:290]:
        log.remove(block)
    eventually("the log is read", lambda: len(running._held) < 3 * 128 + 41)
    assert len(running._sink) == 3
    taken(running, Router(), 40)


def test_pages_whose_tokens_wait_too_long_are_announced_by_their_hash(
    log: Log, running: KvEvents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "DESCRIBED_TOKENS_MAX", -1)
    for number in (1, 2):
        running.describe(tracked(request([number])), 1)
    log.store(stored(1))
    router = Router()
    taken(running, router, 1)
    assert not router.in_full()
    assert caplog.text.count("KV events lag behind") == 1


def test_a_failure_ends_the_events_and_nothing_else(
    log: Log, running: KvEvents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running._batches, "next", lambda: 1 // 0)
    log.store(stored(1))
    eventually("the thread ends", lambda: not running._thread.is_alive())
    assert caplog.text.count("KV events failed: none are published until the engine is started again") == 1
    running.describe(tracked(request([1])), 1)
    running.follow([])
    running.engine_was_reset()
    assert (running.take(), running.waiting, len(running._described)) == ([], False, 0)


# The stream.


def endpoints(tmp_path: Path) -> dict[str, Any]:
    names = {"events_endpoint": "live", "events_replay_endpoint": "replay"}
    return {"events": "publish", **{key: f"ipc://{tmp_path}/{name}" for key, name in names.items()}}


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Any]:
    made: list[EventStream] = []

    def make(rank: int = 0, **changes: Any) -> EventStream:
        made.append(EventStream(Settings.read({**endpoints(tmp_path), **changes}), rank))
        return made[-1]

    yield make
    for each in made:
        each.close()


def event(number: int) -> BlockStored:
    return BlockStored([number], None, [1, 2], 2, None, "CPU", None, group_idx=0)


def test_a_subscriber_reads_the_stream_from_the_first_batch_on(streams: Any, tmp_path: Path) -> None:
    stream = streams(events_topic="kv@pod@model")
    where = [each for name, each in endpoints(tmp_path).items() if name != "events"]
    with Subscriber(*where, topic="kv@pod@model") as early, Subscriber(*where, topic="kv@pod@model") as late:
        numbers = itertools.count()

        def receives() -> bool:
            stream.put([event(next(numbers))])
            early.poll()
            return early.next > 0

        eventually("a subscription arrives", receives)
        sent = next(numbers)
        stream.put([event(sent)])
        eventually("all are there", lambda: early.poll() or early.next == sent + 1)
        late.replay()
        assert late.payloads == early.payloads
        assert {batch.data_parallel_rank for batch in late.batches.values()} == {0}
        assert [batch.events for _, batch in sorted(late.batches.items())] == [[event(at)] for at in range(sent + 1)]


def test_a_replay_is_whole_for_a_subscriber_that_reads_late(streams: Any, tmp_path: Path) -> None:
    """ZeroMQ keeps 1,000 messages for a peer by default, and drops the others."""
    stream = streams()
    for number in range(6000):
        eventually("there is room", lambda: stream.has_room)
        stream.put([event(number)])
    with Subscriber(stream._publisher._endpoint, f"ipc://{tmp_path}/replay") as late:
        eventually("the last batch is kept", lambda: len(stream._publisher._buffer) == 6000)
        late._replay.send_multipart([b"", (0).to_bytes(8, "big")])
        eventually("the publisher has sent all", lambda: late._replay.poll(0))
        time.sleep(0.2)
        late.replay()
        assert late.replayed == 6000


def test_only_the_newest_batches_are_kept(streams: Any, tmp_path: Path) -> None:
    stream = streams(events_buffer_steps=5)
    for number in range(20):
        stream.put([event(number)])
    eventually("all are sent", lambda: stream._publisher._buffer and stream._publisher._buffer[-1][0] == 19)
    with Subscriber(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay") as late:
        late.next = 15
        late.replay()
        assert (late.next, late.replayed) == (20, 5)


def test_a_full_stream_takes_nothing_and_ends_in_time(streams: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "QUEUED_MAX", 2)
    stream = streams()
    go = threading.Event()

    class Stuck:
        def __init__(self, socket: Any):
            self.socket, self.sent = socket, 0

        def send_multipart(self, parts: Any) -> None:
            self.sent += 1
            go.wait(TIMEOUT_S)

        def close(self, linger: int) -> None:
            self.socket.close(linger)

    stuck = stream._publisher._pub = Stuck(stream._publisher._pub)
    running = KvEvents([FULL], 2, stream)
    running.start(log)
    running.follow([NAMESPACE])
    for number in range(8):
        log.store(stored(10 * number + 1, 10 * number))
        eventually("it is read", lambda number=number: len(running._held) == number + 1)
        eventually("it is taken, or waits", lambda: not stream.has_room or running._held.first_due() is None)
    eventually("two wait, one is sent", lambda: not stream.has_room and stuck.sent == 1)
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < events.CLOSE_LIMIT_S + 4
    assert not running._thread.is_alive(), "a full stream blocks nothing"
    go.set()


def test_data_parallel_ranks_count_on_from_the_port(streams: Any) -> None:
    port = free_port()
    stream = streams(2, events_endpoint=f"tcp://*:{port - 2}", events_replay_endpoint="")
    with Subscriber(f"tcp://127.0.0.1:{port}") as subscriber:

        def receives() -> bool:
            stream.put([event(subscriber.next)])
            if not subscriber.next and subscriber._sub.poll(20):
                _, _, payload = subscriber._sub.recv_multipart()
                assert subscriber._decode(payload).data_parallel_rank == 2
                return True
            return False

        eventually("a batch arrives", receives)


def test_endpoints_that_cannot_be_used_are_refused(streams: Any) -> None:
    with pytest.raises(ValueError, match="rank 1 cannot count on from it: give a tcp endpoint"):
        streams(1)
    port = free_port()
    streams(events_endpoint=f"tcp://*:{port}", events_replay_endpoint="")
    with pytest.raises(ValueError, match=r"in use .*: give endpoints that this engine can bind") as refused:
        streams(events_endpoint=f"tcp://*:{port}", events_replay_endpoint="")
    assert f"events_endpoint is 'tcp://*:{port}'" in str(refused.value)


# Settings.


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"events": "on"}, "events is 'on': give one of off, engine, publish"),
        ({"events": "publish"}, "events is 'publish', and events_endpoint is '': give an endpoint such as tcp"),
        ({"events_endpoint": 5557}, "events_endpoint is 5557: give a text"),
        ({"events_buffer_steps": 0}, "events_buffer_steps is 0: give a whole number from 1"),
    ],
)
def test_wrong_settings_are_refused(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refused:
        Settings.read(extra)
    assert text in str(refused.value)


def test_events_for_a_stream_that_vllm_does_not_publish_are_refused() -> None:
    wanted = config()
    for off in (None, KVEventsConfig()):
        wanted.kv_events_config = off
        with pytest.raises(ValueError, match="events is 'engine', and vLLM publishes no KV events: start it with"):
            connector.check_events(wanted, Settings.read({"events": "engine"}))
        connector.check_events(wanted, Settings.read({}))
    wanted.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
    connector.check_events(wanted, Settings.read({"events": "engine"}))


def test_other_classes_of_events_are_refused() -> None:
    from vllm.distributed.kv_events import BlockRemoved

    compat.check_events(BlockStored, BlockRemoved, ZmqEventPublisher)

    class Stored:
        __struct_fields__ = ("block_hashes", "token_ids")

    class Publisher:
        def __init__(self, endpoint: str):
            pass

    with pytest.raises(RuntimeError) as refused:
        compat.check_events(Stored, BlockRemoved, Publisher)
    for part in ("Stored has the fields ('block_hashes', 'token_ids')", "Publisher is made from ('endpoint',)"):
        assert part in str(refused.value)
