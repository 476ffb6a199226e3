"""Tests of the rules by which pages of groups are named in loads and stores, against vLLM's own and the leader's."""

import random

import pytest
from test_group_rules import Sequence, known_specs, of_kvferry, pages_of

from kvferry.served import Part, Served, ServedGroup, StoreCursor

assert known_specs
#: Sets of pages for each test.
SETS = 6_000
KINDS = {"prefix": "full", "window": "sliding_window", "chunk": "chunked_local", "state": "state"}


def served(each: Sequence) -> Served:
    groups = [
        ServedGroup(number, group.page_tokens, 100, KINDS[group.kind], group.tokens, eagle)
        for number, (group, eagle) in enumerate(zip(each.groups, each.eagle, strict=True))
    ]
    return Served(tuple(groups), each.hash_tokens, each.hit_tokens, whole=len(groups) > 1)


def tables(each: Sequence) -> list[list[int]]:
    """A block table for each group, with a page of its own at every position."""
    return [[1 + page for page in range(each.tokens // group.page_tokens)] for group in each.groups]


def positions(parts: list[Part], number: int) -> list[int]:
    return [
        position
        for part in parts
        if part.group == number
        for position in range(part.first_page, part.first_page + len(part.pages))
    ]


def test_loads_name_the_pages_that_vllm_allocates_for_them() -> None:
    draw = random.Random(1)
    sets = [Sequence(draw) for _ in range(SETS)]
    hits = 0
    for each, answer in zip(sets, of_kvferry([each.line() for each in sets]), strict=True):
        end = answer["end_tokens"]
        if end is None:
            continue
        hits += 1
        parts = served(each).to_load(tables(each), each.device_tokens, end)
        assert parts is not None
        masks = each.coordinator().load_mask(each.hashes, end)
        for number, (group, mask, needed) in enumerate(zip(each.groups, masks, answer["needed"], strict=True)):
            device = each.device_tokens // group.page_tokens
            wanted = [page for page, wanted in enumerate(mask) if wanted and page >= device]
            if group.tokens == 1:
                wanted = []
            assert positions(parts, number) == wanted, (each.line(), end, group)
            assert set(wanted) <= set(pages_of(needed)), "the leader holds what the load names"
        assert all(part.pages == [1 + page for page in positions([part], part.group)] for part in parts)
    assert hits > SETS / 4


def test_stores_name_the_pages_that_a_hit_can_need() -> None:
    draw = random.Random(2)
    sets = [Sequence(draw, eagle=draw.random() < 0.5) for _ in range(SETS)]
    lines = []
    for each in sets:
        lines.append(each.line(store={"tokens": each.tokens, "every_tokens": 1, "ends": []}))
    for each, answer in zip(sets, of_kvferry(lines), strict=True):
        rules = served(each)
        parts = list(StoreCursor(rules).to_store(tables(each), each.tokens, []))
        for number, (group, stored) in enumerate(zip(rules.groups, answer["stored"], strict=True)):
            if group.attention == "state":
                assert positions(parts, number) == [], "a state's position says nothing"
                continue
            complete = each.tokens // group.page_tokens - group.eagle
            kept = {page for run in stored for page in pages_of(run) if page < complete}
            ours = set(positions(parts, number))
            assert kept <= ours, (each.line(), group)
            # Pages after the last end are stored, too: the sequence may grow to the next end.
            last = each.tokens // each.hit_tokens * each.hit_tokens // group.page_tokens
            assert all(page >= last for page in ours - kept), (each.line(), group)


def cursor(*groups: ServedGroup, hit_tokens: int = 16) -> StoreCursor:
    return StoreCursor(Served(groups, 16, hit_tokens, whole=len(groups) > 1))


FULL = ServedGroup(0, 16, 100)
WINDOW = ServedGroup(1, 16, 100, "sliding_window", 33)
STATE = ServedGroup(2, 16, 100, "state")


def test_pages_are_named_once_and_again_after_a_failure() -> None:
    stored = cursor(FULL, WINDOW)
    table = [[1, 2, 3, 4], [0, 0, 7, 8]]
    parts = list(stored.to_store(table, 48, []))
    assert parts == [Part(0, 0, [1, 2, 3]), Part(1, 2, [7])]
    assert stored.is_behind(16)
    stored.stored(parts)
    assert not stored.is_behind(63)
    assert stored.is_behind(64)
    assert list(stored.to_store(table, 48, [])) == []
    assert list(stored.to_store(table, 64, [])) == [Part(0, 3, [4]), Part(1, 3, [8])]
    stored.not_stored(parts)
    # vLLM has given up the window's page meanwhile.
    assert list(stored.to_store([[1, 2, 3, 4], [0, 0, 0, 8]], 64, [])) == [Part(0, 0, [1, 2, 3, 4]), Part(1, 3, [8])]
    stored.restart()
    stored.skip(40)
    assert list(stored.to_store(table, 64, [])) == [Part(0, 2, [3, 4]), Part(1, 2, [7, 8])]


def test_pages_with_gaps_are_named_in_several_parts() -> None:
    stored = cursor(WINDOW)
    assert list(stored.to_store([[], [5, 0, 6, 7, 0, 0]], 96, [])) == [Part(0, 0, [5]), Part(0, 2, [6, 7])]


def test_a_full_group_with_a_hole_is_not_stored() -> None:
    assert list(cursor(FULL).to_store([[5, 0, 6]], 48, [])) == []


def test_windows_keep_the_pages_before_each_end_only() -> None:
    """Hits end at multiples of 64 tokens, and a window of 17 tokens needs one page before its end."""
    stored = cursor(ServedGroup(0, 16, 100, "sliding_window", 17), hit_tokens=64)
    assert list(stored.to_store([list(range(1, 10))], 144, [])) == [Part(0, 3, [4]), Part(0, 7, [8])]


def test_states_are_named_where_the_engine_hands_them_over() -> None:
    stored = cursor(FULL, STATE)
    handed_over = [(2, 9, 32), (2, 5, 40), (2, 0, 16), (1, 4, 16), (2, 6, 64)]
    parts = list(stored.to_store([[1, 2, 3], [], [4, 4, 4]], 48, handed_over))
    assert parts == [Part(0, 0, [1, 2, 3]), Part(1, 1, [9])], "a state within a page, or ahead of the hashes, is left"


def test_a_page_of_draft_layers_is_stored_when_the_next_one_is_full() -> None:
    stored = cursor(ServedGroup(0, 16, 100, eagle=True))
    assert list(stored.to_store([[1, 2, 3]], 47, [])) == [Part(0, 0, [1])]
    assert list(stored.to_store([[1, 2, 3]], 48, [])) == [Part(0, 0, [1, 2])]


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("attention", ["full", "sliding_window"])
def test_no_page_of_a_longer_table_is_stored_before_it_is_full(attention: str, eagle: bool) -> None:
    """vLLM allocates pages ahead of the computed tokens."""
    for tokens in range(0, 64, 4):
        stored = cursor(ServedGroup(0, 16, 100, attention, 33, eagle=eagle))
        parts = list(stored.to_store([[1, 2, 3, 4, 5, 6]], tokens, []))
        full = max(tokens // 16 - eagle, 0)
        assert [page for part in parts for page in part.pages] == list(range(1, 1 + full))
        assert stored.is_behind(tokens) == (full > 0)


@pytest.mark.parametrize("table", [[1, 2], [1, 2, 0]])
def test_a_load_without_a_place_for_a_page_is_not_begun(table: list[int]) -> None:
    groups = Served((FULL, WINDOW), 16, 16, whole=True)
    assert groups.to_load([[1, 2, 3], table], 0, 48) is None
    assert groups.to_load([table, [4, 5, 6]], 0, 48) is None
    parts = groups.to_load([[1, 2, 3], [0, 5, 6]], 16, 48)
    assert parts == [Part(0, 1, [2, 3]), Part(1, 1, [5, 6])]
    assert groups.rank_bytes(parts) == 400
