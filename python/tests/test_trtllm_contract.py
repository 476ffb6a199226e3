"""Tests that the connector for TensorRT-LLM keeps the contract for connectors, with an executor of our own."""

import collections
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trtllm_stubs
from contract_run import Run, scripted
from daemon import eventually
from test_trtllm import prompt
from trtllm_executor import BLOCK, Executor
from trtllm_processes import ProcessExecutor

from kvferry.contract.peers import Settings
from kvferry.contract.script import DEFAULT, Event, Script

#: Rules that this connector never exercises, and why.
NEVER = {
    "failed-pages-computed": "TensorRT-LLM cannot compute pages that were promised: they are loaded again",
}
BASE = prompt(41, 6 * BLOCK + 2)


def prompts(number: int) -> list[list[int]]:
    """Prompts of which one has the pages of another one behind a new beginning, and some continue others."""
    base = prompt(100 + number, 6 * BLOCK + 2)
    moved = prompt(200 + number, BLOCK) + base[BLOCK:]
    longer = base[: 6 * BLOCK] + prompt(300 + number, 3 * BLOCK)
    return [base, base[: 3 * BLOCK] + prompt(400 + number, 2 * BLOCK + 1), moved, base, longer, moved]


@contextlib.contextmanager
def engine(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    script: Script,
    kind: type[Executor] = Executor,
    *,
    ranks: int = 1,
    **more: Any,
) -> Iterator[tuple[Run, Executor]]:
    """An executor beside a scripted kvferry. At the end of the run its engine is still connected."""
    (folder / "model.safetensors").write_bytes(b"weights")
    settings = Settings(ranks=ranks, request_credits=3, heartbeat_ms=1000)
    with scripted(script, settings, **more) as run, trtllm_stubs.installed(trtllm_stubs.interface()):
        monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(run.socket_dir))
        monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "1000")
        # A store that was refused as busy is given up after this time.
        monkeypatch.setenv("KVFERRY_TRTLLM_STORE_HOLD_MS", "300")
        # Files of a test are as new as the processes of its ranks.
        monkeypatch.setenv("KVFERRY_TRTLLM_WEIGHTS", "test")
        executor = kind(trtllm_stubs.connector(), str(folder), ranks=ranks)
        try:
            eventually("the ranks are registered", lambda: executor.registered)
            yield run, executor

            side = executor.scheduler._side
            eventually("nothing is owed", lambda: side.turn() or not run.kvferry.waits())
            run.report = run.kvferry.stop()
        finally:
            executor.close()


def test_the_connector_for_trtllm_keeps_the_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Script([*DEFAULT, Event("finish", 12, "drop"), Event("load", 8, "fail"), Event("load", 9, "busy")])
    with engine(monkeypatch, tmp_path, script, ProcessExecutor, ranks=2) as (run, executor):
        results: dict[tuple[int, ...], list[int]] = {}

        def alone(name: str, tokens: list[int], salt: int | None = None) -> None:
            with run.declared(name, f"salt {salt}", tokens):
                request = executor.complete(tokens, cache_salt_id=salt)
                executor.rest()
            executor.clear()
            assert results.setdefault((salt or 0, *tokens), request.tokens) == request.tokens

        def play(number: int) -> None:
            for at, tokens in enumerate(prompts(number)):
                alone(f"prompt {number}.{at}", tokens)
            for tokens in prompts(number):
                executor.add(tokens)
            executor.rest()
            executor.clear()

        for salt in (1, 2):
            alone(f"salt {salt}", BASE, salt)
        run.rounds(play, NEVER)
        assert executor.calls["loaded"] > 5
    assert run.broken == {}
    assert run.not_exercised == set(NEVER)


@pytest.mark.parametrize("ended", [False, True], ids=["the request runs", "the request has ended"])
def test_a_load_that_was_not_examined_is_sent_again_as_the_same_request(
    ended: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = Script([Event("load", 1, "busy")])
    loads: collections.Counter[int] = collections.Counter()

    def record(message: dict[str, Any]) -> None:
        loads[message["id"]] += message.get("received") == "load"

    with engine(monkeypatch, tmp_path, script, record=record) as (run, executor):
        executor.complete(BASE)
        executor.rest()
        executor.clear()
        request = executor.add(BASE)
        executor.iterate()
        if ended:
            side = executor.scheduler._side
            eventually("the load is refused", lambda: side.turn() or side.loads._open[request.request_id].repeats)
            assert side.finished(request.request_id), "its blocks are kept"
            eventually("its blocks are free", lambda: side.turn() or not side.holds(request.request_id))
        else:
            executor.rest()
            # Other prompts use the pages.
            for seed in range(60, 66):
                executor.complete(prompt(seed, 6 * BLOCK + 2))
            executor.rest()
    assert +loads == collections.Counter({max(loads, key=loads.__getitem__): 2})
    assert run.broken == {}
    assert "busy-keeps-pages" not in run.not_exercised


@pytest.mark.parametrize("restarts", [False, True], ids=["busy", "the leader restarts"])
def test_pages_of_a_store_that_may_run_are_in_no_other_store(
    restarts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The next leader refuses what the first one has not answered, but not at once.
    events = [Event("store", 1, "silent"), Event("store", 2, "late", 500)] if restarts else [Event("store", 1, "busy")]
    with engine(monkeypatch, tmp_path, Script(events)) as (run, executor):
        monkeypatch.setattr(trtllm_stubs.connector("stores"), "STORE_PAUSE_S", 0.0)
        executor.add(BASE, max_new=6 * BLOCK)
        executor.iterate()
        side = executor.scheduler._side
        (store,) = side.stores._open.values()
        if restarts:
            eventually("the store is received", lambda: len(run.kvferry.events_left) == 1)
            run.kvferry.restart()
            eventually("it is sent again", lambda: not run.kvferry.events_left)
        else:
            eventually("the store is refused", lambda: store.pending.done)
        executor.rest()
        assert run.kvferry.events_left == []
        assert len(run.kvferry._leader.stored) > 6, "later pages are stored"
    assert run.broken == {}
    assert "one-store-of-a-page" not in run.not_exercised
