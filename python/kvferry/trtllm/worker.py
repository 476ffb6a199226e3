"""The connector's class for each rank: registers the KV memory, marks what was written, reports ends of copies.

TensorRT-LLM acts on an end only when every rank has reported it. Metadata comes only with a batch, and a request whose
load is in flight may be the only one. Ends of loads are therefore decided by rank 0, whose process knows them, and the
other ranks report each load at once. An end of stores is decided by each rank: by the leader's report, which comes with
the metadata, or by its own worker, which is asked to give the pages back when the report does not come in time.
"""

import atexit
import logging
import time
from typing import Any

import torch

from kvferry.memory import Group, KvMemory, Place, Unsupported
from kvferry.rank import RankSession
from kvferry.trtllm import compat, refusals
from kvferry.trtllm.content import identity_of
from kvferry.trtllm.guard import Faults, guarded
from kvferry.trtllm.metadata import StepMetadata
from kvferry.trtllm.settings import Settings
from kvferry.trtllm.shared import shared_of
from kvferry.trtllm.side import SchedulerSide

logger = logging.getLogger("kvferry")


class Worker(compat.INTERFACE.worker, Faults):  # type: ignore[misc, name-defined]
    """One rank. See ``docs/trtllm.md``."""

    def __init__(self, llm_args: Any):
        """Called by TensorRT-LLM on every rank.

        Raises:
            ValueError: for a setting or an argument that cannot be used, with the remedy.
            RuntimeError: when the interface of the installed TensorRT-LLM differs from the known one.
        """
        compat.check(compat.INTERFACE)
        super().__init__(llm_args)
        self._settings = Settings.read()
        refusals.check(llm_args)
        self._shared = shared_of(llm_args)
        self._args = llm_args
        self._rank: RankSession | None = None
        #: The scheduler's side, on rank 0.
        self._side: SchedulerSide | None = None
        self._registered = self._on_device = False
        self._step = StepMetadata()
        #: Whether the report of the last forward pass failed.
        self._unreported = False
        #: Stores of each request that may still read its pages, as far as this rank knows.
        self._stores: dict[int, set[int]] = {}
        self._of: dict[int, int] = {}
        #: Requests whose pages are kept for stores, and when these are given up; requests that load.
        self._saving: dict[int, float] = {}
        self._loading: dict[int, None] = {}
        #: By request whose pages are kept: stores that the worker was asked to give up. Of all requests: those that
        #: rank 0's worker has given up.
        self._abandoned: dict[int, set[int]] = {}
        self._given_back: set[int] = set()

    # The memory.

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Registers the pool of pages: one tensor, with the pages along its first axis. Every rank calls this.

        Raises:
            RuntimeError: for a pool of an unknown shape, or without a scheduler on rank 0.
        """
        if kv_cache_tensor.dim() != 4 or not kv_cache_tensor.is_contiguous():
            raise RuntimeError(
                f"kvferry: the KV cache has the shape {tuple(kv_cache_tensor.shape)}, known is a contiguous one of "
                "blocks, layers, 1 or 2, and elements: install a known TensorRT-LLM"
            )
        self._register({"pool": kv_cache_tensor}, kv_cache_tensor.shape[0])

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Registers memory that is described by regions, as the newer manager (V2) of KV memory has it.

        That manager may take the pages of a running request back without a call of the connector. Pages are therefore
        stored when their request ends, because only then they are kept.

        Raises:
            RuntimeError: for memory that is not supported yet, with the remedy.
        """
        if why := _why_not_served(layout, self._args):
            raise RuntimeError(
                f"kvferry: {why}, which is not supported yet: set kv_cache_config.use_kv_cache_manager_v2 to False"
            )
        (group,) = layout.groups
        tensors = {f"region {number}": region.as_tensor() for number, region in enumerate(group.regions)}
        self._register(tensors, group.regions[0].num_slots)
        if self._side is not None:
            self._side.stores_at_end = True

    def _register(self, tensors: dict[str, Any], pages: int) -> None:
        if self._registered:
            raise RuntimeError("kvferry: the KV cache was registered before: create one connector for each engine")
        self._registered = True
        number = compat.INTERFACE.rank()
        engine = compat.INTERFACE.broadcast(self._shared.engine if number == 0 else None)
        page_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in tensors.values())
        if number == 0:
            self._side = self._shared.side
            if self._side is None:
                raise RuntimeError(
                    "kvferry: rank 0 has a Worker and no Scheduler: set connector_scheduler_class to Scheduler"
                )
            self._side.pages_have(page_bytes)
        ranks = int(getattr(self._args, "tensor_parallel_size", 1) or 1)
        content = identity_of(self._args, self._settings, engine).content()
        place = Place(rank=number, tp_size=ranks, shard=number, content=content)
        page_tokens = int(self._args.kv_cache_config.tokens_per_block)
        group = Group(tensors, engine_page_tokens=page_tokens, device_pages=pages)
        try:
            memory = KvMemory([group], place)
        except Unsupported as why:
            logger.warning("kvferry: rank %d: %s: requests run without the cache", number, why)
            return
        self._on_device = memory.on_device
        directory = self._settings.socket_dir / f"worker-{self._settings.replica}-{number}"
        self._rank = RankSession(directory, engine, number, self._settings.replica, memory, name="TensorRT-LLM")
        atexit.register(self.close)

    def close(self) -> None:
        """Closes the connection to the worker. TensorRT-LLM has no such call: it is made when the process ends."""
        atexit.unregister(self.close)
        if self._rank is not None:
            self._rank.close()

    # A step.

    def _nothing(self, *arguments: Any) -> None:
        return

    @guarded(instead=_nothing)
    def bind_connector_meta(self, metadata: Any) -> None:
        """Takes the metadata of a step."""
        super().bind_connector_meta(metadata)
        if not isinstance(metadata, StepMetadata):
            return
        self._step = metadata
        for request, store in metadata.stores:
            self._stores.setdefault(request, set()).add(store)
            self._of[store] = request
        for store in metadata.over:
            self._is_over(store)
        if self._rank is not None:
            # Loads wait for earlier steps, also if this one runs no forward pass.
            self._rank.needs(metadata.needed_before)

    def register_forward_pass_callable(self) -> Any:
        """Returns what TensorRT-LLM calls at the end of each forward pass, on its stream."""
        return self._forward_ended

    @guarded(instead=_nothing)
    def _forward_ended(self) -> None:
        """Reports what this step writes as written, once the device has finished its forward pass. Does not wait."""
        rank, step = self._rank, self._step
        if rank is not None and rank.announces(step.written_through):
            self._unreported = True
            record, stream = (record_end, torch.cuda.current_stream().cuda_stream) if self._on_device else (None, None)
            rank.wrote(step.written_through, record, stream, needed=step.needed_through)
            self._unreported = False

    def _report_again(self) -> None:
        """Reports the work of a forward pass whose report failed. Loads wait for it, and no later pass may come."""
        rank, step = self._rank, self._step
        if rank is None:
            return
        try:
            if self._on_device:
                torch.cuda.synchronize()
            rank.wrote(step.written_through, needed=step.needed_through)
        except Exception:
            self.failed("_report_again")
            return
        self._unreported = False

    def start_load_kv(self, stream: Any) -> None:
        """Does nothing: the scheduler's side has requested the loads."""

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: a request runs only after its load is over."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: pages are stored after the whole forward pass."""

    def wait_for_save(self, stream: Any) -> None:
        """Does nothing: stores read pages that the request keeps."""

    # Ends of copies.

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns the requests whose stores are over, and those whose pages are all in place.

        Raises:
            LoadFailed: on rank 0, when pages that were promised are not in place in time.
        """
        give_up_at = time.monotonic() + self._settings.store_hold_ms / 1000
        self._saving.update(dict.fromkeys(finished_gen_req_ids, give_up_at))
        self._loading.update(dict.fromkeys(started_loading_req_ids))
        if self._unreported:
            self._report_again()
        if self._side is not None:
            if self.fault or (self._rank is not None and self._rank.fault):
                self._side.unmarked = True
            self._side.turn()
        loaded = [request for request in self._loading if self._is_loaded(request)]
        for request in loaded:
            del self._loading[request]
        return self._saved(), loaded

    def _is_loaded(self, request: int) -> bool:
        return self._side is None or not self._side.loads.is_open(request)

    def _saved(self) -> list[int]:
        """Returns requests for which nothing is copied on this rank any longer, each once."""
        if not self._saving:
            return []
        if self._rank is not None:
            for store in self._rank.over():
                self._is_over(store)
                self._is_given_back(store)
        saved = [request for request in self._saving if self._is_saved(request)]
        for request in saved:
            del self._saving[request]
            self._abandoned.pop(request, None)
            for store in self._stores.pop(request, ()):
                self._of.pop(store, None)
            if self._side is not None:
                self._given_back -= self._side.stores.of(request)
                self._side.stores.released(request)
        return saved

    def _is_saved(self, request: int) -> bool:
        side = self._side
        if side is None:
            stores = self._stores.get(request, set())
        else:
            # The process of rank 0 knows all stores, and their ends, before the metadata names them.
            stores = side.stores.of(request) - self._given_back
            if side.loads.is_open(request):
                return False
        if stores and time.monotonic() >= self._saving[request]:
            self._give_up(request, stores)
        return not stores

    def _give_up(self, request: int, stores: set[int]) -> None:
        """Requests this rank's worker to give the pages of these stores back."""
        if self._rank is None:
            # kvferry cannot reach the memory of this rank: nothing is copied there.
            for store in list(stores):
                self._is_over(store)
                self._is_given_back(store)
        elif new := sorted(stores - self._abandoned.setdefault(request, set())):
            self._abandoned[request].update(new)
            self._rank.abandon(new)

    def _is_given_back(self, store: int) -> None:
        """Records that rank 0 copies nothing for a store any longer, unless the leader has reported its end before."""
        if self._side is not None and self._side.stores.is_open(store):
            self._given_back.add(store)

    def _is_over(self, store: int) -> None:
        request = self._of.pop(store, None)
        if request is not None and (stores := self._stores.get(request)) is not None:
            stores.discard(store)
            if not stores and request not in self._saving:
                del self._stores[request]


def _why_not_served(layout: Any, llm_args: Any) -> str:
    """Returns why memory in regions is not served; empty when it is."""
    ranks = int(getattr(llm_args, "tensor_parallel_size", 1) or 1)
    if ranks > 1:
        return f"tensor_parallel_size is {ranks}, with the manager V2 of KV memory"
    if len(layout.groups) != 1:
        return f"the KV cache has {len(layout.groups)} groups of layers"
    (group,) = layout.groups
    if group.window_size is not None:
        return f"the KV cache has a window of {group.window_size} tokens"
    if group.replicated_regions:
        return "the KV cache has regions that are equal on all ranks"
    if not group.regions or len({region.num_slots for region in group.regions}) != 1:
        return "the KV cache has regions of several lengths"
    known = int(llm_args.kv_cache_config.tokens_per_block)
    if layout.tokens_per_block != known:
        return f"the KV cache has blocks of {layout.tokens_per_block} tokens, and tokens_per_block is {known}"
    return ""


def record_end() -> Any:
    """Records an event after the work so far of the calling thread's stream; returns a check whether it is over."""
    event = torch.cuda.Event()
    event.record()
    return event.query
