"""Tests of SGLang's offloads: stores of the pages of its tree, whose results come in order."""

import os
import signal
import time
from typing import Any

import pytest
from daemon import eventually
from signals import stop
from test_sglang_transfers import hashes, one_rank, stopped

from kvferry.sglang import offloads


def test_offloads_are_bounded_and_their_results_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank(offloads_max=3, store_timeout_ms=1000) as (daemon, engine):
        worker = daemon.pid()
        with stopped(worker):
            for number in range(3):
                assert engine.transfers.offload(hashes(f"n{number}", 2), [1 + 2 * number, 2 + 2 * number])
            assert not engine.transfers.offload(hashes("more", 2), [8, 9])
            assert engine.transfers.ended_offloads() == 0
        eventually("they end", lambda: engine.transfers.ended_offloads() == 3)
        results = [engine.transfers.take_offload() for _ in range(3)]
        assert len(results) == 3
        # Slots that form no pages, and a pause after a refusal.
        monkeypatch.setattr(offloads, "PAUSE_S", 0.0)
        assert engine.transfers.offload(hashes("no", 2), None)
        assert engine.transfers.ended_offloads() == 1
        assert engine.transfers.take_offload() is False


def test_an_offload_whose_leader_is_lost_is_abandoned_before_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloads, "LOST_S", 0.3)
    with one_rank() as (daemon, engine):
        # The rank reports nothing as written: the store cannot begin.
        engine.transfers._written = lambda _work: None
        abandoned = []
        abandon = engine.session.abandon

        def seen(requests: list[int], **named: Any) -> None:
            abandoned.extend(requests)
            abandon(requests, **named)

        monkeypatch.setattr(engine.session, "abandon", seen)
        assert engine.transfers.offload(hashes("a", 2), [3, 4])
        leader, worker = daemon.leader, daemon.pid()
        stop(worker)
        # Nothing starts another leader.
        stop(daemon.supervisor)
        os.kill(leader, signal.SIGKILL)
        eventually("the store is abandoned", lambda: engine.transfers.ended_offloads() or abandoned)
        # The worker may have begun, and has confirmed nothing.
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert engine.transfers.ended_offloads() == 0
        assert len(abandoned) == 1
        for stopped_process in (worker, daemon.supervisor):
            os.kill(stopped_process, signal.SIGCONT)
        begun = time.monotonic()
        assert engine.wait_offloads(1) == [False]
        assert time.monotonic() - begun < 10.0


def test_a_reset_ends_stores_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank(keep_on_flush=True) as (daemon, engine):
        engine.transfers._written = lambda _work: None
        for number in range(3):
            assert engine.transfers.offload(hashes(f"n{number}", 2), [1 + 2 * number, 2 + 2 * number])
        begun = time.monotonic()
        engine.transfers.reset()
        assert time.monotonic() - begun < offloads.RESET_LIMIT_S, "they were cancelled, not awaited"
        assert engine.transfers.ended_offloads() == 0
        engine.transfers._written = engine.session.wrote
        engine.store("a", [3, 4], 1)
        daemon.wait_idle()


@pytest.mark.parametrize("broken", ["lookup", "store"])
def test_a_failed_offload_counts_once(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    with one_rank() as (_, engine):

        def raises(*_given: Any, **_named: Any) -> None:
            raise LookupError("injected")

        monkeypatch.setattr(engine.leader._client, broken, raises)
        assert engine.transfers.offload(hashes("a", 2), [3, 4])
        assert engine.transfers.ended_offloads() == 1
        assert engine.transfers.take_offload() is False
        assert engine.transfers.ended_offloads() == 0


def test_offloads_end_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank() as (_, engine):

        def next_step() -> None:
            raise OSError("planted")

        engine.fill([3, 4], 1)
        assert engine.transfers.offload(hashes("a", 2), [3, 4])
        monkeypatch.setattr(engine.leader, "next_step", next_step)
        assert engine.wait_offloads(1) == [True]
        assert engine.transfers.fault
