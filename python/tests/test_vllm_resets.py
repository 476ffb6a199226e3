"""Tests that a real vLLM drops its cache while kvferry reads its pages: resets, pauses, and the pause before sleep."""

import json
import os
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest
from daemon import Daemon, eventually, running
from engine import Engine, Server, config, said, tokens, wait_steps

from kvferry.vllm import scheduler

#: Resets of a server under load.
ROUNDS = 10 if os.environ.get("KVFERRY_VLLM_FULL") else 4
PROMPT = tokens(270, seed=40)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(ranks=1) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    engine = Engine(config(daemon.socket_dir))
    daemon.wait_ready()
    yield engine
    engine.end()


@pytest.fixture(scope="module")
def cold(engine: Engine) -> list:
    engine.reset(connector=True)
    return said(engine.generate(PROMPT))


def store_that_does_not_end(engine: Engine, daemon: Daemon, name: str) -> None:
    """Starts a prompt whose store holds pages until its deadline of 30 s."""
    engine.reset(connector=True)
    engine.request("hold", on=True)
    engine.request("add", id=name, tokens=PROMPT)
    wait_steps(engine, "a store runs", lambda _state: daemon.status()["copies_under_way"])


@pytest.mark.parametrize("connector", [False, True])
def test_running_requests_survive_a_reset(engine: Engine, daemon: Daemon, cold: list, connector: bool) -> None:
    name = f"reset {connector}"
    store_that_does_not_end(engine, daemon, name)
    begun = time.monotonic()
    assert engine.request("reset", running=True, connector=connector)
    assert time.monotonic() - begun < scheduler.LAST_STORES_S
    assert daemon.status()["copies_under_way"] == 0
    engine.request("hold", on=False)
    state = wait_steps(engine, "the prompt is done", lambda state: name in state["done"])
    assert said([state["done"][name]]) == cold
    daemon.wait_idle()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_paused_engine_has_a_clear_cache(engine: Engine, daemon: Daemon, cold: list, mode: str) -> None:
    """Sleep mode begins with the same pause."""
    store_that_does_not_end(engine, daemon, mode)
    engine.request("pause", mode=mode)
    assert daemon.status()["copies_under_way"] == 0
    engine.request("hold", on=False)
    engine.request("resume")
    if mode == "keep":
        state = wait_steps(engine, "the prompt is done", lambda state: mode in state["done"])
        assert said([state["done"][mode]]) == cold
    else:
        # With both halves of vLLM in one process, only one of them has handled the abort.
        engine.request("abort", id=mode)
    assert said(engine.generate(PROMPT)) == cold
    daemon.wait_idle()


def load_that_does_not_end(engine: Engine, daemon: Daemon, name: str) -> None:
    """Starts a prompt whose load waits, for up to 12 s, for a step that the rank does not report."""
    engine.reset(connector=True)
    engine.generate(PROMPT)
    daemon.wait_idle()
    engine.reset()
    engine.request("hold", on=True)
    engine.request("add", id=f"before {name}", tokens=tokens(40, seed=41))
    engine.request("step")
    engine.request("add", id=name, tokens=PROMPT)
    wait_steps(engine, "a load runs", lambda state: "WAITING_FOR_REMOTE_KVS" in state["status"].values())


@pytest.mark.parametrize("how", ["reset", "pause"])
def test_pages_are_loaded_while_the_cache_is_cleared(engine: Engine, daemon: Daemon, cold: list, how: str) -> None:
    """Weights may have changed at the reset: the prompt is computed, and no page from before is found."""
    name = f"loads under a {how}"
    load_that_does_not_end(engine, daemon, name)
    if how == "reset":
        assert engine.request("reset", running=True, connector=True)
    else:
        engine.request("pause", mode="keep")
        engine.request("resume")
    engine.request("hold", on=False)
    state = wait_steps(engine, "the prompt is done", lambda state: name in state["done"])
    assert said([state["done"][name]]) == cold
    wait_steps(engine, "the other prompt is done", lambda state: not state["status"])
    daemon.wait_idle()
    engine.reset()
    hits = engine.external_hits()
    assert said(engine.generate(PROMPT)) == cold
    assert engine.external_hits() > hits, "pages computed after the reset were stored under another name, and are found"
    daemon.wait_idle()


def reset_external(server: Server) -> bool:
    """Requests a reset of vLLM's pages and of kvferry's. vLLM refuses one while a request holds pages that it cannot
    preempt; False then, and the caller requests it again."""
    try:
        answer = json.loads(server.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true"))
    except urllib.error.HTTPError:
        return False
    assert answer == {"success": True}
    return True


def test_resets_while_pages_are_loaded_all_the_time() -> None:
    """``vllm serve`` with prompts that exceed the device's pages. A reset that vLLM refuses succeeds when retried."""
    prompts = [tokens(200, seed=number + 1) for number in range(12)]
    with running(ranks=1) as daemon:
        server = Server(config(daemon.socket_dir, num_gpu_blocks_override=40, max_model_len=512))
        failed: list[str] = []
        over = threading.Event()
        expected: list[list] = []

        def load(number: int) -> None:
            while not over.is_set():
                number = (number + 1) % len(prompts)
                if said([server.generate(prompts[number], max_tokens=4)[0]]) != expected[number]:
                    failed.append(f"prompt {number} is answered otherwise")
                    return

        askers = [threading.Thread(target=load, args=(number * 3,)) for number in range(4)]
        try:
            daemon.wait_ready()
            expected.extend(said([answer]) for answer in server.generate(*prompts, max_tokens=4))
            for asker in askers:
                asker.start()
            for _ in range(ROUNDS):
                hits = server.external_hits()
                eventually("pages are loaded", lambda hits=hits: failed or server.external_hits() > hits + 100)
                eventually("the cache is reset", lambda: failed or reset_external(server))
                assert not failed
        finally:
            over.set()
            for asker in askers:
                asker.join(60)
            server.end()


def test_resets_and_pauses_under_load() -> None:
    """``vllm serve`` with prompts that are all new, so that pages are stored all the time."""
    with running(ranks=1) as daemon:
        server = Server(config(daemon.socket_dir))
        failed: list[str] = []
        over = threading.Event()

        def load(first: int) -> None:
            for seed in range(first, first + 10_000):
                if over.is_set():
                    return
                try:
                    server.generate(tokens(200, seed=seed), max_tokens=8)
                except Exception as error:
                    # A pause aborts running requests; no other failure is allowed.
                    failed.append(f"{error}")

        askers = [threading.Thread(target=load, args=(number * 10_000 + 100,)) for number in range(4)]
        try:
            daemon.wait_ready()
            for asker in askers:
                asker.start()
            for _ in range(ROUNDS):
                reset = json.loads(server.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true"))
                assert reset == {"success": True}
                assert not failed
                for mode in ("keep", "abort"):
                    assert json.loads(server.post(f"/pause?mode={mode}")) == {"status": "paused"}
                    assert json.loads(server.post("/resume")) == {"status": "resumed"}
                failed.clear()
            assert daemon.counter("published_pages") > 0
        finally:
            over.set()
            for asker in askers:
                asker.join(60)
            server.end()
