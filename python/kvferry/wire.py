"""The messages of docs/wire.md that an engine sends and reads: a header of 32 bytes and a MessagePack map.

Only messages that engines need. Unknown fields of an answer are skipped, so that a newer kvferry may add fields.
"""

import itertools
import operator
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

MAGIC = b"KVFY"
#: Oldest and newest version of the messages. Version 1 has no runs of pages.
VERSION_MIN, VERSION = 1, 2
#: Version in the header of a hello, a welcome, and every error before the welcome. Never changes.
HELLO_VERSION = 1
#: Longest message body, sent or received.
BODY_BYTES_MAX = 8 << 20
#: Most parts of a load or a store.
PARTS_MAX = 4096
#: Most items in a list of pages.
PAGE_ITEMS_MAX = 131_072
#: Most pages that one message names, runs counted out.
PAGES_MAX = 1_048_576
#: Most page hashes in one message.
HASHES_MAX = 131_072
#: Most stores in one message.
STORES_MAX = 256
#: Most requests in one abandon.
ABANDONED_MAX = 4096
#: Longest namespace, content of a registration, and text, in bytes.
NAMESPACE_BYTES_MAX = CONTENT_BYTES_MAX = 1024
TEXT_BYTES_MAX = 4096
#: Bytes of one page hash.
HASH_BYTES = range(16, 65)

_HEADER = struct.Struct(">4sHHQIHHQ")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """Numbers of the messages that engines and operators send or receive."""

    HELLO = 1
    WELCOME = 2
    ERROR = 3
    PING = 4
    PONG = 5
    LOOKUP = 16
    LOOKUP_ANSWER = 17
    LOAD = 18
    LOAD_ANSWER = 19
    STORE = 20
    STORE_ANSWER = 21
    FINISH = 22
    FINISH_ANSWER = 23
    RESET = 24
    RESET_ANSWER = 25
    CANCEL_STORES = 26
    CANCEL_STORES_ANSWER = 27
    FLUSH = 28
    FLUSH_ANSWER = 29
    READ_EVENTS = 30
    EVENTS = 31
    REGISTER = 32
    REGISTERED = 33
    WRITTEN = 34
    WRITTEN_ANSWER = 35
    ABANDON = 36
    ABANDON_ANSWER = 37
    UNREGISTER = 38
    UNREGISTERED = 39
    STATUS = 64
    STATUS_ANSWER = 65
    STORES = 66
    STORES_ANSWER = 67
    DRAIN = 72
    DRAIN_ANSWER = 73
    SET_LOG = 74
    SET_LOG_ANSWER = 75


#: A bit of ``features``: a rank's device writes its progress to a timeline word, which the worker reads.
FEATURE_TIMELINE = 1
#: A bit of ``features``: the leader finds pages also where the first hash of a lookup is in the middle of a sequence.
FEATURE_TAILS = 2


class Code(IntEnum):
    """Error codes; one that is unknown here is treated by ``retry`` alone."""

    MALFORMED = 1
    UNSUPPORTED_VERSION = 2
    UNKNOWN_KIND = 3
    LIMIT = 4
    NOT_READY = 5
    UNKNOWN_SLOT = 6
    INVALID = 7
    NOT_PINNED = 8
    COPY_FAILED = 9
    STALE_REQUEST = 10
    BUSY = 11
    DEADLINE = 12
    STALE_EPOCH = 13
    RANK_DISAGREES = 14
    HELLO_FIRST = 15
    DRAINING = 16
    INTERNAL = 17
    LEASED = 18
    RESET_UNCONFIRMED = 19
    FORBIDDEN = 20
    QUOTA = 21
    UNSUPPORTED = 24


class Hello(msgspec.Struct, kw_only=True):
    """First message of a client. ``engine`` has 16 bytes; ``features`` are bits for abilities beyond the version."""

    version_min: int = VERSION_MIN
    version_max: int = VERSION
    role: str
    engine: bytes
    rank: int = 0
    replica: int = 0
    name: str = ""
    features: int = 0


class Welcome(msgspec.Struct):
    """Answer to hello."""

    version: int
    heartbeat_ms: int
    request_credits: int
    byte_credits: int
    features: int = 0
    #: Longest deadline of a request; a longer one is cut to it. 0: not given.
    deadline_max_ms: int = 0
    #: Name and version of the server's program, and its limits by their names in ``schema/messages.json``.
    program: str = ""
    limits: dict[str, int] = {}


class Error(msgspec.Struct):
    """Answer to a request that is not carried out. ``message`` is one line for logs.

    ``over``: no part of the request runs or will run.
    """

    code: int
    message: str
    retry: bool = False
    over: bool = False

    def __str__(self) -> str:
        return self.message


class Lookup(msgspec.Struct, kw_only=True):
    """Requests which pages of a sequence can be loaded. ``hashes`` are packed, ``hash_bytes`` each."""

    slot: int
    namespace: bytes
    hash_bytes: int
    hashes: bytes
    have_pages: int = 0
    limit_pages: int | None = None


class LookupAnswer(msgspec.Struct):
    """Number of pages after the engine's own that can be loaded; ``pending``: the next one is being stored.

    ``below_pages`` counts those that lie below host memory, as pairs of the tier's number and a number of pages; they
    reach host memory in ``ready_in_ms``. ``declined_pages`` more lie there and are not offered, because computing them
    takes less time than loading.
    """

    hit_pages: int
    pending: bool = False
    below_pages: list[tuple[int, int]] = []
    ready_in_ms: int | None = None
    declined_pages: int = 0


class Part(msgspec.Struct, omit_defaults=True):
    """Pages of one group, from position ``first_page`` on, and the device pages ``pages`` that hold them.

    Of a page, an index; of consecutive pages, ``[start, count]``. ``count`` is the number of all pages, which a leader
    compares; ``priority``, 0 to 7, is of stores.
    """

    first_page: int
    pages: list[int | list[int]]
    count: int
    group: int = 0
    priority: int | None = None


def part(first_page: int, pages: list[int | list[int]], group: int = 0, *, priority: int | None = None) -> Part:
    """A part with the number of its pages."""
    count = sum(1 if isinstance(item, int) else item[1] for item in pages)
    return Part(first_page, pages, count, group, priority)


class Load(msgspec.Struct):
    """Requests a copy of found pages to device pages.

    A rank's copy starts once the rank has reported everything up to ``after`` as written: until then the rank may still
    write to these pages itself.
    """

    slot: int
    parts: list[Part]
    after: int = 0


class LoadAnswer(msgspec.Struct):
    """The load is over: its first ``pages`` pages are in place on every rank."""

    pages: int


class Store(msgspec.Struct):
    """Requests a store of device pages.

    ``more_hashes``, from position ``more_from`` on, are hashes that the slot may not have yet. The pages are read once
    every rank has reported the work ``after`` as written; with 0, once it has reported the store's own id.
    """

    slot: int
    parts: list[Part]
    hash_bytes: int = 0
    more_hashes: bytes = b""
    more_from: int = 0
    after: int = 0


class NumberedStore(msgspec.Struct):
    """A store among several in one message. ``store``: the encoded body of a :class:`Store`."""

    id: int
    deadline_ms: int
    store: msgspec.Raw


class Stores(msgspec.Struct):
    """Several stores in one message, each with an id of its own."""

    stores: list[NumberedStore]


class StoreAnswer(msgspec.Struct):
    """The outcome of a store, in pages."""

    stored_pages: int
    present_pages: int
    refused_pages: int = 0
    failed_pages: int = 0


class StoreResult(msgspec.Struct):
    """How one of several stores ended: with an answer or an error."""

    answer: StoreAnswer | None = None
    error: Error | None = None


class StoresAnswer(msgspec.Struct):
    """How the stores of a message ended, in their order."""

    results: list[StoreResult]


class Finish(msgspec.Struct):
    """Ends the request of a slot."""

    slot: int


class Reset(msgspec.Struct, omit_defaults=True):
    """Removes the pages that ``which`` names: ``all``, those of a ``namespace``, or those with ``hashes`` of it.

    The hashes are packed, ``hash_bytes`` each. From one ``tier``, 2 or 3, or from all of them.
    """

    which: str
    namespace: bytes | None = None
    tier: int = 0
    hash_bytes: int = 0
    hashes: bytes = b""


def reset(namespace: bytes | None = None, *, tier: int = 0, hash_bytes: int = 0, hashes: bytes | None = None) -> Reset:
    """A reset of the hashes, of the namespace where ``hashes`` is None, or of all pages where both are.

    A leader refuses one of no hashes: an empty list never removes the namespace.
    """
    which = "hashes" if hashes is not None else "all" if namespace is None else "namespace"
    return Reset(which, namespace, tier, hash_bytes, hashes or b"")


class ResetAnswer(msgspec.Struct):
    """Number of pages that were removed, once for each tier that had them.

    ``below_pages`` counts those of tiers below host memory, as pairs of the tier's number and a number of pages.
    """

    pages: int
    below_pages: list[tuple[int, int]] = []


class Flush(msgspec.Struct):
    """Moves what is stored to the disk, and makes it durable there."""


class FlushAnswer(msgspec.Struct):
    """Number of pages that the disk holds, each counted once for all ranks."""

    pages: int


class ReadEvents(msgspec.Struct, omit_defaults=True, rename={"from_": "from"}):
    """Reads which pages the tiers gained and lost, from record ``from_`` on.

    With a ``cursor`` also the pages that are present. See docs/wire.md.
    """

    epoch: int
    from_: int
    most: int
    wait_ms: int = 0
    namespace: bytes | None = None
    cursor: int | None = None


#: A word of an enumeration in an answer, as text or as a map of the word to its content. Later versions may have more.
Word = str | dict[str, Any]


class EventRecord(msgspec.Struct):
    """``stored`` or ``gone`` pages, or a tier that is ``cleared``. Records of other events are skipped.

    The pages lie in consecutive arena pages of the tier, from ``place`` on. ``hashes`` are packed.
    """

    event: Word
    tier: int
    namespace: bytes = b""
    layout: bytes = b""
    group: int = 0
    place: int = 0
    hashes: bytes = b""
    why: Word | None = None


class Events(msgspec.Struct):
    """Changes in their order. ``lost``: records before them are missing, and the reader forgets every page."""

    epoch: int
    next: int
    lost: bool
    hash_bytes: int
    records: list[EventRecord]
    cursor: int | None = None


class CancelStores(msgspec.Struct, omit_defaults=True):
    """Cancels running stores: those of a slot, or all of the engine."""

    slot: int | None = None


class CancelStoresAnswer(msgspec.Struct):
    """Each of the cancelled stores has been answered; ``stores`` is their number."""

    stores: int


class Written(msgspec.Struct):
    """Reports everything up to ``through`` as written: pages that stores read, and steps that loads wait for.

    With ``timeline``: written once the device's timeline word has reached ``through``.
    """

    through: int
    timeline: bool = False


class Abandon(msgspec.Struct):
    """Requests the end of all copies for these requests."""

    requests: list[int]


class Unregister(msgspec.Struct):
    """Requests the unmapping of this rank's KV memory; answered once no part of it is open."""


class Register(msgspec.Struct):
    """Registers a rank's KV memory (docs/wire.md); requests up to ``abandoned_through`` are over.

    With ``check_only`` the worker checks and opens the memory, and serves none of it.
    """

    abandoned_through: int
    engine: bytes
    registration: dict
    check_only: bool = False


class Registered(msgspec.Struct):
    """The memory is registered: pages that fit the rank's depot, their size, and why none is ever copied, if so."""

    arena_pages: int
    page_bytes: int
    not_served: str = ""


class Status(msgspec.Struct):
    """Requests the state of a leader; with ``check`` the leader recounts its pages first."""

    check: bool = False


class DiskStatus(msgspec.Struct, kw_only=True):
    """The disk of one worker: see ``docs/reference/status.md``."""

    health: Word = "off"
    reason: str = ""
    used_bytes: int = 0
    cap_bytes: int = 0
    written_bytes: int = 0
    day_written_bytes: int = 0
    listed_pages: int = 0
    durable_pages: int = 0
    scrubbed_pages: int = 0
    bad_pages: int = 0
    unreadable_pages: int = 0
    quarantined_pages: int = 0
    bad_reads: int = 0


class RankStatus(msgspec.Struct, kw_only=True):
    """The state of one rank's worker: see ``docs/reference/status.md``."""

    rank: int
    attached: bool
    replica: int = 0
    pid: int = 0
    stores: int = 0
    loads: int = 0
    host_ready_bytes: int = 0
    host_bytes: int = 0
    host_pinned_bytes: int | None = None
    problem: str = ""
    connected: bool | None = None
    disk: DiskStatus | None = None


class TierStatus(msgspec.Struct, kw_only=True):
    """The state of one tier, 2 for host memory, 3 for a disk: see ``docs/reference/status.md``."""

    tier: int = 0
    pages: int = 0
    used_pages: int = 0
    blocks: int = 0
    lookup_pages: int = 0
    hit_pages: int = 0
    evicted_pages: int = 0
    quarantined_pages: int = 0
    page_states: dict[str, int] = {}


class MovesStatus(msgspec.Struct, kw_only=True):
    """Transfers between tiers: see ``docs/reference/status.md``."""

    ordered: int = 0
    pages: int = 0
    under_way: int = 0
    waiting: int = 0
    left_out: int = 0
    bad_sources: int = 0
    gone: int = 0


class RestartedProcess(msgspec.Struct, kw_only=True):
    """How often ``kvferry up`` has started a process again, by cause: see ``docs/reference/status.md``."""

    process: str = ""
    causes: dict[str, int] = {}


class StatusAnswer(msgspec.Struct, kw_only=True):
    """The state of a leader: see ``docs/reference/status.md``."""

    version: str = ""
    epoch: int = 0
    ready: bool = False
    draining: bool = False
    ratio: int = 0
    hash_tokens: int = 0
    ranks: list[RankStatus] = []
    slots: int = 0
    pins: int = 0
    copies_under_way: int = 0
    requests: dict[str, int] = {}
    counters: dict[str, int] = {}
    tiers: list[TierStatus] = []
    moves: MovesStatus | None = None
    decisions_digest: str | None = None
    contradiction: str | None = None
    restarts: list[RestartedProcess] = []


class Empty(msgspec.Struct):
    """A body without fields."""


class Drain(msgspec.Struct):
    """Makes a leader refuse lookups, loads and stores; with ``resume`` the leader takes them again."""

    resume: bool = False


class DrainAnswer(msgspec.Struct):
    """Whether the leader is drained, and what still runs."""

    drained: bool
    loads: int = 0
    stores: int = 0
    transfers: int = 0


class SetLog(msgspec.Struct):
    """Changes the filter of the log of a leader or a worker, until its end."""

    filter: str


class SetLogAnswer(msgspec.Struct):
    """The filter before."""

    before: str


BODIES: dict[int, type[msgspec.Struct]] = {
    Kind.WELCOME: Welcome,
    Kind.ERROR: Error,
    Kind.LOOKUP_ANSWER: LookupAnswer,
    Kind.LOAD_ANSWER: LoadAnswer,
    Kind.STORE_ANSWER: StoreAnswer,
    Kind.STORES_ANSWER: StoresAnswer,
    Kind.FINISH_ANSWER: Empty,
    Kind.RESET_ANSWER: ResetAnswer,
    Kind.FLUSH_ANSWER: FlushAnswer,
    Kind.EVENTS: Events,
    Kind.CANCEL_STORES_ANSWER: CancelStoresAnswer,
    Kind.REGISTERED: Registered,
    Kind.WRITTEN_ANSWER: Empty,
    Kind.ABANDON_ANSWER: Empty,
    Kind.UNREGISTERED: Empty,
    Kind.STATUS_ANSWER: StatusAnswer,
    Kind.DRAIN_ANSWER: DrainAnswer,
    Kind.SET_LOG_ANSWER: SetLogAnswer,
}

KINDS: dict[type[msgspec.Struct], Kind] = {
    Hello: Kind.HELLO,
    Lookup: Kind.LOOKUP,
    Load: Kind.LOAD,
    Store: Kind.STORE,
    Stores: Kind.STORES,
    Finish: Kind.FINISH,
    Reset: Kind.RESET,
    Flush: Kind.FLUSH,
    ReadEvents: Kind.READ_EVENTS,
    CancelStores: Kind.CANCEL_STORES,
    Register: Kind.REGISTER,
    Written: Kind.WRITTEN,
    Abandon: Kind.ABANDON,
    Unregister: Kind.UNREGISTER,
    Status: Kind.STATUS,
    Drain: Kind.DRAIN,
    SetLog: Kind.SET_LOG,
}

_encode = msgspec.msgpack.Encoder().encode
_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}


class Malformed(ValueError):
    """Received bytes that are not a valid message."""


class TooLong(ValueError):
    """A message that exceeds a limit of the version that the peer supports."""


def body_of(message: msgspec.Struct) -> bytes:
    """Encodes the second part of a message."""
    return _encode(message)


def header(version: int, kind: int, correlation: int, deadline_ms: int, epoch: int) -> bytes:
    """Encodes the first part of a message. ``deadline_ms`` is 0 in answers, at least 1 in requests."""
    return _HEADER.pack(MAGIC, version, kind, correlation, deadline_ms, 0, 0, epoch)


def is_request(kind: int) -> bool:
    """Whether a kind, known or not, is a request, which must be answered; the others are answers."""
    match kind:
        case Kind.HELLO | Kind.PING:
            return True
        case Kind.WELCOME | Kind.ERROR | Kind.PONG:
            return False
        case _:
            return kind % 2 == 0


class Envelope(msgspec.Struct):
    """A received message. ``body`` is None for kinds that are unknown here.

    ``required`` has a bit for each extension that a reader must understand; no such extension is known here.
    """

    kind: int
    correlation: int
    epoch: int
    body: msgspec.Struct | None
    required: int = 0


class UnreadableBody(Malformed):
    """The header is one, and the body is not of its kind. ``envelope`` is what the header says."""

    def __init__(self, envelope: Envelope, why: str):
        super().__init__(why)
        self.envelope = envelope


def read(parts: list[bytes]) -> Envelope:
    """Reads the two parts of a message.

    Raises:
        UnreadableBody: for a body that is not of the header's kind.
        Malformed: for a header that is none, or another number of parts.
    """
    if len(parts) != 2 or len(parts[0]) != HEADER_BYTES:
        raise Malformed(
            f"a message has 2 parts, the first of {HEADER_BYTES} bytes, not {[len(part) for part in parts]}"
        )
    magic, _version, kind, correlation, _deadline_ms, required, _skipped, epoch = _HEADER.unpack(parts[0])
    if magic != MAGIC:
        raise Malformed("the header does not begin with KVFY")
    decoder = _decoders.get(kind) if required == 0 else None
    try:
        body = decoder.decode(parts[1]) if decoder else None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        envelope = Envelope(kind, correlation, epoch, None, required)
        raise UnreadableBody(envelope, f"kind {kind}: {error}") from error
    return Envelope(kind, correlation, epoch, body, required)


def one_by_one(body: bytes, items_max: int = PAGE_ITEMS_MAX) -> bytes:
    """Returns the body of a load or a store for a peer of version 1, which knows no runs: every page by its index.

    Raises:
        TooLong: a part has more pages than the ``items_max`` that a list to this peer may have.
    """
    message = msgspec.msgpack.decode(body)
    for part in message["parts"]:
        items = part["pages"]
        count = sum(1 if isinstance(item, int) else item[1] for item in items)
        if count > items_max:
            raise TooLong(f"{count} pages of one part: version 1 of the protocol names at most {items_max}")
        part["pages"] = [
            page for item in items for page in ((item,) if isinstance(item, int) else range(item[0], item[0] + item[1]))
        ]
    body = _encode(message)
    if len(body) > BODY_BYTES_MAX:
        raise TooLong(f"{len(body)} bytes without runs: version 1 of the protocol takes at most {BODY_BYTES_MAX}")
    return body


def runs(pages: Sequence[int]) -> list:
    """Encodes page indices for the wire: consecutive pages become runs ``[start, count]``."""
    if not pages:
        return []
    # Where a page does not follow the one before it.
    steps = map(operator.sub, itertools.islice(pages, 1, None), pages)
    breaks = [at for at, step in enumerate(steps, 1) if step != 1]
    if len(breaks) == len(pages) - 1:
        return list(pages)
    return [
        pages[at] if end - at == 1 else [pages[at], end - at]
        for at, end in zip([0, *breaks], [*breaks, len(pages)], strict=True)
    ]
