"""Counts lookups, loads and stores of rank 0, for a line in the log and for SGLang's Prometheus page.

Labels have fixed sets of values, so that the size of the counts does not depend on the number of requests.
"""

import functools
import logging
import time
from typing import Any

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.wire import Code

logger = logging.getLogger("kvferry")

#: Begins the name of every counter on SGLang's Prometheus page.
PREFIX = "sglang:kvferry_"
#: Shortest time between two lines of the log.
LOG_EVERY_S = 60.0
#: Counters, with their meanings and the values of the label ``outcome``.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lookups": ("Lookups by their answer; late: none came in time", ("hit", "miss", "late", "refused")),
    "loads": ("Loads that are over; failed: SGLang computes or aborts the request", ("whole", "failed")),
    "load_pages": ("Pages of these loads", ("whole", "failed")),
    "load_seconds": ("Time from the requests of whole loads to their answers, together", ("whole",)),
    "stores": ("Stores that are over", ("done", "failed")),
    "store_pages": (
        "Pages of these stores; present: kvferry had them, refused: it had no room for them",
        ("stored", "present", "refused", "failed"),
    ),
}


class Counts:
    """The counts of one engine. The scheduler's thread counts; the client's thread logs."""

    def __init__(self, *, exported: bool = False):
        """``exported``: SGLang has a Prometheus page, for which its processes share files."""
        self._values = {(name, each): 0.0 for name, (_, outcomes) in COUNTERS.items() for each in outcomes}
        self._logged = dict(self._values)
        self._logged_at = time.monotonic()
        self._exported = {name: _on_page(name) for name in COUNTERS} if exported else {}

    # The scheduler's thread.

    def looked_up(self, pending: PendingRequest) -> None:
        """Counts a lookup whose answer is used, or not awaited any longer."""
        answer, failure = pending.answer, pending.failure
        if isinstance(answer, wire.LookupAnswer):
            self._count("lookups", "hit" if answer.hit_pages else "miss")
        else:
            late = failure is None or failure.code == Code.DEADLINE
            self._count("lookups", "late" if late else "refused")

    def loaded(self, pending: PendingRequest, pages: int, *, whole: bool) -> None:
        """Counts a load of so many pages."""
        outcome = "whole" if whole else "failed"
        self._count("loads", outcome)
        self._count("load_pages", outcome, pages)
        if whole:
            self._count("load_seconds", outcome, pending.took_s or 0.0)

    def stored(self, end: Any, pages: int) -> None:
        """Counts a store of so many pages; without an answer they failed."""
        if not isinstance(end, wire.StoreAnswer):
            self._count("stores", "failed")
            self._count("store_pages", "failed", pages)
            return
        self._count("stores", "done")
        for outcome, count in (
            ("stored", end.stored_pages),
            ("present", end.present_pages),
            ("refused", end.refused_pages),
            ("failed", end.failed_pages),
        ):
            self._count("store_pages", outcome, count)

    def _count(self, name: str, outcome: str, by: float = 1) -> None:
        self._values[name, outcome] += by
        if self._exported and by:
            try:
                self._exported[name].labels(outcome=outcome).inc(by)
            except Exception:
                self._exported = {}
                logger.exception("kvferry: counters on SGLang's Prometheus page stand still from now on")

    # The client's thread.

    def look(self) -> float:
        """Logs what was counted since the last line, if anything was; returns when to call again."""
        now = time.monotonic()
        if now < self._logged_at + LOG_EVERY_S:
            return self._logged_at + LOG_EVERY_S
        values = dict(self._values)
        new = {key: value - self._logged[key] for key, value in values.items()}
        if any(new.values()):
            logger.info("kvferry: in the last %.0f s %s", now - self._logged_at, _line(new))
        self._logged, self._logged_at = values, now
        return now + LOG_EVERY_S


def _line(new: dict[tuple[str, str], float]) -> str:
    """Returns counts in one line: those that are not 0."""

    def outcomes(name: str) -> str:
        counted = ((new[name, each], each) for each in COUNTERS[name][1])
        return ", ".join(f"{count:,.0f} {each}" for count, each in counted if count) or "none"

    loads_ms = 1000 * new["load_seconds", "whole"] / max(new["loads", "whole"], 1)
    return (
        f"lookups: {outcomes('lookups')}; loads: {outcomes('loads')}, of pages: {outcomes('load_pages')}, "
        f"{loads_ms:.1f} ms each; stores: {outcomes('stores')}, of pages: {outcomes('store_pages')}"
    )


@functools.cache
def _on_page(name: str) -> Any:
    # Imported when SGLang has named the folder of the files that its processes share.
    from prometheus_client import Counter

    return Counter(PREFIX + name, COUNTERS[name][0], ["outcome"])
