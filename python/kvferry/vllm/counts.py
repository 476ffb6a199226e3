"""Counts of lookups, loads and stores of the scheduler's side. :mod:`kvferry.vllm.meters` defines the metrics."""

from kvferry import wire
from kvferry.client import Failure, PendingRequest
from kvferry.served import Served
from kvferry.vllm import meters
from kvferry.vllm.inflight import Copy
from kvferry.vllm.meters import Meters, Metric
from kvferry.vllm.tracked import Lookup, Tracked


class Counts:
    """Counts each lookup, load and store once. For the scheduler's thread alone."""

    def __init__(self, meters: Meters, served: Served):
        self._meters = meters
        self._served = served

    # Lookups.

    def not_looked_up(self, tracked: Tracked, reason: str) -> None:
        """Counts a request that is not looked up. vLLM may consider a request in many steps."""
        if tracked.not_looked_up != reason:
            tracked.not_looked_up = reason
            self._meters.count(meters.LOOKUPS_SKIPPED, reason)

    def waited(self, seconds: float) -> None:
        """Counts the time that a step waited for an answer."""
        self._meters.count(meters.LOOKUP_WAIT, by=seconds)

    def deferred(self) -> None:
        """Counts a lookup that has no answer yet."""
        self._meters.count(meters.LOOKUPS_DEFERRED)

    def looked_up(self, lookup: Lookup, tokens: int) -> None:
        """Counts a lookup whose outcome is known: vLLM gets so many tokens."""
        if lookup.counted:
            return
        lookup.counted = True
        pending, answer = lookup.pending, lookup.pending.answer
        outcome = "hit" if tokens else "miss"
        if not pending.done:
            outcome = "late"
            self._meters.count(meters.REFUSALS, "lookup", meters.CODES[wire.Code.DEADLINE])
        elif pending.failure is not None:
            outcome = "late" if pending.failure.code == wire.Code.DEADLINE else "refused"
            self._meters.count(meters.REFUSALS, "lookup", code_of(pending.failure))
        elif isinstance(answer, wire.LookupAnswer):
            self._meters.count(meters.DECLINED_TOKENS, by=answer.declined_pages * self._served.hash_tokens)
            outcome = "declined" if answer.declined_pages and not tokens else outcome
        self._meters.count(meters.LOOKUPS, outcome)
        self._took(pending, "lookup", meters.LOOKUP_TIME)

    # Loads.

    def load_begins(self, tracked: Tracked, tokens: int) -> None:
        """Counts the tokens that a load is to bring.

        If fewer tokens are loaded than were found, those on a disk are assumed to be among them.
        """
        answer = tracked.lookup.pending.answer if tracked.lookup is not None else None
        pages = sum(pages for _, pages in answer.below_pages) if isinstance(answer, wire.LookupAnswer) else 0
        below = pages * self._served.hash_tokens
        tracked.disk_tokens = min(below, tokens)
        self._meters.count(meters.HIT_TOKENS, "host", by=tokens - tracked.disk_tokens)
        self._meters.count(meters.HIT_TOKENS, "disk", by=tracked.disk_tokens)

    def load_over(self, copy: Copy, failed: int, *, reset: bool) -> None:
        """Counts a load of which ``failed`` pages must be computed."""
        answer = copy.answer
        if isinstance(answer, wire.LoadAnswer):
            self._meters.count(meters.LOAD_BYTES, by=self._served.rank_bytes(copy.parts, answer.pages))
        else:
            self._meters.count(meters.REFUSALS, "load", _why_over(copy))
        self._load(failed, len(copy.pages), "reset" if reset else "checksum" if copy.wrong else _why_over(copy))
        if copy.pending is not None:
            self._took(copy.pending, "load", meters.LOAD_COPY_TIME)

    def load_dropped(self, pages: int, reason: str) -> None:
        """Counts a load that was never requested."""
        self._load(pages, pages, reason)

    def load_reported(self, seconds: float) -> None:
        """Counts the time from the allocation of a load's pages to the report of its end to vLLM."""
        self._meters.observe(meters.LOAD_TIME, seconds)

    def _load(self, failed: int, pages: int, reason: str) -> None:
        self._meters.count(meters.LOADS, "whole" if not failed else "part" if failed < pages else "nothing")
        if failed:
            self._meters.count(meters.LOADS_RECOMPUTED, reason)
            self._meters.count(meters.PAGES_RECOMPUTED, by=failed)

    # Stores.

    def not_stored(self, tracked: Tracked, reason: str) -> None:
        """Counts a request of which pages are not stored. Each of its steps may find the same reason."""
        if tracked.not_stored != reason:
            tracked.not_stored = reason
            self._meters.count(meters.STORES_SKIPPED, reason)

    def held_back(self) -> None:
        """Counts a store that is skipped because of the limits on running stores."""
        self._meters.count(meters.STORES_SKIPPED, "backpressure")

    def store_over(self, copy: Copy) -> None:
        """Counts a store."""
        answer, pages = copy.answer, len(copy.pages)
        if isinstance(answer, wire.StoreAnswer):
            self._meters.count(meters.STORES, "done")
            for outcome, count in (
                ("stored", answer.stored_pages),
                ("present", answer.present_pages),
                ("refused", answer.refused_pages),
                ("failed", answer.failed_pages),
            ):
                self._meters.count(meters.STORE_PAGES, outcome, by=count)
            rank_bytes = self._served.rank_bytes(copy.parts) * answer.stored_pages // pages
            self._meters.count(meters.STORE_BYTES, by=rank_bytes)
        else:
            self._meters.count(meters.STORES, "failed")
            self._meters.count(meters.STORE_PAGES, "failed", by=pages)
            self._meters.count(meters.REFUSALS, "store", _why_over(copy))
        if copy.pending is not None:
            self._took(copy.pending, "store", meters.STORE_TIME)

    def _took(self, pending: PendingRequest, request: str, metric: Metric) -> None:
        if (queued_s := pending.queued_s) is not None:
            self._meters.observe(meters.QUEUE_TIME, queued_s, request)
        if pending.answer is not None and (took_s := pending.took_s) is not None:
            self._meters.observe(metric, took_s)


def code_of(failure: Failure) -> str:
    """Returns the name of a failure's error code; ``other`` for a code that is unknown here."""
    return meters.CODES.get(failure.code, "other")


def _why_over(copy: Copy) -> str:
    """Why a copy was not carried out as a whole."""
    if copy.ranks_over is not None:
        return "abandoned"
    return code_of(copy.failure) if copy.failure is not None else "stopped"
