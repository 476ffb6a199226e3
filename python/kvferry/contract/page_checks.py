"""Checks of slots and pages: what an engine names, and what its memory holds meanwhile."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry import wire
from kvferry.contract import bodies
from kvferry.contract.hash_checks import HashChecks
from kvferry.contract.pages import MappedMemory
from kvferry.contract.peers import Peer, Request
from kvferry.contract.rules import Report
from kvferry.wire import Code, Error, Kind

if TYPE_CHECKING:
    from kvferry.contract.leader import Copy

#: Time after a lookup's answer for which the pages that it found are held.
HOLD_S = 30.0
#: Time for which an answer may be on its way, on a busy machine.
_ANSWER_LOST_S = 10.0
#: Slots whose end is remembered, answered copies, and pages of failed loads.
_REMEMBERED_MAX = 65_536
#: Most messages that are named in one text.
_SHOWN_MAX = 5

_Slot = tuple[bytes, int]


@dataclass
class _View:
    """What an engine knows of a slot: the last lookup, and its answer."""

    lookup: int
    number: int
    namespace: bytes
    hashes: list[bytes]
    device_pages: int
    #: The first hash may be that of a page in the middle of a sequence.
    may_be_tail: bool
    #: End of the pages that it found; None before the answer.
    end: int | None = None
    answered_at: float = 0.0


@dataclass(eq=False)
class _Hold:
    """A load or a store whose end the engine does not know."""

    engine: bytes
    id: int
    number: int
    is_store: bool
    slot: int
    #: Number of the work that writes the pages of a store.
    after: int
    #: Position and device page.
    pages: list[tuple[int, int]]
    #: Namespace and hash of each page, by its position.
    keys: dict[int, tuple[bytes, bytes]]
    #: It was refused without ``over``.
    busy: bool = False
    #: The bytes of the pages when it was refused, if they were written by then: by rank.
    data: list[list[bytes]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{'store' if self.is_store else 'load'} {self.id}"


@dataclass
class _Failed:
    """A page that a load did not bring, and a digest of what the load has left there, by rank."""

    #: None after the slot was finished or looked up again: then the engine may compute the page elsewhere.
    slot: int | None
    position: int
    digests: list[bytes]
    load: int


class PageChecks:
    """See the module's docstring. For the server's thread."""

    def __init__(self, report: Report, hashes: HashChecks):
        self._report, self._hashes = report, hashes
        self.content = b""
        self.page_tokens = 0
        self._slots: dict[_Slot, _View] = {}
        #: Slots of a leader that is gone: naming them is no mistake.
        self._gone: set[_Slot] = set()
        #: Kind and slot of each copy that was answered lately, and when; and those that the last leader answered
        #: shortly before its end: their answers may be lost, and their slots finished since.
        self._answered: dict[tuple[bytes, int], tuple[int, int, float]] = {}
        self._may_be_repeated: dict[tuple[bytes, int], tuple[int, int]] = {}
        self._holds: dict[tuple[bytes, int], _Hold] = {}
        self._pages: dict[tuple[bytes, int], set[_Hold]] = {}
        self._failed: dict[tuple[bytes, int], _Failed] = {}
        #: A digest of each device page at the end of its last copy, and the page's hash.
        self._known: dict[tuple[bytes, int], tuple[bytes, bytes]] = {}
        self._told: set[tuple[int, int]] = set()
        #: Lookups that found pages: their number, and the messages of the first ones.
        self._hit_count = 0
        self._hits: list[int] = []
        self._loads = 0

    # Requests.

    def opened(self, request: Request) -> None:
        """A request is examined for the first time, or again after busy."""
        match request.kind:
            case Kind.LOOKUP:
                self._lookup(request)
            case Kind.LOAD | Kind.STORE:
                self._copy(request)
            case Kind.FINISH:
                self._finished(request)

    def _lookup(self, request: Request) -> None:
        body = request.body
        try:
            hashes = bodies.hashes_of(body.hashes, body.hash_bytes)
        except wire.Malformed:
            return
        key = request.session.engine, body.slot
        hello = request.peer.hello
        may_be_tail = hello is not None and bool(hello.features & wire.FEATURE_TAILS)
        self._gone.discard(key)
        self._slots[key] = _View(request.id, request.number, body.namespace, hashes, body.have_pages, may_be_tail)
        self._leave_failed(key)
        domain = body.namespace, self.content
        self._hashes.sequence(domain, hashes, self.page_tokens, request.number, may_be_tail=may_be_tail)

    def _finished(self, request: Request) -> None:
        key = request.session.engine, request.body.slot
        view = self._slots.get(key)
        if view is not None and view.lookup < request.id:
            del self._slots[key]
            self._report.exercised("slots-finished")
        self._leave_failed(key)

    def _leave_failed(self, slot: _Slot) -> None:
        for key, each in self._failed.items():
            if (key[0], each.slot) == slot:
                each.slot = None

    def _copy(self, request: Request) -> None:
        engine, body = request.session.engine, request.body
        if (engine, request.id) in self._holds:
            # It was refused as busy, or the connection was lost, and comes again.
            hold = self._holds[engine, request.id]
            if hold.busy:
                self._report.exercised("busy-keeps-pages")
            hold.busy = False
            return
        try:
            pages = [each for part in body.parts for each in enumerate(bodies.pages_of(part.pages), part.first_page)]
        except wire.Malformed:
            return
        key = engine, body.slot
        view = self._slots.get(key)
        name = f"{bodies.name_of(request.kind)} {request.id}"
        if view is None:
            if self._may_be_repeated.get((engine, request.id)) == (request.kind, body.slot):
                # The leader refuses it at once.
                return
            if key not in self._gone:
                self._report.broken("slots-opened", f"{name} names slot {body.slot}, which is not open", request.number)
        else:
            self._report.exercised("slots-opened")
            if request.kind == Kind.LOAD:
                self._load(request, view, pages)
            else:
                self._more_hashes(request, view)
        self._hold(request, view, pages)

    def _load(self, request: Request, view: _View, pages: list[tuple[int, int]]) -> None:
        body, report, number = request.body, self._report, request.number
        self._loads += 1
        named = [at for at, _ in pages]
        since_s = time.monotonic() - view.answered_at
        if view.end is None or not view.device_pages <= min(named) <= max(named) < view.end:
            found = "has no answer" if view.end is None else f"found pages {view.device_pages} up to {view.end}"
            text = (
                f"load {request.id} names pages {min(named)} to {max(named)} of slot {body.slot}, whose lookup "
                f"{view.lookup} {found}"
            )
            report.broken("load-within-hit", text, view.number, number)
        elif since_s > HOLD_S:
            text = f"load {request.id} comes {since_s:.0f} s after the answer of its lookup: pages are held for 30 s"
            report.broken("load-within-hit", text, view.number, number)
        else:
            report.exercised("load-within-hit")
            report.exercised("unknown-fields-skipped")
        if body.after >= request.id:
            report.broken("load-after-lower", f"load {request.id} has after {body.after}", number)
        elif body.after:
            report.exercised("load-after-lower")

    def _more_hashes(self, request: Request, view: _View) -> None:
        body, report = request.body, self._report
        try:
            more = bodies.hashes_of(body.more_hashes, body.hash_bytes)
        except wire.Malformed:
            return
        known = view.hashes[body.more_from : body.more_from + len(more)]
        if body.more_from > len(view.hashes):
            text = f"store {request.id} has more_from {body.more_from}, slot {body.slot} has {len(view.hashes)} hashes"
            report.broken("hashes-agree", text, request.number)
            return
        if known != more[: len(known)]:
            text = f"store {request.id} has other hashes than slot {body.slot} from page {body.more_from} on"
            report.broken("hashes-agree", text, view.number, request.number)
            return
        report.exercised("hashes-agree")
        if len(more) > len(known):
            view.hashes += more[len(known) :]
            domain = view.namespace, self.content
            self._hashes.sequence(domain, view.hashes, 0, request.number, may_be_tail=view.may_be_tail)

    # Pages in use.

    def _hold(self, request: Request, view: _View | None, pages: list[tuple[int, int]]) -> None:
        engine, is_store = request.session.engine, request.kind == Kind.STORE
        hashes = view.hashes if view else []
        namespace = view.namespace if view else b""
        keys = {at: (namespace, hashes[at]) for at, _ in pages if at < len(hashes)}
        after = request.body.after or request.id
        hold = _Hold(engine, request.id, request.number, is_store, request.body.slot, after, pages, keys)
        told: set[tuple[str, int]] = set()
        for at, page in pages:
            for other in self._pages.get((engine, page), ()):
                rule = self._conflict(hold, other, at, page)
                if rule and (rule, other.id) not in told:
                    told.add((rule, other.id))
                    state = "was refused without over" if other.busy else "is not answered"
                    text = f"{hold} names device page {page} for page {at} of slot {hold.slot}, and {other} {state}"
                    self._report.broken(rule, text, other.number, request.number)
            self._pages.setdefault((engine, page), set()).add(hold)
        if is_store and self._is_beside_a_store(hold) and not any(rule == "one-store-of-a-page" for rule, _ in told):
            self._report.exercised("one-store-of-a-page")
        self._holds[engine, request.id] = hold

    def _is_beside_a_store(self, hold: _Hold) -> bool:
        """Whether another store of the slot is not known to be over, so that its pages could be stored again."""
        others = (each for each in self._holds.values() if each.is_store and each.engine == hold.engine)
        return any(each.slot == hold.slot for each in others)

    @staticmethod
    def _conflict(hold: _Hold, other: _Hold, at: int, page: int) -> str:
        """Returns the rule that two requests break by naming one device page; empty if none."""
        if hold.is_store and other.is_store:
            there = [position for position, each in other.pages if each == page]
            same = any(hold.keys.get(at) == other.keys.get(position) for position in there)
            if same and hold.slot != other.slot:
                return ""
            if same and at in there:
                return "one-store-of-a-page"
        return "busy-keeps-pages" if other.busy else "pages-kept"

    def _release(self, hold: _Hold) -> None:
        self._holds.pop((hold.engine, hold.id), None)
        for _, page in hold.pages:
            holders = self._pages.get((hold.engine, page), set())
            holders.discard(hold)
            if not holders:
                self._pages.pop((hold.engine, page), None)

    def answered(
        self, request: Request, body: msgspec.Struct, memories: list[MappedMemory] | None, written: int
    ) -> None:
        """A request is answered. ``written``: the number up to which all ranks have reported work as written."""
        engine = request.session.engine
        if request.kind == Kind.LOOKUP:
            view = self._slots.get((engine, request.body.slot))
            if view is None or view.lookup != request.id:
                return
            if isinstance(body, wire.LookupAnswer):
                view.end, view.answered_at = view.device_pages + body.hit_pages, time.monotonic()
                if body.hit_pages:
                    self._hit_count += 1
                    self._hits = [*self._hits, request.number][:_SHOWN_MAX]
            else:
                del self._slots[engine, request.body.slot]
                self._went((engine, request.body.slot))
            return
        hold = self._holds.get((engine, request.id))
        if hold is None:
            return
        if isinstance(body, Error) and not body.over:
            hold.busy = body.code == Code.BUSY
            if hold.busy and hold.is_store and memories and written >= hold.after:
                hold.data = [[memory.read(0, page) for _, page in hold.pages] for memory in memories]
            return
        while len(self._answered) >= _REMEMBERED_MAX:
            del self._answered[next(iter(self._answered))]
        self._answered[engine, request.id] = request.kind, hold.slot, time.monotonic()
        self._release(hold)

    def gave_up(self, gives_up: Any, memories: list[MappedMemory] | None) -> list[tuple[bytes, int]]:
        """Every rank gives up the requests for which ``gives_up`` is true; returns them."""
        over = [hold for hold in self._holds.values() if gives_up(hold.id, hold.engine)]
        for hold in over:
            self._compare_busy(hold, memories)
            if hold.busy:
                self._report.exercised("busy-keeps-pages")
            self._release(hold)
        return [(hold.engine, hold.id) for hold in over]

    def busy_stores(self) -> bool:
        """Whether some store was refused without over and is not known to be over."""
        return any(hold.busy for hold in self._holds.values())

    def tick(self, memories: list[MappedMemory] | None, written: int) -> None:
        """Compares the pages of refused stores with what they held."""
        for hold in self._holds.values():
            if hold.busy and hold.is_store and memories:
                if hold.data:
                    self._compare_busy(hold, memories)
                elif written >= hold.after:
                    hold.data = [[memory.read(0, page) for _, page in hold.pages] for memory in memories]

    def _compare_busy(self, hold: _Hold, memories: list[MappedMemory] | None) -> None:
        if not hold.busy:
            return
        for memory, data in zip(memories or [], hold.data, strict=False):
            for (_, page), before in zip(hold.pages, data, strict=True):
                if memory.read(0, page) != before and (hold.id, page) not in self._told:
                    self._tell_once(hold.id, page)
                    text = f"device page {page} was written after {hold} was refused without over, before its end"
                    self._report.broken("busy-keeps-pages", text, hold.number)
                    return

    def _tell_once(self, identity: int, page: int) -> None:
        if len(self._told) < _REMEMBERED_MAX:
            self._told.add((identity, page))

    def _went(self, slot: _Slot) -> None:
        if len(self._gone) >= _REMEMBERED_MAX:
            self._gone.pop()
        self._gone.add(slot)

    def leader_restarted(self) -> None:
        """The slots of the leader are gone; pages stay in use until an answer."""
        for slot in self._slots:
            self._went(slot)
        self._slots.clear()
        since = time.monotonic() - _ANSWER_LOST_S
        lately = {key: (kind, slot) for key, (kind, slot, at) in self._answered.items() if at > since}
        self._may_be_repeated = lately
        self._answered.clear()
        for failed in self._failed.values():
            failed.slot = None

    def engine_gone(self, engine: bytes) -> None:
        """An engine stays away, and another process has its memory, if any."""
        for hold in [hold for hold in self._holds.values() if hold.engine == engine]:
            self._release(hold)
        for remembered in (self._slots, self._known, self._failed):
            for key in [key for key in remembered if key[0] == engine]:
                del remembered[key]

    # Bytes.

    def started(self, copy: "Copy", memories: list[MappedMemory]) -> None:
        """The pages of a copy have been read or written."""
        engine, number = copy.request.session.engine, copy.request.number
        if not copy.is_store:
            for at, (position, page) in enumerate(copy.pages):
                data = [rank[at] for rank in copy.data]
                if at >= copy.loaded and len(self._failed) < _REMEMBERED_MAX:
                    digests = [_digest([each]) for each in data]
                    self._failed[engine, page] = _Failed(copy.slot, position, digests, copy.request.id)
                else:
                    self._failed.pop((engine, page), None)
                self._known[engine, page] = _digest(data), copy.keys[at][2]
            return
        first = min(position for position, _ in copy.pages)
        for key, failed in list(self._failed.items()):
            named = any(page == key[1] for _, page in copy.pages)
            behind = failed.slot == copy.slot and failed.position < first
            if key[0] != engine or not (named or behind):
                continue
            now = [_digest([memory.read(0, key[1])]) for memory in memories]
            if any(one == other for one, other in zip(now, failed.digests, strict=True)):
                text = (
                    f"store {copy.request.id} of pages from {first} on: device page {key[1]}, page {failed.position} "
                    f"of load {failed.load}, holds what that load has left when it failed"
                )
                self._report.broken("failed-pages-computed", text, number)
            else:
                self._report.exercised("failed-pages-computed")
            del self._failed[key]

    def settles(self, copy: "Copy", memories: list[MappedMemory]) -> None:
        """Some time has passed since a copy, and its answer is not sent yet."""
        engine, number, identity = copy.request.session.engine, copy.request.number, copy.request.id
        kept = True
        for at, (_, page) in enumerate(copy.pages):
            before = [rank[at] for rank in copy.data]
            if [memory.read(0, page) for memory in memories] == before:
                if copy.is_store:
                    self._known[engine, page] = _digest(before), copy.keys[at][2]
                continue
            kept = False
            if (identity, page) in self._told:
                continue
            self._tell_once(identity, page)
            known = self._known.get((engine, page))
            stale = known is not None and known[0] == _digest(before) and known[1] != copy.keys[at][2]
            if copy.is_store and (stale or not any(map(any, before))):
                what = "the bytes of another page" if stale else "zeros"
                text = (
                    f"device page {page} of store {identity} held {what} when written came, and was written after that"
                )
                self._report.broken("written-after-the-bytes", text, number)
            else:
                what = "store" if copy.is_store else "load"
                text = f"device page {page} was written while {what} {identity} was not answered"
                self._report.broken("pages-kept", text, number)
        if kept:
            self._report.exercised("pages-kept")
            if copy.is_store and any(map(any, copy.data[0])):
                self._report.exercised("written-after-the-bytes")

    # The end.

    def open_slots(self) -> list[tuple[bytes, int]]:
        """Returns the slots that are not finished."""
        return list(self._slots)

    def finish(self, peers: list[Peer]) -> None:
        """The run is over."""
        connected = {peer.hello.engine for peer in peers if peer.hello is not None and peer.hello.role == "engine"}
        for (engine, slot), view in self._slots.items():
            if engine in connected:
                self._report.broken("slots-finished", f"slot {slot} is open at the end", view.number)
        if self._hit_count and self._loads:
            self._report.exercised("hits-used")
        elif self._hit_count:
            text = f"{self._hit_count} lookups found pages, and none was loaded"
            self._report.broken("hits-used", text, *self._hits)


def _digest(data: Sequence[bytes]) -> bytes:
    """Stands for the bytes of a page of all ranks."""
    digest = hashlib.blake2b(digest_size=16)
    for each in data:
        digest.update(each)
    return digest.digest()
