"""Tests that the KV events of a run rebuild exactly the pages that a real kvferry holds, in each tier and group."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from daemon import TIMEOUT_S, Daemon, eventually
from router import Page, Subscriber

from kvferry.admin import AdminClient
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Part, Served, ServedGroup, StoreCursor
from kvferry.vllm.event_batches import EventGroup
from kvferry.vllm.event_publisher import EventStream
from kvferry.vllm.events import KvEvents
from kvferry.vllm.settings import Settings
from kvferry.vllm.tracked import Tracked

ENGINE = b"e" * 16
DEVICE_PAGES = 64
#: Two groups of full attention: pages of 8 and of 16 tokens, hashes of 8.
GROUPS = [EventGroup(0, 8, "full_attention", None), EventGroup(1, 16, "full_attention", None)]
SERVED = Served((ServedGroup(0, 8, 1), ServedGroup(1, 16, 1)), 8, 16, True)
UNITS = 8
MEDIA = {2: "CPU", 3: "STORAGE"}
MINE, ADAPTER, FOREIGN = b"mine", b"an adapter", b"of another engine"


class SmallEngine:
    """An engine by hand: it stores sequences, and publishes the events of two namespaces."""

    def __init__(self, daemon: Daemon, folder: Path):
        self.daemon = daemon
        tensors = [torch.zeros(DEVICE_PAGES, 1, tokens, 4) for tokens in (8, 16)]
        groups = [
            Group({f"layer.{at}": tensor}, engine_page_tokens=tokens, device_pages=DEVICE_PAGES)
            for at, (tensor, tokens) in enumerate(zip(tensors, (8, 16), strict=True))
        ]
        memory = KvMemory(groups, Place(rank=0, tp_size=1, shard=0, content=b"test"), hash_tokens=8, hit_tokens=16)
        self.rank = RankSession(daemon.socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
        self.client = EngineClient(daemon.socket_dir / "leader", ENGINE, first_id=1, name="test")
        self.endpoints = [f"ipc://{folder}/live", f"ipc://{folder}/replay"]
        settings = Settings.read(
            {"events": "publish", "events_endpoint": self.endpoints[0], "events_replay_endpoint": self.endpoints[1]}
        )
        self.events = KvEvents(GROUPS, 8, EventStream(settings, 0))
        self.events.start(self.client)
        self.events.follow([MINE, ADAPTER])
        self.client.start()
        self.slots = itertools.count(1)

    def close(self) -> None:
        self.events.close()
        self.client.close()
        self.rank.close()

    def wait_ready(self) -> None:
        with AdminClient(self.daemon.socket_dir / "leader", name="test") as admin:

            def ready() -> bool:
                return self.client.listening and self.rank.registered and admin.status(timeout_s=TIMEOUT_S).ready

            eventually("lookups are served", ready)

    def store(self, sequence: int, namespace: bytes = MINE, *, describe: bool = True) -> None:
        """Stores the pages of a sequence, both groups, and ends its request."""
        slot = next(self.slots)
        asking = sequence_of(sequence)
        if describe:
            self.events.describe(Tracked(asking, slot, namespace, StoreCursor(SERVED)), UNITS)
        answer_of(self.client.lookup(slot, asking.block_hashes, namespace=namespace, timeout_s=TIMEOUT_S))
        parts = [Part(0, 0, list(range(1, UNITS + 1))), Part(1, 0, list(range(1, UNITS // 2 + 1)))]
        store = self.client.store(slot, parts, timeout_s=TIMEOUT_S)
        self.rank.wrote(store.id)
        answer_of(store)
        answer_of(self.client.finish(slot, timeout_s=TIMEOUT_S))

    def held(self) -> set[Page]:
        """Reads the whole log as another reader."""
        found = set()
        with AdminClient(self.daemon.socket_dir / "leader", name="reader") as admin:
            for namespace in (MINE, ADAPTER):
                places: dict[tuple[int, int], Page] = {}
                epoch, at, cursor = 0, 0, 0
                while cursor is not None:
                    answer = admin.read_events(epoch, at, cursor=cursor, namespace=namespace, most=100)
                    if answer.lost:
                        places.clear()
                    for record in answer.records:
                        for number in range(len(record.hashes) // 16):
                            place = record.tier, record.place + number
                            page_hash = record.hashes[16 * number : 16 * number + 16]
                            if record.event == "stored":
                                page = MEDIA[record.tier], record.group, int.from_bytes(page_hash[-8:], "big")
                                places[place] = page
                            else:
                                places.pop(place, None)
                    epoch, at, cursor = answer.epoch, answer.next, answer.cursor
                found |= set(places.values())
        return found


def sequence_of(number: int) -> Any:
    hashes = [b"%016d" % number + (100 * number + unit).to_bytes(16, "big") for unit in range(UNITS)]
    tokens = [100_000 * number + token for token in range(8 * UNITS)]
    return SimpleNamespace(
        block_hashes=hashes,
        all_token_ids=tokens,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
    )


def answer_of(pending: PendingRequest) -> Any:
    assert pending.wait(TIMEOUT_S)
    assert pending.failure is None, pending.failure
    return pending.answer


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SmallEngine]:
    daemon = Daemon(tmp_path / "s", ranks=1, ratio=4, g2="48x512", g3="64MiB", g3_dir=tmp_path / "disk")
    daemon.start()
    try:
        engine = SmallEngine(daemon, tmp_path)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        daemon.kill()


def agree(engine: SmallEngine, subscriber: Subscriber, what: str) -> set[Page]:
    def equal() -> bool:
        subscriber.poll()
        return subscriber.router.pages() == engine.held()

    eventually(f"the subscriber has what kvferry holds: {what}", equal)
    for page in subscriber.router.in_full():
        number, unit = divmod(page[2], 100)
        size = 8 if page[1] == 0 else 16
        first = 100_000 * number + 8 * (unit + 1) - size
        assert subscriber.router.tokens(page) == list(range(first, first + size))
        event, at = subscriber.router.stored[page]
        parent = event.block_hashes[at - 1] if at else event.parent_block_hash
        assert parent == (page[2] - size // 8 if unit >= size // 8 else None)
    return subscriber.router.pages()


def test_events_rebuild_what_kvferry_holds(engine: SmallEngine) -> None:
    engine.wait_ready()
    with Subscriber(*engine.endpoints) as live, AdminClient(engine.daemon.socket_dir / "leader", name="test") as admin:
        for sequence in range(1, 13):
            engine.store(sequence, ADAPTER if sequence % 4 == 0 else MINE)
        engine.store(50, FOREIGN)
        pages = agree(engine, live, "after stores and evictions")
        assert {page[:2] for page in pages} == {(medium, group) for medium in MEDIA.values() for group in (0, 1)}
        evicted = [event for event in live.router.events if getattr(event, "medium", "") == "CPU"]
        assert any(not hasattr(event, "token_ids") for event in evicted), "host memory is too small for all"
        assert live.router.in_full() == pages
        assert not any(page[2] // 100 == 50 for page in pages)

        engine.daemon.flush()
        admin.reset_all(tier=2)
        pages = agree(engine, live, "after a reset of host memory")
        assert {page[0] for page in pages} == {"STORAGE"}
        engine.store(3)
        admin.reset(ADAPTER)
        pages = agree(engine, live, "after a reset of a namespace")
        assert not any(page[2] // 100 == 8 for page in pages)

        before = live.next
        engine.daemon.killed(engine.daemon.leader)
        engine.wait_ready()
        eventually("the disk is read", lambda: any(page[0] == "STORAGE" for page in engine.held()))
        engine.store(60, describe=False)
        engine.store(61)
        pages = agree(engine, live, "after a restart of the leader")
        assert live.next > before
        assert live.router.in_full() == {page for page in pages if page[2] // 100 != 60}, "tokens outlive the leader"

        engine.events.follow([MINE])
        agree_with = {page for page in engine.held() if page[2] // 100 % 4 or page[2] // 100 > 13}
        engine.events.describe(Tracked(sequence_of(60), 1, MINE, StoreCursor(SERVED)), UNITS)
        eventually("pages of the adapter are taken back", lambda: live.poll() or live.router.pages() == agree_with)
        assert live.router.in_full() == live.router.pages()

        with Subscriber(*engine.endpoints) as late:
            late.replay()

            def same() -> bool:
                """Pages still move to the disk."""
                live.poll()
                late.poll()
                return late.payloads == live.payloads

            eventually("a late subscriber has the same batches", same)
            assert late.router.pages() == live.router.pages()
