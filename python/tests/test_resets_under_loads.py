"""Resets of vLLM's own scheduler while pages are loaded: vLLM preempts running requests only."""

import pytest
from engine import PAGE_TOKENS, tokens
from real_scheduler import Stepped
from test_scheduler import found
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from kvferry import wire

PROMPT = tokens(PAGE_TOKENS * 6, seed=1)


@pytest.fixture
def engine() -> Stepped:
    return Stepped()


def loading(engine: Stepped, count: int = 1) -> list[Request]:
    """Starts requests that share two device pages, and load two more each."""
    found(engine, 0)
    engine.run(engine.add(PROMPT[: PAGE_TOKENS * 2 + 1]))
    engine.leader.last(wire.Store).end(wire.StoreAnswer(2, 0))
    found(engine, 2)
    own = [tokens(PAGE_TOKENS * 4, seed=number + 10) for number in range(count)]
    requests = [engine.add(PROMPT[: PAGE_TOKENS * 2] + each) for each in own]
    engine.step()
    assert engine.leader.count(wire.Load) == count
    assert [request.num_computed_tokens for request in requests] == [PAGE_TOKENS * 4] * count
    return requests


def end_loads(engine: Stepped) -> None:
    for asked in list(engine.leader.asked):
        if isinstance(asked.message, wire.Load) and not asked.done:
            asked.end(wire.LoadAnswer(2))


def reset(engine: Stepped) -> bool:
    return engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def namespaces(engine: Stepped) -> list[bytes]:
    return [asked.message.namespace for asked in engine.leader.asked if isinstance(asked.message, wire.Lookup)]


def store_all(engine: Stepped) -> None:
    for asked in list(engine.leader.asked):
        if isinstance(asked.message, wire.Store) and not asked.done:
            asked.end(wire.StoreAnswer(1, 0))
    engine.step()


@pytest.mark.parametrize("ended", ["no", "seen", "one by one"])
def test_loading_pages_are_computed_after_a_reset(engine: Stepped, ended: str) -> None:
    free = engine.free_pages()
    requests = loading(engine, 3)
    found(engine, 0)
    running = engine.add(tokens(PAGE_TOKENS, seed=9), max_tokens=30)
    engine.step()
    if ended == "seen":
        # The load is known to be over, and not yet reported to the ranks.
        end_loads(engine)
        engine.connector._scheduler._settle()
    before = namespaces(engine)[-1]
    engine.leader.cancels = True
    assert reset(engine)
    if ended == "one by one":
        for asked in [each for each in engine.leader.asked if isinstance(each.message, wire.Load)]:
            asked.end(wire.LoadAnswer(2))
            engine.step()
    end_loads(engine)
    engine.run(*requests, running)
    computed = sorted(engine.scheduled(request)[0] for request in requests)
    assert computed == [PAGE_TOKENS * 4, PAGE_TOKENS * 4, PAGE_TOKENS * 6], "the shared pages are computed once"
    engine.run(engine.add(PROMPT))
    assert namespaces(engine)[-1] != before
    store_all(engine)
    assert engine.free_pages() == free


def test_device_pages_from_before_a_reset_are_not_found(engine: Stepped) -> None:
    (request,) = loading(engine)
    assert reset(engine)
    found(engine, 0)
    other = engine.add(PROMPT[: PAGE_TOKENS * 2 + 1])
    engine.run(other)
    assert engine.scheduled(other)[0] == PAGE_TOKENS * 2 + 1
    end_loads(engine)
    engine.run(request)
    # The request started again, and found the pages that the other request computed.
    assert engine.scheduled(request)[0] == request.num_prompt_tokens - PAGE_TOKENS * 2


def test_a_pause_ends_while_pages_are_loaded(engine: Stepped) -> None:
    """A paused engine runs no step for its requests, so that no load would end."""
    (request,) = loading(engine)
    found(engine, 0)
    engine.add(tokens(PAGE_TOKENS * 3, seed=9))
    engine.step()
    engine.leader.cancels = True
    assert engine.leader.count(wire.Store) == 2, "a store runs, too"
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.scheduler.has_requests(), "otherwise vLLM would delay the reset"
    assert reset(engine)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.scheduler.has_requests()
    end_loads(engine)
    engine.run(request)
    assert sum(engine.scheduled(request)) >= request.num_prompt_tokens


def test_a_request_that_was_aborted_during_its_load_delays_no_reset(engine: Stepped) -> None:
    free = engine.free_pages()
    (request,) = loading(engine)
    engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert reset(engine)
    assert engine.free_pages() < free, "the load still writes there"
    assert engine.scheduler.has_requests()
    end_loads(engine)
    engine.step()
    assert engine.free_pages() == free


def test_a_reset_that_vllm_refuses_leaves_the_namespace(engine: Stepped) -> None:
    """A request whose load is over, and that vLLM has not scheduled yet, cannot be preempted."""
    (request,) = loading(engine)
    end_loads(engine)
    engine.step()
    before = namespaces(engine)[-1]
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        reset(engine)
    stores = engine.leader.count(wire.Store)
    engine.run(request)
    assert engine.leader.count(wire.Store) == stores, "the request continues with pages from before"
    assert reset(engine)
    found(engine, 0)
    engine.run(engine.add(PROMPT))
    assert namespaces(engine)[-1] != before
    assert engine.leader.count(wire.Store) == stores + 1


def test_a_reset_of_the_device_alone_leaves_other_engines_their_pages(engine: Stepped) -> None:
    """Such a reset looks like a complete one that vLLM gave up. Both only make the engine leave its namespaces."""
    (request,) = loading(engine)
    end_loads(engine)
    engine.step()
    shared = namespaces(engine)[-1]
    assert not engine.scheduler.reset_prefix_cache()
    engine.run(request)
    assert engine.leader.count(wire.Reset) == 0
    # A complete reset removes them at the leader, too.
    assert reset(engine)
    engine.step()
    assert engine.leader.last(wire.Reset).message.namespace == shared


def test_pages_loaded_after_a_reset_of_the_device_alone_are_from_before_the_next_reset(engine: Stepped) -> None:
    (request,) = loading(engine)
    end_loads(engine)
    engine.run(request)
    store_all(engine)
    assert engine.scheduler.reset_prefix_cache(), "vLLM's own pages only, nothing in kvferry"
    found(engine, 4)
    request = engine.add(PROMPT[: PAGE_TOKENS * 4 + 1])
    engine.step()
    end_loads(engine)
    engine.step()
    before = namespaces(engine)[-1]
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        reset(engine)
    stores = engine.leader.count(wire.Store)
    found(engine, 0)
    other = engine.add(PROMPT)
    engine.run(request, other)
    assert engine.scheduled(other)[0] < len(PROMPT), "the request finds loaded pages on the device"
    assert namespaces(engine)[-1] != before
    assert engine.leader.count(wire.Store) == stores
