"""Tests of the connector for TensorRT-LLM with ranks in processes of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trtllm_stubs
from daemon import eventually, running
from test_trtllm import prompt
from test_trtllm_schedules import Schedule
from trtllm_executor import BLOCK
from trtllm_faults import between
from trtllm_processes import ProcessExecutor


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ProcessExecutor]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with running(ranks=2, g2="32MiB") as daemon, trtllm_stubs.installed(trtllm_stubs.interface()):
        monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(daemon.socket_dir))
        monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "1000")
        monkeypatch.setenv("KVFERRY_TRTLLM_STORE_HOLD_MS", "20000")
        # The files are older than the process of each rank.
        monkeypatch.setenv("KVFERRY_TRTLLM_WEIGHTS", "test")
        executor = ProcessExecutor(trtllm_stubs.connector(), str(tmp_path), ranks=2)
        executor.daemon = daemon
        try:
            eventually("the ranks are registered", lambda: executor.registered)
            daemon.wait_ready()
            yield executor
        finally:
            executor.close()


def test_ranks_in_processes_of_their_own_store_and_load(executor: ProcessExecutor) -> None:
    tokens = prompt(60, 6 * BLOCK + 1)
    executor.complete(tokens)
    executor.rest()
    executor.clear()
    assert executor.complete(tokens).matched == 6 * BLOCK
    executor.rest()
    flaky = between(executor)
    loaded = 0
    for seed in range(20_000, 20_006):
        schedule = Schedule(seed, executor, flaky, executor.daemon)
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            schedule._go_on()
        loaded += schedule.counts["loaded blocks"]
    assert loaded > 10
    # A batch, so that the last ends are known to all ranks.
    executor.complete([1])
    executor.rest()
    executor.daemon.wait_idle()
