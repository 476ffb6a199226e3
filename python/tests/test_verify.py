"""Tests of verify mode on the scheduler's side, event by event, with simulated ranks and a simulated leader."""

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_scheduler import PAGE_TOKENS, RANKS, Engine, Request, found, refused, request
from vllm.v1.request import RequestStatus

from kvferry import wire
from kvferry.checksum_table import LOST
from kvferry.client import Failure
from kvferry.served import Part, Served, ServedGroup
from kvferry.vllm import verify
from kvferry.vllm.metadata import RankReport, StepMetadata
from kvferry.vllm.verify import Verification
from kvferry.wire import Code


class Verified(Engine):
    """An engine in verify mode. ``memory`` is what each page of the device holds, on all ranks."""

    def __init__(self, directory: Path, *, served: Served | None = None, percent: int = 100):
        super().__init__(served, socket_dir=directory, verify=percent)
        self.memory: dict[int, str] = {}
        #: Contents of one rank that differ from those of the others.
        self.of_rank: dict[tuple[int, int], str] = {}
        self.orders: list[tuple[int, Any]] = []

    @property
    def verification(self) -> Verification:
        assert self.side.verification is not None
        return self.side.verification

    def step(self, *given: Any, **named: Any) -> StepMetadata:
        step = super().step(*given, **named)
        self.orders += step.checksums
        return step

    def report(self, *ranks: int, fault: str = "", takes: bool = True) -> set[str]:
        """The ranks report the checksums of all orders so far; returns the loads that vLLM is told of at once."""
        report = RankReport({}, fault)
        for rank in ranks or range(RANKS):
            checksums = {}
            for number, parts in self.orders:
                sums = [_sum(self._held(rank, page)) for _, pages in parts for page in pages]
                checksums[number] = {rank: (rank, struct.pack(f"<{len(sums)}q", *sums) if takes else None)}
            report = report.aggregate(RankReport({}, checksums=checksums))
        if not ranks or RANKS - 1 in ranks:
            self.orders = []
        output = SimpleNamespace(kv_connector_worker_meta=report, finished_recving=None)
        self.side.ranks_reported(output)  # type: ignore[arg-type]
        return output.finished_recving or set()

    def _held(self, rank: int, page: int) -> str:
        return self.of_rank.get((rank, page), self.memory.get(page, "nothing"))

    def counts(self) -> tuple[int, int, int]:
        verification = self.verification
        return verification.verified_pages, verification.unverified_pages, verification.verify_mismatches

    # What the tests repeat.

    def computes(self, name: str, pages: list[int], contents: str, answer: Any = None) -> Request:
        """A prompt is computed into these pages and stored; each character is the content of a page."""
        asking = self.began(name, pages)
        self.memory.update(zip(pages, contents, strict=True))
        self.report()
        self.answers(answer or wire.StoreAnswer(len(pages), 0))
        return asking

    def began(self, name: str, pages: list[int]) -> Request:
        asking = request(name, len(pages) * PAGE_TOKENS + 1)
        found(self, 0)
        self.side.matched_tokens(asking, 0)
        self.allocate(asking, [*pages, 99], 0)
        self.step({asking: asking.num_tokens})
        return asking

    def answers(self, answer: Any) -> None:
        self.leader.last(wire.Store).end(answer)
        self.step()

    def loads(self, name: str, pages: list[int]) -> Request:
        """A request begins to load a prompt of these pages."""
        asking = request(name, len(pages) * PAGE_TOKENS + 1)
        found(self, len(pages))
        tokens = self.side.matched_tokens(asking, 0)
        assert tokens == len(pages) * PAGE_TOKENS
        self.allocate(asking, [*pages, 98], tokens)
        return asking

    def loaded(self, contents: str, pages: list[int]) -> StepMetadata:
        """The load ends, and has brought these contents."""
        self.memory.update(zip(pages, contents, strict=True))
        self.leader.last(wire.Load).end(wire.LoadAnswer(len(pages)))
        return self.step()

    def check(self, name: str, contents: str, pages: list[int]) -> StepMetadata:
        """Loads a prompt. Returns the next step, which reports failed pages."""
        self.loads(name, pages)
        step = self.loaded(contents, pages)
        if name in step.loaded:
            return step
        now = self.report()
        return StepMetadata(loaded=sorted(now)) if now else self.step()


def _sum(content: str) -> int:
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little", signed=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Verified]:
    engine = Verified(tmp_path)
    yield engine
    engine.side.close()


def another(engine: Verified) -> Verified:
    """Another engine of the same host, with the same table; also the engine after its restart."""
    return Verified(engine.verification._path.parent)


def test_pages_that_hold_what_was_stored_are_verified(engine: Verified) -> None:
    engine.computes("a", [1, 2, 3], "xyz")
    step = engine.check("a", "xyz", [4, 5, 6])
    assert (step.loaded, step.failed_pages) == (["a"], [])
    assert engine.counts() == (3, 0, 0)


def test_vllm_is_told_of_a_load_only_after_all_ranks_have_reported(engine: Verified) -> None:
    engine.computes("a", [1], "x")
    engine.loads("a", [4])
    step = engine.loaded("x", [4])
    assert (step.loaded, [parts for _, parts in step.checksums]) == ([], [[(0, [4])]])
    assert engine.step().loaded == []
    assert engine.report(0) == set()
    assert engine.step().loaded == []
    assert engine.report(1) == {"a"}
    assert engine.side._loads.names() == set()


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_wrong_page_is_computed_counted_logged_and_removed(
    engine: Verified, rank: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    asking = engine.computes("a", [1, 2, 3], "xyz")
    if rank is not None:
        engine.of_rank[rank, 5] = "wrong"
    before = engine.step().written_through
    step = engine.check("a", "xyz" if rank is not None else "x?z", [4, 5, 6])
    assert (step.loaded, step.failed, step.failed_pages) == (["a"], [], [5])
    assert step.zeroed == [(0, [5])], "NaN in a page that is computed again may reach other tokens"
    assert step.written_through > before, "a load into the page waits for the zeros"
    assert engine.counts() == (2, 0, 1)
    for number in range(RANKS):
        text = f"rank {number}: 1 of the pages 1 to 1 of group 0 of request a do not hold what was stored"
        assert (text in caplog.text) == (rank in (None, number))
    page_hash = asking.block_hashes[1]
    assert page_hash.hex() not in caplog.text
    assert page_hash.decode() not in caplog.text
    reset = engine.leader.last(wire.Reset).message
    store = engine.leader.last(wire.Lookup).message
    assert (reset.namespace, reset.hash_bytes, reset.hashes) == (store.namespace, 32, page_hash)
    assert engine.side.matched_tokens(request("a", 13), 0) == 0 or engine.leader.count(wire.Load) == 1


def test_a_wrong_page_of_several_groups_is_computed_with_its_whole_request(tmp_path: Path) -> None:
    groups = tuple(ServedGroup(number, PAGE_TOKENS, 1000) for number in range(2))
    engine = Verified(tmp_path, served=Served(groups, PAGE_TOKENS, PAGE_TOKENS, whole=True))
    asking = request("a", 9)
    found(engine, 0)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, ([1, 2, 3], [4, 5, 6]), 0)
    engine.step({asking: 9})
    engine.memory = dict(zip((1, 2, 4, 5), "xyuv", strict=True))
    engine.report()
    engine.answers(wire.StoreAnswer(4, 0))
    again = request("a", 9)
    found(engine, 2)
    tokens = engine.side.matched_tokens(again, 0)
    engine.allocate(again, ([11, 12, 13], [14, 15, 16]), tokens or 0)
    engine.memory |= dict(zip((11, 12, 14, 15), "xyvu", strict=True))
    engine.leader.last(wire.Load).end(wire.LoadAnswer(4))
    engine.step()
    engine.report()
    step = engine.step()
    assert (step.loaded, step.failed, step.failed_pages) == (["a"], ["a"], [])
    assert step.zeroed == [(1, [14]), (1, [15])]
    assert engine.counts() == (2, 0, 2)
    engine.side.close()


def test_a_removal_is_retried_until_the_leader_confirms_it(engine: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.removals.REMOVAL_LIMIT_S", 0.0)
    asking = engine.computes("a", [1, 2], "xy")
    engine.check("a", "??", [4, 5])
    first = engine.leader.last(wire.Reset)
    assert first.message.hashes == b"".join(asking.block_hashes[:2])
    first.end(Failure(Code.LEASED, "a load holds pages", reported=True, retry=True))
    removed = []
    for _ in range(2):
        engine.step()
        reset = engine.leader.last(wire.Reset)
        removed.append(reset.message.hashes)
        reset.end(wire.ResetAnswer(1))
    engine.step()
    assert sorted(removed) == sorted(asking.block_hashes[:2]), "one by one: one that is always held blocks no other"
    assert engine.leader.count(wire.Reset) == 3
    assert len(engine.verification._removals) == 0


def test_pages_that_were_present_get_no_entry(engine: Verified) -> None:
    """kvferry may have other bytes, whose checksum nobody knows."""
    engine.computes("a", [1, 2], "xy", wire.StoreAnswer(0, 2))
    engine.computes("b", [1, 2], "xy", wire.StoreAnswer(1, 1))
    assert engine.check("a", "uv", [4, 5]).failed_pages == []
    assert engine.check("b", "uv", [6, 7]).failed_pages == []
    assert engine.counts() == (0, 4, 0)


@pytest.mark.parametrize("answer", [wire.StoreAnswer(0, 1), wire.StoreAnswer(1, 0)])
def test_a_page_with_other_bits_is_right_if_its_store_copied_it(engine: Verified, answer: Any) -> None:
    """Pages that were present may come from a load that was not verified."""
    engine.computes("a", [1], "x")
    other = another(engine)
    other.computes("a", [1], "X", answer)
    for loads in (engine, other):
        assert loads.check("a", "x", [4]).failed_pages == []
        if answer.stored_pages:
            assert loads.check("a", "X", [5]).failed_pages == []
        # A request whose load failed is computed, and loads nothing more.
        assert loads.check("a", "?" if answer.stored_pages else "X", [6]).failed_pages == [6]


def test_a_restarted_engine_verifies_earlier_pages(engine: Verified) -> None:
    engine.computes("a", [1], "x")
    later = another(engine)
    assert later.check("a", "?", [4]).failed_pages == [4]


def test_a_content_that_the_leader_has_before_its_checksum_is_known_is_not_wrong(engine: Verified) -> None:
    """Evicted and stored again with other bits: another engine loads the page before any report about the store."""
    engine.computes("a", [1], "x")
    other = another(engine)
    again = other.began("a", [1])
    assert again is not None
    other.memory[1] = "X"
    assert engine.check("a", "X", [4]).failed_pages == []
    assert engine.counts() == (0, 1, 0)
    other.report()
    assert engine.check("a", "X", [4]).failed_pages == []
    assert engine.counts() == (0, 2, 0)
    other.answers(wire.StoreAnswer(1, 0))
    assert engine.check("a", "X", [4]).failed_pages == []
    assert engine.check("a", "?", [4]).failed_pages == [4]
    assert engine.counts() == (1, 2, 1)


def test_a_page_is_not_marked_any_longer_once_its_checksum_is_a_known_one(engine: Verified) -> None:
    """Otherwise no page that many requests store would be verified by another engine."""
    engine.computes("a", [1], "x")
    other = another(engine)
    other.began("a", [1])
    other.memory[1] = "x"
    other.report()
    assert engine.check("a", "?", [4]).failed_pages == [4]


def test_a_load_waits_for_stores_of_its_own_engine_that_have_not_reported(engine: Verified) -> None:
    engine.computes("a", [1], "x")
    engine.began("a", [2])
    engine.memory[2] = "X"
    (store,), engine.orders = engine.orders, []
    engine.loads("b", [4])
    assert engine.leader.count(wire.Load) == 1
    engine.loads("a", [5])
    step = engine.loaded("X", [5])
    assert step.loaded == []
    assert engine.report() == set(), "the content may be that of the store"
    engine.orders = [store]
    assert engine.report() == set(), "the leader has not answered what it copied"
    stores = [asked for asked in engine.leader.asked if isinstance(asked.message, wire.Store)]
    stores[-1].end(wire.StoreAnswer(1, 0))
    assert engine.step().loaded == ["a"]
    assert engine.counts() == (1, 0, 0)


def test_a_wrong_page_is_found_in_spite_of_stores_that_follow_each_other(engine: Verified) -> None:
    """Pages that many requests share are under some store all the time."""
    engine.computes("a", [1], "x")
    engine.began("a", [2])
    engine.memory[2] = "x"
    (store,), engine.orders = engine.orders, []
    engine.loads("a", [5])
    engine.loaded("?", [5])
    (check,), engine.orders = engine.orders, []
    engine.began("a", [3])
    engine.orders = [check]
    assert engine.report() == set()
    engine.orders = [store]
    engine.report()
    assert engine.step().failed_pages == [5]
    assert engine.counts() == (0, 0, 1)


def test_an_entry_that_is_lost_during_a_load_makes_no_page_wrong(engine: Verified) -> None:
    """The load brings the content from before; the page was evicted since, and stored again with other bits."""
    engine.computes("a", [1], "x")
    engine.loads("a", [4])
    load = engine.leader.last(wire.Load)
    table = engine.verification._usable()
    assert table is not None
    with table.locked():
        for page in engine.verification._chosen(engine.side.track(request("a", 5)), [Part(0, 0, [9])]):
            at, _ = table._find(page.key) or (0, [])
            table._map[at : at + table._entry.size] = bytes(table._entry.size)
    engine.computes("a", [2], "X")
    engine.memory[4] = "x"
    load.end(wire.LoadAnswer(1))
    engine.step()
    assert engine.report() == {"a"}
    assert engine.counts() == (1, 0, 0)


def test_the_mark_of_a_dead_engine_leaves_a_page_unverified(engine: Verified) -> None:
    engine.computes("a", [1], "x")
    dead = another(engine)
    dead.began("a", [1])
    dead.side.close()
    assert engine.check("a", "?", [4]).failed_pages == []
    assert engine.check("a", "x", [4]).failed_pages == []
    assert engine.counts() == (1, 1, 0)


@pytest.mark.parametrize(
    ("answer", "lost"),
    [(wire.StoreAnswer(0, 1), False), (wire.StoreAnswer(1, 0), True), (refused(), True)],
)
def test_a_store_without_checksums_may_have_brought_an_unknown_content(
    engine: Verified, answer: Any, lost: bool
) -> None:
    engine.computes("a", [1], "x")
    engine.began("a", [2])
    engine.report(takes=False)
    engine.answers(answer)
    assert engine.check("a", "?", [4]).failed_pages == ([] if lost else [4])
    (page,) = verify.Verification._chosen(engine.verification, engine.side.track(request("a", 5)), [Part(0, 0, [9])])
    table = engine.verification._usable()
    assert table is not None
    assert (LOST in table.look(page.key).marks) == lost


def test_a_store_whose_outcome_is_unknown_adds_its_content(engine: Verified) -> None:
    """Its copies end on the ranks; the leader may have published the pages before."""
    engine.computes("a", [1], "x")
    engine.began("a", [2])
    engine.memory[2] = "X"
    engine.report()
    store = engine.leader.last(wire.Store)
    store.end(Failure(Code.DEADLINE, "nobody knows", reported=False))
    engine.step()
    engine.side._copies.ranks_know({store.id: RANKS})
    engine.step()
    assert engine.check("a", "X", [4]).failed_pages == []
    assert engine.check("a", "?", [4]).failed_pages == [4]
    assert not engine.verification._open


def test_a_first_store_is_divided_where_the_request_begins_to_compute(engine: Verified) -> None:
    engine.computes("a", [1, 2], "xy")
    asking = request("a", 4 * PAGE_TOKENS + 1)
    found(engine, 0)
    engine.side.matched_tokens(asking, 2 * PAGE_TOKENS)
    engine.allocate(asking, [1, 2, 3, 4, 99], 0)
    asking.num_computed_tokens = 2 * PAGE_TOKENS
    engine.step({asking: 2 * PAGE_TOKENS + 1})
    given, own = [asked for asked in engine.leader.asked if isinstance(asked.message, wire.Store)][-2:]
    assert [(part.first_page, part.pages) for part in given.message.parts] == [(0, [[1, 2]])]
    assert [(part.first_page, part.pages) for part in own.message.parts] == [(2, [[3, 2]])]
    assert own.message.more_hashes == b""
    engine.memory |= {3: "u", 4: "v"}
    engine.report()
    given.end(wire.StoreAnswer(0, 2))
    own.end(wire.StoreAnswer(2, 0))
    engine.step()
    assert engine.check("a", "xyu?", [5, 6, 7, 8]).failed_pages == [8]


def test_a_store_is_divided_behind_pages_that_are_computed_again(tmp_path: Path) -> None:
    """kvferry has pages of one group, and none of another that a hit needs."""
    groups = (ServedGroup(0, PAGE_TOKENS, 1000), ServedGroup(1, PAGE_TOKENS, 1000, "sliding_window", PAGE_TOKENS))
    engine = Verified(tmp_path, served=Served(groups, PAGE_TOKENS, PAGE_TOKENS, whole=True))

    def computes(pages: list[int], window: list[int]) -> list[Any]:
        asking = request("a", len(pages) * PAGE_TOKENS + 1)
        found(engine, 0)
        engine.side.matched_tokens(asking, 0)
        engine.allocate(asking, ([*pages, 99], [*window, 98]), 0)
        before = engine.leader.count(wire.Store)
        engine.step({asking: asking.num_tokens})
        engine.report()
        return [asked for asked in engine.leader.asked if isinstance(asked.message, wire.Store)][before:]

    engine.memory = dict(zip((1, 2, 3, 4, 5, 6, 7, 8), "xyuvxyuv", strict=True))
    (first,) = computes([1, 2], [5, 6])
    first.end(wire.StoreAnswer(4, 0))
    engine.step()
    again, new = computes([1, 2, 3, 4], [0, 0, 7, 8])
    assert [part.pages for part in again.message.parts] == [[[1, 2]]]
    again.end(wire.StoreAnswer(0, 2))
    new.end(wire.StoreAnswer(4, 0))
    engine.step()
    asking = request("a", 4 * PAGE_TOKENS + 1)
    found(engine, 4)
    tokens = engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, ([11, 12, 13, 14, 99], [0, 0, 0, 18, 98]), tokens or 0)
    engine.memory |= dict(zip((11, 12, 13, 14, 18), "xyuvv", strict=True))
    engine.leader.last(wire.Load).end(wire.LoadAnswer(5))
    engine.step()
    engine.report()
    assert engine.counts() == (5, 0, 0)
    engine.side.close()


def test_pages_are_chosen_by_their_hashes(tmp_path: Path) -> None:
    chosen = []
    for percent in (1, 30, 100):
        engine = Verified(tmp_path, percent=percent)
        asking = request("many", 4000)
        asking.block_hashes = [hashlib.sha256(bytes(each)).digest() for each in asking.block_hashes]
        parts = [Part(0, 0, list(range(1000)))]
        found = engine.verification._chosen(engine.side.track(asking), parts)
        chosen.append({page.position for page in found})
        assert {page.position for page in engine.verification._chosen(engine.side.track(asking), parts)} == chosen[-1]
    assert chosen[0] < chosen[1] < chosen[2] == set(range(1000))
    assert 2 <= len(chosen[0]) <= 25
    assert 240 <= len(chosen[1]) <= 360


def test_namespaces_and_groups_have_entries_of_their_own(tmp_path: Path) -> None:
    groups = tuple(ServedGroup(number, PAGE_TOKENS, 1000) for number in range(2))
    engine = Verified(tmp_path, served=Served(groups, PAGE_TOKENS, PAGE_TOKENS))
    tracked = engine.side.track(request("a", 9))
    keys = set()
    for namespace in (b"one", b"two"):
        tracked.namespace = namespace
        parts = [Part(0, 0, [1, 2]), Part(1, 0, [1, 2])]
        keys |= {page.key for page in engine.verification._chosen(tracked, parts)}
    assert len(keys) == 8


def test_nothing_is_stored_while_the_table_cannot_be_marked(engine: Verified) -> None:
    table = engine.verification._usable()
    assert table is not None
    other = os.open(table.path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    asking = engine.began("a", [1, 2])
    assert engine.leader.count(wire.Store) == 0
    assert engine.pool.held() == []
    os.close(other)
    asking.grow(PAGE_TOKENS)
    engine.tables["a"] = [1, 2, 3, 99]
    engine.step({asking: PAGE_TOKENS})
    assert engine.leader.last(wire.Store).message.parts[0].pages == [[1, 3]], "the pages are named later"


def test_a_table_that_is_locked_when_a_store_ends_is_written_later(engine: Verified) -> None:
    engine.began("a", [1])
    engine.memory[1] = "x"
    table = engine.verification._usable()
    assert table is not None
    other = os.open(table.path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    engine.report()
    engine.answers(wire.StoreAnswer(1, 0))
    os.close(other)
    assert engine.verification._open
    engine.step()
    assert not engine.verification._open
    assert engine.check("a", "?", [4]).failed_pages == [4]


def test_a_removed_table_is_made_again_and_a_bad_one_is_named(
    engine: Verified, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verify, "LOOK_S", 0.0)
    engine.computes("a", [1], "x")
    path = engine.verification._path
    path.unlink()
    assert engine.check("a", "?", [4]).failed_pages == []
    engine.computes("b", [2], "y")
    assert engine.check("b", "?", [4]).failed_pages == [4]
    path.write_text("something else")
    path.rename(path.with_suffix(".old"))
    path.write_text("something else")
    stores = engine.leader.count(wire.Store)
    engine.began("c", [3])
    assert engine.leader.count(wire.Store) == stores
    assert caplog.text.count("pages are neither stored nor verified, since verify is set") == 1
    assert "remove it" in caplog.text


@pytest.mark.parametrize("way", ["fault", "deadline", "none"])
def test_a_load_is_reported_although_a_rank_gives_no_checksums(
    engine: Verified, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.computes("a", [1], "x")
    if way == "deadline":
        monkeypatch.setattr(verify, "CHECKSUMS_LIMIT_S", 0.0)
    engine.loads("a", [4])
    engine.loaded("x", [4])
    if way == "deadline":
        engine.report(0)
        # The pages go the way of loads that end outside of a step's results.
        now = set(engine.step().loaded)
    elif way == "fault":
        engine.orders = []
        now = engine.report(fault="wait_for_save")
    else:
        now = engine.report(takes=False)
    assert now <= {"a"}
    assert engine.side._loads.names() == set()
    assert engine.counts() == (0, 1, 0)


def test_a_fault_of_this_module_keeps_no_load(engine: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.computes("a", [1], "x")
    engine.loads("a", [4])
    monkeypatch.setattr(engine.verification, "_load_turn", lambda *_: 1 / 0)
    assert engine.loaded("x", [4]).loaded == ["a"]
    assert engine.began("b", [2]) is not None
    assert engine.leader.count(wire.Store) == 1, "pages cannot be recorded any longer"


def test_a_request_that_is_aborted_while_its_pages_are_verified_is_reported(engine: Verified) -> None:
    engine.computes("a", [1], "x")
    aborted = engine.loads("a", [4])
    engine.loaded("?", [4])
    aborted.status = RequestStatus.FINISHED_ABORTED
    engine.side.finished(aborted)  # type: ignore[arg-type]
    assert engine.side.copying(), "an idle engine must run the steps that bring the checksums"
    engine.report()
    assert engine.step().loaded == ["a"]
    assert not engine.side.copying()
    assert not engine.side._tracked.get("a")
    assert engine.counts() == (0, 0, 1)


def test_a_reset_while_pages_are_verified_fails_all_of_them(engine: Verified) -> None:
    engine.computes("a", [1, 2], "xy")
    asking = engine.loads("a", [4, 5])
    asking.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.loaded("x?", [4, 5])
    assert engine.side.reset()
    assert engine.report() == set()
    step = engine.step()
    assert (step.loaded, sorted(step.failed_pages), step.zeroed) == (["a"], [4, 5], [(0, [5])])


def test_pages_of_a_preempted_request_are_held_until_their_store_is_over(engine: Verified) -> None:
    """So the step that takes their checksums reads what the store copies."""
    engine.began("a", [1, 2])
    engine.step(preempted=("a",))
    assert engine.pool.held() == [1, 2]
    engine.memory |= {1: "x", 2: "y"}
    engine.report()
    engine.answers(wire.StoreAnswer(2, 0))
    assert engine.pool.held() == []
    assert engine.check("a", "x?", [4, 5]).failed_pages == [5]


def test_pages_that_are_stored_at_the_end_of_a_request_are_verified(engine: Verified) -> None:
    """Their checksums were taken when the pages were full: no step may follow the store."""
    engine.side._stores._settings.__dict__["store_run_pages"] = 8
    asking = engine.computes("a", [1], "x")
    engine.tables["a"] = [1, 2, 99]
    asking.grow(PAGE_TOKENS)
    assert [parts for _, parts in engine.step({asking: PAGE_TOKENS}).checksums] == [[(0, [2])]]
    assert engine.leader.count(wire.Store) == 1
    engine.memory[2] = "y"
    engine.report()
    asking.status = RequestStatus.FINISHED_STOPPED
    engine.side.finished(asking, ([1, 2, 99],))  # type: ignore[arg-type]
    store = engine.leader.last(wire.Store)
    assert store.message.parts[0].pages == [2]
    engine.memory[2] = "written by another request"
    store.end(wire.StoreAnswer(1, 0))
    assert engine.step().checksums == []
    assert not engine.verification._open
    assert engine.check("a", "x?", [4, 5]).failed_pages == [5]
    assert engine.counts() == (1, 0, 1)


def test_checksums_of_pages_that_a_request_no_longer_has_are_not_used(engine: Verified) -> None:
    asking = engine.began("a", [1])
    engine.step(preempted=("a",))
    assert engine.side.track(asking).sums == {}
    assert engine.side.track(asking).summed.next_page == [0]
    engine.memory[1] = "x"
    engine.report()
    engine.answers(wire.StoreAnswer(1, 0))
    assert engine.check("a", "?", [4]).failed_pages == [4]


def test_orders_without_an_answer_are_bounded(engine: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ORDERED_MAX", 1)
    engine.began("a", [1])
    engine.began("b", [2])
    assert len(engine.verification._ordered) == 1
    engine.report()
    assert engine.verification._ordered == {}


def test_an_engine_without_verify_takes_no_checksums() -> None:
    engine = Engine()
    assert engine.side.verification is None
    asking = request("a", 9)
    found(engine, 0)
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [1, 2, 99], 0)
    assert engine.step({asking: 9}).checksums == []


def test_the_statistics_count_verified_pages_once(engine: Verified) -> None:
    engine.computes("a", [1, 2, 3], "xyz")
    engine.check("b", "xWz", [4, 5, 6])
    engine.side.measure()
    taken = engine.side._meters.take()
    assert taken is not None
    assert taken["verified_pages"] == {"right": 2, "wrong": 1}
    assert taken["loads_recomputed"] == {"checksum": 1}
    engine.side.measure()
    assert "verified_pages" not in (engine.side._meters.take() or {})


def test_pages_that_are_stored_after_a_reset_are_not_removed(engine: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.removals.REMOVAL_LIMIT_S", 0.0)
    engine.computes("a", [1, 2], "xy")
    engine.check("a", "??", [4, 5])
    engine.leader.last(wire.Reset).end(Failure(Code.LEASED, "a load holds pages", reported=True, retry=True))
    engine.side.reset()
    before = len(engine.leader.asked)
    for _ in range(3):
        engine.step()
    resets = [asked.message for asked in engine.leader.asked[before:] if isinstance(asked.message, wire.Reset)]
    assert not [reset for reset in resets if reset.hashes]
    assert len(engine.verification._removals) == 0
