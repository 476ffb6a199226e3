"""The scheduler's side of the connector: looks up, asks for loads and stores, and knows which pages a copy still uses.

It decides nothing that the leader can decide. Nothing here waits, but for the small budget of a step for lookups.

Pages under copy are safe in every order of events. A load's pages belong to a request that vLLM keeps until the load is
reported over. A store's pages carry one more reference of vLLM's block pool until the store is over, whatever becomes
of its request. When kvferry cannot be asked how a copy ended, each rank makes sure that nothing is copied any more
before the pages are used again (:mod:`kvferry.copies`).
"""

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.client import Client, Question
from kvferry.copies import Copies, Copy
from kvferry.settings import Settings
from kvferry.steps import RankReport, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvferry")

#: What a lookup found is used for so long. kvferry holds it for 30 s.
FRESH_S = 15.0
#: Without an answer from anybody for so long, the user is told.
ABSENT_S = 1.0
#: Preemption waits for stores that free pages, unless they take longer than this.
FREES_SOON_S = 0.1
#: Where nobody runs steps of an idle engine, its last request waits so long for stores of its pages.
LAST_STORES_S = 0.25
FINISH_LIMIT_S = 10.0
RESET_LIMIT_S = 5.0


@dataclass(eq=False)
class Lookup:
    """A lookup that was asked, and with what."""

    question: Question
    asked_at: float
    link: int
    device_pages: int
    pages: int

    def found(self) -> int:
        """Pages from the first on that the device and kvferry have together."""
        answer = self.question.answer
        return self.device_pages + answer.hit_pages if isinstance(answer, wire.LookupAnswer) else 0


@dataclass(eq=False)
class Tracked:
    """One request of the engine."""

    request: "Request"
    slot: int
    namespace: bytes
    lookup: Lookup | None = None
    #: Pages that the device had when tokens were last matched.
    device_pages: int = 0
    #: No more lookups: one was not answered in time, or a load failed.
    computes: bool = False
    #: The leader was asked about the slot, and may keep it.
    known_there: bool = False
    #: The question that opened the slot, at which epoch, and how many hashes that knows; None: open it anew.
    opened: Question | None = None
    epoch: int = 0
    known: int = 0
    #: Pages from here on have not been asked to be stored; pages before ``full`` were full when last looked at.
    store_from: int = 0
    full: int = 0
    load: Copy | None = None
    #: From a load's begin until vLLM runs the request: vLLM itself keeps its pages if it ends meanwhile.
    receiving: bool = False
    stores: int = 0
    finished: bool = False
    delayed: bool = False


class SchedulerSide:
    """See the module. For the scheduler's thread alone."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: bytes,
        replica: int,
        namespace: bytes,
        page_tokens: int,
        ranks: int,
        idles: bool,
        connect: type[Client] = Client,
    ):
        """``idles``: steps of an idle engine are run too, so that what is over is noticed."""
        self._settings = settings
        self._namespace = namespace
        self._page_tokens = page_tokens
        self._idles = idles
        self._tracked: dict[str, Tracked] = {}
        self._budget_s = settings.lookup_budget_ms / 1000
        self._step = StepMetadata()
        self._last_store = 0
        self._told_absent = False
        # Ids and slots grow also over a restart of an engine with the same name.
        self._next_slot = base = time.time_ns() // 1000
        hello = wire.Hello(role="engine", engine=engine, replica=replica, name="vLLM")
        self._client = connect(settings.socket_dir / "leader", hello, first_id=base, turn=self._watch)
        self._copies = Copies(self._client, ranks)
        self._client.start()

    def bind_pool(self, pool: "BlockPool") -> None:
        """The engine's pool of pages."""
        self._copies.bind_pool(pool)

    def _watch(self) -> float | None:
        """Says once that kvferry is away, and once that it is back. On the client's thread."""
        lost_at = self._client.lost_at
        if lost_at is None:
            if self._told_absent:
                logger.info("kvferry: the leader in %s is there", self._client.directory)
            self._told_absent = False
        elif not self._told_absent:
            if time.monotonic() - lost_at < ABSENT_S:
                return lost_at + ABSENT_S
            self._told_absent = True
            logger.warning(
                "kvferry: no leader answers in %s (%s): requests run without the cache until one does",
                self._client.directory,
                self._client.trouble,
            )
        return None

    # Requests.

    def track(self, request: "Request") -> Tracked:
        """Our record of a request, made when it is new."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self._next_slot += 1
            tracked = Tracked(request, self._next_slot, self._namespace_of(request))
            self._tracked[request.request_id] = tracked
        tracked.request = request
        return tracked

    def _namespace_of(self, request: "Request") -> bytes:
        """Salts and multimodal inputs are in the hashes; of a LoRA only its name is."""
        lora = request.lora_request
        if lora is None:
            return self._namespace
        return self._namespace + f"|lora={lora.lora_name!r}:{lora.lora_path!r}".encode()

    def finished(self, request: "Request") -> bool:
        """A request is over. Returns whether vLLM keeps its pages until it is reported sent."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        tracked.finished = True
        if tracked.known_there:
            self._client.ask(wire.Finish(tracked.slot), FINISH_LIMIT_S)
        if tracked.stores and not self._idles and all(other.finished for other in self._tracked.values()):
            self._wait_for_stores(tracked)
        # Pages are given back once: when a load is reported, or when stores are.
        tracked.delayed = tracked.stores > 0 and not tracked.receiving
        self._forget_if_over(tracked)
        return tracked.delayed

    def _wait_for_stores(self, tracked: Tracked) -> None:
        until = time.monotonic() + LAST_STORES_S
        while tracked.stores and (left_s := until - time.monotonic()) > 0:
            self._copies.wait(left_s)
            self._settle()

    def _forget_if_over(self, tracked: Tracked) -> None:
        if tracked.finished and not tracked.stores and tracked.load is None:
            self._tracked.pop(tracked.request.request_id, None)

    # Lookups.

    def matched_tokens(self, request: "Request", computed_tokens: int) -> int | None:
        """Tokens behind the computed ones that can be loaded; None: ask again."""
        tracked = self.track(request)
        tracked.device_pages = device_pages = computed_tokens // self._page_tokens
        if tracked.computes or tracked.load is not None or not self._client.listening:
            return 0
        # At least one token is left to compute.
        pages = min((request.num_tokens - 1) // self._page_tokens, len(request.block_hashes), wire.HASHES_MAX)
        if pages <= device_pages:
            return 0
        lookup = tracked.lookup
        if lookup is None or not self._serves(lookup, device_pages, pages):
            question = self._open(tracked, device_pages, pages)
            lookup = Lookup(question, time.monotonic(), self._client.link, device_pages, pages)
            tracked.lookup = lookup
        if not lookup.question.done and self._budget_s > 0:
            before = time.monotonic()
            lookup.question.wait(self._budget_s)
            self._budget_s -= time.monotonic() - before
        if not lookup.question.done:
            if time.monotonic() - lookup.asked_at <= self._settings.lookup_timeout_ms / 1000:
                return None
            tracked.computes = True
            return 0
        return max(min(lookup.found(), pages) - device_pages, 0) * self._page_tokens

    def _serves(self, lookup: Lookup, device_pages: int, pages: int) -> bool:
        """Whether an earlier lookup still says what can be loaded behind the device's pages."""
        if lookup.link != self._client.link or lookup.pages != pages:
            return False
        if not lookup.question.done:
            return lookup.device_pages <= device_pages
        if time.monotonic() - lookup.asked_at > FRESH_S:
            return False
        return lookup.device_pages == device_pages or lookup.device_pages < device_pages < lookup.found()

    def _open(self, tracked: Tracked, device_pages: int, pages: int) -> Question:
        """Opens the request's slot, or opens it anew: looks its pages up."""
        hashes = tracked.request.block_hashes[:pages]
        message = wire.Lookup(
            slot=tracked.slot,
            namespace=tracked.namespace,
            hash_bytes=len(hashes[0]),
            hashes=b"".join(hashes),
            device_pages=device_pages,
        )
        tracked.opened = self._client.ask(message, self._settings.lookup_timeout_ms / 1000)
        tracked.known_there, tracked.epoch = True, self._client.epoch
        tracked.known = pages
        return tracked.opened

    # Copies.

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM took pages for what was matched: it is loaded. The device's own pages come first in the table."""
        count = external_tokens // self._page_tokens
        if count == 0:
            return
        tracked = self.track(request)
        tracked.lookup = None
        (table,) = blocks.get_block_ids()
        first = tracked.device_pages
        copy = Copy(tracked, first, list(table[first : first + count]), store=False)
        tracked.load, tracked.receiving = copy, True
        load = wire.Load(tracked.slot, first, wire.runs(copy.pages))
        self._copies.begin(copy, load, self._settings.load_timeout_ms / 1000)

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """What this step's ranks must know. Asks to store the pages that the step fills."""
        self._settle()
        for request_id in output.preempted_req_ids or ():
            self._begin_anew(request_id)
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.receiving = False
                if self._client.listening:
                    self._store(tracked, tokens, output.kv_connector_block_state)
        self._budget_s = self._settings.lookup_budget_ms / 1000
        step, self._step = self._step, StepMetadata()
        step.written_through = self._last_store
        step.abandon = self._copies.to_abandon()
        return step

    def _begin_anew(self, request_id: str) -> None:
        """A preempted request has no pages any more."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.lookup, tracked.computes = None, False
            tracked.store_from = tracked.full = 0

    def _store(self, tracked: Tracked, tokens: int, state) -> None:
        request = tracked.request
        # Tokens that are only a guess have no hash; what is computed for them may be written over.
        computed = min(request.num_computed_tokens + tokens, request.num_tokens)
        full = min(computed // self._page_tokens, len(request.block_hashes))
        if full <= tracked.full:
            return
        tracked.full = full
        tables = state.get_block_ids(request.request_id)
        if tables is None or full > min(len(tables[0]), wire.HASHES_MAX):
            return
        if tracked.epoch != self._client.epoch or tracked.opened is None or tracked.opened.failure is not None:
            self._open(tracked, full, full)
        first, tracked.store_from = tracked.store_from, full
        more = request.block_hashes[tracked.known : full]
        tracked.known = max(tracked.known, full)
        copy = Copy(tracked, first, list(tables[0][first:full]), store=True)
        store = wire.Store(
            slot=tracked.slot,
            first_page=first,
            source=wire.runs(copy.pages),
            hash_bytes=len(more[0]) if more else 0,
            more_hashes=b"".join(more),
        )
        tracked.stores += 1
        self._last_store = self._copies.begin(copy, store, self._settings.store_timeout_ms / 1000)

    def _settle(self) -> None:
        for copy in self._copies.settle():
            tracked = copy.owner
            if copy.store:
                self._stored(tracked, copy)
            else:
                self._loaded(tracked, copy)
            self._forget_if_over(tracked)

    def _stored(self, tracked: Tracked, copy: Copy) -> None:
        tracked.stores -= 1
        if copy.answer is None:
            logger.debug("kvferry: a store of %d pages failed: %s", len(copy.pages), copy.failure)
            # The slot is opened anew, and the pages are tried again when the next one is full.
            tracked.opened = None
            tracked.store_from = min(tracked.store_from, copy.first_page)
        if tracked.delayed and not tracked.stores:
            self._step.sent.append(tracked.request.request_id)

    def _loaded(self, tracked: Tracked, copy: Copy) -> None:
        tracked.load = None
        answer = copy.answer
        failed = copy.pages[answer.pages :] if isinstance(answer, wire.LoadAnswer) else copy.pages
        if failed:
            logger.warning(
                "kvferry: %d of %d pages of request %s were not loaded and are computed: %s",
                len(failed),
                len(copy.pages),
                tracked.request.request_id,
                copy.failure or "the load was stopped",
            )
            tracked.computes = True
        self._step.failed_pages.extend(failed)
        self._step.loaded.append(tracked.request.request_id)

    def ranks_reported(self, output: "KVConnectorOutput") -> None:
        """The ranks' words of one step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._copies.ranks_know(report.over)

    def frees_soon(self) -> bool:
        """Whether pages come back shortly that only a store still holds."""
        since = self._copies.frees_since()
        return since is not None and self._client.listening and time.monotonic() - since < FREES_SOON_S

    # The whole cache.

    def reset(self) -> bool:
        """Forgets every page of the leader, within a limit; False when it did not confirm that."""
        for tracked in self._tracked.values():
            tracked.lookup = None
        until = time.monotonic() + RESET_LIMIT_S
        while True:
            question = self._client.ask(wire.Reset(), max(until - time.monotonic(), 0.001))
            question.wait(RESET_LIMIT_S)
            failure = question.failure
            if question.answer is not None:
                return True
            if failure is None or failure.code != wire.Code.LEASED or time.monotonic() > until - 0.1:
                logger.warning("kvferry: the cache was not reset: %s", failure or "no answer came in time")
                return False
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the conversation: the leader forgets this engine."""
        self._client.close()
