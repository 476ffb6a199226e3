"""A reset of vLLM's own prefix cache while pages are loaded.

vLLM resets its pool of pages only while no page is held. Requests under a load hold their pages, and vLLM does not
preempt them. Their references are released for the duration of the reset, in which no pages are allocated, and taken
again: the pages stay where they are and lose their hashes. Such a load must be reported as failed as a whole.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


def reset_beside_loads(pool: "BlockPool", tables: list[list[int]], reset: Callable[[], bool]) -> bool:
    """Resets the pool although loading requests hold the pages of ``tables``. Fails if other references exist."""
    blocks = [pool.blocks[page] for table in tables for page in table]
    if any(block.ref_cnt < 1 for block in blocks):
        # The pages are no longer held by a request: let vLLM decide.
        return reset()
    pool.free_blocks(reversed(blocks))
    try:
        return reset()
    finally:
        pool.touch(blocks)
