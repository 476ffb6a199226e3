"""The scheduler's side of the connector: requests lookups, loads and stores, and tracks which pages a copy still uses.

Every decision that the leader can make is left to the leader. No hook of a step blocks, except for the lookup budget of
that step (``lookup_budget_ms``).

Pages under copy are safe in every order of events. A load's pages belong to a request that vLLM keeps until the load is
reported over. A store's pages carry one more reference of vLLM's block pool until the store is over, whatever becomes
of its request. When the leader cannot report how a copy ended, each rank ensures that the copy has stopped before the
pages are used again (:mod:`kvferry.vllm.inflight`).
"""

import functools
import logging
import time
from typing import TYPE_CHECKING

from kvferry.absence import Absence
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.finishes import Finishes
from kvferry.present_namespace import PresentNamespace
from kvferry.recording import LeaderSizes
from kvferry.resets import Forgetting
from kvferry.served import Served, StoreCursor
from kvferry.switch import Switch
from kvferry.vllm import meters
from kvferry.vllm.calls import Calls
from kvferry.vllm.counts import Counts
from kvferry.vllm.events import KvEvents
from kvferry.vllm.inflight import CopiesInFlight, Copy
from kvferry.vllm.invalidation import Invalidation
from kvferry.vllm.loads import Loads
from kvferry.vllm.lookups import Lookups
from kvferry.vllm.metadata import RankReport, StepMetadata
from kvferry.vllm.meters import Meters
from kvferry.vllm.namespaces import Namespaces
from kvferry.vllm.per_request import PerRequests
from kvferry.vllm.poolreset import reset_beside_loads
from kvferry.vllm.settings import Settings
from kvferry.vllm.steps import Steps
from kvferry.vllm.stores import Stores
from kvferry.vllm.tracked import Tracked
from kvferry.vllm.verify import Verification

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvferry")

#: Age up to which vLLM waits for a store that will free pages, instead of preempting a request.
FREES_SOON_S = 0.1
#: Longest wait for the cancelled stores when vLLM resets its pool of pages. A worker that is alive ends them within one
#: part of a copy, 32 MiB at most.
LAST_STORES_S = 2.0
#: Pause between two ``cancel_stores`` requests: a repeated one reaches stores that were sent after the previous one.
CANCEL_AGAIN_S = 0.05

#: Longest wait for the end of a recording when the engine ends.
RECORD_CLOSE_S = 5.0


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
        meters: Meters | None = None,
        events: KvEvents | None = None,
        calls: Calls | None = None,
        connect: type[EngineClient] = EngineClient,
    ):
        self._calls = calls
        self._sizes = LeaderSizes(calls.recorder) if calls is not None else None
        self._served = served
        self._meters = meters or Meters()
        counts = Counts(self._meters, served)
        self._namespaces = Namespaces(
            namespace, engine.hex(), adapters, declared=bool(settings.weights), prefix=settings.namespace_prefix
        )
        if private:
            # The weights may change at any time: no other engine may find what is computed here.
            self._namespaces.leave()
        self._finds = settings.mode != "store"
        self._tracked: dict[str, Tracked] = {}
        self._per_request = PerRequests()
        self._switch = Switch(settings.socket_dir)
        self._absence = Absence()
        #: The namespace for ``kvferry events``: that of the model without adapters.
        self._shown = PresentNamespace(settings.socket_dir, replica, [group.table for group in served.groups])
        # Ids and slots start from the clock, so that they also grow over a restart of an engine with the same name.
        self._next_slot = base = time.time_ns() // 1000
        watch = {"watch": calls.recorder} if calls is not None else {}
        self._client = connect(
            settings.socket_dir / "leader",
            engine,
            first_id=base,
            replica=replica,
            name="vLLM",
            turn=self._watch,
            **watch,
        )
        self._steps = Steps()
        self._copies = CopiesInFlight(self._client, ranks)
        self._finishes = Finishes(self._client)
        self._events = events
        describe = events.describe if events is not None else None
        self._lookups = Lookups(self._client, settings, served, self._switch, counts, describe=describe)
        self.verification: Verification | None = None
        if settings.verify:
            self.verification = Verification(settings, served, self._client, ranks=ranks)
        self._loads = Loads(
            self._copies, settings, served, self._steps, counts, verification=self.verification, zeroes=zeroes
        )
        self._invalidation = Invalidation(
            settings,
            Forgetting(self._client),
            namespaces=self._namespaces,
            lookups=self._lookups,
            loads=self._loads,
            tracked=self._tracked,
        )
        self._stores = Stores(
            self._client,
            self._copies,
            settings,
            served,
            self._steps,
            counts,
            lookups=self._lookups,
            namespaces=self._namespaces,
            invalidation=self._invalidation,
            switch=self._switch,
            describe=describe,
            verification=self.verification,
        )
        #: The state of the namespaces that KV events follow, and whether the cache was on.
        self._followed = (-1, False)
        if events is not None:
            events.start(self._client)
        self._follow()
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
            call = self._calls.called("reset_prefix_cache", (), {}) if self._calls is not None else 0
            done = reset_pool()
            if self._calls is not None:
                self._calls.returned(call, "reset_prefix_cache", (), {}, done)
            return done

        def reset_pool() -> bool:
            try:
                self._end_stores()
            except Exception:
                logger.exception("kvferry: stores could not be ended before a reset")
            done = reset_beside_loads(pool, self._loads.tables(), reset)
            try:
                self._invalidation.was_reset() if done else self._invalidation.reset_refused()
            except Exception:
                logger.exception("kvferry: a reset of the engine's pages could not be followed")
            if done and self._events is not None:
                self._events.engine_was_reset()
            return done

        pool.reset_prefix_cache = reset_without_stores  # type: ignore[method-assign]

    def _watch(self) -> float | None:
        """Looks at the switch, shows the namespace, and logs an absent leader. On the client's thread."""
        times = [self._switch.look(), self._absence.look(self._client)]
        if self._client.listening:
            times.append(self._shown.show(self._namespaces.of_model if self._finds and not self._switch.off else None))
        if self._sizes is not None:
            times.append(self._sizes.turn(self._client))
        return min(at for at in times if at is not None)

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
        """Begins to track a new request, and looks its pages up."""
        self._lookups.arrived(self.track(request))

    def finished(self, request: "Request", tables: "Sequence[Sequence[int]]" = ()) -> None:
        """Ends a request. Pages under copy stay held: by the pool, or by vLLM until a load is reported."""
        self._lookups.considered(request)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        failed = request.status.name == "FINISHED_ERROR"
        # A request that ends before a step ran it may count tokens as computed whose load has failed.
        if tables and tracked.ran and not (tracked.finished or failed) and self._client.listening:
            # The last token was sampled, and has no KV of its own yet.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._stores.store(tracked, computed, lambda: tables, (), after=self._steps.work)
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

    def _forget_if_over(self, tracked: Tracked) -> None:
        name = tracked.request.request_id
        if tracked.finished and tracked.load is None and self._tracked.get(name) is tracked:
            del self._tracked[name]

    def _adapter_changed(self, tracked: Tracked) -> bool:
        """Updates the namespace of a request without pages from its adapter's present files; True if it changed.

        vLLM may read the files when the request is scheduled, which can be long after its arrival.
        """
        lora = tracked.request.lora_request
        if lora is None or (namespace := self._namespaces.of(lora, tracked.settings.namespace)) == tracked.namespace:
            return False
        self._lookups.let_go(tracked)
        tracked.namespace, tracked.opened = namespace, None
        return True

    # Lookups and loads.

    def matched_tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Returns how many tokens after the computed ones can be loaded; None: vLLM should call again later."""
        tracked = self.track(request)
        self._lookups.considered(request)
        self._adapter_changed(tracked)
        tracked.device_pages = computed_tokens // self._served.hash_tokens
        # vLLM calls this only for requests that have no pages.
        tracked.restart()
        tracked.on_old_pages = self._invalidation.on_old_pages(tracked)
        return self._lookups.matched_tokens(tracked)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Starts the load of the matched tokens, for which vLLM has allocated pages."""
        tracked = self.track(request)
        # Also checked for a request whose load is over: it may have waited since for its adapter to be loaded.
        changed = self._adapter_changed(tracked)
        tracked.on_old_pages = tracked.on_old_pages or self._invalidation.on_old_pages(tracked)
        if external_tokens == 0:
            # Nothing was found, or another connector loads: release the leader's hold.
            self._lookups.let_go(tracked)
            if tracked.namespace is None:
                self._namespaces.computes_unseen(request.lora_request)
        elif self._loads.begin(tracked, blocks, external_tokens, changed=changed):
            self._invalidation.device_has_pages()

    def load_failed(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Reports a load as failed that vLLM expects and that could not be requested."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, 0, b"", StoreCursor(self._served))
            table = blocks.get_block_ids()[self._served.groups[0].table]
            tracked.device_pages = max(len(table) - external_tokens // self._served.hash_tokens, 0)
        self._loads.failed(tracked, blocks, external_tokens)

    # Steps.

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """Returns the metadata of a step for the ranks. Requests stores of the pages that the step fills."""
        self._settle()
        self._finishes.turn()
        self._invalidation.turn()
        if self.verification is not None:
            self.verification.turn()
        if output.num_scheduled_tokens:
            self._invalidation.device_has_pages()
        for request_id in output.preempted_req_ids or ():
            self._begin_anew(request_id)
        state = output.kv_connector_block_state
        listening = self._client.listening
        prompts_only = not self._stores.generated_are_due()
        offloads = state.boundary_state_offloads if state is not None else {}
        known = self._tracked
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = known.get(request_id)
            # Most requests of most steps generate, and their pages are not due.
            if tracked is None or (prompts_only and tracked.generates and request_id not in offloads):
                continue
            request = tracked.request
            if not tracked.ran:
                tracked.ran, tracked.given_tokens = True, request.num_computed_tokens
            computed = request.num_computed_tokens + tokens
            states = offloads.get(request_id, ())
            if listening and (states or computed >= tracked.store_at):
                # Draft tokens have no hash, and their KV may be overwritten.
                computed = min(computed, request.num_tokens)
                tables = functools.partial(state.get_block_ids, request_id)
                if self.verification is not None:
                    self.verification.filled(tracked, computed, tables, states)
                self._stores.store(tracked, computed, tables, states)
        self._lookups.next_step()
        self._follow()
        return self._take_step(output)

    def _follow(self) -> None:
        """Lets KV events follow the namespaces in which requests can find pages now."""
        finds = self._finds and not self._switch.off
        if self._followed == (self._namespaces.changes, finds):
            return
        if self._events is not None:
            # Pages of the model that others have stored are announced before its first request.
            self._namespaces.of(None)
        self._followed = self._namespaces.changes, finds
        if self._events is not None:
            self._events.follow(self._namespaces.present if finds else [])

    def finish_only(self, output: "SchedulerOutput") -> StepMetadata:
        """Returns the metadata of a step that begins nothing: reports copies that are over, and frees their pages."""
        self._loads.drop_waiting()
        if self.verification is not None:
            self.verification.give_up()
        self._settle()
        self._finishes.turn()
        return self._take_step(output)

    def _take_step(self, output: "SchedulerOutput") -> StepMetadata:
        self._namespaces.next_step()
        step = self._loads.take_step()
        before = self._steps.work
        if self.verification is not None:
            self.verification.take_orders(step)
        if step.zeroed or _works(output):
            # Drawn after the ids of this step's stores, so that it covers them.
            self._steps.work = self._client.draw()
        self._loads.begin_waiting(before, frozenset(output.new_block_ids_to_zero or ()))
        self._copies.send()
        step.written_through, step.needed_before = self._steps.work, self._steps.awaited
        step.needed_through = max(self._steps.awaited, self._steps.store)
        step.abandon = self._copies.to_abandon()
        return step

    def _begin_anew(self, request_id: str) -> None:
        """Resets the record of a preempted request, which no longer has pages."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.lookup, tracked.computes = None, False
            tracked.restart()

    # Ends of copies.

    def _settle(self) -> None:
        ended: Iterator[Copy] = self._copies.settle()
        if self.verification is not None:
            ended = self.verification.settled(ended)
        for copy in ended:
            tracked = copy.owner
            before_reset = self._invalidation.before_reset(copy.requested_at)
            try:
                side = self._stores if copy.store else self._loads
                side.over(tracked, copy, before_reset=before_reset)
            except Exception:
                # vLLM waits for the report of a load, even after an exception here.
                if not copy.store:
                    self._loads.report(tracked, copy.pages)
                raise
            self._forget_if_over(tracked)

    def ranks_reported(self, output: "KVConnectorOutput") -> None:
        """Takes the aggregated report of the ranks about a step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._steps.over = max(self._steps.over, report.stepped_through)
            self._copies.ranks_know(report.over)
            if self.verification is not None:
                self.verification.ranks_reported(report.checksums)
                if report.fault:
                    self.verification.give_up()
        self._loads.begin_results(output)
        try:
            self._settle()
        finally:
            self._loads.end_results(output)

    @property
    def stores_skipped_backpressure(self) -> int:
        """Number of stores that were skipped because of the limits on running stores."""
        return self._stores.backpressure.skipped

    def disk_tokens(self, request: "Request") -> int:
        """Tokens of the last load of a request that were found on a disk."""
        tracked = self._tracked.get(request.request_id)
        return tracked.disk_tokens if tracked is not None else 0

    def measure(self) -> None:
        """Sets the gauges of the statistics."""
        self._meters.set(meters.CONNECTED, int(self._client.listening))
        self._meters.set(meters.OFF, int(self._switch.off))
        for state, copies in self._copies.states().items():
            self._meters.set(meters.COPIES, copies, state)
        self._meters.set(meters.STORE_HELD_PAGES, self._copies.stored_pages())
        if self.verification is not None:
            for outcome, pages in self.verification.take_counts():
                self._meters.count(meters.VERIFIED_PAGES, outcome, by=pages)
        for state, requests in zip(("queued", "sent"), self._client.open_requests, strict=True):
            self._meters.set(meters.OPEN_REQUESTS, requests, state)

    def frees_soon(self) -> bool:
        """Whether pages that only a store holds will be freed soon."""
        since = self._copies.frees_since()
        return since is not None and self._client.listening and time.monotonic() - since < FREES_SOON_S

    def copying(self) -> bool:
        """Whether steps are needed, also of an idle engine, to notice that copies are over, or to publish KV events.

        vLLM calls this only while no request needs a step. If a request loads then, the engine is paused: the pause
        need not wait for the load, and a load that ended in a step could not be undone by a reset that may follow.
        """
        loading = (self._tracked.get(name) for name in self._loads.names())
        paused = any(tracked is not None and not tracked.finished for tracked in loading)
        events = self._events is not None and self._events.waiting
        verifies = self.verification is not None and self.verification.waits
        return not paused and (self._copies.end_soon() or verifies or events)

    def reset(self) -> bool:
        """Stops finding the pages that this engine could find so far; see :class:`Invalidation`."""
        self._invalidation.reset()
        if self.verification is not None:
            self.verification.forgotten()
        self._follow()
        return True

    def take_events(self) -> "list[KVCacheEvent]":
        """Returns KV events for vLLM's own stream."""
        return self._events.take() if self._events is not None else []

    def close(self) -> None:
        """Closes the connection; the leader drops its records of this engine. Ends the recording."""
        if self._events is not None:
            self._events.close()
        self._client.close()
        self._shown.close()
        if self.verification is not None:
            self.verification.close()
        if self._calls is not None:
            self._calls.recorder.close(RECORD_CLOSE_S)


def _works(output: "SchedulerOutput") -> bool:
    """Whether the ranks' devices write pages in this step: in its forward pass, or before it."""
    before = ("new_block_ids_to_zero", "kv_cache_block_copies")
    return bool(output.num_scheduled_tokens) or any(getattr(output, name, None) for name in before)
