"""Proofs of the mapping: bytes of device memory that a worker must find where this rank describes them.

Each part of the memory (an allocation, or a chunk of one) is opened by a handle of its own, which may map other memory
than was meant. The nonce proves the part that holds it. For every other part the worker receives bytes that were read
there shortly before, at a few places. One match proves the part, because a serving engine may overwrite the other
places meanwhile.

Memory that was never written is the same everywhere, so that its bytes would prove nothing. Each part of new memory
therefore gets a mark: random bytes at one place, which stay. No token reads memory that no token has written, and the
mark's bytes are small finite numbers in every element type: a kernel that weighs them with 0 gets 0.
"""

import bisect
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry import cuda

#: Size of a mark, and of each place that is read.
PROOF_BYTES = 32
#: Random places of a part that are read in addition to its mark.
_DRAWN = 3
#: Attempts to draw a place in a part, whose tensors may have gaps.
_TRIES = 16
#: Mask of a mark's bytes: in no number type do they give an exponent of all ones (infinity, NaN).
_SMALL_NUMBERS = 0x3F

_chance = random.SystemRandom()


@dataclass(frozen=True)
class _Elements:
    """The address ranges of a tensor's elements: runs of bytes, repeated at strides."""

    base: int
    end: int
    run: int
    #: Stride in bytes and length of each axis across runs, the widest stride first.
    steps: list[tuple[int, int]]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Elements":
        size = tensor.element_size()
        axes = zip(tensor.stride(), tensor.shape, strict=True)
        steps = sorted((step * size, length) for step, length in axes if length > 1)
        end = tensor.data_ptr() + size + sum(step * (length - 1) for step, length in steps)
        run = size
        while steps and steps[0][0] == run:
            run *= steps.pop(0)[1]
        return cls(tensor.data_ptr(), end, run, steps[::-1])

    def usable(self) -> bool:
        """Whether a run has room for a proof."""
        return self.run >= PROOF_BYTES and all(step > 0 for step, _ in self.steps)

    def place(self, address: int) -> int:
        """Returns an address for a proof in the run at ``address``, or in the run before it."""
        at, rest = self.base, address - self.base
        for step, length in self.steps:
            index = min(rest // step, length - 1)
            at, rest = at + index * step, rest - index * step
        return at + min(rest, self.run - PROOF_BYTES)


class Proofs:
    """Proofs of parts of memory (address and size, in ascending order) that hold these tensors."""

    def __init__(
        self, context: cuda.Context, parts: Sequence[tuple[int, int]], tensors: list[torch.Tensor], *, new: bool
    ):
        """Finds the tensors in each part. ``new``: no work uses the memory yet, and each part is marked.

        Raises:
            cuda.CudaError: the device does not take the marks.
        """
        self._context = context
        self._held: dict[tuple[int, int], list[_Elements]] = {part: [] for part in parts}
        begins = [address for address, _ in parts]
        for elements in filter(_Elements.usable, map(_Elements.of, tensors)):
            first = max(bisect.bisect_right(begins, elements.base) - 1, 0)
            for part in parts[first : bisect.bisect_left(begins, elements.end)]:
                self._held[part].append(elements)
        #: Address of each part's mark.
        self._marks: dict[tuple[int, int], int] = {}
        if new:
            found = {part: self._draw(part) for part in parts}
            self._marks = {part: place for part, place in found.items() if place is not None}
            context.write_all([(place, _mark()) for place in self._marks.values()])

    def _draw(self, part: tuple[int, int]) -> int | None:
        """Draws a random address in a part for a proof inside elements of a tensor; None when none was found."""
        address, size = part
        for _ in range(_TRIES if self._held[part] else 0):
            elements = _chance.choice(self._held[part])
            low, high = max(address, elements.base), min(address + size, elements.end) - PROOF_BYTES
            place = elements.place(_chance.randint(low, high)) if low <= high else 0
            if low <= place <= high:
                return place
        return None

    def read(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Reads a few places of each of these parts; returns addresses and bytes.

        Raises:
            cuda.CudaError: the memory cannot be read.
        """
        places: list[int] = []
        for part in parts:
            drawn = [self._marks.get(part), *(self._draw(part) for _ in range(_DRAWN))]
            places += {place for place in drawn if place is not None}
        found = self._context.read_all([(place, PROOF_BYTES) for place in places])
        return list(zip(places, found, strict=True))


def _mark() -> bytes:
    return bytes(byte & _SMALL_NUMBERS for byte in secrets.token_bytes(PROOF_BYTES))
