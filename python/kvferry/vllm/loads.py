"""Loads: from vLLM's allocation of pages to the report that vLLM waits for."""

import logging
import time
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.served import NO_PAGE, Served
from kvferry.vllm.counts import Counts
from kvferry.vllm.inflight import CopiesInFlight, Copy
from kvferry.vllm.metadata import StepMetadata
from kvferry.vllm.settings import Settings
from kvferry.vllm.steps import Steps
from kvferry.vllm.tracked import Tracked
from kvferry.vllm.verify import Verification

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger("vllm.kvferry")


class Loads:
    """The loads of an engine. Each is reported to vLLM once. For the scheduler's thread alone."""

    def __init__(
        self,
        copies: CopiesInFlight,
        settings: Settings,
        served: Served,
        steps: Steps,
        counts: Counts,
        *,
        verification: Verification | None,
        zeroes: bool,
    ):
        self._copies = copies
        self._counts = counts
        self._settings = settings
        self._served = served
        self._steps = steps
        self._verification = verification
        #: Steps write zeros to new pages before their forward pass.
        self._zeroes = zeroes
        #: Loads that are requested at the end of this step.
        self._waiting: list[Copy] = []
        #: Block tables of the loading requests, until a step reports the end of the load to the ranks; and the requests
        #: of those whose pages vLLM has reset meanwhile.
        self._loading: dict[str, Sequence[Sequence[int]]] = {}
        self._spoiled: set[str] = set()
        #: When vLLM allocated pages for each load that was not reported to it yet. No more than requests that load.
        self._unreported: dict[str, float] = {}
        #: Loads that end while vLLM takes the results of a step are reported there; None at other times.
        self._ended_now: set[str] | None = None
        #: The reports that the next step's metadata carries.
        self._step = StepMetadata()

    def begin(self, tracked: Tracked, blocks: "KVCacheBlocks", external_tokens: int, *, changed: bool) -> bool:
        """Starts the load of the matched tokens, for which vLLM has allocated pages; False: reported as failed.

        ``changed``: the pages were found for other weights than those that vLLM may have now.
        """
        tables = blocks.get_block_ids()
        # The device's own pages come first in the block tables.
        device = tracked.device_pages * self._served.hash_tokens
        parts = self._served.to_load(tables, device, device + external_tokens)
        self._counts.load_begins(tracked, external_tokens)
        self._unreported[tracked.request.request_id] = time.monotonic()
        if changed or not parts:
            # Without parts: vLLM has no place for some of the pages.
            tracked.computes = True
            expected = self._expected(tracked, blocks, external_tokens)
            self._counts.load_dropped(len(expected), "adapter" if changed else "no_pages")
            self.report(tracked, expected)
            return False
        tracked.lookup = None
        self._loading[tracked.request.request_id] = tables
        tracked.load = Copy(tracked, parts, store=False, restarts=tracked.restarts)
        self._waiting.append(tracked.load)
        if not self._zeroes:
            self.begin_waiting(self._steps.work)
        return True

    def begin_waiting(self, after: int, zeroed: frozenset[int] = frozenset()) -> None:
        """Requests the new loads.

        Steps that still run on the ranks may write into pages that were freed meanwhile: the loads wait for the work
        ``after``, or, if the present step writes zeros to one of their pages, for that step.
        """
        while self._waiting:
            copy = self._waiting[0]
            behind = self._steps.work if zeroed and not zeroed.isdisjoint(copy.pages) else after
            waits = behind > self._steps.over
            self._steps.awaited = max(self._steps.awaited, behind)
            limit_s = self._settings.load_limit_s(self._served.rank_bytes(copy.parts), waits=waits)
            if self._verification is not None:
                self._verification.begin_load(copy)
            self._copies.begin_load(copy, copy.owner.slot, after=behind, timeout_s=limit_s)
            # After an exception above the load is still there to be reported.
            self._waiting.pop(0)

    def drop_waiting(self) -> None:
        """Reports loads that were not requested yet as failed."""
        while self._waiting:
            copy = self._waiting.pop(0)
            copy.owner.load = None
            self._counts.load_dropped(len(copy.pages), "fault")
            self.report(copy.owner, copy.pages)

    def take_step(self) -> StepMetadata:
        """Returns the metadata of a step, with the reports of loads that are over."""
        step, self._step = self._step, StepMetadata()
        for name in step.loaded:
            self._loading.pop(name, None)
        return step

    def over(self, tracked: Tracked, copy: Copy, *, before_reset: bool) -> None:
        """Handles the end of a load. ``before_reset``: it was requested before the last reset of the cache."""
        tracked.load = None
        answer = copy.answer
        whole = answer.pages if isinstance(answer, wire.LoadAnswer) else 0
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
        if copy.wrong:
            tracked.computes = True
            self._step.zeroed += [(group, [page]) for group, page in copy.wrong]
            failed = list(dict.fromkeys([*(page for _, page in copy.wrong), *failed]))
        spoiled = tracked.request.request_id in self._spoiled
        all_fail = spoiled or (failed and self._served.whole)
        computed = len(copy.pages) if all_fail else len(failed)
        self._counts.load_over(copy, computed, reset=before_reset or spoiled)
        if not computed and copy.restarts == tracked.restarts:
            # These pages are in kvferry: a store of the request's other pages need not name them.
            tracked.stored.loaded(copy.parts)
        self.report(tracked, failed)

    def report(self, tracked: Tracked, failed: list[int]) -> None:
        """Reports to vLLM, once, that a load is over, and which of its pages must be computed.

        Page numbers of several groups are ambiguous for vLLM: then the whole request must be computed.
        """
        name = tracked.request.request_id
        if not failed and name not in self._spoiled and self._ended_now is not None:
            # Every rank has the pages: vLLM can schedule the request in its next step.
            self._ended_now.add(name)
            self._loading.pop(name, None)
            self._reported(name)
        elif name not in self._step.loaded:
            if name in self._spoiled or (failed and self._served.whole):
                self._spoiled.discard(name)
                self._step.failed.append(name)
            else:
                self._step.failed_pages.extend(failed)
            self._step.loaded.append(name)

    def failed(self, tracked: Tracked, blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Reports a load as failed that vLLM expects and that could not be requested."""
        if external_tokens == 0 or (tracked.load is not None and tracked.load.pending is not None):
            return
        self._waiting = [copy for copy in self._waiting if copy is not tracked.load]
        tracked.load = None
        expected = self._expected(tracked, blocks, external_tokens)
        if tracked.request.request_id not in self._step.loaded:
            self._counts.load_dropped(len(expected), "fault")
        self.report(tracked, expected)

    def _expected(self, tracked: Tracked, blocks: "KVCacheBlocks", external_tokens: int) -> list[int]:
        """Returns pages of an engine with one group that a load was to bring; of several groups all of the first."""
        table = blocks.get_block_ids()[self._served.groups[0].table]
        if self._served.whole:
            return list(table)
        count = external_tokens // self._served.hash_tokens
        return list(table[tracked.device_pages : tracked.device_pages + count])

    def begin_results(self, output: "KVConnectorOutput") -> None:
        """Begins to report loads that end without a failure in the results of a step, not by way of the ranks."""
        self._ended_now = set()
        for name in output.finished_recving or ():
            self._reported(name)

    def _reported(self, name: str) -> None:
        """Counts the time that a load took until vLLM got the report of its end."""
        if (allocated_at := self._unreported.pop(name, None)) is not None:
            self._counts.load_reported(time.monotonic() - allocated_at)

    def end_results(self, output: "KVConnectorOutput") -> None:
        """Adds the loads that have ended since :meth:`begin_results` to the results."""
        ended, self._ended_now = self._ended_now, None
        if ended:
            output.finished_recving = (output.finished_recving or set()) | ended

    def names(self) -> "Collection[str]":
        """Requests whose load the ranks have not reported as over."""
        return self._loading.keys()

    def tables(self) -> list[list[int]]:
        """Pages of these requests, those that the device had before included."""
        return [[page for table in tables for page in table if page != NO_PAGE] for tables in self._loading.values()]

    def spoil(self) -> None:
        """Reports all pages of the loading requests as failed: vLLM has reset its pages meanwhile."""
        for name in self._loading:
            if name in self._step.loaded:
                self._step.failed.append(name)
            else:
                self._spoiled.add(name)
