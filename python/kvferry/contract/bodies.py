"""The requests of clients, as a server reads them: header, typed body, and runs of pages counted out.

:mod:`kvferry.wire` reads answers only. Fields that docs/wire.md lets a client leave out have defaults here.
"""

import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry import wire
from kvferry.wire import Kind

_HEADER = struct.Struct(">4sHHQIHHQ")


class Hello(msgspec.Struct):
    """First message of a client."""

    version_min: int
    version_max: int
    role: str
    engine: bytes
    rank: int = 0
    replica: int = 0
    name: str = ""
    features: int = 0


class Lookup(msgspec.Struct):
    """Requests which pages of a sequence can be loaded."""

    slot: int
    hash_bytes: int
    hashes: bytes
    namespace: bytes = b""
    have_pages: int = 0
    limit_pages: int | None = None


class Register(msgspec.Struct):
    """Registers a rank's memory."""

    engine: bytes
    registration: dict[str, Any]
    abandoned_through: int = 0
    check_only: bool = False


class Reset(msgspec.Struct):
    """Removes pages."""

    which: str
    namespace: bytes | None = None
    tier: int = 0
    hash_bytes: int = 0
    hashes: bytes = b""


class CancelStores(msgspec.Struct):
    """Takes stores back."""

    slot: int | None = None


class ReadEvents(msgspec.Struct, rename={"from_": "from"}):
    """Reads the change log."""

    epoch: int
    from_: int
    most: int
    wait_ms: int = 0
    namespace: bytes | None = None
    cursor: int | None = None


REQUESTS: dict[int, type[msgspec.Struct]] = {
    Kind.HELLO: Hello,
    Kind.PING: wire.Empty,
    Kind.LOOKUP: Lookup,
    Kind.LOAD: wire.Load,
    Kind.STORE: wire.Store,
    Kind.STORES: wire.Stores,
    Kind.FINISH: wire.Finish,
    Kind.RESET: Reset,
    Kind.CANCEL_STORES: CancelStores,
    Kind.FLUSH: wire.Flush,
    Kind.READ_EVENTS: ReadEvents,
    Kind.REGISTER: Register,
    Kind.WRITTEN: wire.Written,
    Kind.ABANDON: wire.Abandon,
    Kind.UNREGISTER: wire.Unregister,
    Kind.STATUS: wire.Status,
}
_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in REQUESTS.items()}


@dataclass
class Incoming:
    """A message of a client. ``number``: counted over all messages that the server received."""

    number: int
    version: int
    kind: int
    id: int
    deadline_ms: int
    required: int
    epoch: int
    payload: bytes

    def body(self) -> Any:
        """Decodes the body of a request.

        Raises:
            wire.Malformed: with the reason.
        """
        return decode(self.kind, self.payload)


def decode(kind: int, payload: bytes) -> Any:
    """Decodes the body of a request of a known kind, or raises :class:`wire.Malformed`."""
    try:
        return _decoders[kind].decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise wire.Malformed(f"{name_of(kind)}: {error}") from error


def incoming(number: int, parts: list[bytes]) -> Incoming:
    """Reads the two parts of a message, without its body.

    Raises:
        wire.Malformed: with the reason.
    """
    if len(parts) != 2 or len(parts[0]) != wire.HEADER_BYTES:
        sizes = [len(part) for part in parts]
        raise wire.Malformed(f"a message has 2 parts, the first of {wire.HEADER_BYTES} bytes, not {sizes}")
    magic, version, kind, identity, deadline_ms, required, _, epoch = _HEADER.unpack(parts[0])
    if magic != wire.MAGIC:
        raise wire.Malformed(f"the header begins with {magic!r}, not with KVFY")
    return Incoming(number, version, kind, identity, deadline_ms, required, epoch, parts[1])


def name_of(kind: int) -> str:
    """The name of a kind for texts."""
    try:
        return Kind(kind).name.lower()
    except ValueError:
        return f"kind {kind}"


def pages_of(items: list[Any]) -> list[int]:
    """Counts out a list of pages: numbers, and runs ``[start, count]``.

    Raises:
        wire.Malformed: for other items, an empty list, or more pages than a message has.
    """
    pages: list[int] = []
    for item in items:
        match item:
            case bool():
                raise wire.Malformed(f"pages: {item!r} is no page and no run")
            case int() if item >= 0:
                pages.append(item)
            case [int() as start, int() as count] if start >= 0 and 0 < count <= wire.PAGES_MAX:
                pages.extend(range(start, start + count))
            case _:
                raise wire.Malformed(f"pages: {item!r} is no page and no run [start, count]")
        if len(pages) > wire.PAGES_MAX:
            raise wire.Malformed(f"pages: more than {wire.PAGES_MAX}")
    if not pages:
        raise wire.Malformed("pages: a part names at least one page")
    return pages


def hashes_of(packed: bytes, width: int) -> list[bytes]:
    """Splits packed hashes.

    Raises:
        wire.Malformed: if the width does not fit.
    """
    if not packed:
        return []
    if width not in wire.HASH_BYTES or len(packed) % width:
        raise wire.Malformed(f"hash_bytes is {width} for {len(packed)} bytes of hashes: give 16 to 64 that divide them")
    return [packed[at : at + width] for at in range(0, len(packed), width)]
