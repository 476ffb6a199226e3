"""Tests of the statistics: what is counted, how vLLM adds it up and sends it, and what its log and Prometheus get."""

import copy
import functools
import json
import math
import pickle
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import PAGE_TOKENS as ENGINE_PAGE_TOKENS
from engine import tokens, transfer_config
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from real_scheduler import Stepped, engine_config
from test_scheduler import PAGE_BYTES, PAGE_TOKENS, Engine, Request, found, refused, request, unknown
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvferry import wire
from kvferry.served import Served, ServedGroup
from kvferry.vllm import KvferryConnector, meters, stores
from kvferry.vllm.guard import Faults, guarded
from kvferry.vllm.meters import METRICS, Meters, Metric
from kvferry.vllm.stats import KvferryPromMetrics, KvferryStats
from kvferry.wire import Code

DOCS = Path(__file__).parents[2] / "docs"
Data = dict[str, dict[str, Any]]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def taken(engine: Engine) -> Data:
    """What the scheduler's side counted since the last call."""
    engine.side.measure()
    return engine.side._meters.take() or {}


def counted(engine: Engine) -> Data:
    """The counters among them, and the number of values in each histogram."""
    found = {}
    for name, values in taken(engine).items():
        if METRICS[name].kind == "counter":
            found[name] = values
        elif METRICS[name].kind == "histogram":
            found[name] = {key: sum(counts) for key, (counts, _) in values.items()}
    return found


def load(engine: Engine, name: str, pages: int, answer: Any, below: int = 0) -> Request:
    """A request whose load of so many pages ends with ``answer``, and is noticed in the next step."""
    engine.leader.answers[wire.Lookup] = wire.LookupAnswer(pages, below_pages=[(3, below)] if below else [])
    asking = request(name, pages * PAGE_TOKENS + 1)
    assert engine.side.matched_tokens(asking, 0) == pages * PAGE_TOKENS
    engine.allocate(asking, list(range(10, 11 + pages)), pages * PAGE_TOKENS)
    engine.leader.last(wire.Load).end(answer)
    return asking


def store(engine: Engine, name: str, answer: Any = None, **params: Any) -> Request:
    """A request whose pages are stored, if they are, with this answer."""
    asking = request(name, 3 * PAGE_TOKENS)
    asking.kv_transfer_params = {"kvferry": params} if params else None
    before = engine.leader.count(wire.Store)
    engine.side.matched_tokens(asking, 0)
    engine.tables[name] = [20, 21, 22]
    engine.step({asking: 3 * PAGE_TOKENS})
    if answer is not None:
        assert engine.leader.count(wire.Store) == before + 1
        engine.leader.last(wire.Store).end(answer)
        engine.step()
    return asking


def reported(engine: Engine, *names: str) -> None:
    """The ranks have reported these loads."""
    engine.side.ranks_reported(KVConnectorOutput(finished_recving=set(names) or None))


# Lookups.


def test_a_lookup_is_counted_once_with_its_outcome(engine: Engine) -> None:
    for name, answer, outcome in (
        ("a", wire.LookupAnswer(2), "hit"),
        ("b", wire.LookupAnswer(0), "miss"),
        ("c", wire.LookupAnswer(0, declined_pages=3), "declined"),
        ("d", refused(Code.NOT_READY), "refused"),
        ("e", unknown(), "late"),
    ):
        engine.leader.answers[wire.Lookup] = answer
        asking = request(name, 17)
        for _ in range(3):
            engine.side.matched_tokens(asking, 0)
        found = counted(engine)
        assert found["lookups"] == {outcome: 1}
        assert found["queue_time_seconds"] == {"lookup": 1}
        assert found.get("lookup_time_seconds") == (None if name in "de" else {"": 1})
        assert found.get("declined_tokens") == ({"": 3 * PAGE_TOKENS} if name == "c" else None)
        refusals = {"d": {"lookup/not_ready": 1}, "e": {"lookup/deadline": 1}}
        assert found.get("refusals") == refusals.get(name)
        assert counted(engine) == {}


def test_a_late_lookup_is_counted_when_it_is_given_up() -> None:
    engine = Engine(lookup_timeout_ms=60_000)
    asking = request("a", 17)
    for _ in range(2):
        assert engine.side.matched_tokens(asking, 0) is None
    assert counted(engine)["lookups_deferred"] == {"": 2}
    engine.side._tracked["a"].lookup.requested_at -= 61  # type: ignore[union-attr]
    assert engine.side.matched_tokens(asking, 0) == 0
    late = counted(engine)
    assert late["lookups"] == {"late": 1}
    assert late["refusals"] == {"lookup/deadline": 1}
    engine.leader.last(wire.Lookup).end(wire.LookupAnswer(2))
    assert engine.side.matched_tokens(asking, 0) == 0
    assert counted(engine) == {"lookups_skipped": {"recomputed": 1}}


@pytest.mark.parametrize(
    ("reason", "prepare"),
    [
        ("mode", lambda engine, asking: None),
        ("off", lambda engine, asking: setattr(engine.side._switch, "off", True)),
        ("request", lambda engine, asking: setattr(asking, "kv_transfer_params", {"kvferry": {"load": False}})),
        ("vllm", lambda engine, asking: setattr(asking, "skip_reading_prefix_cache", True)),
        ("disconnected", lambda engine, asking: setattr(engine.leader, "link", 0)),
        ("adapter", lambda engine, asking: setattr(engine.side.track(asking), "namespace", None)),
        ("recomputed", lambda engine, asking: setattr(engine.side.track(asking), "computes", True)),
        ("short", lambda engine, asking: asking.block_hashes.clear()),
    ],
)
def test_a_request_that_is_not_looked_up_is_counted_once(reason: str, prepare: Callable) -> None:
    engine = Engine(mode="store") if reason == "mode" else Engine()
    asking = request("a", 17)
    prepare(engine, asking)
    for _ in range(3):
        assert engine.side.matched_tokens(asking, 0) == 0
    assert counted(engine) == {"lookups_skipped": {reason: 1}}
    assert reason in meters.LOOKUPS_SKIPPED.values


# Loads.


def test_hits_count_by_tier_and_loads_with_their_bytes_and_times(engine: Engine) -> None:
    load(engine, "a", 4, wire.LoadAnswer(4), below=1)
    assert engine.side.disk_tokens(request("a", 17)) == PAGE_TOKENS  # type: ignore[arg-type]
    reported(engine)
    found = counted(engine)
    assert found["hit_tokens"] == {"host": 3 * PAGE_TOKENS, "disk": PAGE_TOKENS}
    assert found["loads"] == {"whole": 1}
    assert found["load_bytes"] == {"": 4 * PAGE_BYTES}
    assert found["load_copy_time_seconds"] == found["load_time_seconds"] == {"": 1}
    assert found["queue_time_seconds"]["load"] == 1
    assert not {"loads_recomputed", "pages_recomputed", "refusals"} & set(found)
    reported(engine, "a")
    assert counted(engine) == {}, "the report of the ranks is none of this load"


def test_times_are_those_of_the_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocation of a load's pages is 1.5 s before the ranks report the load."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("kvferry.vllm.loads.time", SimpleNamespace(monotonic=lambda: clock.now))
    load(engine, "a", 4, wire.LoadAnswer(3))
    clock.now += 1.0
    assert engine.step().loaded == ["a"]
    assert "load_time_seconds" not in counted(engine), "the ranks have not reported it"
    clock.now += 0.5
    reported(engine, "a")
    ((counts, sums),) = taken(engine)["load_time_seconds"].values()
    assert (sum(counts), sum(sums)) == (1, 1.5)
    assert counts[meters.LOAD_TIME.buckets.index(2.5)] == 1


@pytest.mark.parametrize(
    ("answer", "outcome", "reason", "refusal"),
    [
        (wire.LoadAnswer(3), ("part", 1, 3), "stopped", None),
        (wire.LoadAnswer(0), ("nothing", 4, 0), "stopped", None),
        (refused(), ("nothing", 4, 0), "copy_failed", "load/copy_failed"),
        (refused(4711), ("nothing", 4, 0), "other", "load/other"),
    ],
)
def test_a_load_that_fails_counts_as_recomputed(
    engine: Engine, answer: Any, outcome: tuple[str, int, int], reason: str, refusal: str | None
) -> None:
    load(engine, "a", 4, answer)
    engine.step()
    found = counted(engine)
    word, computed, loaded = outcome
    assert found["loads"] == {word: 1}
    assert found["loads_recomputed"] == {reason: 1}
    assert found["pages_recomputed"] == {"": computed}
    assert found.get("load_bytes") == ({"": loaded * PAGE_BYTES} if loaded else None)
    assert found.get("refusals") == ({refusal: 1} if refusal else None)
    engine.step()
    assert counted(engine) == {}


def test_an_abandoned_load_counts_when_every_rank_has_confirmed(engine: Engine) -> None:
    load(engine, "a", 4, unknown())
    step = engine.step()
    found = taken(engine)
    assert found["copies"] == {"loading": 0, "storing": 0, "abandoned": 1}
    assert "loads" not in found
    engine.side._copies.ranks_know(dict.fromkeys(step.abandon, 2))
    engine.step()
    found = taken(engine)
    assert found["copies"] == {"loading": 0, "storing": 0, "abandoned": 0}
    assert found["loads_recomputed"] == {"abandoned": 1}
    assert found["refusals"] == {"load/abandoned": 1}


def test_a_load_beside_a_reset_counts_as_recomputed(engine: Engine) -> None:
    found(engine, 4)
    for name, connector in (("a", True), ("b", False)):
        asking = load(engine, name, 4, None)
        ended = engine.leader.last(wire.Load)
        ended.done = False
        engine.pool.touch([engine.pool.blocks[page] for page in (10, 11, 12, 13, 14)])
        engine.side.reset() if connector else engine.pool.reset_prefix_cache()
        ended.end(wire.LoadAnswer(4))
        reported(engine)
        found_now = counted(engine)
        assert found_now["loads"] == {"nothing": 1}
        assert found_now["loads_recomputed"] == {"reset": 1}
        assert found_now["pages_recomputed"] == {"": 4}
        engine.step()
        reported(engine, name)
        assert counted(engine)["load_time_seconds"] == {"": 1}
        engine.side.finished(asking)  # type: ignore[arg-type]
        engine.pool.free_blocks([engine.pool.blocks[page] for page in (10, 11, 12, 13, 14)])


def test_a_load_of_several_groups_is_recomputed_as_a_whole() -> None:
    groups = (ServedGroup(0, PAGE_TOKENS, 100), ServedGroup(1, PAGE_TOKENS, 10, "sliding_window", PAGE_TOKENS + 1))
    engine = Engine(Served(groups, PAGE_TOKENS, PAGE_TOKENS, whole=True))
    for answer, expected in (
        (wire.LoadAnswer(5), {"loads": {"whole": 1}, "load_bytes": {"": 410}}),
        (wire.LoadAnswer(3), {"loads": {"nothing": 1}, "load_bytes": {"": 300}, "pages_recomputed": {"": 5}}),
    ):
        found(engine, 4)
        asking = request("a", 17)
        assert engine.side.matched_tokens(asking, 0) == 16
        engine.allocate(asking, ([10, 11, 12, 13, 14], [30, 31, 32, 33, 34]), 16)
        engine.leader.last(wire.Load).end(answer)
        engine.step()
        found_now = counted(engine)
        assert {name: found_now.get(name) for name in expected} == expected
        engine.side.finished(asking)  # type: ignore[arg-type]
        engine.step()


def test_a_load_without_pages_or_with_other_weights_counts_as_recomputed(engine: Engine) -> None:
    for reason in ("no_pages", "adapter"):
        found(engine, 4)
        asking = request(reason, 17)
        engine.side.matched_tokens(asking, 0)
        table = [10, 0, 12, 13, 14] if reason == "no_pages" else [10, 11, 12, 13, 14]
        blocks = SimpleNamespace(get_block_ids=lambda table=table: (table,))
        changed = reason == "adapter"
        engine.side._loads.begin(engine.side.track(asking), blocks, 16, changed=changed)  # type: ignore[arg-type]
        found_now = counted(engine)
        assert found_now["hit_tokens"] == {"host": 16}
        assert found_now["loads"] == {"nothing": 1}
        assert found_now["loads_recomputed"] == {reason: 1}
        assert found_now["pages_recomputed"] == {"": 4}


def test_loads_that_a_fault_prevents_count_as_recomputed() -> None:
    engine = Engine(zeroes=True)
    found(engine, 4)
    asking = request("a", 17)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [10, 11, 12, 13, 14], 16)
    engine.side.finish_only(SimpleNamespace(num_scheduled_tokens={}, new_block_ids_to_zero=None))  # type: ignore[arg-type]
    assert not engine.leader.count(wire.Load)
    found_now = counted(engine)
    assert found_now["loads_recomputed"] == {"fault": 1}
    failing = request("b", 17)
    blocks = SimpleNamespace(get_block_ids=lambda: ([10, 11, 12, 13, 14],))
    for _ in range(2):
        engine.side.load_failed(failing, blocks, 16)  # type: ignore[arg-type]
    assert counted(engine)["loads_recomputed"] == {"fault": 1}, "the load is reported once"


# Stores.


def test_stores_count_by_outcome_with_bytes_and_times(engine: Engine) -> None:
    found(engine, 0)
    store(engine, "a", wire.StoreAnswer(1, 1, refused_pages=1))
    done = counted(engine)
    assert done["stores"] == {"done": 1}
    assert done["store_pages"] == {"stored": 1, "present": 1, "refused": 1}
    assert done["store_bytes"] == {"": PAGE_BYTES}
    assert done["store_time_seconds"] == {"": 1}
    assert done["queue_time_seconds"]["store"] == 1
    store(engine, "b", refused(Code.INVALID))
    failed = counted(engine)
    assert failed["stores"] == {"failed": 1}
    assert failed["store_pages"] == {"failed": 3}
    assert failed["refusals"] == {"store/invalid": 1}
    assert "store_time_seconds" not in failed


@pytest.mark.parametrize("reason", ["mode", "off", "request", "adapter", "reset", "paused", "backpressure"])
def test_a_request_that_is_not_stored_is_counted_once(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(mode="load") if reason == "mode" else Engine()
    found(engine, 0)
    monkeypatch.setattr(stores, "STORE_PAUSE_S", 3600)
    if reason == "paused":
        failure = refused(Code.BUSY)
        failure.retry = True
        store(engine, "before", failure)
    elif reason == "off":
        engine.side._switch.off = True
    elif reason == "backpressure":
        monkeypatch.setattr(engine.side._stores.backpressure, "admits", lambda pages: False)
    taken(engine)
    asking = store(engine, "a", **({"store": False} if reason == "request" else {}))
    if reason in ("adapter", "reset"):
        assert engine.leader.count(wire.Store) == 1
        taken(engine)
        tracked = engine.side.track(asking)
        setattr(tracked, *(("namespace", None) if reason == "adapter" else ("mixed", True)))
    engine.tables["a"] = [20, 21, 22, 23, 24]
    for _ in range(2):
        asking.grow(PAGE_TOKENS)
        engine.step({asking: PAGE_TOKENS})
    skipped = {reason: 3 if reason == "backpressure" else 1}
    assert counted(engine)["stores_skipped"] == skipped
    assert reason in meters.STORES_SKIPPED.values


def test_a_reason_that_comes_back_is_counted_again(engine: Engine) -> None:
    found(engine, 0)
    asking = request("a", 3 * PAGE_TOKENS)
    engine.tables["a"] = list(range(20, 29))
    for off in (True, True, False, True):
        engine.side._switch.off = off
        engine.side.matched_tokens(asking, 0)
        engine.step({asking: PAGE_TOKENS})
        asking.grow(PAGE_TOKENS)
    skipped = counted(engine)
    assert skipped["lookups_skipped"] == skipped["stores_skipped"] == {"off": 2}


def test_gauges_show_the_present_state(engine: Engine) -> None:
    found(engine, 0)
    assert taken(engine)["connected"] == {"": 1}
    assert taken(engine) == {}, "an unchanged state is not reported again"
    store(engine, "a")
    now = taken(engine)
    assert now["store_held_pages"] == {"": 3}
    assert now["copies"] == {"loading": 0, "storing": 1, "abandoned": 0}
    assert now["open_requests"] == {"queued": 0, "sent": 1}
    engine.leader.last(wire.Store).end(wire.StoreAnswer(3, 0))
    engine.step()
    engine.leader.link, engine.side._switch.off = 0, True
    now = taken(engine)
    assert now["store_held_pages"] == now["connected"] == {"": 0}
    assert now["off"] == {"": 1}
    assert now["copies"]["storing"] == now["open_requests"]["sent"] == 0


# The collection.


def test_each_count_is_taken_once_and_times_of_hooks_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: clock.now))
    counts = Meters()
    assert counts.take() is None
    counts.hook("a", 0.001)
    assert set(counts.take() or {}) == {"hook_time_seconds"}
    for _ in range(3):
        counts.hook("a", 0.001)
        assert counts.take() is None, "within a second of the last report"
    counts.count(meters.LOADS, "whole")
    both = counts.take() or {}
    assert sum(both["hook_time_seconds"]["a"][0]) == 3
    assert both["loads"] == {"whole": 1}
    counts.hook("b", 0.001)
    assert counts.take() is None
    clock.now += meters.HOOKS_S
    assert set((counts.take() or {})["hook_time_seconds"]) == {"b"}
    counts.set(meters.CONNECTED, 1)
    first = counts.take() or {}
    counts.set(meters.CONNECTED, 0)
    assert (first, counts.take()) == ({"connected": {"": 1}}, {"connected": {"": 0}}), "the result is the caller's own"


def test_the_size_does_not_depend_on_the_number_of_requests(engine: Engine) -> None:
    sizes = []
    for number in range(400):
        load(engine, f"l{number}", 4, (wire.LoadAnswer(4), wire.LoadAnswer(2), refused())[number % 3])
        engine.step()
        store(engine, f"s{number}", (wire.StoreAnswer(3, 0), refused(Code.INVALID))[number % 2])
        reported(engine, f"l{number}")
        sizes.append(len(json.dumps(engine.side._meters._counted)))
    assert sizes[-1] < sizes[5] * 1.5
    for hook in range(30):
        engine.side._meters.hook(f"a_hook_with_a_rather_long_name_{hook}", 0.5)
    assert len(json.dumps(taken(engine))) < 20_000, "the limit of the module's docstring"
    assert not engine.side._loads._unreported


def test_hooks_are_timed_also_when_they_fail() -> None:
    class Hooks(Faults):
        @guarded()
        def sound(self) -> None:
            pass

        @guarded()
        def broken(self) -> None:
            raise ValueError

    hooks = Hooks()
    hooks.sound()
    hooks.broken()
    hooks.broken()
    times = (hooks.meters.take() or {})["hook_time_seconds"]
    assert {name: sum(counts) for name, (counts, _) in times.items()} == {"sound": 1, "broken": 2}
    assert all(0 < sum(sums) < 10 for _, sums in times.values())


# The form that vLLM needs.


def sample(seed: int) -> Data:
    """Statistics with every metric."""
    draw = random.Random(seed)
    counts = Meters()
    for metric in METRICS.values():
        for key in metric.values or (("lookup/busy", "load/other") if len(metric.labels) == 2 else ("0", "1")):
            labels = metric.label_values(key) if metric.labels else []
            if metric.kind == "counter":
                counts.count(metric, *labels, by=draw.randrange(1, 1000))
            elif metric.kind == "gauge":
                counts.set(metric, draw.randrange(1, 1000), *labels)
            elif metric is meters.HOOK_TIME:
                counts.hook(key, draw.random())
            else:
                counts.observe(metric, draw.random(), *labels)
    return counts.take() or {}


def test_statistics_of_ranks_and_intervals_add_up() -> None:
    parts = [sample(seed) for seed in range(3)]
    before = copy.deepcopy(parts)
    total = KvferryStats(parts[0]).aggregate(KvferryStats(parts[1])).aggregate(KvferryStats(parts[2]))
    assert parts == before, "vLLM's log and Prometheus share them"
    assert set(total.data) == set(METRICS)
    for name, values in total.data.items():
        for key, value in values.items():
            each = [part[name][key] for part in parts]
            match METRICS[name].kind:
                case "counter":
                    assert value == sum(each)
                case "gauge":
                    assert value == each[-1]
                case _:
                    assert value[0] == [sum(column) for column in zip(*(counts for counts, _ in each), strict=True)]
                    assert sum(value[1]) == pytest.approx(sum(sum(sums) for _, sums in each))
    registered = [KvferryStats({"rank_registered": {str(rank): 1}}) for rank in range(2)]
    assert registered[0].aggregate(registered[1]).data == {"rank_registered": {"0": 1, "1": 1}}
    assert KvferryStats().is_empty()
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_statistics_reach_other_processes_unchanged() -> None:
    """A rank sends its object to the scheduler, and the scheduler the plain data to the process of a client."""
    data = sample(1)
    sent = pickle.loads(pickle.dumps(KvferryStats(data)))
    assert (type(sent), sent.to_dict()) == (KvferryStats, data)
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=data))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert received.scheduler_stats.kv_connector_stats == data
    assert KvferryConnector.build_kv_connector_stats(received.scheduler_stats.kv_connector_stats).data == data


def test_the_log_line_sums_the_interval_up() -> None:
    logging = KVConnectorLogging(engine_config().kv_transfer_config)
    lines: list[str] = []

    def log(text: str, *arguments: Any) -> None:
        lines.append(text % arguments)

    logging.log(log)
    assert lines == []
    counts = Meters()
    for seconds, size in ((0.010, 1_000_000), (0.030, 500_000)):
        counts.observe(meters.LOAD_TIME, seconds)
        counts.count(meters.LOADS, "whole")
        counts.count(meters.LOAD_BYTES, by=size)
        counts.count(meters.HIT_TOKENS, "host", by=16)
        counts.count(meters.HIT_TOKENS, "disk", by=4)
        counts.hook("a", 0.002)
        counts.set(meters.STORE_HELD_PAGES, size)
        counts.set(meters.CONNECTED, 1)
        logging.observe(counts.take() or {})
    logging.log(log)
    assert len(lines) == 1
    for part in (
        "KV Transfer metrics: Hit tokens (host)=32, Hit tokens (disk)=8, ",
        "Loads=2, Loaded MB=1.5, Avg load (ms)=20.0, Recomputed loads=0, Stores=0, ",
        "Time in hooks (ms)=4.0, Pages held by stores=500000, Connected=1",
    ):
        assert part in lines[0]
    logging.log(log)
    assert len(lines) == 1, "the interval is over"


# Prometheus.


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def prom(registry: CollectorRegistry, engines: int = 1) -> KvferryPromMetrics:
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    values: dict[int, list[object]] = {engine: ["a model", str(engine)] for engine in range(engines)}
    made = KvferryConnector.build_prom_metrics(engine_config(), kinds, ["model_name", "engine"], values)  # type: ignore[arg-type]
    assert isinstance(made, KvferryPromMetrics)
    return made


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    """Each line of the exposition: name with labels, and value."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "_created{" not in name}


def test_prometheus_gets_every_metric_of_each_engine(registry: CollectorRegistry) -> None:
    metrics = prom(registry, engines=2)
    zeros = exposed(registry)
    assert set(zeros.values()) == {0.0}
    assert 'vllm:kvferry_hit_tokens_total{engine="1",model_name="a model",tier="disk"}' in zeros
    data = sample(1)
    for _ in range(2):
        metrics.observe(data, 1)
    found = exposed(registry)
    for name, metric in METRICS.items():
        for key, value in data[name].items():
            labels = zip(metric.labels, metric.label_values(key), strict=True)
            text = ",".join(f'{label}="{each}"' for label, each in sorted([*labels, ("model_name", "a model")]))
            both = [f"{{{','.join(sorted((*text.split(','), number)))}}}" for number in ('engine="0"', 'engine="1"')]
            full = meters.PREFIX + name
            match metric.kind:
                case "counter":
                    assert found[f"{full}_total{both[1]}"] == 2 * value
                    assert found.get(f"{full}_total{both[0]}", 0) == 0
                case "gauge":
                    assert found[full + both[1]] == value
                    assert full + both[0] not in found
                case _:
                    assert found[f"{full}_count{both[1]}"] == 2 * sum(value[0])
                    assert found[f"{full}_sum{both[1]}"] == pytest.approx(2 * sum(value[1]))
                    assert found.get(f"{full}_count{both[0]}", 0) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_histogram_in_prometheus_is_that_of_the_single_values(seed: int, registry: CollectorRegistry) -> None:
    """Also with equal values at the end of a bucket, whose mean may be rounded up: that of three times 0.1 is more."""
    draw = random.Random(seed)
    ends = meters.LOAD_TIME.buckets
    choices = (*ends, *(math.nextafter(end, math.inf) for end in ends), *(draw.random() for _ in range(9)), 0.0, 99.0)
    few = draw.sample(choices, 4)
    values = [draw.choice(few) for _ in range(60)]
    reference = Histogram("reference", "reference", buckets=ends, registry=registry)
    counts, metrics = Meters(), prom(registry)
    for number, value in enumerate(values):
        reference.observe(value)
        counts.observe(meters.LOAD_TIME, value)
        if number % 25 == 0 or number == 59:
            metrics.observe(counts.take() or {})
    found = exposed(registry)
    for end in (*ends, math.inf):
        text = "+Inf" if end == math.inf else str(end)
        ours = f'vllm:kvferry_load_time_seconds_bucket{{engine="0",le="{text}",model_name="a model"}}'
        assert found[ours] == found[f'reference_bucket{{le="{text}"}}'], text
    sums = found['vllm:kvferry_load_time_seconds_sum{engine="0",model_name="a model"}'], found["reference_sum"]
    assert sums[0] == pytest.approx(sums[1])


# vLLM's own scheduler.


def in_all(engine: Stepped) -> KvferryStats:
    """The sum of the statistics of all steps."""
    total = KvferryStats()
    for stats in engine.stats:
        total = total.aggregate(KvferryStats(stats.kv_connector_stats or {}))
    return total


def test_vllms_scheduler_delivers_each_count_once() -> None:
    """One prompt whose load is reported at once, and one whose load fails in part: its report goes through the rank."""
    engine = Stepped()
    engine.rank._rank = SimpleNamespace(  # type: ignore[assignment]
        registered=True,
        fault="",
        over=list,
        abandon=lambda requests: None,
        announces=lambda through: False,
        needs=lambda through: None,
    )
    stored: list[int] = []
    for seed, loaded in ((1, 3), (2, 1)):
        engine.leader.answers[wire.Lookup] = wire.LookupAnswer(3, below_pages=[(3, 1)])
        asking = engine.add(tokens(ENGINE_PAGE_TOKENS * 4, seed=seed))
        engine.step()
        engine.leader.last(wire.Load).end(wire.LoadAnswer(loaded))
        engine.run(asking)
        for each in engine.leader.asked:
            if isinstance(each.message, wire.Store) and not each.done:
                runs = [run for part in each.message.parts for run in part.pages]
                stored.append(sum(run[1] if isinstance(run, list) else 1 for run in runs))
                each.end(wire.StoreAnswer(stored[-1], 0))
        engine.step()
    total = in_all(engine)
    found = {
        name: total.data[name] for name, metric in METRICS.items() if metric.kind == "counter" and name in total.data
    }
    found.pop("lookup_wait_seconds", None)
    page_bytes = engine.connector._scheduler._served.groups[0].page_bytes
    assert found == {
        "lookups": {"hit": 2},
        "hit_tokens": {"host": 4 * ENGINE_PAGE_TOKENS, "disk": 2 * ENGINE_PAGE_TOKENS},
        "loads": {"whole": 1, "part": 1},
        "load_bytes": {"": 4 * page_bytes},
        "loads_recomputed": {"stopped": 1},
        "pages_recomputed": {"": 2},
        "stores": {"done": len(stored)},
        "store_pages": {"stored": sum(stored)},
        "store_bytes": {"": sum(stored) * page_bytes},
    }
    assert sum(total.data["load_time_seconds"][""][0]) == 2
    assert total.data["rank_registered"] == {"0": 1}
    assert total.data["connected"] == {"": 1}
    assert total.data["failed"] == {"": 0}
    assert total.data["store_held_pages"] == {"": 0}
    hooks = {name: sum(counts) for name, (counts, _) in total.data["hook_time_seconds"].items()}
    assert 0 < hooks["build_connector_meta"] <= len(engine.stats)
    assert 0 < hooks["wait_for_save"] <= len(engine.stats), "hooks of ranks are there, too"
    by_source: dict[CacheHitSource, int] = {}
    for stats in engine.stats:
        for source, count in stats.connector_prefix_cache_stats.hits_by_source.items():
            by_source[source] = by_source.get(source, 0) + count
    assert by_source == {CacheHitSource.HOST: 4 * ENGINE_PAGE_TOKENS, CacheHitSource.DISK: 2 * ENGINE_PAGE_TOKENS}


def test_steps_in_which_nothing_happened_carry_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "HOOKS_S", 3600.0)
    engine = Stepped()
    found(engine, 0)
    engine.run(engine.add(tokens(ENGINE_PAGE_TOKENS - 30, seed=1), max_tokens=20))
    carried = [stats.kv_connector_stats is not None for stats in engine.stats]
    assert len(carried) >= 20
    assert sum(carried) <= 2


def test_a_failed_hook_shows_in_the_statistics(caplog: pytest.LogCaptureFixture) -> None:
    engine = Stepped()
    found(engine, 0)
    engine.step()
    engine.connector.fault = "a hook"
    engine.step()
    assert in_all(engine).data["failed"] == {"": 1}


def test_an_engine_without_the_cache_reports_that_nothing_is_connected() -> None:
    engine = Stepped(config=engine_config(enable_prefix_caching=False))
    engine.run(engine.add(tokens(ENGINE_PAGE_TOKENS * 2, seed=1)))
    data = in_all(engine).data
    assert data.pop("hook_time_seconds")
    assert data == {"connected": {"": 0}, "failed": {"": 0}, "rank_registered": {"0": 0}}


def test_several_connectors_keep_their_statistics_apart(registry: CollectorRegistry) -> None:
    """vLLM finds the class of a connector's statistics by the name of the connector."""
    assert KVConnectorFactory.get_connector_class_by_name("KvferryConnector") is KvferryConnector
    data = {"KvferryConnector": sample(1)}
    built = MultiConnector.build_kv_connector_stats(data)
    assert built is not None
    assert built.to_dict() == data
    ours = transfer_config(Path("/nowhere"), verify=0)
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours]},
    }
    config = engine_config(transfer)
    lines: list[str] = []
    logging = KVConnectorLogging(config.kv_transfer_config)
    logging.observe(data)
    logging.log(lambda text, *arguments: lines.append(text % arguments))
    assert "Hit tokens (host)" in lines[0]
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = MultiConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})  # type: ignore[arg-type]
    metrics.observe(data, 0)
    hits = data["KvferryConnector"]["hit_tokens"]["host"]
    assert exposed(registry)['vllm:kvferry_hit_tokens_total{engine="0",tier="host"}'] == hits
    engine = Stepped(config=config)
    engine.leader.answers[wire.Lookup] = wire.LookupAnswer(2)
    engine.add(tokens(ENGINE_PAGE_TOKENS * 4, seed=1))
    engine.step()
    assert engine.stats[-1].kv_connector_stats["KvferryConnector"]["hit_tokens"] == {"host": 2 * ENGINE_PAGE_TOKENS}


# The page.


def row(metric: Metric) -> str:
    """The row of a metric in the page's table."""
    name = meters.PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    values = ", ".join(f"`{value}`" for value in metric.values)
    return f"| `{name}` | {metric.kind} | {metric.unit} | {labels}{': ' if values else ''}{values} | {metric.meaning} |"


def test_the_page_describes_every_metric_as_the_code_does() -> None:
    page = (DOCS / "vllm.md").read_text()
    rows = re.findall(r"^\| `vllm:kvferry_.*\|$", page, re.MULTILINE)
    assert rows == [row(metric) for metric in METRICS.values()]


def test_error_codes_in_labels_are_those_of_the_page() -> None:
    page = (DOCS / "reference" / "error-codes.md").read_text()
    assert all(f"`{code}`" in page for code in meters.CODES.values())


def test_labels_have_no_separator_in_their_values() -> None:
    values: Iterator[str] = (value for metric in METRICS.values() for value in (*metric.values, *metric.labels))
    assert not [value for value in (*values, *meters.CODES.values()) if "/" in value]
