"""Follows which pages of some namespaces each tier of kvferry holds, by reading the leader's change log.

A :class:`Feed` keeps a reader for each namespace, as docs/wire.md describes under ``read_events``: a map from the
places of the tiers to pages, which begins with the pages that are present and follows the records. With one namespace
the reader itself waits for changes. With several, one more read without a namespace waits for changes of any, and shows
which readers to ask, because a connection can have one read that waits.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry import wire
from kvferry.client import Failure, PendingRequest
from kvferry.engine_client import EngineRequests
from kvferry.held_pages import HeldPages, key_of
from kvferry.wire import Code

logger = logging.getLogger("kvferry")

#: Most places that all readers know; further pages are left out until a reader begins again. A place takes at most 400
#: bytes, with its page in :class:`kvferry.held_pages.HeldPages`: 420 MB. While a reader begins again, it has the places
#: from before as well, which may take the same once more.
PLACES_MAX = 1 << 20
#: Most namespaces that are followed.
NAMESPACES_MAX = 64
#: Most namespaces of other engines that are known as such; beyond that all are forgotten, and each is asked for again.
FOREIGN_MAX = 4096
#: Pages of one answer.
READ_PAGES = 1024
#: Longest time that a read waits for a change, and time beyond that after which it fails.
WAIT_S = 10.0
READ_LIMIT_S = 5.0
#: Pause after a failed read.
RETRY_S = 1.0
#: Time without an answer of the leader after which no page counts as held. A restart of the leader takes less.
ABSENT_S = 30.0
#: Time for which pages that a new leader does not list yet count as held: it first reads the inventories.
RECOVERY_S = 5.0
#: Every reader of several is asked at least this often.
ASK_ALL_S = 10.0


@dataclass(eq=False)
class _Reader:
    """What has been read of one namespace."""

    namespace: bytes
    #: Where to read on; see docs/wire.md.
    epoch: int = 0
    next: int = 0
    cursor: int | None = 0
    #: The first 8 bytes of the namespace's domains, once a record has shown them.
    prefix: bytes | None = None
    places: dict[int, bytes] = field(default_factory=dict)
    #: Places from before the reader began again. Their pages count as held until it has begun, or until this time.
    before: dict[int, bytes] = field(default_factory=dict)
    before_until: float = 0.0
    #: There may be something to read.
    asks: bool = True


class Feed:
    """Keeps ``held`` up to date with the pages of the followed namespaces. For one thread.

    ``wake`` is called, on any thread, when :meth:`turn` has something to do.
    """

    def __init__(self, client: EngineRequests, held: HeldPages, wake: Callable[[], None]):
        self._client = client
        self._held = held
        self._wake = wake
        self._readers: dict[bytes, _Reader] = {}
        #: Requests without an answer, each with its reader; None for the read of all namespaces. At most two: one that
        #: waits, and one that does not.
        self._open: list[tuple[_Reader | None, PendingRequest, bool]] = []
        self._watch_epoch = self._watch_next = 0
        self._ask_all_at = 0.0
        #: Prefixes of namespaces that belong to no reader.
        self._foreign: set[bytes] = set()
        self._again_at = 0.0
        self._answered_at = time.monotonic()
        self._places = 0
        self._problem = ""
        #: Pages that were left out because of :data:`PLACES_MAX`.
        self.left_out = 0
        #: Number of times that a reader had to begin again.
        self.begun_again = 0

    def follow(self, namespaces: Iterable[bytes]) -> None:
        """Follows these namespaces from now on, and no others. Pages of the others count as held no longer."""
        wanted = list(dict.fromkeys(namespaces))
        if len(wanted) > NAMESPACES_MAX:
            logger.warning(
                "kvferry: KV events follow the pages of %d adapters; those of %d more are not published",
                NAMESPACES_MAX - 1,
                len(wanted) - NAMESPACES_MAX,
            )
            wanted = wanted[:NAMESPACES_MAX]
        for namespace in [each for each in self._readers if each not in wanted]:
            self._forget(self._readers.pop(namespace))
        for namespace in wanted:
            if namespace not in self._readers:
                self._readers[namespace] = _Reader(namespace)
                self._foreign.clear()

    @property
    def complete(self) -> bool:
        """Whether every reader has begun, and has read everything up to its last answer."""
        return all(not (reader.asks or reader.before) for reader in self._readers.values())

    def turn(self) -> float:
        """Takes answers and sends the next read. Returns when to call it again if nothing wakes it before."""
        now = time.monotonic()
        for each in [each for each in self._open if each[1].done]:
            self._open.remove(each)
            self._ended(each[0], each[1], now)
        for reader in self._readers.values():
            if reader.before and reader.cursor is None and now >= reader.before_until:
                self._drop_before(reader)
        if now - self._answered_at > ABSENT_S and self._holds_any():
            logger.warning("kvferry: no answer of the leader for %.0f s: KV events take back every page", ABSENT_S)
            for namespace, reader in self._readers.items():
                self._forget(reader)
                # The answer of a read that is open would continue what was forgotten.
                self._readers[namespace] = _Reader(namespace)
        if now >= self._again_at:
            self._send(now)
        return self._next_turn(now)

    def _next_turn(self, now: float) -> float:
        times = [now + WAIT_S, self._again_at if self._again_at > now else now + WAIT_S]
        times += [reader.before_until for reader in self._readers.values() if reader.before and reader.cursor is None]
        if self._holds_any():
            times.append(self._answered_at + ABSENT_S)
        return max(min(times), now)

    def _holds_any(self) -> bool:
        return any(reader.places or reader.before for reader in self._readers.values())

    # Requests.

    def _send(self, now: float) -> None:
        several = len(self._readers) > 1
        if several and now >= self._ask_all_at:
            self._ask_all(now)
        if any(not waits for _, _, waits in self._open):
            return
        asked = [reader for reader, _, _ in self._open]
        for reader in self._readers.values():
            if reader.asks and reader not in asked:
                self._read(reader, 0.0)
                return
        if self._open or not self._readers:
            return
        if several:
            pending = self._client.read_events(
                self._watch_epoch,
                self._watch_next,
                most=READ_PAGES,
                wait_s=WAIT_S,
                timeout_s=READ_LIMIT_S,
                until=self._on_end,
            )
            self._open.append((None, pending, True))
        else:
            self._read(next(iter(self._readers.values())), WAIT_S)

    def _read(self, reader: _Reader, wait_s: float) -> None:
        pending = self._client.read_events(
            reader.epoch,
            reader.next,
            cursor=reader.cursor,
            namespace=reader.namespace,
            most=READ_PAGES,
            wait_s=wait_s,
            timeout_s=READ_LIMIT_S,
            until=self._on_end,
        )
        self._open.append((reader, pending, wait_s > 0))

    def _on_end(self, _: PendingRequest) -> None:
        self._wake()

    def _ended(self, reader: _Reader | None, pending: PendingRequest, now: float) -> None:
        answer = pending.answer
        if not isinstance(answer, wire.Events):
            self._failed(pending.failure, now)
            # A read that may not wait still finds what has changed.
            for each in [reader] if reader else self._readers.values():
                each.asks = True
            return
        self._answered_at, self._problem = now, ""
        if reader is None:
            self._find_changed(answer, now)
        elif self._readers.get(reader.namespace) is reader:
            self._apply(reader, answer, now)

    def _failed(self, failure: Failure | None, now: float) -> None:
        self._again_at = now + RETRY_S
        problem = str(failure)
        known = failure is not None and failure.code in (Code.UNKNOWN_KIND, Code.LIMIT, Code.INVALID)
        if problem != self._problem and known:
            logger.warning("kvferry: KV events cannot be read (%s): update kvferry", problem)
        self._problem = problem

    # Several namespaces.

    def _ask_all(self, now: float) -> None:
        self._ask_all_at = now + ASK_ALL_S
        self._foreign.clear()
        for reader in self._readers.values():
            reader.asks = True

    def _find_changed(self, answer: wire.Events, now: float) -> None:
        """Finds the readers for which there may be something to read."""
        begin = self._watch_next
        self._watch_epoch, self._watch_next = answer.epoch, answer.next
        if answer.lost or any(record.event == "cleared" for record in answer.records):
            self._ask_all(now)
            return
        changed = {record.namespace for record in answer.records} - self._foreign
        for reader in self._readers.values():
            if reader.prefix in changed:
                reader.asks = True
                changed.discard(reader.prefix)
        if not changed:
            return
        unnamed = [reader for reader in self._readers.values() if reader.prefix is None]
        for reader in unnamed:
            reader.asks = True
        if any(reader.cursor is not None or reader.next > begin for reader in unnamed):
            # A reader that begins after these changes finds none of them, even if they are its own.
            return
        # A reader that finds records of one of these takes it back.
        if len(self._foreign) + len(changed) > FOREIGN_MAX:
            self._foreign.clear()
        self._foreign |= changed

    # Answers.

    def _apply(self, reader: _Reader, answer: wire.Events, now: float) -> None:
        if answer.lost:
            self._begin_again(reader, answer.epoch, now)
        for record in answer.records:
            self._record(reader, record, answer.hash_bytes)
        reader.asks = bool(answer.records) or answer.cursor is not None
        if answer.lost and reader.cursor is None:
            # Only changes were wanted: the pages that are present come first.
            reader.epoch, reader.next, reader.cursor, reader.asks = 0, 0, 0, True
            return
        reader.epoch, reader.next, reader.cursor = answer.epoch, answer.next, answer.cursor
        if reader.before and reader.cursor is None and now >= reader.before_until:
            self._drop_before(reader)

    def _begin_again(self, reader: _Reader, epoch: int, now: float) -> None:
        if reader.epoch:
            self.begun_again += 1
            reader.before_until = now + RECOVERY_S if epoch != reader.epoch else now
        if reader.before:
            # The reader had not begun: what it read since may be gone, what it had before is held until it has begun.
            self._empty(reader)
        else:
            self._places -= len(reader.places)
            reader.before, reader.places = reader.places, {}

    def _drop_before(self, reader: _Reader) -> None:
        before, reader.before = reader.before, {}
        for key in before.values():
            self._held.lose(key)

    def _empty(self, reader: _Reader) -> None:
        places, reader.places = reader.places, {}
        self._places -= len(places)
        for key in places.values():
            self._held.lose(key)

    def _forget(self, reader: _Reader) -> None:
        """Drops everything that a reader has, which begins again if it is asked."""
        self._drop_before(reader)
        self._empty(reader)
        reader.epoch, reader.next, reader.cursor, reader.asks = 0, 0, 0, True

    def _record(self, reader: _Reader, record: wire.EventRecord, hash_bytes: int) -> None:
        if record.event not in ("stored", "gone", "cleared"):
            return
        first = record.tier << 32
        if record.event == "cleared":
            for place in [each for each in reader.places if each >> 32 == record.tier]:
                self._remove(reader, place)
            return
        if reader.prefix != record.namespace:
            reader.prefix = record.namespace
            self._foreign.discard(record.namespace)
        first += record.place
        for at in range(len(record.hashes) // hash_bytes):
            if record.event == "gone":
                self._remove(reader, first + at)
            else:
                page_hash = record.hashes[at * hash_bytes : (at + 1) * hash_bytes]
                self._put(reader, first + at, key_of(record.tier, record.group, page_hash))

    def _put(self, reader: _Reader, place: int, key: bytes) -> None:
        known = reader.places.get(place)
        if known == key:
            return
        if known is None:
            if self._places >= PLACES_MAX:
                if not self.left_out:
                    logger.warning("kvferry: KV events know %d places; further pages are not published", PLACES_MAX)
                self.left_out += 1
                return
            self._places += 1
        else:
            self._held.lose(known)
        reader.places[place] = key
        self._held.gain(key)

    def _remove(self, reader: _Reader, place: int) -> None:
        key = reader.places.pop(place, None)
        if key is not None:
            self._places -= 1
            self._held.lose(key)
