"""Tests of the connector for TensorRT-LLM with KV memory in regions, as the manager V2 describes it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm_stubs
from daemon import Daemon, eventually, running
from test_trtllm import prompt
from test_trtllm_schedules import Schedule
from trtllm_executor import BLOCK, ExecutorV2, args, layout_of
from trtllm_faults import between
from trtllm_stubs import NEW


@pytest.fixture(scope="module")
def connector() -> Iterator[Any]:
    with trtllm_stubs.installed(trtllm_stubs.interface(NEW)):
        yield trtllm_stubs.connector()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with running(ranks=1, g2="32MiB") as daemon:
        monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(daemon.socket_dir))
        monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "1000")
        monkeypatch.setenv("KVFERRY_TRTLLM_STORE_HOLD_MS", "20000")
        yield daemon


@pytest.fixture
def executor(connector: Any, daemon: Daemon, tmp_path: Path) -> Iterator[ExecutorV2]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    executor = ExecutorV2(connector, str(tmp_path))
    eventually("the rank is registered", lambda: executor.registered)
    daemon.wait_ready()
    yield executor
    executor.close()


TOKENS = prompt(30, 6 * BLOCK + 1)


def test_pages_are_stored_when_their_request_ends(executor: ExecutorV2, daemon: Daemon) -> None:
    request = executor.add(TOKENS, max_new=3 * BLOCK)
    executor.run(lambda: request.state == "generating", "the prompt is computed")
    for _ in range(BLOCK):
        executor.iterate()
    assert len(executor.scheduler._side.stores) == 0, "a running request may lose its pages"
    assert daemon.status()["tiers"][0]["used_pages"] == 0
    executor.rest()
    assert executor.calls["loaded"] == 0
    executor.clear()
    again = executor.complete(TOKENS)
    assert again.matched == 6 * BLOCK
    assert again.tokens[: len(request.tokens)] == request.tokens[: len(again.tokens)]


def test_an_offer_that_is_not_taken_as_a_whole_is_loaded_in_part(executor: ExecutorV2) -> None:
    executor.complete(TOKENS)
    executor.rest()
    executor.short = 1.0
    seen = set()
    for _ in range(12):
        executor.clear()
        seen.add(executor.complete(TOKENS, max_new=1).matched // BLOCK)
        executor.rest()
    assert len(seen) > 2
    assert max(seen) < 6


def test_random_schedules_with_regions(executor: ExecutorV2, daemon: Daemon) -> None:
    flaky = between(executor)
    executor.short = 0.3
    loaded = 0
    for seed in range(10_000, 10_010):
        schedule = Schedule(seed, executor, flaky, daemon)
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            schedule._go_on()
        loaded += schedule.counts["loaded blocks"]
    assert loaded > 20


@pytest.mark.parametrize(
    ("changes", "ranks", "text"),
    [
        ({}, 2, "tensor_parallel_size is 2"),
        ({"groups": ()}, 1, "0 groups of layers"),
        ({"group": {"window_size": 512}}, 1, "a window of 512 tokens"),
        ({"group": {"replicated_regions": (1,)}}, 1, "regions that are equal on all ranks"),
        ({"group": {"regions": (SimpleNamespace(num_slots=1), SimpleNamespace(num_slots=2))}}, 1, "several lengths"),
        ({"tokens_per_block": 64}, 1, "blocks of 64 tokens, and tokens_per_block is 4"),
    ],
)
def test_other_regions_are_refused_with_the_switch(
    connector: Any, tmp_path: Path, changes: dict[str, Any], ranks: int, text: str
) -> None:
    worker = connector.Worker(args(str(tmp_path), tensor_parallel_size=ranks))
    layout = layout_of(torch.zeros(8, 2, 2, BLOCK, dtype=torch.int64), **changes)
    with pytest.raises(RuntimeError, match="use_kv_cache_manager_v2 to False") as refused:
        worker.register_kv_cache_layout(layout)
    assert text in str(refused.value)
