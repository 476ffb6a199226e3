"""Tests of the linker with a real SGLang on the CPU.

One engine serves all tests of this file, because its start takes a minute; the daemon is another one for each.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_model
import pytest
import sglang_contract
from daemon import Daemon, eventually, running
from engine import said, shared_memory, tokens
from sglang_engine import DEVICE_TOKENS, PAGE_TOKENS, SglangEngine, arguments, why_not
from sglang_events import publishing, streams
from signals import stop

from kvferry import present_namespace

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
FULL = bool(os.environ.get("KVFERRY_VLLM_FULL"))
PROMPT = tokens(300, seed=1)
#: Tokens of the prompt that a hit can bring: at least one is computed.
LOADABLE = (len(PROMPT) - 1) // PAGE_TOKENS * PAGE_TOKENS


class Fixture:
    """One engine, and the folder of its daemons."""

    def __init__(self, socket_dir: Path):
        self.socket_dir = socket_dir
        self.engine: SglangEngine | None = None

    def started(self) -> SglangEngine:
        if self.engine is None:
            events = publishing(self.socket_dir.parent)
            wanted = arguments(self.socket_dir, extra={"load_timeout_ms": 1000}, kv_events_config=events)
            self.engine = SglangEngine(wanted)
        return self.engine


def of_engines() -> set[str]:
    """KV memory and files of SGLang in shared memory."""
    return shared_memory() | {path.name for path in Path("/dev/shm").glob("sgl*")}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    before = of_engines()
    fixture = Fixture(tmp_path_factory.mktemp("k", numbered=True) / "s")
    try:
        yield fixture
    finally:
        if fixture.engine is not None:
            fixture.engine.end()
    assert of_engines() == before


@contextlib.contextmanager
def serving(one: Fixture, **settings: Any) -> Iterator[tuple[Daemon, SglangEngine]]:
    """A daemon for the engine, without any pages, and an engine whose own cache is empty."""
    daemon = Daemon(one.socket_dir, **{"ranks": 1, "ratio": 1, **settings})
    daemon.start()
    try:
        engine = one.started()
        daemon.pid()
        daemon.wait_ready()
        engine.flush()
        yield daemon, engine
    finally:
        daemon.kill()


def settled(daemon: Daemon) -> None:
    eventually("stores are over", lambda: not daemon.status()["copies_under_way"] and not daemon.status()["slots"])


def cached(answers: list[Any]) -> list[tuple[int, int]]:
    """Tokens of each answer that were on the device, and that kvferry brought, as SGLang counts them."""
    return [(answer["details"].get("device", 0), answer["details"].get("host", 0)) for answer in answers]


@pytest.mark.parametrize(("ratio", "page_index"), [(1, False), (32, True)])
def test_warm_results_equal_cold_results_to_the_last_bit(one: Fixture, ratio: int, page_index: bool) -> None:
    with serving(one, ratio=ratio, **({"page_index": "true"} if page_index else {})) as (daemon, engine):
        cold = engine.generate(PROMPT)
        assert cached(cold) == [(0, 0)]
        settled(daemon)
        engine.flush()
        warm = engine.generate(PROMPT)
        assert cached(warm) == [(0, LOADABLE)]
        assert said(warm) == said(cold)
        settled(daemon)
        # A branch: its common pages stay on the device, and its own are evicted by others.
        branch = PROMPT[:100] + tokens(220, seed=2)
        first = engine.generate(branch)
        assert cached(first) == [(96, 0)]
        settled(daemon)
        for seed in range(10, 10 + DEVICE_TOKENS // 1000 + 2):
            engine.generate(PROMPT[:100] + tokens(900, seed=seed), max_tokens=1)
        settled(daemon)
        again = engine.generate(branch)
        assert said(again) == said(first)
        ((device, ours),) = cached(again)
        assert ours > 0
        assert device + ours == (len(branch) - 1) // PAGE_TOKENS * PAGE_TOKENS
        print(f"ratio {ratio}: {LOADABLE} tokens loaded; of the branch {device} on the device, {ours} loaded")
        # The bytes come from kvferry: changed ones give other results.
        daemon.poison()
        engine.flush()
        poisoned = engine.generate(PROMPT)
        assert cached(poisoned) == [(0, LOADABLE)]
        assert said(poisoned) != said(cold)


def test_salts_are_kept_apart(one: Fixture) -> None:
    with serving(one) as (daemon, engine):
        plain = engine.generate(PROMPT)
        settled(daemon)
        for salt in ("a", "b"):
            engine.flush()
            salted = {"tokens": PROMPT, "cache_salt": salt}
            assert cached(engine.generate(salted)) == [(0, 0)], f"pages of others are found with salt {salt}"
            settled(daemon)
            engine.flush()
            assert cached(engine.generate(salted)) == [(0, LOADABLE)]
            assert said(engine.generate(salted)) == said(plain)


def test_requests_at_once_get_the_same_tokens(one: Fixture) -> None:
    with serving(one) as (daemon, engine):
        prompts = [PROMPT[:64] + tokens(200, seed=seed) for seed in range(20, 26)]
        alone = [engine.generate(prompt)[0]["tokens"] for prompt in prompts]
        settled(daemon)
        engine.flush()
        together = engine.generate(*prompts)
        # The last bits of log-probabilities depend on which requests share a batch, the tokens do not.
        assert [answer["tokens"] for answer in together] == alone
        assert sum(ours for _, ours in cached(together)) > len(prompts) * 128


def test_a_worker_that_dies_in_a_load_costs_only_time(one: Fixture) -> None:
    with serving(one) as (daemon, engine):
        cold = engine.generate(PROMPT)
        settled(daemon)
        engine.flush()
        worker = daemon.pid()
        stop(worker)
        killer = threading.Timer(0.3, os.kill, (worker, signal.SIGKILL))
        killer.start()
        failed = engine.generate(PROMPT)
        killer.join()
        assert said(failed) == said(cold)
        assert cached(failed) == [(0, 0)], "the pages were computed"
        assert re.search(r"9 pages of request \w+ were not loaded and are computed", engine.logged())
        daemon.pid()
        daemon.wait_ready()

        def loads() -> bool:
            engine.flush()
            warm = engine.generate(PROMPT)
            assert said(warm) == said(cold)
            return cached(warm) == [(0, LOADABLE)]

        eventually("pages are loaded again", loads)


def test_a_leader_restarts_and_kvferry_goes_and_comes_back(one: Fixture) -> None:
    with serving(one) as (daemon, engine):
        cold = engine.generate(PROMPT)
        settled(daemon)
        daemon.killed(daemon.leader)
        engine.flush()
        assert said(engine.generate(PROMPT)) == said(cold)
        daemon.wait_ready()

        def loads() -> bool:
            engine.flush()
            warm = engine.generate(PROMPT)
            assert said(warm) == said(cold)
            return cached(warm) == [(0, LOADABLE)]

        eventually("the next leader serves the pages", loads)
        daemon.kill()
        engine.flush()
        begun = time.monotonic()
        assert said(engine.generate(PROMPT)) == said(cold)
        print(f"without kvferry: {time.monotonic() - begun:.1f} s")
        eventually("that is logged", lambda: "no leader answers in" in engine.logged())
        daemon.start()
        daemon.pid()
        daemon.wait_ready()
        engine.flush()
        assert said(engine.generate(PROMPT)) == said(cold)
        settled(daemon)
        eventually("pages are loaded again", loads)


def test_the_linker_keeps_the_contract(one: Fixture) -> None:
    run = sglang_contract.play(one.socket_dir, one.started)
    assert run.broken == {}
    assert run.not_exercised == set(sglang_contract.NEVER)


def test_a_router_has_what_engine_and_kvferry_hold(one: Fixture, tmp_path: Path) -> None:
    # Half of the device's pages in host memory, and more than all of them on the disk.
    sizes = {"g2": "64x128KiB", "g3": "64MiB", "g3_dir": tmp_path / "disk"}
    with serving(one, **sizes) as (daemon, engine), streams(one.socket_dir.parent, daemon, engine) as events:
        events.begin(*(tokens(PAGE_TOKENS + 1, seed=seed) for seed in range(500, 600)))

        def run(prompt: list[int]) -> tuple[int, int]:
            """Runs a prompt; returns its tokens on the device and in kvferry, which the stream has predicted."""
            expected = events.expected(prompt)
            assert cached(engine.generate(prompt)) == [expected]
            settled(daemon)
            return expected

        def stored(prompt: list[int]) -> bool:
            """Runs a prompt again: offloads fail until the connection to the leader is there."""
            engine.flush()
            engine.generate(prompt, max_tokens=1)
            settled(daemon)
            return set(events.tiers.router.sequence(prompt)) <= events.agree("after a prompt").get("CPU", set())

        eventually("the prompt is stored", lambda: stored(PROMPT))
        held = events.agree("after a prompt")
        assert len(set(events.tiers.router.sequence(PROMPT)) & held["CPU"] & held["GPU"]) == len(PROMPT) // PAGE_TOKENS
        for seed in range(20, 20 + DEVICE_TOKENS // 900 + 2):
            run(tokens(900, seed=seed))
        held = events.agree("after evictions")
        assert ("BlockRemoved", "GPU") in events.own.router.seen
        assert ("BlockRemoved", "CPU") in events.tiers.router.seen
        assert held["STORAGE"] > held["CPU"], "the disk has what host memory had no room for"
        assert run(PROMPT) == (0, LOADABLE)
        events.agree("after a load")
        assert run(PROMPT) == (LOADABLE, 0)

        engine.flush()
        # The streams also agree while the flush has reached none of them.
        eventually("the device has no pages", lambda: "GPU" not in events.agree("after a flush"))
        assert run(PROMPT) == (0, LOADABLE)

        daemon.killed(daemon.leader)
        daemon.wait_ready()
        held = events.agree("after a restart of the leader")
        assert held["CPU"], "the pages are found again"
        new = tokens(200, seed=77)
        run(new)
        eventually("the next leader stores pages", lambda: stored(new))


def test_weights_that_change_with_or_without_a_flush_leave_the_pages(one: Fixture) -> None:
    """Runs last: the engine has other weights afterwards."""
    with serving(one) as (daemon, engine):
        cold = engine.generate(PROMPT)
        settled(daemon)
        for folder, flush in ((make_model.llama(1), True), (make_model.llama(), False)):
            assert engine.request("weights", path=str(folder), flush=flush)[0]
            engine.flush()
            changed = engine.generate(PROMPT)
            assert cached(changed) == [(0, 0)], "pages of other weights are used"
            assert (said(changed) == said(cold)) == (folder == make_model.llama())
            settled(daemon)
            engine.flush()
            warm = engine.generate(PROMPT)
            assert cached(warm) == [(0, LOADABLE)], "pages of the present weights are not used"
            assert said(warm) == said(changed)


@pytest.mark.skipif(not FULL, reason="starts another engine")
def test_an_engine_without_a_daemon_and_with_unserved_pages_runs_without_the_cache(tmp_path: Path) -> None:
    """Pages of one token, SGLang's default, are not served; without kvferry the engine starts as fast."""
    engine = SglangEngine(arguments(tmp_path / "none", page_size=1))
    try:
        assert cached(engine.generate(PROMPT)) == [(0, 0)]
        assert "page_size is 1: give --page-size 16 or more" in engine.logged()
        assert engine.logged().count("requests run without the cache") == 1
    finally:
        engine.end()


@pytest.mark.skipif(not FULL, reason="starts another engine")
def test_two_ranks_give_the_same_results() -> None:
    with running(ranks=2, ratio=1) as daemon:
        engine = SglangEngine(arguments(daemon.socket_dir, tp_size=2))
        try:
            daemon.wait_ready()
            cold = engine.generate(PROMPT)
            settled(daemon)
            engine.flush()
            warm = engine.generate(PROMPT)
            assert cached(warm) == [(0, LOADABLE)]
            assert said(warm) == said(cold)
            settled(daemon)
            engine.flush()
            worker = daemon.pid(rank=1)
            stop(worker)
            killer = threading.Timer(0.3, os.kill, (worker, signal.SIGKILL))
            killer.start()
            assert said(engine.generate(PROMPT)) == said(cold)
            killer.join()
            assert "were not loaded and are computed" in engine.logged()
            daemon.pid(rank=1)
            daemon.wait_ready()

            def loads() -> bool:
                engine.flush()
                warm = engine.generate(PROMPT)
                assert said(warm) == said(cold)
                return cached(warm) == [(0, LOADABLE)]

            eventually("pages are loaded again", loads)
            daemon.poison()
            engine.flush()
            assert said(engine.generate(PROMPT)) != said(cold)
        finally:
            engine.end()


@pytest.mark.skipif(not FULL, reason="starts two engines")
def test_two_starts_of_an_engine_share_a_namespace() -> None:
    """No argument that SGLang draws at a start, such as a port, separates its pages from those of the next one."""
    shown = []
    with running(ranks=1, ratio=1) as daemon:
        path = present_namespace.path_of(daemon.socket_dir, 0)
        for _ in range(2):
            engine = SglangEngine(arguments(daemon.socket_dir))
            try:
                eventually("the namespace is shown", lambda: path.exists() and path.read_text().strip())
                shown.append(path.read_text())
            finally:
                engine.end()
            path.unlink(missing_ok=True)
    assert shown[0] == shown[1]
