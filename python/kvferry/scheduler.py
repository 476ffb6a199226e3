"""The scheduler's side of the connector: requests lookups, loads and stores, and tracks which pages a copy still uses.

Every decision that the leader can make is left to the leader. No hook of a step blocks, except for the lookup budget of
that step (``lookup_budget_ms``).

Pages under copy are safe in every order of events. A load's pages belong to a request that vLLM keeps until the load is
reported over. A store's pages carry one more reference of vLLM's block pool until the store is over, whatever becomes
of its request. When the leader cannot report how a copy ended, each rank ensures that the copy has stopped before the
pages are used again (:mod:`kvferry.inflight`).
"""

import functools
import logging
import time
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.backpressure import Backpressure
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.finishes import Finishes
from kvferry.inflight import CopiesInFlight, Copy
from kvferry.metadata import RankReport, StepMetadata
from kvferry.namespaces import Namespaces
from kvferry.per_request import PerRequests
from kvferry.poolreset import reset_beside_loads
from kvferry.resets import RESET_LIMIT_S, Forgetting
from kvferry.served import NO_PAGE, Served, StoreCursor
from kvferry.settings import Settings
from kvferry.switch import Switch
from kvferry.tracked import Lookup, Tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvferry")

#: Age up to which the answer of a lookup is used. The leader holds the found pages for 30 s.
FRESH_S = 15.0
#: Most requests that wait to be scheduled and whose pages the leader holds already. Further ones are looked up when
#: they are about to be scheduled.
EARLY_LOOKUPS_MAX = 64
#: Time without a connection to the leader after which a warning is logged.
ABSENT_S = 1.0
#: Age up to which vLLM waits for a store that will free pages, instead of preempting a request.
FREES_SOON_S = 0.1
#: Longest wait for the cancelled stores when vLLM resets its pool of pages. A worker that is alive ends them within one
#: part of a copy, 32 MiB at most.
LAST_STORES_S = 2.0
#: Pause between two ``cancel_stores`` requests: a repeated one reaches stores that were sent after the previous one.
CANCEL_AGAIN_S = 0.05
#: Pause of all stores after one that the leader could not take.
STORE_PAUSE_S = 1.0


class SchedulerSide:
    """The connector in vLLM's scheduler process. For the scheduler's thread alone."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: bytes,
        replica: int,
        namespace: str,
        adapters: str,
        served: Served,
        ranks: int,
        private: bool = False,
        zeroes: bool = False,
        connect: type[EngineClient] = EngineClient,
    ):
        self._settings = settings
        self._namespaces = Namespaces(namespace, engine.hex(), adapters, declared=bool(settings.weights))
        if private:
            # The weights may change at any time: no other engine may find what is computed here.
            self._namespaces.leave()
        self._served = served
        #: Tokens of a page, as hashes count pages.
        self._page_tokens = served.hash_tokens
        #: Steps write zeros to new pages before their forward pass.
        self._zeroes = zeroes
        #: Loads that are requested at the end of this step.
        self._loads: list[Copy] = []
        self._tracked: dict[str, Tracked] = {}
        self._per_request = PerRequests()
        self._switch = Switch(settings.socket_dir)
        #: Requests that were looked up when they arrived, and not considered by vLLM since.
        self._early: set[str] = set()
        #: Loads that end while vLLM takes the results of a step are reported there; None at other times.
        self._ended_now: set[str] | None = None
        self._budget_s = settings.lookup_budget_ms / 1000
        self._step = StepMetadata()
        self._last_store = 0
        #: ``written_through`` of the last step in which the ranks write pages.
        self._last_work = 0
        #: ``written_through`` of the last step that is known to be over. Only deadlines depend on it.
        self._last_stepped = 0
        self._logged_absent = False
        #: Time of the last reset: failed stores from before are not retried.
        self._reset_at = 0.0
        #: Pages of the loading requests, until a step reports the end of the load to the ranks; and the requests of
        #: those whose pages vLLM has reset meanwhile.
        self._loading: dict[str, list[int]] = {}
        self._spoiled: set[str] = set()
        #: Namespaces that were left and not yet removed at the leader, because it is unknown whether vLLM was to
        #: reset the connector. The next reset of the connector removes them.
        self._left: list[bytes] = []
        #: vLLM has reset its own pages, and no page was computed or loaded since.
        self._device_empty = False
        #: vLLM may still have pages of its own from before a reset.
        self._device_old = False
        #: No store is requested before this time, because the leader could not take one.
        self._store_again_at = 0.0
        # Ids and slots start from the clock, so that they also grow over a restart of an engine with the same name.
        self._next_slot = base = time.time_ns() // 1000
        self._client = connect(
            settings.socket_dir / "leader", engine, first_id=base, replica=replica, name="vLLM", turn=self._watch
        )
        self._copies = CopiesInFlight(self._client, ranks)
        self._finishes = Finishes(self._client)
        self._forgetting = Forgetting(self._client)
        page_bytes = max(group.page_bytes for group in served.groups)
        self._backpressure = Backpressure(settings, page_bytes, self._copies)
        self._client.start()

    def bind_pool(self, pool: "BlockPool") -> None:
        """Takes the engine's pool of pages, and wraps its ``reset_prefix_cache``.

        vLLM resets the pool only while no page is held, and calls no hook of the connector before. The wrapper cancels
        stores that hold pages, because the pages that they would keep belong to a cache that is dropped. An engine that
        is paused or idle runs no step that would notice the end of these stores, so the wrapper waits for it, at most
        :data:`LAST_STORES_S`. Loads go on, and their pages are computed afterwards.
        """
        self._copies.bind_pool(pool)
        reset = pool.reset_prefix_cache

        def reset_without_stores() -> bool:
            try:
                self._end_stores()
            except Exception:
                logger.exception("kvferry: stores could not be ended before a reset")
            done = reset_beside_loads(pool, list(self._loading.values()), reset)
            try:
                self._was_reset() if done else self._reset_refused()
            except Exception:
                logger.exception("kvferry: a reset of the engine's pages could not be followed")
            return done

        pool.reset_prefix_cache = reset_without_stores  # type: ignore[method-assign]

    def _watch(self) -> float | None:
        """Looks at the switch, and logs once that the leader is away and that it is back. On the client's thread."""
        look_at = self._switch.look()
        away_at = self._tell_away()
        return look_at if away_at is None else min(look_at, away_at)

    def _tell_away(self) -> float | None:
        lost_at = self._client.lost_at
        if lost_at is None:
            if self._logged_absent:
                logger.info("kvferry: the leader in %s is connected", self._client.directory)
            self._logged_absent = False
        elif not self._logged_absent:
            if time.monotonic() - lost_at < ABSENT_S:
                return lost_at + ABSENT_S
            self._logged_absent = True
            logger.warning(
                "kvferry: no leader answers in %s (%s): requests run without the cache until one does",
                self._client.directory,
                self._client.problem,
            )
        return None

    # Requests.

    def track(self, request: "Request") -> Tracked:
        """Returns the record of a request, and creates it for a new one."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.finished:
            self._next_slot += 1
            settings = self._per_request.of(request.kv_transfer_params)
            # The files of an adapter are checked when the request is about to be scheduled.
            namespace = None if request.lora_request else self._namespaces.of(None, settings.namespace)
            tracked = Tracked(request, self._next_slot, namespace, StoreCursor(self._served), settings)
            self._tracked[request.request_id] = tracked
        tracked.request = request
        return tracked

    def arrived(self, request: "Request") -> None:
        """Begins to track a new request, and looks its pages up, so that the answer is there when it is scheduled."""
        tracked = self.track(request)
        # The files of an adapter are checked later, and may have other pages then.
        if request.lora_request or self._loads_nothing(tracked) or len(self._early) >= EARLY_LOOKUPS_MAX:
            return
        if self._client.listening and self._limit(request) > 0 and tracked.lookup is None:
            self._early.add(request.request_id)
            self._look_up(tracked, 0)

    def finished(self, request: "Request", tables: "Sequence[Sequence[int]]" = ()) -> None:
        """Ends a request. Pages under copy stay held: by the pool, or by vLLM until a load is reported."""
        self._early.discard(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        failed = request.status.name == "FINISHED_ERROR"
        # A request that ends before a step ran it may count tokens as computed whose load has failed.
        if tables and tracked.ran and not (tracked.finished or failed) and self._client.listening:
            # The last token was sampled, and has no KV of its own yet.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._store(tracked, computed, lambda: tables, (), after=self._last_work)
        if tracked.known_there and not tracked.finished:
            # A lookup without an answer is sent again to the next leader.
            answered = tracked.opened is not None and tracked.opened.done
            self._finishes.finish(tracked.slot, self._client.epoch if answered else None)
        tracked.finished = True
        self._forget_if_over(tracked)

    def _end_stores(self) -> None:
        """Cancels the running stores, and returns their pages to the pool. Waits at most :data:`LAST_STORES_S`."""
        until = time.monotonic() + LAST_STORES_S
        cancel: PendingRequest | None = None
        while self._copies.stores() and (left_s := until - time.monotonic()) > 0:
            if self._client.listening and (cancel is None or cancel.done):
                cancel = self._client.cancel_stores(timeout_s=left_s)
            self._copies.wait(min(left_s, CANCEL_AGAIN_S))
            self._settle()
        if left := self._copies.stores():
            logger.warning("kvferry: %d stores hold pages of the engine still, and its cache cannot be reset", left)

    def _was_reset(self) -> None:
        """Records that no request can find a page on the device from before the reset."""
        self._device_empty, self._device_old = True, False
        self._namespaces.device_is_empty()
        for name in self._loading:
            if name in self._step.loaded:
                self._step.failed.append(name)
            else:
                self._spoiled.add(name)

    def _reset_refused(self) -> None:
        """Handles a reset that vLLM refused because some of its pages are still held.

        When vLLM was asked to preempt all requests, it gives up here and never resets the connector. In that state no
        request is RUNNING, and some have computed tokens or are PREEMPTED: a request whose load is over, and that waits
        to be scheduled, cannot be made to free its pages. A reset of vLLM's own pages alone can look the same, so the
        pages that other engines share are not removed at the leader.
        """
        if self._settings.shared_after_reset:
            return
        requests = [tracked.request for tracked in self._tracked.values() if not tracked.finished]
        if any(request.status.name == "RUNNING" for request in requests):
            return
        if any(request.num_computed_tokens or request.status.name == "PREEMPTED" for request in requests):
            logger.warning(
                "kvferry: vLLM could not reset its own pages, since requests hold some that have just been loaded: "
                "reset it again. This engine finds no earlier pages in kvferry"
            )
            self._leave(forget=False)

    def _forget_if_over(self, tracked: Tracked) -> None:
        name = tracked.request.request_id
        if tracked.finished and tracked.load is None and self._tracked.get(name) is tracked:
            del self._tracked[name]

    # Lookups.

    def matched_tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Returns how many tokens after the computed ones can be loaded; None: vLLM should call again later."""
        tracked = self.track(request)
        self._early.discard(request.request_id)
        self._adapter_changed(tracked)
        tracked.device_pages = device_pages = computed_tokens // self._page_tokens
        # vLLM calls this only for requests that have no pages.
        tracked.stored.restart()
        tracked.full, tracked.ran = 0, False
        tracked.mixed, tracked.on_old_pages = False, self._on_old_pages(tracked)
        if tracked.load is not None or self._loads_nothing(tracked) or not self._client.listening:
            return 0
        limit = self._limit(request)
        if limit <= device_pages:
            return 0
        lookup = tracked.lookup
        if lookup is None or not self._serves(lookup, device_pages, self._looked_up(request)):
            lookup = self._look_up(tracked, device_pages)
        if not lookup.pending.done and self._budget_s > 0:
            before = time.monotonic()
            lookup.pending.wait(self._budget_s)
            self._budget_s -= time.monotonic() - before
        if not lookup.pending.done:
            if time.monotonic() - lookup.requested_at <= self._settings.lookup_timeout_ms / 1000:
                return None
            tracked.computes = True
            return 0
        return max(min(lookup.found(), limit) - device_pages, 0) * self._page_tokens

    def _loads_nothing(self, tracked: Tracked) -> bool:
        """Whether a request is computed without a lookup."""
        if self._settings.mode == "store" or self._switch.off or not tracked.settings.load:
            return True
        # vLLM ignores hits of a request that does not read its prefix cache: no pages are held for such a request.
        return tracked.computes or tracked.namespace is None or tracked.request.skip_reading_prefix_cache

    def _limit(self, request: "Request") -> int:
        """The longest hit of a request in pages: vLLM must compute at least one token."""
        return min((request.num_tokens - 1) // self._page_tokens, len(request.block_hashes), wire.HASHES_MAX)

    def _looked_up(self, request: "Request") -> int:
        """Number of pages that a lookup names."""
        return min(len(request.block_hashes), wire.HASHES_MAX) if self._served.looks_behind else self._limit(request)

    def _look_up(self, tracked: Tracked, device_pages: int) -> Lookup:
        pages, limit = self._looked_up(tracked.request), self._limit(tracked.request)
        pending = self._open(tracked, device_pages, pages, self._settings.lookup_timeout_ms, limit=limit)
        tracked.lookup = Lookup(pending, time.monotonic(), self._client.link, device_pages, pages)
        return tracked.lookup

    def _on_old_pages(self, tracked: Tracked) -> bool:
        old = self._device_old or self._namespaces.device_is_old(tracked.request.lora_request)
        return old and tracked.device_pages > 0

    def _adapter_changed(self, tracked: Tracked) -> bool:
        """Updates the namespace of a request without pages from its adapter's present files; True if it changed.

        vLLM may read the files when the request is scheduled, which can be long after its arrival.
        """
        lora = tracked.request.lora_request
        if lora is None or (namespace := self._namespaces.of(lora, tracked.settings.namespace)) == tracked.namespace:
            return False
        self._let_go(tracked)
        tracked.namespace, tracked.opened = namespace, None
        return True

    def _serves(self, lookup: Lookup, device_pages: int, pages: int) -> bool:
        """Whether an earlier lookup still answers what can be loaded after the device's pages."""
        if lookup.link != self._client.link or lookup.pages != pages:
            return False
        if not lookup.pending.done:
            return lookup.device_pages <= device_pages
        if time.monotonic() - lookup.requested_at > FRESH_S:
            return False
        return lookup.device_pages == device_pages or lookup.device_pages < device_pages < lookup.found()

    def _open(
        self, tracked: Tracked, device_pages: int, pages: int, timeout_ms: int, *, limit: int | None = None
    ) -> PendingRequest:
        """Opens or reopens the request's slot, by a lookup of its pages. A hit ends at ``limit`` at the latest."""
        tracked.opened = self._client.lookup(
            tracked.slot,
            tracked.request.block_hashes[:pages],
            namespace=tracked.namespace,
            device_pages=device_pages,
            limit_pages=limit if limit != pages else None,
            timeout_s=timeout_ms / 1000,
        )
        tracked.known_there, tracked.epoch = True, self._client.epoch
        tracked.known = pages
        return tracked.opened

    def _let_go(self, tracked: Tracked) -> None:
        """Releases the leader's hold on pages that a lookup found or may still find, by a lookup that finds nothing."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is not None and (not lookup.pending.done or lookup.found() > lookup.device_pages):
            self._open(tracked, lookup.pages, lookup.pages, self._settings.lookup_timeout_ms)

    # Copies.

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Starts the load of the matched tokens, for which vLLM has allocated pages.

        The device's own pages come first in the block tables.
        """
        tracked = self.track(request)
        # Also checked for a request whose load is over: it may have waited since for its adapter to be loaded.
        changed = self._adapter_changed(tracked)
        tracked.on_old_pages = tracked.on_old_pages or self._on_old_pages(tracked)
        if external_tokens == 0:
            # Nothing was found, or another connector loads: release the leader's hold.
            self._let_go(tracked)
            if tracked.namespace is None:
                self._namespaces.computes_unseen(request.lora_request)
            return
        tables = blocks.get_block_ids()
        device = tracked.device_pages * self._page_tokens
        parts = self._served.to_load(tables, device, device + external_tokens)
        if changed or not parts:
            # The pages were found for other weights than those that vLLM may have now, or vLLM has no place for some.
            tracked.computes = True
            self._report(tracked, self._expected(tracked, blocks, external_tokens))
            return
        tracked.lookup = None
        self._loading[request.request_id] = [page for table in tables for page in table if page != NO_PAGE]
        self._device_empty = False
        tracked.load = Copy(tracked, parts, store=False)
        self._loads.append(tracked.load)
        if not self._zeroes:
            self._begin_loads(self._last_work)

    def _begin_loads(self, after: int, zeroed: "Collection[int]" = frozenset()) -> None:
        """Requests the new loads.

        Steps that still run on the ranks may write into pages that were freed meanwhile: the loads wait for the work
        ``after``, or, if the present step writes zeros to one of their pages, for that step.
        """
        while self._loads:
            copy = self._loads.pop(0)
            behind = self._last_work if any(page in zeroed for page in copy.pages) else after
            waits = behind > self._last_stepped
            limit_s = self._settings.load_limit_s(self._served.rank_bytes(copy.parts), waits=waits)
            self._copies.begin_load(copy, copy.owner.slot, after=behind, timeout_s=limit_s)

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """Returns the metadata of a step for the ranks. Requests stores of the pages that the step fills."""
        self._settle()
        self._finishes.turn()
        self._forget()
        self._device_empty = self._device_empty and not output.num_scheduled_tokens
        for request_id in output.preempted_req_ids or ():
            self._begin_anew(request_id)
        state = output.kv_connector_block_state
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.ran = True
            if self._client.listening:
                # Draft tokens have no hash, and their KV may be overwritten.
                computed = min(tracked.request.num_computed_tokens + tokens, tracked.request.num_tokens)
                states = state.boundary_state_offloads.get(request_id, ())
                self._store(tracked, computed, functools.partial(state.get_block_ids, request_id), states)
        self._budget_s = self._settings.lookup_budget_ms / 1000
        return self._take_step(output)

    def finish_only(self, output: "SchedulerOutput") -> StepMetadata:
        """Returns the metadata of a step that begins nothing: reports copies that are over, and frees their pages."""
        while self._loads:
            copy = self._loads.pop(0)
            copy.owner.load = None
            self._report(copy.owner, copy.pages)
        self._settle()
        self._finishes.turn()
        return self._take_step(output)

    def _take_step(self, output: "SchedulerOutput") -> StepMetadata:
        self._namespaces.next_step()
        step, self._step = self._step, StepMetadata()
        for name in step.loaded:
            self._loading.pop(name, None)
        before = self._last_work
        if _works(output):
            # Drawn after the ids of this step's stores, so that it covers them.
            self._last_work = self._client.draw()
        self._begin_loads(before, frozenset(output.new_block_ids_to_zero or ()))
        step.written_through, step.stores_through = self._last_work, self._last_store
        step.abandon = self._copies.to_abandon()
        return step

    def _begin_anew(self, request_id: str) -> None:
        """Resets the record of a preempted request, which no longer has pages."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.lookup, tracked.computes = None, False
            tracked.stored.restart()
            tracked.full, tracked.ran = 0, False
            tracked.mixed = False

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

    def _store(
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
        if (full <= tracked.full and not states) or time.monotonic() < self._store_again_at:
            return
        if self._settings.mode == "load" or self._switch.off or not tracked.settings.store:
            return
        # vLLM may evict an adapter and read its files again while its requests run.
        lora = request.lora_request
        own = tracked.settings.namespace
        if tracked.namespace is None or (lora and self._namespaces.of(lora, own) != tracked.namespace):
            return
        if tracked.mixed or tracked.on_old_pages or self._on_old_pages(tracked):
            return
        tracked.full = full
        found = tables()
        if found is None or full > wire.HASHES_MAX:
            return
        parts = [*tracked.stored.to_store(found, full * self._page_tokens, states)][: wire.PARTS_MAX]
        if not parts or not self._backpressure.admits(sum(len(part.pages) for part in parts)):
            return
        if tracked.epoch != self._client.epoch or tracked.opened is None or tracked.opened.failure is not None:
            self._open(tracked, full, full, self._settings.store_timeout_ms)
        tracked.stored.stored(parts)
        known = tracked.known
        more = request.block_hashes[known:full]
        tracked.known = max(known, full)
        copy = Copy(tracked, parts, store=True)
        limit_s = self._settings.store_timeout_ms / 1000
        store = self._copies.begin_store(copy, tracked.slot, more=more, more_from=known, after=after, timeout_s=limit_s)
        if not after:
            self._last_store = store

    def _settle(self) -> None:
        for copy in self._copies.settle():
            tracked = copy.owner
            try:
                if copy.store:
                    self._stored(tracked, copy)
                else:
                    self._loaded(tracked, copy)
            except Exception:
                # vLLM waits for the report of a load, even after an exception here.
                if not copy.store:
                    self._report(tracked, copy.pages)
                raise
            self._forget_if_over(tracked)

    def _stored(self, tracked: Tracked, copy: Copy) -> None:
        if copy.answer is None:
            logger.debug("kvferry: a store of %d pages failed: %s", len(copy.pages), copy.failure)
            # Reopens the slot, and retries the pages when the next one is full.
            tracked.opened = None
            if copy.failure is None or copy.failure.retry:
                self._store_again_at = time.monotonic() + STORE_PAUSE_S
            if copy.requested_at > self._reset_at:
                tracked.stored.not_stored(copy.parts)

    def _loaded(self, tracked: Tracked, copy: Copy) -> None:
        tracked.load = None
        answer = copy.answer
        whole = answer.pages if isinstance(answer, wire.LoadAnswer) else 0
        before_reset = copy.requested_at <= self._reset_at
        failed = copy.pages if before_reset else copy.pages[whole:]
        if failed:
            logger.warning(
                "kvferry: %d of %d pages of request %s were not loaded and are computed: %s",
                len(failed),
                len(copy.pages),
                tracked.request.request_id,
                "the cache was reset" if before_reset else copy.failure or "the load was stopped",
            )
            tracked.computes = True
        self._report(tracked, failed)

    def _report(self, tracked: Tracked, failed: list[int]) -> None:
        """Reports to vLLM, once, that a load is over, and which of its pages must be computed.

        Page numbers of several groups are ambiguous for vLLM: then the whole request must be computed.
        """
        name = tracked.request.request_id
        if not failed and name not in self._spoiled and self._ended_now is not None:
            # Every rank has the pages: vLLM can schedule the request in its next step.
            self._ended_now.add(name)
            self._loading.pop(name, None)
        elif name not in self._step.loaded:
            if name in self._spoiled or (failed and self._served.whole):
                self._spoiled.discard(name)
                self._step.failed.append(name)
            else:
                self._step.failed_pages.extend(failed)
            self._step.loaded.append(name)

    def load_failed(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Reports a load as failed that vLLM expects and that could not be requested."""
        tracked = self._tracked.get(request.request_id)
        if external_tokens == 0 or (
            tracked is not None and tracked.load is not None and tracked.load.pending is not None
        ):
            return
        expected = self._expected(tracked, blocks, external_tokens)
        if tracked is None:
            tracked = Tracked(request, 0, b"", StoreCursor(self._served))
        self._loads = [copy for copy in self._loads if copy is not tracked.load]
        tracked.load = None
        self._report(tracked, expected)

    def _expected(self, tracked: Tracked | None, blocks: "KVCacheBlocks", external_tokens: int) -> list[int]:
        """Returns pages of an engine with one group that a load was to bring; of several groups all of the first."""
        table = blocks.get_block_ids()[self._served.groups[0].table]
        if self._served.whole:
            return list(table)
        count = external_tokens // self._page_tokens
        first = tracked.device_pages if tracked is not None else len(table) - count
        return list(table[first : first + count])

    @property
    def stores_skipped_backpressure(self) -> int:
        """Number of stores that were skipped because of the limits on running stores."""
        return self._backpressure.skipped

    def ranks_reported(self, output: "KVConnectorOutput") -> None:
        """Takes the aggregated report of the ranks about a step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._last_stepped = max(self._last_stepped, report.stepped_through)
            self._copies.ranks_know(report.over)
        self._ended_now = ended = set()
        try:
            self._settle()
        finally:
            self._ended_now = None
            if ended:
                output.finished_recving = (output.finished_recving or set()) | ended

    def frees_soon(self) -> bool:
        """Whether pages that only a store holds will be freed soon."""
        since = self._copies.frees_since()
        return since is not None and self._client.listening and time.monotonic() - since < FREES_SOON_S

    def copying(self) -> bool:
        """Whether steps are needed, also of an idle engine, to notice that copies are over.

        vLLM calls this only while no request needs a step. If a request loads then, the engine is paused: the pause
        need not wait for the load, and a load that ended in a step could not be undone by a reset that may follow.
        """
        loading = (self._tracked.get(name) for name in self._loading)
        paused = any(tracked is not None and not tracked.finished for tracked in loading)
        return not paused and self._copies.end_soon()

    # The whole cache.

    def reset(self) -> bool:
        """Stops finding the pages that this engine could find so far, and requests their removal by the leader.

        vLLM also resets its caches when weights were changed in memory, without a way to see that here: from then on
        this engine uses private namespaces. With ``shared_after_reset`` only until the leader has confirmed the reset.
        """
        self._leave(forget=True)
        return True

    def _leave(self, *, forget: bool) -> None:
        """Switches to private namespaces. ``forget``: reset the old ones at the leader now, not with the next reset."""
        self._reset_at = time.monotonic()
        # vLLM resets its own pages before, unless a request holds some. If weights never change, such pages are as
        # valid as those computed after the reset.
        self._device_old = not (self._device_empty or self._settings.shared_after_reset)
        running = [tracked for tracked in self._tracked.values() if not tracked.finished]
        for tracked in running:
            # Pages that are computed or loading by now are no longer stored, and pages that were found are released.
            request = tracked.request
            computed = min(request.num_computed_tokens, request.num_tokens) // self._page_tokens
            tracked.full = max(tracked.full, computed)
            tracked.stored.skip(tracked.full * self._page_tokens)
            # Pages that the request computes from now on depend on its tokens from before, also on those of a part of
            # a page.
            began = request.num_computed_tokens > 0 or tracked.load is not None
            tracked.mixed = began and not self._settings.shared_after_reset
            self._let_go(tracked)
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
        if not self._settings.shared_after_reset:
            self._forgetting.turn()
        elif self._forgetting.wait(RESET_LIMIT_S):
            self._namespaces.share()
        else:
            why = self._forgetting.problem or "no answer came in time"
            logger.warning("kvferry: the leader did not confirm a reset (%s): this engine finds no earlier pages", why)

    def _forget(self) -> None:
        """Retries resets until the leader confirms them; after that this engine may share pages again."""
        if self._forgetting.done:
            return
        self._forgetting.turn()
        if self._forgetting.done and self._settings.shared_after_reset:
            self._namespaces.share()
            logger.info("kvferry: the leader confirmed the reset")

    def close(self) -> None:
        """Closes the connection; the leader drops its records of this engine."""
        self._client.close()


def _works(output: "SchedulerOutput") -> bool:
    """Whether the ranks' devices write pages in this step: in its forward pass, or before it."""
    before = ("new_block_ids_to_zero", "kv_cache_block_copies")
    return bool(output.num_scheduled_tokens) or any(getattr(output, name, None) for name in before)
