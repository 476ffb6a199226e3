"""Tests of the form of KV events: fields, order, encoding, and what of a page's tokens is known."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import plain_msgpack
import pytest
from router import Router
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvferry.held_pages import HeldPages, key_of
from kvferry.vllm import event_batches, page_tokens
from kvferry.vllm.event_batches import EventBatches, EventGroup
from kvferry.vllm.page_tokens import Described, PageTokens, describe

#: Written by vLLM 0.32: two pages from the root, one behind them with a group, a removal, and a clear; rank 0.
GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf0123456789abcdefcffedcba98"
    "76543210b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f69"
    "64c0a66d656469756da3435055a96c6f72615f6e616d65c08aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf"
    "fedcba9876543210b1706172656e745f626c6f636b5f68617368cf0123456789abcdefa9746f6b656e5f696473920304aa626c6f636b5f7369"
    "7a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f7370"
    "65635f6b696e64ae66756c6c5f617474656e74696f6e83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf01"
    "23456789abcdefa66d656469756da343505581a474797065b0416c6c426c6f636b73436c656172656400"
)
FULL = EventGroup(0, 2, "full_attention", None)
WINDOW = EventGroup(3, 4, "sliding_window", 8)
FIRST, SECOND = 0x0123456789ABCDEF, 0xFEDCBA9876543210


def whole(number: int) -> bytes:
    """A page hash of 32 bytes, which ends with a number."""
    return b"%024d" % (number % 10**24) + number.to_bytes(8, "big")


class Batches:
    """Pages in kvferry, their tokens, and a subscriber."""

    def __init__(self, *groups: EventGroup, hash_tokens: int = 2):
        sizes = sorted({group.page_tokens for group in groups})
        self.held = HeldPages()
        self.tokens = PageTokens(sizes, hash_tokens)
        self.sizes, self.hash_tokens = sizes, hash_tokens
        self.batches = EventBatches(list(groups), self.held, self.tokens)
        self.router = Router()

    def describe(self, request: Any, known: int = 0, through: int | None = None) -> None:
        through = len(request.block_hashes) if through is None else through
        for size, page_hash in self.tokens.add(describe(request, known, through, self.sizes, self.hash_tokens)):
            self.batches.describes(size, page_hash)

    def next(self) -> list[Any]:
        events = self.batches.next()
        self.router.take(events)
        return events


def request(hashes: list[int], *, page_tokens: int = 2, **more: Any) -> Any:
    tokens = list(range(1, len(hashes) * page_tokens + 1))
    fields = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None, **more}
    return SimpleNamespace(block_hashes=[whole(each) for each in hashes], all_token_ids=tokens, **fields)


def test_events_are_encoded_as_vllm_does() -> None:
    batches = Batches(FULL)
    batches.describe(request([FIRST, SECOND]))
    for number in (FIRST, SECOND):
        batches.held.gain(key_of(2, 0, whole(number)))
    (stored,) = batches.next()
    batches.held.lose(key_of(2, 0, whole(FIRST)))
    (removed,) = batches.next()
    written = msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=[stored, removed], data_parallel_rank=3))
    assert plain_msgpack.read(written) == [
        1.5,
        [
            [
                ("type", "BlockStored"),
                ("block_hashes", [FIRST, SECOND]),
                ("parent_block_hash", None),
                ("token_ids", [1, 2, 3, 4]),
                ("block_size", 2),
                ("lora_id", None),
                ("medium", "CPU"),
                ("lora_name", None),
                ("extra_keys", [None, None]),
                ("group_idx", 0),
                ("kv_cache_spec_kind", "full_attention"),
            ],
            [("type", "BlockRemoved"), ("block_hashes", [FIRST]), ("medium", "CPU"), ("group_idx", 0)],
        ],
        3,
    ]
    # The same fields in the same order as in bytes that vLLM wrote.
    old = plain_msgpack.read(GOLDEN)[1]
    new = plain_msgpack.read(written)[1]
    assert old[0] == new[0][: len(old[0])]
    assert [name for name, _ in old[1]] == [name for name, _ in new[0] if name != "extra_keys"]
    assert [name for name, _ in old[2]] == [name for name, _ in new[1]][: len(old[2])]


def test_the_installed_classes_write_the_known_bytes() -> None:
    plain: dict[str, Any] = {"lora_id": None, "lora_name": None, "medium": "CPU", "block_size": 2}
    events = [
        BlockStored(block_hashes=[FIRST, SECOND], parent_block_hash=None, token_ids=[1, 2, 3, 4], **plain),
        BlockStored(
            block_hashes=[SECOND],
            parent_block_hash=FIRST,
            token_ids=[3, 4],
            **plain,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockRemoved(block_hashes=[FIRST], medium="CPU"),
        AllBlocksCleared(),
    ]
    assert msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)) == GOLDEN


def test_pages_of_larger_groups_have_the_hash_of_their_last_unit() -> None:
    batches = Batches(FULL, WINDOW)
    batches.describe(request([11, 12, 13, 14, 15]))
    batches.held.gain(key_of(3, 1, whole(14)))
    (stored,) = batches.next()
    assert stored == BlockStored(
        block_hashes=[14],
        parent_block_hash=12,
        token_ids=[5, 6, 7, 8],
        block_size=4,
        lora_id=None,
        medium="STORAGE",
        lora_name=None,
        extra_keys=[None],
        group_idx=3,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=8,
    )


@pytest.mark.parametrize("parts", [[5], [1, 5], [2, 3, 5], [1, 2, 3, 4, 5], [3, 4]])
def test_a_request_that_is_described_in_parts_is_described_whole(parts: list[int]) -> None:
    """Groups whose page sizes do not divide each other begin at different units."""
    groups = [EventGroup(number, size, "full_attention", None) for number, size in enumerate((2, 4, 6))]
    batches = Batches(*groups)
    asking, known = request([1, 2, 3, 4, 5, 6, 7]), 0
    for part in [*parts, 7]:
        batches.describe(asking, known, part)
        known = part
    for size in (2, 4, 6):
        length = size // 2
        for end in range(length, 8, length):
            content = batches.tokens.of(size, whole(end)[-16:])
            assert content is not None, (size, end)
            assert content.tokens == array("I", range(2 * (end - length) + 1, 2 * end + 1))
            assert content.parent == (whole(end - length) if end > length else None)


def test_parents_come_first_and_runs_are_joined() -> None:
    batches = Batches(FULL)
    batches.describe(request([1, 2, 3, 4, 5]))
    batches.describe(request([1, 2, 6]), known=2)
    order = [5, 2, 6, 4, 1, 3]
    for number in order:
        batches.held.gain(key_of(2, 0, whole(number)))
    batches.held.gain(key_of(3, 0, whole(2)))
    events = batches.next()
    assert [(event.medium, event.block_hashes, event.parent_block_hash) for event in events] == [
        ("CPU", [1, 2, 3, 4, 5], None),
        ("CPU", [6], 2),
        ("STORAGE", [2], 1),
    ]


def test_a_batch_has_a_limit_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_batches, "BATCH_PAGES_MAX", 3)
    batches = Batches(FULL)
    batches.describe(request(list(range(1, 9))))
    for number in range(8, 0, -1):
        batches.held.gain(key_of(2, 0, whole(number)))
    found = [[page for event in batches.next() for page in event.block_hashes] for _ in range(4)]
    assert found == [[1, 2, 3], [4, 5, 6], [7, 8], []]


def test_a_page_without_known_tokens_is_announced_by_its_hash_and_in_full_later() -> None:
    batches = Batches(FULL)
    batches.held.gain(key_of(2, 0, whole(1)))
    batches.held.gain(key_of(2, 0, whole(2)))
    (stored,) = batches.next()
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == ([1, 2], [], 0)
    assert (stored.parent_block_hash, stored.medium, stored.group_idx) == (None, "CPU", 0)
    batches.describe(request([1, 2, 3]))
    removed, stored = batches.next()
    assert (removed.block_hashes, stored.block_hashes) == ([1, 2], [1, 2])
    assert (stored.token_ids, stored.block_size) == ([1, 2, 3, 4], 2)
    batches.describe(request([1, 2, 3]))
    assert batches.next() == []
    for number in (1, 2):
        batches.held.lose(key_of(2, 0, whole(number)))
    (removed,) = batches.next()
    assert removed.block_hashes == [2, 1], "the page that depends on the other one comes first"
    assert not batches.router.pages()


def test_a_page_that_was_announced_in_full_stays_so_when_its_tokens_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = Batches(FULL)
    batches.describe(request([1]))
    batches.held.gain(key_of(2, 0, whole(1)))
    assert len(batches.next()) == 1
    monkeypatch.setattr(page_tokens, "KNOWN_BYTES_MAX", 2 * page_tokens.PAGE_OVERHEAD_BYTES + 20)
    batches.describe(request([1]))
    batches.describe(request([2, 3]))
    assert batches.tokens.of(2, whole(1)[-16:]) is None
    assert (batches.tokens.dropped, batches.tokens.of(2, whole(3)[-16:]) is not None) == (1, True)
    batches.held.gain(key_of(3, 0, whole(1)))
    (stored,) = batches.next()
    assert (stored.medium, stored.block_size) == ("STORAGE", 0), "only its hash is known by now"


def test_a_page_that_is_described_again_is_dropped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(FULL)
    monkeypatch.setattr(page_tokens, "KNOWN_BYTES_MAX", 2 * page_tokens.PAGE_OVERHEAD_BYTES + 20)
    for number in (1, 2, 1, 3):
        batches.describe(request([number]))
    kept = [number for number in (1, 2, 3) if batches.tokens.of(2, whole(number)[-16:])]
    assert kept == [1, 3]


def test_a_page_takes_no_more_memory_than_is_counted() -> None:
    import tracemalloc

    pages = 20_000
    chooser = random.Random(0)
    tokens = [chooser.randrange(100_000) for _ in range(pages * 16)]
    tracemalloc.start()
    known = PageTokens([16], 16)
    hashes = [chooser.randbytes(32) for _ in range(pages)]
    list(known.add(Described(0, hashes, tokens, 0, None, None)))
    del hashes
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= known._bytes


def test_adapters_salts_and_inputs_are_named_as_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(FULL)
    lora = SimpleNamespace(adapter_id=7, name="sql", lora_name="sql", lora_path="/sql")
    batches.describe(request([1, 2], lora_request=lora, cache_salt="tenant"))
    for number in (1, 2):
        batches.held.gain(key_of(2, 0, whole(number)))
    (stored,) = batches.next()
    assert (stored.lora_id, stored.lora_name) == (7, "sql")
    assert [len(keys) for keys in stored.extra_keys] == [2, 1], "the salt is part of the first page alone"
    assert stored.extra_keys[0][1] == "tenant"


def test_pages_of_other_adapters_are_not_joined() -> None:
    batches = Batches(FULL)
    lora = SimpleNamespace(adapter_id=7, name="sql", lora_name="sql", lora_path="/sql")
    batches.describe(request([1]))
    batches.describe(request([1, 2], lora_request=lora), known=1)
    for number in (1, 2):
        batches.held.gain(key_of(2, 0, whole(number)))
    assert [event.lora_id for event in batches.next()] == [None, 7]


def test_whole_hashes_are_published_where_vllm_publishes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    batches = Batches(FULL)
    for number in (1, 2):
        batches.held.gain(key_of(2, 0, whole(number)))
    assert batches.next() == [], "the leader knows only a part of the hash"
    batches.describe(request([1, 2]))
    (stored,) = batches.next()
    assert stored.block_hashes == [whole(1), whole(2)]
    monkeypatch.setattr(page_tokens, "KNOWN_BYTES_MAX", 0)
    batches.describe(request([3]))
    batches.held.lose(key_of(2, 0, whole(2)))
    (removed,) = batches.next()
    assert removed.block_hashes == [whole(2)]


def test_tiers_and_groups_that_are_not_known_here_are_left_out() -> None:
    batches = Batches(FULL)
    batches.held.gain(key_of(4, 0, whole(1)))
    batches.held.gain(key_of(2, 5, whole(1)))
    assert batches.next() == []
    batches.held.lose(key_of(4, 0, whole(1)))
    batches.held.lose(key_of(2, 5, whole(1)))
    assert (batches.next(), len(batches.held)) == ([], 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_subscriber_that_counts_has_the_pages_that_are_held(seed: int) -> None:
    draw = random.Random(seed)
    batches = Batches(FULL, EventGroup(1, 4, "mamba", None))
    asking = [request([100 * number + at for at in range(1, 12)]) for number in range(4)]
    places: dict[tuple[int, int], bytes] = {}
    for _ in range(300):
        tier, place = draw.choice((2, 3)), draw.randrange(30)
        if (key := places.pop((tier, place), None)) is not None:
            batches.held.lose(key)
        elif draw.random() < 0.8:
            group = draw.randrange(2)
            page_hash = draw.choice(draw.choice(asking).block_hashes[group :: group + 1])
            places[tier, place] = key = key_of(tier, group, page_hash)
            batches.held.gain(key)
        if draw.random() < 0.1:
            each = draw.choice(asking)
            batches.describe(each, 0, draw.randrange(1, 12))
        if draw.random() < 0.03:
            batches.held.announce_again()
            batches.router.take([AllBlocksCleared()])
        if draw.random() < 0.2:
            batches.next()
    while batches.next():
        pass
    media = {2: "CPU", 3: "STORAGE"}
    held = {(media[key[0]], key[1], int.from_bytes(key[-8:], "big")) for key in places.values()}
    assert batches.router.pages() == held
    for page in batches.router.in_full():
        position = page[2] % 100
        size = 2 if page[1] == 0 else 4
        assert batches.router.tokens(page) == list(range(2 * position - size + 1, 2 * position + 1))
