"""The pages of a registered memory: where their bytes lie, by the description of docs/wire.md, without torch.

:class:`MappedMemory` is a worker's view of a rank's memory. :class:`OwnMemory` is memory of this process, and its
description, for an engine that is played by the checks.
"""

import itertools
import math
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: Most contiguous pieces of a page, all tensors together: the limit of the wire.
PIECES_MAX = 8192
#: Most bytes of a page, all tensors together: the limit of the wire.
PAGE_BYTES_MAX = 1 << 30
_PROOF_BYTES = 32


class Refused(Exception):
    """A registration that is not accepted. ``rule``: of the contract, that it breaks; empty for none."""

    def __init__(self, text: str, rule: str = ""):
        super().__init__(text)
        self.rule = rule


@dataclass(frozen=True)
class _Tensor:
    """Where the pages of one tensor lie in an allocation."""

    allocation: int
    offset: int
    page_stride: int
    #: Offset in the page, and length, of each contiguous piece.
    pieces: tuple[tuple[int, int], ...]

    def of(self, page: int) -> list[tuple[int, int]]:
        """Returns offset and length of each piece of a page."""
        base = self.offset + page * self.page_stride
        return [(base + offset, length) for offset, length in self.pieces]

    @property
    def bytes(self) -> int:
        return sum(length for _, length in self.pieces)


@dataclass(frozen=True)
class MappedGroup:
    """One group of a registration."""

    page_tokens: int
    device_pages: int
    attention: str
    tensors: tuple[_Tensor, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)


def _pieces(shape: Sequence[int], strides: Sequence[int], element: int) -> tuple[tuple[int, int], ...]:
    """Returns the contiguous pieces of one page: offset and length in bytes."""
    axes = sorted((step, length) for step, length in zip(strides, shape, strict=True) if length != 1)
    run = 1
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    count = math.prod(length for _, length in axes)
    if count > PIECES_MAX:
        raise Refused(f"a page has {count} contiguous pieces: at most {PIECES_MAX}", "registration-consistent")
    places = itertools.product(*(range(0, step * length, step) for step, length in axes))
    return tuple(sorted((sum(place) * element, run * element) for place in places))


def _wrong(field: str, value: object, remedy: str) -> Refused:
    return Refused(f"{field} is {value}: {remedy}", "registration-consistent")


def _number(entry: dict[str, Any], field: str, default: int | None = None) -> int:
    value = entry.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(field, repr(value), "give a number of at least 0")
    return value


def _tensor(entry: dict[str, Any], device_pages: int, sizes: Sequence[int]) -> _Tensor:
    shape, strides = entry.get("shape"), entry.get("strides")
    if not isinstance(shape, list) or not isinstance(strides, list) or len(shape) != len(strides) or not shape:
        raise _wrong("shape and strides", f"{shape!r} and {strides!r}", "give as many strides as lengths")
    axis, element = _number(entry, "page_axis"), _number(entry, "element_bytes")
    if axis >= len(shape) or shape[axis] != device_pages:
        raise _wrong("page_axis", axis, f"name the axis of {shape} with device_pages = {device_pages} pages")
    others = [at for at in range(len(shape)) if at != axis]
    page_bytes = element * math.prod(shape[at] for at in others)
    if _number(entry, "page_bytes") != page_bytes or not 0 < page_bytes <= PAGE_BYTES_MAX:
        raise _wrong(
            "page_bytes", entry["page_bytes"], f"element_bytes x all lengths but the page axis is {page_bytes}"
        )
    stride = element * strides[axis]
    if _number(entry, "page_stride_bytes") != stride:
        raise _wrong(
            "page_stride_bytes", entry["page_stride_bytes"], f"element_bytes x the page axis' stride is {stride}"
        )
    allocation, offset = _number(entry, "allocation"), _number(entry, "offset_bytes")
    if allocation >= len(sizes):
        raise _wrong("allocation", allocation, f"name one of {len(sizes)} allocations")
    pieces = _pieces([shape[at] for at in others], [strides[at] for at in others], element)
    end = offset + (device_pages - 1) * stride + max(at + length for at, length in pieces)
    if end > sizes[allocation]:
        raise _wrong("offset_bytes", offset, f"the tensor ends at byte {end} of an allocation of {sizes[allocation]}")
    return _Tensor(allocation, offset, stride, pieces)


def _descriptor(index: int, entry: dict[str, Any], take: Callable[[bytes], int | None]) -> int:
    """Opens an allocation; the caller closes the descriptor."""
    match entry:
        case {"kind": "shared_memory", "handle": {"ticket": bytes() as ticket}}:
            fd = take(ticket)
            if fd is None:
                text = f"ticket {ticket.hex()} of allocation {index} is unknown: send its descriptor first"
                raise Refused(text, "registration-consistent")
            return fd
        case {"kind": "shared_memory", "handle": {"path": str() as path}}:
            try:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise Refused(f"allocation {index}: {path}: {error}", "registration-consistent") from error
    raise Refused(
        f"allocation {index} is of kind {entry['kind']!r}: these checks map shared memory, and no device memory: run "
        "the engine on the CPU"
    )


class MappedMemory:
    """A rank's memory, mapped by the descriptors that its tickets name."""

    def __init__(self, registration: dict[str, Any], take: Callable[[bytes], int | None]):
        """Maps the memory. ``take`` returns the descriptor of a ticket, which is closed here; None without one.

        Raises:
            Refused: with the field and the remedy.
        """
        self.content = registration.get("content") or b""
        if not isinstance(self.content, bytes) or not 1 <= len(self.content) <= 1024:
            raise Refused(f"content is {self.content!r}: give 1 to 1,024 bytes", "content-given")
        self.rank, self.ranks = _number(registration, "rank", 0), _number(registration, "tp_size", 1)
        self._maps: list[mmap.mmap] = []
        try:
            self._open(registration, take)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.close()
            raise Refused(f"the registration cannot be read: {error!r}", "registration-consistent") from error
        except Refused:
            self.close()
            raise

    def _open(self, registration: dict[str, Any], take: Callable[[bytes], int | None]) -> None:
        for index, entry in enumerate(registration["allocations"]):
            fd = _descriptor(index, entry, take)
            try:
                size = _number(entry, "bytes")
                if os.fstat(fd).st_size < size:
                    raise _wrong("bytes", size, f"the file of allocation {index} has {os.fstat(fd).st_size} bytes")
                self._maps.append(mmap.mmap(fd, size))
            finally:
                os.close(fd)
        sizes = [len(each) for each in self._maps]
        groups = []
        for entry in registration["groups"]:
            pages = _number(entry, "device_pages")
            tensors = tuple(_tensor(tensor, pages, sizes) for tensor in entry["tensors"])
            tokens = _number(entry, "engine_page_tokens")
            if not tensors or not tokens or not pages:
                raise _wrong("groups", f"{len(tensors)} tensors, {pages} pages of {tokens} tokens", "give 1 or more")
            groups.append(MappedGroup(tokens, pages, entry.get("attention", "full"), tensors))
        self.groups = groups
        self.hash_tokens = _number(registration, "hash_tokens", 0) or groups[0].page_tokens
        self._prove(registration)

    def _prove(self, registration: dict[str, Any]) -> None:
        proofs = [registration["nonce"], *(registration.get("proofs") or [])]
        for proof in proofs:
            allocation, offset, data = proof["allocation"], proof["offset_bytes"], proof["bytes"]
            if not isinstance(data, bytes) or not 16 <= len(data) <= 64:
                raise Refused(f"a proof has {len(data)} bytes: give 16 to 64", "registration-proven")
            if self._maps[allocation][offset : offset + len(data)] != data:
                text = f"allocation {allocation} does not hold its proof at byte {offset}: check its handle"
                raise Refused(text, "registration-proven")

    def read(self, group: int, page: int) -> bytes:
        """Returns the bytes of a page: its pieces, one tensor after the other."""
        found = []
        for tensor in self.groups[group].tensors:
            memory = self._maps[tensor.allocation]
            found += [memory[at : at + length] for at, length in tensor.of(page)]
        return b"".join(found)

    def write(self, group: int, page: int, data: bytes) -> None:
        """Writes the bytes of a page, in the order of :meth:`read`."""
        begin = 0
        for tensor in self.groups[group].tensors:
            memory = self._maps[tensor.allocation]
            for at, length in tensor.of(page):
                memory[at : at + length] = data[begin : begin + length]
                begin += length

    def close(self) -> None:
        """Unmaps the memory."""
        for each in self._maps:
            each.close()
        self._maps = []


class OwnMemory:
    """Shared memory of one rank: ``pages`` pages, in two layers with K and V apart."""

    LAYERS = 2

    def __init__(
        self, *, pages: int, page_tokens: int, page_bytes: int, rank: int, ranks: int, shard: int, content: bytes
    ):
        self.pages, self.page_bytes = pages, page_bytes
        self._page_tokens, self._rank, self._ranks, self.shard = page_tokens, rank, ranks, shard
        self._content = content
        self._piece = page_bytes // (2 * self.LAYERS)
        size = pages * page_bytes
        self._size = size + mmap.PAGESIZE
        self.fd = os.memfd_create("kvferry-contract", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self._size)
        self._map = mmap.mmap(self.fd, self._size)
        self._nonce_at = size

    def _places(self, page: int) -> list[int]:
        # Layer, K or V, page: the bytes of a page lie apart.
        return [(tensor * self.pages + page) * self._piece for tensor in range(2 * self.LAYERS)]

    def write(self, page: int, data: bytes) -> None:
        """Writes a page."""
        for at, place in enumerate(self._places(page)):
            self._map[place : place + self._piece] = data[at * self._piece : (at + 1) * self._piece]

    def read(self, page: int) -> bytes:
        """Returns the bytes of a page."""
        return b"".join(self._map[place : place + self._piece] for place in self._places(page))

    def describe(self, ticket: bytes) -> dict[str, Any]:
        """Returns the registration of this memory, with a new proof."""
        nonce = secrets.token_bytes(_PROOF_BYTES)
        self._map[self._nonce_at : self._nonce_at + len(nonce)] = nonce
        tensors = [
            {
                "layer": number // 2,
                "role": "kv"[number % 2],
                "allocation": 0,
                "offset_bytes": number * self.pages * self._piece,
                "shape": [self.pages, self._piece],
                "strides": [self._piece, 1],
                "element_bytes": 1,
                "page_axis": 0,
                "page_bytes": self._piece,
                "page_stride_bytes": self._piece,
            }
            for number in range(2 * self.LAYERS)
        ]
        group = {
            "attention": "full",
            "window_tokens": 0,
            "engine_page_tokens": self._page_tokens,
            "device_pages": self.pages,
            "layers": self.LAYERS,
            "tensors": tensors,
        }
        return {
            "groups": [group],
            "content": self._content,
            "rank": self._rank,
            "tp_size": self._ranks,
            "shard": self.shard,
            "allocations": [{"kind": "shared_memory", "handle": {"ticket": ticket}, "bytes": self._size}],
            "nonce": {"allocation": 0, "offset_bytes": self._nonce_at, "bytes": nonce},
        }

    def close(self) -> None:
        """Closes the descriptor and unmaps the memory."""
        self._map.close()
        os.close(self.fd)
