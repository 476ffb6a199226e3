"""What the scheduler's side knows about each request of the engine."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.client import PendingRequest
from kvferry.trtllm.hashes import PageHashes

if TYPE_CHECKING:
    from kvferry.trtllm.loads import Load


@dataclass(eq=False)
class Tracked:
    """One request of the engine whose pages have hashes."""

    #: The engine's number of the request, and the slot of it at the leader.
    request: int
    slot: int
    hashes: PageHashes
    #: The engine's pages of the sequence, in order.
    pages: list[int] = field(default_factory=list)
    #: Pages that the engine had itself when it matched the prompt, and pages behind them that kvferry has.
    device_pages: int = 0
    found: int = 0
    #: Pages were promised to the engine, which has not yet said where to put them.
    promised: bool = False
    #: A lookup was sent for the slot, so that the leader may have it open.
    known_there: bool = False
    #: The request that opened the slot (None: open the slot again), the leader's epoch at that time, and the number of
    #: hashes that the slot has.
    opened: PendingRequest | None = None
    epoch: int = 0
    known: int = 0
    load: "Load | None" = None
    #: Pages that a load has brought: they need no store while the leader is the same.
    loaded: range = range(0)
    #: The first page that no store has named.
    next_page: int = 0
    #: Tokens whose KV is written by the last step that was scheduled, and pages that are full by then.
    written: int = 0
    full: int = 0
    #: A step has run the request.
    ran: bool = False

    def opens(self, lookup: PendingRequest, epoch: int, known: int) -> None:
        """Records a lookup that opens the slot at the leader of this epoch, with so many hashes."""
        self.opened, self.epoch, self.known, self.known_there = lookup, epoch, known, True
