"""Tests of the KV events in the steps of vLLM's own scheduler: with its own events, and after its resets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import eventually
from engine import PAGE_TOKENS, tokens, transfer_config
from fake_log import Block, FakeLog
from real_scheduler import Stepped, engine_config
from router import Router
from test_scheduler import found
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

from kvferry import wire
from kvferry.vllm.namespaces import Namespaces

PROMPT = tokens(PAGE_TOKENS * 4, seed=1)


class Publishing(Stepped):
    """An engine whose stream of KV events is kept, and a leader whose change log is a simulated one."""

    def __init__(self, **extra: Any):
        transfer = transfer_config(Path("/nowhere"), events="engine", verify=0, **extra)
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        super().__init__(config=engine_config(transfer, kv_events_config=events))
        self.router, self.log = Router(), FakeLog()
        self.scheduler.kv_event_publisher = self  # type: ignore[assignment]
        found(self, 0)

    def publish(self, batch: Any) -> None:
        self.router.take(batch.events)

    def shutdown(self) -> None:
        pass

    def namespace(self) -> bytes:
        return self.leader.last(wire.Lookup).message.namespace

    def stored(self, asking: Any, place: int = 0, first: int = 0, *, tier: int = 2) -> Block:
        """The leader has the pages of a request from now on."""
        hashes = tuple(bytes(each[-16:]) for each in asking.block_hashes[first:])
        block = Block(tier, self.namespace(), 0, place, hashes)
        self.log.store(block)
        return block

    def until(self, what: str, check: Any) -> None:
        """Answers reads and runs steps, until it is so."""

        def so() -> bool:
            reads = [each for each in list(self.leader.asked) if isinstance(each.message, wire.ReadEvents)]
            for asked in [each for each in reads if not each.done]:
                # A later read ends the wait of an earlier one.
                answer = self.log.answer(asked.message, waits=asked is reads[-1])
                if answer is not None:
                    asked.end(answer)
            if self.scheduler.has_requests():
                self.step()
            return check()

        eventually(what, so)

    def pages(self, medium: str) -> set[int]:
        return {page[2] for page in self.router.pages() if page[0] == medium}


@pytest.fixture
def engine() -> Iterator[Publishing]:
    engine = Publishing()
    yield engine
    engine.scheduler.shutdown()


def test_pages_in_kvferry_are_announced_as_vllm_announces_its_own(engine: Publishing) -> None:
    asking = engine.add(PROMPT)
    engine.run(asking)
    engine.leader.last(wire.Store).end(wire.StoreAnswer(4, 0))
    block = engine.stored(asking)
    engine.until("the pages are announced", lambda: len(engine.pages("CPU")) == 4)
    assert engine.pages("CPU") == engine.pages("GPU")
    (ours,) = [event for event in engine.router.events if isinstance(event, BlockStored) and event.medium == "CPU"]
    (theirs,) = [event for event in engine.router.events if isinstance(event, BlockStored) and event.medium == "GPU"]
    names = [name for name in BlockStored.__struct_fields__ if name != "medium"]
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    engine.stored(asking, tier=3)
    engine.log.remove(block)
    engine.until("they are moved", lambda: len(engine.pages("STORAGE")) == 4 and not engine.pages("CPU"))
    assert engine.router.in_full() == engine.router.pages()


def test_an_idle_engine_runs_steps_for_its_last_events_only(engine: Publishing) -> None:
    asking = engine.add(PROMPT)
    engine.run(asking)
    engine.leader.last(wire.Store).end(wire.StoreAnswer(4, 0))
    engine.stored(asking)
    engine.until("the pages are announced", lambda: len(engine.pages("CPU")) == 4)
    engine.until("no step is needed any more", lambda: not engine.scheduler.has_requests())


def test_pages_outlive_a_reset_of_the_engine_alone(engine: Publishing) -> None:
    """Routers forget the pages of all media with ``AllBlocksCleared``."""
    asking = engine.add(PROMPT)
    engine.run(asking)
    engine.leader.last(wire.Store).end(wire.StoreAnswer(4, 0))
    engine.stored(asking)
    engine.until("the pages are announced", lambda: len(engine.pages("CPU")) == 4)
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    engine.until("the engine has announced its reset", lambda: AllBlocksCleared() in engine.router.events)
    engine.until("the pages are announced again", lambda: len(engine.pages("CPU")) == 4)
    assert not engine.pages("GPU")


def test_pages_that_are_no_longer_found_are_taken_back() -> None:
    """After a reset of the connector, the engine stores and finds in other namespaces."""
    engine = Publishing()
    asking = engine.add(PROMPT)
    engine.run(asking)
    engine.leader.last(wire.Store).end(wire.StoreAnswer(4, 0))
    engine.stored(asking)
    engine.until("the pages are announced", lambda: len(engine.pages("CPU")) == 4)
    engine.step()
    assert engine.scheduler.reset_connector_cache()
    engine.until("they are taken back", lambda: engine.step() and not engine.pages("CPU"))
    before = engine.namespace()
    again = engine.add(PROMPT)
    engine.run(again)
    assert engine.namespace() != before
    engine.stored(again, 10)
    engine.until("the pages of the new namespace are announced", lambda: len(engine.pages("CPU")) == 4)
    engine.scheduler.shutdown()


def test_pages_from_before_are_announced_by_their_hash_until_a_request_finds_them(engine: Publishing) -> None:
    other = Publishing()
    asking = other.add(PROMPT)
    other.run(asking)
    block = Block(2, other.namespace(), 0, 0, tuple(bytes(each[-16:]) for each in asking.block_hashes))
    other.scheduler.shutdown()
    engine.log.store(block)
    engine.until("the pages are announced", lambda: engine.step() and len(engine.pages("CPU")) == 4)
    assert not engine.router.in_full()
    found(engine, 3)
    same = engine.add(PROMPT)
    engine.step()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(3))
    engine.until("the found pages are described", lambda: engine.step() and len(engine.router.in_full()) >= 3)
    assert len(engine.pages("CPU")) == 4
    engine.run(same)
    assert {page: engine.router.tokens(page) for page in engine.router.in_full() if page[0] == "CPU"} == {
        ("CPU", 0, int.from_bytes(asking.block_hashes[at][-8:], "big")): PROMPT[
            at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS
        ]
        for at in range(len([page for page in engine.router.in_full() if page[0] == "CPU"]))
    }


def test_no_page_is_announced_while_the_cache_is_switched_off(engine: Publishing) -> None:
    asking = engine.add(PROMPT)
    engine.run(asking)
    engine.leader.last(wire.Store).end(wire.StoreAnswer(4, 0))
    engine.stored(asking)
    engine.until("the pages are announced", lambda: len(engine.pages("CPU")) == 4)
    switch = engine.connector._scheduler._switch
    for off, pages in ((True, 0), (False, 4)):
        switch.off = off
        engine.until("the switch is followed", lambda pages=pages: engine.step() and len(engine.pages("CPU")) == pages)


def test_no_page_is_announced_by_an_engine_that_only_stores() -> None:
    engine = Publishing(mode="store")
    engine.run(engine.add(PROMPT))
    engine.step()
    assert engine.leader.count(wire.Store) == 1
    assert not engine.leader.count(wire.ReadEvents)
    engine.scheduler.shutdown()


def test_a_request_with_a_namespace_of_its_own_changes_nothing_that_is_followed() -> None:
    names = Namespaces("model", "start")
    base = names.of(None)
    changes = names.changes
    assert names.of(None, "tenant 7") != base
    assert (names.present, names.changes) == ([base], changes)
    names.leave()
    assert (names.present, names.changes > changes) == ([], True)
    assert names.present != [names.of(None)]
    names.share()
    assert names.of(None) == base


def test_no_event_is_made_where_none_is_wanted() -> None:
    engine = Stepped()
    found(engine, 0)
    engine.run(engine.add(PROMPT))
    assert not engine.leader.count(wire.ReadEvents)
    assert engine.connector.take_events() == []
