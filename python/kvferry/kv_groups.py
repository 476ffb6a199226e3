"""Translates vLLM's KV cache groups to those of docs/wire.md, and decides which of them kvferry serves."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.memory import Group

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

#: Kinds of attention whose pages are found by the hash of all tokens up to their end, and nothing else.
_FULL = (FullAttentionSpec, MLAAttentionSpec)


def groups_of(config: "KVCacheConfig", kv_caches: Mapping[str, Any]) -> list[Group]:
    """Returns every group of the engine's memory. Each is registered by itself."""
    return [_group(group, kv_caches, config.num_blocks) for group in config.kv_cache_groups]


def why_not_served(config: "KVCacheConfig") -> str | None:
    """Returns why pages of these groups cannot be cached; None when they can."""
    groups = config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        return f"the model's KV cache has {len(groups)} groups ({kinds}), and only one is served yet"
    for spec in _specs(groups[0]):
        if type(spec) not in _FULL:
            return f"the model has layers of kind {type(spec).__name__}, which are not served yet"
        if getattr(spec, "non_causal", False):
            return "the model has layers that are not causal: a page there depends on tokens after it, too"
    return None


def page_bytes(config: "KVCacheConfig") -> int:
    """Bytes of one page of all layers on one rank.

    The scheduler sees one layer's spec for all of a group: an estimate if the layers differ.
    """
    return sum(
        sum(spec.page_size_bytes for spec in _specs(group)) * len(group.layer_names) // len(_specs(group))
        for group in config.kv_cache_groups
    )


def shards(config: "KVCacheConfig", ranks: int, heads: Collection[int]) -> int:
    """Returns how many distinct slices of the KV cache ``ranks`` ranks hold.

    Fewer than ``ranks`` only if every layer's spec states so, or if all layers have the same total number of heads, and
    fewer heads than ranks: then neighbouring ranks hold the same slice. ``heads`` are the distinct totals. One slice
    for each rank is always correct, but takes more host memory.
    """
    limits = [getattr(spec, "max_tp_shards", None) for group in config.kv_cache_groups for spec in _specs(group)]
    if limits and None not in limits:
        return min(ranks, max(limits))
    if any(limits):
        return ranks
    return min(ranks, *heads) if len(heads) == 1 else ranks


def _specs(group: "KVCacheGroupSpec") -> list["KVCacheSpec"]:
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _group(group: "KVCacheGroupSpec", kv_caches: Mapping[str, Any], pages: int) -> Group:
    specs = _specs(group)
    attention, window_tokens = _attention(specs)
    if all(isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)) for spec in specs):
        role = "latent"
    else:
        role = "state" if attention == "state" else "kv"
    return Group(
        tensors={name: kv_caches[name] for name in group.layer_names if name in kv_caches},
        engine_page_tokens=group.kv_cache_spec.block_size,
        device_pages=pages,
        role=role,
        attention=attention,
        window_tokens=window_tokens,
    )


def _attention(specs: list["KVCacheSpec"]) -> tuple[str, int]:
    """Returns the attention kind that all layers share, else ``other``, and the tokens of a window or chunk."""
    kinds = {_attention_of(spec) for spec in specs}
    return kinds.pop() if len(kinds) == 1 else ("other", 0)


def _attention_of(spec: "KVCacheSpec") -> tuple[str, int]:
    if type(spec) in _FULL:
        return "full", 0
    if isinstance(spec, SlidingWindowSpec):
        return "sliding_window", spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked_local", spec.attention_chunk_size
    return ("state" if isinstance(spec, MambaSpec) else "other"), 0
