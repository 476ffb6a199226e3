"""Tests of where vLLM allocates the KV cache of an engine that can sleep."""

import contextlib
import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from vllm.device_allocator import alloc_conf
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SinkFullAttentionSpec

from kvferry.vllm import connector, kv_memory
from kvferry.vllm.connector import KvferryConnector, why_unreachable
from kvferry.vllm.settings import Settings

PLAIN: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
CUMEM, SLEEPS = {"enable_cumem_allocator": True}, {"enable_cumem_allocator": True, "enable_sleep_mode": True}


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "current_platform", SimpleNamespace(is_cuda=lambda: True, device_type="cuda"))


def config(rank: int = 0, prefix_caching: bool = True, **model: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, rank=rank),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


@pytest.mark.parametrize(
    ("model", "setting", "why"),
    [
        ({}, "auto", None),
        ({}, "engine", None),
        (CUMEM, "auto", None),
        (SLEEPS, "auto", None),
        ({**SLEEPS, "sleep_mode_backend": "cumem"}, "auto", None),
        (CUMEM, "engine", "enable_cumem_allocator is True and kv_memory is 'engine'"),
        (SLEEPS, "engine", "enable_sleep_mode is True and kv_memory is 'engine'"),
        ({**SLEEPS, "sleep_mode_backend": "criu"}, "auto", "sleep_mode_backend is 'criu', .* use 'cumem'"),
    ],
)
def test_engines_that_sleep_are_reached_where_their_kv_memory_can_stay(
    model: dict[str, Any], setting: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.read({"kv_memory": setting})
    found = why_unreachable(config(**model), settings)
    assert found is None if why is None else re.search(why, found or "")
    elsewhere = SimpleNamespace(is_cuda=lambda: False, device_type="xpu")
    monkeypatch.setattr(kv_memory, "current_platform", elsewhere)
    assert ("only on CUDA devices, not on xpu" in (why_unreachable(config(**model), settings) or "")) == bool(model)


class Pool:
    """A pool, without a device."""

    used = 0
    fails: Exception | None = None

    def __init__(self, whole_allocations: Any):
        assert whole_allocations is kv_memory.whole_allocations
        if self.fails is not None:
            raise self.fails

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        Pool.used += 1
        yield


def rank_of(wanted: Any, spec: Any = FullAttentionSpec) -> KvferryConnector:
    """A rank's connector, as it is when vLLM asks for a pool."""
    made = object.__new__(KvferryConnector)
    made._vllm_config, made._settings = wanted, Settings.read({})
    made._kv_cache_config = KVCacheConfig(9, [], [KVCacheGroupSpec(["layer"], spec(**PLAIN))])
    made._registers, made._pool, made._rank = why_unreachable(wanted, made._settings) is None, None, None
    return made


@pytest.mark.parametrize("model", [CUMEM, SLEEPS])
def test_the_kv_of_an_engine_that_can_sleep_lies_in_a_pool(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connector, "KvPool", Pool)
    for number in (0, 1):
        made, before = rank_of(config(number, **model)), Pool.used
        context = made.get_mem_pool_context()
        assert isinstance(made._pool, Pool)
        assert context is not None
        with context:
            assert Pool.used == before + 1
        assert made._registers
    assert caplog.text.count("keeps its memory while the engine sleeps") == (model is SLEEPS)


@pytest.mark.parametrize(
    ("wanted", "spec", "registers", "text"),
    [
        (config(), FullAttentionSpec, True, ""),
        (config(**SLEEPS, prefix_caching=False), FullAttentionSpec, False, "prefix caching is off"),
        (config(**SLEEPS), SinkFullAttentionSpec, False, "layers of kind SinkFullAttentionSpec"),
        (config(**SLEEPS, sleep_mode_backend="criu"), FullAttentionSpec, False, ""),
    ],
)
def test_other_engines_allocate_their_kv_themselves(
    wanted: Any,
    spec: Any,
    registers: bool,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory that is not shared must not stay while the engine sleeps."""
    monkeypatch.setattr(connector, "KvPool", Pool)
    made, before = rank_of(wanted, spec), Pool.used
    assert made.get_mem_pool_context() is None
    assert Pool.used == before
    assert made._registers == registers
    assert text in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no such pools"), OSError("cuIpcGetMemHandle answered 1")])
def test_without_a_pool_vllm_allocates_and_one_warning_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connector, "KvPool", type("Broken", (Pool,), {"fails": error}))
    made = rank_of(config(**SLEEPS))
    assert made.get_mem_pool_context() is None
    made.register_kv_caches({"layer": torch.zeros(9, 16)})
    assert made._rank is None
    assert not made.fault
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"there is no pool of memory that can be shared ({error}), and vLLM allocates" in record.getMessage()


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ("expandable_segments:True,max_split_size_mb:512", "expandable_segments:False,max_split_size_mb:512"),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
    ],
)
def test_whole_allocations_leave_the_other_settings_of_the_allocator(
    before: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = [before]
    monkeypatch.setattr(alloc_conf, "current_alloc_conf", lambda: set_to[-1])
    monkeypatch.setattr(alloc_conf, "set_alloc_conf", set_to.append)

    def allocate() -> None:
        with kv_memory.whole_allocations():
            assert set_to[-1] == inside
            raise MemoryError

    with pytest.raises(MemoryError):
        allocate()
    assert set_to[-1] == before


def core(reset: bool) -> tuple[EngineCore, MagicMock]:
    """vLLM's engine core, and what it calls."""
    made, calls = object.__new__(EngineCore), MagicMock()
    made.scheduler, made.model_executor = calls.scheduler, calls.executor
    made.mm_receiver_cache, made.batch_queue = None, None
    calls.scheduler.reset_prefix_cache.return_value = reset
    calls.scheduler.has_unfinished_requests.return_value = False
    calls.scheduler.has_requests.return_value = False
    calls.scheduler.pause_state = PauseState.PAUSED_NEW
    calls.executor.is_sleeping = False
    return made, calls


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_resets_the_connector_before_it_sleeps(level: int) -> None:
    """Pages of before a sleep are not found after it. What this relies on is vLLM's."""
    made, calls = core(reset=True)
    made.sleep(level)
    names = [name for name, _, _ in calls.mock_calls]
    assert calls.scheduler.reset_prefix_cache.call_args == call(True, True)
    assert names.index("scheduler.reset_prefix_cache") < names.index("executor.sleep")
    made, calls = core(reset=True)
    made.release_kv_cache_memory()
    names = [name for name, _, _ in calls.mock_calls]
    assert names.index("scheduler.reset_prefix_cache") < names.index("executor.discard")


def test_vllm_does_not_sleep_if_the_connector_was_not_reset() -> None:
    made, calls = core(reset=False)
    with pytest.raises(RuntimeError, match="Failed to reset the KV connector cache"):
        made.sleep(1)
    assert not calls.executor.sleep.called
