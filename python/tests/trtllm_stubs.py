"""Stand-ins for the modules of TensorRT-LLM that kvferry's connector uses, written from the documented interface.

TensorRT-LLM itself runs on GPUs alone, and cannot be installed here.
"""

import contextlib
import importlib
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OLD = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
NEW = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
#: Deadline of a call of all ranks.
TOGETHER_S = 60.0


class Ranks:
    """Calls that several ranks, each in a thread of its own, make together."""

    def __init__(self, size: int):
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: dict[int, Any] = {}

    def broadcast(self, rank: int, value: Any, root: int) -> Any:
        self._values[rank] = value
        self._barrier.wait(TOGETHER_S)
        value = self._values[root]
        self._barrier.wait(TOGETHER_S)
        return value


_local = threading.local()


def enter(ranks: Ranks, rank: int) -> None:
    """Makes the calling thread one of a rank."""
    _local.ranks, _local.rank = ranks, rank


def mpi_rank() -> int:
    return getattr(_local, "rank", 0)


def mpi_broadcast(obj: Any, root: int = 0) -> Any:
    ranks = getattr(_local, "ranks", None)
    return obj if ranks is None else ranks.broadcast(_local.rank, obj, root)


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


def classes() -> tuple[type, type]:
    """Returns new abstract classes of a connector, as the released line has them: scheduler, worker."""

    class KvCacheConnectorWorker(ABC):
        def __init__(self, llm_args: Any):
            self._llm_args = llm_args
            self._metadata = None

        def bind_connector_meta(self, metadata: object) -> None:
            self._metadata = metadata

        def get_connector_meta(self) -> object:
            return self._metadata

        def _clear_connector_meta(self) -> None:
            self._metadata = None

        def register_forward_pass_callable(self) -> Any:
            return None

        @abstractmethod
        def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

        @abstractmethod
        def start_load_kv(self, stream: Any) -> None: ...

        @abstractmethod
        def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

        @abstractmethod
        def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

        @abstractmethod
        def wait_for_save(self, stream: Any) -> None: ...

        @abstractmethod
        def get_finished(
            self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
        ) -> tuple[list[int], list[int]]: ...

    class KvCacheConnectorScheduler(ABC):
        def __init__(self, llm_args: Any):
            self._llm_args = llm_args

        @abstractmethod
        def build_connector_meta(self, scheduler_output: Any) -> Any: ...

        @abstractmethod
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

        @abstractmethod
        def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

        @abstractmethod
        def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    return KvCacheConnectorScheduler, KvCacheConnectorWorker


def newer(scheduler: type, worker: type) -> None:
    """Adds the methods that the later line has."""

    def register_kv_cache_layout(self: Any, layout: Any) -> None:
        raise NotImplementedError

    def request_finished_by_layer_group(
        self: Any, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        return self.request_finished(request, cache_block_ids_by_layer_group[0])

    def update_state_after_alloc_by_layer_group(
        self: Any, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        self.update_state_after_alloc(request, block_ids_by_layer_group[0])

    def wait_for_initialization(self: Any) -> None:
        return None

    worker.register_kv_cache_layout = register_kv_cache_layout
    scheduler.request_finished_by_layer_group = request_finished_by_layer_group
    scheduler.update_state_after_alloc_by_layer_group = update_state_after_alloc_by_layer_group
    scheduler.wait_for_initialization = wait_for_initialization


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(content)
    return module


def interface(name: str = NEW) -> types.ModuleType:
    """Returns a module with the interface, under one of its two names."""
    scheduler, worker = classes()
    if name == NEW:
        newer(scheduler, worker)
    return _module(
        name,
        KvCacheConnectorScheduler=scheduler,
        KvCacheConnectorWorker=worker,
        RequestData=RequestData,
        SchedulerOutput=SchedulerOutput,
    )


@contextlib.contextmanager
def installed(module: types.ModuleType | None, *others: types.ModuleType, **utils: Any) -> Iterator[None]:
    """Makes this module, and no other one, the installed TensorRT-LLM. The connector's modules are imported anew."""

    def ours(name: str) -> bool:
        return name.split(".")[0] == "tensorrt_llm" or name.startswith("kvferry.trtllm")

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    given = {"mpi_rank": mpi_rank, "mpi_broadcast": mpi_broadcast, **utils}
    try:
        if module is not None:
            parts = module.__name__.split(".")
            for count in range(1, len(parts)):
                name = ".".join(parts[:count])
                sys.modules[name] = _module(name)
            sys.modules[module.__name__] = module
            sys.modules.update({other.__name__: other for other in others})
            sys.modules["tensorrt_llm._utils"] = _module("tensorrt_llm._utils", **given)
        yield
    finally:
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def connector(part: str = "") -> Any:
    """Returns a module of the connector, beside the TensorRT-LLM that is installed."""
    return importlib.import_module(f"kvferry.trtllm.{part}" if part else "kvferry.trtllm")
