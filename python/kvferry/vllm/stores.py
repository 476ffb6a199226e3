"""Stores: pages that a step fills are copied to kvferry after it."""

import logging
import time
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.engine_client import EngineClient
from kvferry.served import Part, Served
from kvferry.switch import Switch
from kvferry.vllm.backpressure import Backpressure
from kvferry.vllm.counts import Counts
from kvferry.vllm.inflight import CopiesInFlight, Copy
from kvferry.vllm.invalidation import Invalidation
from kvferry.vllm.lookups import Lookups
from kvferry.vllm.namespaces import Namespaces
from kvferry.vllm.settings import Settings
from kvferry.vllm.steps import Steps
from kvferry.vllm.tracked import Describe, Tracked
from kvferry.vllm.verify import Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger("vllm.kvferry")

#: Number of steps of which one stores generated pages, unless each page is stored at once: the stores of a step share a
#: message and its answer.
GENERATED_EVERY = 4
#: Pause of all stores after one that the leader could not take.
STORE_PAUSE_S = 1.0


class Stores:
    """The stores of an engine. For the scheduler's thread alone."""

    def __init__(
        self,
        client: EngineClient,
        copies: CopiesInFlight,
        settings: Settings,
        served: Served,
        steps: Steps,
        counts: Counts,
        *,
        lookups: Lookups,
        namespaces: Namespaces,
        invalidation: Invalidation,
        switch: Switch,
        describe: Describe | None = None,
        verification: Verification | None = None,
    ):
        self._client = client
        self._copies = copies
        self._counts = counts
        self._settings = settings
        self._steps = steps
        self._lookups = lookups
        self._namespaces = namespaces
        self._invalidation = invalidation
        self._switch = switch
        self._describe = describe
        self._verification = verification
        #: Tokens of a page, as hashes count pages.
        self._page_tokens = served.hash_tokens
        self._groups = served.groups
        #: No store is requested before this time, because the leader could not take one.
        self._again_at = 0.0
        self._step = 0
        page_bytes = max(group.page_bytes for group in served.groups)
        self.backpressure = Backpressure(settings, page_bytes, copies)

    def generated_are_due(self) -> bool:
        """Begins a step; returns whether the pages that requests have generated are stored in it."""
        self._step += 1
        at_once = self._verification is not None or self._settings.store_run_pages == 1
        return at_once or self._step % GENERATED_EVERY == 0

    def _full(self, tracked: Tracked, computed: int, *, at_once: bool) -> int:
        """Returns the pages that are full with ``computed`` tokens and are to be stored: all of them, or in runs."""
        request = tracked.request
        limit = tracked.settings.max_store_tokens
        if limit is not None:
            computed = min(computed, limit)
        full = min(computed // self._page_tokens, len(request.block_hashes))
        prompt = request.num_prompt_tokens // self._page_tokens
        if full <= prompt:
            return full
        if self._settings.store == "prompt":
            return prompt
        # Generated pages come one by one: each store would cost as much as one of many pages.
        waits = full - max(tracked.full, prompt) < self._settings.store_run_pages
        return max(tracked.full, prompt) if waits and not at_once else full

    def _next_store(self, tracked: Tracked) -> int:
        """Returns the tokens with which the next store can be due, at the earliest."""
        prompt = tracked.request.num_prompt_tokens // self._page_tokens
        run = 1 if tracked.full < prompt else self._settings.store_run_pages
        return (tracked.full + run) * self._page_tokens

    def store(
        self,
        tracked: Tracked,
        computed: int,
        tables: "Callable[[], Sequence[Sequence[int]] | None]",
        states: "Sequence[tuple[int, int, int]]",
        after: int = 0,
    ) -> None:
        """Requests a store of the pages that are full with ``computed`` tokens, and of states that vLLM hands over.

        They are written by the work ``after``; with 0, by the step that is scheduled now.
        """
        request = tracked.request
        # vLLM hands a state over once, and gives the pages of a finished request to others.
        full = self._full(tracked, computed, at_once=bool(states) or request.is_finished())
        if full <= tracked.full and not states:
            if self._verification is None:
                tracked.store_at = self._next_store(tracked)
                tracked.generates = tracked.full >= request.num_prompt_tokens // self._page_tokens
            return
        if why := self._why_not(tracked):
            self._counts.not_stored(tracked, why)
            return
        # The client's thread changes the epoch: both uses below need the same one.
        epoch = self._client.epoch
        if tracked.epoch != epoch:
            tracked.stored.leader_changed()
        tracked.full = full
        # A load has brought all of them: the tables of a long request need not be built.
        nothing = not states and not tracked.stored.is_behind(full * self._page_tokens)
        if nothing or full > wire.HASHES_MAX or (found := tables()) is None:
            return
        parts = [*tracked.stored.to_store(found, full * self._page_tokens, states)][: wire.PARTS_MAX]
        if not parts or full == 0:
            return
        if not self.backpressure.admits(sum(len(part.pages) for part in parts)):
            self._counts.held_back()
            return
        if tracked.epoch != epoch or tracked.opened is None or tracked.opened.failure is not None:
            self._lookups.open(tracked, full, full, self._settings.store_timeout_ms)
        sides = [parts]
        if self._verification is not None:
            named = self._verification.summed(tracked, parts) if after else parts
            sides = self._verification.split(tracked, named)
        for side in sides:
            if not self._send(tracked, side, full, after):
                # The pages are named again when the next one is full.
                break

    def _send(self, tracked: Tracked, parts: list[Part], full: int, after: int) -> bool:
        """Requests a store of these pages; False if they cannot be verified now."""
        verified = self._verification.begin_store(tracked, parts) if self._verification is not None else []
        if verified is None:
            return False
        tracked.stored.stored(parts)
        tracked.not_stored = ""
        known = tracked.known
        more = tracked.request.block_hashes[known:full]
        tracked.known = max(known, full)
        if self._describe is not None:
            # Before the store is requested, so that its pages can be announced in full when they are there.
            self._describe(tracked, full)
        # Windows let go of their pages while the request runs.
        stays = all(self._groups[part.group].attention == "full" for part in parts)
        copy = Copy(tracked, parts, store=True, stays=stays and not after, restarts=tracked.restarts)
        limit_s = self._settings.store_timeout_ms / 1000
        store = self._copies.begin_store(copy, tracked.slot, more=more, more_from=known, after=after, timeout_s=limit_s)
        if self._verification is not None:
            self._verification.store_sent(copy, store, verified)
        if after:
            self._steps.awaited = max(self._steps.awaited, after)
        else:
            self._steps.store = store
        return True

    def _why_not(self, tracked: Tracked) -> str:
        """Returns why pages of this request may not be stored now; empty when they may."""
        if time.monotonic() < self._again_at:
            return "paused"
        if self._settings.mode == "load":
            return "mode"
        if self._switch.off:
            return "off"
        if not tracked.settings.store:
            return "request"
        # vLLM may evict an adapter and read its files again while its requests run.
        lora = tracked.request.lora_request
        own = tracked.settings.namespace
        if tracked.namespace is None or (lora and self._namespaces.of(lora, own) != tracked.namespace):
            return "adapter"
        old = tracked.mixed or tracked.on_old_pages or self._invalidation.on_old_pages(tracked)
        return "reset" if old else ""

    def over(self, tracked: Tracked, copy: Copy, *, before_reset: bool) -> None:
        """Handles the end of a store. ``before_reset``: it was requested before the last reset of the cache."""
        self._counts.store_over(copy)
        if copy.answer is not None:
            return
        logger.debug("kvferry: a store of %d pages failed: %s", len(copy.pages), copy.failure)
        # Reopens the slot, and retries the pages when the next one is full.
        tracked.opened = None
        if copy.failure is None or copy.failure.retry:
            self._again_at = time.monotonic() + STORE_PAUSE_S
        if not before_reset:
            tracked.stored.not_stored(copy.parts)
