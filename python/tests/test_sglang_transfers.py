"""Tests of SGLang's transfers without SGLang: one rank with real memory, a real leader and a real worker."""

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon import Daemon, eventually, running
from signals import stop

from kvferry import present_namespace
from kvferry import rank as rank_module
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.sglang import abandoned as abandoned_module
from kvferry.sglang import loads, lookups
from kvferry.sglang.abandoned import Abandoned, Unconfirmed
from kvferry.sglang.breaker import PAUSE_FIRST_S, PAUSE_MAX_S, Breaker
from kvferry.sglang.leader import LeaderSide
from kvferry.sglang.lookups import packed
from kvferry.sglang.namespaces import Namespaces
from kvferry.sglang.ranks import Ranks
from kvferry.sglang.settings import Settings
from kvferry.sglang.transfers import Transfers

PAGES = 32
#: Longest time after the deadline of a load for which a worker that hangs makes SGLang's scheduler wait: less than 1 s,
#: and on a machine with many more processes than cores more. Without the rank, it would be 10 s.
HANGS_S = 4.0
PATIENT = {"lookup_budget_ms": 1000, "step_budget_ms": 10_000, "lookup_timeout_ms": 30_000}


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process; it goes on afterwards if it is still there."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def hashes(name: str, count: int) -> list[str]:
    """Returns chained hashes in SGLang's form."""
    found, last = [], name.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        found.append(last.hex())
    return found


class OneRank:
    """One rank of an engine, as the linker makes it."""

    def __init__(self, daemon: Daemon, *, weights: str = "weights", **settings: Any):
        self.changes = 0
        self.tensor = torch.zeros(PAGES, 16, 8)
        memory = KvMemory([Group({"layer": self.tensor}, 16, PAGES)], Place(0, 1, 0, b"test"))
        engine = os.urandom(16)
        self.session = RankSession(daemon.socket_dir / "worker-0-0", engine, 0, 0, memory, name="test")
        self.settings = Settings.read({"socket_dir": str(daemon.socket_dir), **PATIENT, **settings})
        abandoned = Abandoned(self.session)
        self.leader = LeaderSide(
            self.settings,
            engine=engine,
            namespaces=Namespaces(weights, private=False),
            abandoned=abandoned,
            weight_changes=lambda: self.changes,
        )
        self.transfers = Transfers(
            Ranks(),
            self.session,
            abandoned,
            self.leader,
            offloads_max=self.settings.offloads_max,
            written=self.session.wrote,
            at_once=self.settings.failed_load == "abort",
        )

    def fill(self, pages: list[int], seed: int) -> torch.Tensor:
        """Writes random numbers to pages, and returns them."""
        content = torch.randn(len(pages), 16, 8, generator=torch.Generator().manual_seed(seed))
        self.tensor[pages] = content
        return content

    def wait_offloads(self, count: int, within_s: float = 60.0) -> list[bool]:
        eventually("offloads end", lambda: self.transfers.ended_offloads() >= count, within_s)
        return [self.transfers.take_offload() for _ in range(count)]

    def store(self, name: str, pages: list[int], seed: int) -> torch.Tensor:
        content = self.fill(pages, seed)
        assert self.transfers.offload(hashes(name, len(pages)), pages)
        assert self.wait_offloads(1) == [True]
        return content

    def find(self, request: str, wanted: list[str]) -> int:
        self.transfers.ended_offloads()
        return len(self.transfers.find(request, wanted))

    def close(self) -> None:
        self.transfers.close()


@contextlib.contextmanager
def one_rank(up: dict[str, Any] | None = None, **settings: Any) -> Iterator[tuple[Daemon, OneRank]]:
    """A daemon with the flags ``up``, and an engine with ``settings``."""
    with running(**{"ranks": 1, "ratio": 1, **(up or {})}) as daemon:
        engine = OneRank(daemon, **settings)
        try:
            ready(daemon, engine)
            yield daemon, engine
        finally:
            engine.close()


def ready(daemon: Daemon, engine: OneRank) -> None:
    eventually("the rank is registered", lambda: engine.session.registered)
    daemon.wait_ready()
    eventually("the leader is connected", lambda: engine.leader._client.listening)


def test_stored_pages_are_found_loaded_and_equal() -> None:
    with one_rank() as (daemon, engine):
        content = engine.store("a", [3, 4, 9], 1)
        names = hashes("a", 5)
        assert engine.transfers.find("r", names) == [1, 2, 3]
        assert engine.transfers.start_batch() == -1
        assert engine.transfers.load("r", names[:2], [20, 7])
        assert torch.equal(engine.tensor[[20, 7]], content[:2])
        assert engine.transfers.start_batch() == 0
        assert engine.transfers.start_batch() == -1
        assert not engine.transfers.load("r", names[:2], [20, 7]), "a lookup serves one load"
        engine.transfers.ended_offloads()
        daemon.wait_idle()
        # A tail, as SGLang names it where it has the pages before.
        assert engine.find("tail", names[1:3]) == 2
        assert engine.transfers.load("tail", names[1:3], [1, 2])
        assert torch.equal(engine.tensor[[1, 2]], content[1:])


@contextlib.contextmanager
def recorded() -> Iterator[list[logging.LogRecord]]:
    """The log records of the package, each once, whatever handlers engines have added."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("kvferry")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("up", "found"), [({"ratio": 1}, 3), ({"ratio": 32, "page_index": "true"}, 3), ({"ratio": 32}, 0)]
)
def test_tails_are_found_or_their_absence_is_logged_once(up: dict[str, Any], found: int) -> None:
    with recorded() as records, one_rank(up) as (_, engine):
        content = engine.store("a", [3, 4, 5, 6, 7], 1)
        names = hashes("a", 5)
        assert engine.find("whole", names) == 5
        assert engine.find("tail", names[2:]) == found
        if found:
            assert engine.transfers.load("tail", names[2:], [20, 21, 22])
            assert torch.equal(engine.tensor[[20, 21, 22]], content[2:])
        logged = [record for record in records if "--page-index true, or with --ratio 1" in record.getMessage()]
        assert len(logged) == (0 if found else 1)


def test_a_load_needs_the_pages_that_its_lookup_found() -> None:
    with one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)
        names = hashes("a", 3)
        assert not engine.transfers.load("unknown", names[:2], [8, 9])
        assert engine.find("r", names) == 2
        assert not engine.transfers.load("r", names, [8, 9, 10]), "more pages than were found"
        assert engine.find("r", names) == 2
        assert not engine.transfers.load("r", hashes("b", 2), [8, 9]), "other pages"
        assert engine.find("r", names) == 2
        assert not engine.transfers.load("r", names[:2], None), "slots that form no pages"
        assert not engine.leader.breaker.pauses, "nothing was tried"
        assert not engine.tensor[[8, 9, 10]].any()


def test_an_answer_is_remembered_and_a_miss_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank() as (daemon, engine):
        names = hashes("a", 2)
        assert engine.find("r", names) == 0
        daemon.wait_idle()
        engine.store("a", [3, 4], 1)
        assert engine.find("r", names) == 0, "the miss is remembered"
        monkeypatch.setattr(lookups, "MISS_S", 0.0)
        assert engine.find("r", names) == 2
        before = daemon.status()["requests"]
        for _ in range(20):
            assert engine.find("r", names) == 2
        assert daemon.status()["requests"].get("lookup") == before.get("lookup")
        # A lookup that no load uses gives its pages back.
        monkeypatch.setattr(lookups, "DROP_S", 0.0)
        engine.transfers.ended_offloads()
        daemon.wait_idle()
        monkeypatch.setattr(lookups, "LOOKUPS_MAX", 2)
        for number in range(5):
            engine.transfers.find(f"r{number}", names)
        assert len(engine.leader._lookups._lookups) == 2


def test_a_flush_leaves_the_pages_and_the_setting_keeps_them() -> None:
    for keep in (False, True):
        with one_rank(keep_on_flush=keep) as (_, engine):
            engine.store("a", [3, 4], 1)
            engine.transfers.reset()
            assert engine.find("r", hashes("a", 2)) == (2 if keep else 0)
            engine.store("b", [3, 4], 2)
            assert engine.find("s", hashes("b", 2)) == 2


def test_changed_weights_leave_the_pages_whatever_the_settings_keep() -> None:
    with one_rank(keep_on_flush=True) as (daemon, engine):
        engine.store("a", [3, 4], 1)
        assert engine.find("r", hashes("a", 2)) == 2
        engine.changes += 1
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9]), "found before the change"
        assert engine.find("r", hashes("a", 2)) == 0
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        engine.store("b", [3, 4], 2)
        assert engine.find("b", hashes("b", 2)) == 2
        # The pages may follow pages of the old weights, which SGLang has until it flushes.
        engine.transfers.reset()
        assert engine.find("s", hashes("b", 2)) == 0
        engine.store("c", [3, 4], 2)
        engine.transfers.reset()
        assert engine.find("t", hashes("c", 2)) == 2
        engine.changes += 1
        engine.transfers.reset()
        assert engine.find("u", hashes("c", 2)) == 0
        # Private pages that were left are removed.
        eventually(
            "they are removed",
            lambda: (engine.transfers.ended_offloads(), daemon.status()["tiers"][0]["blocks"])[1] == 2,
        )
        engine.close()
        other = OneRank(daemon, keep_on_flush=True)
        try:
            ready(daemon, other)
            assert other.find("r", hashes("a", 2)) == 2, "another engine with the weights of before"
            assert other.find("s", hashes("b", 2)) == 0
        finally:
            other.close()


def test_engines_with_other_weights_share_nothing() -> None:
    with one_rank() as (daemon, engine):
        engine.store("a", [3, 4], 1)
        engine.close()
        other = OneRank(daemon, weights="others")
        try:
            ready(daemon, other)
            assert other.find("r", hashes("a", 2)) == 0
        finally:
            other.close()


def test_without_a_leader_nothing_waits_and_offloads_fail_in_order() -> None:
    with one_rank() as (daemon, engine):
        engine.store("a", [3, 4], 1)
        assert engine.find("r", hashes("a", 2)) == 2
        daemon.kill()
        eventually("the connection is lost", lambda: not engine.leader._client.listening)
        begun = time.monotonic()
        assert engine.find("r", hashes("a", 2)) == 0
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        for _ in range(3):
            assert engine.transfers.offload(hashes("b", 2), [3, 4])
        assert engine.transfers.ended_offloads() == 3
        assert [engine.transfers.take_offload() for _ in range(3)] == [False] * 3
        engine.transfers.reset()
        assert time.monotonic() - begun < 2.0
        daemon.start()
        ready(daemon, engine)
        content = engine.store("c", [5, 6], 3)
        assert engine.find("s", hashes("c", 2)) == 2
        assert engine.transfers.load("s", hashes("c", 2), [8, 9])
        assert torch.equal(engine.tensor[[8, 9]], content)


def test_a_load_of_a_stopped_worker_is_abandoned_and_its_pages_are_quiet_afterwards() -> None:
    with one_rank(load_timeout_ms=300) as (daemon, engine):
        content = engine.store("a", [3, 4], 1)
        names = hashes("a", 2)
        assert engine.find("r", names) == 2
        worker = daemon.pid()
        begun = time.monotonic()
        with stopped(worker):
            # The rank ends a worker that gives nothing back, long before the supervisor does.
            assert not engine.transfers.load("r", names, [8, 9])
            assert time.monotonic() - begun < 0.3 + HANGS_S
            assert worker not in daemon.workers
        assert engine.leader.breaker.pauses
        assert engine.find("s", names) == 0, "no lookups during the pause"
        engine.fill([8, 9], 5)
        written = engine.tensor[[8, 9]].clone()
        eventually("the pause ends", lambda: not engine.leader.breaker.pauses)
        ready(daemon, engine)
        assert torch.equal(engine.tensor[[8, 9]], written)
        eventually("pages are found again", lambda: engine.find(f"t{time.monotonic()}", names) == 2)
        request = f"t{time.monotonic()}"
        assert engine.find(request, names) == 2
        assert engine.transfers.load(request, names, [8, 9])
        assert torch.equal(engine.tensor[[8, 9]], content)


def test_a_wait_for_pages_that_were_abandoned_before_is_as_short() -> None:
    with one_rank() as (daemon, engine):
        worker = daemon.pid()
        with stopped(worker):
            abandoned = engine.transfers._abandoned
            abandoned.add([7])
            eventually("the wait for the worker has begun", lambda: engine.session._silence.looked is not None)
            assert not abandoned.is_over(7)
            begun = time.monotonic()
            abandoned.wait([7])
            assert time.monotonic() - begun < HANGS_S
            assert worker not in daemon.workers
        assert engine.session._outbox.abandoned == set()
        # The next wait is a long one again.
        abandoned.add([8])
        assert engine.session._kill_after_s == rank_module.KILL_AFTER_S
        eventually("the next worker confirms", lambda: abandoned.is_over(8))


def test_a_worker_whose_connection_was_lost_before_is_ended_as_soon() -> None:
    """So it is for a load with the default deadline: a connection is given up after three silent heartbeats."""
    with one_rank() as (daemon, engine):
        worker = daemon.pid()
        with stopped(worker):
            eventually("the connection is lost", lambda: not engine.session._client.listening)
            begun = time.monotonic()
            engine.transfers._abandoned.wait([7])
            assert time.monotonic() - begun < HANGS_S
            assert worker not in daemon.workers


def test_a_load_whose_worker_dies_fails_and_the_next_one_is_right() -> None:
    with one_rank(load_timeout_ms=20_000) as (daemon, engine):
        content = engine.store("a", [3, 4], 1)
        names = hashes("a", 2)
        assert engine.find("r", names) == 2
        worker = daemon.pid()
        os.kill(worker, signal.SIGSTOP)
        killer = threading.Timer(0.5, os.kill, (worker, signal.SIGKILL))
        killer.start()
        begun = time.monotonic()
        assert not engine.transfers.load("r", names, [8, 9])
        assert time.monotonic() - begun < 20.0
        killer.join()
        eventually("the pause ends", lambda: not engine.leader.breaker.pauses)
        ready(daemon, engine)
        eventually("pages are found again", lambda: engine.find(f"t{time.monotonic()}", names) == 2)
        request = f"t{time.monotonic()}"
        assert engine.find(request, names) == 2
        assert engine.transfers.load(request, names, [8, 9])
        assert torch.equal(engine.tensor[[8, 9]], content)


def test_a_worker_that_confirms_nothing_ends_the_engine_instead_of_giving_its_pages_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abandoned_module, "CONFIRM_LIMIT_S", 0.5)
    monkeypatch.setattr(abandoned_module, "KILL_AFTER_S", 30.0)
    with one_rank(load_timeout_ms=300) as (daemon, engine):
        engine.store("a", [3, 4], 1)
        assert engine.find("r", hashes("a", 2)) == 2
        with stopped(daemon.pid()), pytest.raises(Unconfirmed, match="started again"):
            engine.transfers.load("r", hashes("a", 2), [8, 9])


def test_an_exception_stops_the_cache_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)

        def broken(*_given: Any, **_named: Any) -> None:
            raise LookupError("injected")

        monkeypatch.setattr(engine.leader._lookups, "find", broken)
        assert engine.find("r", hashes("a", 2)) == 0
        assert engine.transfers.fault == "a lookup"
        assert engine.transfers.offload(hashes("b", 2), [5, 6])
        assert engine.wait_offloads(1) == [False]
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])


def test_a_load_is_abandoned_if_the_wait_for_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)
        assert engine.find("r", hashes("a", 2)) == 2
        abandoned = []
        abandon = engine.session.abandon

        def seen(requests: list[int], **named: Any) -> None:
            abandoned.extend(requests)
            abandon(requests, **named)

        def broken(*_given: Any) -> None:
            raise LookupError("injected")

        monkeypatch.setattr(engine.session, "abandon", seen)
        monkeypatch.setattr(loads, "end", broken)
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        assert len(abandoned) == 1
        assert engine.transfers.fault == "a load"


def test_an_operator_switches_the_cache_off(tmp_path: Path) -> None:
    with one_rank() as (daemon, engine):
        engine.store("a", [3, 4], 1)
        (daemon.socket_dir / "off").touch()
        eventually("it is off", lambda: engine.find(f"r{time.monotonic()}", hashes("a", 2)) == 0)
        assert engine.transfers.offload(hashes("b", 2), [3, 4])
        assert engine.wait_offloads(1) == [False]
        (daemon.socket_dir / "off").unlink()
        eventually("it is on", lambda: engine.find(f"r{time.monotonic()}", hashes("a", 2)) == 2)


@pytest.mark.parametrize("mode", ["load", "store"])
def test_a_mode_does_one_of_both(mode: str) -> None:
    with one_rank() as (daemon, engine):
        engine.store("a", [3, 4], 1)
        engine.close()
        other = OneRank(daemon, mode=mode)
        try:
            ready(daemon, other)
            assert other.find("r", hashes("a", 2)) == (2 if mode == "load" else 0)
            assert other.transfers.offload(hashes("b", 2), [3, 4])
            assert other.wait_offloads(1) == [mode == "store"]
        finally:
            other.close()


class Script:
    """Ranks whose other members say what a test wants."""

    def __init__(self, *, rank: int, same: bool = True, all_: bool = True, first: tuple[int, ...] = ()):
        self.rank, self.size = rank, 2
        self._same, self._all, self._first = same, all_, first

    def all(self, value: bool) -> bool:
        return value and self._all

    def same(self, values: Any) -> bool:
        return self._same

    def of_first(self, values: list[int]) -> list[int]:
        return values if self.rank == 0 else list(self._first)

    def list_of_first(self, values: list[int]) -> list[int]:
        return self.of_first(values)


def test_nothing_is_copied_where_ranks_have_other_pages() -> None:
    with one_rank() as (daemon, engine):
        engine.store("a", [3, 4], 1)
        engine.transfers._ranks = Script(rank=0, same=False)
        assert engine.find("r", hashes("a", 2)) == 2
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        assert not engine.tensor[[8, 9]].any()
        assert engine.transfers.offload(hashes("b", 2), [5, 6])
        assert engine.wait_offloads(1) == [False]
        engine.transfers._ranks = Ranks()
        assert engine.find("s", hashes("b", 2)) == 0
        assert daemon.counter("published_pages") == 2


def test_a_load_counts_only_if_every_rank_is_done() -> None:
    with one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)
        engine.transfers._ranks = Script(rank=0, all_=False)
        assert engine.find("r", hashes("a", 2)) == 2
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        assert engine.transfers.start_batch() == -1


class Pages:
    """A rank's session that records what is abandoned, and confirms it."""

    fault = ""

    def __init__(self) -> None:
        self.abandoned: list[int] = []

    def abandon(self, requests: list[int], **_: Any) -> None:
        self.abandoned += requests

    def wait_over(self, timeout_s: float) -> list[int]:
        return self.abandoned


def other_rank(*first: int) -> tuple[Transfers, Pages]:
    session, written = Pages(), []
    ranks: Any = Script(rank=1, first=first)
    abandoned = Abandoned(session)  # type: ignore[arg-type]
    made = Transfers(ranks, session, abandoned, None, offloads_max=2, written=written.append)  # type: ignore[arg-type]
    return made, session


def test_other_ranks_follow_rank_0() -> None:
    names = hashes("a", 3)
    done, session = other_rank(int(loads.Ended.DONE), 7)
    assert done.find("r", names) == [1, 2, 3]
    assert done.load("r", names, [1, 2, 3])
    assert (done.start_batch(), session.abandoned) == (0, [])
    failed, session = other_rank(int(loads.Ended.FAILED), 7)
    assert not failed.load("r", names, [1, 2, 3])
    assert session.abandoned == []
    unknown, session = other_rank(int(loads.Ended.UNKNOWN), 7)
    assert not unknown.load("r", names, [1, 2, 3])
    assert session.abandoned == [7]
    stored, session = other_rank(1, 0)
    assert [stored.offload(names, [1, 2, 3]) for _ in range(3)] == [True, True, False]
    assert stored.ended_offloads() == 2
    assert stored.take_offload()
    assert session.abandoned == []
    lost, session = other_rank(0, 9)
    assert lost.offload(names, [1, 2, 3])
    assert not lost.take_offload()
    assert session.abandoned == [9]
    flushed, session = other_rank(4, 5)
    flushed.reset()
    assert session.abandoned == [4, 5]


def test_a_rank_that_cannot_report_its_work_agrees_to_no_copy() -> None:
    for fails in ("transfers", "session"):
        transfers, session = other_rank(1, 0)
        named: list[list[int]] = []
        transfers._ranks.same = lambda values, named=named: named.append(list(values)) or False  # type: ignore[method-assign]
        assert transfers.offload(hashes("a", 2), [3, 4])
        (transfers if fails == "transfers" else session).fault = "planted"
        assert transfers.offload(hashes("a", 2), [3, 4])
        assert named[0][-2:] == [3, 4]
        assert named[1][-1] == -2, "rank 0 names other pages"


def test_a_device_without_progress_is_noticed_before_a_load() -> None:
    with one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)
        assert engine.find("r", hashes("a", 2)) == 2
        engine.session.fault = "reading the progress of the device"
        begun = time.monotonic()
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        assert time.monotonic() - begun < engine.settings.load_timeout_ms / 1000 / 2


def test_pages_that_come_after_the_deadline_of_a_load_are_computed() -> None:
    with one_rank() as (daemon, engine):
        engine.store("a", [3, 4], 1)
        assert engine.find("r", hashes("a", 2)) == 2
        answer = engine.leader._lookups._lookups["r"].pending.answer
        answer.ready_in_ms = engine.settings.load_timeout_ms
        assert engine.find("r", hashes("a", 2)) == 0
        lookup = engine.leader._lookups._lookups["r"]
        assert engine.find("r", hashes("a", 2)) == 0
        assert engine.leader._lookups._lookups["r"] is lookup, "not in each step"
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        eventually("nothing is held", lambda: not daemon.status()["slots"])
        # They may have come up since.
        eventually("they are looked up again", lambda: engine.find("s", hashes("a", 2)) == 2)
        engine.leader._lookups._lookups["s"].pending.answer.ready_in_ms = engine.settings.load_timeout_ms
        assert engine.find("s", hashes("a", 2)) == 0
        eventually("they are looked up again soon", lambda: engine.find("s", hashes("a", 2)) == 2, lookups.FRESH_S / 2)


def test_a_flush_that_fails_on_rank_0_is_one_on_every_rank() -> None:
    with one_rank() as (daemon, engine):

        def fails(*_: Any) -> None:
            raise OSError("planted")

        with stopped(daemon.pid()):
            for at, step in enumerate(
                (
                    (engine.leader, "begin_private"),
                    (engine.leader._lookups, "drop_all"),
                    (engine.leader._offloads, "turn"),
                )
            ):
                told: list[list[int]] = []
                engine.transfers.fault = ""
                assert engine.transfers.offload(hashes(f"a{at}", 2), [3, 4])
                number = engine.leader._offloads._open[0].pending.id
                with pytest.MonkeyPatch.context() as planted:
                    planted.setattr(*step, fails)
                    planted.setattr(engine.transfers, "_end", told.append)
                    engine.transfers.reset()
                engine.transfers._offloads = 0
                assert told == [[number]], step
                assert engine.transfers.fault


def test_a_cancelled_load_is_in_no_batch() -> None:
    transfers, _ = other_rank(int(loads.Ended.DONE), 7)
    assert not transfers.cancel("r")
    assert transfers.load("r", hashes("a", 1), [1])
    assert transfers.cancel("r")
    assert transfers.start_batch() == -1


def test_the_pauses_of_the_breaker_double_up_to_a_limit() -> None:
    breaker = Breaker()
    assert not breaker.pauses
    pauses = [breaker.failed() for _ in range(8)]
    assert breaker.pauses
    assert pauses[:3] == [PAUSE_FIRST_S, 2 * PAUSE_FIRST_S, 4 * PAUSE_FIRST_S]
    assert pauses[-1] == PAUSE_MAX_S
    breaker.worked()
    assert breaker.failed() == PAUSE_FIRST_S
    assert breaker.failed() == 2 * PAUSE_FIRST_S
    # Failures that are far apart do not add up.
    breaker._until -= PAUSE_MAX_S + 2 * PAUSE_FIRST_S
    assert breaker.failed() == PAUSE_FIRST_S


def test_a_pause_stops_lookups_and_loads() -> None:
    with one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)
        assert engine.find("r", hashes("a", 2)) == 2
        engine.leader.breaker.failed()
        assert engine.find("s", hashes("a", 2)) == 0
        assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        eventually("the pause ends", lambda: not engine.leader.breaker.pauses)
        assert engine.find("s", hashes("a", 2)) == 2


def test_a_late_lookup_begins_a_pause() -> None:
    with one_rank(lookup_timeout_ms=200, lookup_budget_ms=1) as (daemon, engine):
        leader = daemon.leader
        with stopped(leader):
            assert engine.find("r", hashes("a", 2)) == 0
            assert not engine.leader.breaker.pauses
            eventually("a pause begins", lambda: engine.find("r", hashes("a", 2)) or engine.leader.breaker.pauses)


def test_hashes_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        packed(["ab"])


def test_the_bytes_that_events_publish_come_last() -> None:
    """SGLang's number of a page is the first 16 digits of its hash; the leader keeps the last 16 bytes."""
    digits = "01acecb507abfe1a" + "354aa8064f4af5d3f1acd019e37db3c11c97523b71c76e9d"
    assert packed([digits, digits[::-1]])[:32].hex() == digits[16:] + digits[:16]
    assert int.from_bytes(packed([digits])[-8:], "big", signed=True) == 120731552294108698


def test_the_present_namespace_is_left_for_readers_of_events() -> None:
    with one_rank() as (daemon, engine):
        path = present_namespace.path_of(daemon.socket_dir, 0)

        def shown() -> bytes:
            return bytes.fromhex(path.read_text()) if path.exists() else b""

        first = engine.leader.namespace()
        eventually("the namespace is shown", lambda: shown() == first)
        engine.leader.begin_private("a test")
        assert engine.leader.namespace() != first
        eventually("the next namespace is shown", lambda: shown() == engine.leader.namespace())
        path.unlink()
        eventually("a file that is gone is written again", lambda: shown() == engine.leader.namespace())
        switched = daemon.socket_dir / "off"
        switched.touch()
        eventually("no page is found", lambda: shown() == b"")
        switched.unlink()
        eventually("pages are found", lambda: shown() == engine.leader.namespace())


def test_an_engine_that_no_leader_has_welcomed_shows_no_namespace(tmp_path: Path) -> None:
    """Another engine may have its seat."""
    with one_rank() as (_, engine):
        alone = LeaderSide(
            Settings.read({"socket_dir": str(tmp_path)}),
            engine=b"a" * 16,
            namespaces=Namespaces("alone", private=False),
            abandoned=Abandoned(engine.session),
            weight_changes=lambda: 0,
        )
        try:
            alone._watch()
            assert not present_namespace.path_of(tmp_path, 0).exists()
        finally:
            alone.close()


def test_settings_name_the_key_the_value_and_the_remedy() -> None:
    for extra, said in (
        ({"sockt_dir": "/x"}, "did you mean 'socket_dir'"),
        ({"socket_dir": "here"}, "absolute path"),
        ({"load_timeout_ms": 1}, "from 10 to 120000"),
        ({"keep_on_flush": "yes"}, "true or false"),
        ({"mode": "off"}, "both, load, store"),
        ({"failed_load": "retry"}, "compute, abort"),
        ({"namespace": 7}, "give a text"),
    ):
        with pytest.raises(ValueError, match="linker_extra_config") as refused:
            Settings.read(extra)
        assert said in str(refused.value)
