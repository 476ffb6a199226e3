"""Tests of the connector for TensorRT-LLM while kvferry is away, dies, stands still, or refuses."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trtllm_stubs
from daemon import Daemon, eventually, running
from signals import stop
from test_trtllm import prompt, start
from trtllm_executor import BLOCK, Executor, Request
from trtllm_faults import between
from trtllm_stubs import NEW

from kvferry import client, wire
from kvferry.client import Failure, PendingRequest
from kvferry.wire import Code


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def daemon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with running(ranks=request.param, g2="32MiB") as daemon:
        daemon.ranks = request.param
        monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(daemon.socket_dir))
        monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "1000")
        monkeypatch.setenv("KVFERRY_TRTLLM_STORE_HOLD_MS", "20000")
        yield daemon


@pytest.fixture
def gives_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of ended requests are given up soon. For engines that start later."""
    monkeypatch.setenv("KVFERRY_TRTLLM_STORE_HOLD_MS", "300")


@pytest.fixture(scope="module")
def connector() -> Iterator[Any]:
    with trtllm_stubs.installed(trtllm_stubs.interface(NEW)):
        yield trtllm_stubs.connector()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return str(tmp_path)


@pytest.fixture
def executor(connector: Any, daemon: Daemon, model: str) -> Iterator[Executor]:
    executor = start(connector, daemon, model)
    yield executor
    executor.close()


def loads(executor: Executor, tokens: list[int]) -> Request:
    """Begins a request whose load cannot end: the worker of the last rank must be stopped."""
    executor.rest()
    executor.clear()
    request = executor.add(tokens)
    executor.iterate()
    assert request.state == "loading"
    for _ in range(20):
        executor.iterate()
    assert request.state == "loading", "every rank must have the pages"
    return request


TOKENS = prompt(20, 6 * BLOCK + 1)


def test_requests_run_without_kvferry_and_use_it_once_it_is_there(connector: Any, daemon: Daemon, model: str) -> None:
    daemon.stop()
    executor = Executor(connector, model, ranks=daemon.ranks)
    try:
        assert executor.complete(TOKENS).matched == 0
        executor.rest()
        executor.clear()
        daemon.start()
        eventually("the ranks are registered", lambda: executor.registered)
        daemon.wait_ready()
        assert executor.complete(TOKENS).matched == 0, "nothing was stored"
        executor.rest()
        executor.clear()
        assert executor.complete(TOKENS).matched == 6 * BLOCK
        executor.rest()
    finally:
        executor.close()


@pytest.mark.parametrize("victim", ["worker", "leader"])
def test_a_load_during_which_a_process_dies_is_requested_again(
    executor: Executor, daemon: Daemon, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor.complete(TOKENS)
    worker = daemon.pid(rank=daemon.ranks - 1)
    stop(worker)
    request = loads(executor, TOKENS)
    daemon.killed(daemon.leader if victim == "leader" else worker)
    if victim == "leader":
        os.kill(worker, signal.SIGCONT)
    executor.run(lambda: request in executor.finished, "the request is over")
    assert request.matched == 6 * BLOCK
    executor.rest()
    if victim == "worker":
        assert "6 blocks of request 2 were not loaded and are requested again" in caplog.text
    eventually("the ranks are registered", lambda: executor.registered)
    daemon.wait_ready()
    daemon.wait_idle()


def test_refused_and_shortened_loads_are_requested_again(executor: Executor) -> None:
    executor.complete(TOKENS)
    executor.rest()
    flaky = between(executor, loads=0.5)
    for _ in range(60):
        executor.clear()
        assert executor.complete(TOKENS, max_new=1).matched == 6 * BLOCK
        executor.rest()
        if flaky.refused and flaky.shortened:
            break
    assert flaky.refused > 0
    assert flaky.shortened > 0


def failing(executor: Executor, plant: Callable[[], Any] = lambda: None) -> str:
    """Runs a request whose load fails for good; returns the text of the error that ends the engine."""
    error = trtllm_stubs.connector("loads").LoadFailed
    executor.complete(TOKENS)
    executor.rest()
    executor.clear()
    plant()
    request = executor.add(TOKENS)
    with pytest.raises(error) as failed:
        executor.run(lambda: request.state != "loading" and executor.iterations > 1_000_000, "an error", 20.0)
    assert request.state == "loading", "pages that are not there were reported as loaded"
    assert "\n" not in str(failed.value)
    return str(failed.value)


def test_a_load_that_never_succeeds_ends_the_engine_in_one_line(
    connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOAD_RETRY_MS", "700")
    executor = start(connector, daemon, model)
    try:
        flaky = between(executor, loads=1.0)
        before = time.monotonic()
        text = failing(executor)
        assert time.monotonic() - before < 10.0
        assert "6 blocks of request 2 were not loaded within 1 s (refused by the test)" in text
        assert "TensorRT-LLM cannot compute blocks that were promised: the engine ends" in text
        assert "KVFERRY_TRTLLM_MODE=store" in text
        assert flaky.refused >= 3, "requested again"
    finally:
        executor.close()


def test_pages_that_are_gone_end_the_engine(
    connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOAD_RETRY_MS", "700")
    executor = start(connector, daemon, model)
    try:
        side = executor.scheduler._side
        flaky = between(executor, loads=1.0)
        namespace, side.loads._namespace = side.loads._namespace, b"another namespace"
        assert namespace != b"another namespace"
        text = failing(executor)
        assert "kvferry no longer has them" in text
        assert flaky.refused == 1
    finally:
        executor.close()


def test_a_load_that_cannot_be_requested_ends_the_engine(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(request: Any, pages: list[int]) -> None:
        raise ValueError("planted")

    text = failing(executor, lambda: monkeypatch.setattr(executor.scheduler._side, "allocated", allocated))
    assert "the load of request 2 could not be requested: update_state_after_alloc" in text


def test_no_copy_begins_while_an_earlier_one_may_still_run(
    connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOAD_RETRY_MS", "500")
    executor = start(connector, daemon, model)
    try:
        client = executor.scheduler._side._client
        sent: list[PendingRequest] = []

        def load(*arguments: Any, **named: Any) -> PendingRequest:
            pending = PendingRequest(client.draw(), wire.Load(1, []), 0.0, 0.0, None)
            sent.append(pending)
            # The connection has changed since: an earlier copy may run.
            pending._end(None, Failure(Code.BUSY, "busy", reported=False, retry=True))
            return pending

        monkeypatch.setattr(client, "load", load)
        text = failing(executor)
        assert "(busy)" in text
        assert len(sent) == 1
    finally:
        executor.close()


@pytest.mark.parametrize("ended", [False, True], ids=["the request runs", "the request has ended"])
def test_a_load_that_the_leader_never_examines_ends_in_time(
    ended: bool, connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOAD_RETRY_MS", "500")
    executor = start(connector, daemon, model)
    try:
        side = executor.scheduler._side
        sent: list[tuple[int | None, int]] = []

        def load(*arguments: Any, identity: int | None, **named: Any) -> PendingRequest:
            pending = PendingRequest(identity or side._client.draw(), wire.Load(1, []), 0.0, 0.0, None)
            sent.append((identity, pending.id))
            pending._end(None, Failure(Code.BUSY, "busy", reported=True, retry=True))
            return pending

        monkeypatch.setattr(side._client, "load", load)
        if ended:
            executor.complete(TOKENS)
            executor.rest()
            executor.clear()
            executor.add(TOKENS)
            executor.iterate()
            assert side.finished(2), "the leader may examine the load still"
            eventually("its blocks are free", lambda: side.turn() or not side.holds(2))
        else:
            assert "(busy)" in failing(executor)
        (first, number), *again = sent
        assert first is None
        assert again == [(number, number)] * len(again) != []
    finally:
        executor.close()


def test_a_load_that_may_run_is_kept_while_the_client_is_full(
    connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOAD_RETRY_MS", "60000")
    executor = start(connector, daemon, model)
    try:
        side = executor.scheduler._side
        request, repeated = side._client.request, []

        def load(*arguments: Any, identity: int | None, **named: Any) -> PendingRequest:
            message = wire.Load(1, [])
            if identity is not None:
                # A client that is full refuses it.
                repeated.append(identity)
                with pytest.MonkeyPatch.context() as full:
                    full.setattr(client, "OPEN_MAX", 0)
                    return request(message, 1.0, identity=identity)
            pending = PendingRequest(side._client.draw(), message, 0.0, 0.0, None)
            # It was sent over another connection before.
            side.loads._open[2].link = -1
            pending._end(None, Failure(Code.BUSY, "busy", reported=True, retry=True))
            return pending

        monkeypatch.setattr(side._client, "load", load)
        executor.complete(TOKENS)
        executor.rest()
        executor.clear()
        executor.add(TOKENS)
        executor.iterate()
        assert side.finished(2)
        eventually("it is repeated", lambda: side.turn() or len(repeated) > 2)
        assert side.holds(2), "another leader may copy for it"
        assert len(set(repeated)) == 1
    finally:
        executor.close()


def test_a_silent_leader_costs_one_budget(
    connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "200")
    executor = start(connector, daemon, model)
    try:
        leader = daemon.leader
        stop(leader)
        executor.longest_s.clear()
        first = executor.add(TOKENS, max_new=1)
        before = time.monotonic()
        executor.iterate()
        assert first.matched == 0
        assert 0.2 <= executor.longest_s["get_num_new_matched_tokens"] < 1.0
        lookups = time.monotonic() - before
        executor.longest_s.clear()
        executor.add(TOKENS[:9], max_new=1)
        executor.iterate()
        assert executor.longest_s["get_num_new_matched_tokens"] < 0.2, f"the first took {lookups:.1f} s"
        os.kill(leader, signal.SIGCONT)
        executor.rest()
    finally:
        executor.close()


def test_a_burst_of_requests_does_not_wait_for_a_silent_leader(
    executor: Executor, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = executor.scheduler._side
    budget_s = 0.02
    monkeypatch.setattr(side, "_settings", dataclasses.replace(side._settings, lookup_budget_ms=20))
    monkeypatch.setattr(trtllm_stubs.connector("side"), "LOOKUP_LIMIT_S", 60.0)
    looked, lookup = [], side._client.lookup

    def seen(*arguments: Any, have_pages: int, **named: Any) -> PendingRequest:
        # Those that find nothing only open a slot.
        looked.extend([time.monotonic()] * (have_pages == 0))
        return lookup(*arguments, have_pages=have_pages, **named)

    monkeypatch.setattr(side._client, "lookup", seen)
    leader = daemon.leader
    stop(leader)
    for seed in range(30):
        tokens = prompt(60 + seed, 2 * BLOCK + 1)
        side.matched_tokens(Request(1000 + seed, tokens, len(tokens), 1), 0)
    os.kill(leader, signal.SIGCONT)
    silent_s = trtllm_stubs.connector("side").SILENT_S
    # Each waits for the budget, until the oldest one is that old.
    assert 1 <= len(looked) <= silent_s / budget_s + 1
    for seed in range(30):
        side.finished(1000 + seed)


def test_blocks_under_store_are_kept_until_the_store_is_over(
    connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = start(connector, daemon, model)
    try:
        worker = daemon.pid(rank=daemon.ranks - 1)
        stop(worker)
        request = executor.add(TOKENS, max_new=1)
        executor.run(lambda: request.state == "saving", "the request ends")
        for _ in range(20):
            executor.iterate()
        assert request.state == "saving"
        assert not set(request.blocks) & set(executor.free)
        os.kill(worker, signal.SIGCONT)
        # Other ranks learn of the end with the metadata of a batch.
        executor.add([1], max_new=8)
        executor.run(lambda: request in executor.finished, "the blocks are given back")
        executor.rest()
        executor.clear()
        assert executor.complete(TOKENS).matched == 6 * BLOCK
    finally:
        executor.close()


def test_blocks_of_a_store_that_is_given_up_are_kept_until_the_worker_confirms(
    gives_up: None, executor: Executor, daemon: Daemon
) -> None:
    worker = daemon.pid(rank=daemon.ranks - 1)
    stop(worker)
    request = executor.add(TOKENS, max_new=1)
    executor.run(lambda: request.state == "saving", "the request ends")
    last = executor.ranks[-1].worker
    executor.run(lambda: last._abandoned, "the store is given up")
    first = executor.ranks[0].worker
    if first is not last:
        executor.run(lambda: request.request_id not in first._saving, "the first rank has given its pages back")
    # The worker of the last rank still has the order of the copy, and does not answer. The metadata of a batch comes.
    executor.add([1], max_new=8)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        executor.iterate()
    assert request.state == "saving"
    assert not set(request.blocks) & set(executor.free)
    os.kill(worker, signal.SIGCONT)
    executor.rest()
    assert not last._abandoned


def test_blocks_come_back_when_kvferry_is_gone_for_good(gives_up: None, executor: Executor, daemon: Daemon) -> None:
    worker = daemon.pid(rank=daemon.ranks - 1)
    stop(worker)
    request = executor.add(TOKENS, max_new=1)
    executor.run(lambda: request.state == "saving", "the request ends")
    workers = daemon.workers
    daemon.kill()
    for each in workers:
        os.kill(each, signal.SIGKILL)
    executor.run(lambda: request in executor.finished, "the blocks are given back", 20.0)
    executor.rest()
    assert executor.complete(TOKENS).matched == 0


def test_an_aborted_request_keeps_its_blocks_while_it_loads(executor: Executor, daemon: Daemon) -> None:
    executor.complete(TOKENS)
    worker = daemon.pid(rank=daemon.ranks - 1)
    stop(worker)
    request = loads(executor, TOKENS)
    executor.abort(request)
    for _ in range(20):
        executor.iterate()
    assert not set(request.blocks) & set(executor.free)
    os.kill(worker, signal.SIGCONT)
    executor.rest()
    assert request in executor.finished
    daemon.wait_idle()


def test_a_load_that_nobody_waits_for_never_ends_the_engine(
    connector: Any, daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOAD_RETRY_MS", "2000")
    monkeypatch.setattr(trtllm_stubs.connector("loads"), "_BEYOND_S", 0.3)
    executor = start(connector, daemon, model)
    try:
        executor.complete(TOKENS)
        worker = daemon.pid(rank=daemon.ranks - 1)
        stop(worker)
        number = loads(executor, TOKENS).request_id
        side = executor.scheduler._side
        # The executor tells a connector of an abort only after the load; another version may do so at once.
        assert side.finished(number), "its blocks must be kept"
        load = side.loads._open[number]

        def turned(done: Callable[[], bool]) -> bool:
            side.turn()
            return done()

        eventually("nothing is known of the load", lambda: turned(lambda: load.unknown))
        assert time.monotonic() - load.began_at > 2.0
        assert side.holds(number)
        # A later leader knows when the workers copy nothing for the earlier one.
        daemon.kill()
        daemon.start()
        eventually("the blocks are quiet", lambda: turned(lambda: not side.holds(number)))
        daemon.wait_idle()
    finally:
        executor.close()


def test_slots_are_finished_and_nothing_stays_held(executor: Executor, daemon: Daemon) -> None:
    for seed in range(6):
        executor.complete(prompt(seed % 3, 5 * BLOCK + 1))
    executor.rest()
    executor.complete([1, 2, 3])
    executor.rest()
    daemon.wait_idle()
    side = executor.scheduler._side
    assert not side._tracked
    assert len(side.stores) == len(side.loads) == 0
    # TensorRT-LLM may end a request a second time, once its blocks are no longer kept.
    assert not executor.scheduler.request_finished(executor.finished[0], [])


def test_failed_stores_are_named_again(executor: Executor) -> None:
    flaky = between(executor, stores=1.0)
    request = executor.add(TOKENS, max_new=3 * BLOCK)
    executor.run(lambda: flaky.refused > 0 and request.state == "generating", "a store is refused")
    flaky.stores = 0.0
    executor.rest()
    executor.clear()
    assert executor.complete(TOKENS).matched == 6 * BLOCK


def test_pages_that_a_step_announced_and_did_not_compute_are_removed(
    executor: Executor, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    request = executor.add(TOKENS, max_new=1)
    executor.chunk = 4 * BLOCK
    build = executor.scheduler.build_connector_meta

    def overstated(output: Any) -> Any:
        for data in output.new_requests:
            data.num_scheduled_tokens += 2 * BLOCK
        return build(output)

    executor.scheduler.build_connector_meta = overstated
    executor.run(lambda: request in executor.finished, "the request is over")
    assert "a step announced 24 tokens of request 1, and 16 are computed: nothing is stored" in caplog.text
    executor.run(lambda: not executor.scheduler._side._removals, "the pages are removed")
    executor.scheduler.build_connector_meta = build
    executor.rest()
    executor.clear()
    # The leader removes the blocks around the pages, too. The executor checks what it reads.
    assert executor.complete(TOKENS).matched <= 4 * BLOCK
    executor.rest()


def test_stores_beyond_the_most_at_a_time_are_skipped_and_named_again(
    executor: Executor, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trtllm_stubs.connector("stores"), "STORES_MAX", 1)
    worker = daemon.pid(rank=daemon.ranks - 1)
    stop(worker)
    executor.chunk = 2 * BLOCK
    request = executor.add(TOKENS, max_new=3 * BLOCK)
    executor.run(lambda: request.state == "generating", "the prompt is computed")
    side = executor.scheduler._side
    assert len(side.stores) == 1
    assert side.stores.skipped > 0
    assert "stores were skipped: 2 pages are being stored" in caplog.text
    os.kill(worker, signal.SIGCONT)
    eventually("the store is over", lambda: side.stores._open[next(iter(side.stores._open))].pending.done)
    executor.rest()
    executor.clear()
    assert executor.complete(TOKENS).matched == 6 * BLOCK
    executor.rest()


def test_the_oldest_request_is_dropped_beyond_the_most_that_are_tracked(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm_stubs.connector("side"), "TRACKED_MAX", 2)
    for seed in range(4):
        executor.add(prompt(40 + seed, 2 * BLOCK + 1), max_new=8)
    executor.run(lambda: all(each.state == "generating" for each in executor.requests), "all run")
    assert len(executor.scheduler._side._tracked) == 2
    executor.rest()
    executor.clear()
    assert executor.complete(prompt(43, 2 * BLOCK + 1)).matched == 2 * BLOCK
    executor.rest()


def test_a_load_of_an_ended_request_is_over_when_nothing_is_copied(executor: Executor, daemon: Daemon) -> None:
    """The manager V2 of KV memory may end a request that loads."""
    executor.complete(TOKENS)
    worker = daemon.pid(rank=daemon.ranks - 1)
    stop(worker)
    request = loads(executor, TOKENS)
    assert executor.scheduler.request_finished(request, request.blocks)
    side = executor.scheduler._side
    for rank in executor.ranks:
        saved, _ = rank.worker.get_finished([request.request_id], [])
        assert (saved == []) == (rank.number == 0), "rank 0 decides"
    os.kill(worker, signal.SIGCONT)

    def is_saved() -> bool:
        saved, loaded = executor.ranks[0].worker.get_finished([], [])
        return saved == loaded == [request.request_id]

    eventually("the pages are given back", is_saved)
    assert not side.holds(request.request_id)
    daemon.wait_idle()


def test_a_rank_that_cannot_report_its_work_stores_nothing(
    gives_up: None, executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrote(*arguments: Any, **named: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(executor.ranks[-1].worker._rank, "wrote", wrote)
    request = executor.complete(TOKENS)
    assert "_forward_ended failed: requests run without the cache" in caplog.text
    executor.rest()
    executor.clear()
    assert executor.complete(TOKENS).matched == 0
    assert request in executor.finished


@pytest.mark.parametrize("rank", [0, -1], ids=["first", "last"])
def test_a_report_that_failed_is_repeated_without_another_pass(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    executor.complete(TOKENS)
    executor.rest()
    executor.clear()
    session = executor.ranks[rank].worker._rank
    wrote, failed = session.wrote, []

    def once(*arguments: Any, **named: Any) -> None:
        if not failed:
            failed.append(arguments)
            raise OSError("planted")
        wrote(*arguments, **named)

    monkeypatch.setattr(session, "wrote", once)
    # The pass of this request is the last one before the load that waits for it.
    executor.complete([1, 2, 3], max_new=1)
    assert failed
    hit = executor.complete(TOKENS)
    # The process of rank 0 knows of the failure, and requests nothing more.
    knows = session is executor.ranks[0].worker._rank
    assert hit.matched == (0 if knows else 6 * BLOCK)
    executor.rest()


def test_an_engine_whose_device_reports_no_progress_loads_and_stores_nothing(executor: Executor) -> None:
    executor.complete(TOKENS)
    executor.rest()
    executor.clear()
    executor.ranks[0].worker._rank.fault = "reading the progress of the device"
    executor.iterate()
    assert executor.complete(TOKENS).matched == 0
    assert len(executor.scheduler._side.stores) == 0
    executor.rest()
