"""The messages of an engine's scheduler and of an operator, from the values of their calls.

Long ones are built when they are sent. Sequences of hashes and pages must not change until then.
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
    """Finds the pages of a prompt. ``hashes``: at least one, equally long."""
    width = len(hashes[0])

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

    def message() -> wire.Load:
        return wire.Load(slot, [_part(part) for part in parts], after)

    return Later(Kind.LOAD, message)


def store(slot: int, parts: Sequence[Part], more: Sequence[bytes], more_from: int, after: int) -> Later:
    """Copies pages of the engine's memory to kvferry."""
    width = len(more[0]) if more else 0

    def message() -> wire.Store:
        return wire.Store(
            slot=slot,
            parts=[_part(part, part.priority) for part in parts],
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


def reset(namespace: bytes, hashes: Sequence[bytes] | None) -> wire.Reset:
    """Removes the pages of a namespace, or those of them that have one of the hashes."""
    width = len(hashes[0]) if hashes else 0
    return wire.reset(namespace, hash_bytes=width, hashes=None if hashes is None else b"".join(hashes))


def _part(part: Part, priority: int | None = None) -> wire.Part:
    return wire.part(part.first_page, wire.runs(part.pages), part.group, priority=priority)
