"""The transfers of one rank: what SGLang's interface requests, in pages and hashes.

SGLang calls every rank in the same order with pages of the same requests, and a verdict must be the same on all ranks:
rank 0 decides, and :class:`kvferry.sglang.ranks.Ranks` carries its results. Works are numbered on every rank alike; a
copy starts when each rank has reported the number of its pages as written.
"""

import logging
from typing import TYPE_CHECKING

from kvferry.sglang.loads import Ended
from kvferry.sglang.lookups import EVENT_BYTES, HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.rank import RankSession
    from kvferry.sglang.abandoned import Abandoned
    from kvferry.sglang.leader import LeaderSide
    from kvferry.sglang.ranks import Ranks

logger = logging.getLogger("kvferry")


class Transfers:
    """The transfers of one rank. ``leader``: on rank 0 alone. For the scheduler's thread alone."""

    #: A permanent failure, after which nothing is looked up, loaded or stored; empty without one.
    fault = ""

    def __init__(
        self,
        ranks: "Ranks",
        session: "RankSession",
        abandoned: "Abandoned",
        leader: "LeaderSide | None",
        *,
        offloads_max: int,
        written: "Callable[[int], None]",
    ):
        """``written`` reports everything that was submitted to the device so far as the work of a number."""
        self._ranks = ranks
        self._session = session
        self._abandoned = abandoned
        self._leader = leader
        self._offloads_max = offloads_max
        self._written = written
        #: Number of the last work.
        self._work = 0
        #: Offloads whose result SGLang has not taken: the same number on every rank.
        self._offloads = 0
        #: Requests whose load ended in this batch, and the number of the batch.
        self._loaded: set[str] = set()
        self._batch = -1

    def find(self, request: str, hashes: "Sequence[str]") -> list[int]:
        """Returns the numbers of pages, from the first on, that can be loaded. Other ranks than 0 allow all."""
        if self.fault or self._session.fault:
            return []
        if self._leader is None:
            return list(range(1, len(hashes) + 1))
        try:
            return list(range(1, self._leader.find(request, packed(hashes)) + 1))
        except Exception:
            self._failed("a lookup")
            return []

    def load(self, request: str, hashes: "Sequence[str]", pages: list[int] | None) -> bool:
        """Loads pages, and waits; returns whether all of them are in place on every rank.

        ``pages`` is None where the engine's slots do not form pages. Nothing is copied after a result of False.

        Raises:
            Unconfirmed: the pages may not be used again, and cannot be kept.
        """
        after = self._next_work()
        if not self._agreed(hashes, pages):
            return False
        ended, number, why = Ended.FAILED, 0, ""
        if self._leader is not None and pages is not None:
            try:
                if not self.fault:
                    ended, number, why = self._leader.load(request, packed(hashes), pages, after)
            except Exception:
                self._failed("a load")
                if self._leader.loading:
                    # It may run.
                    ended, number = Ended.UNKNOWN, self._leader.loading
        of_first, number = self._ranks.of_first([int(ended), number])
        if of_first == Ended.UNKNOWN:
            self._abandoned.wait([number])
        # No rank uses the pages again before every rank is done with them.
        whole = self._ranks.all(of_first == Ended.DONE)
        if self._leader is not None and (whole or why):
            self._leader.loaded(request, len(hashes), why)
        if whole:
            self._loaded.add(request)
        return whole

    def start_batch(self) -> int:
        """Returns the number of a batch with loads; -1 for one without."""
        if not self._loaded:
            return -1
        self._loaded.clear()
        self._batch += 1
        return self._batch

    def cancel(self, request: str) -> bool:
        """Whether a load ended for a batch that has not started."""
        if request not in self._loaded:
            return False
        self._loaded.discard(request)
        return True

    def offload(self, hashes: "Sequence[str]", pages: list[int] | None) -> bool:
        """Begins to store pages; False where too many offloads wait. The result is the same on every rank."""
        if self._offloads >= self._offloads_max:
            return False
        self._offloads += 1
        after = self._next_work()
        agreed = self._agreed(hashes, pages)
        if self._leader is not None:
            try:
                if agreed and pages is not None and not (self.fault or self._session.fault):
                    self._leader.offload(packed(hashes), pages, after)
                    return True
            except Exception:
                self._failed("a store")
            self._leader.fail_offloads(self._offloads)
        return True

    def ended_offloads(self) -> int:
        """Returns how many results can be taken. SGLang takes the least of all ranks. Called once in each step."""
        if self._leader is None:
            return self._offloads
        try:
            self._leader.next_step()
            return self._leader.ended_offloads()
        except Exception:
            self._failed("a step")
            return 0

    def take_offload(self) -> bool:
        """Returns the oldest result. SGLang takes as many on every rank.

        Raises:
            Unconfirmed: the pages may not be used again, and cannot be kept.
        """
        self._offloads -= 1
        result, request = self._leader.take_offload() if self._leader is not None else (False, 0)
        stored, request = self._ranks.of_first([int(result), request])
        if request and self._leader is None:
            self._abandoned.wait([request])
        if request:
            self._ranks.all(True)
        return bool(stored)

    def reset(self) -> None:
        """Ends all transfers. Pages that were stored before are not found any more, unless the settings keep them.

        Raises:
            Unconfirmed: the pages may not be used again, and cannot be kept.
        """
        self._end(self._leader.reset() if self._leader is not None else [])

    def close(self) -> None:
        """Ends all transfers, and closes the connections. No collective: other ranks may have ended."""
        if self._leader is not None:
            self._leader.close()
        self._session.close()

    def _end(self, requests: list[int]) -> None:
        requests = self._ranks.list_of_first(requests)
        if requests:
            self._abandoned.wait(requests)
            self._ranks.all(True)
        self._offloads = 0
        self._loaded.clear()

    def _next_work(self) -> int:
        self._work += 1
        try:
            self._written(self._work)
        except Exception:
            # A copy of these pages then ends by its deadline.
            self._failed("the report of a work")
        return self._work

    def _agreed(self, hashes: "Sequence[str]", pages: list[int] | None) -> bool:
        """Whether all ranks have the same pages for these hashes: rank 0 names its own for all of them."""
        ends = (int(hashes[0], 16), int(hashes[-1], 16), len(hashes)) if hashes else ()
        return self._ranks.same([*ends, *(pages if pages is not None else [-1 - self._ranks.rank])])

    def _failed(self, what: str) -> None:
        """Records the current exception: nothing begins any more."""
        known, self.fault = self.fault, what
        if not known:
            logger.exception(
                "kvferry: %s failed: requests run without the cache until the engine is started again", what
            )


def packed(hashes: "Sequence[str]") -> bytes:
    """Returns SGLang's hashes as bytes, the first 8 of each last: SGLang's events name a page by these.

    Raises:
        ValueError: for a hash that has not 32 bytes.
    """
    found = [bytes.fromhex(each) for each in hashes]
    if wrong := [each for each in found if len(each) != HASH_BYTES]:
        raise ValueError(f"{len(wrong)} of {len(hashes)} hashes have {len(wrong[0])} bytes, not {HASH_BYTES}")
    return b"".join(each[EVENT_BYTES:] + each[:EVENT_BYTES] for each in found)
