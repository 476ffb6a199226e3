"""Stores: pages that a step fills are copied to kvferry after it."""

import logging
import time
from dataclasses import dataclass

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.engine_client import FENCE_S, EngineClient
from kvferry.served import Part
from kvferry.trtllm.settings import Settings
from kvferry.trtllm.steps import Steps
from kvferry.trtllm.tracked import Tracked

logger = logging.getLogger("kvferry")

#: Most stores at a time. The leader has 1,024 requests of an engine open: lookups and loads need the others.
STORES_MAX = 512
#: Pause of all stores after one that the leader could not take.
STORE_PAUSE_S = 1.0
#: Shortest time between two warnings about skipped stores.
_TELL_S = 60.0


@dataclass(eq=False)
class Store:
    """A store that is not known to be over."""

    tracked: Tracked
    #: The pages that it names lie from ``first`` to ``end`` of the sequence.
    first: int
    end: int
    pages: int
    pending: PendingRequest
    #: The client no longer waits for the end: only the ranks can tell when nothing is copied any longer.
    unknown: bool = False


class Stores:
    """The stores of an engine. For the executor's thread alone.

    A request holds its pages until it has ended, and beyond that until each rank has reported that its stores are over.
    """

    def __init__(self, client: EngineClient, settings: Settings, steps: Steps, namespace: bytes):
        self._client = client
        self._settings = settings
        self._steps = steps
        self._namespace = namespace
        #: Bytes of a page on one rank; 0 before the memory is known.
        self.page_bytes = 0
        self._open: dict[int, Store] = {}
        self._of: dict[int, set[int]] = {}
        self._pages = 0
        #: Stores of the present step, and stores whose end the leader has reported since the last one.
        self._new: list[tuple[int, int]] = []
        self._over: list[int] = []
        self._again_at = 0.0
        self._tell_at = 0.0
        #: Number of skipped stores.
        self.skipped = 0

    def store(self, tracked: Tracked, full: int, *, after: int = 0) -> None:
        """Requests a store of pages up to page ``full`` of the sequence.

        They are written by the work ``after``; with 0, by the step that is scheduled now.
        """
        if not self._client.listening or time.monotonic() < self._again_at or full > wire.HASHES_MAX:
            return
        if tracked.epoch != self._client.epoch:
            # The next leader may lack pages that this request has stored or loaded before.
            tracked.next_page, tracked.loaded = 0, range(0)
        parts = self._parts(tracked, full)
        pages = sum(len(part.pages) for part in parts)
        if not parts:
            tracked.next_page = max(tracked.next_page, full)
            return
        if not self._admits(pages):
            return
        if tracked.epoch != self._client.epoch or tracked.opened is None or tracked.opened.failure is not None:
            self.open(tracked, full)
        known = tracked.known
        first = tracked.next_page
        pending = self._client.store(
            tracked.slot,
            parts,
            more=tracked.hashes.hashes[known:full],
            more_from=known,
            after=after,
            timeout_s=self._settings.store_timeout_ms / 1000,
            grace_s=FENCE_S,
            wake=False,
        )
        tracked.known = max(known, full)
        tracked.next_page = full
        self._open[pending.id] = Store(tracked, first, full, pages, pending)
        self._of.setdefault(tracked.request, set()).add(pending.id)
        self._pages += pages
        self._new.append((tracked.request, pending.id))
        if after:
            self._steps.awaited = max(self._steps.awaited, after)
        else:
            self._steps.store = pending.id

    def _parts(self, tracked: Tracked, full: int) -> list[Part]:
        """Returns the pages up to ``full`` that were not named, that no load has brought and no store may read."""
        stores = [self._open[number] for number in self.of(tracked.request)]
        left_out = sorted([(tracked.loaded.start, tracked.loaded.stop), *((each.first, each.end) for each in stores)])
        parts, first = [], tracked.next_page
        for start, stop in [*left_out, (full, full)]:
            if first < min(start, full):
                parts.append(Part(0, first, tracked.pages[first : min(start, full)]))
            first = max(first, stop)
        return parts

    def open(self, tracked: Tracked, pages: int) -> None:
        """Opens or reopens the slot, by a lookup that finds nothing."""
        lookup = self._client.lookup(
            tracked.slot,
            tracked.hashes.hashes[:pages],
            namespace=self._namespace,
            have_pages=pages,
            timeout_s=self._settings.store_timeout_ms / 1000,
        )
        tracked.opens(lookup, self._client.epoch, pages)

    def _admits(self, pages: int) -> bool:
        most = self._settings.store_mb_max * 1_000_000 // max(self.page_bytes, 1)
        if len(self._open) < STORES_MAX and (not self._open or self._pages + pages <= most):
            return True
        self.skipped += 1
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_S
            logger.warning(
                "kvferry: %d stores were skipped: %d pages are being stored, slower than the engine fills them",
                self.skipped,
                self._pages,
            )
        return False

    def turn(self) -> None:
        """Processes received answers. Does not wait."""
        for number, store in list(self._open.items()):
            if store.unknown or not store.pending.done:
                continue
            failure = store.pending.failure
            if failure is not None:
                logger.debug("kvferry: a store of %d pages failed: %s", store.pages, failure)
                # Reopens the slot, and names the pages again when the next one is full.
                store.tracked.opened = None
                store.tracked.next_page = min(store.tracked.next_page, store.first)
                if failure.retry:
                    self._again_at = time.monotonic() + STORE_PAUSE_S
                if not failure.over:
                    store.unknown = True
                    continue
            self._over.append(number)
            self._drop(number)

    def _drop(self, number: int) -> None:
        store = self._open.pop(number)
        self._pages -= store.pages
        of = self._of[store.tracked.request]
        of.discard(number)
        if not of:
            del self._of[store.tracked.request]

    def is_open(self, number: int) -> bool:
        """Whether a store is not known to be over."""
        return number in self._open

    def of(self, request: int) -> set[int]:
        """Returns the stores of a request that are not known to be over."""
        return self._of.get(request, set())

    def released(self, request: int) -> None:
        """Drops the stores of a request, for which rank 0 copies nothing any longer.

        Other ranks are not told: each one asks its own worker, which may still read the pages.
        """
        for number in list(self.of(request)):
            self._drop(number)

    def take_new(self) -> list[tuple[int, int]]:
        """Returns the stores of the present step: request of the engine and id, and sends them."""
        new, self._new = self._new, []
        if new:
            self.send()
        return new

    def send(self) -> None:
        """Sends stores that wait for others."""
        self._client.poke()

    def take_over(self) -> list[int]:
        """Returns stores that are over on every rank by the leader's report since the last call."""
        over, self._over = self._over, []
        return over

    def __len__(self) -> int:
        return len(self._open)
