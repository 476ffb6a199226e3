"""vLLM's own prefix cache is emptied while pages are loaded.

vLLM resets its pool of pages only while no page is held. Requests under a load hold theirs, and vLLM takes none back
from them. Their references are given up for the moment of the reset, in which nobody takes pages, and taken again: the
pages stay where they are and lose their names. Such a load must be reported to have failed as a whole.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


def reset_beside_loads(pool: "BlockPool", tables: list[list[int]], reset: Callable[[], bool]) -> bool:
    """Resets the pool although requests under a load hold these pages; as vLLM says, not while others hold any."""
    blocks = [pool.blocks[page] for table in tables for page in table]
    if any(block.ref_cnt < 1 for block in blocks):
        # Not the pages of vLLM's table any more: left to vLLM.
        return reset()
    pool.free_blocks(reversed(blocks))
    try:
        return reset()
    finally:
        pool.touch(blocks)
