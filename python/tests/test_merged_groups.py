"""``kvferry events`` with several groups of layers, and beside vLLM's own scheduler; vLLM's classes decode."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from daemon import Daemon, eventually, running
from engine import PAGE_TOKENS, tokens, transfer_config
from real_scheduler import Stepped, engine_config
from router import Page, Subscriber
from test_events_of_a_run import MINE, UNITS, SmallEngine, sequence_of
from test_merged_events import FakeEngine, Merged, port
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from kvferry import present_namespace
from kvferry.engine_client import EngineClient

#: Pages of a sequence in each group: their hashes end with these units.
LAST_UNITS = {0: range(UNITS), 1: range(1, UNITS, 2)}
PAGES = 64


def stored(sequence: int, group: int, number: int | None) -> BlockStored:
    """The engine's event for all pages of a sequence in a group, under the engine's number of the group."""
    asking, size = sequence_of(sequence), (8, 16)[group]
    return BlockStored(
        block_hashes=[100 * sequence + unit for unit in LAST_UNITS[group]],
        parent_block_hash=None,
        token_ids=asking.all_token_ids,
        block_size=size,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=number,
        kv_cache_spec_kind="full_attention",
    )


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(0)


@contextlib.contextmanager
def merged(context: zmq.Context, daemon: Daemon, **settings: Any) -> Iterator[tuple[FakeEngine, Subscriber]]:
    """An engine's publisher, and a subscriber of the merged stream."""
    publisher = FakeEngine(context, port(), port())
    command = Merged(daemon.socket_dir, publisher, **settings)
    endpoints = [f"tcp://127.0.0.1:{each}" for each in (command.port, command.replay_port)]
    try:
        publisher.subscribed()
        with Subscriber(*endpoints, topic="topic", first=None) as subscriber:
            yield publisher, subscriber
    finally:
        publisher.close()
        command.process.kill()
        command.process.wait()
        if command.process.stdout is not None:
            command.process.stdout.close()


def receive(publisher: FakeEngine, subscriber: Subscriber) -> set[Page]:
    publisher.answer_replays()
    # A batch that was published before the subscription reached the publisher comes by the replay alone.
    subscriber.replay()
    subscriber.poll()
    return subscriber.router.pages()


@pytest.mark.parametrize(("numbers", "blind"), [((0, 1), False), ((3, 1), False), ((0, 1), True)])
def test_pages_of_several_groups_are_announced_as_the_engine_numbers_the_groups(
    context: zmq.Context, tmp_path: Path, numbers: tuple[int, int], blind: bool
) -> None:
    daemon = Daemon(tmp_path / "s", ranks=1, ratio=4, g2="48x512", g3="64MiB", g3_dir=tmp_path / "disk")
    daemon.start()
    with contextlib.ExitStack() as stack:
        stack.callback(daemon.kill)
        engine = SmallEngine(daemon, tmp_path)
        stack.callback(engine.close)
        engine.wait_ready()
        present_namespace.write(daemon.socket_dir, 0, MINE, numbers)
        mode = "blind" if blind else "tiers"
        publisher, subscriber = stack.enter_context(merged(context, daemon, mode=mode))
        device: set[Page] = set()

        def agree(what: str) -> set[Page]:
            def equal() -> bool:
                told = receive(publisher, subscriber)
                held = device | {(medium, numbers[group], page) for medium, group, page in engine.held()}
                return told == ({(None, *page[1:]) for page in held} if blind else held)

            eventually(f"the subscriber has what engine and kvferry hold: {what}", equal)
            return subscriber.router.pages()

        for sequence in range(1, 13):
            events = [stored(sequence, group, number) for group, number in enumerate(numbers)]
            device.update(("GPU", event.group_idx, page) for event in events for page in event.block_hashes)
            publisher.publish(*events)
            engine.store(sequence)
        agree("after stores and evictions")
        assert any(isinstance(event, BlockRemoved) for event in subscriber.router.events) or blind
        # The first group of one sequence, and the second one of another leave the device.
        for sequence, group in ((1, 0), (2, 1)):
            pages = [100 * sequence + unit for unit in LAST_UNITS[group]]
            device -= {("GPU", numbers[group], page) for page in pages}
            publisher.publish(BlockRemoved(block_hashes=pages, medium="GPU", group_idx=numbers[group]))
        agree("after evictions of the device")
        for page in subscriber.router.pages():
            number, unit = divmod(page[2], 100)
            size = (8, 16)[numbers.index(page[1])]
            first = 100_000 * number + 8 * (unit + 1) - size
            assert subscriber.router.tokens(page) == list(range(first, first + size))
        publisher.publish({"type": "AllBlocksCleared"})
        device.clear()
        pages = agree("after a clear of the device")
        assert {page[1] for page in pages} == set(numbers)
        daemon.killed(daemon.leader)
        engine.wait_ready()
        agree("after a restart of the leader")


class Published(Stepped):
    """vLLM's own scheduler, whose events go to a publisher of the test."""

    def __init__(self, socket_dir: Path, publisher: FakeEngine):
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        config = engine_config(transfer_config(socket_dir, store_run_pages=1), kv_events_config=events)
        super().__init__(pages=PAGES, config=config, client=EngineClient)
        self.rank.register_kv_caches({"layer.0": torch.zeros(PAGES, 2, PAGE_TOKENS, 4, 32)})
        self._publisher = publisher
        self.scheduler.kv_event_publisher = self  # type: ignore[assignment]

    def publish(self, batch: KVEventBatch) -> None:
        self._publisher.publish(*batch.events)

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("blind", [False, True])
def test_pages_of_vllm_are_announced_without_a_namespace_on_the_command_line(context: zmq.Context, blind: bool) -> None:
    mode = "blind" if blind else "tiers"
    with running(ranks=1, ratio=4) as daemon, merged(context, daemon, mode=mode) as (publisher, subscriber):
        engine = Published(daemon.socket_dir, publisher)
        try:
            daemon.wait_ready()
            engine.run(engine.add(tokens(PAGE_TOKENS * 4, seed=1)))

            def announced(medium: str | None) -> set[int]:
                return {page[2] for page in receive(publisher, subscriber) if page[:2] == (medium, 0)}

            if blind:
                eventually("vLLM's pages are announced", lambda: len(announced(None)) == 4)
            else:
                eventually("both have the pages", lambda: len(announced("CPU")) == 4)
                assert announced("CPU") == announced("GPU")
            eventually("the store is over", lambda: daemon.status()["tiers"][0]["used_pages"] == 4)
            # vLLM drops its pages, and those in kvferry stay.
            assert engine.scheduler.reset_prefix_cache()
            engine.run(engine.add(tokens(PAGE_TOKENS, seed=2)[:8]))
            if blind:
                eventually("kvferry's pages stay", lambda: len(announced(None)) == 4)
            else:
                eventually("vLLM's pages are removed", lambda: not announced("GPU"))
                assert len(announced("CPU")) == 4
        finally:
            engine.scheduler.shutdown()
