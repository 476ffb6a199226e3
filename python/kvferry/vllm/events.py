"""KV events of the pages that kvferry holds for an engine, in vLLM's form.

A thread of its own follows the leader's change log, joins it with the tokens that the scheduler's thread describes, and
builds batches of events while the sink has room. The sink is a queue that vLLM's scheduler drains with each step
(``events = engine``), or a stream of kvferry's own (``events = publish``).
"""

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from vllm.distributed.kv_events import KVCacheEvent

from kvferry.engine_client import EngineRequests
from kvferry.event_feed import Feed
from kvferry.held_pages import HeldPages
from kvferry.vllm.event_batches import EventBatches, EventGroup
from kvferry.vllm.page_tokens import Described, PageTokens, describe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvferry.vllm.tracked import Tracked

logger = logging.getLogger("vllm.kvferry")

#: Most batches that wait for vLLM's next step. Each changes 128 pages at most, so that the tokens of 8,192 pages wait:
#: 10 MB with pages of 32 tokens.
WAITING_BATCHES_MAX = 64
#: Most tokens of requests that wait to be taken by the thread, 36 bytes each: 150 MB. Further pages are announced by
#: their hash alone.
DESCRIBED_TOKENS_MAX = 4 << 20
#: Pause before a full sink is looked at again.
FULL_S = 0.1
#: Longest wait for the thread at the end.
CLOSE_LIMIT_S = 2.0


class Sink(Protocol):
    """Where batches go."""

    @property
    def has_room(self) -> bool:
        """Whether the next batch is taken at once."""

    def put(self, events: list[KVCacheEvent]) -> None:
        """Takes a batch."""

    def close(self) -> None:
        """Ends."""


class StepQueue:
    """Batches for vLLM's next step. :meth:`take` and :meth:`drop` are for the scheduler's thread."""

    def __init__(self) -> None:
        self._batches: collections.deque[tuple[int, list[KVCacheEvent]]] = collections.deque()
        #: Number of the batches that were dropped so far, in the order of their numbers: those before this one.
        self._valid_from = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def has_room(self) -> bool:
        """Whether the next batch is taken at once."""
        return len(self._batches) < WAITING_BATCHES_MAX

    def put(self, events: list[KVCacheEvent]) -> None:
        """Takes a batch."""
        self._batches.append((self._next, events))

    def take(self) -> list[KVCacheEvent]:
        """Returns the events of all batches. Does not block."""
        events: list[KVCacheEvent] = []
        while self._batches:
            number, batch = self._batches.popleft()
            if number >= self._valid_from:
                events += batch
        return events

    def drop(self) -> int:
        """Drops the batches that were put before :meth:`begin` is called with the returned number."""
        self._valid_from += 1
        return self._valid_from

    def begin(self, number: int) -> None:
        """Numbers the batches from now on. For the thread that puts them."""
        self._next = number

    def close(self) -> None:
        """Does nothing: vLLM takes no more."""


class KvEvents:
    """The KV events of one engine. Methods are for the scheduler's thread, and none of them blocks but :meth:`close`.

    ``groups``: in the order in which they are registered.
    """

    def __init__(self, groups: list[EventGroup], hash_tokens: int, sink: Sink):
        self._sizes = sorted({group.page_tokens for group in groups})
        self._hash_tokens = hash_tokens
        self._sink = sink
        self._held = HeldPages()
        self._tokens = PageTokens(self._sizes, hash_tokens)
        self._batches = EventBatches(groups, self._held, self._tokens)
        self._feed: Feed | None = None
        self._described: collections.deque[Described] = collections.deque()
        self._described_tokens = 0
        self._taken_tokens = 0
        self._skipped = 0
        #: What the thread has not taken: the namespaces to follow, and the number of the last reset of vLLM.
        self._to_follow: collections.deque[list[bytes]] = collections.deque(maxlen=1)
        self._reset = self._reset_taken = 0
        self._awake = threading.Event()
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry events", daemon=True)

    def start(self, client: EngineRequests) -> None:
        """Starts to follow the leader of this client."""
        self._feed = Feed(client, self._held, self._awake.set)
        self._thread.start()

    def follow(self, namespaces: "Iterable[bytes]") -> None:
        """Sets the namespaces in which the engine finds pages. Pages of others are taken back."""
        self._to_follow.append(list(namespaces))
        self._awake.set()

    def describe(self, tracked: "Tracked", through: int) -> None:
        """Takes the tokens of a request's pages, up to the unit ``through``, that were not taken before."""
        if through <= tracked.described:
            return
        waiting = self._described_tokens - self._taken_tokens
        if waiting > DESCRIBED_TOKENS_MAX or not self._thread.is_alive():
            self._skipped += 1
            if self._skipped == 1:
                logger.warning("kvferry: KV events lag behind: some pages are announced by their hash alone")
            return
        described = describe(tracked.request, tracked.described, through, self._sizes, self._hash_tokens)
        tracked.described = through
        self._described_tokens += len(described.tokens)
        self._described.append(described)
        self._awake.set()

    def engine_was_reset(self) -> None:
        """Handles vLLM's ``AllBlocksCleared``, after which subscribers have no page of any medium."""
        if isinstance(self._sink, StepQueue):
            self._reset = self._sink.drop()
            self._awake.set()

    def take(self) -> list[KVCacheEvent]:
        """Returns the events for this step of vLLM."""
        if not isinstance(self._sink, StepQueue):
            return []
        events = self._sink.take()
        if events:
            # There is room for further ones.
            self._awake.set()
        return events

    @property
    def waiting(self) -> bool:
        """Whether events wait for a step of vLLM, or may do so in a moment."""
        if not isinstance(self._sink, StepQueue) or not self._thread.is_alive():
            return False
        return len(self._sink) > 0 or self._busy or self._awake.is_set()

    def close(self) -> None:
        """Ends the thread and the stream, each within 2 s."""
        self._closing = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_LIMIT_S)
        self._sink.close()

    # The thread.

    def _run(self) -> None:
        timeout_s = 0.0
        while not self._closing:
            self._awake.wait(timeout_s)
            self._busy = True
            self._awake.clear()
            try:
                timeout_s = self._turn()
            except Exception:
                logger.exception("kvferry: KV events failed: none are published until the engine is started again")
                self._take_back()
                return
            finally:
                self._busy = False

    def _take_back(self) -> None:
        """Publishes that no page is held, as far as there is room: nothing will take the pages back later."""
        try:
            if self._feed is not None:
                self._feed.follow([])
            while self._sink.has_room and self._held.first_due() is not None:
                if events := self._batches.next():
                    self._sink.put(events)
        except Exception:
            logger.exception("kvferry: announced pages could not be taken back: restart the subscribers, too")

    def _turn(self) -> float:
        """Takes what is new, and builds batches while there is room. Returns the time until the next call."""
        if self._feed is None:
            raise RuntimeError("the thread was started without a client")
        if self._to_follow:
            self._feed.follow(self._to_follow.popleft())
        if self._reset != self._reset_taken and isinstance(self._sink, StepQueue):
            self._reset_taken = self._reset
            self._sink.begin(self._reset_taken)
            self._held.announce_again()
        while self._described:
            described = self._described.popleft()
            for size, page_hash in self._tokens.add(described):
                self._batches.describes(size, page_hash)
            self._taken_tokens += len(described.tokens)
        again_at = self._feed.turn()
        while self._sink.has_room and self._held.first_due() is not None and not self._closing:
            if events := self._batches.next():
                self._sink.put(events)
        if self._held.first_due() is not None:
            return FULL_S
        return max(again_at - time.monotonic(), 0.0)
