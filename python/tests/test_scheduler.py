"""Tests of the scheduler's side of the connector, call by call, with a simulated leader."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon import eventually
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvferry import wire
from kvferry.client import Failure, Later
from kvferry.engine_client import EngineRequests
from kvferry.served import Served
from kvferry.vllm import inflight, scheduler
from kvferry.vllm.metadata import RankReport, StepMetadata
from kvferry.vllm.scheduler import SchedulerSide
from kvferry.vllm.settings import Settings
from kvferry.wire import Code

PAGE_TOKENS = 4
PAGE_BYTES = 1_000_000
RANKS = 2


class Asked:
    """A request that is answered by the test."""

    def __init__(self, number: int, message: Any, until: Callable | None):
        self.id, self._message, self.until = number, message, until
        self.answer: Any = None
        self.failure: Failure | None = None
        self.done = False
        self.timeout_s = 0.0
        self.waited = False
        self.queued_s: float | None = 0.003
        self.took_s: float | None = None

    @property
    def message(self) -> Any:
        """The message. Like the client, a step after the request was made builds it from what the caller gave."""
        if isinstance(self._message, Later):
            self._message = self._message.build()
        return self._message

    def wait(self, timeout_s: float) -> bool:
        self.waited = True
        return self.done

    def end(self, answer: Any) -> None:
        if isinstance(answer, Failure):
            self.failure = answer
        else:
            self.answer = answer
        self.done, self.took_s = True, 0.02
        if self.until is not None:
            self.until(self)


class Leader(EngineRequests):
    """A fake of the client."""

    def __init__(self, directory: Path, engine: bytes, *, first_id: int, replica: int, name: str, turn: Callable):
        self.directory, self.turn = directory, turn
        self.link = self.epoch = 1
        self.lost_at: float | None = None
        self.problem = "no process listens"
        self.asked: list[Asked] = []
        self.answers: dict[type, Any] = {}
        #: Whether the leader carries out `cancel_stores`.
        self.cancels = False
        #: How often requests were sent that had waited for others.
        self.pokes = 0
        self._ids = itertools.count(1)

    @property
    def listening(self) -> bool:
        return self.link != 0

    @property
    def open_requests(self) -> tuple[int, int]:
        return 0, sum(not asked.done for asked in self.asked)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def request(
        self,
        message: Any,
        timeout_s: float,
        *,
        grace_s: float = 0,
        until: Callable | None = None,
        urgent: bool = False,
        wake: bool = True,
        identity: int | None = None,
    ) -> Asked:
        assert identity is None, "requests are not sent again here"
        asked = Asked(next(self._ids), message, until)
        asked.timeout_s = timeout_s
        self.asked.append(asked)
        if isinstance(message, wire.CancelStores) and self.cancels:
            assert urgent, "the cancel must not queue behind the stores that it ends"
            for store in [each for each in self.asked if isinstance(each.message, wire.Store) and not each.done]:
                store.end(wire.StoreAnswer(0, 0, failed_pages=1))
            asked.end(wire.CancelStoresAnswer(1))
        kind = message.kind if isinstance(message, Later) else wire.KINDS[type(message)]
        for answered in self.answers:
            if wire.KINDS[answered] == kind:
                asked.end(self.answers[answered])
        return asked

    def last(self, kind: type) -> Asked:
        return next(asked for asked in reversed(self.asked) if isinstance(asked.message, kind))

    def poke(self) -> None:
        self.pokes += 1

    def draw(self) -> int:
        return next(self._ids)

    def count(self, kind: type) -> int:
        return sum(isinstance(asked.message, kind) for asked in self.asked)


@dataclass
class Block:
    number: int
    ref_cnt: int = 0


class Pool:
    """A fake of the used parts of vLLM's pool."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(100)]

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    def reset_prefix_cache(self) -> bool:
        return not self.held()

    def held(self) -> list[int]:
        return [block.number for block in self.blocks if block.ref_cnt]


@dataclass
class Request:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    status: RequestStatus = RequestStatus.WAITING
    kv_transfer_params: Any = None
    num_prompt_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        self.grow(0)

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)

    def grow(self, tokens: int) -> None:
        self.num_tokens += tokens
        full = self.num_tokens // PAGE_TOKENS
        self.block_hashes = [f"{self.request_id}{number:031}".encode() for number in range(full)]


class Engine:
    """The scheduler's side, and the calls that vLLM makes around it."""

    def __init__(self, served: Served | None = None, zeroes: bool = False, **settings: Any):
        self.side = SchedulerSide(
            Settings(**{"socket_dir": Path("/nowhere"), "store_run_pages": 1, **settings}),
            engine=b"e" * 16,
            replica=0,
            namespace="model",
            adapters="",
            served=served or Served.one(PAGE_TOKENS, PAGE_BYTES),
            ranks=RANKS,
            zeroes=zeroes,
            connect=Leader,  # type: ignore[arg-type]
        )
        self.leader: Leader = self.side._client  # type: ignore[assignment]
        self.pool = Pool()
        self.side.bind_pool(self.pool)  # type: ignore[arg-type]
        #: The block table of each request, or its tables, one for each group.
        self.tables: dict[str, list[int] | tuple[list[int], ...]] = {}

    def step(
        self,
        scheduled: dict[Request, int] | None = None,
        preempted: tuple[str, ...] = (),
        states: dict[str, list[tuple[int, int, int]]] | None = None,
        zeroed: tuple[int, ...] = (),
    ) -> StepMetadata:
        tokens = {request.request_id: count for request, count in (scheduled or {}).items()}
        state = SimpleNamespace(
            get_block_ids=lambda name: _tables(self.tables[name]), boundary_state_offloads=states or {}
        )
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            preempted_req_ids=set(preempted),
            kv_connector_block_state=state,
            new_block_ids_to_zero=list(zeroed),
            kv_cache_block_copies=None,
        )
        step = self.side.step(output)  # type: ignore[arg-type]
        for request, count in (scheduled or {}).items():
            request.num_computed_tokens += count
        return step

    def allocate(self, request: Request, pages: list[int] | tuple[list[int], ...], external_tokens: int) -> None:
        self.tables[request.request_id] = pages
        blocks = SimpleNamespace(get_block_ids=lambda: _tables(pages))
        self.side.allocated(request, blocks, external_tokens)  # type: ignore[arg-type]


def _tables(pages: list[int] | tuple[list[int], ...]) -> tuple[list[int], ...]:
    return pages if isinstance(pages, tuple) else (pages,)


def request(name: str, tokens: int) -> Request:
    made = Request(name, tokens)
    Request.__hash__ = lambda self: hash(self.request_id)  # type: ignore[method-assign]
    return made


@pytest.fixture
def engine() -> Engine:
    return Engine()


def found(engine: Engine, pages: int) -> None:
    engine.leader.answers[wire.Lookup] = wire.LookupAnswer(pages)


def refused(code: int = Code.COPY_FAILED) -> Failure:
    return Failure(code, "refused", reported=True, over=True)


def unknown() -> Failure:
    return Failure(Code.DEADLINE, "nobody knows", reported=False)


def test_at_least_one_token_is_left_to_compute(engine: Engine) -> None:
    found(engine, 100)
    assert engine.side.matched_tokens(request("a", 12), 0) == 8
    assert engine.side.matched_tokens(request("b", 13), 0) == 12
    assert engine.side.matched_tokens(request("c", 4), 0) == 0
    assert engine.side.matched_tokens(request("d", 13), 12) == 0


def test_pages_of_the_device_come_first(engine: Engine) -> None:
    found(engine, 2)
    asking = request("a", 33)
    assert engine.side.matched_tokens(asking, 8) == 8
    lookup = engine.leader.last(wire.Lookup).message
    assert (lookup.have_pages, lookup.hash_bytes, len(lookup.hashes)) == (2, 32, 8 * 32)
    engine.allocate(asking, list(range(10, 19)), 8)
    load = engine.leader.last(wire.Load).message
    assert (load.parts[0].first_page, load.parts[0].pages) == (2, [[12, 2]])


def test_a_loads_deadline_grows_with_its_bytes() -> None:
    engine = Engine(load_timeout_ms=500, load_mb_per_s=4)
    found(engine, 8)
    for name, tokens, limit_s in (("a", 9, 1.0), ("b", 33, 2.5)):
        asking = request(name, tokens)
        matched = engine.side.matched_tokens(asking, 0)
        engine.allocate(asking, list(range(10, 20)), matched or 0)
        assert engine.leader.last(wire.Load).timeout_s == limit_s
    assert Settings(Path("/nowhere")).load_limit_s(3_000_000_000) == 5.0


def test_a_load_gets_time_for_running_steps() -> None:
    """The wait for a step is added to a load's own time: a step of some seconds causes no miss. The time is bounded: a
    step that never ends causes a miss."""
    engine = Engine(load_timeout_ms=500, load_mb_per_s=4, step_timeout_ms=7_000)
    found(engine, 8)
    busy = request("busy", 3)
    engine.tables["busy"] = [9]

    def limit_s(name: str) -> float:
        asking = request(name, 9)
        matched = engine.side.matched_tokens(asking, 0)
        engine.allocate(asking, list(range(10, 20)), matched or 0)
        return engine.leader.last(wire.Load).timeout_s

    assert limit_s("idle") == 1.0, "no step was sent to the ranks"
    first, second = (engine.step({busy: 1}).written_through for _ in range(2))
    assert limit_s("both") == 8.0
    engine.side.ranks_reported(KVConnectorOutput(kv_connector_worker_meta=RankReport({}, "", first)))
    assert limit_s("one") == 8.0
    engine.side.ranks_reported(KVConnectorOutput(kv_connector_worker_meta=RankReport({}, "", second)))
    assert limit_s("none") == 1.0


def test_pages_that_another_connector_loads_are_released(engine: Engine) -> None:
    """Otherwise the leader would hold the pages for 30 s."""
    found(engine, 4)
    asking = request("a", 33)
    assert engine.side.matched_tokens(asking, 0) == 16
    engine.allocate(asking, list(range(10, 19)), 0)
    let_go = engine.leader.asked[-1].message
    assert (engine.leader.count(wire.Lookup), let_go.have_pages, len(let_go.hashes)) == (2, 8, 8 * 32)
    engine.step({asking: 33})
    assert engine.leader.count(wire.Lookup) == 2, "computed pages are stored in the same slot"
    assert engine.leader.last(wire.Store).message.slot == let_go.slot


def test_nothing_is_released_when_nothing_was_found(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 33)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, list(range(10, 19)), 0)
    assert engine.leader.count(wire.Lookup) == 1


def test_the_pages_of_a_late_answer_are_released() -> None:
    engine = Engine(lookup_timeout_ms=1)
    asking = request("a", 33)
    eventually("it is computed", lambda: engine.side.matched_tokens(asking, 0) == 0)
    engine.allocate(asking, list(range(10, 19)), 0)
    assert engine.leader.last(wire.Lookup).message.have_pages == 8


def test_a_lookup_is_sent_once_and_repeated_when_its_answer_is_old(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(engine, 4)
    asking = request("a", 33)
    for device_tokens, asked, matched in ((0, 1, 16), (0, 1, 16), (8, 1, 8), (16, 2, 16), (0, 3, 16)):
        assert engine.side.matched_tokens(asking, device_tokens) == matched
        assert engine.leader.count(wire.Lookup) == asked
    monkeypatch.setattr("kvferry.vllm.lookups.FRESH_S", -1.0)
    engine.side.matched_tokens(asking, 0)
    assert engine.leader.count(wire.Lookup) == 4
    monkeypatch.undo()
    engine.leader.link = 2
    engine.side.matched_tokens(asking, 0)
    assert engine.leader.count(wire.Lookup) == 5


def test_a_missing_answer_is_awaited_for_a_limited_time() -> None:
    engine = Engine(lookup_timeout_ms=50)
    asking = request("a", 33)
    assert engine.side.matched_tokens(asking, 0) is None
    eventually("it is computed", lambda: engine.side.matched_tokens(asking, 0) == 0)
    assert engine.leader.count(wire.Lookup) == 1
    found(engine, 2)
    assert engine.side.matched_tokens(asking, 0) == 0, "the request continues without the cache"
    assert engine.side.matched_tokens(request("b", 33), 0) == 8


def test_without_a_leader_nothing_is_requested(engine: Engine) -> None:
    engine.leader.link = 0
    asking = request("a", 33)
    assert engine.side.matched_tokens(asking, 0) == 0
    engine.tables["a"] = list(range(1, 10))
    step = engine.step({asking: 33})
    assert step == StepMetadata(written_through=step.written_through)
    engine.side.finished(asking)
    assert engine.leader.asked == []


def test_a_load_completes_fully_partly_or_not_at_all(engine: Engine) -> None:
    for name, answer, failed in (
        ("a", wire.LoadAnswer(4), []),
        ("b", wire.LoadAnswer(2), [12, 13]),
        ("c", refused(), [10, 11, 12, 13]),
    ):
        found(engine, 4)
        asking = request(name, 17)
        assert engine.side.matched_tokens(asking, 0) == 16
        engine.allocate(asking, [10, 11, 12, 13, 14], 16)
        assert engine.step() == StepMetadata(written_through=0)
        engine.leader.last(wire.Load).end(answer)
        assert engine.step() == StepMetadata(loaded=[name], failed_pages=failed)
        assert engine.step() == StepMetadata()
        lookups = engine.leader.count(wire.Lookup)
        assert engine.side.matched_tokens(asking, 0) == (0 if failed else 16)
        assert engine.leader.count(wire.Lookup) - lookups == (0 if failed else 1), "a failed load is not retried"


def test_a_load_waits_for_the_steps_that_were_sent_to_the_ranks(engine: Engine) -> None:
    """Steps overlap: a step that the ranks run may still write pages that its requests have freed."""
    found(engine, 2)
    first, asking = request("first", 3), request("a", 9)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [1, 2, 3], 8)
    assert engine.leader.last(wire.Load).message.after == 0, "no step was sent to the ranks"
    engine.tables["first"] = [9]
    steps = [engine.step({first: 1}).written_through for _ in range(2)]
    assert 0 < steps[0] < steps[1]
    assert engine.step().written_through == steps[1], "an empty step may never be reported as over"
    later = request("later", 9)
    engine.side.matched_tokens(later, 0)
    engine.allocate(later, [4, 5, 6], 8)
    load = engine.leader.last(wire.Load)
    assert load.message.after == steps[1] < load.id


def test_a_step_that_only_clears_pages_has_a_number(engine: Engine) -> None:
    empty = {"num_scheduled_tokens": {}, "preempted_req_ids": set(), "kv_connector_block_state": None}
    idle = SimpleNamespace(**empty, new_block_ids_to_zero=None, kv_cache_block_copies=None)
    assert engine.side.step(idle).written_through == 0  # type: ignore[arg-type]
    clears = SimpleNamespace(**empty, new_block_ids_to_zero=[3], kv_cache_block_copies=None)
    assert engine.side.step(clears).written_through > 0  # type: ignore[arg-type]


def test_a_load_without_an_answer_is_over_when_every_rank_confirms_it(engine: Engine) -> None:
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    load = engine.leader.last(wire.Load)
    load.end(unknown())
    assert engine.step() == StepMetadata(abandon=[load.id])
    assert engine.step() == StepMetadata(), "each rank is notified once"
    report(engine, {load.id: 1})
    assert engine.step().loaded == [], "the other rank's worker may still write"
    report(engine, {load.id: 1})
    assert engine.step() == StepMetadata(loaded=["a"], failed_pages=[10, 11, 12, 13])
    report(engine, {load.id: 2})
    assert engine.step() == StepMetadata()


def test_an_error_without_over_frees_no_pages(engine: Engine) -> None:
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    load = engine.leader.last(wire.Load)
    load.end(Failure(Code.BUSY, "too many requests wait for answers", reported=True, retry=True))
    assert engine.step() == StepMetadata(abandon=[load.id]), "after a retry the copy may run"
    report(engine, {load.id: 2})
    assert engine.step() == StepMetadata(loaded=["a"], failed_pages=[10, 11, 12, 13])


def report(engine: Engine, over: dict[int, int]) -> None:
    engine.side.ranks_reported(KVConnectorOutput(kv_connector_worker_meta=RankReport(over)))


def test_without_a_connection_copies_are_not_awaited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    load = engine.leader.last(wire.Load)
    engine.leader.link, engine.leader.lost_at = 0, time.monotonic()
    assert engine.step().abandon == [], "a restarted leader answers"
    monkeypatch.setattr(inflight, "LOST_S", -1.0)
    assert engine.step().abandon == [load.id]
    load.end(wire.LoadAnswer(4))
    assert engine.step().loaded == [], "a late answer may concern other pages by now"
    report(engine, {load.id: 2})
    assert engine.step() == StepMetadata(loaded=["a"], failed_pages=[10, 11, 12, 13])


def test_pages_are_stored_as_they_fill(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 10)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [7, 8, 20, 21]
    step = engine.step({asking: 10})
    store = engine.leader.last(wire.Store)
    part = store.message.parts[0]
    assert (part.first_page, part.pages, store.message.more_hashes) == (0, [[7, 2]], b"")
    assert step == StepMetadata(written_through=step.written_through, needed_through=store.id)
    assert step.written_through > store.id, "the step's own number comes after its stores"
    assert engine.pool.held() == [7, 8]
    asking.grow(1)
    assert engine.step({asking: 1}).needed_through == store.id
    assert engine.leader.count(wire.Store) == 1, "no page was filled"
    asking.grow(1)
    engine.step({asking: 1})
    more = engine.leader.last(wire.Store)
    assert (more.message.parts[0].first_page, more.message.parts[0].pages) == (2, [20])
    assert (more.message.more_from, more.message.more_hashes) == (2, asking.block_hashes[2])
    store.end(wire.StoreAnswer(2, 0))
    engine.step()
    assert engine.pool.held() == [20]


@pytest.mark.parametrize(
    ("device_pages", "loaded", "stored"),
    [
        pytest.param(0, 4, (4, [14]), id="whole: only the page behind"),
        pytest.param(0, 3, (0, [[10, 5]]), id="in part: all, because one of them is computed"),
        pytest.param(1, 3, (0, [[10, 5]]), id="behind a page of the device, which kvferry may lack: all"),
    ],
)
def test_pages_of_a_load_are_not_stored_again(
    engine: Engine, device_pages: int, loaded: int, stored: tuple[int, list]
) -> None:
    found(engine, 4 - device_pages)
    asking = request("a", 20)
    assert engine.side.matched_tokens(asking, 4 * device_pages) == 16 - 4 * device_pages
    engine.allocate(asking, [10, 11, 12, 13, 14], 16 - 4 * device_pages)
    engine.step()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(loaded))
    engine.step()
    engine.tables["a"] = [10, 11, 12, 13, 14]
    engine.step({asking: 20})
    part = engine.leader.last(wire.Store).message.parts[0]
    assert (part.first_page, part.pages) == stored


def test_pages_of_a_load_are_stored_for_a_new_leader(engine: Engine) -> None:
    """The next leader may not have them, and the pages behind them are found by no lookup then."""
    found(engine, 4)
    asking = request("a", 24)
    matched = engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14, 15], matched or 0)
    engine.step()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    engine.step()
    engine.leader.epoch += 1
    engine.tables["a"] = [10, 11, 12, 13, 14, 15]
    stored = []
    for tokens in (20, 4):
        engine.step({asking: tokens})
        part = engine.leader.last(wire.Store).message.parts[0]
        stored.append((part.first_page, part.pages))
    assert stored == [(0, [[10, 5]]), (5, [15])]


def test_pages_of_a_load_are_stored_after_a_preemption(engine: Engine) -> None:
    """vLLM computes them again then, and kvferry may have evicted them meanwhile."""
    found(engine, 4)
    asking = request("a", 20)
    matched = engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], matched or 0)
    engine.step()
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    engine.step()
    engine.step(preempted=["a"])
    engine.tables["a"] = [20, 21, 22, 23, 24]
    engine.step({asking: 20})
    part = engine.leader.last(wire.Store).message.parts[0]
    assert (part.first_page, part.pages) == (0, [[20, 5]])


def test_guessed_tokens_are_not_stored(engine: Engine) -> None:
    """Of 3 scheduled tokens only the first is final: the others are drafts that may be rejected."""
    found(engine, 0)
    asking = request("a", 6)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [7, 8]
    engine.step({asking: 5})
    engine.step({asking: 3})
    assert engine.leader.last(wire.Store).message.parts[0].pages == [7]
    assert engine.leader.count(wire.Store) == 1


def test_each_part_of_a_prompt_stores_the_pages_that_it_fills(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 24)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2, 3, 4, 5, 6]
    firsts = []
    for tokens in (6, 6, 6, 6):
        engine.step({asking: tokens})
        message = engine.leader.last(wire.Store).message
        firsts.append((message.parts[0].first_page, message.parts[0].pages))
    assert firsts == [(0, [1]), (1, [[2, 2]]), (3, [4]), (4, [[5, 2]])]


def test_a_failed_store_is_retried_with_the_next_page(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2, 3]
    engine.step({asking: 8})
    engine.leader.last(wire.Store).end(refused(Code.UNKNOWN_SLOT))
    engine.step()
    assert engine.pool.held() == []
    lookups = engine.leader.count(wire.Lookup)
    asking.grow(4)
    engine.step({asking: 4})
    assert engine.leader.count(wire.Lookup) == lookups + 1, "the slot is opened again"
    opened, store = engine.leader.asked[-2].message, engine.leader.asked[-1].message
    assert (opened.slot, opened.have_pages, len(opened.hashes)) == (store.slot, 3, 3 * 32)
    assert (store.parts[0].first_page, store.parts[0].pages, store.more_hashes) == (0, [[1, 3]], b"")


def test_the_slot_is_opened_again_at_another_leader(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2, 3]
    engine.step({asking: 4})
    engine.leader.link, engine.leader.epoch = 2, 2
    engine.step({asking: 4})
    kinds = [type(asked.message) for asked in engine.leader.asked]
    assert kinds == [wire.Lookup, wire.Store, wire.Lookup, wire.Store]


def test_pages_of_a_finished_request_are_held_while_they_are_read(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2]
    engine.step({asking: 8})
    engine.side.finished(asking)
    assert isinstance(engine.leader.asked[-1].message, wire.Finish)
    assert engine.pool.held() == [1, 2]
    assert engine.side.copying(), "an idle engine runs steps until the copy is over"
    again = request("a", 8)
    assert engine.side.track(again).slot != engine.leader.asked[-1].message.slot, "a request id may be reused at once"
    engine.leader.last(wire.Store).end(wire.StoreAnswer(2, 0))
    engine.step()
    assert engine.pool.held() == []
    assert not engine.side.copying()


def test_an_idle_engine_waits_for_unconfirmed_copies_for_a_limited_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2]
    engine.step({asking: 8})
    engine.leader.last(wire.Store).end(unknown())
    assert engine.step().abandon == [2]
    assert engine.side.copying()
    monkeypatch.setattr(inflight, "ABANDONED_S", -1.0)
    assert not engine.side.copying()
    assert engine.pool.held() == [1, 2], "the pages may still be read"


def test_an_aborted_load_returns_its_pages_once(engine: Engine) -> None:
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    engine.side.finished(asking)
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    assert engine.step().loaded == ["a"]
    assert engine.step().loaded == []


def test_an_abort_after_a_load_keeps_the_pages_of_an_older_store(engine: Engine) -> None:
    """A request is preempted during a store, loaded again, and aborted."""
    found(engine, 0)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2, 3, 4, 5]
    engine.step({asking: 17})
    store = engine.leader.last(wire.Store)
    asking.num_computed_tokens = 0
    engine.step(preempted=("a",))
    assert engine.pool.held() == [1, 2, 3, 4], "the copy still reads the pages of the request"
    found(engine, 4)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    assert engine.step().loaded == ["a"]
    engine.side.finished(asking)
    assert engine.pool.held() == [1, 2, 3, 4]
    store.end(wire.StoreAnswer(4, 0))
    engine.step()
    assert engine.pool.held() == []


def test_a_preempted_request_is_stored_from_its_first_page_again(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2]
    engine.step({asking: 8})
    engine.leader.last(wire.Store).end(wire.StoreAnswer(2, 0))
    asking.num_computed_tokens = 0
    engine.step(preempted=("a",))
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [5, 6]
    engine.step({asking: 8})
    message = engine.leader.last(wire.Store).message
    assert (message.parts[0].first_page, message.parts[0].pages) == (0, [[5, 2]])


def test_preemption_waits_a_little_for_pages_that_only_a_store_holds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2]
    engine.pool.touch(engine.pool.blocks[1:3])
    engine.step({asking: 8})
    assert not engine.side.frees_soon(), "the request holds them, too"
    engine.pool.free_blocks(engine.pool.blocks[1:3])
    assert engine.side.frees_soon()
    monkeypatch.setattr("kvferry.vllm.scheduler.FREES_SOON_S", 0.0)
    assert not engine.side.frees_soon(), "a slow store is not awaited"


def test_stores_are_cancelled_when_the_pool_is_reset(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused engine runs no steps, and a store may take longer than any caller waits."""
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2]
    engine.step({asking: 8})
    monkeypatch.setattr(scheduler, "LAST_STORES_S", 0.2)
    assert not engine.pool.reset_prefix_cache(), "the wait is bounded"
    assert engine.leader.count(wire.CancelStores) == 1, "retried only after an answer"
    assert engine.side.copying()
    engine.leader.last(wire.CancelStores).end(Failure(Code.NOT_READY, "not yet", reported=True, retry=True))
    engine.leader.cancels = True
    assert engine.pool.reset_prefix_cache()
    assert engine.pool.held() == []
    assert not engine.side.copying()
    assert engine.leader.count(wire.CancelStores) == 2


def test_a_pool_without_stores_is_reset_without_a_request(engine: Engine) -> None:
    assert engine.pool.reset_prefix_cache()
    assert engine.leader.count(wire.CancelStores) == 0


def test_stores_pause_after_one_that_the_leader_could_not_take(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found(engine, 0)
    asking = request("a", 8)
    engine.side.matched_tokens(asking, 0)
    engine.tables["a"] = [1, 2, 3, 4]
    engine.step({asking: 8})
    engine.leader.last(wire.Store).end(Failure(Code.NOT_READY, "not yet", reported=True, retry=True, over=True))
    asking.grow(4)
    engine.step({asking: 4})
    assert engine.leader.count(wire.Store) == 1
    monkeypatch.setattr(engine.side._stores, "_again_at", 0.0)
    asking.grow(1)
    engine.step({asking: 1})
    message = engine.leader.last(wire.Store).message
    assert (message.parts[0].first_page, message.parts[0].pages) == (0, [[1, 3]])


def test_a_request_that_does_not_read_the_cache_holds_nothing(engine: Engine) -> None:
    found(engine, 4)
    asking = request("a", 33)
    asking.skip_reading_prefix_cache = True
    assert engine.side.matched_tokens(asking, 0) == 0
    assert engine.leader.asked == []


def test_an_absent_leader_is_logged_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry")
    engine.leader.lost_at = time.monotonic() - 5
    for _ in range(3):
        engine.leader.turn()
    engine.leader.lost_at = None
    for _ in range(3):
        engine.leader.turn()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "no leader answers in /nowhere/leader (no process listens): requests run without the cache" in texts[0]
    assert "is connected" in texts[1]


def test_no_record_of_an_ended_request_is_kept(engine: Engine) -> None:
    found(engine, 0)
    engine.leader.answers[wire.Store] = wire.StoreAnswer(2, 0)
    for number in range(50):
        asking = request(f"r{number}", 8)
        engine.side.matched_tokens(asking, 0)
        engine.tables[asking.request_id] = [1, 2]
        engine.step({asking: 8})
        engine.step()
        engine.side.finished(asking)
    engine.step()
    assert engine.side._tracked == {}
    assert len(engine.side._copies) == 0
