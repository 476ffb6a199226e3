"""The rules of groups against vLLM's own: the same sets of pages, looked up by both.

vLLM's rules are those of a coordinator of a store, which applies the finders of vLLM's prefix cache to a set of hashes.
kvferry's rules are applied by ``kvferry-tools reach``.

Known differences:

* Groups with draft layers. vLLM checks the page behind the end of a hit once for each such group and drops it then. So
  a boundary at which all groups could continue may be missed, and kvferry's hit is longer. Or another group lowers the
  end afterwards, and the page behind the new end is not checked: vLLM's hit is longer, and lacks that page.
* An alignment of hits that is finer than the scheduler's block (``--prefix-match-unit`` with states). vLLM's hits then
  may end inside pages. kvferry's end at multiples of the scheduler's block, and are never longer.
* Chunks that are no multiple of the page size. vLLM looks at the chunk of the longest candidate, and not always at that
  of the found end. No known model has such chunks.
* A window of one token. vLLM needs a page for a hit and stores none; with draft layers it needs the page behind the end
  only. kvferry needs and stores the last page before the end in both cases. No known model has such windows.
"""

import json
import math
import os
import random
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from real_scheduler import engine_config
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

#: Sets of pages for each test.
SETS = 20_000
PAGE_TOKENS = (16, 32, 48, 64)


@pytest.fixture(autouse=True, scope="module")
def known_specs() -> None:
    register_all_kvcache_specs(engine_config())


@dataclass(frozen=True)
class Group:
    kind: str
    page_tokens: int
    tokens: int = 0

    def spec(self) -> KVCacheSpec:
        attention: dict[str, Any] = {
            "block_size": self.page_tokens,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float32,
        }
        match self.kind:
            case "prefix":
                return FullAttentionSpec(**attention)
            case "window":
                return SlidingWindowSpec(**attention, sliding_window=self.tokens)
            case "chunk":
                return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=self.tokens)
            case _:
                sizes = {"shapes": ((8,),), "dtypes": (torch.float32,)}
                return MambaSpec(block_size=self.page_tokens, mamba_cache_mode="align", **sizes)


class Sequence:
    """Groups, a sequence, and the pages that are there."""

    def __init__(self, draw: random.Random, eagle: bool = False, cached: bool = True, chunks: bool = True):
        one_size = draw.random() < 0.4
        shared = draw.choice(PAGE_TOKENS)
        # vLLM serves chunks only beside pages of the same size, and without draft layers.
        kinds = ["prefix", "window", "state"] + ["chunk"] * (one_size and chunks and not eagle)
        self.groups = []
        for _ in range(draw.randint(1, 4)):
            page_tokens = shared if one_size else draw.choice(PAGE_TOKENS)
            kind = draw.choice(kinds)
            tokens = {"window": draw.randint(2 if eagle else 1, 300), "chunk": page_tokens * draw.randint(1, 8)}.get(
                kind, 0
            )
            self.groups.append(Group(kind, page_tokens, tokens))
        # vLLM looks up groups with equal specs together, and applies the rule for draft layers to all of them.
        drafted = {group for group in self.groups if eagle and group.kind != "state" and draw.random() < 0.6}
        self.eagle = [group in drafted for group in self.groups]
        sizes = [group.page_tokens for group in self.groups]
        self.hash_tokens, self.hit_tokens = math.gcd(*sizes), math.lcm(*sizes)
        self.tokens = draw.randint(1, 4 * self.hit_tokens + 200)
        self.device_tokens = (
            draw.randrange(0, self.tokens + 1, self.hit_tokens) if cached and draw.random() < 0.4 else 0
        )
        self.hashes = [BlockHash(index.to_bytes(32, "big")) for index in range(self.tokens // self.hash_tokens)]
        missing = draw.choice((0, 0.02, 0.1, 0.3))
        self.pages = [
            [draw.random() >= missing for _ in range(self.tokens // group.page_tokens)] for group in self.groups
        ]

    def line(self, **more: Any) -> str:
        groups = [
            {
                "kind": group.kind,
                "page_tokens": group.page_tokens,
                "tokens": group.tokens,
                "eagle": eagle,
                "pages": "".join("01"[page] for page in pages),
            }
            for group, eagle, pages in zip(self.groups, self.eagle, self.pages, strict=True)
        ]
        wanted = {
            "hash_tokens": self.hash_tokens,
            "hit_tokens": self.hit_tokens,
            "hashes": len(self.hashes),
            "device_tokens": self.device_tokens,
            "limit_tokens": self.tokens - 1,
            "groups": groups,
        }
        return json.dumps({**wanted, **more})

    def coordinator(self, fine: bool = False) -> MooncakeStoreCoordinator:
        groups = [
            KVCacheGroupSpec([f"layer.{index}"], group.spec(), is_eagle_group=eagle)
            for index, (group, eagle) in enumerate(zip(self.groups, self.eagle, strict=True))
        ]
        return MooncakeStoreCoordinator(groups, self.hit_tokens, self.hash_tokens, enable_partial_hash_hits=fine)

    def name(self, group: Group, page: int) -> BlockHash:
        return self.hashes[(page + 1) * group.page_tokens // self.hash_tokens - 1]

    def of_vllm(self, fine: bool = False) -> tuple[int | None, list[list[int]]]:
        """The end of vLLM's hit, and the pages that it takes for each group."""
        exists = set()
        for index, (group, pages) in enumerate(zip(self.groups, self.pages, strict=True)):
            for page, there in enumerate(pages):
                # The engine has the tokens before its own hit; of states, only the one where a hit ends is of use.
                of_engine = group.kind != "state" and (page + 1) * group.page_tokens <= self.device_tokens
                if there or of_engine:
                    exists.add((index, bytes(self.name(group, page))))
        pool = ExternalCachedBlockPool(self.hash_tokens, exists)
        masks, end = self.coordinator(fine).find_longest_cache_hit(self.hashes, self.tokens - 1, pool)
        taken = [[page for page, wanted in enumerate(mask) if wanted] for mask in masks]
        return (end if end > self.device_tokens else None), taken


def of_kvferry(lines: list[str]) -> list[dict[str, Any]]:
    program = os.environ.get("KVFERRY_TOOLS")
    if not program:
        pytest.skip("KVFERRY_TOOLS names no kvferry-tools: `cargo xtask vllm` builds one and sets it")
    done = subprocess.run([program, "reach"], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines)
    return answers


def pages_of(run: list[int]) -> list[int]:
    return list(range(*run))


def test_hits_are_those_of_vllm() -> None:
    draw = random.Random(1)
    sets = [Sequence(draw) for _ in range(SETS)]
    found = 0
    for each, answer in zip(sets, of_kvferry([each.line() for each in sets]), strict=True):
        end, taken = each.of_vllm()
        assert answer["end_tokens"] == end, (each.line(), end)
        if end is None:
            continue
        found += 1
        for group, pages, needed in zip(each.groups, taken, answer["needed"], strict=True):
            of_engine = each.device_tokens // group.page_tokens
            assert pages_of(needed) == [page for page in pages if page >= of_engine], (each.line(), end)
    assert found > SETS / 4


def test_loads_are_those_of_vllm() -> None:
    draw = random.Random(2)
    sets = [Sequence(draw, cached=False) for _ in range(SETS)]
    for each, answer in zip(sets, of_kvferry([each.line() for each in sets]), strict=True):
        if answer["end_tokens"] is None:
            continue
        masks = each.coordinator().load_mask(each.hashes, answer["end_tokens"])
        for group, mask, loaded in zip(each.groups, masks, answer["loaded"], strict=True):
            if group.tokens == 1:
                assert not pages_of(loaded), "a window of one token reads no earlier token"
            else:
                assert pages_of(loaded) == [page for page, wanted in enumerate(mask) if wanted], each.line()


def test_stored_pages_are_those_of_vllm() -> None:
    """vLLM also keeps pages that no hit needs: the last of a full chunk, and with draft layers some of the first."""
    draw = random.Random(3)
    sets = [Sequence(draw, eagle=draw.random() < 0.5) for _ in range(SETS)]
    lines = []
    for each in sets:
        aligned = each.tokens // each.hit_tokens * each.hit_tokens
        lines.append(each.line(store={"tokens": aligned, "every_tokens": 1, "ends": []}))
    for each, answer in zip(sets, of_kvferry(lines), strict=True):
        aligned = each.tokens // each.hit_tokens * each.hit_tokens
        masks = each.coordinator().store_mask(aligned)
        for group, eagle, mask, stored in zip(each.groups, each.eagle, masks, answer["stored"], strict=True):
            if group.tokens == 1:
                continue
            kept = [True] * (aligned // group.page_tokens) if mask is None else mask
            pages = {page for run in stored for page in pages_of(run)}
            wanted = {page for page, wanted in enumerate(kept) if wanted}
            if group.kind == "chunk":
                wanted = {page for page in wanted if (page + 1) * group.page_tokens % group.tokens}
            if eagle:
                assert pages <= wanted, (each.line(), group)
                wanted = {page for page in wanted if page in pages or page * group.page_tokens >= each.hit_tokens}
            assert pages == wanted, (each.line(), group)


def test_hits_with_draft_layers_differ_from_those_of_vllm_as_known() -> None:
    draw = random.Random(4)
    sets = [Sequence(draw, eagle=True) for _ in range(SETS)]
    hits = longer = shorter = 0
    for each, answer in zip(sets, of_kvferry([each.line() for each in sets]), strict=True):
        end, _ = each.of_vllm()
        ours, theirs = answer["end_tokens"] or 0, end or 0
        hits += ours > 0
        longer += ours > theirs
        if ours < theirs:
            shorter += 1
            behind = [
                theirs // group.page_tokens < len(pages) and pages[theirs // group.page_tokens]
                for group, eagle, pages in zip(each.groups, each.eagle, each.pages, strict=True)
                if eagle
            ]
            assert not all(behind), (each.line(), end)
        if not any(each.eagle):
            assert ours == theirs, (each.line(), end)
    print(f"of {hits} hits, {longer} are longer than vLLM's and {shorter} are shorter")
    assert shorter < longer < hits


def test_hits_are_never_longer_than_those_of_a_finer_alignment() -> None:
    draw = random.Random(5)
    sets = [Sequence(draw, chunks=False) for _ in range(SETS)]
    shorter = 0
    for each, answer in zip(sets, of_kvferry([each.line() for each in sets]), strict=True):
        end, _ = each.of_vllm(fine=True)
        ours = answer["end_tokens"] or 0
        assert ours <= (end or 0), (each.line(), end)
        shorter += ours < (end or 0)
    print(f"for {shorter} of {SETS} sets of pages, vLLM's hit with a finer alignment is longer")
