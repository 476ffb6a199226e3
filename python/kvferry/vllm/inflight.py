"""Copies of engine pages that are not known to be over.

A copy is over when the leader has reported so, or, if the leader cannot be reached, when every rank has confirmed that
nothing is copied for it. Only then may its pages be used again. A load holds at least one page that no other copy
holds, and the pages of all stores together are bounded (:mod:`kvferry.vllm.backpressure`), so that there are never more
copies than twice the device's pages.
"""

import collections
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.client import Failure, PendingRequest
from kvferry.engine_client import FENCE_S, EngineClient
from kvferry.served import Part

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

#: Time without a connection after which copies are abandoned instead of awaited. A leader's restart takes less.
LOST_S = 3.0
#: Time after which an idle engine no longer waits for an abandoned copy that the ranks have not confirmed. A worker is
#: killed before that.
ABANDONED_S = 60.0


@dataclass(eq=False)
class Copy:
    """A load, or a store, which holds ``blocks`` of vLLM's pool. ``owner`` is the record of its request."""

    owner: Any
    parts: list[Part]
    store: bool
    #: The engine's pages of all parts.
    pages: list[int] = field(init=False)
    blocks: list[Any] = field(default_factory=list)
    #: The request holds the pages until it ends, or loses all of its pages.
    stays: bool = False
    #: How often the request had lost its pages when the copy was requested.
    restarts: int = 0
    #: Groups, and pages of them that a load has brought and that do not hold what was stored.
    wrong: list[tuple[int, int]] = field(default_factory=list)
    requested_at: float = field(default_factory=time.monotonic)
    pending: PendingRequest | None = None
    #: Number of ranks that have confirmed the end of an abandoned copy, None before it is abandoned; and the time when
    #: it was abandoned.
    ranks_over: int | None = None
    abandoned_at: float = 0.0

    def __post_init__(self) -> None:
        one = len(self.parts) == 1
        self.pages = self.parts[0].pages if one else [page for part in self.parts for page in part.pages]

    @property
    def is_held(self) -> bool:
        """Whether the pages of a store are certainly held by its request."""
        return self.stays and not self.owner.finished and self.owner.restarts == self.restarts

    @property
    def answer(self) -> msgspec.Struct | None:
        """The leader's answer to a copy that was carried out; None otherwise, and for an abandoned copy."""
        return self.pending.answer if self.pending and self.ranks_over is None else None

    @property
    def state(self) -> str:
        """The state of a copy that is not over."""
        return "abandoned" if self.ranks_over is not None else "storing" if self.store else "loading"

    @property
    def failure(self) -> Failure | None:
        """Why the copy was not carried out, if known."""
        return self.pending.failure if self.pending else None


class CopiesInFlight:
    """All copies that are not known to be over. For the scheduler's thread alone."""

    def __init__(self, client: EngineClient, ranks: int):
        self._client = client
        self._ranks = ranks
        self._pool: BlockPool | None = None
        self._open: dict[int, Copy] = {}
        self._ended: collections.deque[PendingRequest] = collections.deque()
        self._any_ended = threading.Event()
        self._over: collections.deque[Copy] = collections.deque()
        self._to_abandon: list[int] = []
        self._stored_pages = 0
        #: Some store waits for the others of its step.
        self._unsent = False
        #: Number of open copies in each state.
        self._states = collections.Counter(loading=0, storing=0, abandoned=0)

    def bind_pool(self, pool: "BlockPool") -> None:
        """Sets vLLM's block pool, in which stores hold references to their pages."""
        self._pool = pool

    def begin_load(self, copy: Copy, slot: int, *, after: int, timeout_s: float) -> None:
        """Requests a load, which starts after the work ``after``."""
        self._opened(
            copy,
            self._client.load(
                slot,
                copy.parts,
                after=after,
                timeout_s=timeout_s,
                grace_s=FENCE_S,
                until=self._request_ended,
            ),
        )

    def begin_store(
        self, copy: Copy, slot: int, *, more: Sequence[bytes], more_from: int, after: int = 0, timeout_s: float
    ) -> int:
        """Requests a store, which holds its pages until it is over; returns the id of the request.

        Its pages are written by the work ``after``; with 0, by the step that is scheduled now, and the store is sent
        with the others of that step, by :meth:`send`.
        """
        if self._pool is None:
            raise RuntimeError("pages cannot be held: vLLM has given no pool")
        copy.blocks = [self._pool.blocks[page] for page in copy.pages]
        self._pool.touch(copy.blocks)
        self._unsent = self._unsent or after == 0
        try:
            pending = self._client.store(
                slot,
                copy.parts,
                more=more,
                more_from=more_from,
                after=after,
                timeout_s=timeout_s,
                grace_s=FENCE_S,
                until=self._request_ended,
                wake=after != 0,
            )
        except Exception:
            self._pool.free_blocks(reversed(copy.blocks))
            raise
        return self._opened(copy, pending)

    def send(self) -> None:
        """Sends the stores of a step."""
        if self._unsent:
            self._unsent = False
            self._client.poke()

    def _opened(self, copy: Copy, pending: PendingRequest) -> int:
        copy.pending = pending
        self._open[pending.id] = copy
        self._states[copy.state] += 1
        self._stored_pages += len(copy.blocks)
        return pending.id

    def _request_ended(self, pending: PendingRequest) -> None:
        """Queues an ended request. Runs on the client's thread."""
        self._ended.append(pending)
        self._any_ended.set()

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has ended, at most ``timeout_s``."""
        self._any_ended.wait(timeout_s)

    def settle(self) -> Iterator[Copy]:
        """Yields the copies that are over since the last call. Pages of stores have been returned to the pool."""
        self._any_ended.clear()
        lost_at = self._client.lost_at
        if lost_at is not None and time.monotonic() - lost_at > LOST_S:
            for request, copy in self._open.items():
                self._abandon(request, copy)
        while self._ended:
            pending = self._ended.popleft()
            copy = self._open.get(pending.id)
            if copy is None or copy.ranks_over is not None:
                continue
            if pending.failure is not None and not pending.failure.over:
                self._abandon(pending.id, copy)
            else:
                self._end(pending.id)
        # One by one, so that copies that are not taken because of an exception are yielded by the next call.
        while self._over:
            yield self._over.popleft()

    def _abandon(self, request: int, copy: Copy) -> None:
        if copy.ranks_over is None:
            self._states[copy.state] -= 1
            copy.ranks_over, copy.abandoned_at = 0, time.monotonic()
            self._states[copy.state] += 1
            self._to_abandon.append(request)

    def to_abandon(self) -> list[int]:
        """Returns newly abandoned requests, each once: every rank must take their pages back."""
        requests, self._to_abandon = self._to_abandon, []
        return requests

    def ranks_know(self, over: dict[int, int]) -> None:
        """Counts ranks that have confirmed the end of abandoned requests: ``over`` is ranks by request.

        Removes the entries from ``over``, so that none counts twice in a repeated call after an exception.
        """
        while over:
            request, ranks = over.popitem()
            copy = self._open.get(request)
            if copy is not None and copy.ranks_over is not None:
                copy.ranks_over += ranks
                if copy.ranks_over >= self._ranks:
                    self._end(request)

    def _end(self, request: int) -> None:
        copy = self._open.pop(request)
        self._states[copy.state] -= 1
        self._stored_pages -= len(copy.blocks)
        self._over.append(copy)
        if copy.blocks and self._pool is not None:
            # The tail comes first, so that vLLM evicts it first.
            self._pool.free_blocks(reversed(copy.blocks))

    def states(self) -> dict[str, int]:
        """Returns the number of open copies in each state: loading, storing, abandoned."""
        return dict(self._states)

    @property
    def storing(self) -> int:
        """Number of open stores that were not abandoned."""
        return self._states["storing"]

    def stored_pages(self) -> int:
        """Pages that stores hold, also if requests hold them; a page of two stores counts twice, as both copy it."""
        return self._stored_pages

    def pages_alone(self) -> int:
        """Pages that are held by stores only, as far as is known in this step.

        Takes time linear in the pages under store of requests that have ended or lost their pages.
        """
        if self._pool is None:
            return 0
        blocks = self._pool.blocks
        # Where a held store has a page, too, its request is one more holder.
        loose = (copy for copy in self._open.values() if copy.blocks and not copy.is_held)
        holds = collections.Counter(itertools.chain.from_iterable(copy.pages for copy in loose))
        return sum(blocks[page].ref_cnt == count for page, count in holds.items())

    def pool_pages(self) -> int:
        """Number of pages of the engine; 0 before its pool is known."""
        return len(self._pool.blocks) if self._pool is not None else 0

    def frees_since(self) -> float | None:
        """When the oldest store began that has a page held by stores only; None without such a store."""
        holds = self._holds()
        stores = (copy for copy in self._open.values() if copy.blocks)
        times = (
            copy.requested_at
            for copy in stores
            if any(block.ref_cnt == holds[page] for block, page in zip(copy.blocks, copy.pages, strict=True))
        )
        return min(times, default=None)

    def _holds(self) -> "collections.Counter[int]":
        """How many stores hold each page. Counted when it matters, which is when pages are rare."""
        stores = (copy.pages for copy in self._open.values() if copy.blocks)
        return collections.Counter(itertools.chain.from_iterable(stores))

    def end_soon(self) -> bool:
        """Whether some copy is not known to be over, but may be soon.

        Copies that were abandoned long ago do not count: otherwise a worker whose process cannot be seen, and that does
        not reconnect, would keep an idle engine busy.
        """
        given_up = time.monotonic() - ABANDONED_S
        return any(copy.ranks_over is None or copy.abandoned_at > given_up for copy in self._open.values())

    def stores(self) -> int:
        """Number of stores that are not known to be over."""
        return sum(copy.store for copy in self._open.values())

    def __len__(self) -> int:
        return len(self._open)
