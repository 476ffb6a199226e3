"""The side of rank 0, which sends lookups, loads and stores to the leader. The other ranks follow its results."""

import logging
import time
from typing import TYPE_CHECKING

from kvferry.absence import Absence
from kvferry.engine_client import EngineClient
from kvferry.finishes import Finishes
from kvferry.present_namespace import PresentNamespace
from kvferry.resets import Forgetting
from kvferry.sglang import loads
from kvferry.sglang.breaker import Breaker
from kvferry.sglang.counts import Counts
from kvferry.sglang.loads import Ended, Load
from kvferry.sglang.lookups import Lookups
from kvferry.sglang.offloads import Offloads
from kvferry.switch import Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.sglang.abandoned import Abandoned
    from kvferry.sglang.namespaces import Namespaces
    from kvferry.sglang.settings import Settings

logger = logging.getLogger("kvferry")


class LeaderSide:
    """The connection of one engine to its leader. For the scheduler's thread alone."""

    def __init__(
        self,
        settings: "Settings",
        *,
        engine: bytes,
        namespaces: "Namespaces",
        abandoned: "Abandoned",
        weight_changes: "Callable[[], int]",
        counts: Counts | None = None,
        connect: type[EngineClient] = EngineClient,
    ):
        """Begins the connection. ``weight_changes`` counts how often the engine's weights may have changed."""
        self._settings = settings
        self._namespaces = namespaces
        self._weight_changes = weight_changes
        self._known_changes = weight_changes()
        #: The weights have changed without a flush of SGLang's cache: new pages may follow pages of old weights.
        self._mixed = False
        self._switch = Switch(settings.socket_dir)
        self._shown = PresentNamespace(settings.socket_dir, settings.replica)
        self._absence = Absence()
        self._tails_known_of = 0
        self.counts = counts or Counts()
        self.breaker = Breaker()
        self._client = connect(
            settings.socket_dir / "leader",
            engine,
            # Ids also grow over a restart of an engine.
            first_id=time.time_ns() // 1000,
            replica=settings.replica,
            name="SGLang",
            turn=self._watch,
        )
        self._finishes = Finishes(self._client)
        self._forgetting = Forgetting(self._client)
        self._lookups = Lookups(self._client, settings, self._finishes, self.breaker, self.counts)
        self._offloads = Offloads(self._client, settings, self._finishes, abandoned, self.counts)
        self._client.start()

    # The client's thread.

    def _watch(self) -> float | None:
        times = [self._switch.look(), self._absence.look(self._client), self.counts.look()]
        if self._client.listening:
            finds = self._settings.mode != "store" and not self._switch.off
            times.append(self._shown.show(self._namespaces.present if finds else None))
        self._tell_tails()
        return min(at for at in times if at is not None)

    def _tell_tails(self) -> None:
        """Logs once for each leader that it does not find what SGLang looks up most of the time."""
        if not self._client.listening or self._client.epoch == self._tails_known_of:
            return
        self._tails_known_of = self._client.epoch
        if not self._client.finds_tails:
            logger.warning(
                "kvferry: the leader finds no pages where a lookup begins in the middle of a sequence, as it does when "
                "SGLang has the pages before: such lookups miss, and their pages are stored a second time. Start "
                "kvferry up with --page-index true, or with --ratio 1"
            )

    # The scheduler's thread.

    def namespace(self) -> bytes:
        """Returns the namespace of requests; another one after the weights may have changed."""
        if self._weights_changed():
            self._mixed = True
            self.begin_private("the weights of the engine may have changed")
        return self._namespaces.present

    def _weights_changed(self) -> bool:
        known, self._known_changes = self._known_changes, self._weight_changes()
        return self._known_changes != known

    def begin_private(self, why: str) -> None:
        """Begins a private namespace: what was stored before is not found any more."""
        logger.info("kvferry: %s: pages that were stored before are not used any more", why)
        self._forgetting.add(self._namespaces.begin_private())
        # The client's thread shows the new one to readers of events.
        self._client.poke()

    def next_step(self) -> None:
        """Does what is due once in each step. Does not wait."""
        self._finishes.turn()
        self._forgetting.turn()
        self._lookups.next_step()

    def find(self, request: str, hashes: "Sequence[str]") -> int:
        """Returns how many pages can be loaded, from the first hash on."""
        if self._settings.mode == "store" or self._switch.off or not self._client.listening or self.breaker.pauses:
            return 0
        return self._lookups.find(request, hashes, self.namespace())

    def begin_load(self, request: str, hashes: bytes, pages: list[int], after: int) -> Load | None:
        """Requests a load of pages that a lookup of the request has found; None without such a lookup."""
        if self.breaker.pauses:
            # A request of the same step may have failed: each would wait as long.
            self._lookups.drop(request)
            return None
        lookup = self._lookups.take(request, hashes, self.namespace())
        if lookup is None:
            return None
        return loads.begin(self._client, self._settings, request, lookup, pages, after)

    def end_load(self, load: Load) -> tuple[Ended, str]:
        """Waits for the end of a load, until its deadline. Returns how it ended, and why it failed."""
        ended, why = loads.end(self._client, load)
        self._finishes.finish(load.lookup.slot, load.lookup.epoch)
        self.counts.loaded(load.pending, load.pages, whole=ended == Ended.DONE)
        return ended, why

    def loaded(self, failed: list[tuple[Load, str]]) -> None:
        """Records the end of all loads that were waited for together, once their pages are quiet.

        ``failed``: those that are not whole, and why.
        """
        if not failed:
            self.breaker.worked()
            return
        pause_s = self.breaker.failed()
        for load, why in failed:
            logger.warning(
                "kvferry: %d pages of request %s were not loaded and %s: %s. No lookups for %.0f s",
                load.pages,
                load.request,
                "the request is aborted" if self._settings.failed_load == "abort" else "are computed",
                why,
                pause_s,
            )

    def offload(self, hashes: bytes, pages: list[int], after: int) -> None:
        """Stores the pages of a node."""
        if self._settings.mode == "load" or self._switch.off:
            self._offloads.fail()
            return
        self._offloads.begin(self._lookups.slot(), hashes, pages, self.namespace(), after)

    def fail_offloads(self, count: int) -> None:
        """Adds offloads that have failed, until there are ``count``."""
        while len(self._offloads) < count:
            self._offloads.fail()

    def ended_offloads(self) -> int:
        """Returns how many results can be taken."""
        return self._offloads.turn()

    def take_offload(self) -> tuple[bool, int]:
        """Returns the oldest result, and the id of a store that the other ranks must abandon."""
        return self._offloads.take()

    def reset(self) -> list[int]:
        """Ends all transfers; returns the requests that every rank must abandon."""
        if self._weights_changed() or self._mixed or not self._settings.keep_on_flush:
            self.begin_private("SGLang's cache was flushed")
        self._mixed = False
        self._lookups.drop_all()
        # The last step, because its result must not be lost.
        return self._offloads.end_all()

    def abandon_all(self) -> list[int]:
        """Ends all stores without the leader; returns the requests that every rank must abandon."""
        return self._offloads.abandon_all()

    def close(self) -> None:
        """Ends all transfers, and closes the connection."""
        self._lookups.drop_all()
        self._offloads.end_all()
        self._client.close()
        self._shown.close()
