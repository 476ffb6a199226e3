"""Tests of checksums of pages, and of the table that keeps them."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_memory import LAYOUTS, PAGES, fill, layers

from kvferry import checksums
from kvferry.checksum_table import LOST, ChecksumTable, Known, Unusable, mark_of, value_of
from kvferry.checksums import PageChecksums, RankChecksums

ALL = torch.arange(PAGES)
KEY, OTHER = b"k" * 16, b"o" * 16
MARK, FOREIGN = mark_of(1 << 40), mark_of(1 << 50)


def sums(tensors: list[torch.Tensor], pages: int = PAGES) -> list[int]:
    return PageChecksums([(tensors, pages)]).of(0, torch.arange(pages)).tolist()


def memory(count: int = 2, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    return [
        torch.randint(-99, 99, (PAGES, 2, 4, 8), generator=chance).to(dtype=torch.int16).to(dtype) for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_each_bit_of_a_page_changes_its_checksum_alone(dtype: torch.dtype) -> None:
    tensors = memory(dtype=dtype)
    before, seen = sums(tensors), set()
    content = tensors[1].view(torch.uint8).reshape(PAGES, -1)
    for byte, bit in itertools.product(range(0, content.shape[1], 5), range(8)):
        content[3, byte] ^= 1 << bit
        after = sums(tensors)
        content[3, byte] ^= 1 << bit
        assert [page for page in range(PAGES) if after[page] != before[page]] == [3]
        seen.add(after[3])
    assert len(seen) == 8 * len(range(0, content.shape[1], 5)), "two changes have one checksum"
    assert sums(tensors) == before


def test_changes_of_many_words_that_cancel_in_a_plain_sum_are_found() -> None:
    """The highest bits of two words; the same difference added to one word and taken from another."""
    (tensor,) = memory(1)
    (before, *_) = sums([tensor])
    words = tensor.view(torch.uint8).reshape(PAGES, -1).view(torch.int32)
    for first, second in itertools.combinations(range(words.shape[1]), 2):
        for change in (-(1 << 31), 1 << 20):
            words[0, first] += change
            words[0, second] -= change
            assert sums([tensor])[0] != before
            words[0, first] -= change
            words[0, second] += change
    assert sums([tensor])[0] == before


def test_swapped_pages_layers_rows_and_words_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "ROW_WORDS", 4)
    first, second = memory()
    before = sums([first, second])
    assert len(set(before)) == PAGES
    assert not set(sums([second, first])) & set(before), "layers"
    for step in (1, 4):
        words = first.clone().view(torch.uint8).reshape(PAGES, -1).view(torch.int32)
        words[2, : 2 * step] = torch.cat((words[2, step : 2 * step], words[2, :step]))
        after = sums([words.view(torch.uint8).reshape(first.shape), second])
        assert [page for page in range(PAGES) if after[page] != before[page]] == [2]
    first[2, -1, -1, -1] ^= 1
    after = sums([first, second])
    assert [page for page in range(PAGES) if after[page] != before[page]] == [2], "the last row"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_order_of_the_axes_in_memory_does_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with slices and rows that are shorter than a page."""
    found = []
    for number, order in enumerate(LAYOUTS.values()):
        monkeypatch.setattr(checksums, "GATHER_BYTES", {"cpu": 64 << 3 * number})
        tensors = layers(order, dtype)
        fill(tensors, seed=1)
        found.append(sums(list(tensors.values())))
    assert found == [found[0]] * len(LAYOUTS)
    assert len(set(found[0])) == PAGES


def test_a_page_may_consist_of_several_kernel_blocks_and_of_any_number_of_bytes() -> None:
    blocks = torch.randint(0, 255, (2 * PAGES, 3, 3), dtype=torch.uint8)
    before = sums([blocks])
    blocks[5, 2, 2] ^= 1
    after = sums([blocks])
    assert [page for page in range(PAGES) if after[page] != before[page]] == [2]


def test_groups_have_checksums_of_their_own() -> None:
    first, second = memory()
    pages = PageChecksums([([first], PAGES), ([second], PAGES)])
    assert pages.of(1, ALL).tolist() == sums([second])
    assert pages.of(0, torch.tensor([4, 1])).tolist() == [sums([first])[page] for page in (4, 1)]


@pytest.mark.parametrize("order", LAYOUTS.values())
def test_a_rank_writes_zeros_to_the_pages_of_a_group_alone(order: tuple[int, ...]) -> None:
    tensors = [*layers(order, torch.float32).values()]
    for tensor in tensors:
        tensor.fill_(float("nan"))
    others = memory(1)
    before = sums(others)
    rank = RankChecksums(PageChecksums([(tensors, PAGES), (others, PAGES)]), rank=0, shard=0)
    rank.zero([(0, [3, 5])])
    for tensor in tensors:
        zero = [page for page in range(PAGES) if not tensor[page].any()]
        assert zero == [3, 5]
        assert tensor[[0, 4, PAGES - 1]].isnan().all()
    assert sums(others) == before


def test_a_rank_reports_checksums_in_the_order_of_the_request() -> None:
    first, second = memory()
    rank = RankChecksums(PageChecksums([([first], PAGES), ([second], PAGES)]), rank=3, shard=1)
    rank.take([(8, [(1, [2, 0]), (0, [5])]), (9, [(0, [1])])])
    of_first, of_second = sums([first]), sums([second])
    results = rank.results()
    assert [[(rank, shard) for rank, (shard, _) in each.items()] for each in results.values()] == [[(3, 1)], [(3, 1)]]
    taken = {request: list(memoryview(found[3][1] or b"").cast("q")) for request, found in results.items()}
    assert taken == {8: [of_second[2], of_second[0], of_first[5]], 9: [of_first[1]]}
    assert rank.results() == {}


def test_a_rank_that_cannot_take_checksums_reports_so(caplog: pytest.LogCaptureFixture) -> None:
    rank = RankChecksums(PageChecksums([(memory(1), PAGES)]), rank=0, shard=0)
    rank.take([(1, [(0, [PAGES])])])
    rank.take([(2, [(0, [1])])])
    assert rank.results() == {1: {0: (0, None)}, 2: {0: (0, None)}}
    assert caplog.text.count("checksums of pages cannot be taken") == 1
    without = RankChecksums(None, rank=1, shard=1)
    without.take([(3, [(0, [1])])])
    assert without.results() == {3: {1: (1, None)}}


def test_checksums_that_a_device_does_not_finish_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankChecksums(PageChecksums([(memory(1), PAGES)]), rank=0, shard=0)
    monkeypatch.setattr(checksums, "UNFINISHED_MAX", 2)
    over = False
    take = rank._take

    def slow(*given: object) -> object:
        taken = take(*given)  # type: ignore[arg-type]
        taken.over = lambda: over
        return taken

    monkeypatch.setattr(rank, "_take", slow)
    rank.take([(request, [(0, [1])]) for request in range(4)])
    assert set(rank.results()) == {2, 3}
    over = True
    assert set(rank.results()) == {0, 1}


def test_elements_of_an_unknown_size_are_refused() -> None:
    with pytest.raises(ValueError, match="elements of 16 bytes"):
        PageChecksums([([torch.zeros(4, 2, dtype=torch.complex128)], 4)])


# The table.


@pytest.fixture
def table(tmp_path: Path) -> ChecksumTable:
    return ChecksumTable(tmp_path / "table", 1)


def settle(table: ChecksumTable, *values: int, first: bool = False, over: bool = True, lost: bool = False) -> Known:
    with table.locked() as locked:
        assert locked
        table.settle(KEY, MARK, values, first=first, over=over, lost=lost)
    return table.look(KEY)


def mark(table: ChecksumTable, mark: int = MARK, key: bytes = KEY) -> None:
    with table.locked() as locked:
        assert locked
        table.mark(key, mark)


def known(*values: int, marks: tuple[int, ...] = ()) -> Known:
    return Known(frozenset(values), frozenset(marks))


def test_an_entry_begins_with_the_first_content_and_gets_further_ones(table: ChecksumTable) -> None:
    mark(table)
    assert table.look(KEY) == known(marks=(MARK,))
    assert settle(table, 5, over=False) == known(marks=(MARK,)), "kvferry may have another content"
    assert settle(table, 5, first=True) == known(5)
    assert settle(table, 6) == known(5), "without a mark, an entry is another one"
    mark(table)
    assert settle(table, 6, over=False) == known(5, 6), "the content is known, whatever the leader answers"
    assert table.look(OTHER) == known()


def test_an_entry_without_a_content_goes_with_its_mark(table: ChecksumTable) -> None:
    mark(table)
    mark(table, FOREIGN)
    assert settle(table, 5) == known(marks=(FOREIGN,))
    with table.locked():
        table.settle(KEY, FOREIGN, [7], first=False, over=True, lost=False)
    assert table.look(KEY) == known()


def test_a_content_that_is_not_known_marks_an_entry_forever(table: ChecksumTable) -> None:
    mark(table)
    assert settle(table, 5, first=True, lost=True) == known(5, marks=(LOST,))
    mark(table)
    assert settle(table, 6, first=True) == known(5, 6, marks=(LOST,))


def test_an_entry_with_too_many_contents_is_marked_forever(table: ChecksumTable) -> None:
    for value in range(1, 9):
        mark(table)
        found = settle(table, value, first=True)
        assert (LOST in found.marks) == (value > 5 - 1), found
        assert len(found.values) + len(found.marks) <= 5


def test_a_torn_entry_is_absent(table: ChecksumTable) -> None:
    mark(table)
    settle(table, 5, first=True)
    at, _ = table._find(KEY) or (0, [])
    for byte in (16, 24, 33, table._entry.size - 1):
        kept = table._map[at + byte]
        table._map[at + byte] = kept ^ 1
        # The time of the entry is not covered.
        assert table.look(KEY) == (known(5) if byte == 16 else known())
        table._map[at + byte] = kept
    assert table.look(KEY) == known(5)
    table._map[at + 24] ^= 1
    mark(table)
    assert settle(table, 6, first=True) == known(6)


def test_a_full_bucket_loses_the_entry_that_was_written_first(tmp_path: Path) -> None:
    table = ChecksumTable(tmp_path / "small", 1, entries=8)
    keys = [bytes([number]) * 16 for number in range(1, 10)]
    for key in keys:
        mark(table, key=key)
    assert [bool(table.look(key).marks) for key in keys] == [False, *[True] * 8]
    mark(table, key=keys[1])
    mark(table, key=keys[0])
    assert [bool(table.look(key).marks) for key in keys] == [True, True, False, *[True] * 6]


def test_values_of_shards_differ_and_are_no_marks() -> None:
    for checksum in (0, 1, -1, -(1 << 63), (1 << 63) - 1, 12345678901234):
        found = {value_of(checksum, shard) for shard in range(64)}
        assert len(found) == 64
        assert all(0 < value < 1 << 63 for value in found)
    assert mark_of(0) != LOST != mark_of((1 << 64) - 1)
    assert mark_of(0) >= 1 << 63


PROGRAM = """
import sys
from pathlib import Path
from kvferry.checksum_table import ChecksumTable
table = ChecksumTable(Path(sys.argv[1]), 1)
with table.locked() as locked:
    assert locked
    table.mark(b"k" * 16, 1 << 63)
    table.settle(b"k" * 16, 1 << 63, [77], first=True, over=True, lost=False)
    print("locked", flush=True)
    sys.stdin.readline()
print("open", flush=True)
sys.stdin.readline()
"""


def test_processes_share_a_table_and_wait_for_no_lock(tmp_path: Path) -> None:
    table = ChecksumTable(tmp_path / "table", 1)
    other = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(table.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "locked\n"
        with table.locked() as locked:
            assert not locked
        assert table.look(KEY) == known(77), "readers need no lock"
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "open\n"
        with table.locked() as locked:
            assert locked
    finally:
        other.kill()
        other.wait()


def test_a_table_belongs_to_its_user_alone(table: ChecksumTable, tmp_path: Path) -> None:
    assert table.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["table"]
    (tmp_path / "link").symlink_to(table.path)
    with pytest.raises(Unusable, match="link"):
        ChecksumTable(tmp_path / "link", 1)
    with pytest.raises(Unusable, match="missing"):
        ChecksumTable(tmp_path / "missing" / "table", 1)


def test_a_table_of_another_format_is_refused(table: ChecksumTable) -> None:
    with pytest.raises(Unusable, match="another format or number of ranks: remove it"):
        ChecksumTable(table.path, 2)
    os.pwrite(table._fd, b"x", 0)
    with pytest.raises(Unusable, match="remove it"):
        ChecksumTable(table.path, 1)


def test_a_table_whose_file_is_replaced_is_noticed(table: ChecksumTable) -> None:
    assert table.is_current()
    table.path.unlink()
    assert not table.is_current()
    ChecksumTable(table.path, 1)
    assert not table.is_current()
