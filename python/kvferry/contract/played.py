"""The engine that is played for the checks of a running kvferry: its connections, its ranks and its requests."""

import itertools
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry import wire
from kvferry.contract.live import Broken, Connection, Rank, Unavailable
from kvferry.wire import Error, Kind

#: Pages of the memory of each rank, and their bytes.
PAGES = 24
PAGE_BYTES = 16 << 10
#: Pages of the sequences.
LENGTH = 6
#: Longest wait until the ranks are registered and the leader serves lookups.
READY_LIMIT_S = 60.0
#: Longest wait until all workers of a leader listen.
WORKERS_LIMIT_S = 10.0
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


class PlayedEngine:
    """An engine with its ranks. Its namespace and its content are random, and of no other engine."""

    #: Ranks of the engine, and tokens of a page.
    count = 0
    page_tokens = 0
    #: Pages that the last lookup found.
    found = 0

    def __init__(self, target: Target):
        self.target = target
        self.leader_dir = target.socket_dir / "leader"
        self.name = secrets.token_bytes(16)
        self.namespace = b"kvferry-contract-" + secrets.token_bytes(16)
        #: From the clock, as an engine may draw them.
        self.ids = itertools.count(time.time_ns() // 1000)
        self.slots = itertools.count(1)
        self.ranks: list[Rank] = []
        self.connections: list[Connection] = []
        #: The connection of the scheduler to the leader.
        self.scheduler: Connection | None = None
        self.open_slots: set[int] = set()

    @property
    def talk(self) -> Connection:
        """The connection of the engine."""
        if self.scheduler is None:
            raise Broken("there is no connection to the leader")
        return self.scheduler

    # Helpers.

    def connect(self, role: str = "engine", engine: bytes | None = None) -> Connection:
        """Connects to the leader, by default under a new name. No hello is sent."""
        engine = secrets.token_bytes(16) if engine is None else engine
        connection = Connection(self.leader_dir, role, engine, replica=self.target.replica)
        return self.beside(connection)

    def beside(self, connection: Connection) -> Connection:
        """Keeps a connection alive while the checks wait for another one."""
        self.connections.append(connection)
        connection.beside = self.connections
        return connection

    def reconnect(self) -> Connection:
        """Replaces the connection of the engine by a new one."""
        if self.scheduler is not None:
            self.scheduler.close()
        self.scheduler = self.connect(engine=self.name).opened()
        return self.scheduler

    def ask(self, kind: int, body: msgspec.Struct | dict[str, Any], **how: Any) -> Any:
        """Sends a request with a new id to the leader, and returns the body of its answer."""
        return self.talk.ask(kind, next(self.ids), body, **how)

    def hashes(self, count: int = LENGTH) -> list[bytes]:
        """Returns hashes of pages that no engine has stored."""
        return [secrets.token_bytes(32) for _ in range(count)]

    def lookup(
        self, hashes: list[bytes], slot: int | None = None, *, namespace: bytes | None = None, **how: Any
    ) -> int:
        """Looks hashes up in a new slot, or in this one; returns the slot. Its answer is :attr:`found`."""
        slot = next(self.slots) if slot is None else slot
        body = wire.Lookup(
            slot=slot,
            namespace=self.namespace if namespace is None else namespace,
            hash_bytes=len(hashes[0]),
            hashes=b"".join(hashes),
            **how,
        )
        self.open_slots.add(slot)
        answer = self.ask(Kind.LOOKUP, body)
        self.found = of(answer, wire.LookupAnswer, "a lookup").hit_pages
        return slot

    def finish(self, slot: int) -> None:
        """Finishes a slot."""
        of(self.ask(Kind.FINISH, wire.Finish(slot)), wire.Empty, "a finish")
        self.open_slots.discard(slot)

    def wrote(self, through: int) -> None:
        """Reports work as written, on every rank."""
        for rank in self.ranks:
            of(rank.wrote(through), wire.Empty, "written")

    def fill(self, pages: list[int]) -> list[list[bytes]]:
        """Writes random bytes into pages of every rank, the same in one shard; returns them, by rank."""
        shards: dict[int, list[bytes]] = {}
        data = []
        for rank in self.ranks:
            data.append(shards.setdefault(rank.memory.shard, [secrets.token_bytes(PAGE_BYTES) for _ in pages]))
            for page, content in zip(pages, data[-1], strict=True):
                rank.memory.write(page, content)
        return data

    def clear(self, pages: list[int]) -> None:
        """Writes zeros into pages of every rank."""
        for rank in self.ranks:
            for page in pages:
                rank.memory.write(page, bytes(PAGE_BYTES))

    def compare(self, pages: list[int], data: list[list[bytes]], what: str) -> None:
        """Compares pages of every rank, or raises :class:`Broken`."""
        for number, (rank, wanted) in enumerate(zip(self.ranks, data, strict=True)):
            for page, content in zip(pages, wanted, strict=True):
                if rank.memory.read(page) != content:
                    raise Broken(f"{what}: page {page} of rank {number} has other bytes than were stored")

    def send_store(self, slot: int, pages: list[int], *, first: int = 0, **how: Any) -> int:
        """Sends a store, and returns its id."""
        identity = next(self.ids)
        deadline_ms = how.pop("deadline_ms", _MS)
        parts = [wire.part(first, wire.runs(pages))]
        self.talk.send(Kind.STORE, identity, wire.Store(slot, parts, **how), deadline_ms=deadline_ms)
        return identity

    def stored(
        self, hashes: list[bytes] | None = None, pages: list[int] | None = None
    ) -> tuple[list[bytes], list[list[bytes]]]:
        """Stores a sequence, and finishes its slot; returns its hashes and bytes."""
        hashes = self.hashes() if hashes is None else hashes
        pages = list(range(len(hashes))) if pages is None else pages
        slot = self.lookup(hashes)
        data = self.fill(pages)
        identity = self.send_store(slot, pages)
        self.wrote(identity)
        answer = of(self.talk.answer(identity), wire.StoreAnswer, "a store")
        if answer.stored_pages != len(hashes):
            raise Broken(f"a store of {len(hashes)} new pages was answered {shown(answer)}")
        self.finish(slot)
        return hashes, data

    def load(self, slot: int, pages: list[int], *, first: int = 0, after: int = 0) -> Any:
        """Loads pages, and returns the body of the answer."""
        return self.ask(Kind.LOAD, wire.Load(slot, [wire.part(first, wire.runs(pages))], after))

    def expect_loaded(self, hashes: list[bytes], data: list[list[bytes]], what: str) -> None:
        """Looks a sequence up, loads it and compares it."""
        slot = self.lookup(hashes)
        want(self.found == len(hashes), f"a lookup of {len(hashes)} stored pages found {self.found}")
        pages = list(range(PAGES - len(hashes), PAGES))
        self.clear(pages)
        answer = of(self.load(slot, pages), wire.LoadAnswer, "a load")
        want(answer.pages == len(pages), f"a load of {len(pages)} pages was answered {shown(answer)}")
        self.compare(pages, data, what)
        self.finish(slot)

    def register(self) -> None:
        """Registers the memory of all ranks, and waits until the leader serves lookups."""
        until = time.monotonic() + READY_LIMIT_S
        asked = []
        for rank in self.ranks:
            # Answered when the leader has agreed, which may need all ranks.
            registration = rank.memory.describe(rank.hand_over())
            identity = next(rank._ids)
            body = wire.Register(0, self.name, registration)
            rank.connection.send(Kind.REGISTER, identity, body, deadline_ms=int(READY_LIMIT_S * 1000))
            asked.append((rank, identity))
        for rank, identity in asked:
            answer = rank.connection.answer(identity, limit_s=READY_LIMIT_S)
            while isinstance(answer, Error) and answer.retry and time.monotonic() < until:
                pause()
                answer = rank.register()
            if isinstance(answer, Error) and "in use" in answer.message:
                raise Unavailable(f"the seat of rank {rank.connection.rank} is taken: {answer.message}")
            registered = of(answer, wire.Registered, "a registration")
            if registered.page_bytes < PAGE_BYTES or registered.arena_pages < LENGTH or registered.not_served:
                raise Broken(f"memory with pages of {PAGE_BYTES} bytes is answered {shown(registered)}")
        while True:
            status = self.ask(Kind.STATUS, wire.Status())
            if isinstance(status, wire.StatusAnswer) and status.ready:
                return
            if time.monotonic() > until:
                raise Broken(f"status does not become ready within {READY_LIMIT_S:.0f} s after all ranks registered")
            pause()


def shown(body: Any) -> str:
    """A body for texts."""
    return "nothing" if body is None else repr(body)[:200]


def want(holds: bool, text: str) -> None:
    """Raises :class:`Broken` with the text, unless it holds."""
    if not holds:
        raise Broken(text)


def of(body: Any, kind: type, what: str) -> Any:
    """Returns a body of this type, or raises :class:`Broken`."""
    if not isinstance(body, kind):
        raise Broken(f"{what} was answered by {shown(body)}")
    return body


def refused(body: Any, code: int, what: str) -> Error:
    """Returns an error with this code, or raises :class:`Broken`."""
    if not isinstance(body, Error):
        raise Broken(f"{what} was answered by {shown(body)}, not by an error")
    if body.code != code:
        raise Broken(f"{what} was refused with code {body.code} ({body.message}), not {int(code)}")
    return body


def pause() -> None:
    """Waits before a request is tried again."""
    time.sleep(0.05)
