"""Tests of the connector for TensorRT-LLM with an executor of our own, a real leader and real workers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trtllm_stubs
from daemon import Daemon, eventually, running
from trtllm_executor import BLOCK, VOCABULARY, Executor
from trtllm_stubs import NEW, OLD


@pytest.fixture(params=[(NEW, 1), (NEW, 2), (OLD, 1)], ids=["1 rank", "2 ranks", "old path"], scope="module")
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The module of the interface, and the number of ranks."""
    return request.param


@pytest.fixture(scope="module")
def connector(case: tuple[str, int]) -> Iterator[Any]:
    with trtllm_stubs.installed(trtllm_stubs.interface(case[0])):
        yield trtllm_stubs.connector()


@pytest.fixture
def daemon(case: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with running(ranks=case[1], g2="32MiB") as daemon:
        daemon.ranks = case[1]
        monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(daemon.socket_dir))
        # A busy machine does not answer within 2 ms.
        monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "1000")
        # A busy machine does not store within 2 s.
        monkeypatch.setenv("KVFERRY_TRTLLM_STORE_HOLD_MS", "20000")
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


def test_a_prompt_that_ends_with_a_block_is_not_loaded_as_a_whole(executor: Executor) -> None:
    tokens = prompt(2, 4 * BLOCK)
    executor.complete(tokens)
    executor.rest()
    executor.clear()
    assert executor.complete(tokens).matched == 3 * BLOCK
    executor.rest()
    executor.clear()
    # One token more: all four blocks were stored.
    assert executor.complete([*tokens, 1]).matched == 4 * BLOCK


def test_generated_tokens_are_stored_and_loaded(executor: Executor) -> None:
    first = executor.complete(prompt(3, 2 * BLOCK), max_new=3 * BLOCK)
    executor.rest()
    executor.clear()
    again = executor.complete(first.tokens[: 5 * BLOCK], max_new=1)
    assert (again.device, again.matched) == (0, 4 * BLOCK)


def test_a_load_begins_behind_what_the_device_has(connector: Any, daemon: Daemon, model: str) -> None:
    executor = start(connector, daemon, model, forgets=0.0)
    try:
        tokens = prompt(4, 8 * BLOCK + 1)
        first = executor.complete(tokens)
        executor.rest()
        for key in executor._keys(first)[3:]:
            if key in executor.tree:
                executor._forget(executor.tree[key])
        again = executor.complete(tokens)
        assert (again.device, again.matched) == (3 * BLOCK, 5 * BLOCK)
        executor.rest()
    finally:
        executor.close()


def test_a_hit_of_the_device_that_ends_inside_a_block_is_computed(connector: Any, daemon: Daemon, model: str) -> None:
    executor = start(connector, daemon, model, partial=1.0, forgets=0.0)
    try:
        tokens = prompt(5, 8 * BLOCK + 1)
        first = executor.complete(tokens)
        executor.rest()
        for key in executor._keys(first)[3:]:
            if key in executor.tree:
                executor._forget(executor.tree[key])
        again = executor.complete(tokens)
        assert again.device // BLOCK == 3
        assert again.device % BLOCK > 0
        assert again.matched == 0
        executor.rest()
    finally:
        executor.close()


def test_salts_adapters_and_other_inputs_are_kept_apart(executor: Executor) -> None:
    tokens = prompt(6, 5 * BLOCK + 1)
    executor.complete(tokens)
    salts: list[dict[str, Any]] = [{"cache_salt_id": 1}, {"cache_salt_id": 2}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    for named in (*salts, {"lora_task_id": 1}, {"multimodal_hashes": [[1]]}):
        executor.rest()
        executor.clear()
        assert executor.complete(tokens, **named).matched == 0, named
    for named, blocks in (
        ({}, 5),
        *((salt, 5) for salt in salts),
        ({"lora_task_id": 1}, 5),
        ({"multimodal_hashes": [[1]]}, 0),
    ):
        executor.rest()
        executor.clear()
        assert executor.complete(tokens, **named).matched == blocks * BLOCK, named


def test_another_start_of_the_engine_loads_what_the_first_one_stored(
    connector: Any, daemon: Daemon, model: str
) -> None:
    tokens = prompt(7, 5 * BLOCK + 1)
    first = start(connector, daemon, model)
    first.complete(tokens)
    first.complete(tokens, lora_task_id=1)
    first.rest()
    first.close()
    second = start(connector, daemon, model)
    try:
        assert second.complete(tokens).matched == 5 * BLOCK
        # The number of an adapter names no weights.
        assert second.complete(tokens, lora_task_id=1).matched == 0
        second.rest()
    finally:
        second.close()
    (Path(model) / "model.safetensors").write_bytes(b"other")
    third = start(connector, daemon, model, weights="other")
    try:
        assert third.complete(tokens).matched == 0
    finally:
        third.close()


@pytest.mark.parametrize("mode", ["load", "store"])
def test_modes_leave_out_stores_or_loads(
    connector: Any, daemon: Daemon, model: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(8, 5 * BLOCK + 1)
    monkeypatch.setenv("KVFERRY_TRTLLM_MODE", mode)
    executor = start(connector, daemon, model)
    try:
        executor.complete(tokens)
        executor.rest()
        executor.clear()
        assert executor.complete(tokens).matched == 0
        executor.rest()
        assert (daemon.status()["tiers"][0]["used_pages"] > 0) == (mode == "store")
    finally:
        executor.close()


def test_the_switch_turns_lookups_and_stores_off(executor: Executor, daemon: Daemon) -> None:
    tokens = prompt(9, 5 * BLOCK + 1)
    executor.complete(tokens)
    executor.rest()
    executor.clear()
    (daemon.socket_dir / "off").touch()
    eventually("the switch is seen", lambda: executor.scheduler._side._switch.off)
    assert executor.complete(tokens).matched == 0
    executor.rest()
    executor.clear()
    (daemon.socket_dir / "off").unlink()
    eventually("the switch is seen", lambda: not executor.scheduler._side._switch.off)
    assert executor.complete(tokens).matched == 5 * BLOCK


def test_a_request_that_loads_alone_gets_its_end_without_metadata(executor: Executor) -> None:
    tokens = prompt(10, 5 * BLOCK + 1)
    executor.complete(tokens)
    executor.rest()
    executor.clear()
    request = executor.add(tokens)
    executor.iterate()
    built = executor.calls["build_connector_meta"]
    executor.run(lambda: request.state == "context", "the load is reported")
    assert executor.calls["build_connector_meta"] == built, "no batch, no metadata"


def test_calls_are_made_as_often_as_the_interface_promises(executor: Executor) -> None:
    for seed in range(4):
        executor.add(prompt(seed, 3 * BLOCK + 1), max_new=6)
    executor.run(lambda: not executor.requests, "all have run")
    calls = executor.calls
    assert calls["get_num_new_matched_tokens"] == calls["update_state_after_alloc"] == 4
    assert calls["request_finished"] == 4
    ranks = len(executor.ranks)
    assert calls["bind_connector_meta"] == ranks * calls["build_connector_meta"]
    assert calls["wait_for_save"] == ranks * calls["forward"]
    assert calls["wait_for_layer_load"] == calls["save_kv_layer"] == ranks * calls["forward"] * 2


def test_a_load_waits_for_the_last_step_that_ran_a_forward_pass(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may still write to pages that a request has given back."""
    executor.complete(prompt(11, 5 * BLOCK + 1))
    executor.rest()
    executor.clear()
    client = executor.scheduler._side._client
    loads, metadata = [], []
    load, build = client.load, executor.scheduler.build_connector_meta

    def loaded(*arguments: Any, **named: Any) -> Any:
        loads.append(named["after"])
        return load(*arguments, **named)

    def built(output: Any) -> Any:
        metadata.append(build(output))
        return metadata[-1]

    monkeypatch.setattr(client, "load", loaded)
    monkeypatch.setattr(executor.scheduler, "build_connector_meta", built)
    executor.complete([1], max_new=1)
    step = metadata[-1]
    assert step.written_through > step.needed_before
    request = executor.add(prompt(11, 5 * BLOCK + 1))
    executor.iterate()
    assert loads == [step.written_through]
    assert metadata[-1].written_through == step.written_through, "no forward pass, no number"
    assert metadata[-1].needed_before == step.written_through, "ranks report what the load waits for"
    executor.run(lambda: request in executor.finished, "the request is over")


def test_with_overlap_the_tokens_of_a_running_pass_are_not_stored_too_early(
    connector: Any, daemon: Daemon, model: str
) -> None:
    executor = start(connector, daemon, model, overlap=True)
    try:
        first = executor.complete(prompt(12, 2 * BLOCK), max_new=3 * BLOCK)
        executor.rest()
        executor.clear()
        again = executor.complete(first.tokens[: 5 * BLOCK], max_new=1)
        assert (again.device, again.matched) == (0, 4 * BLOCK)
        assert again.tokens == first.tokens[: 5 * BLOCK] + again.tokens[5 * BLOCK :]
        executor.rest()
    finally:
        executor.close()
