"""Features of TensorRT-LLM with which pages could be wrong, or could not be loaded: each is refused at the start."""

from typing import Any

from kvferry.trtllm.content import fields_of

_NO_EVICTION = "guaranteed_no_evict"


def refused(llm_args: Any) -> list[str]:
    """Returns one line for each refused feature: the switch, its value and the remedy."""
    arguments = fields_of(llm_args)
    cache = fields_of(arguments.get("kv_cache_config"))
    scheduler = fields_of(arguments.get("scheduler_config"))
    found = []
    for name, why, remedy in (
        ("pipeline_parallel_size", "ranks that hold different layers are not supported yet", "set it to 1"),
        ("context_parallel_size", "pages that are spread over ranks are not supported yet", "set it to 1"),
        ("max_beam_width", "beams share pages in ways that a connector does not see", "set it to 1"),
    ):
        if (arguments.get(name) or 1) > 1:
            found.append(f"{name} is {arguments[name]}: {why}: {remedy}")
    for name, why in (
        ("enable_attention_dp", "each rank would have requests of its own"),
        ("speculative_config", "drafted tokens may be rejected after their pages were stored"),
        ("sparse_attention_config", "pages of the layers' indices are no part of the KV cache that is registered"),
        ("cache_transceiver_config", "pages would be moved by two parties"),
        ("enable_sleep", "the KV cache loses its memory while the engine sleeps"),
        ("sleep_config", "the KV cache loses its memory while the engine sleeps"),
        ("ray_worker_extension_cls", "weights may change while the engine runs, and pages of the old ones stay"),
    ):
        if arguments.get(name):
            found.append(f"{name} is set: {why}: leave it out")
    if cache.get("host_cache_size"):
        found.append(
            f"kv_cache_config.host_cache_size is {cache['host_cache_size']}: pages outside of the registered memory "
            "cannot be copied: leave it out, kvferry has the host's part of the cache"
        )
    if cache.get("enable_block_reuse") is False:
        found.append(
            "kv_cache_config.enable_block_reuse is False: no page is ever looked up: set it to True, or leave the "
            "connector out"
        )
    windows = cache.get("max_attention_window")
    if windows:
        found.append(
            f"kv_cache_config.max_attention_window is {windows}: pages that a window has passed are used for other "
            "tokens: leave it out"
        )
    if cache.get("sink_token_length"):
        found.append(f"kv_cache_config.sink_token_length is {cache['sink_token_length']}: leave it out")
    if not isinstance(cache.get("tokens_per_block"), int):
        found.append(f"kv_cache_config.tokens_per_block is {cache.get('tokens_per_block')!r}: give a number, as 32")
    policy = scheduler.get("capacity_scheduler_policy")
    if policy is not None and str(getattr(policy, "name", policy)).lower() != _NO_EVICTION:
        found.append(
            f"scheduler_config.capacity_scheduler_policy is {policy}: requests would lose pages that are being "
            "copied: set GUARANTEED_NO_EVICT"
        )
    return found


def check(llm_args: Any) -> None:
    """Refuses arguments that cannot be used with kvferry.

    Raises:
        ValueError: one line that names each switch, its value and the remedy.
    """
    if found := refused(llm_args):
        raise ValueError(f"kvferry cannot serve this engine: {'; '.join(found)}")
