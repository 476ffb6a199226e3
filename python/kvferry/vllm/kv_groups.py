"""Translates vLLM's KV cache groups to those of docs/wire.md, and decides which of them kvferry serves."""

import math
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
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from kvferry.memory import Group
from kvferry.served import Served, ServedGroup
from kvferry.vllm.event_batches import EventGroup

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

#: Kinds of attention whose pages are found by the hash of all tokens up to their end, and nothing else.
_FULL = (FullAttentionSpec, MLAAttentionSpec)


def groups_of(config: "KVCacheConfig", kv_caches: Mapping[str, Any]) -> list[Group]:
    """Returns the groups of the engine's memory to register: those that are served, or all if none is."""
    return [_group(config.kv_cache_groups[number], kv_caches, config.num_blocks) for number in _registered(config)]


def hash_tokens(config: "KVCacheConfig") -> int:
    """Tokens for which the engine has one hash."""
    pages = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    return config.hash_block_size or math.gcd(*pages)


def hit_tokens(config: "KVCacheConfig") -> int:
    """Hits end at multiples of this number of tokens."""
    pages = [config.kv_cache_groups[number].kv_cache_spec.block_size for number in _registered(config)]
    return math.lcm(*pages, config.cache_hit_alignment_tokens or 1)


def why_not_served(config: "KVCacheConfig") -> str | None:
    """Returns why pages of these groups cannot be cached; None when they can.

    Groups that vLLM itself does not find by hashes are left alone: it computes what they hold again.
    """
    groups = config.kv_cache_groups
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
    if any(group.host_resident for group in groups):
        return f"the model's KV cache has a group in host memory ({kinds}), which is not served yet"
    if not config.prefix_cacheable_group_ids:
        return f"the model's KV cache has no group whose pages are found by hashes ({kinds})"
    for number in config.prefix_cacheable_group_ids:
        why = _why_not(groups[number])
        if why is None and groups[number].kv_cache_spec.block_size % hash_tokens(config):
            page = groups[number].kv_cache_spec.block_size
            why = f"has pages of {page} tokens, and hashes of {hash_tokens(config)} tokens, which do not divide them"
        if why is not None:
            return why if len(groups) == 1 else f"group {number} of the model's KV cache ({kinds}): {why}"
    return None


def served(config: "KVCacheConfig") -> Served:
    """Returns the served groups. Only for a configuration that is served."""
    groups = []
    for number in config.prefix_cacheable_group_ids:
        group = config.kv_cache_groups[number]
        attention, window_tokens = _attention(_specs(group))
        groups.append(
            ServedGroup(
                table=number,
                page_tokens=group.kv_cache_spec.block_size,
                page_bytes=_page_bytes(group),
                attention=attention,
                window_tokens=window_tokens,
                eagle=group.is_eagle_group,
            )
        )
    whole = len(config.kv_cache_groups) > 1
    return Served(tuple(groups), hash_tokens(config), hit_tokens(config), whole)


def event_groups(config: "KVCacheConfig") -> list[EventGroup]:
    """Returns the registered groups as vLLM's own KV events describe them."""
    groups = []
    for number in _registered(config):
        spec = config.kv_cache_groups[number].kv_cache_spec
        kind, window = get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)
        groups.append(EventGroup(number, spec.block_size, kind, window))
    return groups


def _registered(config: "KVCacheConfig") -> Collection[int]:
    if why_not_served(config) is None:
        return config.prefix_cacheable_group_ids
    return range(len(config.kv_cache_groups))


def _why_not(group: "KVCacheGroupSpec") -> str | None:
    for spec in _specs(group):
        kind, _ = _attention_of(spec)
        if kind == "other":
            return f"the model has layers of kind {type(spec).__name__}, which are not served yet"
        if getattr(spec, "non_causal", False):
            return "the model has layers that are not causal: a page there depends on tokens after it, too"
        if kind == "state" and spec.mamba_cache_mode != "align":  # type: ignore[attr-defined]
            return (
                f"states are kept in mode {spec.mamba_cache_mode!r}, in which none can be found again: "  # type: ignore[attr-defined]
                "set --mamba-cache-mode align"
            )
    attention, _ = _attention(_specs(group))
    if attention == "other":
        kinds = ", ".join(sorted({type(spec).__name__ for spec in _specs(group)}))
        return f"the model has layers of different kinds or windows in one group ({kinds}), which are not served yet"
    if group.is_eagle_group and attention in ("state", "chunked_local"):
        return f"draft layers use layers of kind {type(_specs(group)[0]).__name__}, which is not served yet"
    return None


def _page_bytes(group: "KVCacheGroupSpec") -> int:
    """Bytes of one page of all layers on one rank.

    The scheduler sees one layer's spec for all of a group: an estimate if the layers differ.
    """
    specs = _specs(group)
    return sum(spec.page_size_bytes for spec in specs) * len(group.layer_names) // len(specs)


def shards(config: "KVCacheConfig", ranks: int, heads: Collection[int]) -> int:
    """Returns how many distinct slices of the KV cache ``ranks`` ranks hold.

    Fewer than ``ranks`` only if every layer's spec states so, or if all layers have the same total number of heads, and
    fewer heads than ranks: then neighbouring ranks hold the same slice. ``heads`` are the distinct totals. One slice
    for each rank is always correct, but takes more host memory.
    """
    every = [spec for group in config.kv_cache_groups for spec in _specs(group)]
    if any(isinstance(spec, MambaSpec) and not spec.tp_replicated for spec in every):
        return ranks
    limits = [1 if isinstance(spec, MambaSpec) else getattr(spec, "max_tp_shards", None) for spec in every]
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
        eagle=group.is_eagle_group,
    )


def _attention(specs: list["KVCacheSpec"]) -> tuple[str, int]:
    """Returns the attention kind that all layers share, else ``other``, and the tokens of a window or chunk."""
    kinds = {_attention_of(spec) for spec in specs}
    return kinds.pop() if len(kinds) == 1 else ("other", 0)


def _attention_of(spec: "KVCacheSpec") -> tuple[str, int]:
    if type(spec) in _FULL:
        return "full", 0
    if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        return "sliding_window", spec.sliding_window + spec.extra_retained_tokens
    if type(spec) is ChunkedLocalAttentionSpec:
        return "chunked_local", spec.attention_chunk_size
    return ("state" if isinstance(spec, MambaSpec) else "other"), 0
