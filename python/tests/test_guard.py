"""A fault in any hook of the connector costs hits, but no request; no page is freed too early."""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon import eventually
from engine import PAGE_TOKENS, tokens
from real_scheduler import Stepped
from test_scheduler import found

from kvferry import wire
from kvferry.client import Failure
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.vllm import KvferryConnector
from kvferry.vllm.guard import Faults, guarded
from kvferry.vllm.metadata import RankReport, StepMetadata
from kvferry.vllm.reports import Reports
from kvferry.wire import Code

PAGES = 64
HOOKS = sorted(name for name, hook in vars(KvferryConnector).items() if hasattr(hook, "guarded"))
#: Hooks that do nothing.
EMPTY = {"start_load_kv", "wait_for_layer_load", "save_kv_layer"}


def test_every_hook_is_guarded() -> None:
    hooks = {name for name, each in vars(KvferryConnector).items() if inspect.isfunction(each) and name[0] != "_"}
    assert hooks - set(HOOKS) == EMPTY
    for name in EMPTY:
        arguments = [None] * (len(inspect.signature(getattr(KvferryConnector, name)).parameters) - 1)
        connector = object.__new__(KvferryConnector)
        assert (
            getattr(connector, name)(*arguments[: {"start_load_kv": 1}.get(name, 3 if name[0] == "s" else 1)]) is None
        )


@contextmanager
def faulty(name: str, *, after: bool, times: int = 1) -> Iterator[list[int]]:
    """Makes the next calls of the hook raise, before or after the hook's work."""
    hook = getattr(KvferryConnector, name)
    sound = hook.__wrapped__
    raised: list[int] = []

    def broken(*arguments: Any, **named: Any) -> Any:
        if len(raised) >= times:
            return sound(*arguments, **named)
        if after:
            sound(*arguments, **named)
        raised.append(1)
        raise LookupError("injected")

    hook.__wrapped__ = broken
    try:
        yield raised
    finally:
        hook.__wrapped__ = sound


def answer_loads(engine: Stepped, what: Any) -> None:
    assert engine.leader is not None
    for asked in engine.leader.asked:
        if isinstance(asked.message, wire.Load) and not asked.done:
            asked.end(what)


#: The moment of the fault: before any work, while a load runs, or at the end of a load.
MOMENTS = ("start", "loading", "loaded")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_costs_hits_and_no_request(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = 0
    for after, moment, answer in itertools.product(
        (False, True), MOMENTS, (wire.LoadAnswer(2), wire.LoadAnswer(1), unknown())
    ):
        caplog.clear()
        print(f"{hook}, after: {after}, {moment}, {answer}")
        seen += one_fault(hook, after, moment, answer)
        assert caplog.text.count("requests run without the cache") == caplog.text.count(f"kvferry: {hook} failed")
    assert seen > 0 or hook in UNSEEN, "the hook was never called"


#: Hooks that the simulated engine does not call; :func:`test_a_fault_in_a_hook_outside_a_step_costs_no_request` does.
UNSEEN = {
    "get_mem_pool_context",
    "register_kv_caches",
    "request_finished",
    "reset_cache",
    "shutdown",
    "has_pending_block_frees",
    "has_pending_push_work",
}


def unknown() -> Failure:
    return Failure(Code.DEADLINE, "nobody knows", reported=False)


def one_fault(hook: str, after: bool, moment: str, answer: Any) -> int:
    """Returns how often the fault was raised. The first page of a load without a report is computed, too."""
    prompt = tokens(PAGE_TOKENS * 4, seed=1)
    raised: list[int] = []
    with contextlib.ExitStack() as stack:

        def arm() -> None:
            nonlocal raised
            raised = stack.enter_context(faulty(hook, after=after))

        if moment == "start":
            arm()
        engine = Stepped(pages=PAGES)
        leader = engine.leader
        assert leader is not None
        free = engine.free_pages()
        found(engine, 2)
        first = engine.add(prompt)
        engine.step()
        if moment == "loading":
            arm()
        engine.step()
        answer_loads(engine, answer)
        if moment == "loaded":
            arm()
        engine.run(first)
        in_place = answer.pages if isinstance(answer, wire.LoadAnswer) else 0
        computed = sum(engine.scheduled(first)) - 3
        assert 4 * PAGE_TOKENS - in_place * PAGE_TOKENS <= computed <= 4 * PAGE_TOKENS
        # A later request finds no page.
        lookups, declined = leader.count(wire.Lookup), bool(raised)
        second = engine.add(tokens(PAGE_TOKENS * 4, seed=2))
        for _ in engine.until_over(second):
            answer_loads(engine, answer)
        if raised:
            assert engine.connector.fault == hook
        if declined:
            assert leader.count(wire.Lookup) == lookups
            assert sum(engine.scheduled(second)) - 3 == 4 * PAGE_TOKENS
        held = {page for asked in open_stores(engine) for page in pages_of(asked.message.parts[0].pages)}
        assert engine.free_pages() == free - len(held), "only pages that are read are held"
        for asked in open_stores(engine):
            asked.end(wire.StoreAnswer(1, 0))
        for _ in range(3):
            engine.step()
        assert engine.free_pages() == free
        assert not engine.scheduler.has_unfinished_requests()
    return len(raised)


def open_stores(engine: Stepped) -> list[Any]:
    assert engine.leader is not None
    return [asked for asked in engine.leader.asked if isinstance(asked.message, wire.Store) and not asked.done]


def pages_of(items: list) -> Iterator[int]:
    for item in items:
        yield from [item] if isinstance(item, int) else range(item[0], item[0] + item[1])


def test_a_fault_in_a_hook_outside_a_step_costs_no_request() -> None:
    apart: tuple[tuple[str, Any, Any], ...] = (
        ("get_mem_pool_context", lambda made: made.rank.get_mem_pool_context(), None),
        ("register_kv_caches", lambda made: made.rank.register_kv_caches({}), None),
        ("request_finished", lambda made: made.connector.request_finished(made.add([1, 2]), []), (False, None)),
        ("reset_cache", lambda made: made.connector.reset_cache(), True),
        ("shutdown", lambda made: made.connector.shutdown(), None),
        ("has_pending_block_frees", lambda made: made.connector.has_pending_block_frees(), False),
        ("has_pending_push_work", lambda made: made.connector.has_pending_push_work(), False),
    )
    assert {hook for hook, _, _ in apart} == UNSEEN
    for hook, call, result in apart:
        for after in (False, True):
            made = Stepped(pages=PAGES)
            found(made, 0)
            with faulty(hook, after=after) as raised:
                assert call(made) == result
                assert raised
            made.run(made.add(tokens(PAGE_TOKENS * 3, seed=3)))


def test_a_hook_that_always_fails_is_logged_once_and_stops_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """A fault in a hook that begins work is logged once, and everything is computed."""
    for hook in ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"):
        caplog.clear()
        with faulty(hook, after=False, times=1 << 30) as raised:
            engine = Stepped(pages=PAGES)
            found(engine, 2)
            for number in range(3):
                for _ in engine.until_over(engine.add(tokens(PAGE_TOKENS * 4, seed=number))):
                    answer_loads(engine, wire.LoadAnswer(2))
            assert len(raised) == 1
        assert caplog.text.count(f"kvferry: {hook} failed") == 1


def test_a_fault_on_a_rank_ends_lookups_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    engine = Stepped(pages=PAGES)
    found(engine, 0)
    with faulty("wait_for_save", after=False):
        engine.run(engine.add(tokens(PAGE_TOKENS * 4, seed=1)))
    assert engine.rank.fault == engine.connector.fault == "wait_for_save"
    assert "wait_for_save failed on a rank, whose log has the reason" in caplog.text


def test_a_device_that_reports_no_progress_ends_lookups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later steps are never known to be written, so that each load after them would wait for its whole deadline."""

    def broken() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    engine = Stepped(pages=PAGES)
    leader = engine.leader
    assert leader is not None
    found(engine, 2)
    group = Group({"layer": torch.zeros(8, 2, 8, 8)}, engine_page_tokens=8, device_pages=8)
    memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
    engine.rank._rank = session = RankSession(tmp_path / "nobody", b"e" * 16, 0, 0, memory)
    monkeypatch.setattr(engine.rank, "_on_device", True)
    monkeypatch.setattr("kvferry.vllm.connector.current_stream", lambda: None)
    monkeypatch.setattr("kvferry.vllm.connector.record_end", lambda: broken)
    try:
        first = engine.add(tokens(PAGE_TOKENS * 4, seed=1))
        for _ in engine.until_over(first):
            answer_loads(engine, wire.LoadAnswer(2))
        eventually("the fault is logged", lambda: "unspecified launch failure" in caplog.text)
        engine.step()
        lookups, loads, stores = (leader.count(kind) for kind in (wire.Lookup, wire.Load, wire.Store))
        assert loads == 1
        second = engine.add(tokens(PAGE_TOKENS * 4, seed=2))
        # The load would get no answer.
        engine.run(second)
        assert sum(engine.scheduled(second)) - 3 == 4 * PAGE_TOKENS
        assert (leader.count(wire.Lookup), leader.count(wire.Load)) == (lookups, loads)
        assert leader.count(wire.Store) == stores
        assert engine.connector.fault == session.fault
        assert f"{session.fault} failed on a rank, whose log has the reason" in caplog.text
        assert caplog.text.count("the device reports no progress") == 1
    finally:
        engine.rank.shutdown()


def test_a_fallback_may_fail_too() -> None:
    class Hooks(Faults):
        def _instead(self) -> int:
            raise ValueError

        @guarded(instead=_instead, default=lambda: 7)
        def hook(self) -> int:
            raise ValueError

        @guarded()
        def interrupted(self) -> None:
            raise KeyboardInterrupt

    hooks = Hooks()
    assert hooks.hook() == 7
    assert hooks.fault == "hook"
    with pytest.raises(KeyboardInterrupt):
        hooks.interrupted()


def test_each_report_is_made_once() -> None:
    reports = Reports()
    step = StepMetadata(loaded=["a"], failed_pages=[3], abandon=[7])
    for _ in range(2):
        reports.begin(step)
    for _ in range(2):
        assert reports.loaded() == {"a"}
    for _ in range(2):
        assert reports.failed_pages() == {3}
    assert reports.loaded() == set(), "only together with its failed pages"
    assert reports.to_abandon() == [7]
    reports.are_over([7])
    for _ in range(2):
        assert reports.report("") == RankReport({7: 1})
    reports.begin(StepMetadata())
    reports.are_over([7])
    assert (reports.loaded(), reports.failed_pages(), reports.report("")) == (set(), set(), None)
    assert reports.report("hook") == RankReport({}, "hook")
    assert reports.report("hook") is None


def test_the_end_of_a_step_is_reported_with_the_step() -> None:
    reports = Reports()
    for through, reported in ((0, 0), (3, 3), (3, 0), (5, 5)):
        reports.begin(StepMetadata(written_through=through))
        reports.failed_pages()
        for _ in range(2):
            report = reports.report("")
            assert (report.stepped_through if report else 0) == reported, "a repeated call returns the same"
