"""Which pages may no longer be found or stored: after resets of vLLM's caches, and with other weights of an adapter."""

import logging
import time
from typing import TYPE_CHECKING

from kvferry.resets import RESET_LIMIT_S, Forgetting
from kvferry.vllm.loads import Loads
from kvferry.vllm.lookups import Lookups
from kvferry.vllm.namespaces import Namespaces
from kvferry.vllm.settings import Settings
from kvferry.vllm.tracked import Tracked

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger("vllm.kvferry")


class Invalidation:
    """Follows resets of vLLM's caches. For the scheduler's thread alone."""

    def __init__(
        self,
        settings: Settings,
        forgetting: Forgetting,
        *,
        namespaces: Namespaces,
        lookups: Lookups,
        loads: Loads,
        tracked: "dict[str, Tracked]",
    ):
        self._shared_after_reset = settings.shared_after_reset
        self._forgetting = forgetting
        self._namespaces = namespaces
        self._lookups = lookups
        self._loads = loads
        self._tracked = tracked
        #: Time of the last reset: failed stores from before are not retried.
        self._reset_at = 0.0
        #: Namespaces that were left and not yet removed at the leader, because it is unknown whether vLLM was to
        #: reset the connector. The next reset of the connector removes them.
        self._left: list[bytes] = []
        #: vLLM has reset its own pages, and no page was computed or loaded since.
        self._device_empty = False
        #: vLLM may still have pages of its own from before a reset.
        self._device_old = False

    def before_reset(self, requested_at: float) -> bool:
        """Whether a copy that was requested at this time is from before the last reset."""
        return requested_at <= self._reset_at

    def on_old_pages(self, tracked: Tracked) -> bool:
        """Whether a request begins with pages of the device that may be from before a reset, or of other weights."""
        old = self._device_old or self._namespaces.device_is_old(tracked.request.lora_request)
        return old and tracked.device_pages > 0

    def device_has_pages(self) -> None:
        """Records that pages are computed or loaded."""
        self._device_empty = False

    def was_reset(self) -> None:
        """Records that no request can find a page on the device from before the reset."""
        self._device_empty, self._device_old = True, False
        self._namespaces.device_is_empty()
        self._loads.spoil()

    def reset_refused(self) -> None:
        """Handles a reset that vLLM refused because some of its pages are still held.

        When vLLM was asked to preempt all requests, it gives up here and never resets the connector. In that state no
        request is RUNNING, and some have computed tokens or are PREEMPTED: a request whose load is over, and that waits
        to be scheduled, cannot be made to free its pages. A reset of vLLM's own pages alone can look the same, so the
        pages that other engines share are not removed at the leader.
        """
        if self._shared_after_reset:
            return
        requests = [tracked.request for tracked in self._running()]
        if any(request.status.name == "RUNNING" for request in requests):
            return
        if any(request.num_computed_tokens or request.status.name == "PREEMPTED" for request in requests):
            logger.warning(
                "kvferry: vLLM could not reset its own pages, since requests hold some that have just been loaded: "
                "reset it again. This engine finds no earlier pages in kvferry"
            )
            self._leave(forget=False)

    def reset(self) -> None:
        """Stops finding the pages that this engine could find so far, and requests their removal by the leader.

        vLLM also resets its caches when weights were changed in memory, without a way to see that here: from then on
        this engine uses private namespaces. With ``shared_after_reset`` only until the leader has confirmed the reset.
        """
        self._leave(forget=True)

    def turn(self) -> None:
        """Retries resets until the leader confirms them; after that this engine may share pages again."""
        if self._forgetting.done:
            return
        self._forgetting.turn()
        if self._forgetting.done and self._shared_after_reset:
            self._namespaces.share()
            logger.info("kvferry: the leader confirmed the reset")

    def _running(self) -> "Iterable[Tracked]":
        return [tracked for tracked in self._tracked.values() if not tracked.finished]

    def _leave(self, *, forget: bool) -> None:
        """Switches to private namespaces. ``forget``: reset the old ones at the leader now, not with the next reset."""
        self._reset_at = time.monotonic()
        # vLLM resets its own pages before, unless a request holds some. If weights never change, such pages are as
        # valid as those computed after the reset.
        self._device_old = not (self._device_empty or self._shared_after_reset)
        running = self._running()
        for tracked in running:
            # Pages that are computed or loading by now are no longer stored, and pages that were found are released.
            request = tracked.request
            page_tokens = tracked.stored.served.hash_tokens
            computed = min(request.num_computed_tokens, request.num_tokens) // page_tokens
            tracked.full = max(tracked.full, computed)
            tracked.stored.skip(tracked.full * page_tokens)
            # Pages that the request computes from now on depend on its tokens from before, also on those of a part of
            # a page.
            began = request.num_computed_tokens > 0 or tracked.load is not None
            tracked.mixed = began and not self._shared_after_reset
            self._lookups.let_go(tracked)
        left = self._namespaces.leave()
        if forget:
            self._have_forgotten([*self._left, *left])
            self._left = []
        else:
            # Namespaces that are left later are private to this engine.
            self._left = self._left or left
        for tracked in running:
            # A request without a namespace may have pages of any weights. It gets one when scheduled without pages.
            if tracked.namespace is not None:
                of = self._namespaces.of(tracked.request.lora_request, tracked.settings.namespace)
                tracked.namespace, tracked.opened = of, None
        # The next step may be far away, if the engine is paused.
        self._namespaces.next_step()

    def _have_forgotten(self, namespaces: list[bytes]) -> None:
        self._forgetting.add(namespaces)
        if not self._shared_after_reset:
            self._forgetting.turn()
        elif self._forgetting.wait(RESET_LIMIT_S):
            self._namespaces.share()
        else:
            why = self._forgetting.problem or "no answer came in time"
            logger.warning("kvferry: the leader did not confirm a reset (%s): this engine finds no earlier pages", why)
