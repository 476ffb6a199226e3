"""Subscribers of KV events for tests: they decode with vLLM's own classes, and count each page as routers may."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, Self

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

#: The medium, group and hash of a page.
Page = tuple[str, int, int]
END = (-1).to_bytes(8, "big", signed=True)


class Router:
    """What a subscriber knows after the events that it was given."""

    def __init__(self) -> None:
        self.counts: collections.Counter[Page] = collections.Counter()
        #: The last event that announced each page, and the position of the page in it.
        self.stored: dict[Page, tuple[BlockStored, int]] = {}
        self.events: list[Any] = []

    def take(self, events: Iterable[Any]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case BlockStored():
                    for at, page_hash in enumerate(event.block_hashes):
                        page = event.medium, event.group_idx, page_hash
                        self.counts[page] += 1
                        assert self.counts[page] == 1 or page[0] == "GPU", f"{page} is announced twice"
                        self.stored[page] = event, at
                case BlockRemoved():
                    for page_hash in event.block_hashes:
                        page = event.medium, event.group_idx, page_hash
                        self.counts[page] -= 1
                        assert self.counts[page] == 0 or page[0] == "GPU", f"{page} is taken back twice"
                case AllBlocksCleared():
                    self.counts.clear()
                case _:
                    raise AssertionError(event)

    def pages(self, *, without: str = "") -> set[Page]:
        return {page for page, count in self.counts.items() if count and page[0] != without}

    def tokens(self, page: Page) -> list[int]:
        event, at = self.stored[page]
        return event.token_ids[at * event.block_size : (at + 1) * event.block_size]

    def in_full(self) -> set[Page]:
        return {page for page in self.pages() if self.stored[page][0].block_size}


class Subscriber:
    """Receives batches over ZeroMQ, and asks for those that it has missed.

    ``first``: the number of the first batch; None for that of the first one that the publisher has kept. ``router``:
    what takes the events; ``decode``: what reads a batch, by default vLLM's own classes.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str = "",
        topic: str = "",
        *,
        first: int | None = 0,
        router: Any = None,
        decode: Callable[[bytes], Any] | None = None,
    ):
        self.router = router or Router()
        self.next = first
        self.batches: dict[int, Any] = {}
        self.payloads: list[bytes] = []
        self.replayed = 0
        self._decode = decode or msgspec.msgpack.Decoder(KVEventBatch).decode
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.connect(endpoint)
        self._sub.subscribe(topic)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVHWM, 0)
        if replay:
            self._replay.connect(replay)
        self.topic = topic.encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def poll(self, timeout_ms: int = 50) -> None:
        """Takes what was published; a gap is closed by a replay."""
        while self._sub.poll(timeout_ms):
            topic, seq, payload = self._sub.recv_multipart()
            assert topic == self.topic
            number = int.from_bytes(seq, "big")
            if self.next is None or number > self.next:
                self.replay()
            self._apply(number, payload)
            timeout_ms = 0

    def replay(self) -> None:
        """Asks for the batches from the next one on."""
        self._replay.send_multipart([b"", (self.next or 0).to_bytes(8, "big")])
        while True:
            assert self._replay.poll(20_000), "the replay does not end"
            empty, topic, seq, payload = self._replay.recv_multipart()
            assert empty == b""
            if seq == END:
                return
            assert topic == self.topic
            self.replayed += 1
            self._apply(int.from_bytes(seq, "big"), payload)

    def _apply(self, number: int, payload: bytes) -> None:
        if self.next is None:
            self.next = number
        if number < self.next:
            return
        assert number == self.next, f"batch {self.next} is missing before {number}"
        self.next += 1
        batch = self._decode(payload)
        self.batches[number] = batch
        self.payloads.append(payload)
        self.router.take(batch.events)
