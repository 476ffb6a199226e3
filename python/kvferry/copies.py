"""Copies of engine pages that are not known to be over.

A copy is over when kvferry has said so; or, when kvferry cannot be asked, when every rank knows that nothing is copied
for it any more. Only then may its pages be used again. A load holds at least one page that no other copy holds, and
the pages of all stores together are bounded (:mod:`kvferry.backpressure`), so that there are never more copies than
twice the device's pages.
"""

import collections
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.client import Client, Failure, Question

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

#: How long kvferry may take, beyond a copy's deadline, to say how it ended: its own fence of 10 s, and some.
FENCE_S = 12.0
#: With no connection for so long, copies are not waited for but abandoned. A leader's restart takes less.
LOST_S = 3.0
#: What no rank could confirm for so long is not waited for by an idle engine. A worker is killed before.
ABANDONED_S = 60.0


@dataclass(eq=False)
class Copy:
    """A load, or a store when it holds ``blocks`` of vLLM's pool. ``owner`` is whose request it is."""

    owner: Any
    first_page: int
    pages: list[int]
    store: bool
    blocks: list[Any] = field(default_factory=list)
    asked_at: float = field(default_factory=time.monotonic)
    question: Question | None = None
    #: Ranks that know that it is over, once they were asked, and since when; None before.
    ranks_over: int | None = None
    abandoned_at: float = 0.0

    @property
    def answer(self) -> msgspec.Struct | None:
        """What kvferry said, when it was carried out."""
        return self.question.answer if self.question and self.ranks_over is None else None

    @property
    def failure(self) -> Failure | None:
        """Why it was not carried out, when that is known."""
        return self.question.failure if self.question else None


class Copies:
    """See the module. For the scheduler's thread alone."""

    def __init__(self, client: Client, ranks: int):
        self._client = client
        self._ranks = ranks
        self._pool: BlockPool | None = None
        self._open: dict[int, Copy] = {}
        self._ended: collections.deque[Question] = collections.deque()
        self._news = threading.Event()
        self._over: collections.deque[Copy] = collections.deque()
        self._to_abandon: list[int] = []
        self._stored_pages = 0
        #: How many stores hold each page.
        self._holds: collections.Counter[int] = collections.Counter()

    def bind_pool(self, pool: "BlockPool") -> None:
        """Where pages get and lose their references."""
        self._pool = pool

    def begin(self, copy: Copy, message: msgspec.Struct, timeout_s: float) -> int:
        """Asks for a copy; returns the id of the request. A store holds its pages until it is over."""
        if copy.store:
            if self._pool is None:
                raise RuntimeError("pages cannot be held: vLLM has given no pool")
            copy.blocks = [self._pool.blocks[page] for page in copy.pages]
            self._pool.touch(copy.blocks)
            self._holds.update(copy.pages)
        question = self._client.ask(message, timeout_s, patience_s=FENCE_S, until=self._question_ended)
        copy.question = question
        self._open[question.id] = copy
        self._stored_pages += len(copy.blocks)
        return question.id

    def _question_ended(self, question: Question) -> None:
        """On the client's thread."""
        self._ended.append(question)
        self._news.set()

    def wait(self, timeout_s: float) -> None:
        """Waits until some copy has ended, at most so long."""
        self._news.wait(timeout_s)

    def settle(self) -> Iterator[Copy]:
        """The copies that are over since the last call. Pages of stores have been given back."""
        self._news.clear()
        lost_at = self._client.lost_at
        if lost_at is not None and time.monotonic() - lost_at > LOST_S:
            for request, copy in self._open.items():
                self._abandon(request, copy)
        while self._ended:
            question = self._ended.popleft()
            copy = self._open.get(question.id)
            if copy is None or copy.ranks_over is not None:
                continue
            if question.failure is not None and not question.failure.over:
                self._abandon(question.id, copy)
            else:
                self._end(question.id)
        # One by one: what is not taken, because of an exception in between, is there the next time.
        while self._over:
            yield self._over.popleft()

    def _abandon(self, request: int, copy: Copy) -> None:
        if copy.ranks_over is None:
            copy.ranks_over, copy.abandoned_at = 0, time.monotonic()
            self._to_abandon.append(request)

    def to_abandon(self) -> list[int]:
        """Requests that every rank is to take its pages back from, each once."""
        requests, self._to_abandon = self._to_abandon, []
        return requests

    def ranks_know(self, over: dict[int, int]) -> None:
        """So many more ranks know that nothing is copied for these requests any more.

        Takes them out, so that none counts twice when this is called again after an exception.
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
        self._stored_pages -= len(copy.blocks)
        self._over.append(copy)
        if copy.blocks and self._pool is not None:
            for page in copy.pages:
                self._holds[page] -= 1
                if not self._holds[page]:
                    del self._holds[page]
            # The tail first: it is the first to be evicted.
            self._pool.free_blocks(reversed(copy.blocks))

    def stored_pages(self) -> int:
        """Pages that stores hold, with others or alone; a page of two stores counts twice, since both copy it."""
        return self._stored_pages

    def pages_alone(self) -> int:
        """Pages that stores alone hold, one or several. Looks at every page that is stored."""
        if self._pool is None:
            return 0
        return sum(self._pool.blocks[page].ref_cnt == holds for page, holds in self._holds.items())

    def pool_pages(self) -> int:
        """All pages of the engine; 0 before its pool is known."""
        return len(self._pool.blocks) if self._pool is not None else 0

    def frees_since(self) -> float | None:
        """When the oldest store began that holds a page which only stores keep from being used; None without one."""
        times = [copy.asked_at for copy in self._open.values() if copy.blocks and self._keeps(copy)]
        return min(times, default=None)

    def _keeps(self, copy: Copy) -> bool:
        """Whether a page of a store is held by stores alone."""
        return any(block.ref_cnt == self._holds[page] for block, page in zip(copy.blocks, copy.pages, strict=True))

    def end_soon(self) -> bool:
        """Whether some copy is not known to be over, but may be shortly.

        A worker whose process cannot be seen, and that does not come back, would otherwise keep an idle engine busy.
        """
        given_up = time.monotonic() - ABANDONED_S
        return any(copy.ranks_over is None or copy.abandoned_at > given_up for copy in self._open.values())

    def stores(self) -> int:
        """Stores that are not known to be over."""
        return sum(copy.store for copy in self._open.values())

    def __len__(self) -> int:
        return len(self._open)
