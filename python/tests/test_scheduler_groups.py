"""Tests of the scheduler's side with several groups of pages, call by call, with a simulated leader."""

from types import SimpleNamespace
from typing import Any

import pytest
from test_scheduler import PAGE_TOKENS, Engine, found, refused, request

from kvferry import wire
from kvferry.served import Served, ServedGroup
from kvferry.vllm.stores import GENERATED_EVERY

#: Full attention; a window of which two pages are needed; states, with pages of twice as many tokens.
FULL = ServedGroup(0, PAGE_TOKENS, 1_000_000)
WINDOW = ServedGroup(2, PAGE_TOKENS, 1_000_000, "sliding_window", 2 * PAGE_TOKENS + 1)
STATE = ServedGroup(3, 2 * PAGE_TOKENS, 1_000_000, "state")
#: The engine's second group is not served.
SERVED = Served((FULL, WINDOW, STATE), PAGE_TOKENS, 2 * PAGE_TOKENS, whole=True)
Tables = tuple[list[int], ...]


def tables(first: int, pages: int, window_from: int = 0) -> Tables:
    """Block tables with pages of their own. The window has pages from ``window_from`` on."""
    full = list(range(first, first + pages))
    window = [0] * window_from + list(range(first + 20, first + 20 + pages - window_from))
    return full, [99], window, [0] * (pages // 2 - 1) + [first + 40]


@pytest.fixture
def engine() -> Engine:
    return Engine(SERVED)


def parts(asked: Any) -> list[tuple[int, int, list]]:
    return [(part.group, part.first_page, part.pages) for part in asked.message.parts]


def loading(engine: Engine, name: str = "a", first: int = 10) -> Any:
    """A request of 17 tokens under a load of 16, four pages."""
    found(engine, 4)
    asking = request(name, 4 * PAGE_TOKENS + 1)
    assert engine.side.matched_tokens(asking, 0) == 4 * PAGE_TOKENS
    engine.allocate(asking, tables(first, 4, window_from=2), 4 * PAGE_TOKENS)
    return asking


def test_a_load_names_what_the_hit_needs_in_each_group(engine: Engine) -> None:
    loading(engine)
    load = engine.leader.last(wire.Load)
    assert parts(load) == [(0, 0, [[10, 4]]), (1, 2, [[30, 2]]), (2, 1, [50])]
    assert load.timeout_s == pytest.approx(2 + 7 / 1000), "seven pages of 1 MB"


def test_a_load_does_not_name_what_the_device_has(engine: Engine) -> None:
    found(engine, 2)
    asking = request("a", 4 * PAGE_TOKENS + 1)
    assert engine.side.matched_tokens(asking, 2 * PAGE_TOKENS) == 2 * PAGE_TOKENS
    engine.allocate(asking, tables(10, 4, window_from=1), 2 * PAGE_TOKENS)
    assert parts(engine.leader.last(wire.Load)) == [(0, 2, [[12, 2]]), (1, 2, [[31, 2]]), (2, 1, [50])]


def test_a_load_that_fails_is_reported_by_its_request(engine: Engine) -> None:
    """vLLM refuses page numbers of several groups, since they are ambiguous."""
    asking = loading(engine)
    engine.leader.last(wire.Load).end(refused())
    step = engine.step()
    assert (step.loaded, step.failed, step.failed_pages) == (["a"], ["a"], [])
    lookups = engine.leader.count(wire.Lookup)
    assert engine.side.matched_tokens(asking, 0) == 0
    assert engine.leader.count(wire.Lookup) == lookups


def test_a_load_that_succeeds_is_reported_once(engine: Engine) -> None:
    loading(engine)
    engine.leader.last(wire.Load).end(wire.LoadAnswer(7))
    step = engine.step()
    assert (step.loaded, step.failed) == (["a"], [])
    assert engine.step().loaded == []


@pytest.mark.parametrize("group", [0, 2, 3])
def test_a_load_that_vllm_has_no_page_for_is_not_begun(engine: Engine, group: int) -> None:
    found(engine, 4)
    asking = request("a", 4 * PAGE_TOKENS + 1)
    engine.side.matched_tokens(asking, 0)
    given = tables(10, 4, window_from=2)
    given[group][-1] = 0
    engine.allocate(asking, given, 4 * PAGE_TOKENS)
    assert engine.leader.count(wire.Load) == 0
    step = engine.step()
    assert (step.loaded, step.failed) == (["a"], ["a"])
    assert engine.side.matched_tokens(asking, 0) == 0


def test_a_load_whose_pages_are_zeroed_in_the_same_step_waits_for_it() -> None:
    engine = Engine(SERVED, zeroes=True)
    busy = request("busy", 1)
    engine.tables["busy"] = tables(60, 1)
    first = engine.step({busy: 1}).written_through
    loading(engine, "a")
    loading(engine, "b", first=12)
    assert engine.leader.count(wire.Load) == 0, "what the step zeroes is not known yet"
    second = engine.step({busy: 1}, zeroed=(30, 70)).written_through
    assert second > first
    loads = [each for each in engine.leader.asked if isinstance(each.message, wire.Load)]
    assert [load.message.after for load in loads] == [second, first]
    assert all(load.id > load.message.after for load in loads)


def test_ranks_report_work_that_a_load_waits_for_at_once() -> None:
    engine = Engine(SERVED)
    busy = request("busy", 1)
    engine.tables["busy"] = tables(60, 1)
    first = engine.step({busy: 1})
    assert (first.needed_before, first.needed_through) == (0, 0)
    loading(engine, "a")
    load = engine.leader.last(wire.Load)
    assert load.message.after == first.written_through
    # Also in a step without a forward pass.
    assert engine.step().needed_before == first.written_through


def test_loads_that_could_not_be_requested_fail(engine: Engine) -> None:
    """The hook that ends a step has failed before it requested the loads."""
    engine = Engine(SERVED, zeroes=True)
    loading(engine)
    output = SimpleNamespace(num_scheduled_tokens={}, new_block_ids_to_zero=[30], kv_cache_block_copies=None)
    step = engine.side.finish_only(output)  # type: ignore[arg-type]
    assert (step.loaded, step.failed) == (["a"], ["a"])
    assert engine.leader.count(wire.Load) == 0


def test_a_failed_hook_fails_a_load_that_was_not_requested_yet() -> None:
    engine = Engine(SERVED, zeroes=True)
    asking = loading(engine)
    blocks = SimpleNamespace(get_block_ids=lambda: engine.tables["a"])
    engine.side.load_failed(asking, blocks, 4 * PAGE_TOKENS)  # type: ignore[arg-type]
    step = engine.step()
    assert (step.loaded, step.failed) == (["a"], ["a"])
    assert engine.leader.count(wire.Load) == 0


def test_a_store_names_full_pages_windows_and_states_once(engine: Engine) -> None:
    filling = request("a", 4 * PAGE_TOKENS)
    engine.side.track(filling)  # type: ignore[arg-type]
    engine.tables["a"] = tables(10, 4, window_from=1)
    engine.step({filling: 4 * PAGE_TOKENS}, states={"a": [(3, 50, 4 * PAGE_TOKENS)], "b": [(3, 51, 8)]})
    store = engine.leader.last(wire.Store)
    assert parts(store) == [(0, 0, [[10, 4]]), (1, 1, [[30, 3]]), (2, 1, [50])]
    assert engine.pool.held() == [10, 11, 12, 13, 30, 31, 32, 50]
    store.end(wire.StoreAnswer(8, 0))
    engine.step()
    assert engine.pool.held() == []
    filling.grow(2)
    engine.step({filling: 2})
    assert engine.leader.count(wire.Store) == 1


def test_a_state_is_stored_without_a_new_page(engine: Engine) -> None:
    """vLLM hands a loaded state over again when its request continues."""
    filling = request("a", 4 * PAGE_TOKENS + 1)
    engine.side.track(filling)  # type: ignore[arg-type]
    engine.tables["a"] = tables(10, 5)
    engine.step({filling: 4 * PAGE_TOKENS})
    engine.leader.last(wire.Store).end(wire.StoreAnswer(8, 0))
    engine.step({filling: 1}, states={"a": [(3, 50, 4 * PAGE_TOKENS)]})
    assert parts(engine.leader.last(wire.Store)) == [(2, 1, [50])]


@pytest.mark.parametrize("before", range(GENERATED_EVERY))
def test_a_state_of_generated_tokens_does_not_wait_for_a_run_of_pages(before: int) -> None:
    """vLLM hands it over once, also in a step in which no generated pages are due."""
    engine = Engine(SERVED, store_run_pages=8)
    filling = request("a", 2 * PAGE_TOKENS)
    engine.side.track(filling)  # type: ignore[arg-type]
    engine.tables["a"] = tables(10, 4)
    engine.step({filling: 2 * PAGE_TOKENS})
    engine.leader.last(wire.Store).end(wire.StoreAnswer(4, 0))
    for _ in range(before):
        filling.grow(1)
        engine.step({filling: 1})
    left = 2 * PAGE_TOKENS - before
    filling.grow(left)
    engine.step({filling: left}, states={"a": [(3, 50, 4 * PAGE_TOKENS)]})
    assert parts(engine.leader.last(wire.Store)) == [(0, 2, [[12, 2]]), (1, 2, [[32, 2]]), (2, 1, [50])]


def test_a_failed_store_is_retried_with_the_pages_that_are_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.vllm.stores.STORE_PAUSE_S", 0.0)
    filling = request("a", 4 * PAGE_TOKENS)
    engine.side.track(filling)  # type: ignore[arg-type]
    engine.tables["a"] = tables(10, 4)
    engine.step({filling: 4 * PAGE_TOKENS})
    engine.leader.last(wire.Store).end(refused())
    filling.grow(2 * PAGE_TOKENS)
    engine.tables["a"] = tables(10, 6, window_from=3)
    engine.step()
    engine.step({filling: 2 * PAGE_TOKENS})
    assert parts(engine.leader.last(wire.Store)) == [(0, 0, [[10, 6]]), (1, 3, [[30, 3]])]


def test_a_reset_beside_a_load_spoils_it_as_a_whole(engine: Engine) -> None:
    asking = loading(engine)
    for table in engine.tables[asking.request_id]:
        engine.pool.touch([engine.pool.blocks[page] for page in table if page])  # type: ignore[union-attr]
    assert engine.pool.reset_prefix_cache(), "every page of the load is held by it alone"
    engine.leader.last(wire.Load).end(wire.LoadAnswer(7))
    step = engine.step()
    assert (step.loaded, step.failed) == (["a"], ["a"])


def test_hashes_behind_the_limit_are_named_for_draft_layers() -> None:
    drafted = Served((ServedGroup(0, PAGE_TOKENS, 1, eagle=True),), PAGE_TOKENS, PAGE_TOKENS)
    engine = Engine(drafted)
    found(engine, 4)
    assert engine.side.matched_tokens(request("a", 5 * PAGE_TOKENS), 0) == 4 * PAGE_TOKENS
    lookup = engine.leader.last(wire.Lookup).message
    assert (len(lookup.hashes) // lookup.hash_bytes, lookup.limit_pages) == (5, 4)
