"""Tests of resets on the scheduler's side: the pages that an engine finds and stores afterwards."""

import time
from pathlib import Path

import pytest
from daemon import eventually
from test_adapters import adapter, folder, named
from test_scheduler import Engine, found, refused, request

from kvferry import wire
from kvferry.wire import Code


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def steady() -> Engine:
    """An engine whose weights never change."""
    return Engine(shared_after_reset=True)


def namespace_of(engine: Engine) -> bytes:
    return engine.side.track(request(f"r{time.monotonic_ns()}", 9)).namespace


def test_weights_that_changed_in_memory_are_private_to_the_engine() -> None:
    """Two replicas: one gets new weights, the other keeps the old weights and stores in the old namespace."""
    one, two = Engine(), Engine()
    shared = namespace_of(one)
    assert namespace_of(two) == shared
    seen = {shared}
    for _ in range(3):
        for engine in (one, two):
            engine.leader.answers[wire.Reset] = wire.ResetAnswer(3)
            assert engine.side.reset()
            private = namespace_of(engine)
            assert private not in seen
            seen.add(private)
            for _ in range(5):
                engine.step()
            assert namespace_of(engine) == private, "for the lifetime of the engine"


def test_a_reset_names_the_namespace_to_remove(engine: Engine, tmp_path: Path) -> None:
    """Other engines and models keep their pages."""
    used = {namespace_of(engine)}
    asking = request("b", 9)
    asking.lora_request = adapter("one", str(folder(tmp_path)))
    used.add(named(engine, asking))
    for _ in range(2):
        assert engine.side.reset()
        for _ in range(3):
            engine.leader.last(wire.Reset).end(wire.ResetAnswer(1))
            engine.step()
        used.add(namespace_of(engine))
        named(engine, asking)
    resets = [asked.message.namespace for asked in engine.leader.asked if isinstance(asked.message, wire.Reset)]
    assert len(resets) == len(set(resets)), "one reset for each namespace"
    assert None not in resets
    assert used - set(resets) == {namespace_of(engine)}


def test_pages_after_a_requests_pages_from_before_a_reset_are_not_stored(engine: Engine) -> None:
    """A page depends on those before it: it is stored only after all of them were computed again."""
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2, 3]
    engine.step({asking: 8})
    stores = engine.leader.count(wire.Store)
    assert engine.side.reset()
    asking.grow(4)
    engine.step({asking: 4})
    assert engine.leader.count(wire.Store) == stores
    asking.num_computed_tokens = 0
    engine.step(preempted=("a",))
    engine.side.matched_tokens(asking, 0)
    engine.step({asking: 12})
    message = engine.leader.last(wire.Store).message
    assert (message.parts[0].first_page, message.parts[0].pages) == (0, [[1, 3]])


def test_a_page_that_was_begun_before_a_reset_is_not_stored(engine: Engine) -> None:
    """Its first tokens are of the old weights."""
    found(engine, 0)
    asking = request("a", 1)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1]
    engine.step({asking: 1})
    assert engine.side.reset()
    asking.grow(3)
    engine.step({asking: 3})
    assert engine.leader.count(wire.Store) == 0


def test_nothing_is_stored_after_device_pages_from_before_a_reset(engine: Engine) -> None:
    """vLLM's own reset fails while a request runs, the connector's succeeds. New requests hit the old pages."""
    engine.pool.touch(engine.pool.blocks[1:4])
    assert not engine.pool.reset_prefix_cache()
    assert engine.side.reset()
    found(engine, 0)
    for name, pages in (("a", [1, 2, 4]), ("b", [1, 2, 4])):
        asking = request(name, 12)
        engine.side.matched_tokens(asking, 8)
        asking.num_computed_tokens = 8
        engine.tables[name] = pages
        engine.step({asking: 4})
        assert engine.leader.count(wire.Store) == 0
    # Preempted, and restarted in the same step.
    engine.side.matched_tokens(asking, 8)
    asking.num_computed_tokens = 8
    engine.step({asking: 4}, preempted=("b",))
    assert engine.leader.count(wire.Store) == 0
    alone = request("c", 8)
    engine.side.matched_tokens(alone, 0)
    engine.tables["c"] = [5, 6]
    engine.step({alone: 8})
    assert engine.leader.last(wire.Store).message.parts[0].pages == [[5, 2]], "the request computed all of its pages"
    engine.leader.last(wire.Store).end(wire.StoreAnswer(2, 0))
    engine.step()
    engine.pool.free_blocks(engine.pool.blocks[1:4])
    assert engine.pool.reset_prefix_cache()
    later = request("d", 12)
    engine.side.matched_tokens(later, 8)
    later.num_computed_tokens = 8
    engine.tables["d"] = [1, 2, 3]
    engine.step({later: 4})
    assert engine.leader.last(wire.Store).message.parts[0].first_page == 0, "the device has no old pages any more"


@pytest.mark.parametrize("steps_between", [False, True])
def test_a_reset_of_both_caches_leaves_no_old_pages(engine: Engine, steps_between: bool) -> None:
    assert engine.pool.reset_prefix_cache()
    found(engine, 0)
    if steps_between:
        # Its pages are on the device when the connector is reset.
        before = request("before", 8)
        engine.side.matched_tokens(before, 0)
        engine.tables["before"] = [1, 2]
        engine.step({before: 8})
        engine.side.finished(before)
    stores = engine.leader.count(wire.Store)
    assert engine.side.reset()
    asking = request("a", 12)
    engine.side.matched_tokens(asking, 8)
    asking.num_computed_tokens = 8
    engine.tables["a"] = [1, 2, 3]
    engine.step({asking: 4})
    assert (engine.leader.count(wire.Store) > stores) != steps_between


def test_pages_of_weights_that_never_change_are_stored_whatever_the_device_kept(steady: Engine) -> None:
    engine = steady
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(0)
    assert engine.side.reset()
    found(engine, 0)
    asking = request("a", 12)
    engine.side.matched_tokens(asking, 8)
    asking.num_computed_tokens = 8
    engine.tables["a"] = [1, 2, 3]
    engine.step({asking: 4})
    assert engine.leader.last(wire.Store).message.parts[0].first_page == 0


def test_a_load_from_before_a_reset_is_computed(engine: Engine) -> None:
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    assert engine.side.reset()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    step = engine.step()
    assert (step.loaded, step.failed_pages) == (["a"], [10, 11, 12, 13])


def test_a_reset_does_not_wait_for_the_leader(engine: Engine) -> None:
    namespace_of(engine)
    assert engine.side.reset()
    assert not engine.leader.last(wire.Reset).waited


def test_loaded_pages_are_not_stored_after_a_reset(steady: Engine) -> None:
    engine = steady
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    asking.num_computed_tokens = 16
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(0)
    assert engine.side.reset()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    engine.step()
    asking.grow(3)
    engine.step({asking: 4})
    message = engine.leader.last(wire.Store).message
    assert (message.parts[0].first_page, message.parts[0].pages) == (4, [14])


def test_an_unconfirmed_reset_leaves_the_namespace(steady: Engine) -> None:
    engine = steady
    before = namespace_of(engine)
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(3)
    assert engine.side.reset()
    assert namespace_of(engine) == before
    for code in (Code.DRAINING, Code.LEASED):
        engine.leader.answers[wire.Reset] = refused(code)
        assert engine.side.reset()
        assert namespace_of(engine) != before, "pages that the leader kept are no longer found"
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(1)
    assert engine.side.reset()
    assert namespace_of(engine) == before, "the leader has removed every page"
    engine.leader.link = 0
    asked = len(engine.leader.asked)
    assert engine.side.reset()
    assert len(engine.leader.asked) == asked, "without a leader nothing is sent"


def test_an_unconfirmed_reset_is_retried_until_it_is_confirmed(steady: Engine) -> None:
    engine = steady
    before = namespace_of(engine)
    engine.leader.answers[wire.Reset] = refused(Code.DRAINING)
    assert engine.side.reset()
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(1)
    eventually("the reset is retried", lambda: engine.step() and namespace_of(engine) == before)
    resets = engine.leader.count(wire.Reset)
    engine.step()
    assert engine.leader.count(wire.Reset) == resets


def test_an_answer_to_an_older_reset_does_not_confirm_a_newer_one(steady: Engine) -> None:
    engine = steady
    before = namespace_of(engine)
    engine.leader.link = 0
    assert engine.side.reset()
    engine.leader.link = 1
    engine.step()
    older = engine.leader.last(wire.Reset)
    engine.leader.link = 0
    engine.side._namespaces.share()
    namespace_of(engine)
    assert engine.side.reset()
    older.end(wire.ResetAnswer(1))
    engine.step()
    assert namespace_of(engine) != before


def test_a_reset_does_not_reopen_a_finished_slot(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2]
    engine.step({asking: 8})
    engine.side.finished(asking)
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(0)
    lookups = engine.leader.count(wire.Lookup)
    assert engine.side.reset()
    assert engine.leader.count(wire.Lookup) == lookups


def test_pages_computed_before_a_reset_are_not_stored_after_it(steady: Engine) -> None:
    engine = steady
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2, 3]
    engine.step({asking: 8})
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(0)
    assert engine.side.reset()
    engine.leader.last(wire.Store).end(refused(Code.UNKNOWN_SLOT))
    asking.grow(4)
    engine.step({asking: 4})
    message = engine.leader.last(wire.Store).message
    assert (message.parts[0].first_page, message.parts[0].pages) == (2, [3])


def test_a_reset_releases_the_pages_that_lookups_found(engine: Engine) -> None:
    found(engine, 4)
    asking = request("a", 33)
    assert engine.side.matched_tokens(asking, 0) == 16
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(4)
    assert engine.side.reset()
    let_go = engine.leader.last(wire.Lookup).message
    assert (let_go.slot, let_go.have_pages) == (engine.leader.asked[0].message.slot, 8), "as the leader requires"
    found(engine, 0)
    assert engine.side.matched_tokens(asking, 0) == 0


def test_a_reset_that_cannot_be_confirmed_is_not_awaited(steady: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has left more namespaces than are remembered."""
    monkeypatch.setattr("kvferry.resets.FORGET_MAX", 1)
    steady.leader.answers[wire.Reset] = wire.ResetAnswer(1)
    forgetting = steady.side._invalidation._forgetting
    forgetting.add([b"one", b"two"])
    begun = time.monotonic()
    assert not forgetting.wait(60)
    assert time.monotonic() - begun < 30
    assert steady.leader.last(wire.Reset).message.namespace == b"two"
