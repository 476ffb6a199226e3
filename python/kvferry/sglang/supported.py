"""Which engines of SGLang are served."""

from collections.abc import Collection
from typing import Any

from kvferry.sglang import pools

#: Arguments that must not exceed 1, and what they configure.
_ALONE = (
    ("pp_size", "pipeline parallelism"),
    ("attn_cp_size", "context parallelism"),
    ("dcp_size", "context parallelism of decodes"),
    ("dp_size", "data parallelism"),
    ("attn_dp_size", "data parallelism of attention"),
)


def why_not_served(
    arguments: dict[str, Any], params: Any, components: Collection[str], *, multimodal: bool, pool: Any
) -> str:
    """Returns why an engine is not served, with the remedy where there is one; empty where it is.

    ``arguments`` are SGLang's, with the values that it uses; ``params`` its ``CacheInitParams``; ``components`` the
    names of the components of its tree.
    """
    if set(components) != {"FULL"}:
        return f"the model has the components {', '.join(sorted(components))}, and only FULL is served yet"
    for name, what in _ALONE:
        if (arguments.get(name) or 1) > 1:
            return f"{name} is {arguments[name]}: {what} is not served yet"
    if params.pp_size > 1 or params.attn_cp_size > 1:
        return "the KV cache is divided over ranks of a pipeline or of a context, which is not served yet"
    if params.is_eagle or params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        return "the engine has draft layers with KV of their own, which are not served yet"
    mode = arguments.get("disaggregation_mode")
    if mode not in (None, "null"):
        return f"disaggregation_mode is {mode!r}, which is not served yet"
    if arguments.get("enable_memory_saver"):
        return "enable_memory_saver is set: memory that is taken back while the engine sleeps cannot be shared"
    if multimodal:
        return "the model takes images or sound, of which SGLang's hashes of pages name too little"
    return pools.why_not_served(pool, params.page_size)
