"""Loads of rank 0. A load is waited for, so that its request is computed, not aborted, where it fails."""

import logging
import time
from enum import IntEnum
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.served import Part

if TYPE_CHECKING:
    from kvferry.sglang.lookups import Lookup
    from kvferry.sglang.settings import Settings

logger = logging.getLogger("kvferry")

#: Time without a connection to the leader after which a load is given up before its deadline.
LOST_S = 1.0
#: Interval at which the connection is checked while a load is waited for.
_CHECK_S = 0.1


class Ended(IntEnum):
    """How a load has ended."""

    #: Nothing is copied for it, and not all pages are in place.
    FAILED = 0
    DONE = 1
    #: Something may still be copied: the ranks must abandon it.
    UNKNOWN = 2


def begin(client: EngineClient, settings: "Settings", lookup: "Lookup", pages: list[int], after: int) -> PendingRequest:
    """Requests a load of the first pages that a lookup has found.

    The load starts when every rank has reported the work ``after`` as written.
    """
    return client.load(lookup.slot, [Part(0, 0, pages)], after=after, timeout_s=settings.load_timeout_ms / 1000)


def end(client: EngineClient, settings: "Settings", pending: PendingRequest, pages: int) -> tuple[Ended, str]:
    """Waits for the end of a load. Returns how it ended, and why it failed."""
    _wait(client, pending, settings.load_timeout_ms / 1000)
    answer, failure = pending.answer, pending.failure
    if isinstance(answer, wire.LoadAnswer):
        if answer.pages == pages:
            return Ended.DONE, ""
        return Ended.FAILED, f"{answer.pages} of {pages} pages were loaded"
    if failure is not None and failure.over:
        return Ended.FAILED, failure.message
    return Ended.UNKNOWN, failure.message if failure is not None else "the leader does not answer"


def _wait(client: EngineClient, pending: PendingRequest, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not pending.done and (left_s := until - time.monotonic()) > 0:
        pending.wait(min(left_s, _CHECK_S))
        lost_at = client.lost_at
        if lost_at is not None and time.monotonic() - lost_at > LOST_S:
            return
