"""Checks that the installed SGLang has the interfaces that this package was written against."""

import importlib.metadata
import inspect
from typing import Any

#: The SGLang version that this package was written against.
KNOWN_VERSION = "0.5.23"

#: Abstract methods of ``UnifiedCacheLinker``, with their parameters without ``self``.
_METHODS: dict[str, tuple[str, ...]] = {
    "lookup": ("rid", "transfers"),
    "load": ("rid", "transfers"),
    "start_layer_wise_loading": (),
    "finish_layer_wise_loading": ("counter_index",),
    "cancel_queued_load": ("rid",),
    "offload": ("transfers", "session_id"),
    "num_completed_offloads": (),
    "pop_completed_offload": (),
    "reset": (),
    "close": (),
}
#: Methods with which SGLang changes the weights of a running engine.
WEIGHT_METHODS = (
    "begin_weight_update",
    "end_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
#: Methods of ``WeightChecker`` that overwrite the weights of a running engine, with random values.
CHECKER_METHODS = ("_reset_tensors",)
#: Fields of classes.
_TRANSFER = ("name", "device_indices", "keys")
_PARAMS = (
    "token_to_kv_pool_allocator",
    "page_size",
    "is_eagle",
    "tp_cache_group",
    "attn_tp_cache_group",
    "pp_size",
    "attn_cp_size",
    "mtp_draft_device_pools",
    "sidecar_draft_device_pools",
)


def version() -> str:
    """Returns the installed SGLang's version, or ``unknown``."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def differences(linker: type, wrapper: type, transfer: type, params: type, updater: type, checker: type) -> list[str]:
    """Returns the differences from the known interface, one line each."""
    found = []
    abstract = set(getattr(linker, "__abstractmethods__", ()))
    for name, known in _METHODS.items():
        if name not in abstract:
            found.append(f"{linker.__name__}.{name} is not abstract")
            continue
        given = tuple(inspect.signature(getattr(linker, name)).parameters)[1:]
        if given != known:
            found.append(f"{linker.__name__}.{name} takes {given}, known is {known}")
    found += [f"{linker.__name__}.{name} must be written" for name in sorted(abstract.difference(_METHODS))]
    if not hasattr(linker, "record_offload_ready"):
        found.append(f"{linker.__name__}.record_offload_ready is missing")
    for name in ("match", "load_back", "offload_nodes", "finish_loads", "release_request"):
        if not hasattr(wrapper, name):
            found.append(f"{wrapper.__name__}.{name} is missing")
    for cls, names in ((transfer, _TRANSFER), (params, _PARAMS)):
        fields = getattr(cls, "__dataclass_fields__", {})
        found += [f"{cls.__name__}.{name} is missing" for name in names if name not in fields]
    for changes, names in ((updater, WEIGHT_METHODS), (checker, CHECKER_METHODS)):
        found += [f"{changes.__name__}.{name} is missing" for name in names if not hasattr(changes, name)]
    return found


def constructor_difference(named: dict[str, Any]) -> str:
    """Returns how the named arguments of a linker's constructor differ; empty where they are the known ones."""
    if set(named) == {"components", "extra_config", "forward_stream"}:
        return ""
    return f"a linker is made with {', '.join(sorted(named)) or 'no named arguments'}"


def refusal(found: list[str]) -> str:
    """Returns the differences in one line, with the remedy; empty without one."""
    if not found:
        return ""
    return (
        f"kvferry knows the linker interface of SGLang {KNOWN_VERSION}; SGLang {version()} is installed, and differs: "
        f"{'; '.join(found)}. Install SGLang {KNOWN_VERSION}, or a kvferry that knows this one"
    )
