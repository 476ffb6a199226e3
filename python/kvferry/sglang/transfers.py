"""The transfers of one rank: what SGLang's interface requests, in pages and hashes.

SGLang calls every rank in the same order with pages of the same requests, and a verdict must be the same on all ranks:
rank 0 decides, and :class:`kvferry.sglang.ranks.Ranks` carries its results. Works are numbered on every rank alike; a
copy starts when each rank has reported the number of its pages as written.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.sglang.loads import Ended, Load
from kvferry.sglang.lookups import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.rank import RankSession
    from kvferry.sglang.abandoned import Abandoned
    from kvferry.sglang.leader import LeaderSide
    from kvferry.sglang.ranks import Ranks

logger = logging.getLogger("kvferry")


@dataclass(eq=False)
class _Begun:
    """A load: the id of its request to the leader, 0 if there is none, and on rank 0 the request itself."""

    number: int = 0
    load: Load | None = None


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
        at_once: bool = False,
    ):
        """``written`` reports everything that was submitted to the device so far as the work of a number.

        ``at_once``: the loads of a batch run at the same time, and a failed one aborts the requests of the batch that
        load, because SGLang must know of each load at once whether it computes the request.
        """
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
        self._at_once = at_once
        #: Requests whose load ended in this batch, and the number of the batch.
        self._loaded: set[str] = set()
        self._batch = -1
        #: Loads of this batch that run, by request: the same ones on every rank. Empty unless they run at once.
        self._running: dict[str, _Begun] = {}
        #: Batches with a load that failed, and whose end SGLang has not taken.
        self._failed_batches: set[int] = set()

    def find(self, request: str, hashes: "Sequence[str]") -> list[int]:
        """Returns the numbers of pages, from the first on, that can be loaded. Other ranks than 0 allow all."""
        if self._is_faulty:
            return []
        if self._leader is None:
            return list(range(1, len(hashes) + 1))
        try:
            return list(range(1, self._leader.find(request, hashes) + 1))
        except Exception:
            self._failed("a lookup")
            return []

    def load(self, request: str, hashes: "Sequence[str]", pages: list[int] | None) -> bool:
        """Loads pages, and waits; returns whether all of them are in place on every rank.

        ``pages`` is None where the engine's slots do not form pages. Nothing is copied after a result of False. If the
        loads of a batch run at once, this call does not wait; True then says that the load has begun.

        Raises:
            Unconfirmed: the pages may not be used again, and cannot be kept.
        """
        after = self._next_work()
        if not self._agreed(hashes, pages):
            return False
        begun = self._begin_load(request, hashes, pages, after)
        if self._at_once:
            (begun.number,) = self._ranks.of_first([begun.number])
            if begun.number:
                self._running[request] = begun
            return bool(begun.number)
        whole = self._end_loads([begun])
        if whole:
            self._loaded.add(request)
        return whole

    def _begin_load(self, request: str, hashes: "Sequence[str]", pages: list[int] | None, after: int) -> _Begun:
        if self._leader is None or pages is None or self._is_faulty:
            return _Begun()
        try:
            load = self._leader.begin_load(request, packed(hashes), pages, after)
        except Exception:
            self._failed("a load")
            return _Begun()
        return _Begun() if load is None else _Begun(load.pending.id, load)

    def _end_loads(self, begun: "Sequence[_Begun]") -> bool:
        """Waits for loads; returns whether all pages of all of them are in place on every rank."""
        ends = [self._end_load(each) for each in begun]
        of_first = self._ranks.of_first(
            [number for (ended, _), each in zip(ends, begun, strict=True) for number in (int(ended), each.number)]
        )
        outcomes, numbers = of_first[::2], of_first[1::2]
        unknown = [number for outcome, number in zip(outcomes, numbers, strict=True) if outcome == Ended.UNKNOWN]
        if unknown:
            self._abandoned.wait(unknown)
        # No rank uses the pages again before every rank is done with them.
        whole = self._ranks.all(all(outcome == Ended.DONE for outcome in outcomes))
        failed = [(each.load, why) for (_, why), each in zip(ends, begun, strict=True) if each.load is not None and why]
        if self._leader is not None and (whole or failed):
            self._leader.loaded(failed)
        return whole

    def _end_load(self, begun: _Begun) -> tuple[Ended, str]:
        """Returns how a load ended, and why it failed: no reason on other ranks than 0, and if it never began."""
        if self._leader is None or begun.load is None:
            return Ended.FAILED, ""
        try:
            return self._leader.end_load(begun.load)
        except Exception:
            self._failed("a load")
            return Ended.UNKNOWN, ""

    def start_batch(self) -> int:
        """Returns the number of a batch with loads; -1 for one without. Waits for loads that run.

        Raises:
            Unconfirmed: the pages may not be used again, and cannot be kept.
        """
        if not self._loaded and not self._running:
            return -1
        running, self._running = list(self._running.values()), {}
        whole = not running or self._end_loads(running)
        self._loaded.clear()
        self._batch += 1
        if not whole:
            self._failed_batches.add(self._batch)
        return self._batch

    def finish_batch(self, number: int) -> bool:
        """Whether all loads of a batch have succeeded. With False, SGLang aborts its requests that load."""
        failed = number in self._failed_batches
        self._failed_batches.discard(number)
        return not failed

    def cancel(self, request: str) -> bool:
        """Whether a load was for a batch that has not started; nothing writes to its pages any longer.

        Raises:
            Unconfirmed: the pages may not be used again, and cannot be kept.
        """
        if (running := self._running.pop(request, None)) is not None:
            self._end_loads([running])
            return True
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
                if agreed and pages is not None and not self._is_faulty:
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
        except Exception:
            self._failed("a step")
        # SGLang keeps the pages of offloads until their results are taken, whatever else has failed.
        try:
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
        running, self._running = list(self._running.values()), {}
        if running:
            self._end_loads(running)
        requests: list[int] = []
        if self._leader is not None:
            try:
                requests = self._leader.reset()
            except Exception:
                # The other ranks wait for the result. Stores that may still run are ended like unknown ones.
                self._failed("a flush")
                requests = self._leader.abandon_all()
        self._end(requests)

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
        self._failed_batches.clear()

    def _next_work(self) -> int:
        self._work += 1
        try:
            self._written(self._work)
        except Exception:
            # A copy of these pages then ends by its deadline.
            self._failed("the report of a work")
        return self._work

    @property
    def _is_faulty(self) -> bool:
        return bool(self.fault or self._session.fault)

    def _agreed(self, hashes: "Sequence[str]", pages: list[int] | None) -> bool:
        """Whether all ranks have the same pages for these hashes: rank 0 names its own for all of them.

        A rank that cannot report its work agrees to nothing: a copy would wait for the report.
        """
        ends = (int(hashes[0], 16), int(hashes[-1], 16), len(hashes)) if hashes else ()
        named = pages if pages is not None and not self._is_faulty else [-1 - self._ranks.rank]
        return self._ranks.same([*ends, *named])

    def _failed(self, what: str) -> None:
        """Records the current exception: nothing begins any more."""
        known, self.fault = self.fault, what
        if not known:
            logger.exception(
                "kvferry: %s failed: requests run without the cache until the engine is started again", what
            )
