"""Lookups of rank 0: which pages of a waiting request kvferry can load. Remembered, because SGLang calls often."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.finishes import Finishes
from kvferry.sglang.breaker import Breaker
from kvferry.sglang.counts import Counts
from kvferry.wire import Code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.sglang.settings import Settings

#: Age up to which found pages may be loaded. The leader holds them for 30 s.
FRESH_S = 15.0
#: Age up to which a lookup that found nothing is not repeated: another request may have stored the pages since.
MISS_S = 1.0
#: Age at which a lookup that no load has used is dropped: its request was aborted, or waits for long.
DROP_S = 30.0
#: Most lookups that are remembered, and most hashes in all of them: 32 bytes each, 128 MiB. Beyond that the oldest
#: lookup is dropped.
LOOKUPS_MAX = 4096
HASHES_MAX = 4 << 20
#: Bytes of one of SGLang's page hashes.
HASH_BYTES = 32
#: Bytes of a hash that are the number of its page in SGLang's events.
EVENT_BYTES = 8


@dataclass(eq=False)
class Lookup:
    """One lookup. ``hashes`` are packed. Their number and the last one identify them, because they are chained."""

    hashes: bytes
    count: int
    last: str
    slot: int
    namespace: bytes
    pending: PendingRequest
    #: Epoch and connection at the request, and its time.
    epoch: int
    link: int
    requested_at: float
    #: The slot was ended: nothing was found.
    finished: bool = False
    counted: bool = False

    @property
    def pages(self) -> int:
        """Pages that can be loaded, from the first hash on."""
        answer = self.pending.answer
        return answer.hit_pages if isinstance(answer, wire.LookupAnswer) else 0

    @property
    def age_s(self) -> float:
        """Time since the request."""
        return time.monotonic() - self.requested_at


class Lookups:
    """The remembered lookups, one for each request. For the scheduler's thread alone."""

    def __init__(
        self, client: EngineClient, settings: "Settings", finishes: Finishes, breaker: Breaker, counts: Counts
    ):
        self._client = client
        self._settings = settings
        self._finishes = finishes
        self._breaker = breaker
        self._counts = counts
        #: By request, the oldest first.
        self._lookups: dict[str, Lookup] = {}
        self._hash_bytes = 0
        self._left_s = 0.0
        self._next_slot = time.time_ns() // 1000

    def next_step(self) -> None:
        """Renews the time that one step of the scheduler may wait, and drops lookups that nothing uses."""
        self._left_s = self._settings.step_budget_ms / 1000
        while self._lookups:
            request = next(iter(self._lookups))
            if self._lookups[request].age_s < DROP_S:
                return
            self.drop(request)

    def slot(self) -> int:
        """Returns a number that no earlier slot has."""
        self._next_slot += 1
        return self._next_slot

    def find(self, request: str, hashes: "Sequence[str]", namespace: bytes) -> int:
        """Returns how many pages can be loaded, from the first hash on. Waits for the budget at most.

        Pages that reach host memory only after the deadline of a load are computed.
        """
        lookup = self._lookups.get(request)
        if lookup is None or not self._serves(lookup, hashes, namespace):
            self.drop(request)
            lookup = self._request(request, hashes, namespace)
        if not lookup.pending.done and self._left_s > 0:
            before = time.monotonic()
            lookup.pending.wait(min(self._settings.lookup_budget_ms / 1000, self._left_s))
            self._left_s -= time.monotonic() - before
        if not lookup.pending.done:
            return 0
        self._count(lookup)
        failure = lookup.pending.failure
        if failure is not None and failure.code == Code.DEADLINE and not self._breaker.pauses:
            self._breaker.failed()
        if not lookup.pages or self._takes_too_long(lookup):
            self._finish(lookup)
            return 0
        return lookup.pages

    def _takes_too_long(self, lookup: Lookup) -> bool:
        answer = lookup.pending.answer
        ready_in_ms = answer.ready_in_ms if isinstance(answer, wire.LookupAnswer) else None
        return ready_in_ms is not None and ready_in_ms >= self._settings.load_timeout_ms

    def take(self, request: str, hashes: bytes, namespace: bytes) -> Lookup | None:
        """Removes and returns the lookup that has found these pages; None without one that may still be used."""
        lookup = self._lookups.get(request)
        if lookup is None:
            return None
        found = lookup.hashes.startswith(hashes) and lookup.pages * HASH_BYTES >= len(hashes)
        fresh = lookup.age_s < FRESH_S and lookup.link == self._client.link
        if not (found and fresh and lookup.namespace == namespace) or lookup.finished:
            self.drop(request)
            return None
        self._forget(request)
        return lookup

    def drop(self, request: str) -> None:
        """Forgets a lookup, and ends its slot at the leader."""
        lookup = self._lookups.get(request)
        if lookup is not None:
            self._forget(request)
            self._count(lookup)
            self._finish(lookup)

    def drop_all(self) -> None:
        """Forgets all lookups."""
        for request in list(self._lookups):
            self.drop(request)

    def _count(self, lookup: Lookup) -> None:
        if not lookup.counted:
            lookup.counted = True
            self._counts.looked_up(lookup.pending)

    def _finish(self, lookup: Lookup) -> None:
        if not lookup.finished:
            lookup.finished = True
            # A lookup without an answer is sent again to the next leader.
            answered = lookup.pending.done and lookup.pending.failure is None
            self._finishes.finish(lookup.slot, lookup.epoch if answered else None)

    def _forget(self, request: str) -> None:
        self._hash_bytes -= len(self._lookups.pop(request).hashes)

    def _serves(self, lookup: Lookup, hashes: "Sequence[str]", namespace: bytes) -> bool:
        named = (len(hashes), hashes[-1]) == (lookup.count, lookup.last)
        if lookup.link != self._client.link or not named or lookup.namespace != namespace:
            return False
        return not lookup.pending.done or lookup.age_s < (MISS_S if lookup.finished else FRESH_S)

    def _request(self, request: str, hashes: "Sequence[str]", namespace: bytes) -> Lookup:
        slot, found = self.slot(), packed(hashes)
        pending = self._client.lookup(
            slot, split(found), namespace=namespace, timeout_s=self._settings.lookup_timeout_ms / 1000
        )
        lookup = Lookup(
            found,
            len(hashes),
            hashes[-1],
            slot,
            namespace,
            pending,
            self._client.epoch,
            self._client.link,
            time.monotonic(),
        )
        self._lookups[request] = lookup
        self._hash_bytes += len(found)
        while len(self._lookups) > LOOKUPS_MAX or (
            self._hash_bytes > HASHES_MAX * HASH_BYTES and len(self._lookups) > 1
        ):
            self.drop(next(iter(self._lookups)))
        return lookup


def packed(hashes: "Sequence[str]") -> bytes:
    """Returns SGLang's hashes as bytes, the first 8 of each last: SGLang's events name a page by these.

    Raises:
        ValueError: for a hash that has not 32 bytes.
    """
    found = [bytes.fromhex(each) for each in hashes]
    if wrong := [each for each in found if len(each) != HASH_BYTES]:
        raise ValueError(f"{len(wrong)} of {len(hashes)} hashes have {len(wrong[0])} bytes, not {HASH_BYTES}")
    return b"".join(each[EVENT_BYTES:] + each[:EVENT_BYTES] for each in found)


def split(hashes: bytes) -> list[bytes]:
    """Returns packed hashes one by one."""
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
