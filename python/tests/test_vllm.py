"""Tests that a real vLLM computes the same with kvferry as without, to the last bit."""

import os
import signal
from collections.abc import Iterator

import pytest
from daemon import Daemon, eventually, running
from engine import PAGE_TOKENS, Engine, Server, config, said, settled, shared_memory, tokens, wait_steps
from signals import stop

BASE = tokens(270, seed=1)
#: Prompts that share, branch and extend prefixes.
PROMPTS = [
    BASE,
    BASE[:100],
    BASE[:150] + tokens(90, seed=2),
    BASE + tokens(140, seed=3),
    tokens(PAGE_TOKENS * 4, seed=4),
    tokens(20, seed=5),
]


def loadable(prompts: list[list[int]]) -> int:
    """Returns the number of tokens in full pages, at most all but the last token of each prompt."""
    return sum((len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS for prompt in prompts)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(ranks=1, replicas=2) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    """One engine, shared by all tests that restore its state."""
    engine = Engine(config(daemon.socket_dir, extra={"load_timeout_ms": 2000, "shared_after_reset": True}))
    daemon.pid()
    yield engine
    engine.end()


@pytest.fixture(scope="module")
def cold(engine: Engine) -> list:
    """Returns the engine's results without any hit."""
    answers = []
    for prompt in PROMPTS:
        engine.reset(connector=True)
        answers += engine.generate(prompt)
    assert all(answer["cached"] == 0 for answer in answers)
    return said(answers)


def stored(engine: Engine, daemon: Daemon) -> None:
    """Waits until kvferry has the pages of all prompts, and the engine none."""
    daemon.pid()
    engine.reset(connector=True)
    full = {
        tuple(prompt[: end * PAGE_TOKENS]) for prompt in PROMPTS for end in range(1, len(prompt) // PAGE_TOKENS + 1)
    }

    def found() -> bool:
        # Stores pause for a moment after a worker's death.
        engine.generate(*PROMPTS)
        settled(engine, daemon)
        engine.reset()
        return daemon.status()["tiers"][0]["page_states"]["ready"] >= len(full)

    eventually("the pages of all prompts are stored", found)


def test_warm_results_equal_cold_results(engine: Engine, daemon: Daemon, cold: list) -> None:
    stored(engine, daemon)
    for prompt, expected in zip(PROMPTS, cold, strict=True):
        engine.reset()
        before = engine.external_hits()
        answers = engine.generate(prompt)
        assert said(answers) == [expected]
        assert engine.external_hits() - before == loadable([prompt])
        assert answers[0]["cached"] == loadable([prompt])


def test_concurrent_warm_results_equal_cold_results(engine: Engine, daemon: Daemon, cold: list) -> None:
    stored(engine, daemon)
    before = engine.external_hits()
    assert said(engine.generate(*PROMPTS)) == cold
    assert engine.external_hits() > before


def test_changed_bytes_in_host_memory_change_the_results(engine: Engine, daemon: Daemon, cold: list) -> None:
    """Without verification: so it is kvferry's bytes that are used."""
    stored(engine, daemon)
    daemon.poison()
    engine.request("verify", on=False)
    answers = said(engine.generate(BASE))
    engine.request("verify", on=True)
    assert answers != cold[:1], "pages of kvferry were not used"
    engine.reset(connector=True)
    engine.request("wipe")
    assert said(engine.generate(BASE)) == cold[:1]


def test_loaded_pages_are_verified(engine: Engine, daemon: Daemon, cold: list) -> None:
    stored(engine, daemon)
    before = engine.request("verified")
    assert said(engine.generate(BASE)) == cold[:1]
    right, unknown, wrong = (after - each for after, each in zip(engine.request("verified"), before, strict=True))
    assert (right, unknown, wrong) == (loadable([BASE]) // PAGE_TOKENS, 0, 0)


def test_changed_pages_are_computed_and_not_served_again(engine: Engine, daemon: Daemon, cold: list) -> None:
    stored(engine, daemon)
    pages = loadable([BASE]) // PAGE_TOKENS
    wrong = engine.request("verified")[2]
    daemon.poison()
    hits = engine.external_hits()
    assert said(engine.generate(BASE)) == cold[:1]
    assert engine.external_hits() - hits == loadable([BASE]), "the changed pages were loaded"
    assert engine.request("verified")[2] - wrong == pages
    assert f"rank 0: {pages} of the pages 0 to {pages - 1} of group 0 of request" in engine.logged()

    def served() -> bool:
        settled(engine, daemon)
        engine.reset()
        hits = engine.external_hits()
        assert said(engine.generate(BASE)) == cold[:1]
        return engine.external_hits() - hits == loadable([BASE])

    eventually("the pages are removed, stored and loaded again", served)
    assert engine.request("verified")[2] - wrong == pages, "changed pages were loaded once"
    # All other pages are changed, too.
    engine.reset(connector=True)


def test_requests_with_different_salts_share_no_pages(engine: Engine, daemon: Daemon, cold: list) -> None:
    stored(engine, daemon)
    before = engine.external_hits()
    salted = {"tokens": BASE, "salt": "another"}
    assert said(engine.generate(salted)) == cold[:1]
    assert engine.external_hits() == before
    engine.reset()
    assert said(engine.generate(salted)) == cold[:1]
    assert engine.external_hits() - before == loadable([BASE])


def test_pages_of_generated_tokens_are_found(engine: Engine, daemon: Daemon) -> None:
    """Pages of generated tokens are stored as they fill."""
    engine.reset(connector=True)
    prompt = tokens(40, seed=6)
    (first,) = engine.generate(prompt, max_tokens=70)
    settled(engine, daemon)
    longer = prompt + first["tokens"] + tokens(5, seed=7)
    engine.reset(connector=False)
    before = engine.external_hits()
    warm = engine.generate(longer)
    # The KV of the last generated token was never computed.
    assert engine.external_hits() - before == (len(prompt) + 69) // PAGE_TOKENS * PAGE_TOKENS
    engine.reset(connector=True)
    assert said(warm) == said(engine.generate(longer))


def test_two_failed_pages_are_computed(engine: Engine, daemon: Daemon, cold: list) -> None:
    stored(engine, daemon)
    # Of the eight pages, the engine has six, and two are loaded.
    engine.generate(BASE[: 6 * PAGE_TOKENS + 1])
    hits = engine.external_hits()
    worker = daemon.pid()
    stop(worker)
    engine.request("add", id="two", tokens=BASE)
    state = wait_steps(engine, "the load is under way", lambda state: waits_for_pages(state, "two"))
    daemon.killed(worker)
    state = wait_steps(engine, "the prompt is done", lambda state: "two" in state["done"])
    assert said([state["done"]["two"]]) == cold[:1]
    assert engine.external_hits() - hits == 2 * PAGE_TOKENS
    assert "2 of 2 pages of request two" in engine.logged()
    daemon.pid()


def waits_for_pages(state: dict, request: str) -> bool:
    return state["status"].get(f"{request}") == "WAITING_FOR_REMOTE_KVS" or any(
        name.startswith(request) and status == "WAITING_FOR_REMOTE_KVS" for name, status in state["status"].items()
    )


def test_an_abort_during_a_load_frees_its_pages_after_the_copy(engine: Engine, daemon: Daemon, cold: list) -> None:
    stored(engine, daemon)
    free = engine.request("step")["free"]
    worker = daemon.pid()
    stop(worker)
    try:
        engine.request("add", id="aborted", tokens=BASE)
        state = wait_steps(engine, "the load is under way", lambda state: waits_for_pages(state, "aborted"))
        assert state["free"] == free - loadable([BASE]) // PAGE_TOKENS
        engine.request("abort", id="aborted")
        for _ in range(10):
            state = engine.request("step")
        assert state["free"] < free, "the worker may still write the pages"
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_steps(engine, "pages are free again", lambda state: state["free"] == free and not state["status"])
    daemon.wait_idle()
    assert daemon.status()["tiers"][0]["page_states"]["filling"] == 0
    assert said(engine.generate(BASE)) == cold[:1]


def test_an_abort_during_a_store_frees_its_pages_after_the_copy(engine: Engine, daemon: Daemon, cold: list) -> None:
    engine.reset(connector=True)
    free = engine.request("step")["free"]
    worker = daemon.pid()
    stop(worker)
    try:
        engine.request("add", id="aborted", tokens=BASE)
        for _ in range(3):
            engine.request("step")
        engine.request("abort", id="aborted")
        for _ in range(10):
            state = engine.request("step")
        assert state["free"] <= free - len(BASE) // PAGE_TOKENS, "the worker may still read the pages"
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_steps(engine, "pages are free again", lambda state: state["free"] == free and not state["status"])
    daemon.wait_idle()
    pages = daemon.status()["tiers"][0]["page_states"]
    assert pages["filling"] == pages["reserved"] == pages["quarantined"] == 0
    engine.reset()
    assert said(engine.generate(BASE)) == cold[:1]


def test_a_reset_in_the_middle_of_a_prompt_does_not_change_its_result(
    engine: Engine, daemon: Daemon, cold: list
) -> None:
    """The store has just begun: vLLM ends if its pages are still held at the reset."""
    engine.reset(connector=True)
    engine.request("add", id="reset", tokens=BASE)
    engine.request("step")
    assert engine.request("reset", running=True, connector=True)
    state = wait_steps(engine, "the prompt is done", lambda state: "reset" in state["done"])
    assert said([state["done"]["reset"]]) == cold[:1]
    daemon.wait_idle()


#: Hooks that are not called while requests run, or not by this engine.
NOT_CALLED = {
    "bind_gpu_block_pool",
    "has_pending_block_frees",
    "has_pending_push_work",
    "register_kv_caches",
    "request_finished",
    # Only for memory on a GPU; and only with KV events.
    "get_mem_pool_context",
    "take_events",
    "reset_cache",
    "shutdown",
}


def test_a_fault_in_any_hook_costs_hits_and_no_request(engine: Engine, daemon: Daemon, cold: list) -> None:
    called = set(engine.request("hooks")) - NOT_CALLED
    assert len(called) >= 10
    for hook in sorted(called):
        stored(engine, daemon)
        engine.request("fault", hook=hook)
        assert said(engine.generate(*PROMPTS)) == cold
        assert hook in engine.request("faults"), "the hook was not called"
        engine.reset()
        hits = engine.external_hits()
        assert said(engine.generate(*PROMPTS)) == cold
        assert engine.external_hits() == hits, "there are no more lookups"
        engine.request("mend")
        daemon.wait_idle()


@pytest.mark.parametrize("victim", ["leader", "worker"])
def test_results_are_equal_after_kills_between_requests(
    engine: Engine, daemon: Daemon, cold: list, victim: str
) -> None:
    stored(engine, daemon)
    hits = engine.external_hits()
    daemon.killed(daemon.leader if victim == "leader" else daemon.pid())
    assert said(engine.generate(*PROMPTS)) == cold
    daemon.pid()

    def found() -> bool:
        engine.reset()
        assert said(engine.generate(*PROMPTS)) == cold
        return engine.external_hits() > hits

    eventually("pages are loaded again", found)


def test_two_engines_share_their_pages(engine: Engine, daemon: Daemon, cold: list) -> None:
    """The second engine is ``vllm serve``, and is killed at the end."""
    stored(engine, daemon)
    before = shared_memory()
    server = Server(config(daemon.socket_dir, extra={"replica": 1}))
    try:
        daemon.pid(replica=1)
        assert said(server.generate(*PROMPTS[:4])) == json_like(cold[:4])
        # The next prompt finds pages that an earlier one loaded in the engine itself.
        assert server.external_hits() > 0
        other = tokens(200, seed=8)
        fresh = server.generate(other)
        eventually("copies are over", lambda: not daemon.status()["copies_under_way"])
        hits = engine.external_hits()
        assert json_like(said(engine.generate(other))) == said(fresh)
        assert engine.external_hits() - hits == loadable([other])
    finally:
        server.end(signal.SIGKILL)
    daemon.wait_idle()
    eventually("the engine's memory is gone", lambda: shared_memory() == before)
    eventually("the rank is gone", lambda: not all(rank["attached"] for rank in daemon.status()["ranks"]))


def json_like(what: list) -> list:
    return [(tokens, [[list(pair) for pair in step] for step in logprobs]) for tokens, logprobs in what]
