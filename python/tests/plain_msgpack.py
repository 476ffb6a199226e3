"""A reader of MessagePack that shares no code with the writers under test. Maps become lists of pairs, in order."""

import struct
from typing import Any

_SIZED = {0xC4: ("B", bytes), 0xC5: (">H", bytes), 0xC6: (">I", bytes), 0xD9: ("B", str), 0xDA: (">H", str)}
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: "B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: "b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}


def read(data: bytes) -> Any:
    value, rest = _value(data)
    assert not rest
    return value


def _value(data: bytes) -> tuple[Any, bytes]:
    kind, rest = data[0], data[1:]
    match kind:
        case _ if kind < 0x80:
            return kind, rest
        case _ if kind < 0x90:
            return _pairs(kind & 0x0F, rest)
        case _ if kind < 0xA0:
            return _items(kind & 0x0F, rest)
        case _ if kind < 0xC0:
            return rest[: kind & 0x1F].decode(), rest[kind & 0x1F :]
        case 0xC0:
            return None, rest
        case 0xC2 | 0xC3:
            return kind == 0xC3, rest
        case 0xDC | 0xDD:
            count, rest = _number(">H" if kind == 0xDC else ">I", rest)
            return _items(count, rest)
        case 0xDE:
            count, rest = _number(">H", rest)
            return _pairs(count, rest)
        case _ if kind >= 0xE0:
            return kind - 256, rest
        case _ if kind in _NUMBERS:
            return _number(_NUMBERS[kind], rest)
        case _ if kind in _SIZED:
            form, of = _SIZED[kind]
            count, rest = _number(form, rest)
            return rest[:count].decode() if of is str else rest[:count], rest[count:]
    raise AssertionError(f"{kind:#x} is not known here")


def _number(form: str, data: bytes) -> tuple[Any, bytes]:
    size = struct.calcsize(form)
    return struct.unpack(form, data[:size])[0], data[size:]


def _items(count: int, data: bytes) -> tuple[list, bytes]:
    items = []
    for _ in range(count):
        item, data = _value(data)
        items.append(item)
    return items, data


def _pairs(count: int, data: bytes) -> tuple[list, bytes]:
    flat, rest = _items(2 * count, data)
    return list(zip(flat[::2], flat[1::2], strict=True)), rest
