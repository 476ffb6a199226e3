"""Tests of ``failed_load: abort``: the loads of a batch run at the same time, and a failed one aborts its requests."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from daemon import Daemon, eventually, running
from engine import said, tokens
from sglang_engine import PAGE_TOKENS, SglangEngine, arguments, why_not
from signals import stop
from test_sglang import cached, settled
from test_sglang_transfers import HANGS_S, OneRank, Pages, hashes, one_rank, ready, stopped

from kvferry.sglang.abandoned import Abandoned
from kvferry.sglang.breaker import PAUSE_FIRST_S
from kvferry.sglang.loads import Ended
from kvferry.sglang.transfers import Transfers

WHY_NOT = why_not()
FULL = bool(os.environ.get("KVFERRY_VLLM_FULL"))
REQUESTS = 3
#: Pages into which each request loads.
INTO = [[20 + 2 * number, 21 + 2 * number] for number in range(REQUESTS)]
BEGIN_MAX_S = 0.3


def stored(engine: OneRank) -> list[torch.Tensor]:
    """Stores two pages for each request, and returns what they hold."""
    return [engine.store(f"a{number}", [2, 3], number) for number in range(REQUESTS)]


def begun(engine: OneRank, round_: str = "") -> None:
    """Looks all requests up, and begins their loads."""
    for number in range(REQUESTS):
        assert engine.find(f"{round_}r{number}", hashes(f"a{number}", 2)) == 2
    begin = time.monotonic()
    for number in range(REQUESTS):
        assert engine.transfers.load(f"{round_}r{number}", hashes(f"a{number}", 2), INTO[number])
    assert time.monotonic() - begin < BEGIN_MAX_S, "a load was waited for"


def wait_open(daemon: Daemon, count: int) -> None:
    eventually(f"{count} loads run", lambda: daemon.status()["requests"]["open_loads"] == count)


def loaded(engine: OneRank) -> list[torch.Tensor]:
    return [engine.tensor[pages].clone() for pages in INTO]


def test_all_loads_of_a_batch_are_requested_before_the_first_is_waited_for() -> None:
    with one_rank(failed_load="abort") as (daemon, engine):
        contents = stored(engine)
        with stopped(daemon.pid()):
            begun(engine)
            wait_open(daemon, REQUESTS)
            assert not any(content.any() for content in loaded(engine))
        assert engine.transfers.start_batch() == 0
        assert all(torch.equal(*both) for both in zip(loaded(engine), contents, strict=True))
        assert engine.transfers.finish_batch(0)
        assert engine.transfers.start_batch() == -1
        engine.transfers.ended_offloads()
        daemon.wait_idle()


def test_a_batch_with_a_failed_load_is_reported_once_its_pages_are_quiet() -> None:
    with one_rank(failed_load="abort", load_timeout_ms=500) as (daemon, engine):
        contents = stored(engine)
        worker = daemon.pid()
        with stopped(worker):
            begun(engine)
            begin = time.monotonic()
            assert engine.transfers.start_batch() == 0
            assert time.monotonic() - begin < 0.5 + HANGS_S, "the loads have one deadline"
            assert worker not in daemon.workers
        for pages in INTO:
            engine.fill(pages, 9)
        written = loaded(engine)
        assert not engine.transfers.finish_batch(0)
        assert engine.transfers.finish_batch(0), "reported once"
        assert 0 < engine.leader.breaker._until - begin < 0.5 + HANGS_S + PAUSE_FIRST_S, "one pause for all"
        eventually("the pause ends", lambda: not engine.leader.breaker.pauses)
        ready(daemon, engine)
        assert all(torch.equal(*both) for both in zip(loaded(engine), written, strict=True))
        eventually("pages are found again", lambda: engine.find(f"t{time.monotonic()}", hashes("a0", 2)) == 2)
        begun(engine, "again ")
        assert engine.transfers.start_batch() == 1
        assert engine.transfers.finish_batch(1)
        assert all(torch.equal(*both) for both in zip(loaded(engine), contents, strict=True))


@pytest.mark.parametrize("by", ["cancel", "reset"])
def test_loads_that_are_taken_back_write_nothing_later(by: str) -> None:
    with one_rank(failed_load="abort", load_timeout_ms=300, keep_on_flush=True) as (daemon, engine):
        stored(engine)
        with stopped(daemon.pid()):
            begun(engine)
            wait_open(daemon, REQUESTS)
            if by == "cancel":
                assert [engine.transfers.cancel(f"r{number}") for number in range(REQUESTS)] == [True] * REQUESTS
                assert not engine.transfers.cancel("r0")
            else:
                engine.transfers.reset()
        assert engine.transfers.start_batch() == -1
        for pages in INTO:
            engine.fill(pages, 9)
        written = loaded(engine)
        ready(daemon, engine)
        engine.transfers.ended_offloads()
        daemon.wait_idle()
        assert all(torch.equal(*both) for both in zip(loaded(engine), written, strict=True))


def test_a_load_that_does_not_begin_is_computed_at_once() -> None:
    with one_rank(failed_load="abort") as (_, engine):
        stored(engine)
        assert not engine.transfers.load("unknown", hashes("a0", 2), INTO[0])
        assert engine.find("r", hashes("a0", 2)) == 2
        assert not engine.transfers.load("r", hashes("a0", 2), None), "slots that form no pages"
        engine.leader.breaker.failed()
        assert not engine.transfers.load("r", hashes("a0", 2), INTO[0])
        assert engine.transfers.start_batch() == -1


class Told:
    """Ranks whose first member says these lists, one in each call."""

    def __init__(self, *lists: list[int], all_: bool = True):
        self.rank, self.size = 1, 2
        self._lists, self._all = list(lists), all_

    def all(self, value: bool) -> bool:
        return value and self._all

    def same(self, values: Any) -> bool:
        return True

    def of_first(self, values: list[int]) -> list[int]:
        told = self._lists.pop(0)
        assert len(values) == len(told), "each rank gives as many numbers as rank 0"
        return told


@pytest.mark.parametrize(
    ("ends", "all_", "landed", "abandoned"),
    [
        ((Ended.DONE, Ended.DONE), True, True, []),
        ((Ended.DONE, Ended.DONE), False, False, []),
        ((Ended.DONE, Ended.FAILED), True, False, []),
        ((Ended.UNKNOWN, Ended.UNKNOWN), True, False, [7, 8]),
    ],
)
def test_other_ranks_follow_rank_0(ends: tuple[Ended, ...], all_: bool, landed: bool, abandoned: list[int]) -> None:
    session: Any = Pages()
    ranks: Any = Told([7], [0], [8], [int(ends[0]), 7, int(ends[1]), 8], all_=all_)
    rank = Transfers(ranks, session, Abandoned(session), None, offloads_max=1, written=lambda _work: None, at_once=True)
    assert [rank.load(name, hashes(name, 1), [1]) for name in ("a", "b", "c")] == [True, False, True]
    assert rank.start_batch() == 0
    assert session.abandoned == abandoned
    assert rank.finish_batch(0) == landed


def attached(daemon: Daemon) -> None:
    """Waits until both ranks of an engine are served."""
    for rank in range(2):
        daemon.pid(rank=rank)
    daemon.wait_ready()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.skipif(not FULL, reason="starts another engine")
def test_two_ranks_abort_only_the_requests_whose_load_failed() -> None:
    prompts = [tokens(300, seed=60 + number) for number in range(4)]
    with running(ranks=2, ratio=1) as daemon:
        extra = {"failed_load": "abort", "load_timeout_ms": 1000}
        engine = SglangEngine(arguments(daemon.socket_dir, tp_size=2, extra=extra, enable_metrics=True))
        try:
            attached(daemon)
            alone = [engine.generate(prompt)[0]["tokens"] for prompt in prompts]
            settled(daemon)
            engine.flush()
            together = engine.generate(*prompts)
            assert [answer["tokens"] for answer in together] == alone
            assert sum(ours for _, ours in cached(together)) > PAGE_TOKENS * len(prompts)
            engine.flush()
            warm = engine.generate(prompts[0])
            settled(daemon)
            engine.flush()
            worker = daemon.pid(rank=1)
            stop(worker)
            killer = threading.Timer(0.3, os.kill, (worker, signal.SIGKILL))
            killer.start()
            failed = engine.generate(prompts[0])
            killer.join()
            assert [answer.get("status") for answer in failed] == [503]
            assert "and the request is aborted" in engine.logged()
            # The next request is served, without pages that were not loaded.
            assert said(engine.generate(prompts[0])) == said(warm)
            attached(daemon)

            def loads() -> bool:
                engine.flush()
                again = engine.generate(prompts[0])
                assert said(again) == said(warm)
                return cached(again) == cached(warm)

            eventually("pages are loaded again", loads)
            counters = engine.request("counters")
            assert counters["sglang:kvferry_loads_total/failed"] == 1
            assert counters["sglang:kvferry_loads_total/whole"] >= len(prompts)
            assert counters["sglang:kvferry_store_pages_total/stored"] == len(prompts) * (300 // PAGE_TOKENS)
        finally:
            engine.end()
        daemon.wait_idle()
