"""Reads the file of a recording as docs/recording.md describes it, without any code of the package."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

HEADER, CALL, RETURN, REQUEST, ANSWER, FAILURE, LEADER, END = range(8)
CLOSED, FULL, SLOW, DISK, FAULT = range(5)
LOOKUP, LOAD, STORE, FINISH, RESET, CANCEL_STORES = 16, 18, 20, 22, 24, 26
WINDOW = 131_072


@dataclass
class Frame:
    number: int
    at_us: int
    kind: int
    fields: Any


class Cut(Exception):
    """The file ends within a frame, or without an end mark."""


def frames(path: Path) -> Iterator[Frame]:
    """Yields the frames, and checks each of them."""
    data = path.read_bytes()
    assert data[:12] == b"KVFCALLS\0\0\0\1"
    at, number, before = 12, 0, 0
    while at < len(data):
        if len(data) < at + 25:
            raise Cut(f"{len(data) - at} bytes")
        length, checksum, found, at_us, kind = struct.unpack(">IIQQB", data[at : at + 25])
        body = data[at + 25 : at + 25 + length]
        if len(body) < length:
            raise Cut(f"{len(body)} of {length} bytes")
        assert zlib.crc32(data[at : at + 4] + data[at + 8 : at + 25] + body) == checksum
        assert found == number, "a gap"
        assert at_us >= before
        yield Frame(number, at_us, kind, msgspec.msgpack.decode(body, strict=False))
        number, before = number + 1, at_us
        at += 25 + length
        if kind == END:
            assert at == len(data), "frames after the end mark"
            return
    raise Cut("no end mark")


def ended(path: Path) -> int:
    """Why the recording has ended."""
    *_, last = frames(path)
    return last.fields[0]


class Hashes:
    """The page hashes that a file has so far."""

    def __init__(self) -> None:
        self._known: list[bytes] = []

    def expand(self, items: list[Any], hash_bytes: int) -> bytes:
        pages: list[bytes] = []
        for item in items:
            if isinstance(item, bytes):
                fresh = [item[at : at + hash_bytes] for at in range(0, len(item), hash_bytes)]
                self._known += fresh
                pages += fresh
            else:
                first, count = item
                assert len(self._known) - WINDOW <= first
                pages += self._known[first : first + count]
                assert first + count <= len(self._known)
        return b"".join(pages)


def calls(path: Path) -> list[tuple[str, dict[str, Any], Any]]:
    """Returns the calls with their arguments and answers, in the order of the calls."""
    found: dict[int, list[Any]] = {}
    for frame in frames(path):
        if frame.kind == CALL:
            found[frame.number] = [frame.fields[0], frame.fields[1], None]
        elif frame.kind == RETURN:
            found[frame.fields[0]][2] = frame.fields[1]
    return [tuple(call) for call in found.values()]
