"""Record of a request of the engine, on the scheduler's side.

Pages of a sequence are counted in units of the hashes (:attr:`kvferry.served.Served.hash_tokens`), which are the pages
of an engine with one group.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.served import StoreCursor
from kvferry.vllm.inflight import Copy
from kvferry.vllm.per_request import PerRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False)
class Lookup:
    """A lookup request and its parameters."""

    pending: PendingRequest
    requested_at: float
    link: int
    device_pages: int
    pages: int
    #: The lookup was sent before vLLM considered the request.
    early: bool = False
    #: The outcome is part of the statistics.
    counted: bool = False

    def found(self) -> int:
        """Pages at the start of the sequence that the device and kvferry have together; 0 without an answer."""
        answer = self.pending.answer
        return self.device_pages + answer.hit_pages if isinstance(answer, wire.LookupAnswer) else 0


@dataclass(eq=False)
class Tracked:
    """One request of the engine."""

    request: "Request"
    slot: int
    #: None when the weights of its adapter are unknown: the request neither looks up nor stores pages.
    namespace: bytes | None
    #: What was named in stores.
    stored: StoreCursor
    settings: PerRequest = field(default_factory=PerRequest)
    lookup: Lookup | None = None
    #: Pages that the device had when vLLM last requested the matched tokens.
    device_pages: int = 0
    #: The request is computed without further lookups: one was not answered in time, or a load failed.
    computes: bool = False
    #: A lookup was sent for the slot, so that the leader may have it open.
    known_there: bool = False
    #: The request that opened the slot (None: open the slot again), the leader's epoch at that time, and the number of
    #: page hashes that the slot has.
    opened: PendingRequest | None = None
    epoch: int = 0
    known: int = 0
    #: A step ran the request since vLLM last gave it pages. Until then its computed tokens may be of a failed load.
    ran: bool = False
    #: Tokens that the request had computed when a step first ran it: of the device, and of a load.
    given_tokens: int = 0
    #: Pages that were full at the last check.
    full: int = 0
    #: Computed tokens below which no store is due, whatever the step; 0: unknown.
    store_at: int = 0
    #: Whether stores have named every page of the prompt, so that only generated pages are left.
    generates: bool = False
    #: Pages whose tokens were passed on for KV events.
    described: int = 0
    #: The first pages of the request are from before a reset: pages that are computed after them are not stored.
    mixed: bool = False
    #: The request began with pages of the device that may be from before a reset, or from other weights of its adapter.
    on_old_pages: bool = False
    #: In verify mode: the checksums that were ordered, by group and position, 0.4 KB for each chosen page of the
    #: sequence; the pages that were named in orders; and the tokens in units of the hashes up to which they reach.
    sums: dict[tuple[int, int], Any] = field(default_factory=dict)
    summed: StoreCursor = field(init=False)
    summed_full: int = 0
    load: Copy | None = None
    finished: bool = False
    #: Tokens of the last load that were found on a disk.
    disk_tokens: int = 0
    #: How often the request has lost its pages.
    restarts: int = 0
    #: Why the last lookup or store of the request was skipped, empty if it was not: counted once until it changes.
    not_looked_up: str = ""
    not_stored: str = ""

    def __post_init__(self) -> None:
        self.summed = StoreCursor(self.stored.served)

    def restart(self) -> None:
        """Resets what is known of pages: the request has none."""
        self.stored.restart()
        self.summed.restart()
        self.sums.clear()
        self.full, self.store_at, self.summed_full, self.ran = 0, 0, 0, False
        self.mixed = self.generates = False
        self.restarts += 1


#: Takes the tokens of a request's pages, up to a number of pages, for KV events.
Describe = Callable[[Tracked, int], None]
