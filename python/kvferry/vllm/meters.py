"""The statistics of the connector: their definitions, and the counts of one side since they were last taken.

Each metric has a value for each combination of its labels. Labels have fixed sets of values and histograms have fixed
buckets, so that the size of the statistics does not depend on the number of requests: at most 20 KB for one side.
"""

import bisect
import time
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.wire import Code

#: Begins the name of every metric in vLLM's exposition.
PREFIX = "vllm:kvferry_"
#: Longest time for which the times of hooks are kept back while nothing else is to be reported: not every step of an
#: engine that only decodes should carry statistics.
HOOKS_S = 1.0
#: Separates the values of several labels.
_BETWEEN = "/"

_TIMES_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_HOOK_TIMES_S = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)

#: Names of the error codes in labels, by number.
CODES = {int(code): code.name.lower() for code in Code}


@dataclass(frozen=True, eq=False)
class Metric:
    """The definition of one metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    #: The values of a single label, if they are known beforehand.
    values: tuple[str, ...] = ()
    #: Upper ends of a histogram's buckets, without that of the last bucket, which has none.
    buckets: tuple[float, ...] = ()

    def label_values(self, key: str) -> list[str]:
        """Returns the values of the labels under a key of the statistics."""
        return key.split(_BETWEEN) if self.labels else []


#: All metrics, by name.
METRICS: dict[str, Metric] = {}


def _metric(name: str, kind: Any, unit: str, meaning: str, label: str = "", *values: str, **more: Any) -> Metric:
    METRICS[name] = Metric(name, kind, unit, meaning, (label,) if label else (), values, **more)
    return METRICS[name]


def _counter(name: str, unit: str, meaning: str, label: str = "", *values: str) -> Metric:
    return _metric(name, "counter", unit, meaning, label, *values)


def _gauge(name: str, unit: str, meaning: str, label: str = "", *values: str) -> Metric:
    return _metric(name, "gauge", unit, meaning, label, *values)


def _time(name: str, meaning: str, label: str = "", *values: str, buckets: tuple[float, ...] = _TIMES_S) -> Metric:
    return _metric(f"{name}_time_seconds", "histogram", "s", meaning, label, *values, buckets=buckets)


LOOKUPS = _counter(
    "lookups",
    "lookups",
    "Lookups of which vLLM got the outcome; declined: kvferry has pages, and computing them takes less time",
    "outcome",
    *("hit", "miss", "declined", "late", "refused"),
)
LOOKUPS_SKIPPED = _counter(
    "lookups_skipped",
    "requests",
    "Requests that were not looked up, each counted again when the reason changes; adapter: its weights are unknown, "
    "recomputed: a load failed or a lookup was late, short: no full page is left, vllm: it does not read its cache",
    "reason",
    *("mode", "off", "request", "recomputed", "adapter", "vllm", "disconnected", "short"),
)
LOOKUPS_DEFERRED = _counter("lookups_deferred", "calls", "Calls that vLLM had to repeat, because an answer was missing")
LOOKUP_TIME = _time("lookup", "Time from a lookup to its answer")
LOOKUP_WAIT = _counter("lookup_wait_seconds", "s", "Time that steps of the scheduler waited for answers")
HIT_TOKENS = _counter(
    "hit_tokens",
    "tokens",
    "Tokens that loads were to bring, by the tier in which the lookup found them",
    "tier",
    *("host", "disk"),
)
DECLINED_TOKENS = _counter(
    "declined_tokens", "tokens", "Tokens on a disk that were not offered, because computing them takes less time"
)
LOADS = _counter(
    "loads", "loads", "Loads that are over, by the pages that can be used", "outcome", *("whole", "part", "nothing")
)
LOAD_BYTES = _counter("load_bytes", "bytes", "Bytes of one rank that loads brought")
LOAD_COPY_TIME = _time("load_copy", "Time from the request of a load to its answer")
LOAD_TIME = _time("load", "Time from vLLM's allocation of pages for a load to the report of its end to vLLM")
LOADS_RECOMPUTED = _counter(
    "loads_recomputed",
    "loads",
    "Loads of which vLLM computes pages. The reason is an error code, or: abandoned, adapter (its files changed), "
    "checksum (verify mode found other bytes), fault (of a hook), no_pages (vLLM has none for some positions), reset, "
    "stopped",
    "reason",
)
PAGES_RECOMPUTED = _counter("pages_recomputed", "pages", "Pages of these loads that vLLM computes")
STORES = _counter(
    "stores", "stores", "Stores that are over, by whether they were carried out", "outcome", *("done", "failed")
)
STORE_PAGES = _counter(
    "store_pages",
    "pages",
    "Pages of these stores; present: kvferry had them, refused: it had no room for them",
    "outcome",
    *("stored", "present", "refused", "failed"),
)
STORE_BYTES = _counter(
    "store_bytes", "bytes", "Bytes of one rank that were stored; of pages of several sizes in one store the average"
)
STORE_TIME = _time("store", "Time from the request of a store to its answer")
STORES_SKIPPED = _counter(
    "stores_skipped",
    "requests",
    "Requests of which pages were not stored, each counted again when the reason changes; backpressure: stores",
    "reason",
    *("mode", "off", "request", "adapter", "reset", "paused", "backpressure"),
)
QUEUE_TIME = _time(
    "queue", "Time that a request to the leader waited before it was sent", "request", "lookup", "load", "store"
)
REFUSALS = METRICS["refusals"] = Metric(
    "refusals",
    "counter",
    "requests",
    "Lookups, loads and stores that were refused, or ended without an answer (deadline, abandoned), by error code",
    ("request", "code"),
)
HOOK_TIME = _time("hook", "Time in each hook, of the scheduler or of all ranks", "hook", buckets=_HOOK_TIMES_S)
CONNECTED = _gauge("connected", "0, 1", "Whether the scheduler has a connection to the leader")
REGISTERED = _gauge("rank_registered", "0, 1", "Whether the worker of a rank has the rank's KV memory", "rank")
OFF = _gauge("off", "0, 1", "Whether the cache is switched off")
FAILED = _gauge("failed", "0, 1", "Whether a hook has failed, so that requests run without the cache")
COPIES = _gauge(
    "copies",
    "copies",
    "Copies that are not known to be over; abandoned: not all ranks have confirmed the end",
    "state",
    *("loading", "storing", "abandoned"),
)
VERIFIED_PAGES = _counter(
    "verified_pages",
    "pages",
    "Loaded pages that verify mode has compared; unknown: no checksum of them was known",
    "outcome",
    *("right", "wrong", "unknown"),
)
STORE_HELD_PAGES = _gauge(
    "store_held_pages", "pages", "Pages of vLLM's pool that stores hold; a page of two stores counts twice"
)
OPEN_REQUESTS = _gauge(
    "open_requests", "requests", "Requests to the leader without an answer", "state", *("queued", "sent")
)


class Meters:
    """Counts, times and states of one side of the connector. For one thread alone."""

    def __init__(self) -> None:
        self._counted: dict[str, dict[str, Any]] = {}
        self._gauges: dict[str, dict[str, float]] = {}
        self._hooks: dict[str, list[list[float]]] = {}
        #: Something else than times of hooks was counted.
        self._changed = False
        self._hooks_at = 0.0

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Adds to a counter."""
        if by:
            values, key = self._counted.setdefault(metric.name, {}), _BETWEEN.join(labels)
            values[key] = values.get(key, 0) + by
            self._changed = True

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Adds a value to a histogram."""
        values, key = self._counted.setdefault(metric.name, {}), _BETWEEN.join(labels)
        if key not in values:
            values[key] = _histogram(metric)
        _add(values[key], metric.buckets, value)
        self._changed = True

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Sets a gauge."""
        values, key = self._gauges.setdefault(metric.name, {}), _BETWEEN.join(labels)
        if values.get(key) != value:
            values[key] = value
            self._changed = True

    def hook(self, name: str, took_s: float) -> None:
        """Adds the time of one call of a hook."""
        histogram = self._hooks.get(name)
        if histogram is None:
            histogram = self._hooks[name] = _histogram(HOOK_TIME)
        _add(histogram, _HOOK_TIMES_S, took_s)

    def take(self) -> dict[str, dict[str, Any]] | None:
        """Returns what was counted since it was last returned, by metric and label values, and all gauges.

        None if nothing is new, or only times of hooks within :data:`HOOKS_S`. The result belongs to the caller.
        """
        now = time.monotonic()
        if not self._changed and (not self._hooks or now < self._hooks_at):
            return None
        taken, self._counted = self._counted, {}
        if self._hooks:
            taken[HOOK_TIME.name], self._hooks = self._hooks, {}
        taken.update((name, dict(values)) for name, values in self._gauges.items())
        self._changed, self._hooks_at = False, now + HOOKS_S
        return taken


def _histogram(metric: Metric) -> list[list[float]]:
    """Returns an empty histogram: the number of values in each bucket, and their sum in each."""
    size = len(metric.buckets) + 1
    return [[0] * size, [0.0] * size]


def _add(histogram: list[list[float]], buckets: tuple[float, ...], value: float) -> None:
    bucket = bisect.bisect_left(buckets, value)
    histogram[0][bucket] += 1
    histogram[1][bucket] += value
