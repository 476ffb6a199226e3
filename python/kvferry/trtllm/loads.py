"""Loads: from TensorRT-LLM's allocation of pages until every page is in place.

TensorRT-LLM has no way to compute pages that were promised. A load that failed is therefore requested again, into the
same pages, which stay the request's: by a new request after a lookup, or, where the leader was too busy to examine the
load, by the same one. Where that does not succeed in time, the engine must end.
"""

import logging
import time
from dataclasses import dataclass, field

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.engine_client import FENCE_S, EngineClient
from kvferry.served import Part
from kvferry.trtllm.settings import Settings, variable_of
from kvferry.trtllm.steps import Steps
from kvferry.trtllm.tracked import Tracked
from kvferry.wire import Code

logger = logging.getLogger("kvferry")

#: Deadline of the lookup before a load is requested again.
LOOKUP_LIMIT_S = 2.0
#: Shortest and longest pause before a load is requested again.
PAUSE_FIRST_S, PAUSE_MAX_S = 0.02, 0.5
#: Time for which the client waits for the end of a load beyond the time in which it is requested again: so long the
#: leader may still report it.
_BEYOND_S = FENCE_S


class LoadFailed(RuntimeError):
    """Pages that were promised are not in place. The engine must end: nothing computes them."""


@dataclass(eq=False)
class Load:
    """A load. ``pages`` are those that are not in place, from position ``first`` of the sequence on."""

    tracked: Tracked
    first: int
    pages: list[int]
    began_at: float = field(default_factory=time.monotonic)
    #: The open request, a load or another one, the connection over which it was first sent, and the pages it names.
    pending: PendingRequest | None = None
    looks: bool = False
    link: int = 0
    #: With copies of unknown end: the last leader to which they may have been sent.
    epoch: int = 0
    named: int = 0
    after: int = 0
    #: Id of a load that the leader has not examined, and that is sent again; None without one.
    repeats: int | None = None
    #: How often copies were requested.
    attempts: int = 0
    #: The request has ended: what is not in place is not requested again.
    given_up: bool = False
    #: It is not known whether the copies of the last request have ended: no further ones may begin.
    unknown: bool = False
    pause_s: float = PAUSE_FIRST_S
    not_before: float = 0.0
    #: Why the last request failed.
    problem: str = "no answer came"


class Loads:
    """The loads of an engine. For the executor's thread alone."""

    def __init__(self, client: EngineClient, settings: Settings, steps: Steps, namespace: bytes):
        self._client = client
        self._settings = settings
        self._steps = steps
        self._namespace = namespace
        #: Bytes of a page on one rank; 0 before the memory is known.
        self.page_bytes = 0
        #: Loads that are not over, by request. As many as requests that load.
        self._open: dict[int, Load] = {}
        #: Why a load cannot be requested at all.
        self._fault = ""

    def begin(self, tracked: Tracked, first: int, pages: list[int]) -> None:
        """Requests the load of pages that the last lookup of the slot found."""
        load = Load(tracked, first, pages)
        tracked.load = self._open[tracked.request] = load
        self._request(load)

    def cannot_begin(self, request: int, why: str) -> None:
        """Records that pages were promised to a request, and that their load could not be requested."""
        self._fault = f"the load of request {request} could not be requested: {why}"

    def give_up(self, request: int) -> None:
        """Ends the load of a request that has ended, once nothing of it is copied any longer."""
        load = self._open.get(request)
        if load is not None:
            load.given_up = True
            self._end_given_up(load)

    def _end_given_up(self, load: Load) -> None:
        idle = load.pending is None or load.looks
        if load.given_up and not load.unknown and idle and (load.repeats is None or self._is_late(load)):
            self._over(load)

    def _is_late(self, load: Load) -> bool:
        return time.monotonic() - load.began_at > self._settings.load_retry_ms / 1000

    def is_open(self, request: int) -> bool:
        """Whether some page of a request is not in place, or may still be written by kvferry."""
        return request in self._open

    def __len__(self) -> int:
        return len(self._open)

    def turn(self) -> None:
        """Processes received answers, and requests failed loads again. Does not wait.

        Raises:
            LoadFailed: when a load did not succeed in time.
        """
        if self._fault:
            raise LoadFailed(f"kvferry: {self._fault}: the engine ends: start it again")
        for load in list(self._open.values()):
            if load.pending is not None and load.pending.done:
                pending, load.pending = load.pending, None
                self._looked_up(load, pending) if load.looks else self._copied(load, pending)
            self._end_given_up(load)
            if load.tracked.request in self._open:
                self._go_on(load)

    def _go_on(self, load: Load) -> None:
        now = time.monotonic()
        if load.given_up and load.repeats is None:
            self._ask_about(load, now)
            return
        if not load.given_up and self._is_late(load):
            limit_s = self._settings.load_retry_ms / 1000
            raise LoadFailed(
                f"kvferry: {len(load.pages)} blocks of request {load.tracked.request} were not loaded within "
                f"{limit_s:.0f} s ({load.problem}), and TensorRT-LLM cannot compute blocks that were promised: the "
                f"engine ends: start it again, with {variable_of('mode')}=store while kvferry is not well"
            )
        if load.pending is not None or time.monotonic() < load.not_before or not self._client.listening:
            return
        if load.repeats is not None:
            self._send(load)
        elif not load.unknown:
            tracked = load.tracked
            end = load.first + len(load.pages)
            load.looks, load.link = True, self._client.link
            load.pending = self._client.lookup(
                tracked.slot,
                tracked.hashes.hashes[:end],
                namespace=self._namespace,
                have_pages=load.first,
                timeout_s=LOOKUP_LIMIT_S,
            )
            tracked.opens(load.pending, self._client.epoch, end)

    def _ask_about(self, load: Load, now: float) -> None:
        """Finds out whether the pages of a request that has ended are quiet. The engine runs on meanwhile.

        A leader takes stores back only once every worker has joined it, and a worker joins when it copies nothing for
        an earlier leader. Such an answer of a later leader therefore ends the copies of the last load.
        """
        later = self._client.listening and self._client.epoch != load.epoch
        if load.pending is None and load.unknown and later and now >= load.not_before:
            load.looks = True
            load.pending = self._client.cancel_stores(load.tracked.slot, timeout_s=LOOKUP_LIMIT_S)

    def _looked_up(self, load: Load, pending: PendingRequest) -> None:
        answer = pending.answer
        if load.given_up:
            load.unknown = load.unknown and not isinstance(answer, wire.CancelStoresAnswer)
            self._again_later(load)
            return
        found = min(answer.hit_pages, len(load.pages)) if isinstance(answer, wire.LookupAnswer) else 0
        if found:
            self._request(load, found)
            return
        load.problem = str(pending.failure) if pending.failure is not None else "kvferry no longer has them"
        self._again_later(load)

    def _request(self, load: Load, pages: int | None = None) -> None:
        load.named = len(load.pages) if pages is None else pages
        load.after, load.link = self._steps.work, self._client.link
        self._steps.awaited = max(self._steps.awaited, self._steps.work)
        self._send(load)

    def _send(self, load: Load) -> None:
        load.looks = False
        load.attempts += 1
        left_s = max(self._settings.load_retry_ms / 1000 - (time.monotonic() - load.began_at), 0.05)
        limit_s = min(self._settings.load_limit_s(load.named * self.page_bytes), left_s)
        load.pending = self._client.load(
            load.tracked.slot,
            [Part(0, load.first, load.pages[: load.named])],
            after=load.after,
            identity=load.repeats,
            timeout_s=limit_s,
            # The end of the copies is reported after the deadline, and by the next leader if this one is gone.
            grace_s=left_s + _BEYOND_S - limit_s,
        )

    def _copied(self, load: Load, pending: PendingRequest) -> None:
        """Handles the end of a request for copies."""
        failure = pending.failure
        unknown, load.unknown = load.unknown, False
        repeated, load.repeats = load.repeats is not None, None
        if isinstance(pending.answer, wire.LoadAnswer):
            done = min(pending.answer.pages, load.named)
            load.first += done
            load.pages = load.pages[done:]
            if not load.pages:
                self._over(load)
                return
            load.problem = "kvferry loaded only a part of them"
        elif failure is not None:
            load.problem = str(failure)
            if failure.code == Code.BUSY and not failure.over and (failure.reported or repeated):
                load.repeats = pending.id
            # A request that is refused before it was examined, and that was sent over one connection only, has begun
            # no copy.
            refused = failure.reported and load.link != 0 and load.link == self._client.link
            load.unknown = not (failure.over or refused)
            if load.repeats is not None and not failure.reported:
                # The client has not sent it again.
                load.unknown = unknown
            load.epoch = self._client.epoch
        if load.attempts == 1:
            logger.warning(
                "kvferry: %d blocks of request %d were not loaded and are requested again: %s",
                len(load.pages),
                load.tracked.request,
                load.problem,
            )
        self._again_later(load)

    def _again_later(self, load: Load) -> None:
        load.not_before = time.monotonic() + load.pause_s
        load.pause_s = min(load.pause_s * 2, PAUSE_MAX_S)

    def _over(self, load: Load) -> None:
        self._open.pop(load.tracked.request, None)
        load.tracked.load = None
        load.tracked.loaded = range(load.tracked.device_pages, load.first)
