"""Mistakes that are planted in the connector for TensorRT-LLM: the executor must find each of them.

Others were planted by hand, one at a time, and what reported them first:

===================================================  ==================================================
a part of a load counts as all of it                 other tokens in a block of a load
rank 0 reports loads at once                         other tokens in a block of a load
stores are reported as over at once                  other tokens in a block of a load
a load goes to other pages                           other tokens in a block of a load
the adapter is no part of the seed                   other tokens in a block of a load
an adapter is named by its number alone              a second start loads pages of an adapter
hashes are no chain                                  hashes that ``sha256sum`` has computed
the namespace does not name the weights              equal namespaces of different weights
a hit inside a block is continued by a load          a load behind a part of a block
the whole prompt is loaded                           the last token is not computed
``finish`` is left out                               slots that stay open
a store's id is beyond what ranks report             nothing is stored
a step without a forward pass has a number           a load that never succeeds
copies begin while earlier ones may run              more than one request of a load
a store that is given up is not confirmed            blocks that are free while a worker has the order
pages of a failed store are not named again          nothing is found
requests that were not given are reported            a key that the executor does not know
a load that fails for good is reported               other tokens in a block of a load
each rank has an engine of its own                   a leader that does not serve
V2: a running request stores pages                   stores of a running request
===================================================  ==================================================

Not found, since another rule has the same effect: to use a slot of an older leader, because the leader refuses the
store, and the slot is opened again.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trtllm_stubs
from daemon import Daemon, eventually, running
from signals import stop
from test_trtllm import prompt
from trtllm_executor import BLOCK, Executor, WrongBytes
from trtllm_faults import between

TOKENS = prompt(50, 6 * BLOCK + 1)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Executor]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with running(ranks=1, g2="32MiB") as daemon, trtllm_stubs.installed(trtllm_stubs.interface()):
        monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(daemon.socket_dir))
        monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "1000")
        monkeypatch.setenv("KVFERRY_TRTLLM_STORE_HOLD_MS", "20000")
        monkeypatch.setenv("KVFERRY_TRTLLM_LOAD_RETRY_MS", "20000")
        executor = Executor(trtllm_stubs.connector(), str(tmp_path))
        executor.daemon = daemon
        try:
            eventually("the rank is registered", lambda: executor.registered)
            daemon.wait_ready()
            yield executor
        finally:
            executor.close()


def again(executor: Executor, **named: Any) -> None:
    executor.rest()
    executor.clear()
    executor.complete(TOKENS, **named)
    executor.rest()


def a_failed_load_counts_as_whole(executor: Executor, patch: Callable[..., None]) -> Callable[[], None]:
    loads = trtllm_stubs.connector("loads").Loads
    patch(loads, "_copied", lambda self, load, pending: self._over(load))

    def run() -> None:
        executor.complete(TOKENS)
        between(executor, loads=1.0)
        again(executor)

    return run


def pages_of_an_ended_request_are_not_kept(executor: Executor, patch: Callable[..., None]) -> Callable[[], None]:
    patch(trtllm_stubs.connector("side").SchedulerSide, "holds", lambda self, name: False)

    def run() -> None:
        daemon: Daemon = executor.daemon
        worker = daemon.pid()
        stop(worker)
        request = executor.add(TOKENS, max_new=1)
        executor.run(lambda: request.state in ("saving", "over"), "the request ends")
        executor.clear()
        os.kill(worker, signal.SIGCONT)
        side = executor.scheduler._side
        eventually("the store is over", lambda: side.stores.turn() or not len(side.stores))
        again(executor)

    return run


def the_seed_lacks_the_salt(executor: Executor, patch: Callable[..., None]) -> Callable[[], None]:
    side = trtllm_stubs.connector("side")
    seed_of = side.seed_of
    patch(side, "seed_of", lambda *fields: seed_of(*fields[:4], (), fields[5]))

    def run() -> None:
        executor.complete(TOKENS, cache_salt_id=7)
        again(executor)

    return run


def other_inputs_have_hashes(executor: Executor, patch: Callable[..., None]) -> Callable[[], None]:
    patch(trtllm_stubs.connector("side"), "why_not_hashed", lambda request: "")

    def run() -> None:
        executor.complete(TOKENS, multimodal_hashes=[[1]])
        again(executor)

    return run


def a_page_is_stored_before_it_is_full(executor: Executor, patch: Callable[..., None]) -> Callable[[], None]:
    side = trtllm_stubs.connector("side").SchedulerSide
    scheduled = side._scheduled

    def more(self: Any, tracked: Any, data: Any, *, new: bool) -> None:
        data.num_scheduled_tokens += BLOCK
        tracked.written = 0
        scheduled(self, tracked, data, new=new)

    patch(side, "_scheduled", more)

    def run() -> None:
        # One block of the prompt is not computed before the request is aborted.
        executor.chunk = 4 * BLOCK
        request = executor.add(TOKENS)
        executor.iterate()
        executor.abort(request)
        again(executor)

    return run


def pages_count_as_written_before_the_forward_pass(
    executor: Executor, patch: Callable[..., None]
) -> Callable[[], None]:
    worker = trtllm_stubs.connector("worker").Worker
    bind = worker.bind_connector_meta

    def bound(self: Any, metadata: Any) -> None:
        bind(self, metadata)
        self._forward_ended()
        side = self._side
        eventually("the store is over", lambda: side.stores.turn() or not len(side.stores))

    patch(worker, "bind_connector_meta", bound)

    def run() -> None:
        executor.complete(TOKENS)
        again(executor)

    return run


@pytest.mark.parametrize(
    "mistake",
    [
        a_failed_load_counts_as_whole,
        pages_of_an_ended_request_are_not_kept,
        the_seed_lacks_the_salt,
        other_inputs_have_hashes,
        a_page_is_stored_before_it_is_full,
        pages_count_as_written_before_the_forward_pass,
    ],
    ids=lambda mistake: mistake.__name__,
)
@pytest.mark.parametrize("planted", [True, False], ids=["planted", "not planted"])
def test_a_mistake_is_found(
    executor: Executor, mistake: Callable[..., Any], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mistake(executor, monkeypatch.setattr if planted else lambda *_: None)
    if planted:
        with pytest.raises(WrongBytes):
            run()
    elif mistake is a_failed_load_counts_as_whole:
        flaky = between(executor)
        executor.complete(TOKENS)
        flaky.loads = 0.5
        again(executor)
    else:
        run()
