"""One side of a conversation with a process of kvferry: hello, credits, heartbeats, deadlines, retries.

A :class:`Session` has the rules, without sockets and threads: it receives connections, messages and the time, and
returns the messages to send. :class:`kvferry.client.Client` runs one on a thread of its own, and
:class:`kvferry.aio.Client` in an event loop.
"""

import collections
import heapq
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvferry import limits, wire
from kvferry.batches import StoreBatches
from kvferry.requests import Failure, PendingRequest
from kvferry.wire import Code, Hello, Kind

logger = logging.getLogger("kvferry")

#: Most requests without an answer; one more is refused at once. With the hashes of 4,096 pages each, their bodies take
#: 512 MiB. A body has at most 8 MiB.
OPEN_MAX = 4096
#: Bytes of the name of an engine.
ENGINE_BYTES = 16
#: Longest wait for a connection and its welcome.
CONNECT_LIMIT_S = 2.0
#: Pause before the next attempt to connect: doubled by each failed one, up to the second.
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 1.0
#: Most messages that are read before deadlines are looked at and requests are sent.
READ_AT_ONCE = 256
#: Request credits of a connection that are reserved for urgent requests, and byte credits for each of them.
_URGENT_CREDITS = 4
_URGENT_BYTES = 256

#: A message to be sent: header and body.
Message = tuple[bytes, bytes]

#: Requests that are sent once.
_ORDERS = (Kind.DRAIN, Kind.SET_LOG)


class Session:
    """The state of a conversation over its connections. For one thread at a time.

    ``draw`` returns the next id of a request. ``ended`` is called for each request that ends, before its caller knows.
    While ``alone`` returns true each store has a message of its own. ``directory`` is named in errors.

    Raises:
        ValueError: the peer would refuse each hello; names the field, its value and the remedy.
    """

    def __init__(
        self,
        directory: Path,
        hello: Hello,
        draw: Callable[[], int],
        *,
        now: float,
        ended: Callable[[], None] | None = None,
        alone: Callable[[], bool] | None = None,
    ):
        if len(hello.engine) != ENGINE_BYTES:
            raise ValueError(f"engine has {len(hello.engine)} bytes: give {ENGINE_BYTES}")
        if hello.role in ("engine", "rank") and not any(hello.engine):
            raise ValueError(f"engine is zero: give {ENGINE_BYTES} random bytes, such as os.urandom({ENGINE_BYTES})")
        if (size := len(hello.name.encode())) > wire.TEXT_BYTES_MAX:
            raise ValueError(f"name has {size} bytes: give at most {wire.TEXT_BYTES_MAX}")
        self.directory = directory
        self._hello = hello
        self._draw = draw
        self._ended = ended
        #: Requests without an answer, at most :data:`OPEN_MAX`.
        self.open: dict[int, PendingRequest] = {}
        self._unsent: collections.deque[PendingRequest] = collections.deque()
        self._urgent: collections.deque[PendingRequest] = collections.deque()
        self._expiry: list[tuple[float, int]] = []
        #: Number of the present connection; 0 before its welcome.
        self.link = 0
        #: Epoch of the peer's leader, from the last welcome.
        self.epoch = 0
        #: Features that both sides support beyond the version, from the last welcome.
        self.features = 0
        #: When the connection was lost, on the monotonic clock; None while there is one.
        self.lost_at: float | None = now
        #: Limits of the peer, by their names in ``schema/messages.json``, from the last welcome.
        self.limits: dict[str, int] = {}
        #: Those of them that requests can exceed.
        self._limits = limits.of_peer({})
        self._version = wire.VERSION
        self._links = itertools.count(1)
        self._credits = (1, 1)
        #: Bytes of each request that was sent over the present connection and not answered. A request whose caller no
        #: longer waits uses its credits until it is answered.
        self._in_flight: dict[int, int] = {}
        self._in_flight_bytes = 0
        self._batches = StoreBatches(alone=lambda: self._version < 2 or (alone is not None and alone()))
        self._beat_s = 0.0
        #: When the last messages were sent and received over the present connection, and whether a ping was sent since.
        self._sent_at = self._received_at = 0.0
        self._pinged = False

    # Connections.

    def hello(self) -> Message:
        """Returns the first message of a connection."""
        head = wire.header(wire.HELLO_VERSION, Kind.HELLO, 0, int(CONNECT_LIMIT_S * 1000), 0)
        return head, wire.body_of(self._hello)

    def welcomed(self, parts: list[bytes], now: float) -> None:
        """Handles the answer to hello; open requests are sent again over this connection.

        Raises:
            wire.Malformed: for bytes that are no message.
            Failure: for any other answer than a welcome in a version of this side.
        """
        envelope = wire.read(parts)
        welcome = envelope.body
        if not isinstance(welcome, wire.Welcome):
            raise Failure(Code.NOT_READY, f"{self.directory} sent no welcome: {welcome}", reported=True)
        if not self._hello.version_min <= welcome.version <= self._hello.version_max:
            text = (
                f"{self.directory} has chosen version {welcome.version}, this side supports "
                f"{self._hello.version_min} to {self._hello.version_max}: update the older side"
            )
            raise Failure(Code.UNSUPPORTED_VERSION, text, reported=True)
        self.epoch = envelope.epoch
        self._version = welcome.version
        self.features = welcome.features
        self.limits = welcome.limits
        self._limits = limits.of_peer(welcome.limits)
        self._credits = (max(welcome.request_credits, 1), max(welcome.byte_credits, 1))
        self._beat_s = max(welcome.heartbeat_ms, 10) / 1000
        self._sent_at = self._received_at = now
        self._pinged = False
        self._forget_in_flight()
        self.lost_at = None
        self.link = next(self._links)
        self._unsent.clear()
        self._urgent.clear()
        for _, pending in sorted(self.open.items()):
            self._queue(pending)

    def lost(self, now: float) -> None:
        """Handles the end of a connection, or of an attempt.

        Requests that are bound to it fail, and orders that were sent: repeated over the next connection, they could
        undo what another operator has ordered since, or order it from a successor.
        """
        if self.lost_at is None:
            self.lost_at = now
        self.link = 0
        self._forget_in_flight()
        for pending in list(self.open.values()):
            if pending.link is not None or (pending.kind in _ORDERS and not pending.never_sent):
                self._settle(pending, None, _broke(pending))

    def closed(self) -> None:
        """Fails every request without an answer, because there will be no further connection."""
        for pending in list(self.open.values()):
            text = "the conversation was closed"
            failure = Failure(Code.DRAINING, text, reported=False, over=pending.never_sent)
            self._settle(pending, None, failure)

    def _forget_in_flight(self) -> None:
        self._batches.lost()
        self._in_flight.clear()
        self._in_flight_bytes = 0

    # Requests.

    @property
    def sent_requests(self) -> int:
        """Number of requests that were sent over the present connection and not answered."""
        return len(self._in_flight) + self._batches.more

    def add(self, pending: PendingRequest) -> None:
        """Takes a request; one that cannot be encoded, or whose connection is gone, fails at once."""
        self.open[pending.id] = pending
        heapq.heappush(self._expiry, (pending.expires, pending.id))
        if len(self._expiry) > 4 * OPEN_MAX:
            self._expiry = [(each.expires, each.id) for each in self.open.values()]
            heapq.heapify(self._expiry)
        if (failure := _not_encoded(pending)) is not None:
            self._settle(pending, None, failure)
        elif pending.link is not None and pending.link != self.link:
            self._settle(pending, None, _broke(pending))
        else:
            self._queue(pending)

    def _queue(self, pending: PendingRequest) -> None:
        # A new connection begins with all open requests.
        if self.link:
            (self._urgent if pending.urgent else self._unsent).append(pending)

    def expire(self, now: float) -> None:
        """Fails the requests whose time has passed."""
        while self._expiry and self._expiry[0][0] <= now:
            _, identity = heapq.heappop(self._expiry)
            pending = self.open.get(identity)
            # A request that is repeated under its id has another time than before.
            if pending is not None and pending.expires <= now:
                text, over = "no answer came in time", pending.never_sent
                failure = Failure(Code.DEADLINE, text, reported=False, retry=True, over=over)
                self._settle(pending, None, failure)

    @property
    def next_expiry(self) -> float | None:
        """When :meth:`expire` is due; None without requests."""
        return self._expiry[0][0] if self._expiry else None

    def next_message(self, now: float) -> Message | None:
        """Returns the next message that the credits allow, which must be sent; None if there is none."""
        requests, byte_credits = self._credits
        while queue := self._urgent or self._unsent:
            pending = queue[0]
            if pending.done:
                queue.popleft()
                continue
            body = self._body(pending)
            if body is None:
                continue
            # Some credits are reserved for urgent requests, which are few and small.
            kept = 0 if pending.urgent else min(_URGENT_CREDITS, requests // 64)
            too_much = self._in_flight_bytes + len(body) > byte_credits - kept * _URGENT_BYTES
            if self._in_flight and (len(self._in_flight) >= requests - kept or too_much):
                return None
            if stores := self._batches.take(queue, byte_credits - self._in_flight_bytes, self._limits):
                identity, kind = self._draw(), Kind.STORES
                left_ms, body = self._batches.message(identity, stores, now)
            else:
                queue.popleft()
                identity, kind = pending.id, pending.kind
                left_ms = max(int((pending.deadline - now) * 1000), 1)
            for sent in stores or [pending]:
                sent.sent_at = sent.sent_at or now
            self._in_flight[identity] = len(body)
            self._in_flight_bytes += len(body)
            self._sent_at = now
            return wire.header(self._version, kind, identity, left_ms, self.epoch), body
        return None

    def _body(self, pending: PendingRequest) -> bytes | None:
        """The body of a request in the version of the connection; None if it is too long for the peer and has ended."""
        body, sizes = pending.body, pending.sizes
        try:
            if self._version < 2 and pending.kind in (Kind.LOAD, Kind.STORE):
                body = wire.one_by_one(body, self._limits["page_items"])
                sizes = {**sizes, "body_bytes": len(body)}
            why = limits.exceeded(pending.kind, sizes, self._limits)
        except wire.TooLong as error:
            why = str(error)
        if why is None:
            return body
        # The request may have been sent to an earlier peer.
        self._settle(pending, None, Failure(Code.LIMIT, why, reported=False, over=pending.never_sent))
        return None

    # Messages of the peer.

    def received(self, parts: list[bytes], now: float) -> Message | None:
        """Handles a message; returns the answer to it, which must be sent, if it is a request.

        An answer that cannot be read ends its request alone.

        Raises:
            wire.Malformed: for bytes that are no message; the connection is of no use any longer.
        """
        unreadable = ""
        try:
            envelope = wire.read(parts)
        except wire.UnreadableBody as error:
            envelope, unreadable = error.envelope, str(error)
        self._received_at, self._pinged = now, False
        if wire.is_request(envelope.kind):
            self._sent_at = now
            return self._reply(envelope)
        self._in_flight_bytes -= self._in_flight.pop(envelope.correlation, 0)
        if envelope.body is None and not envelope.required and not unreadable:
            # Its kind is unknown here.
            return None
        for store, end in self._batches.ends(envelope.correlation, envelope.body):
            self._store_ended(store, end)
        pending = self.open.get(envelope.correlation)
        if pending is None:
            # No request waits for this answer.
            return None
        if isinstance(envelope.body, wire.Error):
            self._refused(pending, envelope.body)
        elif envelope.kind == pending.kind + 1 and envelope.body is not None:
            self._settle(pending, envelope.body, None)
        elif unreadable:
            # Of the request nothing is known: the failure does not say that its copies are over.
            text = f"the answer cannot be read: {unreadable}"
            self._settle(pending, None, Failure(Code.INTERNAL, text, reported=False))
        else:
            text = f"kind {envelope.kind}, with bits {envelope.required:#x}, is no answer to kind {int(pending.kind)}"
            self._settle(pending, None, Failure(Code.INTERNAL, text, reported=False))
        return None

    def _refused(self, pending: PendingRequest, error: wire.Error) -> None:
        failure = Failure(error.code, error.message, reported=True, retry=error.retry, over=error.over)
        self._settle(pending, None, failure)

    def _store_ended(self, store: PendingRequest, end: wire.StoreAnswer | wire.Error | None) -> None:
        """Handles the end of a store that shared a message."""
        if isinstance(end, wire.Error):
            self._refused(store, end)
        elif end is not None:
            self._settle(store, end, None)
        elif not store.done:
            self._queue(store)

    def _reply(self, request: wire.Envelope) -> Message:
        """Answers a request of the peer. The peer's ids are independent of our own."""
        kind, body = Kind.PONG, wire.body_of(wire.Empty())
        if request.required:
            kind, text = Kind.ERROR, f"bits {request.required:#x} of the header's bytes 20 and 21 are unknown here"
            body = wire.body_of(wire.Error(Code.UNSUPPORTED, text))
        elif request.kind != Kind.PING:
            kind, text = Kind.ERROR, f"kind {request.kind} is no request to an engine"
            body = wire.body_of(wire.Error(Code.UNKNOWN_KIND, text))
        return wire.header(self._version, kind, request.correlation, 0, self.epoch), body

    def _settle(self, pending: PendingRequest, answer: msgspec.Struct | None, failure: Failure | None) -> None:
        # A later request under the same id is another one.
        if self.open.get(pending.id) is not pending:
            return
        del self.open[pending.id]
        if self._ended is not None:
            self._ended()
        pending._end(answer, failure)

    # Heartbeats.

    @property
    def next_beat(self) -> float:
        """When :meth:`beat` or :meth:`silent` is due, while there is a connection.

        Pings after one heartbeat in which nothing was sent, however much was received: the peer closes a client that
        sends nothing for three. Pings also when nothing was received, to find out whether the peer is alive.
        """
        silent_at = self._received_at + self._beat_s * (3 if self._pinged else 1)
        return min(self._sent_at + self._beat_s, silent_at)

    def silent(self, now: float) -> bool:
        """Whether the peer has answered no ping, and sent nothing else, for three heartbeats: it counts as lost."""
        return self._pinged and now >= self._received_at + self._beat_s * 3

    def beat(self, now: float) -> Message | None:
        """Returns a ping, which must be sent, if one is due."""
        if now < self.next_beat:
            return None
        self._pinged = True
        self._sent_at = now
        head = wire.header(self._version, Kind.PING, 0, max(int(self._beat_s * 1000), 1), self.epoch)
        return head, wire.body_of(wire.Empty())


def _broke(pending: PendingRequest) -> Failure:
    """The end of a request that is bound to a connection which is gone."""
    return Failure(Code.DEADLINE, "the connection broke", reported=False, retry=True, over=pending.never_sent)


def _not_encoded(pending: PendingRequest) -> Failure | None:
    """Encodes a request; returns why it could not be encoded."""
    try:
        pending.encode()
    except Exception as error:
        logger.exception("kvferry: a request of kind %d could not be encoded", pending.kind)
        text = f"the request could not be encoded: {error}"
        # To be retried at intervals, not at once.
        return Failure(Code.INTERNAL, text, reported=False, retry=True, over=not pending.repeated)
    if (why := limits.exceeded(pending.kind, pending.sizes, limits.TABLE)) is not None:
        return Failure(Code.LIMIT, why, reported=False, over=not pending.repeated)
    return None
