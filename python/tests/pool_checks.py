"""What must be true of vLLM's pool of pages after each step of a random schedule, and of an engine at rest."""

import collections
from typing import TYPE_CHECKING

import records
from fake_device import Wrong
from fake_requests import Copy
from vllm.v1.request import RequestStatus

from kvferry.served import NO_PAGE

if TYPE_CHECKING:
    from schedules import Schedule


def _tables(engine: "Schedule") -> dict[str, collections.Counter[int]]:
    """The pages that each request holds."""
    tables: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for manager in engine.manager.coordinator.single_type_managers:
        for name, blocks in manager.req_to_blocks.items():
            tables[name].update(block.block_id for block in blocks if block.block_id != NO_PAGE)
    return tables


def check_new(engine: "Schedule", copy: Copy) -> None:
    """Checks a load or a store when it is requested."""
    assert copy.pages, "a copy of nothing"
    assert NO_PAGE not in copy.device_pages, f"a copy names the null page: {copy}"
    assert len({(group.number, at) for group, at, _ in copy.pages}) == len(copy.pages), f"named twice: {copy}"
    if not copy.store:
        holders = [name for name, pages in _tables(engine).items() if pages.keys() & set(copy.device_pages)]
        assert len(holders) == 1, f"a load into pages of {holders}"
        assert not RequestStatus.is_finished(engine.scheduler.requests[holders[0]].status)


def check(engine: "Schedule") -> None:
    """Every reference is explained by a request or a store, and no page under a copy is free or handed on."""
    if engine.leader.found:
        raise engine.leader.found[0]
    assert not engine.connector.fault, f"{engine.connector.fault} failed"
    tables = _tables(engine)
    held: collections.Counter[int] = sum(tables.values(), collections.Counter())
    for _, blocks in engine.scheduler.deferred_frees:
        held.update(block.block_id for block in blocks if block.block_id != NO_PAGE)
    for store in engine.side._copies._open.values():
        held.update(store.pages if store.store else [])
    for block in engine.pool.blocks[1:]:
        if block.ref_cnt != held[block.block_id]:
            raise Wrong(f"page {block.block_id} has {block.ref_cnt} references, {held[block.block_id]} explained")
    assert engine.pool.get_num_free_blocks() == engine.pages - 1 - len(held)
    for copy in engine.leader.running():
        for page in copy.device_pages:
            if copy.store:
                assert engine.pool.blocks[page].ref_cnt, f"page {page} is free and read by {copy}"
                continue
            holders = [name for name, pages in tables.items() if page in pages]
            assert len(holders) == 1, f"page {page} is written by {copy} and held by {holders}"
            assert engine.pool.blocks[page].ref_cnt == 1
            status = engine.scheduler.requests[holders[0]].status
            loading = status == RequestStatus.WAITING_FOR_REMOTE_KVS or RequestStatus.is_finished(status)
            assert loading, f"{holders[0]} is {status.name} while page {page} is written by {copy}"


def check_rest(engine: "Schedule") -> None:
    """Nothing is held or tracked any longer, here or at the leader."""
    side, leader = engine.side, engine.leader
    assert engine.pool.get_num_free_blocks() == engine.pages - 1, "pages are held by nothing"
    found = {
        **records.left(side),
        "finishes": side._finishes._open,
        "finishes to retry": side._finishes._to_retry,
        "slots of the leader": leader.slots,
        "copies of the leader": leader.copies,
        "requests to the leader": leader.open,
    }
    assert not any(found.values()), {name: what for name, what in found.items() if what}
