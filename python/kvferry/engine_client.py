"""The client of an engine's scheduler: lookups, loads, stores and the ends of requests, as typed calls."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvferry import engine_messages, wire
from kvferry.client import Client, Later, PendingRequest, Watch
from kvferry.served import Part

#: Time after a copy's deadline in which the leader may still report its end: the leader's fence of 10 s, and 2 s more.
FENCE_S = 12.0
#: Receives an ended request: on the client's thread, or inside the call if the request is refused.
Ended = Callable[[PendingRequest], None] | None


class Sends(Protocol):
    """Sends requests: a :class:`kvferry.client.Client`."""

    def request(
        self,
        message: msgspec.Struct | Later,
        timeout_s: float,
        *,
        grace_s: float = 0.0,
        until: Ended = None,
        urgent: bool = False,
        wake: bool = True,
        identity: int | None = None,
    ) -> PendingRequest:
        """Sends a request; returns its handle at once."""


class EngineRequests:
    """The requests of an engine. Each call sends one request and returns its handle at once.

    Sequences of hashes and pages are copied in the call, and may be changed afterwards. A load or a store may use its
    pages again only after an answer, or after a failure with ``over``. See :class:`kvferry.client.Failure`.
    """

    def lookup(
        self: Sends,
        slot: int,
        hashes: Sequence[bytes],
        *,
        namespace: bytes = b"",
        have_pages: int = 0,
        limit_pages: int | None = None,
        timeout_s: float,
    ) -> PendingRequest:
        """Finds the pages of a prompt, and holds them for the slot, a number of the running request.

        ``hashes``: of all full pages, 16 to 64 bytes each and equally long, at least one. ``have_pages``: pages, from
        the first one on, that the engine has itself. ``limit_pages``: where a hit ends at the latest; None: with the
        last hash. The answer is a :class:`kvferry.wire.LookupAnswer`.
        """
        message = engine_messages.lookup(slot, hashes, namespace, have_pages, limit_pages)
        return self.request(message, timeout_s)

    def load(
        self: Sends,
        slot: int,
        parts: Sequence[Part],
        *,
        after: int = 0,
        timeout_s: float,
        grace_s: float = 0.0,
        until: Ended = None,
        identity: int | None = None,
    ) -> PendingRequest:
        """Copies pages that a lookup found to the device pages that ``parts`` name.

        ``after``: the load starts when every rank has reported this work as written. ``identity``: the id of a load of
        the same parts and the same work that the leader has refused as busy, to send it again. The answer is a
        :class:`kvferry.wire.LoadAnswer`.
        """
        message = engine_messages.load(slot, parts, after)
        return self.request(message, timeout_s, grace_s=grace_s, until=until, identity=identity)

    def store(
        self: Sends,
        slot: int,
        parts: Sequence[Part],
        *,
        more: Sequence[bytes] = (),
        more_from: int = 0,
        after: int = 0,
        timeout_s: float,
        grace_s: float = 0.0,
        until: Ended = None,
        wake: bool = True,
        identity: int | None = None,
    ) -> PendingRequest:
        """Copies the device pages that ``parts`` name to kvferry.

        The copies start when every rank has reported the id of this request as written, or the number ``after`` of
        earlier work. ``more``: hashes of pages that the lookup did not name, from position ``more_from`` on. Without
        ``wake`` the store is sent with the next request, or by ``poke``, so that the stores of a step share a message.
        ``identity``: as for a load. The answer is a :class:`kvferry.wire.StoreAnswer`.
        """
        message = engine_messages.store(slot, parts, more, more_from, after)
        return self.request(message, timeout_s, grace_s=grace_s, until=until, wake=wake, identity=identity)

    def finish(self: Sends, slot: int, *, timeout_s: float, until: Ended = None) -> PendingRequest:
        """Ends a running request: frees its slot and its holds."""
        return self.request(wire.Finish(slot), timeout_s, until=until)

    def cancel_stores(self: Sends, slot: int | None = None, *, timeout_s: float) -> PendingRequest:
        """Stops the stores of a slot, or of the whole engine. The answer comes when they have ended."""
        return self.request(wire.CancelStores(slot), timeout_s, urgent=True)

    def read_events(
        self: Sends,
        epoch: int = 0,
        from_: int = 0,
        *,
        cursor: int | None = None,
        namespace: bytes | None = None,
        most: int = 4096,
        wait_s: float = 0.0,
        timeout_s: float,
        until: Ended = None,
    ) -> PendingRequest:
        """Reads which pages the leader's tiers gained and lost, from record ``from_`` of the leader of ``epoch`` on.

        ``cursor``: 0 to begin with the pages that are present, then that of the last answer; ``None``: only changes.
        ``namespace``: only pages of this one. ``wait_s``: time, up to 30 s, for which the answer waits for a change; it
        comes ``timeout_s`` later at most. The answer is a :class:`kvferry.wire.Events`.
        """
        message = engine_messages.read_events(epoch, from_, cursor, namespace, most, wait_s)
        return self.request(message, wait_s + timeout_s, until=until)

    def reset(
        self: Sends, namespace: bytes, *, hashes: Sequence[bytes] | None = None, timeout_s: float
    ) -> PendingRequest:
        """Removes the pages of a namespace; with ``hashes``, equally long, only the pages that have one of them.

        The answer is a :class:`kvferry.wire.ResetAnswer`.
        """
        return self.request(engine_messages.reset(namespace, hashes), timeout_s)


class EngineClient(EngineRequests, Client):
    """The connection of an engine's scheduler to the leader whose socket is in ``directory``.

    ``engine``: 16 random bytes, drawn at each start, the same as that of its ranks. ``first_id``: above every id that
    an engine of the same name has used, for example from the clock. ``watch`` sees every request and its end.
    """

    def __init__(
        self,
        directory: Path,
        engine: bytes,
        *,
        first_id: int,
        replica: int = 0,
        name: str = "",
        turn: Callable[[], float | None] | None = None,
        watch: Watch | None = None,
    ):
        hello = engine_messages.engine_hello(engine, replica, name)
        super().__init__(directory, hello, first_id=first_id, turn=turn, watch=watch)

    @property
    def finds_tails(self) -> bool:
        """Whether the leader finds pages where the first hash of a lookup is in the middle of a sequence."""
        return bool(self.features & wire.FEATURE_TAILS)
