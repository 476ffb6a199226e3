"""The external linker for SGLang: ``Linker``.

SGLang creates one linker in each rank's scheduler process, and calls it on that process's main thread. This file checks
SGLang's configuration, and translates its calls for :mod:`kvferry.sglang.transfers`. A linker that cannot serve its
engine does nothing, and logs the reason once.
"""

import logging
import secrets
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker, UnifiedCacheLinkerWrapper
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.weight_checker import WeightChecker

from kvferry.memory import KvMemory, Place, Unsupported
from kvferry.rank import RankSession
from kvferry.sglang import content, interface, pools, updates
from kvferry.sglang.abandoned import Abandoned
from kvferry.sglang.counts import Counts
from kvferry.sglang.leader import LeaderSide
from kvferry.sglang.namespaces import Namespaces
from kvferry.sglang.ranks import Ranks
from kvferry.sglang.settings import Settings
from kvferry.sglang.supported import why_not_served
from kvferry.sglang.transfers import Transfers

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("kvferry")


class LoadsAreDone:
    """SGLang's counter of loaded layers: every layer is in place before SGLang runs the batch."""

    def set_consumer(self, index: int) -> None:
        """Takes the number of the batch that runs."""

    def wait_until(self, threshold: int) -> None:
        """Does not wait."""


class Linker(UnifiedCacheLinker):
    """Loads pages that kvferry has, and stores those that it lacks. See ``docs/sglang.md``."""

    def __init__(self, server_args: "ServerArgs", params: "CacheInitParams", **named: Any):
        """Called by SGLang, once in each rank's scheduler process.

        Raises:
            ValueError: for a setting that cannot be used, with the remedy.
        """
        self._settings = Settings.read(named.get("extra_config") or {})
        self.forward_stream = named.get("forward_stream")
        self.layer_done_counter = LoadsAreDone()
        self.pools: dict[PoolName, object] = {}
        self._transfers: Transfers | None = None
        self._page_tokens = params.page_size
        self._stream: torch.cuda.Stream | None = None
        why = interface.refusal(_differences(named)) or _why_not_served(server_args, params, named["components"])
        memory: KvMemory | None = None
        ranks = Ranks(_group(params))
        # Before any branch, because each rank must take part.
        drawn = ranks.of_first([int.from_bytes(secrets.token_bytes(7), "big") for _ in range(2)])
        #: Names this start of the engine on all ranks.
        self._engine = b"".join(part.to_bytes(8, "big") for part in drawn)
        if not why:
            try:
                memory = self._share(server_args, params, ranks)
            except (Unsupported, OSError, ValueError, RuntimeError) as error:
                why = str(error)
        served = ranks.all(not why)
        if why or not served or memory is None:
            logger.warning("kvferry: %s: requests run without the cache", why or "another rank is not served")
            if memory is not None:
                memory.close()
            return
        self.pools = {PoolName.KV: self._pool}
        self._start(memory, ranks, exported=bool(server_args.enable_metrics))

    def _share(self, server_args: "ServerArgs", params: "CacheInitParams", ranks: Ranks) -> KvMemory:
        """Moves the KV memory to where kvferry can map it, and describes what its bytes depend on."""
        from sglang.srt.configs.model_config import ModelConfig

        self._pool = pool = params.token_to_kv_pool_allocator.get_kvcache()
        model = ModelConfig.from_server_args(server_args)
        arguments = server_args.resolved_dict()
        self._weights = content.of_weights(arguments, model.hf_config, self._settings, self._engine.hex())
        # Names of adapters do not change with their files.
        self._private = bool(arguments.get("enable_lora") or arguments.get("lora_paths")) and not self._settings.weights
        self._namespace = content.namespace_of(
            arguments,
            model.hf_config,
            self._settings,
            self._weights,
            self._engine.hex(),
            ranks=ranks.size,
            pool=pool,
        )
        heads = 1 if pools.is_mla(pool) else model.get_total_num_kv_heads()
        shards = min(ranks.size, heads)
        described = content.content_of(arguments, self._weights, ranks=ranks.size, pool=pool)
        place = Place(ranks.rank, ranks.size, ranks.rank * shards // ranks.size, described.encode())
        try:
            return KvMemory([pools.group_of(pool, self._page_tokens, heads)], place)
        finally:
            # A part may have been moved before a failure.
            if pools.is_on_cpu(pool):
                pools.moved(pool)

    def _start(self, memory: KvMemory, ranks: Ranks, *, exported: bool) -> None:
        settings = self._settings
        if memory.on_device:
            self._stream = torch.cuda.Stream()
        directory = settings.socket_dir / f"worker-{settings.replica}-{ranks.rank}"
        self._session = RankSession(directory, self._engine, ranks.rank, settings.replica, memory, name="SGLang")
        abandoned = Abandoned(self._session)
        leader: LeaderSide | None = None
        if ranks.rank == 0:
            content.tell_unknown_weights(self._weights)
            updates.watch(WeightUpdater, interface.WEIGHT_METHODS)
            updates.watch(WeightChecker, interface.CHECKER_METHODS)
            leader = LeaderSide(
                settings,
                engine=self._engine,
                namespaces=Namespaces(self._namespace, private=self._private, prefix=self._settings.namespace_prefix),
                abandoned=abandoned,
                weight_changes=updates.count,
                counts=Counts(exported=exported),
            )
        self._transfers = Transfers(
            ranks,
            self._session,
            abandoned,
            leader,
            offloads_max=settings.offloads_max,
            written=self._written,
            at_once=settings.failed_load == "abort",
        )

    def _written(self, work: int) -> None:
        """Reports all that was submitted to the device so far as written, once it is."""
        if self._stream is None:
            self._session.wrote(work)
            return
        for event in self.record_offload_ready():
            self._stream.wait_event(event)

        def record() -> Any:
            with torch.cuda.stream(self._stream):
                done = torch.cuda.Event()
                done.record()
            return done.query

        self._session.wrote(work, record, self._stream.cuda_stream)

    def _pages(self, transfer: PoolTransfer) -> list[int] | None:
        slots = transfer.device_indices
        return None if slots is None else pools.pages_of(slots, len(transfer.keys or ()), self._page_tokens)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Returns the numbers of pages that can be loaded, from the first key on."""
        transfer = _only(transfers)
        if self._transfers is None or transfer is None or not transfer.keys:
            return []
        return self._transfers.find(rid, transfer.keys)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Loads pages, and waits for them unless the loads of a batch run at once. With False, SGLang computes."""
        transfer = _only(transfers)
        if self._transfers is None or transfer is None or not transfer.keys:
            return False
        return self._transfers.load(rid, transfer.keys, self._pages(transfer))

    def start_layer_wise_loading(self) -> int:
        """Returns the number of a batch whose loads have ended, and waits for them; -1 without one."""
        return -1 if self._transfers is None else self._transfers.start_batch()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether the loads of a batch have succeeded. They have ended before it ran."""
        return self._transfers is None or self._transfers.finish_batch(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """Takes back a load whose batch has not started; nothing writes to its pages."""
        return self._transfers is not None and self._transfers.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Begins to store the pages of a node. With True, SGLang keeps them until it has taken the result."""
        transfer = _only(transfers)
        if self._transfers is None or transfer is None or not transfer.keys:
            return False
        return self._transfers.offload(transfer.keys, self._pages(transfer))

    def num_completed_offloads(self) -> int:
        """Returns how many results can be taken. SGLang calls this once in each step."""
        return 0 if self._transfers is None else self._transfers.ended_offloads()

    def pop_completed_offload(self) -> bool:
        """Returns the oldest result: whether the pages are stored."""
        return self._transfers is not None and self._transfers.take_offload()

    def reset(self) -> None:
        """Ends all transfers. Without ``keep_on_flush``, pages that were stored before are not found any more."""
        if self._transfers is not None:
            self._transfers.reset()

    def close(self) -> None:
        """Ends all transfers, and closes the connections."""
        if self._transfers is not None:
            self._transfers.close()


def _only(transfers: list[PoolTransfer]) -> PoolTransfer | None:
    """Returns the transfer of the KV pool, if it is the only one."""
    return transfers[0] if len(transfers) == 1 and transfers[0].name == PoolName.KV else None


def _group(params: "CacheInitParams") -> Any:
    """Returns the group over which SGLang itself reduces the results of a linker."""
    for group in (params.attn_tp_cache_group, params.tp_cache_group):
        if group is not None and torch.distributed.get_world_size(group=group) > 1:
            return group
    return None


def _differences(named: dict[str, Any]) -> list[str]:
    found = interface.differences(
        UnifiedCacheLinker, UnifiedCacheLinkerWrapper, PoolTransfer, CacheInitParams, WeightUpdater, WeightChecker
    )
    constructor = interface.constructor_difference(named)
    return [*found, constructor] if constructor else found


def _why_not_served(server_args: "ServerArgs", params: "CacheInitParams", components: set[ComponentType]) -> str:
    from sglang.srt.configs.model_config import ModelConfig

    return why_not_served(
        server_args.resolved_dict(),
        params,
        [component.name for component in components],
        multimodal=bool(ModelConfig.from_server_args(server_args).is_multimodal),
        pool=params.token_to_kv_pool_allocator.get_kvcache(),
    )
