"""Finds the connector interface of the installed TensorRT-LLM, and checks that it is the known one.

The module of the interface has moved between releases. It is found when this module is imported, because the
connector's classes are derived from the classes in it.
"""

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

#: The releases whose interface this package was written against.
KNOWN_VERSIONS = "1.2 and 1.3"
#: Modules that may have the interface, the newest first.
MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
#: The module with functions that all ranks call together.
RANKS = "tensorrt_llm._utils"

#: Methods of the scheduler's class that TensorRT-LLM calls, with their parameters without ``self``.
_SCHEDULER: dict[str, tuple[str, ...]] = {
    "__init__": ("llm_args",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "block_ids"),
    "build_connector_meta": ("scheduler_output",),
    "request_finished": ("request", "cache_block_ids"),
}
#: The same of the class of each rank.
_WORKER: dict[str, tuple[str, ...]] = {
    "__init__": ("llm_args",),
    "bind_connector_meta": ("metadata",),
    "get_connector_meta": (),
    "register_kv_caches": ("kv_cache_tensor",),
    "register_forward_pass_callable": (),
    "start_load_kv": ("stream",),
    "wait_for_layer_load": ("layer_idx", "stream"),
    "save_kv_layer": ("layer_idx", "stream"),
    "wait_for_save": ("stream",),
    "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
}
#: Methods that only newer releases have.
_NEWER_SCHEDULER: dict[str, tuple[str, ...]] = {
    "wait_for_initialization": (),
    "request_finished_by_layer_group": ("request", "cache_block_ids_by_layer_group"),
    "update_state_after_alloc_by_layer_group": ("request", "block_ids_by_layer_group"),
}
_NEWER_WORKER: dict[str, tuple[str, ...]] = {"register_kv_cache_layout": ("layout",)}
#: Fields that are read of what a step schedules.
_REQUEST_DATA = ("request_id", "new_tokens", "new_block_ids", "computed_position", "num_scheduled_tokens")
_SCHEDULER_OUTPUT = ("new_requests", "cached_requests")
#: The class that allocates pages, and two of its methods. Releases with the first one alone report a step to the
#: connector before they shrink it: pages that no pass has written would be stored.
_MANAGER = "tensorrt_llm._torch.pyexecutor.resource_manager", "KVCacheManager"
_SHRINKS, _REPORTS_LAST = "fit_token_budget", "report_batch_to_connector"
#: Functions that all ranks call together.
_RANKS: dict[str, tuple[str, ...]] = {"mpi_rank": (), "mpi_broadcast": ("obj", "root")}


@dataclass(frozen=True)
class Interface:
    """The classes and functions of TensorRT-LLM that the connector uses."""

    module: str
    scheduler: Any
    worker: Any
    request_data: Any
    scheduler_output: Any
    ranks: Any

    def rank(self) -> int:
        """Returns the number of this process's rank."""
        return int(self.ranks.mpi_rank())

    def broadcast(self, value: Any) -> Any:
        """Returns the value that rank 0 has given. Every rank must call this at the same point."""
        return self.ranks.mpi_broadcast(value, root=0)


def version() -> str:
    """Returns the installed TensorRT-LLM's version, or ``unknown``."""
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def find() -> Interface:
    """Returns the interface of the installed TensorRT-LLM.

    Raises:
        RuntimeError: naming what is missing, and the remedy.
    """
    problems = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
            return Interface(
                name,
                module.KvCacheConnectorScheduler,
                module.KvCacheConnectorWorker,
                module.RequestData,
                module.SchedulerOutput,
                importlib.import_module(RANKS),
            )
        except (ImportError, AttributeError) as error:
            problems.append(str(error))
    raise RuntimeError(_text(problems))


def differences(interface: Interface) -> list[str]:
    """Returns the differences from the known interface, one line each."""
    found = []
    for cls, known, newer in (
        (interface.scheduler, _SCHEDULER, _NEWER_SCHEDULER),
        (interface.worker, _WORKER, _NEWER_WORKER),
    ):
        found += _methods(cls, known, newer)
        unknown = sorted(getattr(cls, "__abstractmethods__", frozenset()) - {*known, *newer})
        found += [f"{cls.__name__}.{name} must be written, and is unknown here" for name in unknown]
    for cls, names in ((interface.request_data, _REQUEST_DATA), (interface.scheduler_output, _SCHEDULER_OUTPUT)):
        has = set(getattr(cls, "__dataclass_fields__", ()))
        found += [f"{cls.__name__}.{name} is missing" for name in names if name not in has]
    for name, known in _RANKS.items():
        function = getattr(interface.ranks, name, None)
        given = tuple(inspect.signature(function).parameters)[: len(known)] if function is not None else None
        if given is None:
            found.append(f"{RANKS}.{name} is missing")
        elif given != known:
            found.append(f"{RANKS}.{name} takes {given}, known is {known}")
    if _shrinks_after_report():
        found.append(f"{_MANAGER[1]} shrinks steps after it has reported them ({_REPORTS_LAST} is missing)")
    return found


def _shrinks_after_report() -> bool:
    module, name = _MANAGER
    try:
        manager = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    return hasattr(manager, _SHRINKS) and not hasattr(manager, _REPORTS_LAST)


def _methods(cls: type, known: dict[str, tuple[str, ...]], newer: dict[str, tuple[str, ...]]) -> list[str]:
    found = []
    for name, parameters in {**known, **newer}.items():
        method = getattr(cls, name, None)
        if method is None:
            found += [] if name in newer else [f"{cls.__name__}.{name} is missing"]
            continue
        given = tuple(inspect.signature(method).parameters)[1:]
        if given != parameters:
            found.append(f"{cls.__name__}.{name} takes {given}, known is {parameters}")
    return found


def check(interface: Interface) -> None:
    """Refuses an interface that differs.

    Raises:
        RuntimeError: with every difference and the remedy.
    """
    if found := differences(interface):
        raise RuntimeError(_text(found))


def _text(found: list[str]) -> str:
    return (
        f"kvferry knows the KV cache connector interface of TensorRT-LLM {KNOWN_VERSIONS}; TensorRT-LLM {version()} is "
        f"installed, and differs: {'; '.join(found)}. Install a known TensorRT-LLM, or a kvferry that knows this one."
    )


#: The interface of the TensorRT-LLM that is installed.
INTERFACE = find()
