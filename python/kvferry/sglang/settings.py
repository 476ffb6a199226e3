"""The settings in ``linker_extra_config``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry.options import DEADLINE_MS_MAX, Options


@dataclass(frozen=True)
class Settings:
    """Keys of ``linker_extra_config``, with their defaults."""

    #: The ``socket_dir`` of ``kvferry up``. Default: ``$XDG_RUNTIME_DIR/kvferry``, or ``/tmp/kvferry-<uid>``.
    socket_dir: Path
    #: Number of this engine among the leader's replicas, from 0. Default: 0.
    replica: int = 0
    #: Separates the pages of engines that otherwise look alike. Default: empty.
    namespace: str = ""
    #: Start of every namespace that this engine names: one of an entry of the leader's setting ``namespaces``, such as
    #: ``tenant-a/``. Default: empty.
    namespace_prefix: str = ""
    #: Names weights that cannot be identified, because they are neither files that are older than the engine nor a
    #: commit of the Hub. A value promises that engines with the same text and path have the same weights, and that
    #: adapters of one name and path have the same files. Default: empty.
    weights: str = ""
    #: Finds the stored pages again after SGLang's cache was flushed. Otherwise a flush makes the engine leave them:
    #: SGLang flushes its cache after its weights have changed. Default: false.
    keep_on_flush: bool = False
    #: Longest wait of one lookup for its answer. Default: 2.
    lookup_budget_ms: int = 2
    #: Longest total wait of one step of SGLang's scheduler for lookups. Default: 20.
    step_budget_ms: int = 20
    #: Deadline of a lookup; a late one makes requests run without lookups for a while. Default: 500.
    lookup_timeout_ms: int = 500
    #: Deadline of a load, for which SGLang's scheduler waits. A late load is abandoned, and its request is computed.
    #: Default: 5,000.
    load_timeout_ms: int = 5_000
    #: ``compute``: SGLang's scheduler waits for each load, so that a failed one is computed; ``abort``: all loads of a
    #: batch run at the same time, and a failed one aborts the requests of the batch that load. Default: compute.
    failed_load: str = "compute"
    #: Deadline of a store. Default: 30,000.
    store_timeout_ms: int = 30_000
    #: Most offloads at a time; SGLang keeps their pages, and offers further ones later. Default: 64.
    offloads_max: int = 64
    #: ``both``; ``load``: nothing is stored; ``store``: nothing is loaded. Default: both.
    mode: str = "both"

    @classmethod
    def read(cls, extra: dict[str, Any]) -> "Settings":
        """Reads and checks the values of ``linker_extra_config``.

        Raises:
            ValueError: naming the key, the value and the remedy.
        """
        options = Options("linker_extra_config", extra, [field.name for field in fields(cls)])
        options.socket_dir()
        options.texts("namespace", "weights")
        options.short_text("namespace_prefix")
        options.flags("keep_on_flush")
        options.word("mode", ("both", "load", "store"))
        options.word("failed_load", ("compute", "abort"))
        options.numbers(
            (
                ("replica", 0, 63),
                ("lookup_budget_ms", 0, 1000),
                ("step_budget_ms", 0, 10_000),
                ("lookup_timeout_ms", 1, 60_000),
                ("load_timeout_ms", 10, DEADLINE_MS_MAX),
                ("store_timeout_ms", 10, DEADLINE_MS_MAX),
                ("offloads_max", 1, 4096),
            )
        )
        return cls(**options.values)
