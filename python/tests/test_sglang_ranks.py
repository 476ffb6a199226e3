"""Faults with a real SGLang of two ranks: both ranks agree, no call hangs, and the answers stay the same.

One engine serves all tests of this file. Long form only.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon import Daemon, eventually
from engine import said
from sglang_engine import SglangEngine, arguments, in_shared_memory, left_behind, why_not
from signals import stop
from test_sglang import LOADABLE, PROMPT, cached, settled

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.skipif(not os.environ.get("KVFERRY_VLLM_FULL"), reason="starts an engine with two ranks"),
]
RANKS = 2
#: Long enough for a busy machine.
LOAD_TIMEOUT_S = 3.0
#: Longest time of a request whose load's worker hangs: a supervisor ends it 10 s after the deadline of the load.
HUNG_MAX_S = LOAD_TIMEOUT_S + 10.0


class Pair:
    """An engine of two ranks and its daemon, with the pages of one prompt."""

    def __init__(self, daemon: Daemon, engine: SglangEngine):
        self.daemon, self.engine = daemon, engine
        self.ready()
        self.cold = engine.generate(PROMPT)
        assert cached(self.cold) == [(0, 0)]
        settled(daemon)

    def ready(self) -> None:
        for rank in range(RANKS):
            self.daemon.pid(rank=rank)
        self.daemon.wait_ready()

    def flushed(self) -> list[Any]:
        """Answers the prompt after a flush; returns what was cached."""
        self.engine.flush()
        return self.answered()

    def answered(self) -> list[Any]:
        answers = self.engine.generate(PROMPT)
        assert said(answers) == said(self.cold), self.log()
        return cached(answers)

    @contextlib.contextmanager
    def stopped_until_a_load_runs(self, workers: list[int], then: Callable[[], None]) -> Iterator[None]:
        """Stops workers with SGLang's cache empty; calls ``then`` once a load waits for them."""
        self.engine.flush()
        for worker in workers:
            stop(worker)
        failures: list[AssertionError] = []

        def wait() -> None:
            try:
                eventually("a load runs", lambda: self.daemon.status()["requests"]["open_loads"], 2 * LOAD_TIMEOUT_S)
            except AssertionError as error:
                failures.append(error)
            then()

        waiting = threading.Thread(target=wait)
        waiting.start()
        yield
        waiting.join()
        assert not failures, self.log()

    def log(self) -> str:
        """Returns the last lines that the linker has logged."""
        return "\n".join([line for line in self.engine.logged().splitlines() if "kvferry" in line][-12:])

    def recovers(self) -> None:
        """Waits until pages are loaded again, and nothing is held."""
        self.ready()
        eventually("pages are loaded again", lambda: self.flushed() == [(0, LOADABLE)])
        settled(self.daemon)
        self.daemon.wait_idle()
        assert not self.daemon.status("--check")["contradiction"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    before = in_shared_memory()
    daemon = Daemon(tmp_path_factory.mktemp("k", numbered=True) / "s", ranks=RANKS, ratio=1)
    daemon.start()
    with contextlib.ExitStack() as ends:
        ends.callback(daemon.kill)
        extra = {"load_timeout_ms": int(1000 * LOAD_TIMEOUT_S)}
        engine = SglangEngine(arguments(daemon.socket_dir, tp_size=RANKS, extra=extra))
        ends.callback(engine.end)
        yield Pair(daemon, engine)
    assert not left_behind(in_shared_memory() - before)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_worker_that_is_killed_in_a_load_costs_only_time(pair: Pair, rank: int) -> None:
    pair.recovers()
    worker = pair.daemon.pid(rank=rank)
    with pair.stopped_until_a_load_runs([worker], lambda: os.kill(worker, signal.SIGKILL)):
        assert pair.answered() == [(0, 0)], pair.log()
    pair.recovers()


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_worker_that_hangs_in_a_load_is_ended_soon(pair: Pair, rank: int) -> None:
    pair.recovers()
    worker = pair.daemon.pid(rank=rank)
    pair.engine.flush()
    stop(worker)
    begun = time.monotonic()
    assert pair.answered() == [(0, 0)], pair.log()
    took_s = time.monotonic() - begun
    print(f"the worker of rank {rank} hangs: {took_s:.1f} s with a deadline of {LOAD_TIMEOUT_S:.0f} s")
    assert took_s < HUNG_MAX_S, pair.log()
    assert worker not in pair.daemon.workers
    assert "gives no pages back" in pair.engine.logged()
    pair.recovers()


def end_leader(daemon: Daemon) -> None:
    daemon.killed(daemon.leader)


def end_workers(daemon: Daemon) -> None:
    for worker in daemon.workers:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("end", [end_leader, end_workers])
def test_restarts_lose_no_page_and_change_no_answer(pair: Pair, end: Callable[[Daemon], None]) -> None:
    pair.recovers()
    end(pair.daemon)
    assert pair.flushed() in ([(0, 0)], [(0, LOADABLE)])
    pair.recovers()


def test_kvferry_is_killed_is_absent_and_comes_back(pair: Pair) -> None:
    pair.recovers()
    pair.daemon.kill()
    begun = time.monotonic()
    for _ in range(3):
        assert pair.flushed() == [(0, 0)]
    print(f"without kvferry: {(time.monotonic() - begun) / 3:.1f} s a request")
    eventually("that is logged", lambda: "no leader answers in" in pair.engine.logged())
    pair.daemon.start()
    pair.recovers()


def test_kvferry_is_killed_while_pages_are_loaded(pair: Pair) -> None:
    pair.recovers()
    with pair.stopped_until_a_load_runs(pair.daemon.workers, pair.daemon.kill):
        assert pair.answered() == [(0, 0)], pair.log()
    pair.daemon.start()
    pair.recovers()


def test_changed_bytes_in_host_memory_show(pair: Pair) -> None:
    """Runs last, because host memory has changed bytes afterwards: so the answers came from its pages."""
    pair.recovers()
    pair.daemon.poison()
    pair.engine.flush()
    answers = pair.engine.generate(PROMPT)
    assert cached(answers) == [(0, LOADABLE)], pair.log()
    assert said(answers) != said(pair.cold)
