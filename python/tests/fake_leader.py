"""A simulated leader, with the copies of the ranks' workers, for random schedules.

Every request is answered late, in parts, wrongly or not at all, and connections break, as far as docs/wire.md allows.
Copies move the contents of a :class:`fake_device.Device`, at random times between those that the requests allow.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_device import SPOILED, TORN, Device, Group, Wrong
from fake_requests import Asked, Clock, Copy, Slot, refused

from kvferry import wire
from kvferry.client import Failure, Later
from kvferry.engine_client import EngineRequests
from kvferry.wire import Code

#: Time for which a lookup holds what it found.
HOLD_S = 30.0


class Leader(EngineRequests):
    """Takes the place of the client. :meth:`turn` lets the leader and the workers do something."""

    def __init__(self, draw: random.Random, clock: Clock, device: Device, served: list[Group], ranks: int):
        self.draw_from, self.clock, self.device, self.served, self.ranks = draw, clock, device, served, ranks
        self.directory, self.problem = Path("/nowhere"), "no process listens"
        self.link = self.epoch = 1
        self.lost_at: float | None = None
        self._back_at = 0.0
        self._links = itertools.count(2)
        self._ids = itertools.count(1)
        self.open: dict[int, Asked] = {}
        self.copies: dict[int, Copy] = {}
        self._queue: list[Asked] = []
        self._answers: list[tuple[Asked, Any]] = []
        self.slots: dict[int, Slot] = {}
        self.stored: dict[tuple[bytes, int, bytes], Any] = {}
        #: The weights under which each namespace was used first.
        self.weights: dict[bytes, int] = {}
        #: Tokens of each hash: marks of its unit.
        self.units: dict[bytes, tuple[int, ...]] = {}
        #: Slots that lack hashes because a request was refused: a later one may rely on it before the refusal arrives.
        self._refused: set[int] = set()
        self._finished: set[int] = set()
        #: Everything up to this number is written, on every rank.
        self.written = 0
        #: How often faults happen, and whether there are no more.
        self._faults = draw.choice((0.1, 0.5, 1.0))
        self.calm = False
        #: Violations that were found within calls of the connector, which keeps exceptions to itself.
        self.found: list[Exception] = []
        self.counts: dict[str, int] = {}
        self.spoiled_pages = 0
        #: Checks a new copy.
        self.on_copy: Callable[[Copy], None] = lambda copy: None
        #: Requests of which the client would build the message only now.
        self._unbuilt: list[tuple[Asked, Later]] = []
        #: Chooses pages of a load that it brings with wrong contents; False for a load without such pages.
        self.spoils: Callable[[Copy], bool] = lambda copy: False

    def _chance(self, probability: float) -> bool:
        return self.draw_from.random() < probability

    def _fault(self, probability: float) -> bool:
        return self._chance(probability * self._faults) and not self.calm

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # The interface of the client.

    @property
    def listening(self) -> bool:
        return self.link != 0

    @property
    def open_requests(self) -> tuple[int, int]:
        return len(self._queue), len(self.open)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def poke(self) -> None:
        """Does nothing: every request is sent at once."""

    def draw(self) -> int:
        return next(self._ids)

    def request(self, message: Any, timeout_s: float, **named: Any) -> Asked:
        try:
            return self._request(message, timeout_s, **named)
        except Exception as error:
            self.found.append(error)
            raise

    def _request(
        self,
        message: Any,
        timeout_s: float,
        *,
        grace_s: float = 0,
        until: Any = None,
        urgent: bool = False,
        wake: bool = True,
        identity: int | None = None,
    ) -> Asked:
        assert identity is None, "requests are not sent again here"
        later = message
        if isinstance(later, Later):
            message = later.build()
        deadline = self.clock.now + timeout_s
        asked = Asked(self, next(self._ids), message, deadline, deadline + grace_s, until)
        if isinstance(later, Later):
            self._unbuilt.append((asked, later))
        if self._fault(0.01):
            self._count("refused by the client")
            if isinstance(message, wire.Lookup):
                self._refused.add(message.slot)
            asked.end(Failure(Code.BUSY, "too many requests", reported=False, retry=True, over=True))
            return asked
        if isinstance(message, wire.Lookup):
            known = self.weights.setdefault(message.namespace, self.device.weights)
            let_go = message.have_pages * message.hash_bytes == len(message.hashes)
            assert let_go or known == self.device.weights, "a lookup in a namespace of other weights"
        elif isinstance(message, wire.Load | wire.Store):
            copy = self._new_copy(asked)
            self.copies[asked.id] = copy
            self.on_copy(copy)
        self.open[asked.id] = asked
        if urgent:
            self._queue.insert(0, asked)
        else:
            self._queue.append(asked)
        if self._chance(0.3):
            self._process()
        return asked

    def _new_copy(self, asked: Asked) -> Copy:
        message = asked.message
        pages = []
        for part in message.parts:
            group, at = self.served[part.group], part.first_page
            for item in part.pages:
                start, count = item if isinstance(item, list) else (item, 1)
                for page in range(start, start + count):
                    pages.append((group, at, page))
                    at += 1
        store = isinstance(message, wire.Store)
        fates = ["failed", "unknown", "lost"] + ["part"] * (store or len(self.served) == 1)
        fate = self.draw_from.choice(fates) if self._fault(0.25 if store else 0.5) else "done"
        return Copy(asked, store, pages, getattr(message, "after", 0), fate, self.epoch)

    def wait(self, timeout_s: float) -> None:
        self.clock.now += timeout_s if self._chance(0.3) else timeout_s * self.draw_from.random()
        self.turn()

    # What happens meanwhile.

    def turn(self) -> None:
        for asked, later in self._unbuilt:
            assert later.build() == asked.message, "what a request was given has changed before the client built it"
        self._unbuilt.clear()
        for asked in [each for each in self.open.values() if each.expires <= self.clock.now]:
            self._count("expired")
            self._end(asked, Failure(Code.DEADLINE, "no answer came in time", reported=False, retry=True))
        if self.link and self._fault(0.01):
            self._count("connection lost")
            self.link, self.lost_at = 0, self.clock.now
            self._back_at = self.clock.now + self.draw_from.choice((0.01, 0.5, 2.0, 8.0))
        elif not self.link and (self.calm or self.clock.now >= self._back_at):
            self.link, self.lost_at = next(self._links), None
            if self._chance(0.5):
                self._another_leader()
        for _ in range(self.draw_from.randrange(6)):
            self._process()
        for copy in list(self.copies.values()):
            self._advance(copy)
        for each in list(self._answers):
            if self.link and self._chance(0.5):
                self._answers.remove(each)
                self._end(*each)
        for key in [key for key in self.stored if self._fault(0.003)]:
            del self.stored[key]

    def _end(self, asked: Asked, answer: Any) -> None:
        if self.open.pop(asked.id, None) is not None:
            asked.end(answer)

    def _another_leader(self) -> None:
        """A new leader finds what was stored, and knows no slot."""
        self._count("new leader")
        self.epoch += 1
        self.slots.clear()
        # A lookup that got no answer although a later finish did is not repeated: no leader answers so.
        again = [asked for asked, _ in self._answers if not isinstance(asked.message, wire.Load | wire.Store)]
        again = [asked for asked in again if getattr(asked.message, "slot", None) not in self._finished]
        self._queue = sorted({*self._queue, *again}, key=lambda asked: asked.id)
        self._answers.clear()
        for copy in self.copies.values():
            if copy.over:
                self._answer(copy.asked, refused(Code.UNKNOWN_SLOT))
            elif copy.began:
                # The copies of the old leader run on for a while; the new one refuses the request afterwards.
                copy.fate = "refused"

    def _answer(self, asked: Asked, answer: Any) -> None:
        self._answers.append((asked, answer))

    def _process(self) -> None:
        if not self.link or not self._queue:
            return
        asked = self._queue.pop(0)
        match asked.message:
            case wire.Lookup():
                self._lookup(asked, asked.message)
            case wire.Load() | wire.Store():
                if asked.id in self.copies:
                    self._begin(self.copies[asked.id])
            case wire.Finish():
                if self._fault(0.05):
                    self._answer(asked, Failure(Code.BUSY, "busy", reported=True, retry=True))
                    return
                self.slots.pop(asked.message.slot, None)
                self._finished.add(asked.message.slot)
                self._answer(asked, wire.Empty())
            case wire.CancelStores():
                if not self._fault(0.3):
                    self._cancel_stores(asked)
            case wire.Reset():
                self._reset(asked)

    def _cancel_stores(self, asked: Asked) -> None:
        for copy in list(self.copies.values()):
            if copy.store and not copy.over and copy.asked.id < asked.id and copy.fate in ("done", "part", "failed"):
                copy.cancelled = copy.over = True
                if not copy.began:
                    self._refused.add(copy.asked.message.slot)
                self._end(copy.asked, wire.StoreAnswer(0, 0, failed_pages=len(copy.pages)))
        self._answer(asked, wire.CancelStoresAnswer(1))

    def _reset(self, asked: Asked) -> None:
        namespace = asked.message.namespace
        if self._fault(0.2):
            self._answer(asked, Failure(Code.LEASED, "a load holds pages", reported=True, retry=True))
            return
        width, hashes = asked.message.hash_bytes, asked.message.hashes
        if hashes:
            removed = {hashes[at : at + width] for at in range(0, len(hashes), width)}
            self._count("pages removed")
            self.stored = {key: content for key, content in self.stored.items() if key[2] not in removed}
            self._answer(asked, wire.ResetAnswer(0))
            return
        self.stored = {key: content for key, content in self.stored.items() if key[0] != namespace}
        for copy in self.copies.values():
            copy.cancelled = copy.cancelled or copy.namespace == namespace
        self._answer(asked, wire.ResetAnswer(0))

    # Lookups.

    def _lookup(self, asked: Asked, message: wire.Lookup) -> None:
        if self._fault(0.05):
            self._refused.add(message.slot)
            self._answer(asked, Failure(Code.NOT_READY, "not ready", reported=True, retry=True))
            return
        self._refused.discard(message.slot)
        width = message.hash_bytes
        hashes = [message.hashes[at : at + width] for at in range(0, len(message.hashes), width)]
        slot = self.slots[message.slot] = Slot(message.namespace, hashes)
        limit = len(hashes) if message.limit_pages is None else message.limit_pages
        unit, hit = self.device.hash_tokens, self.device.hit_tokens
        device = message.have_pages * unit
        slot.device_pages, slot.held_until = message.have_pages, self.clock.now + HOLD_S
        shorter = self._fault(0.1)
        for end in range(limit * unit // hit * hit, device, -hit):
            pins = self._pins(slot, end, device)
            if pins is not None and not (shorter and self._chance(0.5)):
                slot.pins, slot.end = pins, end
                break
        found = max(slot.end // unit - message.have_pages, 0)
        self._count("hits" if found else "misses")
        self._count("lookups beside device pages" if message.have_pages else "lookups from the first page")
        if not self._fault(0.02):
            self._answer(asked, wire.LookupAnswer(found))

    def _pins(self, slot: Slot, end: int, device: int) -> dict[tuple[int, int], Any] | None:
        pins = {}
        for number, group in enumerate(self.served):
            for page in group.needed(end):
                if group.kind != "state" and (page + 1) * group.page_tokens <= device:
                    continue
                key = slot.namespace, number, self._hash(slot, group, page)
                if key not in self.stored:
                    return None
                pins[number, page] = self.stored[key]
        return pins

    def _hash(self, slot: Slot, group: Group, page: int) -> bytes:
        return slot.hashes[(page + 1) * group.page_tokens // self.device.hash_tokens - 1]

    # Copies.

    def _begin(self, copy: Copy) -> None:
        message = copy.asked.message
        slot = self.slots.get(message.slot)
        late = self.clock.now >= copy.asked.deadline or copy.asked.id not in self.open
        ignored = copy.over or len(copy.stopped) == self.ranks or (copy.store and message.slot in self._refused)
        if not slot and not late and not ignored and copy.epoch == self.epoch and message.slot not in self._refused:
            raise Wrong(f"a request for a slot that this leader does not know: {copy}")
        if slot is None or late or ignored:
            if copy.store:
                # The hashes that it brought are unknown.
                self._refused.add(message.slot)
            self._over(copy, refused(Code.DEADLINE if late else Code.UNKNOWN_SLOT))
            return
        if copy.store and message.more_from > len(slot.hashes):
            # The lookup with the hashes before was refused: nothing says what the pages are.
            self._count("store without its hashes")
            self._refused.add(message.slot)
            self._over(copy, refused(Code.INVALID))
            return
        copy.namespace, copy.began = slot.namespace, True
        if copy.store:
            self._learn(slot, message)
            weights = self.weights[slot.namespace]
            for group, at, _ in copy.pages:
                copy.keys.append((slot.namespace, self.served.index(group), self._hash(slot, group, at)))
                copy.contents.append(self.device.expected(group, self._marks(slot, group, at), weights))
        else:
            assert self.clock.now < slot.held_until, "a load of pages that are no longer held"
            contents = self._loaded(slot, copy)
            assert contents is not None, f"a load that is no hit of the lookup: {copy}, {slot.end}, {set(slot.pins)}"
            copy.contents = contents

    def _learn(self, slot: Slot, message: wire.Store) -> None:
        width = message.hash_bytes or 1
        more = [message.more_hashes[at : at + width] for at in range(0, len(message.more_hashes), width)]
        known = slot.hashes[message.more_from : message.more_from + len(more)]
        assert known == more[: len(known)], "a store has other hashes than its slot"
        slot.hashes += more[len(known) :]

    def _marks(self, slot: Slot, group: Group, page: int) -> tuple[int, ...]:
        units = group.page_tokens // self.device.hash_tokens
        return tuple(mark for unit in slot.hashes[page * units : (page + 1) * units] for mark in self.units[unit])

    def _loaded(self, slot: Slot, copy: Copy) -> list[Any] | None:
        """The contents of a load that names what the hit needs and the device lacks; None for another load."""
        named = [(self.served.index(group), at) for group, at, _ in copy.pages]
        unit = self.device.hash_tokens
        for device in range(slot.device_pages * unit, slot.end, unit):
            needed = {
                (number, page)
                for number, group in enumerate(self.served)
                for page in group.needed(slot.end)
                if group.kind == "state" or (page + 1) * group.page_tokens > device
            }
            if needed == set(named) and len(named) == len(needed):
                return [slot.pins[each] for each in named]
        return None

    def _advance(self, copy: Copy) -> None:
        """Lets a copy go on, if the ranks' devices have written what it waits for."""
        if copy.over:
            if copy.asked.id not in self.open:
                del self.copies[copy.asked.id]
            return
        if not copy.began:
            return
        late = self.clock.now >= copy.asked.deadline and (copy.fate != "lost" or self.calm)
        if self.written >= (copy.after or (copy.asked.id if copy.store else 0)):
            for _ in range(self.draw_from.randrange(4)):
                self._touch(copy, self.draw_from.randrange(len(copy.pages)), torn=self._chance(0.5))
            if not late and copy.fate != "refused" and self._chance(0.3):
                self._finish(copy)
                return
        if (late or copy.fate == "refused") and self._chance(0.5):
            self._over(copy, refused(Code.UNKNOWN_SLOT if copy.fate == "refused" else Code.DEADLINE))

    def _touch(self, copy: Copy, number: int, *, torn: bool = False) -> None:
        """Reads a page for a store, or writes one for a load."""
        group, at, page = copy.pages[number]
        if not copy.store:
            self.device.pages[page] = TORN if torn else copy.contents[number]
        elif self.device.pages.get(page) != copy.contents[number]:
            held = self.device.pages.get(page)
            raise Wrong(f"a store reads page {page} as {group.kind} page {at}, which holds something else: {held}")

    def _finish(self, copy: Copy) -> None:
        fate, pages = copy.fate, len(copy.pages)
        if copy.stopped and fate in ("done", "part"):
            fate = "failed"
        if fate == "lost":
            return
        self._count(f"{'store' if copy.store else 'load'} {fate}")
        match fate:
            case "unknown":
                # Only the answer is lost; the copy goes on.
                copy.fate = "lost"
                self._answer(copy.asked, Failure(Code.INTERNAL, "the outcome is unknown", reported=True))
                return
            case "failed":
                self._over(copy, refused(self.draw_from.choice((Code.COPY_FAILED, Code.BUSY))))
                return
        done = pages if fate == "done" else self.draw_from.randrange(pages)
        if not (copy.store or self.calm) and self._chance(0.15) and self.spoils(copy):
            self._count("load spoiled")
        for number in range(done):
            self._touch(copy, number)
            if number in copy.spoiled:
                self.spoiled_pages += 1
                self.device.pages[copy.pages[number][2]] = SPOILED
            if copy.store and not copy.cancelled:
                self.stored[copy.keys[number]] = copy.contents[number]
        if copy.store:
            self._over(copy, wire.StoreAnswer(done, 0, refused_pages=pages - done))
        else:
            self._over(copy, wire.LoadAnswer(done))

    def _over(self, copy: Copy, answer: Any) -> None:
        copy.over = True
        self._answer(copy.asked, answer)

    def stop(self, request: int, rank: int) -> None:
        """A rank's worker copies nothing for this request from now on."""
        copy = self.copies.get(request)
        if copy is not None:
            copy.stopped.add(rank)
            copy.over = copy.over or len(copy.stopped) == self.ranks

    def running(self) -> list[Copy]:
        """Copies that may still read or write pages."""
        return [copy for copy in self.copies.values() if not copy.over]
