"""Checks of a running kvferry, with an engine that is played here. Nothing of other engines is touched."""

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry import wire
from kvferry.contract.leader_rules import LEADER_RULES
from kvferry.contract.live import Broken, Connection, Rank, Unavailable
from kvferry.contract.pages import OwnMemory
from kvferry.contract.rules import Report
from kvferry.wire import Code, Error, Kind

PAGES = 24
PAGE_BYTES = 16 << 10
#: Pages of the sequences.
LENGTH = 6
#: Error codes of docs/wire.md that have no name in :class:`Code`.
_MALFORMED, _HELLO_FIRST, _UNCONFIRMED, _STALE_EPOCH = 1, 15, 19, 13
_CODES = {*map(int, Code), _MALFORMED, _HELLO_FIRST, _UNCONFIRMED, _STALE_EPOCH}
_READY_LIMIT_S = 60.0
_MS = 10_000


@dataclass(frozen=True)
class Target:
    """The kvferry that is checked."""

    socket_dir: Path
    replica: int = 0
    ranks: int = 0
    page_tokens: int = 0
    kv_shards: int = 0
    #: Pages of engines that are not connected may be lost.
    discard_pages: bool = False


class LeaderChecks:
    """An engine with its ranks, and the checks. :meth:`run` does all of it."""

    def __init__(self, target: Target):
        self._target = target
        self._leader_dir = target.socket_dir / "leader"
        self.report = Report(LEADER_RULES)
        self._engine = secrets.token_bytes(16)
        self._namespace = b"kvferry-contract-" + secrets.token_bytes(16)
        #: From the clock, as an engine may draw them.
        self._ids = itertools.count(time.time_ns() // 1000)
        self._slots = itertools.count(1)
        self._ranks: list[Rank] = []
        self._connections: list[Connection] = []
        self._talk: Connection | None = None
        self._open_slots: set[int] = set()
        self._pages_total = 0

    @property
    def talk(self) -> Connection:
        """The connection of the engine."""
        if self._talk is None:
            raise Broken("there is no connection to the leader")
        return self._talk

    # Helpers.

    def _connect(self, role: str = "engine", engine: bytes | None = None) -> Connection:
        engine = secrets.token_bytes(16) if engine is None else engine
        connection = Connection(self._leader_dir, role, engine, replica=self._target.replica)
        return self._beside(connection)

    def _beside(self, connection: Connection) -> Connection:
        """Keeps a connection alive while the checks wait for another one."""
        self._connections.append(connection)
        connection.beside = self._connections
        return connection

    def _reconnect(self) -> Connection:
        """Replaces the connection of the engine by a new one."""
        if self._talk is not None:
            self._talk.close()
        self._talk = self._connect(engine=self._engine).opened()
        return self._talk

    def _ask(self, kind: int, body: msgspec.Struct | dict[str, Any], **how: Any) -> Any:
        return self.talk.ask(kind, next(self._ids), body, **how)

    def _hashes(self, count: int = LENGTH) -> list[bytes]:
        return [secrets.token_bytes(32) for _ in range(count)]

    def _lookup(
        self, hashes: list[bytes], slot: int | None = None, *, namespace: bytes | None = None, **how: Any
    ) -> int:
        """Looks hashes up in a new slot, or in this one; returns the slot. Its answer is :attr:`found`."""
        slot = next(self._slots) if slot is None else slot
        body = wire.Lookup(
            slot=slot,
            namespace=self._namespace if namespace is None else namespace,
            hash_bytes=len(hashes[0]),
            hashes=b"".join(hashes),
            **how,
        )
        self._open_slots.add(slot)
        answer = self._ask(Kind.LOOKUP, body)
        self.found = _of(answer, wire.LookupAnswer, "a lookup").hit_pages
        return slot

    def _finish(self, slot: int) -> None:
        _of(self._ask(Kind.FINISH, wire.Finish(slot)), wire.Empty, "a finish")
        self._open_slots.discard(slot)

    def _wrote(self, through: int) -> None:
        for rank in self._ranks:
            _of(rank.wrote(through), wire.Empty, "written")

    def _fill(self, pages: list[int]) -> list[list[bytes]]:
        """Writes random bytes into pages of every rank; returns them, by rank."""
        data = []
        for rank in self._ranks:
            data.append([secrets.token_bytes(PAGE_BYTES) for _ in pages])
            for page, content in zip(pages, data[-1], strict=True):
                rank.memory.write(page, content)
        return data

    def _clear(self, pages: list[int]) -> None:
        for rank in self._ranks:
            for page in pages:
                rank.memory.write(page, bytes(PAGE_BYTES))

    def _compare(self, pages: list[int], data: list[list[bytes]], what: str) -> None:
        for number, (rank, wanted) in enumerate(zip(self._ranks, data, strict=True)):
            for page, content in zip(pages, wanted, strict=True):
                if rank.memory.read(page) != content:
                    raise Broken(f"{what}: page {page} of rank {number} has other bytes than were stored")

    def _send_store(self, slot: int, pages: list[int], *, first: int = 0, **how: Any) -> int:
        identity = next(self._ids)
        deadline_ms = how.pop("deadline_ms", _MS)
        parts = [wire.Part(first, wire.runs(pages))]
        self.talk.send(Kind.STORE, identity, wire.Store(slot, parts, **how), deadline_ms=deadline_ms)
        return identity

    def _stored(
        self, hashes: list[bytes] | None = None, pages: list[int] | None = None
    ) -> tuple[list[bytes], list[list[bytes]]]:
        """Stores a sequence, and finishes its slot; returns its hashes and bytes."""
        hashes = self._hashes() if hashes is None else hashes
        pages = list(range(len(hashes))) if pages is None else pages
        slot = self._lookup(hashes)
        data = self._fill(pages)
        identity = self._send_store(slot, pages)
        self._wrote(identity)
        answer = _of(self.talk.answer(identity), wire.StoreAnswer, "a store")
        if answer.stored_pages != len(hashes):
            raise Broken(f"a store of {len(hashes)} new pages was answered {_shown(answer)}")
        self._finish(slot)
        return hashes, data

    def _load(self, slot: int, pages: list[int], *, first: int = 0, after: int = 0) -> Any:
        return self._ask(Kind.LOAD, wire.Load(slot, [wire.Part(first, wire.runs(pages))], after))

    # Running.

    def run(self) -> Report:
        """Runs all checks.

        Raises:
            Unavailable: kvferry is in use, cannot be reached, or does not become ready.
        """
        try:
            self._prepare()
            idle = self._connect("admin").opened()
            idle.silent = True
            idle_since = time.monotonic()
            self._sessions()
            self._memory()
            if self._talk is not None and self._ranks:
                self._copies()
            self._check("silent-client", lambda: self._silent(idle, idle_since))
            self._sums()
        finally:
            self._clean_up()
        return self.report

    def _check(self, rule: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Broken as broken:
            self.report.broken(rule, str(broken))
            self._start_over()
            return False
        self.report.exercised(rule)
        return True

    def _start_over(self) -> None:
        """Frees what a failed check has left, so that the next one fails for reasons of its own alone."""
        if self._talk is None:
            return
        with contextlib.suppress(Broken, Unavailable):
            self._talk.spoiled = True
            self._reconnect()
            for slot in list(self._open_slots):
                self._finish(slot)

    def _prepare(self) -> None:
        """Refuses to run where an engine, or pages of one, would suffer."""
        target = self._target
        if not (self._leader_dir / "kvferry.sock").exists():
            raise Unavailable(f"socket_dir is {target.socket_dir}, where no leader listens: start kvferry first")
        with Connection(self._leader_dir, "admin", secrets.token_bytes(16)) as admin:
            answer = admin.opened().ask(Kind.STATUS, 1, wire.Status())
        if not isinstance(answer, wire.StatusAnswer):
            raise Unavailable(f"the leader answers no status: {_shown(answer)}")
        used = [rank for rank in answer.ranks if rank.attached]
        if used:
            first = used[0]
            raise Unavailable(
                f"rank {first.rank} of replica {first.replica} has the memory of an engine (worker {first.pid}): stop "
                "the engine, or check a kvferry of your own"
            )
        held = sum(tier.used_pages for tier in answer.tiers)
        if held and not target.discard_pages:
            raise Unavailable(
                f"kvferry holds {held} pages of an engine that is not connected, which a registration of other memory "
                "removes: check a kvferry of your own, or give --discard-pages"
            )
        ranks = [rank.rank for rank in answer.ranks if rank.replica == target.replica]
        self._count = target.ranks or max(ranks, default=0) + 1
        self._page_tokens = target.page_tokens or answer.engine_page_tokens or 16

    def _clean_up(self) -> None:
        with contextlib.suppress(Broken, Unavailable):
            if self._talk is not None and not self._talk.gone:
                for slot in list(self._open_slots):
                    self._finish(slot)
                self._ask(Kind.RESET, wire.Reset(self._namespace))
        for rank in self._ranks:
            rank.close()
        for connection in self._connections:
            connection.close()

    # Sessions.

    def _sessions(self) -> None:
        self._check("welcome", self._welcome)
        self._check("hello-comes-first", self._hello_first)
        self._check(
            "versions-without-overlap",
            lambda: self._refused_hello(Code.UNSUPPORTED_VERSION, version_min=900, version_max=901),
        )
        self._check("unknown-role", lambda: self._refused_hello(Code.INVALID, role="contract"))
        if self._talk is None:
            return
        self._check("pong", lambda: _want(not self.talk.answered(-1), "pong"))
        self._check("unknown-request", self._unknown_request)
        self._check("unknown-answer", self._unknown_answer)
        self._check("required-bit", self._required)
        self._check("malformed-body", self._malformed)
        self._check("wrong-role", self._wrong_role)

    def _welcome(self) -> None:
        talk = self._connect(engine=self._engine)
        answer = talk.hello()
        welcome = answer.body
        if not isinstance(welcome, wire.Welcome):
            raise Broken(f"hello was answered by {_shown(welcome)}")
        self._talk = talk
        if talk.welcome_version != wire.HELLO_VERSION:
            raise Broken(f"the welcome has version {talk.welcome_version} in its header: always {wire.HELLO_VERSION}")
        if not 1 <= welcome.version <= wire.VERSION:
            raise Broken(f"version is {welcome.version}, this side offered 1 to {wire.VERSION}")
        if min(welcome.heartbeat_ms, welcome.request_credits, welcome.byte_credits) <= 0:
            raise Broken(f"heartbeat_ms, request_credits and byte_credits are above 0: {_shown(welcome)}")

    def _hello_first(self) -> None:
        answer = self._connect().ask(Kind.STATUS, 7, wire.Status())
        _refused(answer, _HELLO_FIRST, "a status before hello")

    def _refused_hello(self, code: int, **fields: Any) -> None:
        answer = self._connect().hello(**fields)
        _refused(answer.body, code, f"hello with {fields}")

    def _unknown_request(self) -> None:
        _refused(self._ask(900, {"a": 1}), Code.UNKNOWN_KIND, "kind 900")
        self.talk.answered(-1)

    def _unknown_answer(self) -> None:
        identity = next(self._ids)
        self.talk.send(901, identity, {"a": 1}, deadline_ms=0)
        if self.talk.answered(identity):
            raise Broken("an answer of kind 901 was answered")

    def _required(self) -> None:
        identity = next(self._ids)
        self.talk.send(Kind.STATUS, identity, wire.Status(), required=1 << 15)
        _refused(self.talk.answer(identity), Code.UNSUPPORTED, "a status with bit 15 of bytes 20 and 21")
        self.talk.answered(-1)

    def _malformed(self) -> None:
        identity = next(self._ids)
        self.talk.send(Kind.LOOKUP, identity, b"\xc1")
        error = _refused(self.talk.answer(identity), _MALFORMED, "a lookup with a body that is no MessagePack")
        if error.retry:
            raise Broken("malformed has retry: true, and the same request never succeeds")
        self.talk.answered(-1)

    def _wrong_role(self) -> None:
        answer = self._ask(Kind.WRITTEN, wire.Written(1))
        _want(
            isinstance(answer, Error), f"written, sent by a scheduler to the leader, was answered by {_shown(answer)}"
        )
        self.talk.answered(-1)

    # Memory.

    def _memory(self) -> None:
        ranks = self._count
        shards = self._target.kv_shards or ranks
        content = b"kvferry-contract-" + secrets.token_bytes(16)
        for number in range(ranks):
            memory = OwnMemory(
                pages=PAGES,
                page_tokens=self._page_tokens,
                page_bytes=PAGE_BYTES,
                rank=number,
                ranks=ranks,
                shard=number * shards // ranks,
                content=content,
            )
            self._ranks.append(Rank(self._target.socket_dir, self._engine, memory, number, self._target.replica))
            self._beside(self._ranks[-1].connection)
        first = self._ranks[0]

        def without_content(registration: dict[str, Any]) -> None:
            del registration["content"]

        def contradiction(registration: dict[str, Any]) -> None:
            registration["groups"][0]["tensors"][0]["page_bytes"] += 1

        def without_proof(registration: dict[str, Any]) -> None:
            registration["nonce"]["bytes"] = secrets.token_bytes(32)

        def refused(change: Callable[[dict[str, Any]], None], *codes: int) -> None:
            until = time.monotonic() + _READY_LIMIT_S
            answer = first.register(change)
            # A worker whose host memory is not ready yet examines nothing.
            while isinstance(answer, Error) and answer.code not in codes and answer.retry and time.monotonic() < until:
                _pause()
                answer = first.register(change)
            _want(
                isinstance(answer, Error) and answer.code in codes, f"the registration was answered by {_shown(answer)}"
            )

        self._check("register-content", lambda: refused(without_content, Code.INVALID, _MALFORMED))
        self._check("register-contradiction", lambda: refused(contradiction, Code.INVALID))
        self._check("register-proof", lambda: refused(without_proof, Code.INVALID, Code.NOT_READY))
        if not self._check("register", self._register):
            for rank in self._ranks:
                rank.close()
            self._ranks = []

    def _register(self) -> None:
        until = time.monotonic() + _READY_LIMIT_S
        asked = []
        for rank in self._ranks:
            # Answered when the leader has agreed, which may need all ranks.
            registration = rank.memory.describe(rank.hand_over())
            identity = next(rank._ids)
            body = wire.Register(0, self._engine, registration)
            rank.connection.send(Kind.REGISTER, identity, body, deadline_ms=int(_READY_LIMIT_S * 1000))
            asked.append((rank, identity))
        for rank, identity in asked:
            answer = rank.connection.answer(identity, limit_s=_READY_LIMIT_S)
            while isinstance(answer, Error) and answer.retry and time.monotonic() < until:
                _pause()
                answer = rank.register()
            if isinstance(answer, Error) and "in use" in answer.message:
                raise Unavailable(f"the seat of rank {rank.connection.rank} is taken: {answer.message}")
            registered = _of(answer, wire.Registered, "a registration")
            if registered.page_bytes < PAGE_BYTES or registered.arena_pages < LENGTH or registered.not_served:
                raise Broken(f"memory with pages of {PAGE_BYTES} bytes is answered {_shown(registered)}")
        while True:
            status = self._ask(Kind.STATUS, wire.Status())
            if isinstance(status, wire.StatusAnswer) and status.ready:
                return
            if time.monotonic() > until:
                raise Broken(f"status does not become ready within {_READY_LIMIT_S:.0f} s after all ranks registered")
            _pause()

    # Copies.

    def _copies(self) -> None:
        for rule, action in self._copy_checks():
            self._check(rule, action)

    def _copy_checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
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
        slot = self._lookup(self._hashes())
        _want(self.found == 0, f"a lookup of random hashes found {self.found} pages")
        self._finish(slot)

    def _unknown_field(self) -> None:
        slot = next(self._slots)
        self._open_slots.add(slot)
        body = {
            "slot": slot,
            "namespace": self._namespace,
            "hash_bytes": 32,
            "hashes": secrets.token_bytes(32),
            "later": {"a": [1]},
        }
        _of(self._ask(Kind.LOOKUP, body), wire.LookupAnswer, "a lookup with an unknown field")
        self._finish(slot)

    def _store_waits(self) -> None:
        hashes, pages = self._hashes(), list(range(LENGTH))
        slot = self._lookup(hashes)
        self._fill(pages)
        identity = self._send_store(slot, pages)
        _want(not self.talk.answered(identity), "a store was answered before written")
        data = self._fill(pages)
        self._wrote(identity)
        _of(self.talk.answer(identity), wire.StoreAnswer, "a store")
        self._finish(slot)
        self._expect_loaded(hashes, data, "pages that were written between the store and written")

    def _expect_loaded(self, hashes: list[bytes], data: list[list[bytes]], what: str) -> None:
        slot = self._lookup(hashes)
        _want(self.found == len(hashes), f"a lookup of {len(hashes)} stored pages found {self.found}")
        pages = list(range(PAGES - len(hashes), PAGES))
        self._clear(pages)
        answer = _of(self._load(slot, pages), wire.LoadAnswer, "a load")
        _want(answer.pages == len(pages), f"a load of {len(pages)} pages was answered {_shown(answer)}")
        self._compare(pages, data, what)
        self._finish(slot)

    def _store_found(self) -> None:
        hashes, _ = self._stored()
        for limit, device, wanted in ((None, 0, LENGTH), (LENGTH - 2, 0, LENGTH - 2), (None, 2, LENGTH - 2)):
            slot = self._lookup(hashes, limit_pages=limit, device_pages=device)
            text = f"limit_pages {limit} and device_pages {device}: {self.found} of {LENGTH} pages found, not {wanted}"
            _want(self.found == wanted, text)
            self._finish(slot)
        slot = self._lookup([*hashes[:3], *self._hashes(3)])
        _want(self.found == 3, f"a sequence that shares 3 pages found {self.found}")
        self._finish(slot)

    def _load_bytes(self) -> None:
        hashes, data = self._stored()
        around = list(range(PAGES))
        before = self._fill(around)
        slot = self._lookup(hashes)
        pages = [17, 3, 12, 13, 8, 21]
        answer = _of(self._load(slot, pages), wire.LoadAnswer, "a load")
        _want(answer.pages == LENGTH, f"a load of {LENGTH} pages was answered {_shown(answer)}")
        self._compare(pages, data, "a load to scattered pages")
        others = [page for page in around if page not in pages]
        self._compare(others, [[rank[page] for page in others] for rank in before], "pages that the load does not name")
        self._finish(slot)

    def _load_after(self) -> None:
        hashes, data = self._stored()
        slot = self._lookup(hashes)
        work, identity = next(self._ids), next(self._ids)
        pages = list(range(LENGTH))
        self.talk.send(Kind.LOAD, identity, wire.Load(slot, [wire.Part(0, [[0, LENGTH]])], work), deadline_ms=_MS)
        _want(not self.talk.answered(identity), f"a load after work {work} was answered before it was written")
        self._fill(pages)
        self._wrote(work)
        _of(self.talk.answer(identity), wire.LoadAnswer, "a load")
        self._compare(pages, data, "pages that were written before the work of load.after")
        self._finish(slot)

    def _load_pinned(self) -> None:
        hashes, _ = self._stored()
        slot = self._lookup([*hashes[:2], *self._hashes(2)])
        before = self._fill([0, 1, 2])
        error = _refused(self._load(slot, [0, 1, 2]), Code.NOT_PINNED, "a load of a page that was not found")
        _want(error.over, "a load that was refused as not_pinned has over: false")
        self._compare([0, 1, 2], before, "a load that was refused")
        self._finish(slot)

    def _namespaces(self) -> None:
        hashes, _ = self._stored()
        slot = self._lookup(hashes, namespace=self._namespace + b"-other")
        _want(self.found == 0, f"a lookup in another namespace found {self.found} pages")
        self._finish(slot)

    def _present(self) -> None:
        hashes, data = self._stored()
        slot = self._lookup(hashes)
        pages = list(range(LENGTH))
        self._clear(pages)
        identity = self._send_store(slot, pages)
        self._wrote(identity)
        answer = _of(self.talk.answer(identity), wire.StoreAnswer, "a store")
        _want((answer.stored_pages, answer.present_pages) == (0, LENGTH), f"present pages: {_shown(answer)}")
        self._finish(slot)
        self._expect_loaded(hashes, data, "pages that were present")

    def _together(self) -> None:
        hashes = self._hashes(4)
        slot = self._lookup(hashes)
        data = self._fill([0, 1, 2, 3])
        first, second = next(self._ids), next(self._ids)
        stores = [
            wire.NumberedStore(identity, _MS, msgspec.Raw(wire.body_of(wire.Store(slot, [wire.Part(at, [[at, 2]])]))))
            for identity, at in ((first, 0), (second, 2))
        ]
        together = next(self._ids)
        self.talk.send(Kind.STORES, together, wire.Stores(stores), deadline_ms=_MS)
        self._wrote(second)
        answer = _of(self.talk.answer(together), wire.StoresAnswer, "stores")
        # Answers of single stores may come in addition.
        self.talk.unread = [each for each in self.talk.unread if each.correlation not in (first, second)]
        results = [each.answer.stored_pages if each.answer else 0 for each in answer.results]
        _want(results == [2, 2], f"two stores of 2 pages each: {_shown(answer)}")
        self._finish(slot)
        self._expect_loaded(hashes, data, "pages of two stores in one message")

    def _retry(self) -> None:
        hashes = self._hashes()
        slot = self._lookup(hashes)
        self._fill(list(range(LENGTH)))
        identity = next(self._ids)
        body = wire.Store(slot, [wire.Part(0, [[0, LENGTH]])])
        self.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        self.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        self._wrote(identity)
        first = self.talk.answer(identity)
        _want(not self.talk.answered(identity), "a request that was repeated while it was open has two answers")
        second = self.talk.ask(Kind.STORE, identity, body)
        _want(first == second, f"the first answer is {_shown(first)}, that of the repeated request {_shown(second)}")
        _of(first, wire.StoreAnswer, "a store")
        self._finish(slot)

    def _retry_reconnect(self) -> None:
        hashes = self._hashes()
        slot = self._lookup(hashes)
        data = self._fill(list(range(LENGTH)))
        identity = next(self._ids)
        body = wire.Store(slot, [wire.Part(0, [[0, LENGTH]])])
        self.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        self.talk.answered(-1)
        self._reconnect()
        self.talk.send(Kind.STORE, identity, body, deadline_ms=_MS)
        self._wrote(identity)
        answer = _of(self.talk.answer(identity), wire.StoreAnswer, "a store that was repeated over a new connection")
        _want(answer.stored_pages == LENGTH, f"{LENGTH} new pages: {_shown(answer)}")
        again = self._reconnect().ask(Kind.STORE, identity, body)
        _want(again == answer, f"over a third connection the answer is {_shown(again)}, not {_shown(answer)}")
        self._finish(slot)
        self._expect_loaded(hashes, data, "pages of a store that was repeated")

    def _other_hashes(self) -> None:
        hashes = self._hashes()
        slot = self._lookup(hashes)
        wrong = b"".join(self._hashes())
        identity = self._send_store(slot, list(range(LENGTH)), hash_bytes=32, more_hashes=wrong)
        error = _refused(self.talk.answer(identity), Code.INVALID, "a store with other hashes than its slot")
        _want(error.over, "a store that was refused as invalid has over: false")
        self._finish(slot)

    def _held(self) -> None:
        hashes, _ = self._stored()
        slot = self._lookup(hashes)
        error = _refused(self._ask(Kind.RESET, wire.Reset(self._namespace)), Code.LEASED, "a reset of held pages")
        _want(error.retry, "leased has retry: false")
        again = self._lookup(hashes)
        _want(self.found == LENGTH, f"after a refused reset a lookup finds {self.found} of {LENGTH} pages")
        self._finish(slot)
        self._finish(again)
        _of(self._ask(Kind.RESET, wire.Reset(self._namespace)), wire.ResetAnswer, "a reset after finish")
        slot = self._lookup(hashes)
        _want(self.found == 0, f"after a reset a lookup finds {self.found} pages")
        self._finish(slot)

    def _finished(self) -> None:
        hashes, _ = self._stored()
        slot = self._lookup(hashes)
        early = next(self._ids)
        self._finish(slot)
        load = wire.Load(slot, [wire.Part(0, [0])])
        body = wire.Store(slot, [wire.Part(0, [0])])
        for what, kind, request, identity in (
            ("a load after finish", Kind.LOAD, load, next(self._ids)),
            ("a store after finish", Kind.STORE, body, next(self._ids)),
            ("a store that arrives after a finish with a higher id", Kind.STORE, body, early),
        ):
            error = _refused(self.talk.ask(kind, identity, request), Code.UNKNOWN_SLOT, what)
            _want(error.over, f"{what} was refused with over: false")

    def _cancel(self) -> None:
        slot = self._lookup(self._hashes())
        identity = self._send_store(slot, list(range(LENGTH)))
        _want(not self.talk.answered(identity), "a store was answered before written")
        answer = _of(self._ask(Kind.CANCEL_STORES, wire.CancelStores(slot)), wire.CancelStoresAnswer, "cancel_stores")
        _want(answer.stores == 1, f"one store was open: {_shown(answer)}")
        _want(self.talk.answered(identity), "cancel_stores was answered before its store")
        stored = _of(self.talk.answer(identity), wire.StoreAnswer, "a store that was cancelled")
        _want(stored.stored_pages + stored.failed_pages == LENGTH, f"{LENGTH} pages: {_shown(stored)}")
        self._finish(slot)

    def _abandon(self) -> None:
        hashes = self._hashes()
        slot = self._lookup(hashes)
        pages = list(range(LENGTH))
        self._fill(pages)
        identity = self._send_store(slot, pages)
        for rank in self._ranks:
            _of(rank.ask(Kind.ABANDON, wire.Abandon([identity])), wire.Empty, "abandon")
        self._wrote(identity)
        answer = self.talk.answer(identity)
        ended = isinstance(answer, wire.StoreAnswer) and answer.stored_pages == 0
        _want(ended or isinstance(answer, Error), f"a store that every rank abandoned: {_shown(answer)}")
        self._finish(slot)
        slot = self._lookup(hashes)
        _want(self.found == 0, f"a lookup finds {self.found} pages of a store that was abandoned")
        self._finish(slot)

    def _deadline(self) -> None:
        slot = self._lookup(self._hashes())
        began = time.monotonic()
        identity = self._send_store(slot, list(range(LENGTH)), deadline_ms=300)
        answer = self.talk.answer(identity)
        took_s = time.monotonic() - began
        _want(took_s < 5, f"a store with a deadline of 0.3 s was answered after {took_s:.1f} s")
        freed = answer.over if isinstance(answer, Error) else getattr(answer, "stored_pages", 1) == 0
        _want(freed, f"a store that was never written: {_shown(answer)}")
        self._finish(slot)

    def _credits(self) -> None:
        welcome = self.talk.welcome
        assert welcome is not None
        slot = self._lookup(self._hashes(1))
        ids = [self._send_store(slot, [0]) for _ in range(welcome.request_credits)]
        beyond = self._send_store(slot, [0])
        error = _refused(self.talk.answer(beyond), Code.BUSY, f"request {len(ids) + 1} without an answer")
        _want(error.retry and not error.over, f"busy has retry and no over: {_shown(error)}")
        self._wrote(ids[-1])
        for identity in ids:
            answer = self.talk.answer(identity)
            _want(isinstance(answer, (wire.StoreAnswer, Error)), f"a store: {_shown(answer)}")
        self._finish(slot)

    def _read(self, epoch: int, first: int, cursor: int | None, wait_ms: int = 0) -> wire.Events:
        body = {"epoch": epoch, "from": first, "most": 4096, "wait_ms": wait_ms, "namespace": self._namespace}
        if cursor is not None:
            body["cursor"] = cursor
        return _of(self._ask(Kind.READ_EVENTS, body), wire.Events, "read_events")

    def _events(self) -> None:
        hashes, _ = self._stored()
        begun = self._read(0, 0, 0)
        _want(begun.lost, "the first read has lost: false")
        present, events = _apply({}, begun), begun
        while events.cursor is not None:
            events = self._read(events.epoch, events.next, events.cursor)
            present = _apply(present, events)
        held = {page for pages in present.values() for page in pages}
        short = {each[-begun.hash_bytes :] for each in hashes}
        _want(short <= held, f"{len(short - held)} of {len(short)} stored pages are not in the log")
        _of(self._ask(Kind.RESET, wire.Reset(self._namespace)), wire.ResetAnswer, "a reset")
        until = time.monotonic() + 5
        while short & {page for pages in present.values() for page in pages}:
            _want(time.monotonic() < until, "pages that were reset are not gone in the log")
            events = self._read(events.epoch, events.next, None, 500)
            _want(not events.lost, "a read of the last changes has lost: true")
            present = _apply(present, events)

    def _reset_by_hash(self) -> None:
        hashes, _ = self._stored()
        last = hashes[-1]
        answer = self._ask(Kind.RESET, wire.Reset(self._namespace, hash_bytes=len(last), hashes=last))
        _want(_of(answer, wire.ResetAnswer, "a reset by hash").pages >= 1, f"one page: {_shown(answer)}")
        slot = self._lookup(hashes)
        _want(self.found < LENGTH, f"a lookup finds {self.found} of {LENGTH} pages, one of which was reset")
        self._finish(slot)

    def _hash_width(self) -> None:
        body = wire.Lookup(slot=next(self._slots), namespace=self._namespace, hash_bytes=8, hashes=bytes(16))
        answer = self._ask(Kind.LOOKUP, body)
        _want(isinstance(answer, Error) and not answer.retry, f"hashes of 8 bytes: {_shown(answer)}")

    def _registers_again(self) -> None:
        hashes, data = self._stored()
        last = next(self._ids)
        for rank in self._ranks:
            connection = rank.connection
            connection.close()
            again = Connection(rank.directory, "rank", self._engine, rank=connection.rank, replica=self._target.replica)
            rank.connection = self._beside(again).opened()
        self._register()
        self._wrote(last)
        self._expect_loaded(hashes, data, "pages that were stored before the ranks registered again")

    def _unregister(self) -> None:
        until = time.monotonic() + 10
        for rank in self._ranks:
            answer = rank.ask(Kind.UNREGISTER, wire.Unregister())
            while isinstance(answer, Error) and answer.retry and time.monotonic() < until:
                _pause()
                answer = rank.ask(Kind.UNREGISTER, wire.Unregister())
            _of(answer, wire.Empty, "unregister")

    # The end.

    def _silent(self, idle: Connection, since: float) -> None:
        assert idle.welcome is not None
        beats_s = idle.welcome.heartbeat_ms / 1000
        limit_s = 3 * beats_s + 2.0 - (time.monotonic() - since)
        _want(
            idle.ends(max(limit_s, 0.5)), f"a client that sent nothing for {3 * beats_s + 2:.1f} s is still connected"
        )

    def _sums(self) -> None:
        connections = self._connections
        left = [envelope for each in connections if not each.spoiled for envelope in each.unread]
        if left:
            ids = sorted(envelope.correlation for envelope in left)[:10]
            self.report.broken("one-answer", f"{len(left)} answers came to no request, or a second time: ids {ids}")
        elif any(connection.answers for connection in connections):
            self.report.exercised("one-answer")
        errors = [error for connection in connections for error in connection.errors]
        for error in errors:
            if error.code not in _CODES or "\n" in error.message or not error.message:
                self.report.broken("errors-typed", _shown(error))
            else:
                self.report.exercised("errors-typed")


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


def _shown(body: Any) -> str:
    return "nothing" if body is None else repr(body)[:200]


def _want(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


def _of(body: Any, kind: type, what: str) -> Any:
    if not isinstance(body, kind):
        raise Broken(f"{what} was answered by {_shown(body)}")
    return body


def _refused(body: Any, code: int, what: str) -> Error:
    if not isinstance(body, Error):
        raise Broken(f"{what} was answered by {_shown(body)}, not by an error")
    if body.code != code:
        raise Broken(f"{what} was refused with code {body.code} ({body.message}), not {int(code)}")
    return body


def _pause() -> None:
    time.sleep(0.05)
