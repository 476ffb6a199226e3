"""A simulated change log of a leader, for readers of events: what docs/wire.md says under ``read_events``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry import wire
from kvferry.client import Failure
from kvferry.engine_client import EngineRequests
from kvferry.wire import Code

HASH_BYTES = 16


@dataclass(frozen=True)
class Block:
    """Consecutive pages of a tier."""

    tier: int
    namespace: bytes
    group: int
    place: int
    hashes: tuple[bytes, ...]


class Read:
    """A read without an answer."""

    def __init__(self, message: wire.ReadEvents, until: Callable[[Any], None] | None):
        self.message, self.until = message, until
        self.answer: Any = None
        self.failure: Failure | None = None
        self.done = False

    def end(self, answer: Any) -> None:
        self.answer, self.failure = (None, answer) if isinstance(answer, Failure) else (answer, None)
        self.done = True
        if self.until is not None:
            self.until(self)


class FakeLog(EngineRequests):
    """Takes the place of the client. ``slab``: the blocks of all tiers, at positions that they keep."""

    def __init__(self, keeps: int = 1000) -> None:
        self.epoch, self.first, self.keeps = 7, 1, keeps
        self.records: list[wire.EventRecord] = []
        self.slab: list[Block | None] = []
        self.reads: list[Read] = []
        self.answered = 0

    # What the leader does.

    def store(self, block: Block) -> None:
        free = [at for at, each in enumerate(self.slab) if each is None]
        if free:
            self.slab[free[0]] = block
        else:
            self.slab.append(block)
        self._add("stored", block)

    def remove(self, block: Block) -> None:
        self.slab[self.slab.index(block)] = None
        self._add("gone", block)

    def clear(self, tier: int) -> None:
        self.slab = [None if block and block.tier == tier else block for block in self.slab]
        self.records.append(wire.EventRecord("cleared", tier))

    def lose(self) -> None:
        self.first += len(self.records) + 1
        self.records.clear()

    def restart(self, *, keeps: bool) -> None:
        """Another leader; ``keeps``: it finds the pages, one block after another."""
        self.epoch += 1
        before, self.slab, self.records, self.first = self.slab, [], [], 1
        for block in before:
            if keeps and block:
                self.store(block)

    def _add(self, event: str, block: Block) -> None:
        hashes = b"".join(block.hashes)
        self.records.append(
            wire.EventRecord(event, block.tier, prefix(block.namespace), b"layout.", block.group, block.place, hashes)
        )
        while len(self.records) > self.keeps:
            self.records.pop(0)
            self.first += 1

    def held(self, *namespaces: bytes) -> set[tuple[int, int, bytes]]:
        blocks = [block for block in self.slab if block and block.namespace in namespaces]
        return {(block.tier, block.group, page) for block in blocks for page in block.hashes}

    # Reads.

    def request(self, message: Any, timeout_s: float, **named: Any) -> Read:
        assert isinstance(message, wire.ReadEvents)
        for before in self.open():
            before.end(self._answer(before.message)[0])
        self.reads = [Read(message, named.get("until"))]
        self.answered += 1
        return self.reads[0]

    def open(self) -> list[Read]:
        return [read for read in self.reads if not read.done]

    def turn(self) -> None:
        """Answers reads that do not wait, and those for which there is something."""
        for read in self.open():
            if answer := self.answer(read.message):
                read.end(answer)

    def fail(self) -> None:
        for read in self.open():
            read.end(Failure(Code.BUSY, "64 readers wait", reported=True, retry=True))

    def answer(self, read: wire.ReadEvents, *, waits: bool = True) -> wire.Events | None:
        """Returns the answer to a read; None while it waits."""
        answer, something = self._answer(read)
        return answer if something or not (waits and read.wait_ms) else None

    def _answer(self, read: wire.ReadEvents) -> tuple[wire.Events, bool]:
        end = self.first + len(self.records)
        lost = read.epoch != self.epoch or not self.first <= read.from_ <= end
        wanted = lambda name: read.namespace is None or name == prefix(read.namespace)  # noqa: E731
        records, room, reached = [], read.most, end if lost else read.from_
        for record in [] if lost else self.records[read.from_ - self.first :]:
            pages = len(record.hashes) // HASH_BYTES or 1
            if record.event == "cleared" or wanted(record.namespace):
                if records and pages > room:
                    break
                room -= pages
                records.append(record)
            reached += 1
        cursor = read.cursor if read.cursor is None or not lost else 0
        if cursor is not None and reached == end:
            at, cursor = cursor, None
            for position, block in list(enumerate(self.slab))[at:]:
                if block is None or not wanted(prefix(block.namespace)):
                    continue
                if records and len(block.hashes) > room:
                    cursor = position
                    break
                room -= len(block.hashes)
                records.append(
                    wire.EventRecord(
                        "stored",
                        block.tier,
                        prefix(block.namespace),
                        b"",
                        block.group,
                        block.place,
                        b"".join(block.hashes),
                    )
                )
        answer = wire.Events(self.epoch, reached, lost, HASH_BYTES, records, cursor)
        return answer, lost or bool(records) or read.cursor is not None


def prefix(namespace: bytes) -> bytes:
    """The 8 bytes that stand for a namespace, which an engine cannot compute."""
    return bytes(byte ^ 0xFF for byte in namespace[:8].ljust(8))
