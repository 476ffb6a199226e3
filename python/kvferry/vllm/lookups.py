"""Lookups: which pages of a request kvferry can load."""

import time
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.served import Served
from kvferry.switch import Switch
from kvferry.vllm.counts import Counts
from kvferry.vllm.settings import Settings
from kvferry.vllm.tracked import Describe, Lookup, Tracked

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Age up to which the answer of a lookup is used. The leader holds the found pages for 30 s.
FRESH_S = 15.0
#: Most requests that wait to be scheduled and whose pages the leader holds already. Further ones are looked up when
#: they are about to be scheduled.
EARLY_LOOKUPS_MAX = 64


class Lookups:
    """The lookups of an engine, and the slots of its requests at the leader. For the scheduler's thread alone."""

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        served: Served,
        switch: Switch,
        counts: Counts,
        *,
        describe: "Describe | None" = None,
    ):
        self._client = client
        self._counts = counts
        self._settings = settings
        self._served = served
        self._switch = switch
        self._describe = describe
        #: Tokens of a page, as hashes count pages.
        self._page_tokens = served.hash_tokens
        #: Requests that were looked up when they arrived, and not considered by vLLM since.
        self._early: set[str] = set()
        self._budget_s = settings.lookup_budget_ms / 1000

    def next_step(self) -> None:
        """Renews the time that a step may wait for answers."""
        self._budget_s = self._settings.lookup_budget_ms / 1000

    def arrived(self, tracked: Tracked) -> None:
        """Looks the pages of a new request up, so that the answer is there when it is scheduled."""
        request = tracked.request
        # The files of an adapter are checked later, and may have other pages then.
        if request.lora_request or self._why_not(tracked) or len(self._early) >= EARLY_LOOKUPS_MAX:
            return
        if self._limit(request) > 0 and tracked.lookup is None:
            self._early.add(request.request_id)
            self._look_up(tracked, 0).early = True

    def considered(self, request: "Request") -> None:
        """Records that vLLM considers a request, or that it is finished."""
        self._early.discard(request.request_id)

    def matched_tokens(self, tracked: Tracked) -> int | None:
        """Returns how many tokens after the device's pages can be loaded; None: vLLM should call again later."""
        request, device_pages = tracked.request, tracked.device_pages
        if tracked.load is not None:
            return 0
        limit = self._limit(request)
        if why := self._why_not(tracked) or ("" if limit > device_pages else "short"):
            self._counts.not_looked_up(tracked, why)
            return 0
        tracked.not_looked_up = ""
        lookup = tracked.lookup
        if lookup is None or not self._serves(lookup, device_pages, self._looked_up(request)):
            lookup = self._look_up(tracked, device_pages)
        if not lookup.pending.done and self._budget_s > 0:
            before = time.monotonic()
            lookup.pending.wait(self._budget_s)
            waited_s = time.monotonic() - before
            self._budget_s -= waited_s
            self._counts.waited(waited_s)
        if not lookup.pending.done:
            if time.monotonic() - lookup.requested_at <= self._settings.lookup_timeout_ms / 1000:
                self._counts.deferred()
                return None
            self._counts.looked_up(lookup, 0)
            tracked.computes = True
            return 0
        found = min(lookup.found(), limit)
        if self._describe is not None and found > device_pages:
            self._describe(tracked, found)
        tokens = max(found - device_pages, 0) * self._page_tokens
        self._counts.looked_up(lookup, tokens)
        return tokens

    def _why_not(self, tracked: Tracked) -> str:
        """Returns why a request is computed without a lookup; empty when it is looked up."""
        # vLLM ignores hits of a request that does not read its prefix cache: no pages are held for such a request.
        if self._settings.mode == "store":
            return "mode"
        if self._switch.off:
            return "off"
        if not tracked.settings.load:
            return "request"
        if tracked.computes:
            return "recomputed"
        if tracked.namespace is None:
            return "adapter"
        if tracked.request.skip_reading_prefix_cache:
            return "vllm"
        return "" if self._client.listening else "disconnected"

    def _limit(self, request: "Request") -> int:
        """The longest hit of a request in pages: vLLM must compute at least one token."""
        return min((request.num_tokens - 1) // self._page_tokens, len(request.block_hashes), wire.HASHES_MAX)

    def _looked_up(self, request: "Request") -> int:
        """Number of pages that a lookup names."""
        return min(len(request.block_hashes), wire.HASHES_MAX) if self._served.looks_behind else self._limit(request)

    def _look_up(self, tracked: Tracked, device_pages: int) -> Lookup:
        pages, limit = self._looked_up(tracked.request), self._limit(tracked.request)
        pending = self.open(tracked, device_pages, pages, self._settings.lookup_timeout_ms, limit=limit)
        tracked.lookup = Lookup(pending, time.monotonic(), self._client.link, device_pages, pages)
        return tracked.lookup

    def _serves(self, lookup: Lookup, device_pages: int, pages: int) -> bool:
        """Whether an earlier lookup still answers what can be loaded after the device's pages."""
        if lookup.link != self._client.link or lookup.pages != pages:
            return False
        if not lookup.pending.done:
            return lookup.device_pages <= device_pages
        if lookup.early and lookup.pending.failure is not None:
            # The request has waited since, and the leader may be able to answer now.
            return False
        if time.monotonic() - lookup.requested_at > FRESH_S:
            return False
        return lookup.device_pages == device_pages or lookup.device_pages < device_pages < lookup.found()

    def open(
        self, tracked: Tracked, device_pages: int, pages: int, timeout_ms: int, *, limit: int | None = None
    ) -> PendingRequest:
        """Opens or reopens the request's slot, by a lookup of its pages. A hit ends at ``limit`` at the latest."""
        tracked.opened = self._client.lookup(
            tracked.slot,
            tracked.request.block_hashes[:pages],
            namespace=tracked.namespace or b"",
            have_pages=device_pages,
            limit_pages=limit if limit != pages else None,
            timeout_s=timeout_ms / 1000,
        )
        tracked.known_there, tracked.epoch = True, self._client.epoch
        tracked.known = pages
        return tracked.opened

    def let_go(self, tracked: Tracked) -> None:
        """Releases the leader's hold on pages that a lookup found or may still find, by a lookup that finds nothing."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is not None and (not lookup.pending.done or lookup.found() > lookup.device_pages):
            self.open(tracked, lookup.pages, lookup.pages, self._settings.lookup_timeout_ms)
