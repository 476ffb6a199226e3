"""Loads of rank 0: their requests to the leader, and the waits for their ends."""

import logging
import time
from dataclasses import dataclass
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


@dataclass(eq=False)
class Load:
    """A load that was requested: ``pages`` pages of SGLang's ``request``, that a lookup has found."""

    request: str
    lookup: "Lookup"
    pending: PendingRequest
    pages: int


def begin(
    client: EngineClient, settings: "Settings", request: str, lookup: "Lookup", pages: list[int], after: int
) -> Load:
    """Requests a load of the first pages that a lookup has found.

    The load starts when every rank has reported the work ``after`` as written.
    """
    timeout_s = settings.load_timeout_ms / 1000
    pending = client.load(lookup.slot, [Part(0, 0, pages)], after=after, timeout_s=timeout_s)
    return Load(request, lookup, pending, len(pages))


def end(client: EngineClient, load: Load) -> tuple[Ended, str]:
    """Waits for the end of a load, until its deadline. Returns how it ended, and why it failed."""
    pending = load.pending
    _wait(client, pending)
    answer, failure = pending.answer, pending.failure
    if isinstance(answer, wire.LoadAnswer):
        if answer.pages == load.pages:
            return Ended.DONE, ""
        return Ended.FAILED, f"{answer.pages} of {load.pages} pages were loaded"
    if failure is not None and failure.over:
        return Ended.FAILED, failure.message
    return Ended.UNKNOWN, failure.message if failure is not None else "the leader does not answer"


def _wait(client: EngineClient, pending: PendingRequest) -> None:
    while not pending.done and (left_s := pending.deadline - time.monotonic()) > 0:
        pending.wait(min(left_s, _CHECK_S))
        lost_at = client.lost_at
        if lost_at is not None and time.monotonic() - lost_at > LOST_S:
            return
