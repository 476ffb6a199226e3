"""The KV connector for vLLM: ``KvferryConnector``.

vLLM creates one connector in the scheduler and one in every rank's worker, and calls them at fixed points of each step.
This file checks vLLM's configuration and dispatches those calls: the scheduler's to :mod:`kvferry.vllm.scheduler`, a
rank's to :mod:`kvferry.rank`. The leader decides what is cached, found and evicted.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvferry.vllm import compat

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, ZmqEventPublisher
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from kvferry.vllm import kv_groups, kv_memory, layouts, meters, stats
    from kvferry.vllm.event_publisher import EventStream
    from kvferry.vllm.events import KvEvents, StepQueue
except ImportError as error:
    raise RuntimeError(
        f"kvferry knows the KV connector interface of vLLM {compat.KNOWN_VERSION}; vLLM {compat.version()} is "
        f"installed, and differs: {error}. Install vLLM {compat.KNOWN_VERSION}, or a kvferry that knows this one."
    ) from error

from kvferry.checksums import PageChecksums, RankChecksums
from kvferry.memory import KvMemory, Place, Unsupported
from kvferry.pool import KvPool
from kvferry.rank import RankSession
from kvferry.vllm.calls import record
from kvferry.vllm.content import (
    adapters_of,
    content_of,
    namespace_of,
    start_of,
    tell_identity,
    tell_unknown_weights,
    weights_of,
)
from kvferry.vllm.guard import Faults, guarded
from kvferry.vllm.metadata import RankReport, StepMetadata
from kvferry.vllm.reports import Reports
from kvferry.vllm.scheduler import SchedulerSide
from kvferry.vllm.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvferry")

#: vLLM's connector of several connectors. Nothing but the caller's module tells that one asks on behalf of it: the
#: configuration that it passes is that of a connector which is alone.
_MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
_KV_HEADS = re.compile("kv_heads|key_value_heads")


class KvferryConnector(KVConnectorBase_V1, SupportsHMA, Faults):
    """Loads pages that kvferry has, and stores those that it lacks. See ``docs/vllm.md``."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        """Called by vLLM, once per scheduler and per rank.

        Raises:
            ValueError: for a setting that cannot be used, with the remedy.
            RuntimeError: when the interface of the installed vLLM differs from the known one.
        """
        compat.check(
            KVConnectorBase_V1,
            SupportsHMA,
            BlockPool,
            SchedulerOutput,
            KVConnectorBlockState,
            KVCacheConfig,
            KVConnectorStats,
            KVConnectorPromMetrics,
            CacheHitSource,
        )
        super().__init__(vllm_config, role, kv_cache_config)
        check_config(vllm_config)
        self._settings = Settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        if self._settings.shared_after_reset and vllm_config.weight_transfer_config is not None:
            raise ValueError(
                "shared_after_reset is True, and weight_transfer_config says that weights change while the engine "
                "runs: leave one of them out"
            )
        check_events(vllm_config, self._settings)
        self._scheduler: SchedulerSide | None = None
        self._rank: RankSession | None = None
        self._on_device = False
        self._checksums = RankChecksums(None, rank=vllm_config.parallel_config.rank, shard=0)
        self._reports = Reports()
        #: The last scheduler output for which step metadata was built, and that metadata.
        self._made: tuple[SchedulerOutput | None, StepMetadata] = (None, StepMetadata())
        self._pool: KvPool | None = None
        unreachable = why_unreachable(vllm_config, self._settings)
        self._registers = unreachable is None
        why = unreachable or kv_groups.why_not_served(kv_cache_config) or why_not_cached(vllm_config)
        if role == KVConnectorRole.SCHEDULER and why is not None:
            logger.warning("kvferry: %s: requests run without the cache", why)
        elif role == KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            weights = weights_of(vllm_config, self._settings)
            tell_unknown_weights(vllm_config, weights)
            engine, replica = start_of(vllm_config), replica_of(vllm_config, self._settings)
            namespace, served = namespace_of(vllm_config, self._settings, weights), kv_groups.served(kv_cache_config)
            tell_identity(vllm_config, self._settings, namespace)
            ranks, calls = parallel.world_size, None
            if self._settings.record:
                calls = record(
                    self._settings,
                    served,
                    engine=engine,
                    replica=replica,
                    namespace=namespace,
                    ranks=ranks,
                    version=compat.version(),
                )
            self.calls = calls
            self._scheduler = SchedulerSide(
                self._settings,
                engine=engine,
                replica=replica,
                namespace=namespace,
                adapters=adapters_of(vllm_config),
                served=served,
                ranks=ranks,
                calls=calls,
                private=vllm_config.weight_transfer_config is not None,
                zeroes=kv_cache_config.needs_kv_cache_zeroing,
                meters=self.meters,
                events=self._events(),
            )

    def _events(self) -> KvEvents | None:
        """Creates the KV events that the settings want."""
        if self._settings.events == "off":
            return None
        compat.check_events(BlockStored, BlockRemoved, ZmqEventPublisher)
        if self._settings.events == "engine":
            sink = StepQueue()
        else:
            sink = EventStream(self._settings, self._vllm_config.parallel_config.data_parallel_index)
        config = self._kv_cache_config
        return KvEvents(kv_groups.event_groups(config), kv_groups.hash_tokens(config), sink)

    @property
    def requires_kv_delivery(self) -> bool:
        """Always False: a page that is not stored only causes a later miss."""
        return False

    @guarded()
    def shutdown(self) -> None:
        """Closes the connections; kvferry releases all that it holds for this engine."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._rank is not None:
            self._rank.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Returns the layout of the KV cache to use if all backends support it; None for vLLM's own.

        Called in the engine's core, before there is a connector. A MultiConnector asks each of its connectors, and
        refuses different answers.

        Raises:
            ValueError: for a setting that cannot be used, with the remedy.
        """
        settings = Settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        caller = sys._getframe(1).f_globals.get("__name__")
        served = why_unreachable(vllm_config, settings) is None
        return layouts.required(vllm_config, settings.layout, alone=caller != _MULTI_CONNECTOR, served=served)

    # Statistics.

    @guarded()
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns the statistics of this side since the last call; None if there is nothing to report yet."""
        if self.role == KVConnectorRole.WORKER:
            registered = self._rank is not None and self._rank.registered
            self.meters.set(meters.REGISTERED, int(registered), str(self._vllm_config.parallel_config.rank))
        else:
            self.meters.set(meters.FAILED, int(bool(self.fault)))
            if self._scheduler is not None:
                self._scheduler.measure()
            else:
                self.meters.set(meters.CONNECTED, 0)
        taken = self.meters.take()
        return stats.KvferryStats(taken) if taken is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Returns statistics that another process has sent, or empty ones."""
        return stats.KvferryStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Returns the metrics for Prometheus."""
        return stats.KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # A rank's worker.

    @guarded()
    def get_mem_pool_context(self) -> AbstractContextManager | None:
        """Returns a context in which vLLM allocates the KV cache; None for vLLM's own.

        Called before the allocation, of which the result goes to :meth:`register_kv_caches`.
        """
        config = self._vllm_config
        if not self._registers or not kv_memory.is_taken_back(config):
            return None
        rank = config.parallel_config.rank
        why = kv_groups.why_not_served(self._kv_cache_config) or why_not_cached(config)
        if why is None:
            try:
                self._pool = KvPool(kv_memory.whole_allocations)
            except (RuntimeError, OSError) as error:
                why = f"there is no pool of memory that can be shared ({error}), and vLLM allocates the KV cache"
        if self._pool is None:
            self._registers = False
            logger.warning("kvferry: rank %d: %s: requests run without the cache", rank, why)
            return None
        if rank == 0 and getattr(config.model_config, "enable_sleep_mode", False):
            logger.warning(
                "kvferry: the KV cache keeps its memory while the engine sleeps, because a worker has it open. To free "
                "it, and run without the cache, set kv_memory to 'engine'"
            )
        return self._pool.allocating()

    @guarded()
    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Moves the KV memory to where kvferry can map it, and starts the session that registers it."""
        if not self._registers:
            return
        config, parallel = self._vllm_config, self._vllm_config.parallel_config
        rank, ranks = parallel.rank, parallel.world_size
        shards = kv_groups.shards(self._kv_cache_config, ranks, kv_head_totals(config))
        content = content_of(config, self._settings).encode()
        place = Place(rank=rank, tp_size=ranks, shard=rank * shards // ranks, content=content)
        try:
            memory = KvMemory(
                kv_groups.groups_of(self._kv_cache_config, kv_caches),
                place,
                hash_tokens=kv_groups.hash_tokens(self._kv_cache_config),
                hit_tokens=kv_groups.hit_tokens(self._kv_cache_config),
                served=kv_groups.why_not_served(self._kv_cache_config) is None,
                whole=kv_memory.is_taken_back(config),
            )
        except Unsupported as why:
            logger.warning("kvferry: rank %d: %s: requests run without the cache", rank, why)
            return
        self._on_device = memory.on_device
        if self._settings.verify and memory.served:
            self._checksums = RankChecksums(PageChecksums(memory.tensors()), rank=rank, shard=place.shard)
        replica = replica_of(config, self._settings)
        directory = self._settings.socket_dir / f"worker-{replica}-{rank}"
        self._rank = RankSession(directory, start_of(config), rank, replica, memory, name="vLLM")

    def _begin_step(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._reports.begin(connector_metadata)

    @guarded(instead=_begin_step)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begins a step: takes its metadata, and abandons the requests that it names."""
        self._begin_step(connector_metadata)
        requests = self._reports.to_abandon()
        if requests and self._rank is None:
            # kvferry cannot reach the memory of this rank: nothing is copied there.
            self._reports.are_over(requests)
        elif requests and self._rank is not None:
            self._rank.abandon(requests)
        if self._rank is not None and isinstance(connector_metadata, StepMetadata):
            # Also in a step without a forward pass, whose loads wait for the last one.
            self._rank.needs(connector_metadata.needed_before)
        self._reports.handed_over()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Does nothing: the scheduler's side has requested the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request runs only after its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Does nothing: pages are stored after the whole forward pass."""

    @guarded()
    def wait_for_save(self) -> None:
        """Reports what this step writes as written once the device has finished its forward pass. Does not wait."""
        metadata = self._connector_metadata
        rank = self._rank
        if isinstance(metadata, StepMetadata):
            # Before the report below, which lets stores and loads begin.
            self._checksums.take(metadata.checksums)
            self._checksums.zero(metadata.zeroed)
        if rank is not None and isinstance(metadata, StepMetadata) and rank.announces(metadata.written_through):
            record, stream = (record_end, current_stream()) if self._on_device else (None, None)
            rank.wrote(metadata.written_through, record, stream, needed=metadata.needed_through)

    def _finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._reports.loaded() or None

    @guarded(instead=_finished)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the loads that are over. vLLM never waits for stores: the pool holds their pages."""
        return self._finished(finished_req_ids)

    def _transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(
            finished_recving=self._reports.loaded(), failed_recving=self._reports.failed()
        )

    @guarded(instead=_transfer_results, default=KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the loads that are over, and those of them of which no page can be used."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._reports.failed()
        return results

    def _failed_pages(self) -> set[int]:
        return self._reports.failed_pages()

    @guarded(instead=_failed_pages)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the pages of finished loads that must be computed."""
        return self._failed_pages()

    def _report(self) -> KVConnectorWorkerMetadata | None:
        return self._reports.report(self.fault)

    @guarded(instead=_report)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns this rank's report: abandoned requests that are over, the end of steps, and a fault."""
        if self._rank is not None:
            self._reports.are_over(self._rank.over())
            self.fault = self.fault or self._rank.fault
        self._reports.summed(self._checksums.results())
        return self._report()

    # The scheduler.

    @guarded()
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Takes vLLM's block pool, in which pages under store hold a reference."""
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @guarded(begins=True)
    def on_new_request(self, request: "Request") -> None:
        """Begins to track a new request, and sends its lookup."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @guarded(default=lambda: (0, False), begins=True)
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens after the computed ones kvferry can load; loads always run between steps."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def _all_from_host(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    @guarded(instead=_all_from_host, begins=True)
    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Returns from which tiers the tokens of a request come whose load has just begun."""
        disk = min(self._scheduler.disk_tokens(request), num_external_tokens) if self._scheduler is not None else 0
        sources = {CacheHitSource.HOST: num_external_tokens - disk, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def _load_failed(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.load_failed(request, blocks, num_external_tokens)

    @guarded(instead=_load_failed, begins=True)
    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Starts the load, now that vLLM has allocated pages."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def _finish_only(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        made_for, step = self._made
        if made_for is not scheduler_output and self._scheduler is not None:
            step = self._scheduler.finish_only(scheduler_output)
            self._made = scheduler_output, step
        return step

    @guarded(instead=_finish_only, default=StepMetadata, begins=True)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the metadata of this step for the ranks."""
        if self._scheduler is None:
            return StepMetadata()
        step = self._scheduler.step(scheduler_output)
        self._made = scheduler_output, step
        return step

    def _ranks_reported(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is not None:
            self._scheduler.ranks_reported(connector_output)

    @guarded(instead=_ranks_reported)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Takes the reports of the ranks about a step."""
        self._ranks_reported(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport) and report.fault and not self.fault:
            self.fault = report.fault
            logger.error(
                "kvferry: %s failed on a rank, whose log has the reason: requests run without the cache", self.fault
            )

    @guarded(default=lambda: (False, None))
    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request."""
        return self.request_finished_all_groups(request, (block_ids,))

    def _over(self, request: "Request", block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    @guarded(instead=_over, default=lambda: (False, None))
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request. Pages that a store still reads stay held by the pool until the store is over."""
        return self._over(request, block_ids)

    @guarded(default=bool)
    def has_pending_block_frees(self) -> bool:
        """Whether stores will free pages so soon that vLLM should wait instead of preempting a request."""
        return self._scheduler is not None and self._scheduler.frees_soon()

    @guarded(default=bool)
    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must run steps, to notice that copies are over."""
        return self._scheduler is not None and self._scheduler.copying()

    @guarded(default=list)
    def take_events(self) -> "list[KVCacheEvent]":
        """Returns the KV events of this step, for vLLM's own stream."""
        return self._scheduler.take_events() if self._scheduler is not None else []

    # After a fault there is nothing to reset: the connector finds no pages at all.
    @guarded(default=lambda: True, begins=True)
    def reset_cache(self) -> bool | None:
        """Stops finding the pages from before, and requests their removal by the leader."""
        return self._scheduler.reset() if self._scheduler is not None else True


stats.register()


def current_stream() -> int:
    """Returns the CUDA stream of the calling thread."""
    import torch

    return torch.cuda.current_stream().cuda_stream


def record_end() -> "Callable[[], bool]":
    """Records an event after the work so far of the calling thread's stream; returns a check whether it is over."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event.query


def check_config(config: "VllmConfig") -> None:
    """Refuses settings with which wrong pages could be served, or none ever found.

    Raises:
        ValueError: naming the setting, its value and the remedy.
    """
    _check_transfer(config.kv_transfer_config, "")
    outer = get_current_vllm_config_or_none()
    if outer is not None and outer.kv_transfer_config is not None:
        # Each of several connectors has its own configuration, but vLLM's scheduler follows the one around them. The
        # outer one is visible while a rank's connector is created.
        _check_transfer(outer.kv_transfer_config, f" of {outer.kv_transfer_config.kv_connector}")
    algorithm = config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and not os.environ.get("PYTHONHASHSEED"):
        raise ValueError(
            f"prefix_caching_hash_algo is {algorithm!r}: its hashes differ from process to process, so that nothing "
            "would ever be found: use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to the same number for "
            "every engine"
        )


def check_events(config: "VllmConfig", settings: Settings) -> None:
    """Refuses events for a stream that vLLM does not publish.

    Raises:
        ValueError: naming the setting, its value and the remedy.
    """
    events = getattr(config, "kv_events_config", None)
    if settings.events == "engine" and not (events is not None and events.enable_kv_cache_events):
        raise ValueError(
            "kv_connector_extra_config: events is 'engine', and vLLM publishes no KV events: start it with "
            '--kv-events-config \'{"enable_kv_cache_events": true}\', or set "events": "publish" for a stream of '
            "kvferry's own"
        )


def _check_transfer(transfer: "KVTransferConfig", whose: str) -> None:
    if transfer.kv_role != "kv_both":
        raise ValueError(f'kv_role{whose} is {transfer.kv_role!r}: kvferry stores and loads, set "kv_role": "kv_both"')
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            f"kv_load_failure_policy{whose} is {transfer.kv_load_failure_policy!r}: a page that cannot be loaded is to "
            'be computed, set "kv_load_failure_policy": "recompute"'
        )


def why_unreachable(config: "VllmConfig", settings: Settings) -> str | None:
    """Returns why ranks of this configuration cannot register their memory; None when they can."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        stages = parallel.pipeline_parallel_size
        return f"pipeline_parallel_size is {stages}, and ranks that hold different layers are not supported yet"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}, and pages that are spread over ranks are not supported yet"
    return kv_memory.why_not_kept(config, settings.kv_memory)


def why_not_cached(config: "VllmConfig") -> str | None:
    """Returns why pages of this engine must not be reused; None when they may be.

    For the scheduler's side alone: the engine's core may switch prefix caching off after the start of its ranks.
    """
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off, by the user or because vLLM knows that it is wrong for this model"
    return None


def kv_head_totals(config: "VllmConfig") -> set[int]:
    """Returns the distinct total numbers of KV heads that layers of the model and of its draft model may have."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    totals: set[int] = set()
    for model in filter(None, (config.model_config, draft)):
        architecture = model.model_arch_config
        totals.add(architecture.total_num_kv_heads)
        for layer in architecture.per_layer_overrides or ():
            totals.add(layer.get("total_num_kv_heads", architecture.total_num_kv_heads))
        totals.update(_kv_heads_in(model.hf_config.to_dict()))
    return totals


def _kv_heads_in(values: Any) -> Iterator[int]:
    """Yields the KV head counts in a configuration. Some layers' counts may be under another key than the usual one."""
    pairs = values.items() if isinstance(values, dict) else ((None, each) for each in values)
    for name, value in pairs:
        if isinstance(value, (dict, list, tuple)):
            named = isinstance(name, str) and _KV_HEADS.search(name) and not isinstance(value, dict)
            yield from (each for each in value if isinstance(each, int)) if named else _kv_heads_in(value)
        elif isinstance(name, str) and _KV_HEADS.search(name) and isinstance(value, int) and value > 0:
            yield value


def replica_of(config: "VllmConfig", settings: Settings) -> int:
    """Returns the number of this engine among the replicas of its leader."""
    return settings.replica + config.parallel_config.data_parallel_index
