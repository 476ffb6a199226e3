"""Checks of lookups, loads and stores of a running kvferry, with bytes that are compared."""

import secrets
import time
from collections.abc import Callable, Iterator

import msgspec

from kvferry import wire
from kvferry.contract.live import Connection
from kvferry.contract.played import LENGTH, PAGES, PlayedEngine, of, pause, refused, shown, want
from kvferry.wire import Code, Error, Kind

_MS = 10_000


class CopyChecks:
    """The checks, for an engine whose ranks have registered."""

    def __init__(self, engine: PlayedEngine):
        self._engine = engine

    def all(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yields each rule with its check, in the order in which they run."""
        yield "lookup-nothing", self._lookup_nothing
        yield "unknown-field", self._unknown_field
        yield "store-waits", self._store_waits
        yield "store-found", self._store_found
        yield "load-bytes", self._load_bytes
        yield "load-after", self._load_after
        yield "load-pinned", self._load_pinned
        yield "namespaces-apart", self._namespaces
        yield "present-pages", self._present
        yield "stores-together", self._together
        yield "retry-answer", self._retry
        yield "retry-reconnect", self._retry_reconnect
        yield "hashes-of-a-slot", self._other_hashes
        yield "held-pages", self._held
        yield "finish-closes", self._finished
        yield "cancel-stores", self._cancel
        yield "abandon", self._abandon
        yield "deadline-of-a-store", self._deadline
        yield "credits-end", self._credits
        yield "read-events", self._events
        yield "reset-by-hash", self._reset_by_hash
        yield "hash-width", self._hash_width
        yield "registers-again", self._registers_again
        yield "unregister", self._unregister

    def _lookup_nothing(self) -> None:
        slot = self._engine.lookup(self._engine.hashes())
        want(self._engine.found == 0, f"a lookup of random hashes found {self._engine.found} pages")
        self._engine.finish(slot)

    def _unknown_field(self) -> None:
        slot = next(self._engine.slots)
        self._engine.open_slots.add(slot)
        body = {
            "slot": slot,
            "namespace": self._engine.namespace,
            "hash_bytes": 32,
            "hashes": secrets.token_bytes(32),
            "later": {"a": [1]},
        }
        of(self._engine.ask(Kind.LOOKUP, body), wire.LookupAnswer, "a lookup with an unknown field")
        self._engine.finish(slot)

    def _store_waits(self) -> None:
        hashes, pages = self._engine.hashes(), list(range(LENGTH))
        slot = self._engine.lookup(hashes)
        self._engine.fill(pages)
        identity = self._engine.send_store(slot, pages)
        want(not self._engine.talk.answered(identity), "a store was answered before written")
        data = self._engine.fill(pages)
        self._engine.wrote(identity)
        of(self._engine.talk.answer(identity), wire.StoreAnswer, "a store")
        self._engine.finish(slot)
        self._engine.expect_loaded(hashes, data, "pages that were written between the store and written")

    def _store_found(self) -> None:
        hashes, _ = self._engine.stored()
        for limit, device, wanted in ((None, 0, LENGTH), (LENGTH - 2, 0, LENGTH - 2), (None, 2, LENGTH - 2)):
            slot = self._engine.lookup(hashes, limit_pages=limit, have_pages=device)
            found = self._engine.found
            want(found == wanted, f"limit_pages {limit} and have_pages {device}: {found} pages found, not {wanted}")
            self._engine.finish(slot)
        slot = self._engine.lookup([*hashes[:3], *self._engine.hashes(3)])
        want(self._engine.found == 3, f"a sequence that shares 3 pages found {self._engine.found}")
        self._engine.finish(slot)

    def _load_bytes(self) -> None:
        hashes, data = self._engine.stored()
        around = list(range(PAGES))
        before = self._engine.fill(around)
        slot = self._engine.lookup(hashes)
        pages = [17, 3, 12, 13, 8, 21]
        answer = of(self._engine.load(slot, pages), wire.LoadAnswer, "a load")
        want(answer.pages == LENGTH, f"a load of {LENGTH} pages was answered {shown(answer)}")
        self._engine.compare(pages, data, "a load to scattered pages")
        others = [page for page in around if page not in pages]
        self._engine.compare(
            others, [[rank[page] for page in others] for rank in before], "pages that the load does not name"
        )
        self._engine.finish(slot)

    def _load_after(self) -> None:
        hashes, data = self._engine.stored()
        slot = self._engine.lookup(hashes)
        work, identity = next(self._engine.ids), next(self._engine.ids)
        pages = list(range(LENGTH))
        self._engine.talk.send(
            Kind.LOAD, identity, wire.Load(slot, [wire.part(0, [[0, LENGTH]])], work), deadline_ms=_MS
        )
        want(not self._engine.talk.answered(identity), f"a load after work {work} was answered before it was written")
        self._engine.fill(pages)
        self._engine.wrote(work)
        of(self._engine.talk.answer(identity), wire.LoadAnswer, "a load")
        self._engine.compare(pages, data, "pages that were written before the work of load.after")
        self._engine.finish(slot)

    def _load_pinned(self) -> None:
        hashes, _ = self._engine.stored()
        slot = self._engine.lookup([*hashes[:2], *self._engine.hashes(2)])
        before = self._engine.fill([0, 1, 2])
        error = refused(self._engine.load(slot, [0, 1, 2]), Code.NOT_PINNED, "a load of a page that was not found")
        want(error.over, "a load that was refused as not_pinned has over: false")
        self._engine.compare([0, 1, 2], before, "a load that was refused")
        self._engine.finish(slot)

    def _namespaces(self) -> None:
        hashes, _ = self._engine.stored()
        slot = self._engine.lookup(hashes, namespace=self._engine.namespace + b"-other")
        want(self._engine.found == 0, f"a lookup in another namespace found {self._engine.found} pages")
        self._engine.finish(slot)

    def _present(self) -> None:
        hashes, data = self._engine.stored()
        slot = self._engine.lookup(hashes)
        pages = list(range(LENGTH))
        self._engine.clear(pages)
        identity = self._engine.send_store(slot, pages)
        self._engine.wrote(identity)
        answer = of(self._engine.talk.answer(identity), wire.StoreAnswer, "a store")
        want((answer.stored_pages, answer.present_pages) == (0, LENGTH), f"present pages: {shown(answer)}")
        self._engine.finish(slot)
        self._engine.expect_loaded(hashes, data, "pages that were present")

    def _together(self) -> None:
        hashes = self._engine.hashes(4)
        slot = self._engine.lookup(hashes)
        data = self._engine.fill([0, 1, 2, 3])
        first, second = next(self._engine.ids), next(self._engine.ids)
        stores = [
            wire.NumberedStore(identity, _MS, msgspec.Raw(wire.body_of(wire.Store(slot, [wire.part(at, [[at, 2]])]))))
            for identity, at in ((first, 0), (second, 2))
        ]
        together = next(self._engine.ids)
        self._engine.talk.send(Kind.STORES, together, wire.Stores(stores), deadline_ms=_MS)
        self._engine.wrote(second)
        answer = of(self._engine.talk.answer(together), wire.StoresAnswer, "stores")
        # Answers of single stores may come in addition, before or after that of all.
        self._engine.talk.answered(-1)
        self._engine.talk.unread = [
            each for each in self._engine.talk.unread if each.correlation not in (first, second)
        ]
        results = [each.answer.stored_pages if each.answer else 0 for each in answer.results]
        want(results == [2, 2], f"two stores of 2 pages each: {shown(answer)}")
        self._engine.finish(slot)
        self._engine.expect_loaded(hashes, data, "pages of two stores in one message")

    def _retry(self) -> None:
        hashes = self._engine.hashes()
        slot = self._engine.lookup(hashes)
        self._engine.fill(list(range(LENGTH)))
        identity = next(self._engine.ids)
        body = wire.Store(slot, [wire.part(0, [[0, LENGTH]])])
        self._engine.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        self._engine.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        # Both have arrived before the store can end.
        want(not self._engine.talk.answered(identity), "a store was answered before written")
        self._engine.wrote(identity)
        first = self._engine.talk.answer(identity)
        want(not self._engine.talk.answered(identity), "a request that was repeated while it was open has two answers")
        second = self._engine.talk.ask(Kind.STORE, identity, body)
        want(first == second, f"the first answer is {shown(first)}, that of the repeated request {shown(second)}")
        of(first, wire.StoreAnswer, "a store")
        self._engine.finish(slot)

    def _retry_reconnect(self) -> None:
        hashes = self._engine.hashes()
        slot = self._engine.lookup(hashes)
        data = self._engine.fill(list(range(LENGTH)))
        identity = next(self._engine.ids)
        body = wire.Store(slot, [wire.part(0, [[0, LENGTH]])])
        self._engine.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        self._engine.talk.answered(-1)
        self._engine.reconnect()
        self._engine.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        # The request has arrived again before the store can end: otherwise it has two answers.
        want(not self._engine.talk.answered(identity), "a store was answered before written")
        self._engine.wrote(identity)
        answer = of(
            self._engine.talk.answer(identity), wire.StoreAnswer, "a store that was repeated over a new connection"
        )
        want(answer.stored_pages == LENGTH, f"{LENGTH} new pages: {shown(answer)}")
        again = self._engine.reconnect().ask(Kind.STORE, identity, body)
        want(again == answer, f"over a third connection the answer is {shown(again)}, not {shown(answer)}")
        self._engine.finish(slot)
        self._engine.expect_loaded(hashes, data, "pages of a store that was repeated")

    def _other_hashes(self) -> None:
        hashes = self._engine.hashes()
        slot = self._engine.lookup(hashes)
        wrong = b"".join(self._engine.hashes())
        identity = self._engine.send_store(slot, list(range(LENGTH)), hash_bytes=32, more_hashes=wrong)
        error = refused(self._engine.talk.answer(identity), Code.INVALID, "a store with other hashes than its slot")
        want(error.over, "a store that was refused as invalid has over: false")
        self._engine.finish(slot)

    def _held(self) -> None:
        hashes, _ = self._engine.stored()
        slot = self._engine.lookup(hashes)
        error = refused(
            self._engine.ask(Kind.RESET, wire.reset(self._engine.namespace)), Code.LEASED, "a reset of held pages"
        )
        want(error.retry, "leased has retry: false")
        again = self._engine.lookup(hashes)
        want(
            self._engine.found == LENGTH, f"after a refused reset a lookup finds {self._engine.found} of {LENGTH} pages"
        )
        self._engine.finish(slot)
        self._engine.finish(again)
        of(self._engine.ask(Kind.RESET, wire.reset(self._engine.namespace)), wire.ResetAnswer, "a reset after finish")
        slot = self._engine.lookup(hashes)
        want(self._engine.found == 0, f"after a reset a lookup finds {self._engine.found} pages")
        self._engine.finish(slot)

    def _finished(self) -> None:
        hashes, _ = self._engine.stored()
        slot = self._engine.lookup(hashes)
        early = next(self._engine.ids)
        self._engine.finish(slot)
        load = wire.Load(slot, [wire.part(0, [0])])
        body = wire.Store(slot, [wire.part(0, [0])])
        for what, kind, request, identity in (
            ("a load after finish", Kind.LOAD, load, next(self._engine.ids)),
            ("a store after finish", Kind.STORE, body, next(self._engine.ids)),
            ("a store that arrives after a finish with a higher id", Kind.STORE, body, early),
        ):
            error = refused(self._engine.talk.ask(kind, identity, request), Code.UNKNOWN_SLOT, what)
            want(error.over, f"{what} was refused with over: false")

    def _cancel(self) -> None:
        slot = self._engine.lookup(self._engine.hashes())
        identity = self._engine.send_store(slot, list(range(LENGTH)))
        want(not self._engine.talk.answered(identity), "a store was answered before written")
        answer = of(
            self._engine.ask(Kind.CANCEL_STORES, wire.CancelStores(slot)), wire.CancelStoresAnswer, "cancel_stores"
        )
        want(answer.stores == 1, f"one store was open: {shown(answer)}")
        want(self._engine.talk.answered(identity), "cancel_stores was answered before its store")
        stored = of(self._engine.talk.answer(identity), wire.StoreAnswer, "a store that was cancelled")
        want(stored.stored_pages + stored.failed_pages == LENGTH, f"{LENGTH} pages: {shown(stored)}")
        self._engine.finish(slot)

    def _abandon(self) -> None:
        hashes = self._engine.hashes()
        slot = self._engine.lookup(hashes)
        pages = list(range(LENGTH))
        self._engine.fill(pages)
        identity = self._engine.send_store(slot, pages)
        for rank in self._engine.ranks:
            of(rank.ask(Kind.ABANDON, wire.Abandon([identity])), wire.Empty, "abandon")
        self._engine.wrote(identity)
        answer = self._engine.talk.answer(identity)
        ended = isinstance(answer, wire.StoreAnswer) and answer.stored_pages == 0
        want(ended or isinstance(answer, Error), f"a store that every rank abandoned: {shown(answer)}")
        self._engine.finish(slot)
        slot = self._engine.lookup(hashes)
        want(self._engine.found == 0, f"a lookup finds {self._engine.found} pages of a store that was abandoned")
        self._engine.finish(slot)

    def _deadline(self) -> None:
        slot = self._engine.lookup(self._engine.hashes())
        began = time.monotonic()
        identity = self._engine.send_store(slot, list(range(LENGTH)), deadline_ms=300)
        answer = self._engine.talk.answer(identity)
        took_s = time.monotonic() - began
        want(took_s < 5, f"a store with a deadline of 0.3 s was answered after {took_s:.1f} s")
        freed = answer.over if isinstance(answer, Error) else getattr(answer, "stored_pages", 1) == 0
        want(freed, f"a store that was never written: {shown(answer)}")
        self._engine.finish(slot)

    def _credits(self) -> None:
        welcome = self._engine.talk.welcome
        assert welcome is not None
        slot = self._engine.lookup(self._engine.hashes(1))
        ids = [self._engine.send_store(slot, [0]) for _ in range(welcome.request_credits)]
        beyond = self._engine.send_store(slot, [0])
        error = refused(self._engine.talk.answer(beyond), Code.BUSY, f"request {len(ids) + 1} without an answer")
        want(error.retry and not error.over, f"busy has retry and no over: {shown(error)}")
        self._engine.wrote(ids[-1])
        for identity in ids:
            answer = self._engine.talk.answer(identity)
            want(isinstance(answer, (wire.StoreAnswer, Error)), f"a store: {shown(answer)}")
        self._engine.finish(slot)

    def _read(self, epoch: int, first: int, cursor: int | None, wait_ms: int = 0) -> wire.Events:
        body = {"epoch": epoch, "from": first, "most": 4096, "wait_ms": wait_ms, "namespace": self._engine.namespace}
        if cursor is not None:
            body["cursor"] = cursor
        return of(self._engine.ask(Kind.READ_EVENTS, body), wire.Events, "read_events")

    def _events(self) -> None:
        hashes, _ = self._engine.stored()
        begun = self._read(0, 0, 0)
        want(begun.lost, "the first read has lost: false")
        present, events = _apply({}, begun), begun
        while events.cursor is not None:
            events = self._read(events.epoch, events.next, events.cursor)
            present = _apply(present, events)
        held = {page for pages in present.values() for page in pages}
        short = {each[-begun.hash_bytes :] for each in hashes}
        want(short <= held, f"{len(short - held)} of {len(short)} stored pages are not in the log")
        of(self._engine.ask(Kind.RESET, wire.reset(self._engine.namespace)), wire.ResetAnswer, "a reset")
        until = time.monotonic() + 5
        while short & {page for pages in present.values() for page in pages}:
            want(time.monotonic() < until, "pages that were reset are not gone in the log")
            events = self._read(events.epoch, events.next, None, 500)
            want(not events.lost, "a read of the last changes has lost: true")
            present = _apply(present, events)

    def _reset_by_hash(self) -> None:
        hashes, _ = self._engine.stored()
        last = hashes[-1]
        answer = self._engine.ask(Kind.RESET, wire.reset(self._engine.namespace, hash_bytes=len(last), hashes=last))
        want(of(answer, wire.ResetAnswer, "a reset by hash").pages >= 1, f"one page: {shown(answer)}")
        slot = self._engine.lookup(hashes)
        want(
            self._engine.found < LENGTH,
            f"a lookup finds {self._engine.found} of {LENGTH} pages, one of which was reset",
        )
        self._engine.finish(slot)

    def _hash_width(self) -> None:
        body = wire.Lookup(
            slot=next(self._engine.slots), namespace=self._engine.namespace, hash_bytes=8, hashes=bytes(16)
        )
        answer = self._engine.ask(Kind.LOOKUP, body)
        want(isinstance(answer, Error) and not answer.retry, f"hashes of 8 bytes: {shown(answer)}")

    def _registers_again(self) -> None:
        hashes, data = self._engine.stored()
        last = next(self._engine.ids)
        for rank in self._engine.ranks:
            connection = rank.connection
            connection.close()
            again = Connection(
                rank.directory, "rank", self._engine.name, rank=connection.rank, replica=self._engine.target.replica
            )
            rank.connection = self._engine.beside(again).opened()
        self._engine.register()
        self._engine.wrote(last)
        self._engine.expect_loaded(hashes, data, "pages that were stored before the ranks registered again")

    def _unregister(self) -> None:
        until = time.monotonic() + 10
        for rank in self._engine.ranks:
            answer = rank.ask(Kind.UNREGISTER, wire.Unregister())
            while isinstance(answer, Error) and answer.retry and time.monotonic() < until:
                pause()
                answer = rank.ask(Kind.UNREGISTER, wire.Unregister())
            of(answer, wire.Empty, "unregister")


def _apply(present: dict[tuple[int, int], set[bytes]], events: wire.Events) -> dict[tuple[int, int], set[bytes]]:
    """Applies records to a map from tier and place to the page there."""
    present = {} if events.lost else present
    width = events.hash_bytes
    for record in events.records:
        for at in range(len(record.hashes) // width):
            place = record.tier, record.place + at
            if record.event == "stored":
                present[place] = {record.hashes[at * width : (at + 1) * width]}
            else:
                present.pop(place, None)
        if record.event == "cleared":
            present = {place: pages for place, pages in present.items() if place[0] != record.tier}
    return present
