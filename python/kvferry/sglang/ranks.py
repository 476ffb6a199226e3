"""The ranks of one engine, and what they agree on, over SGLang's own group of CPU processes.

Each call is a collective: every rank must make the same calls in the same order. With one rank no call waits. A rank
that has ended ends the others' calls by the time limit of SGLang's group.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The ranks of a process group; ``None``: this process alone."""

    def __init__(self, group: Any = None):
        alone = group is None or not dist.is_initialized()
        self._group = group
        self.size = 1 if alone else dist.get_world_size(group=group)
        self.rank = 0 if alone else dist.get_rank(group=group)

    def all(self, value: bool) -> bool:
        """Whether the value is true on every rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor([int(value)], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return bool(tensor.item())

    def same(self, values: Sequence[int]) -> bool:
        """Whether all ranks give the same numbers, by a digest of 56 bits."""
        if self.size == 1:
            return True
        text = ",".join(map(str, values)).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        tensor = torch.tensor([digest, -digest], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        least, negated = tensor.tolist()
        return least == -negated

    def of_first(self, values: Sequence[int]) -> list[int]:
        """Returns the numbers of rank 0, of which every rank gives as many."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.int64)
        dist.broadcast(tensor, group_src=0, group=self._group)
        return tensor.tolist()

    def list_of_first(self, values: Sequence[int]) -> list[int]:
        """Returns the list of rank 0, whatever the others give."""
        (count,) = self.of_first([len(values)])
        if count == 0:
            return []
        return self.of_first(values if self.rank == 0 else [0] * count)
