"""The values of an engine's calls, and the messages that are built of them later."""

from typing import Any

import pytest

from kvferry import engine_messages, wire
from kvferry.requests import Later
from kvferry.served import Part


def built(message: Later) -> Any:
    return message.build()


def test_lists_are_reused_while_a_message_waits_to_be_sent() -> None:
    pages, hashes = [3, 4, 9], [bytes([number]) * 16 for number in range(3)]
    parts = [Part(0, 0, pages, priority=2)]
    load = engine_messages.load(1, parts, 0)
    store = engine_messages.store(1, parts, hashes, 3, 0)
    lookup = engine_messages.lookup(1, hashes, b"n", 0, None)
    pages[:] = [7, 7, 7, 7]
    hashes[:] = [bytes(32)]
    parts.append(Part(0, 9, [1]))
    assert built(load) == wire.Load(1, [wire.part(0, [[3, 2], 9])])
    packed = b"".join(bytes([number]) * 16 for number in range(3))
    expected = wire.Store(1, [wire.part(0, [[3, 2], 9], priority=2)], 16, packed, 3)
    assert built(store) == expected
    assert built(lookup) == wire.Lookup(slot=1, namespace=b"n", hash_bytes=16, hashes=packed, have_pages=0)


def test_a_lookup_of_no_page_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"hashes is \[\]: name at least one page; to open a slot alone"):
        engine_messages.lookup(5, [], b"", 0, None)


def test_hashes_of_several_lengths_are_refused() -> None:
    # As many bytes as three hashes of 16 bytes.
    mixed = [b"a" * 16, b"b" * 32]
    with pytest.raises(ValueError, match=r"hashes has hashes of \[16, 32\] bytes: give hashes of one length"):
        engine_messages.lookup(5, mixed, b"", 0, None)
    with pytest.raises(ValueError, match=r"more has hashes of \[16, 32\] bytes"):
        engine_messages.store(5, [], mixed, 0, 0)
    with pytest.raises(ValueError, match=r"hashes has hashes of \[16, 32\] bytes"):
        engine_messages.reset(b"n", mixed)


def test_a_reset_without_a_namespace_is_no_message() -> None:
    with pytest.raises(TypeError, match="namespace is None: give bytes; operators remove all pages by reset_all"):
        engine_messages.reset(None)  # type: ignore[arg-type]
    assert engine_messages.reset(b"", tier=2) == wire.Reset("namespace", b"", 2)
