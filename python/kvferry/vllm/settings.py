"""The settings in ``kv_connector_extra_config``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry.options import DEADLINE_MS_MAX, Options

#: Settings that are one of several words, the default first.
WORDS = (
    ("mode", ("both", "load", "store")),
    ("store", ("all", "prompt")),
    ("layout", ("auto", "engine", "BLHNC", "BLNHC")),
    ("kv_memory", ("auto", "engine")),
    ("events", ("off", "engine", "publish")),
)

#: Settings that are whole numbers: the least and the largest value.
NUMBERS = (
    ("replica", 0, 63),
    ("lookup_budget_ms", 0, 1000),
    ("lookup_timeout_ms", 1, 60_000),
    ("load_timeout_ms", 10, DEADLINE_MS_MAX),
    ("step_timeout_ms", 0, 100_000),
    ("load_mb_per_s", 1, 1_000_000),
    ("store_timeout_ms", 10, DEADLINE_MS_MAX),
    ("store_run_pages", 1, 65_536),
    ("store_pages_percent", 1, 100),
    ("store_mb_max", 1, 1_000_000),
    ("events_buffer_steps", 1, 1_000_000),
    ("events_hwm", 1, 1_000_000),
    ("verify", 0, 100),
    ("record_mb_max", 1, 1_000_000),
)


@dataclass(frozen=True)
class Settings:
    """Keys of ``kv_connector_extra_config``, with their defaults."""

    #: The ``socket_dir`` of ``kvferry up``. Default: ``$XDG_RUNTIME_DIR/kvferry``, or ``/tmp/kvferry-<uid>``.
    socket_dir: Path
    #: Number of this engine among the leader's replicas, from 0; data-parallel ranks count up from here. Default: 0.
    replica: int = 0
    #: Separates the pages of engines that otherwise look alike, such as other weights under one name. Default: empty.
    namespace: str = ""
    #: Start of every namespace that this engine names: one of an entry of the leader's setting ``namespaces``, such as
    #: ``tenant-a/``. Default: empty.
    namespace_prefix: str = ""
    #: Names weights that cannot be identified, because they are neither files that are older than the engine nor a
    #: commit of the Hub. A value promises that engines with the same text and path have the same weights, and that
    #: files of adapters do not change after they were loaded. Default: empty.
    weights: str = ""
    #: Shares pages with other engines again after a reset of vLLM's caches, once the leader has confirmed the reset.
    #: Only for an engine whose weights never change while it runs. Default: false.
    shared_after_reset: bool = False
    #: Longest total wait of one scheduler step for answers to lookups. Default: 2.
    lookup_budget_ms: int = 2
    #: Deadline of a lookup; without an answer by then, the request is computed without further lookups. Default: 500.
    lookup_timeout_ms: int = 500
    #: Deadline of a load, in addition to the time for its bytes at ``load_mb_per_s`` and ``step_timeout_ms``. A late
    #: load is cancelled, and its pages are computed. Default: 2,000.
    load_timeout_ms: int = 2_000
    #: Additional time for a load that waits for the end of running steps. If they take longer, its pages are computed.
    #: Default: 10,000.
    step_timeout_ms: int = 10_000
    #: Lowest rate assumed for a load's deadline, in MB per second and rank. Default: 1,000.
    load_mb_per_s: int = 1_000
    #: ``both``; ``load``: nothing is stored; ``store``: nothing is loaded. Default: both.
    mode: str = "both"
    #: ``all`` pages, or those of the ``prompt`` only. Default: all.
    store: str = "all"
    #: Pages of generated tokens are stored when so many are full, in units of the hashes, and when their request ends.
    #: Default: 8.
    store_run_pages: int = 8
    #: Deadline of a store. Default: 30,000.
    store_timeout_ms: int = 30_000
    #: Most pages held by stores only, in percent of the engine's pages; beyond that stores are skipped. Default: 5.
    store_pages_percent: int = 5
    #: Most megabytes of one rank under store, also if requests hold the pages. A larger store begins when no other one
    #: runs. Default: 4,096.
    store_mb_max: int = 4_096
    #: Layout of the KV cache that vLLM is asked for. ``auto``: on CUDA devices one in which a page is one range, where
    #: that is certain to work; ``engine``: none; or the name of one in vLLM's terms. Default: auto.
    layout: str = "auto"
    #: Where vLLM allocates the KV cache while its allocator is one that takes memory back from a sleeping engine.
    #: ``auto``: in memory that lasts, so that it can be shared; ``engine``: in vLLM's, and requests run without the
    #: cache. Default: auto.
    kv_memory: str = "auto"
    #: KV events of the pages in kvferry: ``off``; ``engine``: in vLLM's own stream; ``publish``: in a stream of their
    #: own, at ``events_endpoint``. Default: off.
    events: str = "off"
    #: Where ``publish`` binds its PUB socket, or to which address it connects, as in vLLM. Data-parallel ranks count up
    #: from its port. No default.
    events_endpoint: str = ""
    #: Where ``publish`` answers requests for earlier batches. Default: nowhere.
    events_replay_endpoint: str = ""
    #: Topic of each batch. Default: empty.
    events_topic: str = ""
    #: Batches that are kept for replay. Default: 10,000.
    events_buffer_steps: int = 10_000
    #: Batches that wait for one slow subscriber; further ones are dropped for it. Default: 100,000.
    events_hwm: int = 100_000
    #: Percent of the pages whose checksums are compared after loads with those of their stores. Engines share pages
    #: only with the same percentage. Default: 0.
    verify: int = 0
    #: Records every call of vLLM, and every request to the leader, in a new file of each start: this path, the number
    #: of the engine and the time of the start. Empty: nothing is recorded. Default: empty.
    record: str = ""
    #: Megabytes of that file at which the recording ends. Default: 1,024.
    record_mb_max: int = 1_024

    @classmethod
    def read(cls, extra: dict[str, Any]) -> "Settings":
        """Reads and checks the values of ``kv_connector_extra_config``.

        Raises:
            ValueError: naming the key, the value and the remedy.
        """
        options = Options("kv_connector_extra_config", extra, [field.name for field in fields(cls)])
        options.socket_dir()
        options.texts("namespace", "weights", "events_endpoint", "events_replay_endpoint", "events_topic")
        options.short_text("namespace_prefix")
        options.flags("shared_after_reset")
        record = extra.get("record", "")
        if not isinstance(record, str) or (record and not Path(record).is_absolute()) or record.endswith("/"):
            raise ValueError(
                f"kv_connector_extra_config: record is {record!r}: give an absolute path, with which file names begin"
            )
        for name, words in WORDS:
            options.word(name, words)
        options.numbers(NUMBERS)
        settings = cls(**options.values)
        if settings.events == "publish" and not settings.events_endpoint:
            raise ValueError(
                "kv_connector_extra_config: events is 'publish', and events_endpoint is '': give an endpoint such as "
                "tcp://*:5657"
            )
        return settings

    def record_path(self, replica: int, begun_us: int) -> Path:
        """The file that an engine which began at this time records into."""
        return Path(f"{self.record}.{replica}.{begun_us}")

    def load_limit_s(self, rank_bytes: int, *, waits: bool = False) -> float:
        """Deadline of a load of ``rank_bytes`` on each rank. ``waits``: the load waits for running steps first."""
        limit_ms = self.load_timeout_ms + (self.step_timeout_ms if waits else 0)
        return min(limit_ms + rank_bytes / (self.load_mb_per_s * 1_000), DEADLINE_MS_MAX) / 1000
