"""Checksums of pages in an engine's memory, taken with torch where the memory is.

The bytes of a page are read as 32-bit words. A word counts with a weight of 64 random bits that depends on its place in
a row of :data:`ROW_WORDS`; the rows of a page, of all layers, count with further weights. Sums wrap around at 64 bits.
With random weights, two contents of a page have equal upper 32 bits of the sum with a probability below 2**-30, also
if they differ in a single bit, or if words, rows, layers or pages have changed places. The weights are constants: they
are the same in every process and version, and do not protect against bytes that were chosen to have an equal sum.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

logger = logging.getLogger("kvferry")

#: Words of a row: 128 KiB of a page, and 256 KiB of weights on the device.
ROW_WORDS = 1 << 15
#: Most bytes of pages that are gathered at a time, unless one layer's part of one page is longer. Their products with
#: the weights take twice as much: 24 MiB of a GPU together; on a CPU they stay in its caches.
GATHER_BYTES = {"cuda": 8 << 20, "cpu": 256 << 10}
#: Most requests whose checksums the device has not finished. Further ones are not taken, and their pages count as
#: unverified. Each takes 8 bytes a page, 1 MiB with the pages of the longest message.
UNFINISHED_MAX = 256
#: Integers that have the size of an element, whatever its type is.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 4


class PageChecksums:
    """Takes checksums of the pages of some groups, each with its tensors and the number of its pages.

    Raises:
        ValueError: for a tensor that cannot be read as integers.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[torch.Tensor], int]]):
        self._groups = [[_by_page(tensor, pages) for tensor in tensors] for tensors, pages in groups]
        self.device = self._groups[0][0].device
        self._words = _weights(ROW_WORDS, seed=1).to(self.device)
        rows = max(sum(_rows(tensor) for tensor in group) for group in self._groups)
        #: Weights of the lower and the upper half of each row's sum.
        self._rows = _weights(2 * rows, seed=2).reshape(rows, 2).to(self.device)

    def of(self, group: int, pages: torch.Tensor) -> torch.Tensor:
        """Returns the checksum of each of these pages. Only submits work to the device."""
        total = torch.zeros(len(pages), dtype=torch.int64, device=self.device)
        first = 0
        for tensor in self._groups[group]:
            rows = _rows(tensor)
            weights = self._rows[first : first + rows]
            page_bytes = tensor[0].numel() * tensor.element_size()
            step = max(GATHER_BYTES[self.device.type] // page_bytes, 1)
            for at in range(0, len(pages), step):
                total[at : at + step] += self._part(tensor.index_select(0, pages[at : at + step]), weights)
            first += rows
        return total

    def zero(self, group: int, pages: torch.Tensor) -> None:
        """Writes zeros to these pages. Only submits work to the device."""
        for tensor in self._groups[group]:
            tensor.index_fill_(0, pages, 0)

    def _part(self, gathered: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns what one tensor adds to the checksum of each page."""
        found = gathered.reshape(len(gathered), -1).view(torch.uint8)
        if found.shape[1] % _WORD_BYTES:
            found = torch.nn.functional.pad(found, (0, -found.shape[1] % _WORD_BYTES))
        words = found.view(torch.int32)
        total = torch.zeros(len(gathered), dtype=torch.int64, device=gathered.device)
        for row in range(weights.shape[0]):
            some = words[:, row * ROW_WORDS : (row + 1) * ROW_WORDS]
            inner = (some * self._words[: some.shape[1]]).sum(1)
            halves = torch.stack((inner & 0xFFFFFFFF, inner >> 32), 1)
            total += (halves * weights[row]).sum(1)
        return total


def _by_page(tensor: torch.Tensor, pages: int) -> torch.Tensor:
    """Returns a view of a tensor as integers, with one index for each page first."""
    if tensor.element_size() not in _INTEGERS:
        raise ValueError(f"a KV tensor has elements of {tensor.element_size()} bytes: 1, 2, 4 and 8 are known")
    return tensor.view(_INTEGERS[tensor.element_size()]).unflatten(0, (pages, tensor.shape[0] // pages))


def _rows(tensor: torch.Tensor) -> int:
    return -(-tensor[0].numel() * tensor.element_size() // (_WORD_BYTES * ROW_WORDS))


def _weights(count: int, *, seed: int) -> torch.Tensor:
    """Returns odd numbers of 64 bits: the outputs of splitmix64, which every version computes alike."""
    with np.errstate(over="ignore"):
        state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 40)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _on(device: torch.device, pages: Sequence[int]) -> torch.Tensor:
    """Returns page numbers as a tensor on the device, without waiting for the device."""
    return torch.tensor(pages, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@dataclass
class _Taken:
    """Checksums that the device may still compute: for a request, in host memory once ``over`` returns True."""

    request: int
    sums: torch.Tensor
    over: Callable[[], bool]


class RankChecksums:
    """Takes the checksums that steps order, on one rank. For the thread of the forward pass. Never waits."""

    def __init__(self, pages: PageChecksums | None, *, rank: int, shard: int):
        """``pages``: None if this rank's memory cannot be read."""
        self._pages = pages
        self._rank, self._shard = rank, shard
        self._taken: deque[_Taken] = deque()
        self._results: dict[int, dict[int, tuple[int, bytes | None]]] = {}
        self._failed = False

    def take(self, orders: Sequence[tuple[int, Sequence[tuple[int, Sequence[int]]]]]) -> None:
        """Takes checksums: for each request, of the pages of some groups. The work joins the device's stream.

        A request whose checksums cannot be taken gets none, and the first failure is logged.
        """
        for request, parts in orders:
            if self._pages is None or self._failed or len(self._taken) >= UNFINISHED_MAX:
                self._end(request, None)
                continue
            try:
                self._taken.append(self._take(self._pages, request, parts))
            except Exception:
                self._failed = True
                self._end(request, None)
                logger.exception("kvferry: checksums of pages cannot be taken: loaded pages are not verified")

    def zero(self, parts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Writes zeros to the pages of some groups. The work joins the device's stream."""
        if self._pages is None:
            return
        for group, pages in parts:
            try:
                self._pages.zero(group, _on(self._pages.device, pages))
            except Exception:
                # vLLM computes these pages in any case; what it reads of them before is masked.
                logger.exception("kvferry: pages with wrong bytes cannot be overwritten with zeros")

    def _end(self, request: int, sums: bytes | None) -> None:
        self._results[request] = {self._rank: (self._shard, sums)}

    def _take(self, checksums: PageChecksums, request: int, parts: Sequence[tuple[int, Sequence[int]]]) -> _Taken:
        sums = torch.cat([checksums.of(group, _on(checksums.device, pages)) for group, pages in parts])
        if checksums.device.type == "cpu":
            return _Taken(request, sums, lambda: True)
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Taken(request, host, event.query)

    def results(self) -> dict[int, dict[int, tuple[int, bytes | None]]]:
        """Returns the checksums that are there, each request once.

        By request and rank: the rank's shard, and 8 bytes a page, or None if they were not taken.
        """
        while self._taken and self._taken[0].over():
            taken = self._taken.popleft()
            self._end(taken.request, taken.sums.numpy().astype("<i8").tobytes())
        results, self._results = self._results, {}
        return results
