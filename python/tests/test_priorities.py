"""Pages that are stored with a priority, in a leader whose host memory evicts by it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon import TIMEOUT_S, eventually, running
from test_typed_clients import CLIENTS, Clients, answer_of

from kvferry import wire
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import PRIORITIES, Part

ENGINE = b"e" * 16
#: Pages of host memory, and those of the device.
ROOM, PAGES = 8, 16
PAGE_BYTES = 1024


class Engine:
    """An engine with one rank, beside a leader with little memory."""

    def __init__(self, socket_dir: Path, clients: Clients, policy: str):
        self.tensor = torch.arange(PAGES * PAGE_BYTES // 4, dtype=torch.float32).reshape(PAGES, 1, 8, -1)
        group = Group({"layer": self.tensor}, engine_page_tokens=8, device_pages=PAGES)
        memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
        self.rank = RankSession(socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
        self.client = clients.engine(socket_dir / "leader", ENGINE, first_id=1, name="test")
        self.client.start()
        self.policy = policy
        self._slot = 0

    def lookup(self, first: int, count: int) -> tuple[int, int]:
        """Looks up a sequence of `count` pages, and returns its slot and the pages that were found."""
        self._slot += 1
        hashes = [number.to_bytes(16, "big") for number in range(first + 1, first + count + 1)]
        found = answer_of(self.client.lookup(self._slot, hashes, timeout_s=TIMEOUT_S))
        return self._slot, found.hit_pages

    def store(self, first: int, count: int, priority: int | None) -> wire.StoreAnswer:
        slot, _ = self.lookup(first, count)
        parts = [Part(0, 0, list(range(count)), priority)]
        store = self.client.store(slot, parts, timeout_s=TIMEOUT_S)
        self.rank.wrote(store.id)
        answer: Any = answer_of(store)
        answer_of(self.client.finish(slot, timeout_s=TIMEOUT_S))
        return answer

    def found(self, first: int, count: int) -> int:
        slot, pages = self.lookup(first, count)
        answer_of(self.client.finish(slot, timeout_s=TIMEOUT_S))
        return pages

    def close(self) -> None:
        self.client.close()
        self.rank.close()


@pytest.fixture(params=[(name, policy) for name in CLIENTS for policy in ("priority", "lru")], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name, policy = request.param
    with running(ranks=1, ratio=2, g2=f"{ROOM}x1KiB", g2_policy=f"eviction={policy}") as daemon:
        made = Engine(daemon.socket_dir, CLIENTS[name], policy)
        try:
            eventually("lookups are served", lambda: made.rank.registered and daemon.status().get("ready"))
            yield made
        finally:
            made.close()


def test_pages_of_a_lower_priority_leave_first(engine: Engine) -> None:
    """By the order of their use alone, the first ones would."""
    kept, third = 100, ROOM // 4
    assert engine.store(kept, third, PRIORITIES[-1]) == wire.StoreAnswer(third, 0)
    assert engine.store(200, third, None) == wire.StoreAnswer(third, 0)
    assert engine.store(300, third, 0) == wire.StoreAnswer(third, 0)
    assert engine.store(400, third, None) == wire.StoreAnswer(third, 0)
    # Each needs the place of one of the first four.
    for number, gone in enumerate((300, 200) if engine.policy == "priority" else (kept, 200)):
        assert engine.store(500 + 100 * number, third, 7) == wire.StoreAnswer(third, 0)
        assert engine.found(gone, third) == 0, gone
    assert engine.found(kept, third) == (third if engine.policy == "priority" else 0)


def test_a_priority_that_no_leader_takes_names_no_part() -> None:
    for priority in (-1, 8):
        with pytest.raises(ValueError, match=f"priority is {priority}: give a number from 0 to 7, or None"):
            Part(0, 0, [1], priority)
