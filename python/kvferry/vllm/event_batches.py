"""Builds vLLM's KV events from the pages that kvferry holds.

Each page of a tier and group is announced by one ``BlockStored``, and taken back by one ``BlockRemoved``, because
subscribers may count both. A page whose tokens become known after it was announced by its hash is taken back and
announced in full in the same batch.
"""

from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash, to_event_extra_keys

from kvferry.held_pages import BY_HASH, IN_FULL, NOT, HeldPages
from kvferry.vllm.page_tokens import Lora, PageContent, PageTokens

#: The medium of each tier. Pages of other tiers are not announced; those of the device are vLLM's own.
MEDIA = {2: MEDIUM_CPU, 3: MEDIUM_STORAGE}
#: Pages that one batch changes. A batch with pages of 32 tokens has at most 25 KB, one with pages of 256 tokens 170 KB.
BATCH_PAGES_MAX = 128


@dataclass(frozen=True)
class EventGroup:
    """A group of the engine, as vLLM's events name it."""

    #: Number among vLLM's groups.
    number: int
    page_tokens: int
    kind: str
    sliding_window: int | None


class _Run:
    """Consecutive pages of one sequence, tier and group, which one event announces."""

    def __init__(self, place: bytes, content: PageContent):
        self.place = place
        self.parent, self.lora = content.parent, content.lora
        self.hashes: list[bytes] = []
        self.tokens: list[int] = []
        self.extra_keys: list[tuple[Any, ...] | None] = []

    def takes(self, place: bytes, content: PageContent) -> bool:
        """Whether a page follows this run."""
        return (self.place, self.hashes[-1], self.lora) == (place, content.parent, content.lora)

    def add(self, content: PageContent) -> None:
        self.hashes.append(content.page_hash)
        self.tokens.extend(content.tokens)
        self.extra_keys.append(content.extra_keys)


class EventBatches:
    """Turns due announcements into events. For one thread.

    ``groups``: in the order in which they are registered.
    """

    def __init__(self, groups: list[EventGroup], held: HeldPages, tokens: PageTokens):
        self._groups = groups
        self._held = held
        self._tokens = tokens
        #: Subscribers know pages by the last 8 bytes of their hashes, which the leader has.
        self._by_number = bool(envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)
        #: The whole hashes of announced pages, where subscribers know pages by these; 200 bytes a page.
        self._whole: dict[bytes, bytes] = {}

    def describes(self, size: int, page_hash: bytes) -> None:
        """Records that the tokens of a page have become known."""
        for number, group in enumerate(self._groups):
            if group.page_tokens == size:
                for tier in MEDIA:
                    self._held.described(bytes((tier, number)) + page_hash)

    def next(self) -> list[KVCacheEvent]:
        """Returns the events of a batch; none if nothing is due. Parents come before the pages that follow them."""
        again: dict[bytes, list] = {}
        runs: list[_Run] = []
        by_hash: dict[bytes, list] = {}
        gone: dict[bytes, list] = {}
        pages = 0
        while pages < BATCH_PAGES_MAX and (first := self._held.first_due()) is not None:
            for key in self._parents_first(first)[: BATCH_PAGES_MAX - pages]:
                pages += 1
                is_held, how = self._held.take_due(key)
                place = key[:2]
                if key[0] not in MEDIA or key[1] >= len(self._groups):
                    continue
                if not is_held:
                    if how != NOT:
                        gone.setdefault(place, []).append(self._taken_back(key))
                    continue
                content = self._content(key)
                if how == IN_FULL or (how == BY_HASH and content is None):
                    continue
                if content is not None:
                    if how == BY_HASH:
                        again.setdefault(place, []).append(self._external(key[2:]))
                    if not runs or not runs[-1].takes(place, content):
                        runs.append(_Run(place, content))
                    runs[-1].add(content)
                    if not self._by_number:
                        self._whole[key] = content.page_hash
                    self._held.announced(key, IN_FULL)
                elif self._by_number:
                    by_hash.setdefault(place, []).append(self._external(key[2:]))
                    self._held.announced(key, BY_HASH)
        events: list[KVCacheEvent] = [self._removed(place, hashes) for place, hashes in again.items()]
        events += [self._stored(run) for run in runs]
        events += [self._stored_by_hash(place, hashes) for place, hashes in by_hash.items()]
        # The pages that depend on others come first.
        events += [self._removed(place, hashes[::-1]) for place, hashes in gone.items()]
        return events

    def _taken_back(self, key: bytes) -> Any:
        self._held.announced(key, NOT)
        return self._external(self._whole.pop(key, key[2:]))

    def _parents_first(self, key: bytes) -> list[bytes]:
        """Returns a due page after the due pages of its sequence before it."""
        found = [key]
        while (content := self._content(found[-1])) is not None and content.parent is not None:
            parent = key[:2] + content.parent[-16:]
            if not self._held.is_due(parent):
                break
            found.append(parent)
        return found[::-1]

    def _content(self, key: bytes) -> PageContent | None:
        if key[1] >= len(self._groups):
            return None
        return self._tokens.of(self._groups[key[1]].page_tokens, key[2:])

    @staticmethod
    def _external(page_hash: bytes) -> Any:
        return maybe_convert_block_hash(BlockHash(page_hash))

    def _removed(self, place: bytes, hashes: list) -> BlockRemoved:
        return BlockRemoved(block_hashes=hashes, medium=MEDIA[place[0]], group_idx=self._groups[place[1]].number)

    def _stored(self, run: _Run) -> BlockStored:
        group = self._groups[run.place[1]]
        lora: Lora | None = run.lora
        return BlockStored(
            block_hashes=[self._external(each) for each in run.hashes],
            parent_block_hash=self._external(run.parent) if run.parent is not None else None,
            token_ids=run.tokens,
            block_size=group.page_tokens,
            lora_id=lora.number if lora else None,
            medium=MEDIA[run.place[0]],
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(run.extra_keys),
            group_idx=group.number,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.sliding_window,
        )

    def _stored_by_hash(self, place: bytes, hashes: list) -> BlockStored:
        """Announces pages whose tokens are unknown, in the form that vLLM itself uses for such pages."""
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=MEDIA[place[0]],
            lora_name=None,
            group_idx=self._groups[place[1]].number,
        )
