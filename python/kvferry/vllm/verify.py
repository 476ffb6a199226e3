"""Verify mode, on the scheduler's side: pages must hold after a load what some engine has stored.

The ranks take checksums of the chosen pages that a step fills, after its forward pass and before their copy can begin,
and of the chosen pages of each load, after its end and before vLLM may use them. The scheduler's side records
the former in a table that all engines of the host share (:mod:`kvferry.checksum_table`), and compares the latter with
it. Pages are chosen by their hashes, so that every engine of the same percentage chooses the same ones.

**A mismatch is never a false alarm.** A page has several right contents if engines that compute it get different bits,
and which one kvferry has is decided by the leader: the first store wins, until the page is evicted. So a page is wrong
only if its checksum differs from those of *all* contents that may be in kvferry, and if all of them are known:

* A store marks the entries of its pages before the leader receives it. The mark goes when the checksums that the
  ranks have reported are in the entry: they were there before, or the leader has answered that it copied pages.
  Contents that it did not copy are not added: they may come from a load that was not verified. So when a load begins,
  each content that it may bring has its checksum in the entry, or a mark stands for it. The load's lookup has pinned
  the content before, so that a later one does not matter, and the entry is read when the load is requested.
* Checksums are added to an entry that has some. An entry without any gets the first ones only after an answer of the
  leader that *all* pages of the store were copied: then kvferry had no other content of them, whose checksum may have
  been lost. For the same reason a store is sent in two: pages that the request was given, by the device or a load, and
  those that have entries already are usually present, and the others usually are not.
* Checksums are never removed from an entry: an older content may be on its way in a load, or on a disk. An entry that
  has no place for a further checksum is marked forever, and so is one whose store may have been carried out without its
  checksum being known.
* A load that does not match waits for the marks of its own process that were there when it was requested: for the
  reports of steps that run already, or for the end of stores of other contents. With marks of other processes, which
  may stay there after a crash, the page counts as unverified.
* An engine that cannot mark its pages, because the file is missing or locked, stores nothing.
* Engines of another percentage, which may store pages without recording them, have another content in their
  registrations (:mod:`kvferry.vllm.content`), and share no pages.

A table that is lost, or too small, and a disk that keeps pages for longer, are not covered: an engine may then store
other bits of a page into host memory, and a load may bring the older ones from the disk. See ``docs/vllm.md``.

Each wait for checksums of the ranks has a deadline. A page whose checksum does not come counts as unverified.
"""

import functools
import hashlib
import logging
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry import wire
from kvferry.checksum_table import KEY_BYTES, LOST, ChecksumTable, Known, Unusable, mark_of, value_of
from kvferry.engine_client import EngineClient
from kvferry.removals import Removals
from kvferry.served import Part, Served
from kvferry.vllm.inflight import Copy
from kvferry.vllm.metadata import StepMetadata
from kvferry.vllm.settings import Settings

if TYPE_CHECKING:
    from kvferry.vllm.tracked import Tracked

logger = logging.getLogger("vllm.kvferry")

#: Longest wait for the checksums of a load or of a store that is over.
CHECKSUMS_LIMIT_S = 10.0
#: Most orders of checksums that ranks have not answered. The oldest is dropped, and its pages are not known.
ORDERED_MAX = 4096
#: Pause between two looks at the table's file, and between two warnings about it.
LOOK_S, TELL_S = 1.0, 60.0


@dataclass(frozen=True)
class ChosenPage:
    """A page of a copy whose checksum is taken. ``at`` is its index among the pages of the copy."""

    at: int
    group: int
    position: int
    page: int
    page_hash: bytes
    key: bytes


@dataclass(eq=False)
class Checksums:
    """The checksums of a page: values by rank, None if the rank could not take them."""

    page: int
    values: dict[int, int | None] = field(default_factory=dict)


@dataclass(eq=False)
class _Waiting:
    """A load or a store whose checksums are ordered."""

    copy: Copy
    request: int
    pages: list[ChosenPage]
    sums: list[Checksums]
    #: The checksums of a store are recorded, or will never be known.
    recorded: bool = False
    #: The copy is over, and when the wait for its checksums ends: that long after a step has carried the order. None
    #: before that, because the engine may be paused.
    over: bool = False
    until: float | None = None
    #: The values of a store are complete, and some of them are not in the table.
    waits_for_answer: bool = False

    def late(self, now: float) -> bool:
        """Whether the wait for checksums is over."""
        return self.until is not None and now >= self.until


@dataclass
class _OpenPage:
    """A page that stores of this process name whose answer or checksums are missing."""

    stores: set[int] = field(default_factory=set)
    unsummed: set[int] = field(default_factory=set)
    values: set[int] = field(default_factory=set)
    #: Some store has copied all of its pages. Some store may have copied a content whose checksum will not be known.
    first: bool = False
    lost: bool = False


@dataclass(frozen=True)
class _Expected:
    """A page of a load: its entry when the load was requested, and stores whose checksums were missing then."""

    page: ChosenPage
    namespace: bytes
    known: Known
    unsummed: frozenset[int]


_Call = TypeVar("_Call", bound=Callable[..., Any])


def _contained(call: _Call) -> _Call:
    """An exception in a method ends verification, not the connector; the method returns None then."""

    @functools.wraps(call)
    def contained(self: "Verification", *arguments: Any, **named: Any) -> Any:
        try:
            return call(self, *arguments, **named)
        except Exception:
            self._failed()
            return None

    return contained  # type: ignore[return-value]


class Verification:
    """Compares what loads bring with what stores took. For the scheduler's thread alone."""

    def __init__(self, settings: Settings, served: Served, client: EngineClient, *, ranks: int):
        self._percent, self._mode = settings.verify, settings.mode
        self._served = served
        self._client = client
        self._ranks = ranks
        self._removals = Removals(client)
        self._path: Path = settings.socket_dir / f"checksums-{ranks}"
        self._table: ChecksumTable | None = None
        self._look_at = self._tell_at = 0.0
        self._mark = mark_of(secrets.randbits(64))
        #: Checksums that the next step orders, and those that were ordered, with their order in the message.
        self._orders: dict[int, list[tuple[int, Checksums]]] = {}
        self._ordered: dict[int, list[tuple[int, Checksums]]] = {}
        self._stores: dict[int, _Waiting] = {}
        #: Entries of loads that run, as they were when the load was requested, and stores of this process that were not
        #: in them yet.
        self._expected: dict[Copy, list[_Expected]] = {}
        self._checking: dict[int, _Waiting] = {}
        self._checked: deque[Copy] = deque()
        self._open: dict[bytes, _OpenPage] = {}
        #: Pages of ``_open`` whose entry is to be changed.
        self._dirty: dict[bytes, None] = {}
        self._given_up = False
        #: Pages of loads whose checksum was right, was not known, or was wrong.
        self.verified_pages = self.unverified_pages = self.verify_mismatches = 0
        #: How many of them the statistics have.
        self._taken = (0, 0, 0)

    def _usable(self) -> ChecksumTable | None:
        """Returns the table; None while its file cannot be used. Looks at the file once a second."""
        now = time.monotonic()
        if now < self._look_at:
            return self._table
        self._look_at = now + LOOK_S
        if self._table is not None and self._table.is_current():
            return self._table
        if self._table is not None:
            self._table.close()
            self._table = None
        try:
            self._table = ChecksumTable(self._path, self._ranks)
        except Unusable as error:
            if now >= self._tell_at:
                self._tell_at = now + TELL_S
                logger.warning("kvferry: pages are neither stored nor verified, since verify is set: %s", error)
        return self._table

    def _chosen(self, tracked: "Tracked", parts: Sequence[Part]) -> list[ChosenPage]:
        """Returns the pages of a copy whose checksums are taken."""
        hashes, namespace = tracked.request.block_hashes, tracked.namespace or b""
        found, at = [], 0
        for part in parts:
            units = self._served.groups[part.group].page_tokens // self._served.hash_tokens
            for position, page in enumerate(part.pages, part.first_page):
                # A page has the hash of its last tokens, of which kvferry compares the last 16 bytes.
                last = (position + 1) * units - 1
                page_hash = bytes(hashes[last]) if last < len(hashes) else b""
                if page_hash and int.from_bytes(page_hash[-8:], "big") % 100 < self._percent:
                    key = self._key(namespace, part.group, page_hash)
                    found.append(ChosenPage(at, part.group, position, page, page_hash, key))
                at += 1
        return found

    def _key(self, namespace: bytes, group: int, page_hash: bytes) -> bytes:
        named = (self._percent, self._ranks, group, self._served.groups[group])
        text = namespace + page_hash[-16:] + repr(named).encode()
        return hashlib.blake2b(text, digest_size=KEY_BYTES).digest()

    # Stores.

    def summed(self, tracked: "Tracked", parts: Sequence[Part]) -> list[Part]:
        """Leaves out pages whose checksums were not ordered, and those after them, for a store after the last step.

        With asynchronous scheduling a page may be full only when the step that fills it is over.
        """
        kept = []
        for part in parts:
            count = len(part.pages)
            for page in self._chosen(tracked, [part]):
                sums = tracked.sums.get((page.group, page.position))
                if sums is None or sums.page != page.page:
                    count = min(count, page.position - part.first_page)
            if count:
                kept.append(replace(part, pages=part.pages[:count]))
        return kept

    def split(self, tracked: "Tracked", parts: Sequence[Part]) -> list[list[Part]]:
        """Divides a store: pages that kvferry usually has already, and the others; each if there are any.

        The request was given the former, or has computed them again: of several groups, kvferry may have pages of one
        without those of another that a hit needs.
        """
        before, after = [], []
        for part in parts:
            given = -(-tracked.given_tokens // self._served.groups[part.group].page_tokens) - part.first_page
            count = min(max(given, self._known_pages(tracked, part)), len(part.pages))
            before.append(replace(part, pages=part.pages[:count]))
            after.append(replace(part, first_page=part.first_page + count, pages=part.pages[count:]))
        divided = [[part for part in side if part.pages] for side in (before, after)]
        return [side for side in divided if side]

    def _known_pages(self, tracked: "Tracked", part: Part) -> int:
        """Returns the number of pages at the start of a part up to the last whose checksum is in the table."""
        table, count = self._usable(), 0
        for page in self._chosen(tracked, [part]) if table is not None else ():
            if not table.look(page.key).values:
                break
            count = page.position - part.first_page + 1
        return count

    @_contained
    def begin_store(self, tracked: "Tracked", parts: Sequence[Part]) -> list[ChosenPage] | None:
        """Marks the chosen pages of a store, and returns them. None: they must not be stored now."""
        pages = self._chosen(tracked, parts)
        table = self._usable() if pages else None
        if not pages:
            return pages
        if table is None or self._given_up:
            return None
        with table.locked() as locked:
            if not locked:
                return None
            for page in pages:
                table.mark(page.key, self._mark)
        return pages

    @_contained
    def filled(
        self,
        tracked: "Tracked",
        computed: int,
        tables: "Callable[[], Sequence[Sequence[int]] | None]",
        states: "Sequence[tuple[int, int, int]]",
    ) -> None:
        """Orders the checksums of pages that are full with ``computed`` tokens, after the step that is scheduled now.

        A store may follow much later, when a step would be too late to read its pages.
        """
        unit = self._served.hash_tokens
        full = min(computed // unit, len(tracked.request.block_hashes))
        if (full <= tracked.summed_full and not states) or self._given_up:
            return
        if self._mode == "load" or not tracked.settings.store or tracked.namespace is None:
            return
        found = tables()
        if found is None:
            return
        tracked.summed_full = full
        parts = list(tracked.summed.to_store(found, full * unit, states))
        tracked.summed.stored(parts)
        pages = self._chosen(tracked, parts)
        for page, sums in zip(pages, self._order(pages), strict=True):
            tracked.sums[page.group, page.position] = sums

    def _order(self, pages: Sequence[ChosenPage]) -> list[Checksums]:
        """Orders the checksums of pages, which the next step takes."""
        ordered = [(page.group, Checksums(page.page)) for page in pages]
        if ordered:
            self._orders[self._client.draw()] = ordered
        return [sums for _, sums in ordered]

    @_contained
    def store_sent(self, copy: Copy, request: int, pages: list[ChosenPage]) -> None:
        """Follows a store that was just requested."""
        if not pages:
            return
        known = copy.owner.sums
        sums = [known.get((page.group, page.position)) for page in pages]
        taken = [
            each if each is not None and each.page == page.page else self._never(page)
            for page, each in zip(pages, sums, strict=True)
        ]
        self._stores[request] = _Waiting(copy, request, pages, taken)
        for page in pages:
            opened = self._open.setdefault(page.key, _OpenPage())
            opened.stores.add(request)
            opened.unsummed.add(request)

    def _store_over(self, copy: Copy) -> None:
        waiting = self._stores.get(copy.pending.id) if copy.pending else None
        if waiting is None:
            return
        waiting.over = True
        answer = copy.answer
        if isinstance(answer, wire.StoreAnswer) and answer.stored_pages == len(copy.pages):
            for page in waiting.pages:
                self._open[page.key].first = True

    def _store_turn(self, waiting: _Waiting, now: float) -> None:
        """Takes what is known of a store by now. Ends it once it is over, and its checksums are there or late."""
        if not waiting.recorded:
            values = self._values(waiting)
            if values is None and not (waiting.over and (self._reported(waiting) or waiting.late(now))):
                return
            known = values is not None and not waiting.waits_for_answer and self._all_known(waiting, values)
            if values is not None and not (waiting.over or known):
                # The answer of the leader says whether the contents were copied.
                waiting.waits_for_answer = True
                return
            answer = waiting.copy.answer
            nothing = isinstance(answer, wire.StoreAnswer) and answer.stored_pages == 0
            for at, page in enumerate(waiting.pages):
                opened = self._open[page.key]
                opened.values.update(values[at] if values and not nothing else ())
                opened.lost = opened.lost or (values is None and not nothing)
                opened.unsummed.discard(waiting.request)
                self._dirty[page.key] = None
            waiting.recorded = True
        if waiting.over:
            del self._stores[waiting.request]
            for page in waiting.pages:
                self._open[page.key].stores.discard(waiting.request)
                self._dirty[page.key] = None

    def _all_known(self, waiting: _Waiting, values: list[list[int]]) -> bool:
        """Whether the table has these values already."""
        table = self._usable()
        pairs = zip(waiting.pages, values, strict=True)
        return table is not None and all(set(each) <= table.look(page.key).values for page, each in pairs)

    def _never(self, page: ChosenPage) -> Checksums:
        """Returns the checksums of a page that no rank will take."""
        return Checksums(page.page, dict.fromkeys(range(self._ranks)))

    def _reported(self, waiting: _Waiting) -> bool:
        return all(len(each.values) >= self._ranks for each in waiting.sums)

    def _values(self, waiting: _Waiting) -> list[list[int]] | None:
        """Returns the values of each page that the ranks have reported; None if some are missing."""
        found = [[value for value in each.values.values() if value is not None] for each in waiting.sums]
        return found if all(len(values) == self._ranks for values in found) else None

    def _flush(self) -> None:
        """Writes what was learned of pages under store to the table, unless another process has locked it."""
        table = self._usable() if self._dirty else None
        if table is None:
            return
        with table.locked() as locked:
            if not locked:
                return
            for key in self._dirty:
                opened, mark = self._open[key], self._mark
                if not opened.unsummed:
                    over, lost = not opened.stores, opened.lost
                    table.settle(key, mark, opened.values, first=opened.first, over=over, lost=lost)
                if not opened.stores:
                    del self._open[key]
            self._dirty.clear()

    # Loads.

    @_contained
    def begin_load(self, copy: Copy) -> None:
        """Reads the entries of a load's chosen pages. Must be called before the load is requested."""
        pages = self._chosen(copy.owner, copy.parts)
        table = self._usable() if pages else None
        if not pages:
            return
        expected = []
        for page in pages:
            opened = self._open.get(page.key)
            unsummed = frozenset(opened.unsummed) if opened else frozenset()
            known = table.look(page.key) if table else Known()
            expected.append(_Expected(page, copy.owner.namespace or b"", known, unsummed))
        self._expected[copy] = expected

    def settled(self, copies: Iterable[Copy]) -> Iterator[Copy]:
        """Yields copies that are over: loads only when their pages were compared."""
        for copy in copies:
            held = False
            try:
                if copy.store:
                    self._store_over(copy)
                else:
                    held = self._must_check(copy)
            except Exception:
                self._failed()
            if not held:
                yield copy
        try:
            self._turn()
        except Exception:
            self._failed()
        while self._checked:
            yield self._checked.popleft()

    def take_counts(self) -> list[tuple[str, int]]:
        """Returns how many pages were verified since the last call, by outcome, without zeros."""
        counted = self.verified_pages, self.verify_mismatches, self.unverified_pages
        new = [now - before for now, before in zip(counted, self._taken, strict=True)]
        self._taken = counted
        return [(outcome, pages) for outcome, pages in zip(("right", "wrong", "unknown"), new, strict=True) if pages]

    def _failed(self) -> None:
        """Handles an exception of this module: without it, each load is reported as without verification."""
        if not self._given_up:
            logger.exception("kvferry: pages are neither stored nor verified until the engine is started again")
        self.give_up()

    def give_up(self) -> None:
        """Verifies nothing any longer: the ranks may not report. Loads that wait count as unverified."""
        self._given_up = True
        self._orders.clear()
        self._ordered.clear()
        for waiting in self._checking.values():
            self.unverified_pages += len(waiting.pages)
            self._checked.append(waiting.copy)
        self._checking.clear()
        self._expected.clear()

    def _must_check(self, copy: Copy) -> bool:
        """Orders the checksums of a load that is over; False if nothing is to be compared."""
        answer = copy.answer
        loaded = answer.pages if isinstance(answer, wire.LoadAnswer) else 0
        expected = [each for each in self._expected.pop(copy, []) if each.page.at < loaded]
        if not expected or copy.pending is None:
            return False
        if self._given_up or not any(each.known.values or each.known.marks for each in expected):
            self.unverified_pages += len(expected)
            return False
        request = copy.pending.id
        pages = [each.page for each in expected]
        waiting = _Waiting(copy, request, pages, self._order(pages), over=True)
        self._expected[copy] = expected
        self._checking[request] = waiting
        return True

    def _load_turn(self, waiting: _Waiting, now: float) -> None:
        """Compares the pages of a load, if everything that is needed is known by now."""
        late = waiting.late(now)
        if not (late or self._reported(waiting)):
            return
        counts = {"right": 0, "unknown": 0}
        wrong: list[tuple[ChosenPage, list[int]]] = []
        #: The request may have another namespace by now.
        removed: list[tuple[bytes, bytes]] = []
        for at, expected in enumerate(self._expected[waiting.copy]):
            found = {rank: value for rank, value in waiting.sums[at].values.items() if value is not None}
            verdict, ranks = self._verdict(expected, found, late=late)
            if verdict == "waits":
                return
            if verdict == "wrong":
                wrong.append((expected.page, ranks))
                removed.append((expected.namespace, expected.page.page_hash))
            else:
                counts[verdict] += 1
        self.verified_pages += counts["right"]
        self.unverified_pages += counts["unknown"]
        self.verify_mismatches += len(wrong)
        if wrong:
            self._tell(waiting.copy, wrong)
            self._removals.add(removed)
        waiting.copy.wrong = [(page.group, page.page) for page, _ in wrong]
        del self._checking[waiting.request], self._expected[waiting.copy]
        self._checked.append(waiting.copy)

    def _verdict(self, expected: _Expected, found: dict[int, int], *, late: bool) -> tuple[str, list[int]]:
        """Returns whether a page is ``right``, ``wrong`` or ``unknown``, or ``waits``, and the ranks that differ."""
        key, known = expected.page.key, expected.known
        table = self._usable()
        now = table.look(key) if table is not None else Known()
        differs = [rank for rank, value in found.items() if value not in known.values | now.values]
        if not differs:
            return "right" if len(found) == self._ranks else "unknown", []
        if not known.values or not known.marks <= {self._mark}:
            return "unknown", []
        # A store of this process that had not reported yet may have brought this content.
        opened = self._open.get(key)
        if opened is not None and (key in self._dirty or opened.unsummed & expected.unsummed):
            return "unknown" if late else "waits", []
        stores = known.marks or expected.unsummed
        if stores and not (known.values <= now.values and LOST not in now.marks):
            # The entry lost what these stores have added, or their contents are not known.
            return "unknown", []
        return "wrong", differs

    def _tell(self, copy: Copy, wrong: Sequence[tuple[ChosenPage, list[int]]]) -> None:
        """Logs the wrong pages of a load, in one line for each group and rank."""
        places: dict[tuple[int, int], list[int]] = {}
        for page, ranks in wrong:
            for rank in ranks:
                places.setdefault((page.group, rank), []).append(page.position)
        for (group, rank), positions in sorted(places.items()):
            logger.error(
                "kvferry: rank %d: %d of the pages %d to %d of group %d of request %s do not hold what was stored: "
                "they are computed, and the leader is requested to remove them",
                rank,
                len(positions),
                min(positions),
                max(positions),
                group,
                copy.owner.request.request_id,
            )

    # Steps.

    @_contained
    def take_orders(self, step: StepMetadata) -> None:
        """Adds to a step what the ranks take checksums of."""
        for number, ordered in self._orders.items():
            parts: list[tuple[int, list[int]]] = []
            for group, sums in ordered:
                if not parts or parts[-1][0] != group:
                    parts.append((group, []))
                parts[-1][1].append(sums.page)
            step.checksums.append((number, parts))
        self._ordered.update(self._orders)
        self._orders.clear()
        # An engine that is paused runs no step, and its ranks report nothing.
        until = time.monotonic() + CHECKSUMS_LIMIT_S
        for waiting in [*self._checking.values(), *self._stores.values()]:
            if waiting.until is None and waiting.over:
                waiting.until = until
        while len(self._ordered) > ORDERED_MAX:
            self._ordered.pop(next(iter(self._ordered)))

    @_contained
    def ranks_reported(self, checksums: dict[int, dict[int, tuple[int, bytes | None]]]) -> None:
        """Takes the checksums that ranks have reported. :meth:`settled` draws the conclusions."""
        for number, ranks in checksums.items():
            ordered = self._ordered.get(number, [])
            for rank, (shard, taken) in ranks.items():
                values: list[int | None] = [None] * len(ordered)
                if taken is not None and len(taken) == 8 * len(ordered):
                    values = [value_of(each, shard) for each in struct.unpack(f"<{len(ordered)}q", taken)]
                for (_, sums), value in zip(ordered, values, strict=True):
                    sums.values[rank] = value
            if all(len(sums.values) >= self._ranks for _, sums in ordered):
                self._ordered.pop(number, None)

    def forgotten(self) -> None:
        """Records that the leader was requested to remove all pages that this engine could find."""
        self._removals.clear()

    def turn(self) -> None:
        """Goes on with the removal of wrong pages."""
        self._removals.turn()

    def _turn(self) -> None:
        now = time.monotonic()
        for waiting in list(self._stores.values()):
            self._store_turn(waiting, now)
        self._flush()
        for waiting in list(self._checking.values()):
            self._load_turn(waiting, now)

    @property
    def waits(self) -> bool:
        """Whether steps are needed, also of an idle engine: checksums are missing of copies that are over."""
        return bool(self._checking) or any(waiting.over for waiting in self._stores.values())

    def close(self) -> None:
        """Closes the table."""
        if self._table is not None:
            self._table.close()
            self._table = None
