"""The scheduler's side of the connector, in the process of rank 0: lookups, loads and stores.

Every decision that the leader can make is left to the leader. No call waits, except for the lookup budget.

Pages under copy are safe in every order of events. A load's pages belong to a request that is parked until each page is
in place. A store's pages belong to a request; when it ends before its stores, TensorRT-LLM keeps the pages until each
rank has reported that nothing is copied any longer.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

from kvferry import wire
from kvferry.absence import Absence
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.finishes import Finishes
from kvferry.removals import Removals
from kvferry.switch import Switch
from kvferry.trtllm.content import Identity
from kvferry.trtllm.hashes import SALTS, PageHashes, seed_of, why_not_hashed
from kvferry.trtllm.loads import Loads
from kvferry.trtllm.metadata import StepMetadata
from kvferry.trtllm.settings import Settings
from kvferry.trtllm.steps import Steps
from kvferry.trtllm.stores import Stores
from kvferry.trtllm.tracked import Tracked

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("kvferry")

#: Deadline of a lookup. The engine waits for the budget alone.
LOOKUP_LIMIT_S = 0.5
#: Age of an unanswered lookup from which on no other one is sent: the leader is silent.
SILENT_S = 0.1
#: Most requests that are tracked; the oldest is dropped, and stores no further pages. The leader has as many slots.
TRACKED_MAX = 65_536


class SchedulerSide:
    """The connector's state in the process of rank 0. For the executor's thread alone."""

    def __init__(
        self, settings: Settings, identity: Identity, engine: bytes, *, connect: type[EngineClient] = EngineClient
    ):
        self._settings = settings
        self._identity = identity
        self._start = engine.hex()
        self._page_tokens = identity.page_tokens
        self._namespace = identity.namespace(settings)
        self._tracked: dict[int, Tracked] = {}
        self._switch = Switch(settings.socket_dir)
        self._absence = Absence()
        #: The oldest lookup that was not answered within the budget.
        self._late: PendingRequest | None = None
        # Ids and slots start from the clock, so that they also grow over a restart of an engine.
        self._next_slot = base = time.time_ns() // 1000
        self._client = connect(
            settings.socket_dir / "leader",
            engine,
            first_id=base,
            replica=settings.replica,
            name="TensorRT-LLM",
            turn=self._watch,
        )
        self._steps = Steps()
        self._finishes = Finishes(self._client)
        self._removals = Removals(self._client)
        #: The engine has announced work that it did not do.
        self._distrusts = False
        #: The progress of rank 0's device can no longer be read: copies that wait for it would end by their deadlines.
        self.unmarked = False
        #: Running requests may lose their pages: these are stored when their request ends.
        self.stores_at_end = False
        self.loads = Loads(self._client, settings, self._steps, self._namespace)
        self.stores = Stores(self._client, settings, self._steps, self._namespace)
        self._client.start()

    def pages_have(self, page_bytes: int) -> None:
        """Records the bytes of a page on one rank."""
        self.loads.page_bytes = self.stores.page_bytes = page_bytes

    def close(self) -> None:
        """Closes the connection; the leader drops its records of this engine."""
        self._client.close()

    def _watch(self) -> float | None:
        """Looks at the switch, and logs once that the leader is away and that it is back. On the client's thread."""
        return min(self._switch.look(), self._absence.look(self._client) or float("inf"))

    # New requests.

    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """Returns how many tokens behind the computed ones are loaded. Waits for the budget at most.

        TensorRT-LLM calls this once for a request, and holds its radix tree's lock meanwhile.
        """
        name = int(request.request_id)
        if (old := self._tracked.pop(name, None)) is not None:
            self._finish(old)
        if why_not_hashed(request):
            return 0
        tokens = request.get_tokens(0)
        hashes = PageHashes(self._seed(request), self._page_tokens)
        hashes.append(tokens)
        self._next_slot += 1
        tracked = self._tracked[name] = Tracked(name, self._next_slot, hashes)
        self._drop_oldest()
        # At least the last token must be computed, and a page that the engine has in part is none that can be loaded.
        limit = min((len(tokens) - 1) // self._page_tokens, wire.HASHES_MAX)
        device, part = divmod(computed_tokens, self._page_tokens)
        tracked.device_pages = device
        if part or limit <= device or not self._may_look_up():
            return 0
        lookup = self._client.lookup(
            tracked.slot,
            hashes.hashes[:limit],
            namespace=self._namespace,
            have_pages=device,
            timeout_s=LOOKUP_LIMIT_S,
        )
        tracked.opens(lookup, self._client.epoch, limit)
        if not lookup.wait(self._settings.lookup_budget_ms / 1000):
            if self._late is None or self._late.done:
                self._late = lookup
            # Releases the leader's hold on what is found too late.
            self.stores.open(tracked, limit)
            return 0
        answer = lookup.answer
        tracked.found = min(answer.hit_pages, limit - device) if isinstance(answer, wire.LookupAnswer) else 0
        tracked.promised = tracked.found > 0
        return tracked.found * self._page_tokens

    def _seed(self, request: Any) -> bytes:
        identity = self._identity
        lora = getattr(request, "lora_task_id", None)
        return seed_of(
            identity.weights,
            identity.revision,
            identity.dtype,
            identity.page_tokens,
            [getattr(request, name, None) for name in SALTS],
            # The number of an adapter says nothing about its weights: other engines, and later starts, have others.
            None if lora is None else f"{lora} of start {self._start}",
        )

    def _may_look_up(self) -> bool:
        if self._settings.mode == "store" or self._switch.off or self.unmarked or not self._client.listening:
            return False
        late = self._late
        return late is None or late.done or time.monotonic() - late.requested_at < SILENT_S

    def _drop_oldest(self) -> None:
        while len(self._tracked) > TRACKED_MAX:
            oldest = next(iter(self._tracked))
            if self._tracked[oldest].load is not None:
                return
            self._finish(self._tracked.pop(oldest))

    def allocated(self, request: Any, pages: "Sequence[int]") -> None:
        """Starts the load of what was matched, for which the engine has allocated pages."""
        tracked = self._tracked.get(int(request.request_id))
        if tracked is None or not tracked.promised:
            return
        first = tracked.device_pages
        into = list(pages[first : first + tracked.found])
        # An engine may have taken fewer pages than it was offered: it computes the others.
        absent = next((at for at, page in enumerate(into) if page < 0), len(into))
        if into[:absent]:
            self.loads.begin(tracked, first, into[:absent])
        tracked.promised = False

    def cannot_load(self, name: int, why: str) -> None:
        """Handles a failure of :meth:`allocated`: the engine waits for pages, and would wait for ever."""
        tracked = self._tracked.get(name)
        if tracked is not None and tracked.promised and not self.loads.is_open(name):
            self.loads.cannot_begin(name, why)

    # Steps.

    def step(self, output: Any) -> StepMetadata:
        """Returns the metadata of a step for the ranks. Requests stores of the pages that the step fills."""
        self.stores.turn()
        self._finishes.turn()
        for new, each in [(True, data) for data in output.new_requests] + [
            (False, data) for data in output.cached_requests
        ]:
            tracked = self._tracked.get(int(each.request_id))
            if tracked is not None:
                self._scheduled(tracked, each, new=new)
        return self.bare_step(output)

    def _scheduled(self, tracked: Tracked, data: Any, *, new: bool) -> None:
        if new:
            # All tokens are named, also those that were known when the prompt was matched.
            tracked.hashes.append(data.new_tokens[tracked.hashes.tokens :])
            tracked.pages = list(data.new_block_ids)
            tracked.ran = True
        elif tracked.ran:
            tracked.hashes.append(data.new_tokens)
            tracked.pages.extend(data.new_block_ids)
        else:
            # The engine has named the first tokens before this side knew the request.
            return
        # A token of an earlier step may not be known yet, if its results are processed beside this step.
        if not new and data.computed_position + 1 < tracked.written:
            self._not_written(tracked, data.computed_position)
        # Where the position leaves out what was loaded, pages are stored a step later.
        tracked.written = written = data.computed_position + data.num_scheduled_tokens
        if self._settings.mode == "load" or self._switch.off or self._distrusts or self.unmarked:
            return
        full = min(written // self._page_tokens, len(tracked.hashes.hashes), len(tracked.pages))
        tracked.full = next((at for at in range(tracked.next_page, full) if tracked.pages[at] < 0), full)
        if tracked.full > tracked.next_page and not self.stores_at_end:
            self.stores.store(tracked, tracked.full)

    def _not_written(self, tracked: Tracked, computed: int) -> None:
        """Handles a step that has computed fewer tokens than it announced: pages behind them may hold anything."""
        pages = tracked.hashes.hashes[computed // self._page_tokens : tracked.written // self._page_tokens]
        self._removals.add([(self._namespace, page) for page in pages])
        if not self._distrusts:
            self._distrusts = True
            logger.error(
                "kvferry: a step announced %d tokens of request %d, and %d are computed: nothing is stored until the "
                "engine is started again, and the pages of these tokens are removed",
                tracked.written,
                tracked.request,
                computed,
            )

    def bare_step(self, output: Any) -> StepMetadata:
        """Returns the metadata of a step, without further stores."""
        stores = self.stores.take_new()
        if output.new_requests or output.cached_requests:
            # Only a step with requests runs a forward pass. Drawn after the ids of its stores, so that it covers them.
            self._steps.work = self._client.draw()
        return StepMetadata(
            written_through=self._steps.work,
            needed_before=self._steps.awaited,
            needed_through=max(self._steps.awaited, self._steps.store),
            stores=stores,
            over=self.stores.take_over(),
        )

    # Ends.

    def finished(self, name: int) -> bool:
        """Ends a request; returns whether its pages must be kept: a copy may still use them. May be called again."""
        tracked = self._tracked.pop(name, None)
        if tracked is not None:
            self.loads.give_up(name)
            if self.stores_at_end and tracked.full > tracked.next_page:
                self.stores.store(tracked, tracked.full, after=self._steps.work)
                self.stores.send()
            self._finish(tracked)
        self.stores.turn()
        return self.holds(name)

    def holds(self, name: int) -> bool:
        """Whether a copy may still use pages of a request."""
        return bool(self.stores.of(name)) or self.loads.is_open(name)

    def _finish(self, tracked: Tracked) -> None:
        if tracked.known_there:
            # A lookup without an answer is sent again to the next leader.
            opened = tracked.opened
            answered = opened is not None and opened.done and opened.failure is None
            self._finishes.finish(tracked.slot, tracked.epoch if answered else None)

    def turn(self) -> None:
        """Processes received answers. Called in each iteration of the executor, also without a batch.

        Raises:
            LoadFailed: when pages that were promised are not in place in time.
        """
        self.stores.turn()
        self._finishes.turn()
        self._removals.turn()
        self.loads.turn()
