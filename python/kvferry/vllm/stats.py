"""The connector's statistics in vLLM's form: for its messages between processes, its log line, and Prometheus.

The statistics are a dict of metrics, each a dict from label values to a number, or to a histogram: the number of values
in each bucket, and their sum in each (:mod:`kvferry.vllm.meters`). vLLM adds up those of all ranks and of the scheduler
in each step, sends the sum to the process of a client, and gives it there to its log and to Prometheus.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.vllm import meters
from kvferry.vllm.meters import METRICS, PREFIX, Metric

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class KvferryStats(KVConnectorStats):
    """Statistics of an interval."""

    def reset(self) -> None:
        """Drops all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KvferryStats":
        """Returns the sum of both; of a gauge the value of the other. Both stay as they are: vLLM shares their data."""
        total = {name: dict(values) for name, values in self.data.items()}
        for name, values in other.data.items():
            mine = total.setdefault(name, {})
            for key, value in values.items():
                mine[key] = _sum(METRICS[name], mine[key], value) if key in mine else value
        return KvferryStats(total)

    def reduce(self) -> dict[str, int | float]:
        """Returns the figures of vLLM's log line."""
        disk = self._total(meters.HIT_TOKENS, "disk")
        line: dict[str, int | float] = {
            "Hit tokens (host)": self._total(meters.HIT_TOKENS, "host"),
            "Hit tokens (disk)": disk,
            "Lookups": self._total(meters.LOOKUPS),
            "Avg lookup (ms)": self._mean_ms(meters.LOOKUP_TIME),
            "Loads": self._total(meters.LOADS),
            "Loaded MB": round(self._total(meters.LOAD_BYTES) / 1e6, 3),
            "Avg load (ms)": self._mean_ms(meters.LOAD_TIME),
            "Recomputed loads": self._total(meters.LOADS_RECOMPUTED),
            "Stores": self._total(meters.STORES),
            "Stored MB": round(self._total(meters.STORE_BYTES) / 1e6, 3),
            "Avg store (ms)": self._mean_ms(meters.STORE_TIME),
            "Skipped stores": self._total(meters.STORES_SKIPPED),
            "Refusals": self._total(meters.REFUSALS),
            "Time in hooks (ms)": round(self._sum_s(meters.HOOK_TIME) * 1e3, 3),
        }
        for name, gauge in (("Pages held by stores", meters.STORE_HELD_PAGES), ("Connected", meters.CONNECTED)):
            if gauge.name in self.data:
                line[name] = self._total(gauge)
        return line

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data

    def _total(self, metric: Metric, key: str | None = None) -> int | float:
        values = self.data.get(metric.name, {})
        return sum(values.values()) if key is None else values.get(key, 0)

    def _sum_s(self, metric: Metric) -> float:
        return sum(sum(sums) for _, sums in self.data.get(metric.name, {}).values())

    def _mean_ms(self, metric: Metric) -> float:
        count = sum(sum(counts) for counts, _ in self.data.get(metric.name, {}).values())
        return round(self._sum_s(metric) / count * 1e3, 3) if count else 0


def _sum(metric: Metric, mine: Any, other: Any) -> Any:
    match metric.kind:
        case "gauge":
            return other
        case "counter":
            return mine + other
        case _:
            return [[a + b for a, b in zip(*columns, strict=True)] for columns in zip(mine, other, strict=True)]


class KvferryPromMetrics(KVConnectorPromMetrics):
    """The metrics of all engines of a client's process, with the labels of vLLM's own metrics before ours."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {name: self._family(metric) for name, metric in METRICS.items()}
        self._series: dict[tuple[int, str, str], Any] = {}
        # Exposed as 0 from the start, so that rates count the first event. A gauge is unknown before the first step.
        for engine in per_engine_labelvalues:
            for metric in METRICS.values():
                for key in metric.values if metric.labels else ("",):
                    if metric.kind != "gauge":
                        self._one(engine, metric, key)

    def _family(self, metric: Metric) -> Any:
        named = {
            "name": PREFIX + metric.name,
            "documentation": f"{metric.meaning} ({metric.unit}).",
            "labelnames": [*self._labelnames, *metric.labels],
        }
        match metric.kind:
            case "counter":
                return self._counter_cls(**named)
            case "gauge":
                # Any of several processes of the server may get the statistics of a step.
                return self._gauge_cls(**named, multiprocess_mode="mostrecent")
            case _:
                return self._histogram_cls(**named, buckets=list(metric.buckets))

    def _one(self, engine: int, metric: Metric, key: str) -> Any:
        series = self._series.get((engine, metric.name, key))
        if series is None:
            labels = [*self.per_engine_labelvalues[engine], *metric.label_values(key)]
            series = self._series[engine, metric.name, key] = self._families[metric.name].labels(*labels)
        return series

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the statistics of an interval to the metrics of an engine."""
        for name, values in transfer_stats_data.items():
            metric = METRICS[name]
            for key, value in values.items():
                series = self._one(engine_idx, metric, key)
                match metric.kind:
                    case "counter":
                        series.inc(value)
                    case "gauge":
                        series.set(value)
                    case _:
                        _observe(series, metric.buckets, value)


def _observe(series: Any, buckets: tuple[float, ...], histogram: list[list[float]]) -> None:
    """Adds a histogram to that of the client library, which takes single values only: the mean of each bucket."""
    for bucket, (count, total) in enumerate(zip(*histogram, strict=True)):
        if not count:
            continue
        # Rounding must not move the mean to another bucket.
        lowest = math.nextafter(buckets[bucket - 1], math.inf) if bucket else 0.0
        highest = buckets[bucket] if bucket < len(buckets) else math.inf
        mean = min(max(total / count, lowest), highest)
        for _ in range(int(count)):
            series.observe(mean)


def register() -> None:
    """Makes the connector known by its name, by which vLLM's MultiConnector finds the class of its statistics."""
    # vLLM refuses a second registration of the name.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector("KvferryConnector", "kvferry.vllm", "KvferryConnector")
