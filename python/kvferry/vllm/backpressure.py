"""Limits on stores: pages of the device that only stores hold, and bytes of all running stores.

A store holds its pages until it is over. A running request holds these pages itself; after it has ended or was
preempted, only the store keeps them from other requests, for as long as the copy takes. When copies are slower than the
engine fills pages, stores are skipped; the pages are named again in the next store of the request.
"""

import logging
import time

from kvferry.vllm.inflight import CopiesInFlight
from kvferry.vllm.settings import Settings

logger = logging.getLogger("vllm.kvferry")

#: Most stores at a time. The leader has 1,024 requests of an engine open: lookups and loads need the others.
STORES_MAX = 512
#: Shortest time between two warnings about skipped stores.
_TELL_S = 60.0


class Backpressure:
    """Admission of stores.

    Pages that only stores hold take at most ``store_mb_max`` of a rank, or the pages of one request if those are more:
    when the requests of all stores end at once.
    """

    def __init__(self, settings: Settings, page_bytes: int, copies: CopiesInFlight):
        self._copies = copies
        self._percent = settings.store_pages_percent
        self._pages_max = max(settings.store_mb_max * 1_000_000 // max(page_bytes, 1), 1)
        #: Number of skipped stores.
        self.skipped = 0
        self._tell_at = 0.0

    def admits(self, pages: int) -> bool:
        """Whether a store of so many pages may begin now. Counts the stores that may not."""
        under_way = self._copies.stored_pages()
        if self._copies.storing >= STORES_MAX:
            return self._skip(under_way)
        alone_max = max(self._copies.pool_pages() * self._percent // 100, 1)
        # A single store may exceed the limits, when no other store runs.
        if under_way == 0 or (
            under_way + pages <= self._pages_max and (under_way <= alone_max or self._copies.pages_alone() <= alone_max)
        ):
            return True
        return self._skip(under_way)

    def _skip(self, under_way: int) -> bool:
        """Counts a skipped store; returns False."""
        self.skipped += 1
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_S
            logger.warning(
                "kvferry: stores_skipped_backpressure=%d: %d pages are being stored, slower than the engine fills them "
                "(store_pages_percent, store_mb_max)",
                self.skipped,
                under_way,
            )
        return False
