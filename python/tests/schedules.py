"""Random schedules of vLLM's own scheduler with the connector, a simulated leader and a simulated device.

:class:`Schedule` draws an engine from a seed and runs it. After each step it compares vLLM's pool of pages with the
requests' tables and with the copies that run.
"""

import collections
import hashlib
import itertools
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import neighbour
import pool_checks
from engine import transfer_config
from fake_device import SPECIAL, SPOILED, TOKENS, ZEROS, Device, Name, Run, Sequence, Work
from fake_leader import Leader
from fake_requests import Clock
from real_scheduler import connecting, engine_config
from shapes import PAGE, SHAPES, groups_of, spec_of
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.vllm import KvferryConnector

#: Tokens of the longest prompt and answer.
PROMPT_MAX, ANSWER_MAX = 44, 20
#: Steps in which an engine without new requests must come to rest.
DRAIN_STEPS = 600
#: Modules of the scheduler's side that read the time, which a schedule advances.
CLOCKED = [
    *("finishes", "looks", "removals", "resets"),
    *(f"vllm.{name}" for name in ("backpressure", "inflight", "invalidation", "lookups", "namespaces")),
    *(f"vllm.{name}" for name in ("scheduler", "stores", "verify")),
]


class Rank:
    """Takes the place of a rank's session with its worker."""

    fault = ""

    def __init__(self, number: int, leader: Leader):
        self._number, self._leader = number, leader
        self._abandoned: list[int] = []
        self._wrote = 0

    def announces(self, through: int) -> bool:
        return True

    def needs(self, through: int) -> None:
        self._report(min(through, self._wrote))

    def wrote(self, through: int, over: Any, stream: Any, *, needed: int) -> None:
        """Reports what is needed at once; the rest may be reported much later."""
        self._wrote = through
        at_once = self._leader.draw_from.random() < 0.3
        self._report(through if at_once else min(needed, through))

    def _report(self, through: int) -> None:
        self._leader.written = max(self._leader.written, through)

    def abandon(self, requests: list[int]) -> None:
        self._abandoned += requests

    def over(self) -> list[int]:
        over = [each for each in self._abandoned if self._leader.calm or self._leader.draw_from.random() < 0.3]
        for request in over:
            self._abandoned.remove(request)
            self._leader.stop(request, self._number)
        return over

    def close(self) -> None:
        pass


class Checksums:
    """Takes the place of a rank's checksums: of what the device holds, at times later than the step ends."""

    def __init__(self, number: int, engine: "Schedule"):
        self._number, self._engine = number, engine
        self._taken: dict[int, dict[int, tuple[int, bytes | None]]] = {}

    def take(self, orders: Any) -> None:
        engine = self._engine
        for request, parts in orders:
            sums = [checksum(engine.device.pages.get(page)) for _, pages in parts for page in pages]
            fails = engine.draw.random() < 0.01 and not engine.leader.calm
            fails = fails and not any(engine.device.pages.get(page) == SPOILED for _, pages in parts for page in pages)
            self._taken[request] = {self._number: (0, None if fails else struct.pack(f"<{len(sums)}q", *sums))}

    def zero(self, parts: Any) -> None:
        for _, pages in parts:
            for page in pages:
                assert self._engine.device.pages[page] in (SPOILED, ZEROS), "a page that is used is zeroed"
                self._engine.device.pages[page] = ZEROS

    def results(self) -> dict[int, dict[int, tuple[int, bytes | None]]]:
        late = self._engine.draw.random() < 0.2 and not self._engine.leader.calm
        taken, self._taken = ({}, self._taken) if late else (self._taken, {})
        return taken


def checksum(content: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(eq=False)
class Step:
    """A scheduled step, and its results once the ranks have run it."""

    output: Any
    work: Work
    sampled: list[list[int]]
    results: ModelRunnerOutput | None = None


class Schedule:
    """An engine, drawn from a seed. See the module's docstring."""

    def __init__(self, seed: int, monkeypatch: Any, directory: Path):
        self._directory = directory
        self.draw = draw = random.Random(seed)
        self.shape = SHAPES[seed % len(SHAPES)]
        self.ranks = draw.choice((1, 1, 2))
        self.multi = draw.random() < 0.3
        self.shared = draw.random() < 0.3
        self.clock = Clock()
        for name in CLOCKED:
            monkeypatch.setattr(f"kvferry.{name}.time", self.clock)
        # A page whose checksum comes too late is used.
        monkeypatch.setattr("kvferry.vllm.verify.CHECKSUMS_LIMIT_S", 1e9)
        groups = groups_of(self.shape, draw)
        self.config = self._config()
        self.pages = draw.choice((26, 32, 40, 64)) + 14 * (len(groups) - 1)
        memory = KVCacheConfig(
            self.pages, [], [KVCacheGroupSpec([f"layer.{group.number}"], spec_of(group)) for group in groups]
        )
        memory.prefix_cache_retention_interval = draw.choice(
            (0, None, 4 * PAGE) if {"window", "state"} & {group.kind for group in groups} else (0, None)
        )
        block, unit = resolve_kv_cache_block_sizes(memory, self.config)
        memory.hash_block_size = unit
        memory.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(memory, self.config, block, unit)
        self.device = Device(groups, unit, block)
        served = [group for group in groups if group.kind != "scratch"]
        self.leader = Leader(draw, self.clock, self.device, served, self.ranks)
        self.leader.on_copy = lambda copy: pool_checks.check_new(self, copy)
        self.leader.spoils = self._spoils
        self._connect(memory, block, unit)
        hashing = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(unit, hashing)
        self._names = itertools.count()
        self.sequences: dict[Name, Sequence] = {}
        self._registered: dict[Name, int] = {}
        self._prompts: list[list[int]] = []
        self._in_flight: collections.deque[Step] = collections.deque()
        self._requests: list[Request] = []
        self.steps = 0
        self.counts: collections.Counter[str] = collections.Counter()
        neighbour.Neighbour.device, neighbour.Neighbour.sequences = self.device, self.sequences

    def __str__(self) -> str:
        way = "async" if self.depth > 1 else "sync"
        multi = "MultiConnector" if self.multi else "alone"
        return f"{self.shape}, {self.pages} pages, {self.ranks} ranks, {way}, {multi}, shared_after_reset={self.shared}"

    def _config(self) -> Any:
        draw = self.draw
        extra = {
            "shared_after_reset": self.shared,
            "lookup_budget_ms": draw.choice((0, 2)),
            "store_pages_percent": draw.choice((5, 20, 100)),
            "store_run_pages": draw.choice((1, 2, 8)),
            "verify": draw.choice((0, 100, 100)),
        }
        transfer = transfer_config(self._directory, **extra)
        if self.multi:
            neighbour.Neighbour.every = draw.choice((0, 3))
            other = {
                "kv_connector": "Neighbour",
                "kv_connector_module_path": "neighbour",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
            }
            connectors = draw.choice(([transfer], [transfer, other], [other, transfer]))
            transfer = {**other, "kv_connector": "MultiConnector", "kv_connector_extra_config": {}}
            del transfer["kv_connector_module_path"]
            transfer["kv_connector_extra_config"]["connectors"] = connectors
        config = engine_config(
            transfer,
            max_num_batched_tokens=draw.choice((12, 24, 64)),
            max_num_seqs=draw.choice((3, 6)),
            max_model_len=128,
            scheduling_policy=draw.choice(("fcfs", "priority")),
        )
        config.cache_config.block_size = PAGE
        config.cache_config.num_gpu_blocks = 1
        config.cache_config.mamba_cache_mode = "align" if self.shape in ("state", "three") else "none"
        config.scheduler_config.async_scheduling = draw.random() < 0.5
        config.scheduler_config.scheduler_reserve_full_isl = draw.random() < 0.7
        config.parallel_config.world_size = self.ranks
        return config

    def _connect(self, memory: KVCacheConfig, block: int, unit: int) -> None:
        register_all_kvcache_specs(self.config)
        self.config.cache_config.num_gpu_blocks = self.pages
        factory = self.config.scheduler_config.get_scheduler_cls()
        with connecting(lambda *arguments, **named: self.leader):
            with set_current_vllm_config(self.config):
                self.workers = [
                    KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, memory)
                    for _ in range(self.ranks)
                ]
            self.scheduler = factory(
                self.config, memory, StructuredOutputManager(self.config), block, hash_block_size=unit, log_stats=True
            )
        self.connector = _kvferry(self.scheduler.connector)
        self.side: Any = self.connector._scheduler
        self._verification = self.side.verification
        for number, worker in enumerate(self.workers):
            kvferry = _kvferry(worker)
            kvferry._rank = Rank(number, self.leader)  # type: ignore[assignment]
            kvferry._checksums = Checksums(number, self)  # type: ignore[assignment]
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, self.ranks)
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.side._copies.wait = self.leader.wait
        self._resets = 0
        reset = self.side.reset

        def count() -> bool:
            self._resets += 1
            return reset()

        self.side.reset = count
        self.depth = self.config.max_concurrent_batches
        # The connector relies on neither: pages of steps in flight are free only after these steps, and pages that are
        # loaded are not zeroed.
        if self.draw.random() < 0.5:
            self.scheduler.defer_block_free = False
        if self.draw.random() < 0.5:
            self.scheduler.connector.get_loaded_kv_cache_group_ids = lambda request: ()

    def _spoils(self, copy: Any) -> bool:
        """Whether a load may bring a wrong page: one whose checksum is known for certain."""
        if self._verification is None:
            return False
        known = next((pages for load, pages in self._verification._expected.items() if load.pending is copy.asked), [])
        spoiled = [each for each in known if each.known.values and not each.known.marks]
        for each in spoiled:
            copy.spoiled.add(each.page.at)
        return bool(spoiled)

    # One turn of the engine.

    def run(self, steps: int) -> None:
        while self.steps < steps:
            self._act()
            self._turn()
        self._drain()

    def _turn(self) -> None:
        """What the engine's loop does: schedules a step, or takes the results of the oldest one."""
        self._pass()
        if self.scheduler.has_requests() and len(self._in_flight) < self.depth:
            self._schedule()
            pool_checks.check(self)
            if len(self._in_flight) < self.depth and self.draw.random() < 0.7:
                return
        self._pass()
        if self._in_flight:
            step = self._in_flight.popleft()
            self._execute(step)
            self._pass(execute=False)
            if self.draw.random() < 0.1:
                self._abort()
            self.scheduler.update_from_output(step.output, step.results)
            self._learn()
            pool_checks.check(self)

    def _pass(self, *, execute: bool = True) -> None:
        """Lets time pass, in which the leader, the workers and the devices do something."""
        self.clock.now += self.draw.choice((0.001, 0.001, 0.02, 0.02, 0.3)) + (self.draw.random() < 0.01) * 6
        self.leader.turn()
        if execute and self.depth > 1 and self.draw.random() < 0.5:
            waiting = [step for step in self._in_flight if step.results is None]
            if waiting:
                self._execute(waiting[0])

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        self.steps += 1
        resumed = {each.req_id for each in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        runs, sampled = [], []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            tables = tuple(list(table) for table in self.manager.get_block_ids(name))
            sequence = self.sequences[name]
            runs.append(Run(name, sequence, end - count, end, tables, name in resumed))
            # A partial prefill yields no token.
            sampled.append([] if request.is_prefill_chunk else [sequence.tokens[end]])
        ended = [*output.finished_req_ids, *(output.preempted_req_ids or ())]
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        assert not output.kv_cache_block_copies
        device = self.device
        work = Work(runs, output.new_block_ids_to_zero or [], ended, device.weights, device.oldest)
        self._in_flight.append(Step(output, work, sampled))

    def _execute(self, step: Step) -> None:
        if step.results is not None:
            return
        self.device.do(step.work)
        names = list(step.output.num_scheduled_tokens)
        results = []
        for worker in self.workers:
            worker.bind_connector_metadata(step.output.kv_connector_metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            transfers = worker.get_transfer_results(step.output.finished_req_ids)
            said = KVConnectorOutput(
                finished_sending=transfers.finished_sending,
                finished_recving=transfers.finished_recving,
                failed_recving=transfers.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
            index = {name: at for at, name in enumerate(names)}
            results.append(ModelRunnerOutput(names, index, step.sampled, kv_connector_output=said))
        step.results = self._aggregator.aggregate(results)

    # What users do.

    def _act(self) -> None:
        draw = self.draw
        if draw.random() < 0.25 and self.scheduler.get_num_unfinished_requests() < 8:
            self._add()
        if draw.random() < 0.02:
            self._abort()
        if draw.random() < 0.02:
            self._reset(running=draw.random() < 0.5, connector=draw.random() < 0.3)
        if draw.random() < 0.1 and any(each.status.name == "WAITING_FOR_REMOTE_KVS" for each in self._requests):
            self._reset(running=draw.random() < 0.8, connector=draw.random() < 0.5)
        if draw.random() < 0.01:
            states = [PauseState.UNPAUSED, PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]
            self.scheduler.set_pause_state(draw.choice(states))
        elif draw.random() < 0.1:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _add(self) -> None:
        draw = self.draw
        prompt: list[int] = []
        if self._prompts and draw.random() < 0.8:
            known = draw.choice(self._prompts[-24:])
            prompt = known[: draw.choice((len(known), draw.randint(1, len(known))))]
        prompt = prompt[:PROMPT_MAX]
        if not prompt or draw.random() < 0.7:
            room = PROMPT_MAX - len(prompt)
            prompt = prompt + [draw.randrange(SPECIAL, TOKENS) for _ in range(draw.randint(1, room) if room else 0)]
        answer = draw.randint(1, ANSWER_MAX)
        name = Name(f"r{next(self._names)}")
        # A step that is scheduled too much may compute a few tokens more.
        self.sequences[name] = sequence = Sequence(prompt, answer + 4)
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=answer, ignore_eos=True),
            None,
            arrival_time=float(len(self.sequences)),
            priority=draw.randrange(3),
            block_hasher=self._hasher,
        )
        request.skip_reading_prefix_cache = draw.random() < 0.03
        self._prompts.append(sequence.tokens[: len(prompt) + answer])
        self._requests.append(request)
        self._learn()
        self.scheduler.add_request(request)

    def _abort(self) -> None:
        going = [each for each in self._requests if not RequestStatus.is_finished(each.status)]
        if going:
            self.counts["aborted"] += 1
            self.scheduler.finish_requests(self.draw.choice(going).request_id, RequestStatus.FINISHED_ABORTED)

    def _reset(self, *, running: bool, connector: bool) -> None:
        # A reset of the connector says that the weights change, also if vLLM cannot reset its own pages.
        changes = connector and not self.shared
        before, known, resets = self.device.weights, set(self.leader.weights), self._resets
        self.device.weights += changes
        try:
            done = self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError:
            done = False
        self.counts["reset" if done else "reset refused"] += 1
        if changes and self._resets == resets:
            # vLLM gave up before.
            self.device.weights = before
            for namespace in self.leader.weights.keys() - known:
                self.leader.weights[namespace] = before
        elif done:
            self.device.oldest = self.device.weights
        pool_checks.check(self)

    def _learn(self) -> None:
        """Tells the leader's model what the hashes of the running requests mean."""
        unit = self.device.hash_tokens
        for request in self._requests:
            known = self._registered.get(request.request_id, 0)
            marks = self.sequences[request.request_id].marks
            for at in range(known, len(request.block_hashes)):
                self.leader.units[bytes(request.block_hashes[at])] = tuple(marks[at * unit : (at + 1) * unit])
            self._registered[request.request_id] = len(request.block_hashes)
        self._requests = [each for each in self._requests if not RequestStatus.is_finished(each.status)]

    def _drain(self) -> None:
        """Nothing more is asked for, and nothing fails any more: everything must come to rest."""
        self.leader.calm = True
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        for _ in range(DRAIN_STEPS):
            if not self.scheduler.has_requests() and not self._in_flight:
                break
            self._turn()
        else:
            raise AssertionError(f"the engine does not come to rest: {self.scheduler.requests}")
        for _ in range(20):
            # Steps without work, as when the next request arrives.
            self._pass()
            self.clock.now += 2.0
            self._schedule()
            step = self._in_flight.popleft()
            self._execute(step)
            self.scheduler.update_from_output(step.output, step.results)
        pool_checks.check(self)
        pool_checks.check_rest(self)
        self.counts.update(self.leader.counts)
        verification = self._verification
        if verification is None:
            return
        assert verification.verify_mismatches <= self.leader.spoiled_pages, "a right page counts as wrong"
        self.counts["pages verified"] += verification.verified_pages
        self.counts["pages unverified"] += verification.unverified_pages
        self.counts["pages found wrong"] += verification.verify_mismatches


def _kvferry(connector: Any) -> KvferryConnector:
    for each in getattr(connector, "sub_connectors", [connector]):
        if isinstance(each, KvferryConnector):
            return each
    raise TypeError(connector)
