"""Limits on the engine's pages that stores hold."""

import pytest
from engine import PAGE_TOKENS, tokens
from real_scheduler import Stepped
from test_scheduler import PAGE_BYTES, Engine, found, request

from kvferry import wire
from kvferry.vllm import backpressure


def store(engine: Engine, name: str, pages: list[int], *, ends: bool) -> int:
    """Fills pages by a request, which may end while they are stored. Returns the number of stores requested."""
    asking = request(name, len(pages) * 4)
    engine.side.matched_tokens(asking, 0)
    engine.tables[name] = pages
    blocks = [engine.pool.blocks[page] for page in pages]
    engine.pool.touch(blocks)
    engine.step({asking: len(pages) * 4})
    if ends:
        engine.pool.free_blocks(blocks)
        engine.side.finished(asking)
    return engine.leader.count(wire.Store)


def test_pages_that_only_stores_hold_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The limit is 5 of 100 pages: a request that ends with more pages under copy stops the stores of others."""
    engine = Engine()
    found(engine, 0)
    assert store(engine, "a", [1, 2, 3, 4, 5, 6, 7, 8], ends=False) == 1
    assert store(engine, "b", [11, 12, 13, 14, 15, 16], ends=True) == 2
    for number in range(3):
        assert store(engine, f"c{number}", [20 + number], ends=True) == 2
    assert engine.side.stores_skipped_backpressure == 3
    assert caplog.text.count("stores_skipped_backpressure=1") == 1
    assert engine.pool.held() == [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16]
    engine.leader.last(wire.Store).end(wire.StoreAnswer(6, 0))
    engine.step()
    assert store(engine, "d", [30], ends=True) == 3


def test_pages_that_several_stores_hold_count_as_held_by_stores_alone() -> None:
    """Each of two requests that share device pages stores them."""
    engine = Engine()
    found(engine, 0)
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    assert store(engine, "a", shared, ends=False) == 1
    assert store(engine, "b", shared, ends=True) == 2
    assert not engine.side.frees_soon(), "a request holds the pages, too"
    engine.pool.free_blocks(engine.pool.blocks[1:9])
    assert engine.side.frees_soon()
    # The step tells that the request was preempted.
    engine.side._begin_anew("a")
    assert engine.side._copies.pages_alone() == 8, "each page counts once"
    assert store(engine, "c", [20], ends=True) == 2
    assert engine.side.stores_skipped_backpressure == 1


def test_a_skipped_store_is_retried_with_the_next_page() -> None:
    engine = Engine()
    found(engine, 0)
    assert store(engine, "a", [1, 2, 3, 4, 5, 6], ends=True) == 1
    asking = request("b", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["b"] = [11, 12, 13]
    engine.step({asking: 8})
    assert engine.leader.count(wire.Store) == 1
    engine.leader.last(wire.Store).end(wire.StoreAnswer(6, 0))
    asking.grow(4)
    engine.step({asking: 4})
    assert engine.leader.last(wire.Store).message.parts[0].pages == [[11, 3]]


def test_bytes_of_running_stores_are_bounded() -> None:
    engine = Engine(store_mb_max=4 * PAGE_BYTES // 1_000_000)
    found(engine, 0)
    assert store(engine, "a", [1, 2, 3, 4, 5, 6], ends=False) == 1, "one store alone may exceed the limit"
    assert store(engine, "b", [11], ends=False) == 1
    engine.leader.last(wire.Store).end(wire.StoreAnswer(6, 0))
    engine.step()
    assert store(engine, "c", [21, 22, 23], ends=False) == 2
    assert store(engine, "d", [31], ends=False) == 3
    assert store(engine, "e", [41], ends=False) == 3
    assert engine.side.stores_skipped_backpressure == 2


def test_an_engine_keeps_its_pages_while_the_leader_is_paused() -> None:
    """With vLLM's own pool: stores never end, and requests continue."""
    engine = Stepped(pages=64)
    found(engine, 0)
    free = engine.free_pages()
    for number in range(40):
        engine.run(engine.add(tokens(PAGE_TOKENS * 4, seed=number)))
    assert engine.leader is not None
    held = free - engine.free_pages()
    assert 0 < held <= 64 * 5 // 100 + 4, "the last store may exceed the limit"
    assert engine.connector._scheduler.stores_skipped_backpressure > 30


def test_stores_leave_room_for_other_requests_at_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backpressure, "STORES_MAX", 2)
    engine = Engine()
    found(engine, 0)
    for number in range(3):
        store(engine, f"a{number}", [10 + number], ends=False)
    assert engine.leader.count(wire.Store) == 2
    assert engine.side.stores_skipped_backpressure == 1
    engine.leader.last(wire.Store).end(wire.StoreAnswer(1, 0))
    engine.step()
    assert store(engine, "b", [30], ends=False) == 3


def test_only_stores_of_requests_that_may_have_lost_their_pages_are_counted() -> None:
    engine = Engine()
    found(engine, 0)
    asking = request("a", 8 * 4)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = pages = [1, 2, 3, 4, 5, 6, 7, 8]
    blocks = [engine.pool.blocks[page] for page in pages]
    engine.pool.touch(blocks)
    engine.step({asking: 8 * 4})
    copies = engine.side._copies
    (copy,) = copies._open.values()
    assert copy.is_held
    assert copies.pages_alone() == 0
    # The request is preempted.
    engine.pool.free_blocks(blocks)
    engine.side._begin_anew("a")
    assert not copy.is_held
    assert copies.pages_alone() == 8
