"""The messages of an engine's scheduler and of an operator, from the values of their calls.

Long ones are built when they are sent. Sequences of hashes and pages are copied before, so that callers may reuse them.
"""

import os
from collections.abc import Sequence

from kvferry import wire
from kvferry.requests import Later
from kvferry.served import Part
from kvferry.wire import Kind


def engine_hello(engine: bytes, replica: int, name: str) -> wire.Hello:
    """First message of an engine's scheduler."""
    return wire.Hello(role="engine", engine=engine, replica=replica, name=name, features=wire.FEATURE_TAILS)


def admin_hello(name: str) -> wire.Hello:
    """First message of an operator. The leader recognises a request that is repeated over another connection by it."""
    return wire.Hello(role="admin", engine=os.urandom(16), name=name)


def lookup(slot: int, hashes: Sequence[bytes], namespace: bytes, have_pages: int, limit_pages: int | None) -> Later:
    """Finds the pages of a prompt. ``hashes``: at least one, equally long.

    Raises:
        ValueError: ``hashes`` is empty, or has hashes of several lengths.
    """
    if len(hashes) == 0:
        raise ValueError("hashes is []: name at least one page; to open a slot alone send a wire.Lookup without hashes")
    hashes = list(hashes)
    width = _width("hashes", hashes)

    def message() -> wire.Lookup:
        return wire.Lookup(
            slot=slot,
            namespace=namespace,
            hash_bytes=width,
            hashes=b"".join(hashes),
            have_pages=have_pages,
            limit_pages=limit_pages,
        )

    return Later(Kind.LOOKUP, message)


def load(slot: int, parts: Sequence[Part], after: int) -> Later:
    """Copies found pages to the engine's memory."""
    copied = _copied(parts)

    def message() -> wire.Load:
        return wire.Load(slot, [_part(part) for part in copied], after)

    return Later(Kind.LOAD, message)


def store(slot: int, parts: Sequence[Part], more: Sequence[bytes], more_from: int, after: int) -> Later:
    """Copies pages of the engine's memory to kvferry.

    Raises:
        ValueError: ``more`` has hashes of several lengths.
    """
    copied, more = _copied(parts), list(more)
    width = _width("more", more)

    def message() -> wire.Store:
        return wire.Store(
            slot=slot,
            parts=[_part(part, part.priority) for part in copied],
            hash_bytes=width,
            more_hashes=b"".join(more),
            more_from=more_from,
            after=after,
        )

    return Later(Kind.STORE, message)


def read_events(
    epoch: int, from_: int, cursor: int | None, namespace: bytes | None, most: int, wait_s: float
) -> wire.ReadEvents:
    """Reads which pages the tiers gained and lost."""
    return wire.ReadEvents(epoch, from_, most, int(wait_s * 1000), namespace, cursor)


def reset(namespace: bytes, hashes: Sequence[bytes] | None = None, *, tier: int = 0) -> wire.Reset:
    """Removes the pages of a namespace, or those of them that have one of the hashes.

    Raises:
        TypeError: without a namespace.
        ValueError: ``hashes`` has hashes of several lengths.
    """
    if not isinstance(namespace, bytes):
        # None would name the pages of all namespaces.
        raise TypeError(f"namespace is {namespace!r}: give bytes; operators remove all pages by reset_all")
    width = _width("hashes", hashes or ())
    packed = None if hashes is None else b"".join(hashes)
    return wire.reset(namespace, tier=tier, hash_bytes=width, hashes=packed)


def _width(name: str, hashes: Sequence[bytes]) -> int:
    """The bytes of each hash; 0 without hashes."""
    widths = list(map(len, hashes))
    if not widths:
        return 0
    # Faster than a set, in the scheduler's thread.
    if widths.count(widths[0]) != len(widths):
        raise ValueError(f"{name} has hashes of {sorted(set(widths))} bytes: give hashes of one length")
    return widths[0]


def _copied(parts: Sequence[Part]) -> list[Part]:
    return [Part(part.group, part.first_page, list(part.pages), part.priority) for part in parts]


def _part(part: Part, priority: int | None = None) -> wire.Part:
    return wire.part(part.first_page, wire.runs(part.pages), part.group, priority=priority)
