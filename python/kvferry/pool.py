"""A memory pool of torch whose memory other processes can open, whichever allocator is in use around it."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from kvferry import cuda


class KvPool:
    """The pool for one rank's KV memory. Must live as long as the memory."""

    def __init__(self, whole_allocations: Callable[[], AbstractContextManager[None]]):
        """Creates the pool and tries it, which takes 2 MiB of the device.

        In a block of ``whole_allocations`` torch allocates whole ranges, not chunks (``expandable_segments``).

        Raises:
            RuntimeError: torch has no such pools.
            OSError: other processes cannot open the pool's memory.
        """
        self._whole_allocations = whole_allocations
        self._pool = torch.cuda.MemPool()
        with self.allocating():
            #: Keeps what was tried: the pool would give its memory to the KV otherwise.
            self._tried = torch.empty(1, dtype=torch.uint8, device="cuda")
        context = cuda.Context()
        base, _ = context.range_of(self._tried.data_ptr())
        context.handle_of(base)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Makes torch allocate in the pool while the ``with`` block runs."""
        with self._whole_allocations(), torch.cuda.use_mem_pool(self._pool):
            yield
