"""Tests of the connector for TensorRT-LLM with an executor of our own, a real leader and real workers."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trtllm_stubs
from daemon import Daemon, eventually, running
from trtllm_executor import BLOCK, VOCABULARY, Executor

_names = itertools.count()


@pytest.fixture(params=[trtllm_stubs.NEW, trtllm_stubs.OLD], ids=["new path", "old path"], scope="module")
def connector(request: pytest.FixtureRequest) -> Iterator[Any]:
    with trtllm_stubs.installed(trtllm_stubs.interface(request.param)):
        yield trtllm_stubs.connector()


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def daemon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with running(ranks=request.param, g2="32MiB") as daemon:
        daemon.ranks = request.param
        monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(daemon.socket_dir))
        # A busy machine does not answer within 2 ms.
        monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "1000")
        yield daemon


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return str(tmp_path)


@pytest.fixture
def executor(connector: Any, daemon: Daemon, model: str) -> Iterator[Executor]:
    executor = start(connector, daemon, model)
    yield executor
    executor.close()


def start(connector: Any, daemon: Daemon, model: str, **named: Any) -> Executor:
    executor = Executor(connector, model, ranks=daemon.ranks, **named)
    eventually("the ranks are registered", lambda: executor.registered)
    daemon.wait_ready()
    return executor


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]


def test_what_one_request_computed_another_one_loads(executor: Executor) -> None:
    tokens = prompt(1, 6 * BLOCK + 2)
    first = executor.complete(tokens)
    assert (first.device, first.matched) == (0, 0)
    executor.rest()
    executor.clear()
    again = executor.complete(tokens)
    assert (again.device, again.matched) == (0, 6 * BLOCK)
    assert again.tokens == first.tokens
    executor.rest()
    assert executor.calls["loaded"] == 1
    assert executor.calls["get_num_new_matched_tokens"] == executor.calls["update_state_after_alloc"] == 2
