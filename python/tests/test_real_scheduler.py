"""Tests with vLLM's own scheduler: the order of its calls, its pool of pages, its settings."""

from pathlib import Path
from typing import Any

import pytest
from engine import PAGE_TOKENS, tokens, transfer_config
from real_scheduler import Stepped, engine_config
from test_adapters import ADAPTER
from test_scheduler import found
from vllm.lora.request import LoRARequest

from kvferry import wire


def test_a_prompt_is_loaded_and_stored_and_all_pages_are_returned() -> None:
    engine = Stepped()
    free = engine.free_pages()
    found(engine, 2)
    asking = engine.add(tokens(PAGE_TOKENS * 4, seed=1))
    engine.step()
    load = engine.leader.last(wire.Load)
    load.end(wire.LoadAnswer(2))
    engine.run(asking)
    assert engine.scheduled(asking) == [2 * PAGE_TOKENS, 1, 1, 1], "only the rest of the prompt is computed"
    store = engine.leader.last(wire.Store)
    assert engine.free_pages() == free - 2, "the pages of the load are not stored again"
    store.end(wire.StoreAnswer(2, 0))
    engine.step()
    assert engine.free_pages() == free


def test_a_load_gets_no_time_for_steps_that_have_ended() -> None:
    """vLLM passes on a rank's report of a step when the step has ended."""
    engine = Stepped()
    found(engine, 2)
    for seed in (1, 2):
        asking = engine.add(tokens(PAGE_TOKENS * 4, seed=seed))
        engine.step()
        load = engine.leader.last(wire.Load)
        assert (load.message.after > 0) == (seed == 2)
        assert load.timeout_s < 3
        load.end(wire.LoadAnswer(2))
        engine.run(asking)


@pytest.mark.parametrize("during_a_step", [True, False])
def test_a_request_runs_one_step_after_its_load_has_ended(during_a_step: bool) -> None:
    """vLLM takes the report of the load with the results of a step, and schedules the request in the next one."""
    engine = Stepped()
    busy = engine.add(tokens(PAGE_TOKENS, seed=9), max_tokens=50)
    engine.step()
    engine.leader.answers[wire.Lookup] = wire.LookupAnswer(3)
    asking = engine.add(tokens(PAGE_TOKENS * 4, seed=1))
    engine.step()
    engine.step()
    load = engine.leader.last(wire.Load)
    if during_a_step:
        run = engine._run

        def ends(output: Any) -> Any:
            load.end(wire.LoadAnswer(3))
            return run(output)

        engine._run = ends  # type: ignore[method-assign]
    else:
        load.end(wire.LoadAnswer(3))
    # The step with whose results the end is reported, and the first one of the request.
    assert asking.request_id not in engine.step().num_scheduled_tokens
    assert asking.request_id in engine.step().num_scheduled_tokens
    assert not busy.is_finished()


@pytest.mark.parametrize("cached", [True, False])
def test_nothing_is_served_where_prefix_caching_is_off(cached: bool, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM computes page hashes for a connector even without prefix caching."""
    engine = Stepped(config=engine_config(enable_prefix_caching=cached))
    asking = engine.add(tokens(PAGE_TOKENS * 4, seed=1))
    if engine.leader is not None:
        found(engine, 2)
    engine.step()
    assert (engine.leader is not None) == cached
    assert caplog.text.count("prefix caching is off") == (0 if cached else 1)
    if not cached:
        engine.run(asking)
        assert engine.scheduled(asking)[0] == 4 * PAGE_TOKENS


def test_weights_that_may_change_are_never_shared_after_a_reset() -> None:
    transfer = transfer_config(Path("/nowhere"), shared_after_reset=True, verify=0)
    with pytest.raises(ValueError, match="weight_transfer_config says that weights change"):
        Stepped(config=engine_config(transfer, weight_transfer_config={"backend": "nccl"}))


def test_weights_that_may_change_are_not_shared() -> None:
    """vLLM changes weights in place without a notice: pages of any time after the start may be of other weights."""
    namespaces = []
    for changes in ({}, {}, {"weight_transfer_config": {"backend": "nccl"}}, {"weight_transfer_config": {}}):
        engine = Stepped(config=engine_config(**changes))
        found(engine, 0)
        engine.run(engine.add(tokens(PAGE_TOKENS * 4, seed=1)))
        namespaces.append(engine.leader.last(wire.Lookup).message.namespace)
        assert engine.leader.count(wire.Store) == 1, "the engine stores for itself"
        assert not engine.leader.count(wire.Reset), "there is nothing to remove"
    assert namespaces[0] == namespaces[1]
    assert len(set(namespaces)) == 3


def test_pages_of_an_adapters_older_files_are_not_stored_as_those_of_newer_ones(tmp_path: Path) -> None:
    """vLLM finds its own pages by the adapter's name and path, whatever files are there now."""
    (tmp_path / ADAPTER).write_text("one")
    engine = Stepped()
    found(engine, 0)
    prompt = tokens(PAGE_TOKENS * 6, seed=1)
    first = engine.add(prompt[: PAGE_TOKENS * 4], lora=LoRARequest("a", 1, str(tmp_path)))
    engine.run(first)
    assert engine.leader.count(wire.Store) == 1
    engine.leader.last(wire.Store).end(wire.StoreAnswer(4, 0))
    (tmp_path / ADAPTER).write_text("another")
    for number in (2, 3):
        longer = engine.add(prompt, lora=LoRARequest("a", number, str(tmp_path)))
        engine.run(longer)
        if number == 2:
            assert engine.scheduled(longer)[0] < PAGE_TOKENS * 6, "the device's pages are used"
            assert engine.leader.count(wire.Store) == 1
            assert engine.scheduler.reset_prefix_cache()
    assert engine.leader.count(wire.Store) == 2, "pages computed after a reset are stored"
    assert engine.leader.last(wire.Store).message.parts[0].first_page == 0
    longest = engine.add(prompt + tokens(PAGE_TOKENS * 2, seed=2), lora=LoRARequest("a", 3, str(tmp_path)))
    engine.run(longest)
    assert engine.leader.count(wire.Store) == 3, "so are the pages that follow them"
