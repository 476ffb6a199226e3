"""Kinds of groups of pages that random schedules run with, as vLLM describes them."""

import random
from typing import Any

import torch
from fake_device import Group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

#: Tokens of the smallest page.
PAGE = 4
SHAPES = ("one", "window", "wide", "state", "chunk", "scratch", "three")


def groups_of(shape: str, draw: random.Random) -> list[Group]:
    window = draw.randint(3, 14)
    match shape:
        case "one":
            kinds = [("full", PAGE, 0)]
        case "window":
            kinds = [("window", PAGE, window), ("full", PAGE, 0)]
        case "wide":
            kinds = [("window", 2 * PAGE, window), ("full", PAGE, 0)]
        case "state":
            kinds = [("state", PAGE, 0), ("full", PAGE, 0)]
        case "chunk":
            kinds = [("chunk", PAGE, PAGE * draw.randint(2, 4)), ("full", PAGE, 0)]
        case "scratch":
            kinds = [("scratch", 2 * PAGE, 0), ("full", PAGE, 0)]
        case _:
            kinds = [("full", PAGE, 0), ("window", PAGE, window), ("state", PAGE, 0)]
    checkpoints = draw.random() < 0.5
    return [Group(number, *kind, checkpoints) for number, kind in enumerate(kinds)]


def spec_of(group: Group) -> KVCacheSpec:
    if group.kind == "state":
        return MambaSpec(
            block_size=group.page_tokens,
            shapes=((8,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=int(group.checkpoints),
            prefill_checkpoint_alignment=1 if group.checkpoints else None,
        )
    attention: dict[str, Any] = {
        "block_size": group.page_tokens,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    match group.kind:
        case "window":
            return SlidingWindowSpec(**attention, sliding_window=group.tokens)
        case "chunk":
            return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.tokens)
        case "scratch":
            return CircularBufferSpec(**attention)
        case _:
            return FullAttentionSpec(**attention)
