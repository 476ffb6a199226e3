"""Stores that are sent several in one message: those of one step of the engine.

Each remains a request of its own, with its id, deadline and answer. The peer answers the message once, after its last
store has ended.
"""

import collections
from collections.abc import Callable, Iterator

import msgspec

from kvferry import limits, wire
from kvferry.requests import PendingRequest
from kvferry.wire import Code, Kind

#: Longest body of a store that shares a message, and most bytes of all of them. Longer ones have little to gain.
STORE_BYTES_MAX = 4 << 10
BATCH_BYTES_MAX = 64 << 10
#: Most bytes that a message has for each store beside the store's body: names of fields, id and deadline.
_AROUND_BYTES = 48


class StoreBatches:
    """The messages with several stores that wait for their answer. For the client's thread alone.

    While ``alone`` returns true there are none: each store has a message of its own.
    """

    def __init__(self, *, alone: "Callable[[], bool] | None" = None) -> None:
        #: At most as many as the connection has request credits.
        self._open: dict[int, list[PendingRequest]] = {}
        self._alone = alone or (lambda: False)
        #: The peer knows messages with several stores.
        self._known = True
        #: Stores without an answer beyond the first of each message.
        self.more = 0

    def lost(self) -> None:
        """Forgets the messages of a connection that broke. Their stores are sent again over the next one."""
        self._open.clear()
        self.more = 0
        self._known = True

    def take(
        self, queue: collections.deque[PendingRequest], bytes_max: int, peer: dict[str, int]
    ) -> list[PendingRequest]:
        """Takes the stores at the start of a queue that fit into one message; a single one is left in the queue.

        ``peer`` has its limits: :func:`kvferry.limits.of_peer`.
        """
        taken: list[PendingRequest] = []
        room = min(bytes_max, BATCH_BYTES_MAX, peer["body_bytes"])
        left = {name: peer[name] for name in limits.OF_ALL_STORES}
        while self._known and not self._alone() and queue and len(taken) < peer["stores"]:
            store = queue[0]
            if store.done:
                # Its caller no longer waits.
                queue.popleft()
                continue
            size, sizes = len(store.body) + _AROUND_BYTES, store.sizes
            if store.kind != Kind.STORE or store.alone or size > min(STORE_BYTES_MAX, room):
                break
            if sizes["page_items"] > peer["page_items"] or any(sizes[name] > most for name, most in left.items()):
                break
            queue.popleft()
            room -= size
            left = {name: most - sizes[name] for name, most in left.items()}
            taken.append(store)
        if len(taken) == 1:
            queue.appendleft(taken.pop())
        return taken

    def message(self, identity: int, stores: list[PendingRequest], now: float) -> tuple[int, bytes]:
        """Returns the deadline, in milliseconds from now, and the body of a message with these stores."""
        self._open[identity] = stores
        self.more += len(stores) - 1
        numbered = [
            wire.NumberedStore(store.id, max(int((store.deadline - now) * 1000), 1), msgspec.Raw(store.body))
            for store in stores
        ]
        return max(each.deadline_ms for each in numbered), wire.body_of(wire.Stores(numbered))

    def ends(
        self, identity: int, body: msgspec.Struct | None
    ) -> Iterator[tuple[PendingRequest, wire.StoreAnswer | wire.Error | None]]:
        """Yields the stores of an answered message, each with its end; nothing if ``identity`` is of no such message.

        ``body``: None if it cannot be read. A store without an end must be sent again, alone: the peer has refused the
        message as a whole, or its answer cannot be read or is of another kind.
        """
        stores = self._open.pop(identity, [])
        self.more -= max(len(stores) - 1, 0)
        if stores and isinstance(body, wire.Error):
            self._known = self._known and body.code != Code.UNKNOWN_KIND
        results = body.results if isinstance(body, wire.StoresAnswer) else []
        found = [each for result in results if (each := result.answer or result.error) is not None]
        if len(found) == len(stores):
            yield from zip(stores, found, strict=True)
        else:
            for store in stores:
                store.alone = True
                yield store, None
