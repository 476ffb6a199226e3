"""The scripted leader: lookups, loads, stores and their ends, with real bytes, and events of a script."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry import wire
from kvferry.contract import bodies, store
from kvferry.contract.bodies import Hello
from kvferry.contract.pages import MappedMemory
from kvferry.contract.peers import Peer, Request, Session
from kvferry.contract.script import Event, Script
from kvferry.contract.server import Server
from kvferry.contract.store import Key, StoredPages
from kvferry.contract.worker import Worker
from kvferry.wire import Code, Error, Kind

if TYPE_CHECKING:
    from kvferry.contract.checks import Checks

#: Time for which a lookup holds the pages that it found.
HOLD_S = 30.0
#: Slots of one engine.
SLOTS_MAX = 65_536
READ_EVENTS_WAIT_MAX_S = 30.0
_ENGINE = (
    Kind.LOOKUP,
    Kind.LOAD,
    Kind.STORE,
    Kind.STORES,
    Kind.FINISH,
    Kind.RESET,
    Kind.CANCEL_STORES,
    Kind.READ_EVENTS,
    Kind.STATUS,
)


@dataclass(eq=False)
class Slot:
    """A running request of an engine."""

    opened_by: int
    namespace: bytes
    hashes: list[bytes]
    device_pages: int
    #: End of the pages that the last lookup found, and until when they are held.
    end: int = 0
    held_until: float = 0.0

    def keys(self, layout: bytes, first: int, end: int) -> list[Key]:
        """Returns the keys of the pages from ``first`` to ``end``."""
        return [(self.namespace, layout, each[-store.HASH_BYTES :]) for each in self.hashes[first:end]]


@dataclass(eq=False)
class Copy:
    """A load or a store that is not over."""

    request: Request
    slot: int
    #: Position in the sequence, and page of the device.
    pages: list[tuple[int, int]]
    keys: list[Key]
    after: int
    is_store: bool
    event: Event | None = None
    started: bool = False
    #: The bytes of each page at the start, by rank.
    data: list[list[bytes]] = field(default_factory=list)
    #: Pages, counted from the first, that a load has brought.
    loaded: int = 0

    def drop(self) -> None:
        """Drops the bytes: the timer of the deadline still names the copy."""
        self.data = []


class Leader:
    """The service of the leader."""

    roles = ("engine", "admin", "worker")
    #: Pages are found by their own hash alone, wherever a lookup begins.
    features = wire.FEATURE_TAILS
    keeps_answers = True
    kinds: ClassVar[dict[str, tuple[int, ...]]] = {
        "engine": _ENGINE,
        "admin": (Kind.RESET, Kind.FLUSH, Kind.READ_EVENTS, Kind.STATUS),
        "worker": (Kind.STATUS,),
    }

    def __init__(self, server: Server, workers: Sequence[Worker], checks: "Checks", script: Script):
        self._server, self._workers, self._checks = server, workers, checks
        self.script = script
        self._lies = server.lies
        self.stored = StoredPages(server.settings.stored_bytes_max)
        self._slots: dict[tuple[bytes, int], Slot] = {}
        #: The last lookup or finish of slots that are not open.
        self._finished: dict[tuple[bytes, int], int] = {}
        self._copies: dict[tuple[bytes, int], Copy] = {}
        self._reads: dict[Peer, Request] = {}
        for worker in workers:
            worker.changed = self.advance
            worker.lost = self._memory_lost

    # Sessions.

    def admits(self, peer: Peer, hello: Hello) -> Error | None:
        """Refuses an engine whose name another process uses."""
        session = peer.endpoint.sessions.get((hello.role, hello.engine))
        if (
            hello.role == "engine"
            and session is not None
            and session.peers
            and session.process != peer.connection.process
        ):
            text = f"the engine's name is in use by process {session.process}: draw another one"
            return Error(Code.NOT_READY, text, retry=True)
        return None

    def left(self, session: Session) -> None:
        """Waits for the next connection of the session."""

    def forgotten(self, session: Session) -> None:
        """Forgets the slots of an engine that stayed away."""
        for key in [key for key in self._slots if key[0] == session.engine]:
            del self._slots[key]
        for key in [key for key in self._copies if key[0] == session.engine]:
            del self._copies[key]
        if session.role == "engine":
            self._checks.pages.engine_gone(session.engine)

    @property
    def copies(self) -> int:
        """Loads and stores that are under way."""
        return len(self._copies)

    def waits_for(self, through: int) -> bool:
        """Whether a copy waits for a report of work up to this number."""
        return any(not copy.started and copy.after <= through for copy in self._copies.values())

    def restarted(self) -> None:
        """Forgets everything but the stored pages, as the next leader does."""
        self._slots.clear()
        self._finished.clear()
        self._copies.clear()
        self._reads.clear()
        self.stored.begun_again()

    # Requests.

    def handle(self, request: Request) -> None:
        """Carries a request out, unless the script has another end for it."""
        event = None
        if request.kind in (Kind.LOOKUP, Kind.LOAD, Kind.STORE, Kind.FINISH) and not request.again:
            event = self.script.next(Kind(request.kind).name.lower())
        if event is not None and self._played(request, event):
            return
        match request.kind:
            case Kind.LOOKUP:
                self._lookup(request)
            case Kind.LOAD | Kind.STORE:
                self._copy(request, event)
            case Kind.FINISH:
                self._finish(request)
            case Kind.CANCEL_STORES:
                self._cancel(request)
            case Kind.RESET:
                self._reset(request)
            case Kind.READ_EVENTS:
                self._read_events(request)
            case Kind.STATUS:
                self._server.answer(request, self._status())
            case Kind.FLUSH:
                self._refuse(request, Code.INVALID, "there is no disk tier: start kvferry with g3")

    def _played(self, request: Request, event: Event) -> bool:
        """Plays an event. Returns whether the request is thereby dealt with."""
        session = request.session
        match event.do:
            case "late":
                request.late_s = event.ms / 1000
            case "busy":
                text = "busy by the script: the request was not examined"
                self._server.answer(request, Error(Code.BUSY, text, retry=True), opened=False)
                return True
            case "not_ready":
                self._server.answer(request, Error(Code.NOT_READY, "not ready by the script", retry=True))
                return True
            case "drop" | "lose_answer":
                if event.do == "drop":
                    session.open.pop(request.id, None)
                    session.payloads[request.id] = request.payload
                for peer in list(session.peers):
                    self._server.close(peer, f"the script: {event.do}")
                return event.do == "drop"
            case "restart":
                self.restart()
                return True
            case "drop_worker":
                self.drop_worker()
        return False

    def restart(self) -> None:
        """Plays the restart of the leader."""
        endpoint = next(each for each in self._server.endpoints if each.service is self)
        self._server.restart(endpoint)
        self.restarted()
        self._checks.pages.leader_restarted()

    def drop(self) -> None:
        """Closes the connections of engines."""
        for peer in self._server.peers():
            if peer.endpoint.service is self and peer.hello is not None and peer.hello.role == "engine":
                self._server.close(peer, "a scripted drop")

    def drop_worker(self) -> None:
        """Closes the connections of all ranks."""
        for peer in self._server.peers():
            if peer.endpoint.service is not self:
                self._server.close(peer, "the script: drop_worker")

    def _refuse(self, request: Request, code: int, text: str, *, retry: bool = False) -> None:
        over = request.kind in (Kind.LOAD, Kind.STORE) and "never_over" not in self._lies
        self._server.answer(request, Error(code, text, retry=retry, over=over))

    def _memories(self) -> list[MappedMemory] | None:
        memories = [worker.memory for worker in self._workers if worker.memory is not None]
        return memories if len(memories) == len(self._workers) else None

    @staticmethod
    def _layout(memory: MappedMemory) -> bytes:
        group = memory.groups[0]
        sizes = f"{group.page_tokens} {group.page_bytes} {memory.ranks} ".encode()
        return store.short(sizes + memory.content, store.HASH_BYTES)

    # Lookups.

    def _lookup(self, request: Request) -> None:
        body, engine = request.body, request.session.engine
        memories = self._memories()
        try:
            hashes = bodies.hashes_of(body.hashes, body.hash_bytes)
        except wire.Malformed as error:
            self._refuse(request, Code.INVALID, str(error))
            return
        if not hashes or body.have_pages > len(hashes):
            text = f"have_pages is {body.have_pages} of {len(hashes)} hashes: name the hashes of all full pages"
            self._refuse(request, Code.INVALID, text)
            return
        key = engine, body.slot
        if request.id < self._last(key):
            self._refuse(request, Code.UNKNOWN_SLOT, f"slot {body.slot} was finished or opened by a later request")
            return
        if memories is None:
            self._refuse(request, Code.NOT_READY, "a rank has not registered its memory: retry later", retry=True)
            return
        if key not in self._slots and len(self._slots) >= SLOTS_MAX:
            self._refuse(request, Code.LIMIT, f"{SLOTS_MAX} slots are open: finish some", retry=True)
            return
        slot = self._slots[key] = Slot(request.id, body.namespace, hashes, body.have_pages)
        layout = self._layout(memories[0])
        limit = len(hashes) if body.limit_pages is None else min(body.limit_pages, len(hashes))
        slot.end = slot.device_pages
        for page in slot.keys(layout, slot.device_pages, limit):
            if page not in self.stored:
                break
            slot.end += 1
        if "one_page_less" in self._lies:
            slot.end = max(slot.end - 1, slot.device_pages)
        slot.held_until = time.monotonic() + HOLD_S
        answer = wire.LookupAnswer(max(slot.end - slot.device_pages, 0))
        self._server.answer(request, answer)

    def _last(self, key: tuple[bytes, int]) -> int:
        opened = self._slots[key].opened_by if key in self._slots else 0
        return max(opened, self._finished.get(key, 0))

    def _finish(self, request: Request) -> None:
        key = request.session.engine, request.body.slot
        slot = self._slots.get(key)
        if slot is not None and slot.opened_by < request.id and "keeps_slots" not in self._lies:
            del self._slots[key]
        if slot is None or slot.opened_by < request.id:
            self._finished[key] = max(request.id, self._finished.get(key, 0))
            while len(self._finished) > SLOTS_MAX:
                del self._finished[next(iter(self._finished))]
        self._server.answer(request, wire.Empty())

    # Copies.

    def _copy(self, request: Request, event: Event | None) -> None:
        body, engine = request.body, request.session.engine
        is_store = request.kind == Kind.STORE
        memories = self._memories()
        key = engine, body.slot
        slot = self._slots.get(key)
        if slot is None or request.id < slot.opened_by:
            self._refuse(request, Code.UNKNOWN_SLOT, f"slot {body.slot} is not open: begin with a lookup")
            return
        if memories is None:
            self._refuse(request, Code.NOT_READY, "a rank has not registered its memory: compute", retry=True)
            return
        try:
            pages = self._pages(body, memories[0])
            if is_store:
                self._learn(slot, body)
            if any(at >= len(slot.hashes) for at, _ in pages):
                raise wire.Malformed(
                    f"first_page: slot {body.slot} has {len(slot.hashes)} hashes: name those of all pages"
                )
        except wire.Malformed as error:
            self._refuse(request, Code.INVALID, str(error))
            return
        named = [at for at, _ in pages]
        found = slot.device_pages <= min(named) <= max(named) < slot.end and time.monotonic() <= slot.held_until
        if not is_store and not found:
            text = (
                f"pages {min(named)} to {max(named)}: the last lookup of slot {body.slot} found pages "
                f"{slot.device_pages} up to {slot.end}, for 30 s"
            )
            self._refuse(request, Code.NOT_PINNED, text)
            return
        layout = self._layout(memories[0])
        keys = [slot.keys(layout, at, at + 1)[0] for at, _ in pages]
        after = body.after or (request.id if is_store else 0)
        copy = Copy(request, body.slot, pages, keys, after, is_store, event)
        self._copies[engine, request.id] = copy
        self._server.later(max(request.deadline - time.monotonic(), 0.0), lambda: self._expire(copy))
        self.advance()

    @staticmethod
    def _pages(body: Any, memory: MappedMemory) -> list[tuple[int, int]]:
        pages: list[tuple[int, int]] = []
        for part in body.parts:
            if part.group != 0:
                raise wire.Malformed(f"group is {part.group}: the registration has group 0 alone")
            named = bodies.pages_of(part.pages)
            if part.count != len(named):
                raise wire.Malformed(f"count is {part.count}, and pages names {len(named)}")
            pages += enumerate(named, part.first_page)
        if not pages or len({at for at, _ in pages}) < len(pages):
            raise wire.Malformed("parts: name each page of the sequence once, and at least one")
        if (last := max(page for _, page in pages)) >= memory.groups[0].device_pages:
            raise wire.Malformed(f"page {last}: the memory has {memory.groups[0].device_pages} pages")
        return pages

    @staticmethod
    def _learn(slot: Slot, body: Any) -> None:
        more = bodies.hashes_of(body.more_hashes, body.hash_bytes)
        if body.more_from > len(slot.hashes):
            raise wire.Malformed(
                f"more_from is {body.more_from}: the slot has {len(slot.hashes)} hashes, leave none out"
            )
        known = slot.hashes[body.more_from : body.more_from + len(more)]
        if known != more[: len(known)]:
            raise wire.Malformed("more_hashes: the slot has other hashes of these pages")
        slot.hashes += more[len(known) :]

    def advance(self) -> None:
        """Starts the copies that wait for nothing any longer, and ends those that the ranks have given up."""
        for key, copy in list(self._copies.items()):
            if any(worker.gives_up(key[1], key[0]) for worker in self._workers):
                self._over(copy, Error(Code.COPY_FAILED, "a rank has abandoned the request", retry=True, over=True))
            elif not copy.started and not (copy.event and copy.event.do == "silent"):
                written = min(worker.written for worker in self._workers)
                if written >= copy.after or "reads_early" in self._lies:
                    self._start(copy)

    def _start(self, copy: Copy) -> None:
        memories = self._memories()
        if memories is None:
            return
        copy.started = True
        if copy.is_store:
            copy.data = [[memory.read(0, page) for _, page in copy.pages] for memory in memories]
        else:
            self._write(copy, memories)
        self._checks.started(copy)
        self._server.later(self._server.settings.settle_ms / 1000, lambda: self._settled(copy))

    def _write(self, copy: Copy, memories: Sequence[MappedMemory]) -> None:
        event = copy.event.do if copy.event else ""
        copy.loaded = {"half": len(copy.pages) // 2, "fail": 0}.get(event, len(copy.pages))
        if event == "half" and len(copy.request.body.parts) > 1:
            # A load of several parts is carried out as a whole.
            copy.loaded = 0
        for rank, memory in enumerate(memories):
            data = [self.stored.of(key)[rank] for key in copy.keys[: copy.loaded] if key in self.stored]
            copy.loaded = min(copy.loaded, len(data))
            # A load that fails may leave anything in the other pages.
            size = memory.groups[0].page_bytes
            data = data[: copy.loaded] + [secrets.token_bytes(size) for _ in copy.pages[copy.loaded :]]
            if "wrong_bytes" in self._lies:
                data[0] = bytes([data[0][0] ^ 1]) + data[0][1:]
            for (_, page), content in zip(copy.pages, data, strict=True):
                memory.write(0, page, content)
            copy.data.append(data)

    def _settled(self, copy: Copy) -> None:
        if copy.request.done and copy.request.late_s <= 0:
            return
        memories = self._memories()
        if memories is not None:
            self._checks.settles(copy, memories)
        if copy.request.late_s > 0:
            # The pages are watched until the answer.
            late_s, copy.request.late_s = copy.request.late_s, 0.0
            self._server.later(late_s, lambda: self._settled(copy))
            return
        if copy.request.done:
            copy.drop()
            return
        if not copy.is_store:
            whole = copy.loaded == len(copy.pages)
            if whole or (len(copy.request.body.parts) == 1 and not (copy.event and copy.event.do == "fail")):
                self._over(copy, wire.LoadAnswer(copy.loaded))
            else:
                self._over(copy, Error(Code.COPY_FAILED, "the copy failed by the script", retry=True, over=True))
            copy.drop()
            return
        answer = wire.StoreAnswer(0, 0)
        for at, key in enumerate(copy.keys):
            if key in self.stored:
                answer.present_pages += 1
            elif self.stored.add(key, [data[at] for data in copy.data]):
                answer.stored_pages += 1
            else:
                answer.refused_pages += 1
        self._over(copy, answer)
        copy.drop()
        self._wake_reads()

    def _expire(self, copy: Copy) -> None:
        if not copy.started and not copy.request.done and not (copy.event and copy.event.do == "silent"):
            self._over(
                copy, Error(Code.DEADLINE, "the deadline passed before the pages were written", retry=True, over=True)
            )

    def _over(self, copy: Copy, body: Any) -> None:
        self._copies.pop((copy.request.session.engine, copy.request.id), None)
        if isinstance(body, Error) and "never_over" in self._lies:
            body = Error(body.code, body.message, body.retry)
        self._server.answer(copy.request, body)

    def _memory_lost(self) -> None:
        for copy in list(self._copies.values()):
            if not (copy.event and copy.event.do == "silent"):
                if copy.is_store:
                    self._over(copy, wire.StoreAnswer(0, 0, failed_pages=len(copy.pages)))
                else:
                    self._over(
                        copy, Error(Code.COPY_FAILED, "the connection of a rank has ended", retry=True, over=True)
                    )

    def _cancel(self, request: Request) -> None:
        cancelled = 0
        for (engine, identity), copy in list(self._copies.items()):
            wanted = request.body.slot in (None, copy.slot) and identity < request.id
            if copy.is_store and engine == request.session.engine and wanted:
                cancelled += 1
                self._over(copy, wire.StoreAnswer(0, 0, failed_pages=len(copy.pages)))
        self._server.answer(request, wire.CancelStoresAnswer(cancelled))

    # Resets, events, status.

    def _held(self) -> set[Key]:
        memories = self._memories()
        if memories is None:
            return set()
        layout, now = self._layout(memories[0]), time.monotonic()
        held: set[Key] = set()
        for slot in self._slots.values():
            if slot.held_until > now:
                held.update(slot.keys(layout, slot.device_pages, slot.end))
        return held

    def _reset(self, request: Request) -> None:
        body = request.body
        try:
            hashes = bodies.hashes_of(body.hashes, body.hash_bytes)
        except wire.Malformed as error:
            self._refuse(request, Code.INVALID, str(error))
            return
        wanted = {each[-store.HASH_BYTES :] for each in hashes} if body.hash_bytes else None
        keys = self.stored.keys(body.namespace, wanted)
        holders = self._held().intersection(keys)
        if holders and "ignores_holds" not in self._lies:
            text = f"lookups or loads hold {len(holders)} of the pages: retry when they are finished"
            self._refuse(request, Code.LEASED, text, retry=True)
            return
        removed = 0 if body.tier == 3 else self.stored.remove(keys, "reset")
        self._server.answer(request, wire.ResetAnswer(removed))
        self._wake_reads()

    def _read_events(self, request: Request) -> None:
        earlier = self._reads.pop(request.peer, None)
        if earlier is not None:
            self._answer_read(earlier)
        body = request.body
        lost = body.epoch != self._server.epoch or body.cursor is not None
        if lost or body.wait_ms == 0 or body.from_ < self.stored.next:
            self._answer_read(request)
            return
        self._reads[request.peer] = request
        limit_s = min(body.wait_ms / 1000, READ_EVENTS_WAIT_MAX_S, max(request.deadline - time.monotonic(), 0.0))

        def give_up() -> None:
            if self._reads.get(request.peer) is request:
                del self._reads[request.peer]
                self._answer_read(request)

        self._server.later(limit_s, give_up)

    def _wake_reads(self) -> None:
        for peer, request in list(self._reads.items()):
            if request.body.from_ < self.stored.next:
                del self._reads[peer]
                self._answer_read(request)

    def _answer_read(self, request: Request) -> None:
        body, epoch = request.body, self._server.epoch
        found = None
        if body.epoch == epoch and body.cursor is None:
            found = self.stored.since(body.from_, body.most, body.namespace)
        if found is not None:
            answer = wire.Events(epoch, found[1], False, store.HASH_BYTES, found[0])
        else:
            present = self.stored.present(body.namespace) if body.cursor is not None else []
            answer = wire.Events(epoch, self.stored.next, True, store.HASH_BYTES, present)
        self._server.answer(request, answer)

    def _status(self) -> wire.StatusAnswer:
        memories = self._memories()
        ranks = [wire.RankStatus(**worker.probe()) for worker in self._workers]
        return wire.StatusAnswer(
            version="contract",
            epoch=self._server.epoch,
            ready=memories is not None,
            ratio=1,
            hash_tokens=memories[0].groups[0].page_tokens if memories else 0,
            ranks=ranks,
            slots=len(self._slots),
            copies_under_way=self.copies,
            tiers=[wire.TierStatus(tier=2, used_pages=len(self.stored))],
        )
