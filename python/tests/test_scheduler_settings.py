"""Tests of what the scheduler's side stores and loads by its settings, those of a request, and the switch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon import eventually
from test_scheduler import PAGE_TOKENS, Engine, found, refused, request
from vllm.v1.request import RequestStatus

from kvferry import wire
from kvferry.switch import Switch
from kvferry.vllm import lookups
from kvferry.vllm.per_request import PerRequest
from kvferry.vllm.settings import NUMBERS, WORDS, Settings
from kvferry.vllm.stores import GENERATED_EVERY, Stores


def parts(engine: Engine) -> list[tuple[int, list]]:
    return [(part.first_page, part.pages) for part in engine.leader.last(wire.Store).message.parts]


def generating(engine: Engine, name: str = "a", prompt: int = 8) -> Any:
    """A request whose prompt is computed, with more pages in its table than it fills."""
    asking = request(name, prompt)
    engine.side.track(asking)
    engine.tables[name] = list(range(1, 40))
    engine.step({asking: prompt})
    return asking


def generate(engine: Engine, asking: Any, tokens: int) -> None:
    for _ in range(tokens):
        asking.grow(1)
        engine.step({asking: 1})


def finish(engine: Engine, asking: Any, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
    asking.status = status
    engine.side.finished(asking, (engine.tables[asking.request_id],))


def test_generated_pages_are_stored_in_runs_and_at_the_end() -> None:
    engine = Engine(store_run_pages=3)
    asking = generating(engine)
    assert parts(engine) == [(0, [[1, 2]])]
    generate(engine, asking, 3 * PAGE_TOKENS - 1)
    assert engine.leader.count(wire.Store) == 1
    # The generated pages of all requests are stored in one of some steps.
    generate(engine, asking, GENERATED_EVERY)
    assert parts(engine) == [(2, [[3, 3]])]
    assert GENERATED_EVERY <= PAGE_TOKENS, "or a further page is stored"
    generate(engine, asking, PAGE_TOKENS)
    assert engine.leader.count(wire.Store) == 2
    asking.grow(1)
    finish(engine, asking)
    assert parts(engine) == [(5, [6])]
    finishes = [type(asked.message) for asked in engine.leader.asked[-2:]]
    assert finishes == [wire.Store, wire.Finish], "the slot is released after its last store"


def test_the_last_sampled_token_has_no_kv() -> None:
    engine = Engine(store_run_pages=3)
    asking = generating(engine)
    generate(engine, asking, PAGE_TOKENS - 1)
    asking.grow(1)
    asking.num_computed_tokens += 1
    finish(engine, asking)
    assert engine.leader.count(wire.Store) == 1, "an engine that schedules ahead counts the token as computed"


@pytest.mark.parametrize("answer", [refused(), wire.LoadAnswer(1)])
def test_pages_of_a_failed_load_are_not_stored_when_the_request_is_aborted(answer: Any) -> None:
    """vLLM counts the tokens as computed until it takes the results of the load: their pages hold other bytes."""
    engine = Engine()
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    asking.num_computed_tokens = 16
    engine.leader.last(wire.Load).end(answer)
    engine.step()
    finish(engine, asking, RequestStatus.FINISHED_ABORTED)
    assert engine.leader.count(wire.Store) == 0


def test_the_pages_of_a_failed_request_are_not_stored_at_its_end() -> None:
    engine = Engine(store_run_pages=3)
    asking = generating(engine)
    generate(engine, asking, PAGE_TOKENS + 1)
    finish(engine, asking, RequestStatus.FINISHED_ERROR)
    assert engine.leader.count(wire.Store) == 1


def test_a_store_at_the_end_waits_for_the_last_step_only() -> None:
    """An idle engine runs no step that could report the store's own id as written."""
    engine = Engine(store_run_pages=3)
    asking = generating(engine)
    generate(engine, asking, PAGE_TOKENS)
    before = engine.step()
    asking.grow(1)
    finish(engine, asking)
    store = engine.leader.last(wire.Store)
    assert 0 < store.message.after == before.written_through < store.id
    after = engine.step()
    assert after.written_through == before.written_through
    assert after.needed_before == after.needed_through == before.written_through


def test_a_new_prompts_full_pages_are_stored_at_once() -> None:
    engine = Engine(store_run_pages=8)
    asking = request("a", 4 * PAGE_TOKENS)
    engine.side.track(asking)
    engine.tables["a"] = list(range(1, 9))
    engine.step({asking: 2 * PAGE_TOKENS})
    assert parts(engine) == [(0, [[1, 2]])]
    engine.step({asking: 2 * PAGE_TOKENS})
    assert parts(engine) == [(2, [[3, 2]])]


def test_only_prompts_are_stored() -> None:
    engine = Engine(store="prompt")
    asking = generating(engine, prompt=10)
    generate(engine, asking, 3 * PAGE_TOKENS)
    finish(engine, asking)
    assert engine.leader.count(wire.Store) == 1
    assert parts(engine) == [(0, [[1, 2]])]


@pytest.mark.parametrize(("mode", "loads", "stores"), [("both", 1, 1), ("load", 1, 0), ("store", 0, 1)])
def test_a_mode_limits_what_is_done(mode: str, loads: int, stores: int) -> None:
    engine = Engine(mode=mode)
    found(engine, 2)
    asking = request("a", 17)
    assert engine.side.matched_tokens(asking, 0) == 8 * loads
    engine.tables["a"] = list(range(1, 9))
    engine.step({asking: 17})
    assert engine.leader.count(wire.Store) == stores


@pytest.mark.parametrize(
    ("params", "loads", "stored"),
    [
        (None, True, 4),
        ({"other": {}}, True, 4),
        ({"kvferry": {}}, True, 4),
        ({"kvferry": {"load": False}}, False, 4),
        ({"kvferry": {"store": False}}, True, 0),
        ({"kvferry": {"max_store_tokens": 11}}, True, 2),
        ({"kvferry": {"max_store_tokens": 0}}, True, 0),
        ({"kvferry": {"lod": False}}, False, 0),
    ],
)
def test_a_requests_own_settings_apply(params: Any, loads: bool, stored: int) -> None:
    engine = Engine()
    found(engine, 2)
    asking = request("a", 17)
    asking.kv_transfer_params = params
    assert engine.side.matched_tokens(asking, 0) == (8 if loads else 0)
    engine.tables["a"] = list(range(1, 9))
    engine.step({asking: 17})
    count = sum(
        asked.message.parts[0].pages[0][1] for asked in engine.leader.asked if isinstance(asked.message, wire.Store)
    )
    assert count == stored


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("yes", "kvferry is 'yes': give an object"),
        ({"loads": True}, "unknown key 'loads' of kvferry: known are load, store, max_store_tokens, namespace"),
        ({"load": 1}, "load of kvferry is 1: give true or false"),
        ({"store": "no"}, "store of kvferry is 'no': give true or false"),
        ({"max_store_tokens": -1}, "max_store_tokens of kvferry is -1: give a whole number, or leave it out"),
        ({"max_store_tokens": True}, "max_store_tokens of kvferry is True"),
        ({"namespace": 7}, "namespace of kvferry is 7: give a text"),
        ({"namespace": "x" * 257}, "give a text of at most 256 characters"),
    ],
)
def test_wrong_settings_of_a_request_are_named(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params") as error:
        PerRequest.read({"kvferry": given})
    assert text in str(error.value)


def test_wrong_settings_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    for name in ("a", "b"):
        asking = request(name, 17)
        asking.kv_transfer_params = {"kvferry": {"load": 3}}
        assert engine.side.matched_tokens(asking, 0) == 0
    assert caplog.text.count("a request runs without the cache: kv_transfer_params: load of kvferry is 3") == 1
    assert engine.leader.count(wire.Lookup) == 0


def test_namespaces_of_requests_are_separate_and_forgotten_together() -> None:
    engine = Engine()
    named = []
    for name, namespace in (("a", ""), ("b", "tenant 1"), ("c", "tenant 2"), ("d", "tenant 1")):
        asking = request(name, 17)
        asking.kv_transfer_params = {"kvferry": {"namespace": namespace}}
        found(engine, 0)
        engine.side.matched_tokens(asking, 0)
        named.append(engine.leader.last(wire.Lookup).message.namespace)
    assert named[1] == named[3]
    assert len(set(named)) == 3
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(1)
    engine.side.reset()
    for _ in named:
        engine.step()
    forgotten = [asked.message.namespace for asked in engine.leader.asked if isinstance(asked.message, wire.Reset)]
    assert sorted(forgotten) == sorted(set(named))


def test_a_switch_turns_the_cache_off_and_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    switch = Switch(tmp_path)
    switch.look()
    assert not switch.off
    (tmp_path / "off").touch()
    switch.look()
    assert not switch.off, "the file is looked at twice in a second"
    eventually("it is off", lambda: switch.look() and switch.off)
    assert "off exists: requests run without the cache until it is removed" in caplog.text
    (tmp_path / "off").unlink()
    eventually("it is on", lambda: switch.look() and not switch.off)
    assert "off is gone: the cache is used again" in caplog.text


def test_nothing_is_requested_while_the_cache_is_off() -> None:
    engine = Engine()
    found(engine, 2)
    engine.side._switch.off = True
    asking = request("a", 17)
    engine.side.arrived(asking)
    assert engine.side.matched_tokens(asking, 0) == 0
    engine.tables["a"] = list(range(1, 9))
    engine.step({asking: 17})
    assert engine.leader.asked == []
    engine.side._switch.off = False
    assert engine.side.matched_tokens(request("b", 17), 0) == 8


def test_a_request_is_looked_up_when_it_arrives() -> None:
    engine = Engine(lookup_budget_ms=0)
    asking = request("a", 17)
    engine.side.arrived(asking)
    lookup = engine.leader.last(wire.Lookup)
    lookup.end(wire.LookupAnswer(3))
    assert engine.side.matched_tokens(asking, 4) == 8, "the device has one of the three pages"
    assert engine.leader.count(wire.Lookup) == 1
    assert not lookup.waited


def test_a_lookup_that_failed_early_is_sent_again() -> None:
    engine = Engine(lookup_budget_ms=0)
    asking = request("a", 17)
    engine.side.arrived(asking)
    engine.leader.last(wire.Lookup).end(refused())
    # The leader is well again when vLLM considers the request.
    assert engine.side.matched_tokens(asking, 0) is None
    assert engine.leader.count(wire.Lookup) == 2
    engine.leader.last(wire.Lookup).end(wire.LookupAnswer(3))
    assert engine.side.matched_tokens(asking, 0) == 12


def test_few_waiting_requests_are_looked_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader holds the pages that it finds."""
    monkeypatch.setattr(lookups, "EARLY_LOOKUPS_MAX", 2)
    engine = Engine()
    asking = [request(name, 17) for name in "abcd"]
    for each in asking[:3]:
        engine.side.arrived(each)
    assert engine.leader.count(wire.Lookup) == 2
    engine.side.matched_tokens(asking[0], 0)
    engine.side.arrived(asking[3])
    assert engine.leader.count(wire.Lookup) == 3
    engine.side.finished(asking[1])
    engine.side.arrived(request("e", 17))
    assert engine.leader.count(wire.Lookup) == 4


def reported(engine: Engine) -> Any:
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None)
    engine.side.ranks_reported(output)  # type: ignore[arg-type]
    return output


def test_a_load_that_ended_is_reported_with_the_results_of_a_step() -> None:
    """vLLM can schedule the request in its next step then."""
    engine = Engine()
    found(engine, 4)
    for name, answer, at_once in (
        ("a", wire.LoadAnswer(4), True),
        ("b", wire.LoadAnswer(2), False),
        ("c", refused(), False),
    ):
        asking = request(name, 17)
        engine.side.matched_tokens(asking, 0)
        engine.allocate(asking, [10, 11, 12, 13, 14], 16)
        engine.leader.last(wire.Load).end(answer)
        assert reported(engine).finished_recving == ({name} if at_once else None)
        assert engine.step().loaded == ([] if at_once else [name]), "it is reported once"
        assert reported(engine).finished_recving is None


def test_a_load_beside_a_reset_is_reported_by_the_ranks() -> None:
    engine = Engine()
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    engine.pool.touch([engine.pool.blocks[page] for page in (10, 11, 12, 13, 14)])
    assert engine.pool.reset_prefix_cache()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    assert reported(engine).finished_recving is None
    step = engine.step()
    assert (step.loaded, step.failed) == (["a"], ["a"])


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"mode": "read"}, "mode is 'read': give one of both, load, store"),
        ({"store": "none"}, "store is 'none': give one of all, prompt"),
        ({"store_run_pages": 0}, "store_run_pages is 0: give a whole number from 1"),
    ],
)
def test_wrong_words_are_refused(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as error:
        Settings.read(extra)
    assert text in str(error.value)


@pytest.mark.parametrize(("name", "least", "most"), NUMBERS)
def test_numbers_have_the_documented_limits(name: str, least: int, most: int) -> None:
    for value in (least, most):
        assert getattr(Settings.read({name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name} is {value}: give a whole number from {least} to {most}"):
            Settings.read({name: value})
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    assert f"| `{name}` | {least:,} to {most:,} | {getattr(Settings, name):,} |" in page


@pytest.mark.parametrize(("name", "words"), WORDS)
def test_words_are_documented(name: str, words: tuple[str, ...]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    assert f"| `{name}` | {', '.join(f'`{word}`' for word in words)} | `{words[0]}` |" in page
    assert getattr(Settings, name) == words[0]


def test_a_step_that_fills_no_page_to_store_costs_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    run_pages = 8
    engine = Engine(store_run_pages=run_pages)
    found(engine, 0)
    asking = request("a", 2 * PAGE_TOKENS)
    engine.side.matched_tokens(asking, 0)
    decided: list[int] = []
    full = Stores._full
    monkeypatch.setattr(Stores, "_full", lambda *given, **named: (decided.append(1), full(*given, **named))[1])
    pages = 2 + 2 * run_pages
    engine.tables["a"] = list(range(1, pages + 1))
    for tokens in [2 * PAGE_TOKENS, *[1] * (2 * run_pages * PAGE_TOKENS + GENERATED_EVERY)]:
        engine.step({asking: tokens})
        asking.grow(1)
        if not (store := engine.leader.last(wire.Store)).done:
            store.end(wire.StoreAnswer(len(engine.tables), 0))
    stores = [asked.message for asked in engine.leader.asked if isinstance(asked.message, wire.Store)]
    stored = [sum(each[1] if isinstance(each, list) else 1 for each in store.parts[0].pages) for store in stores]
    assert stored == [2, run_pages, run_pages], "pages are stored as without the shortcut"
    # One for each store, and one behind each that finds the next place.
    assert len(decided) <= 2 * len(stored) + 1


def test_a_store_that_cannot_be_requested_holds_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    found(engine, 0)
    asking = request("a", 2 * PAGE_TOKENS)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2]

    def fails(*_given: Any, **_named: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(type(engine.leader), "store", fails)
    with pytest.raises(MemoryError):
        engine.step({asking: 2 * PAGE_TOKENS})
    assert engine.pool.held() == []


def test_no_table_is_built_for_a_load_that_brought_every_page() -> None:
    engine = Engine()
    found(engine, 4)
    asking = request("a", 4 * PAGE_TOKENS + 1)
    matched = engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], matched or 0)
    engine.step()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    engine.step()
    # The request has no table here: a step that asks for it fails.
    engine.tables.pop("a", None)
    engine.step({asking: 1})
    assert engine.leader.count(wire.Store) == 0
