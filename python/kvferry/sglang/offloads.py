"""Offloads of rank 0: nodes of SGLang's tree whose pages are stored. SGLang keeps the pages until the result is taken.

Results come in the order of the offloads. Every offload ends: by the leader's answer, or, without one, when this rank's
worker has confirmed that nothing is copied.
"""

import collections
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.engine_client import FENCE_S, EngineClient
from kvferry.finishes import Finishes
from kvferry.served import Part
from kvferry.sglang.lookups import split

if TYPE_CHECKING:
    from kvferry.sglang.abandoned import Abandoned
    from kvferry.sglang.counts import Counts
    from kvferry.sglang.settings import Settings

logger = logging.getLogger("kvferry")

#: Time without a connection after which stores are abandoned instead of awaited. A leader's restart takes less.
LOST_S = 3.0
#: Pause of all stores after one that the leader could not take.
PAUSE_S = 1.0
#: Longest wait for cancelled stores when the cache is reset, before they are abandoned.
RESET_LIMIT_S = 2.0


@dataclass(eq=False)
class Offload:
    """The offload of one node. Without a request it has failed."""

    slot: int = 0
    epoch: int = 0
    pending: PendingRequest | None = None
    pages: int = 0
    abandoned: bool = False
    result: bool | None = None

    @property
    def request(self) -> int:
        """Id of the store, for the ranks to abandon; 0 without need."""
        return self.pending.id if self.pending is not None and self.abandoned else 0


class Offloads:
    """The offloads whose result SGLang has not taken, at most ``offloads_max``. For the scheduler's thread alone."""

    def __init__(
        self,
        client: EngineClient,
        settings: "Settings",
        finishes: Finishes,
        abandoned: "Abandoned",
        counts: "Counts",
    ):
        self._client = client
        self._settings = settings
        self._finishes = finishes
        self._abandoned = abandoned
        self._counts = counts
        self._open: collections.deque[Offload] = collections.deque()
        self._again_at = 0.0

    def begin(self, slot: int, hashes: bytes, pages: list[int], namespace: bytes, after: int) -> None:
        """Stores pages, which every rank has written when it has reported the work ``after``."""
        offload = Offload(slot, self._client.epoch, pages=len(pages))
        self._open.append(offload)
        if not self._client.listening or time.monotonic() < self._again_at:
            offload.result = False
            return
        limit_s = self._settings.store_timeout_ms / 1000
        # Opens the slot: a store names pages of a slot that a lookup has opened. It holds nothing.
        self._client.lookup(slot, split(hashes), namespace=namespace, have_pages=len(pages), timeout_s=limit_s)
        offload.pending = self._client.store(slot, [Part(0, 0, pages)], after=after, timeout_s=limit_s, grace_s=FENCE_S)

    def fail(self) -> None:
        """Adds an offload that has failed already."""
        self._open.append(Offload(result=False))

    def turn(self) -> int:
        """Handles ended stores; returns how many results can be taken. Does not wait."""
        lost_at = self._client.lost_at
        lost = lost_at is not None and time.monotonic() - lost_at > LOST_S
        ended = 0
        for offload in self._open:
            if offload.result is None:
                self._look(offload, lost)
        for offload in self._open:
            if offload.result is None:
                break
            ended += 1
        return ended

    def _look(self, offload: Offload, lost: bool) -> None:
        pending = offload.pending
        if pending is None:
            offload.result = False
        elif offload.abandoned:
            if self._abandoned.is_over(pending.id):
                self._end(offload, False)
        elif isinstance(pending.answer, wire.StoreAnswer):
            self._end(offload, pending.answer.failed_pages == pending.answer.refused_pages == 0)
        elif pending.failure is not None and pending.failure.over:
            if pending.failure.retry:
                self._again_at = time.monotonic() + PAUSE_S
            logger.debug("kvferry: a store failed: %s", pending.failure)
            self._end(offload, False)
        elif pending.done or lost:
            self._abandon(offload)

    def _abandon(self, offload: Offload) -> None:
        if offload.pending is not None and not offload.abandoned:
            offload.abandoned = True
            self._abandoned.add([offload.pending.id])

    def _end(self, offload: Offload, result: bool) -> None:
        offload.result = result
        self._count(offload)
        self._finish(offload)

    def _count(self, offload: Offload) -> None:
        if offload.pending is not None:
            self._counts.stored(offload.pending.answer, offload.pages)

    def take(self) -> tuple[bool, int]:
        """Removes the oldest offload; returns its result, and the id of its store if other ranks must abandon it."""
        offload = self._open.popleft()
        return bool(offload.result), offload.request

    def end_all(self) -> list[int]:
        """Stops all stores, and removes them. Waits at most :data:`RESET_LIMIT_S`.

        Returns the requests that every rank must abandon before it uses their pages.
        """
        self.turn()
        running = [offload for offload in self._open if offload.result is None]
        if running and self._client.listening:
            until = time.monotonic() + RESET_LIMIT_S
            self._client.cancel_stores(timeout_s=RESET_LIMIT_S)
            for offload in running:
                if offload.pending is not None:
                    offload.pending.wait(max(until - time.monotonic(), 0.0))
            self.turn()
        for offload in self._open:
            if offload.result is None:
                self._count(offload)
                self._finish(offload)
        return self.abandon_all()

    def abandon_all(self) -> list[int]:
        """Removes all stores; returns the requests that every rank must abandon before it uses their pages."""
        requests = []
        for offload in self._open:
            if offload.result is None:
                self._abandon(offload)
            if offload.request:
                requests.append(offload.request)
        self._open.clear()
        return requests

    def _finish(self, offload: Offload) -> None:
        # Without an answer, the requests of the slot are sent again to the next leader.
        answered = offload.pending is not None and offload.pending.answer is not None
        self._finishes.finish(offload.slot, offload.epoch if answered else None)

    def __len__(self) -> int:
        return len(self._open)
