"""SGLang's pools of KV memory: which are served, and how their tensors are described in pages."""

from collections.abc import Iterator
from typing import Any

import torch

from kvferry.memory import Group, Slices

#: Smallest page in tokens: smaller pages cost a record of 80 bytes for few bytes of KV.
PAGE_TOKENS_MIN = 16
#: Classes of pools that are served, by name; subclasses have other layouts.
MHA, MLA = "MHATokenToKVPool", "MLATokenToKVPool"


def why_not_served(pool: Any, page_tokens: int) -> str:
    """Returns why a pool is not served, with the remedy where there is one; empty where it is."""
    name = type(pool).__name__
    if name not in (MHA, MLA) or not type(pool).__module__.endswith(".memory_pool"):
        return f"the KV cache is a {name}, and only {MHA} and {MLA} are served yet"
    if page_tokens < PAGE_TOKENS_MIN:
        return f"page_size is {page_tokens}: give --page-size {PAGE_TOKENS_MIN} or more, such as 64"
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        return f"the KV cache has the layout {layout!r}, and only 'nhd' is served yet"
    for attribute in ("k_scale_buffer", "v_scale_buffer", "kv_scale_buffer"):
        if getattr(pool, attribute, None) is not None:
            return "the KV cache has scales beside its values, which are not served yet: use another kv_cache_dtype"
    for attribute, what in (
        ("is_quantized_kv_cache", "a quantized KV cache"),
        ("post_capture_active", "a KV cache that grows after the capture of graphs"),
        ("layer_shard_enabled", "a KV cache whose layers are sharded"),
        ("use_dsa", "a KV cache with an index of its own"),
        ("enable_custom_mem_pool", "a KV cache in a memory pool of its own"),
    ):
        if getattr(pool, attribute, False):
            return f"{what} is not served yet"
    if not list(_tensors(pool)):
        return "the KV cache has no layers"
    devices = {tensor.device.type for tensor in _tensors(pool)}
    if not devices <= {"cpu", "cuda"}:
        return f"the KV cache is on {', '.join(sorted(devices))}: memory of the CPU and of CUDA devices is served"
    return ""


def is_mla(pool: Any) -> bool:
    """Whether the pool has one latent tensor a layer, which is the same on all ranks."""
    return type(pool).__name__ == MLA


def is_on_cpu(pool: Any) -> bool:
    """Whether the pool is in memory of the CPU, which sharing moves."""
    return all(tensor.device.type == "cpu" for tensor in _tensors(pool))


def group_of(pool: Any, page_tokens: int, kv_heads: int) -> Group:
    """Describes the tensors of a served pool: one for keys and one for values of each layer, or one latent.

    ``kv_heads``: of the whole model.
    """
    shaped = {f"tensor {number}": _paged(tensor, page_tokens) for number, tensor in enumerate(_tensors(pool))}
    pages = {tensor.shape[0] for tensor in shaped.values()}
    if len(pages) != 1:
        raise ValueError(f"the tensors of the KV cache have {sorted(pages)} pages: one number is expected")
    # Pages, tokens, heads, and the elements of a head; a latent has one head, which every rank holds.
    if is_mla(pool):
        return Group(shaped, page_tokens, pages.pop(), role="latent", slices=Slices(1))
    return Group(shaped, page_tokens, pages.pop(), slices=Slices(1, kv_heads, 2))


def _tensors(pool: Any) -> Iterator[torch.Tensor]:
    if is_mla(pool):
        yield from pool.kv_buffer
        return
    for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True):
        yield keys
        yield values


def _paged(tensor: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Returns a view with pages first. Rows beyond the last whole page belong to no page."""
    pages = tensor.shape[0] // page_tokens
    return tensor[: pages * page_tokens].unflatten(0, (pages, page_tokens))


def moved(pool: Any) -> None:
    """Renews the addresses of tensors that a pool keeps. Called after the memory was moved."""
    if is_mla(pool):
        pool.data_ptrs = torch.tensor(
            [tensor.data_ptr() for tensor in pool.kv_buffer], dtype=torch.uint64, device=pool.data_ptrs.device
        )
    else:
        pool._init_data_ptrs_and_strides()


def pages_of(slots: torch.Tensor, count: int, page_tokens: int) -> list[int] | None:
    """Returns the pages of a row of token slots; None where they are not ``count`` whole pages."""
    if slots.numel() != count * page_tokens or count == 0:
        return None
    rows = slots.to("cpu", torch.int64).view(count, page_tokens)
    first = rows[:, :1]
    whole = bool(((rows - first == torch.arange(page_tokens)) & (first % page_tokens == 0)).all())
    return (first[:, 0] // page_tokens).tolist() if whole else None
