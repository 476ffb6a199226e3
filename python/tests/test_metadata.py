"""Tests of loads that wait for a step of their engine: the scheduler's side, a rank and kvferry, without vLLM."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from daemon import TIMEOUT_S, Daemon, eventually, running
from test_scheduler import PAGE_TOKENS, Pool, Request, request
from vllm.v1.outputs import KVConnectorOutput

from kvferry import wire
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Served
from kvferry.vllm.metadata import RankReport, StepMetadata
from kvferry.vllm.scheduler import SchedulerSide
from kvferry.vllm.settings import Settings

ENGINE = b"e" * 16
#: A load's own time; a step takes longer.
LOAD_S = 0.3


class Engine:
    """An engine of one rank that has submitted a step to its device."""

    def __init__(self, daemon: Daemon, step_timeout_ms: int):
        group = Group({"layer": torch.zeros(8, 2, PAGE_TOKENS, 8)}, engine_page_tokens=PAGE_TOKENS, device_pages=8)
        memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
        self.rank = RankSession(daemon.socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
        settings = Settings(daemon.socket_dir, load_timeout_ms=int(LOAD_S * 1000), step_timeout_ms=step_timeout_ms)
        self.side = SchedulerSide(
            settings,
            engine=ENGINE,
            replica=0,
            namespace="model",
            adapters="",
            served=Served.one(PAGE_TOKENS, 2 * PAGE_TOKENS * 8 * 4),
            ranks=1,
        )
        self.side.bind_pool(Pool())  # type: ignore[arg-type]
        daemon.wait_ready()

    def step(self, asking: Request | None = None, pages: tuple[int, ...] = ()) -> StepMetadata:
        scheduled = {asking.request_id: len(pages) * PAGE_TOKENS} if asking else {}
        state = SimpleNamespace(get_block_ids=lambda _: (list(pages),), boundary_state_offloads={})
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            preempted_req_ids=set(),
            kv_connector_block_state=state,
            new_block_ids_to_zero=None,
        )
        return self.side.step(output)  # type: ignore[arg-type]

    def matched(self, asking: Request) -> int:
        return eventually("the pages are found", lambda: self.side.matched_tokens(asking, 0))

    def over(self) -> StepMetadata:
        """Runs steps until a load is over; returns the last one."""
        return eventually("the load is over", lambda: step if (step := self.step()).loaded else None)

    def close(self) -> None:
        self.side.close()
        self.rank.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(ranks=1, g2="16MiB") as daemon:
        yield daemon


def load_behind_a_step(engine: Engine) -> int:
    """Stores two pages, sends the rank a step, then loads the pages. Returns the number of the step."""
    asking = request("a", 2 * PAGE_TOKENS + 1)
    eventually("a slot is open", lambda: engine.side.matched_tokens(asking, 0) == 0)
    stored = engine.step(asking, (1, 2, 3))
    engine.rank.wrote(stored.written_through)
    report = RankReport({}, "", stored.written_through)
    engine.side.ranks_reported(KVConnectorOutput(kv_connector_worker_meta=report))
    eventually("the pages are stored", lambda: engine.step() and len(engine.side._copies) == 0)
    engine.side.finished(asking)  # type: ignore[arg-type]
    through = engine.step(request("busy", 1), (7,)).written_through
    again = request("a", 2 * PAGE_TOKENS + 1)
    assert engine.matched(again) == 2 * PAGE_TOKENS
    blocks = SimpleNamespace(get_block_ids=lambda: ([4, 5, 6],))
    engine.side.allocated(again, blocks, 2 * PAGE_TOKENS)  # type: ignore[arg-type]
    return through


def test_a_step_longer_than_a_loads_own_time_causes_no_miss(daemon: Daemon) -> None:
    engine = Engine(daemon, step_timeout_ms=int(TIMEOUT_S * 1000))
    through = load_behind_a_step(engine)
    (copy,) = engine.side._copies._open.values()
    assert copy.pending is not None
    assert not copy.pending.wait(2 * LOAD_S), "the load waits for the step"
    engine.rank.wrote(through)
    over = engine.over()
    assert (over.loaded, over.failed_pages, copy.answer) == (["a"], [], wire.LoadAnswer(2))
    engine.close()


def test_a_step_that_never_ends_causes_a_miss_within_a_limit_and_ends_no_worker(daemon: Daemon) -> None:
    engine = Engine(daemon, step_timeout_ms=500)
    worker = daemon.pid()
    begun = time.monotonic()
    load_behind_a_step(engine)
    over = engine.over()
    assert (over.loaded, over.failed_pages) == (["a"], [4, 5])
    assert time.monotonic() - begun >= LOAD_S + 0.5
    assert daemon.pid() == worker
    assert daemon.status()["copies_under_way"] == 0
    engine.close()
