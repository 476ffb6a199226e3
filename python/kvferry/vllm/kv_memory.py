"""Where vLLM allocates the KV cache: in a pool of kvferry's where vLLM's own allocator makes memory that is not shared.

vLLM's allocator for sleeping engines (``cumem``) takes the memory of the KV cache back while the engine sleeps, and
maps other memory at the same addresses afterwards. A worker would continue to copy the earlier memory. So a rank of
such an engine registers its memory only if it lies in a pool, where it stays.

What the memory holds is safe: vLLM resets its own caches and the connector's before it sleeps, and does not sleep
if that fails. No step runs until it has woken up.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.device_allocator import alloc_conf
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def is_taken_back(config: "VllmConfig") -> bool:
    """Whether vLLM's own allocator for the KV cache is the one that takes memory back."""
    model = config.model_config
    return bool(getattr(model, "enable_sleep_mode", False) or getattr(model, "enable_cumem_allocator", False))


def why_not_kept(config: "VllmConfig", setting: str) -> str | None:
    """Returns why the KV cache cannot be kept from an allocator that takes it back; None if it can, or need not be."""
    if not is_taken_back(config):
        return None
    sleeps = getattr(config.model_config, "enable_sleep_mode", False)
    name = "enable_sleep_mode" if sleeps else "enable_cumem_allocator"
    if not current_platform.is_cuda():
        return (
            f"{name} is True, and KV memory that goes while the engine sleeps can be replaced by lasting memory only "
            f"on CUDA devices, not on {current_platform.device_type}"
        )
    if setting == "engine":
        return (
            f"{name} is True and kv_memory is 'engine': KV memory that goes while the engine sleeps cannot be shared, "
            "set kv_memory to 'auto' to keep it"
        )
    backend = getattr(config.model_config, "sleep_mode_backend", "cumem")
    if backend != "cumem":
        return f"sleep_mode_backend is {backend!r}, and nothing is known of the KV memory then: use 'cumem'"
    return None


@contextlib.contextmanager
def whole_allocations() -> Iterator[None]:
    """Switches ``expandable_segments`` of torch's allocator off while the ``with`` block runs."""
    before = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(before, alloc_conf.EXPANDABLE_SEGMENTS):
        yield
        return
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(before, alloc_conf.EXPANDABLE_SEGMENTS, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(before)
