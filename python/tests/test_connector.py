"""Tests of the connector's creation and of its refusals."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.options import default_socket_dir
from kvferry.served import Served, ServedGroup
from kvferry.vllm import compat, connector, kv_groups
from kvferry.vllm.metadata import StepMetadata
from kvferry.vllm.settings import Settings

KNOWN = (
    KVConnectorBase_V1,
    SupportsHMA,
    BlockPool,
    SchedulerOutput,
    KVConnectorBlockState,
    KVCacheConfig,
    KVConnectorStats,
    KVConnectorPromMetrics,
    CacheHitSource,
)


def config(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "prefix_caching_hash_algo": "sha256",
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "world_size": 2,
        "use_mla": False,
        "heads": 8,
        **changes,
    }
    every = SimpleNamespace(**parts, get_total_num_kv_heads=lambda: parts["heads"])
    return SimpleNamespace(
        kv_transfer_config=every, cache_config=every, parallel_config=every, model_config=every, instance_id="i"
    )


def test_the_installed_interface_is_the_known_one() -> None:
    assert compat.differences(*KNOWN) == []


def test_differences_of_the_interface_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(KVConnectorBase_V1):
        def get_num_new_matched_tokens(self, request: Any) -> Any:  # type: ignore[override]
            pass

        wait_for_save = None  # type: ignore[assignment]

        @classmethod
        def build_prom_metrics(cls, labels: Any) -> Any:  # type: ignore[override]
            pass

    Other.__abstractmethods__ = frozenset({"fly"})

    class Pool:
        def touch(self) -> None:
            pass

    class Stats(KVConnectorStats):
        reduce = None  # type: ignore[assignment]

    class Prom(KVConnectorPromMetrics):
        def observe(self, transfer_stats_data: dict[str, Any]) -> None:  # type: ignore[override]
            pass

    given = (Other, SupportsHMA, Pool, SchedulerOutput, KVConnectorBlockState, KVCacheConfig, Stats, Prom, object)
    monkeypatch.delattr("vllm.device_allocator.alloc_conf.set_alloc_conf")
    monkeypatch.setattr("vllm.v1.worker.utils.select_common_block_size", lambda sizes: 0)
    monkeypatch.delattr("vllm.v1.attention.backend.AttentionBackend.supported_kv_cache_layouts")
    with pytest.raises(RuntimeError) as refused:
        compat.check(*given)
    text = str(refused.value)
    for part in (
        "kvferry knows the KV connector interface of vLLM 0.32; vLLM 0.32.0",
        "Other.get_num_new_matched_tokens takes ('request',), known is ('request', 'num_computed_tokens')",
        "Other.wait_for_save is missing",
        "Other.fly must be written, and is unknown here",
        "Other.build_prom_metrics takes ('labels',), known is ('vllm_config', 'metric_types',",
        "Stats.reduce is missing",
        "Prom.observe takes ('transfer_stats_data',), known is ('transfer_stats_data', 'engine_idx')",
        "object.DISK is missing",
        "Pool.free_blocks is missing",
        "vllm.device_allocator.alloc_conf.set_alloc_conf is missing",
        "vllm.v1.worker.utils.select_common_block_size takes ('sizes',)",
        "vllm.v1.attention.backend.AttentionBackend.supported_kv_cache_layouts is missing",
        "Install vLLM 0.32",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_role": "kv_producer"}, '"kv_role": "kv_both"'),
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo is 'xxhash': its hashes differ"),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, "PYTHONHASHSEED"),
    ],
)
def test_unsafe_settings_are_refused(changes: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    connector.check_config(config())
    with pytest.raises(ValueError, match=text):
        connector.check_config(config(**changes))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    if "prefix" in text or "PYTHON" in text:
        connector.check_config(config(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_role": "kv_producer"}, "kv_role of MultiConnector is 'kv_producer'"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy of MultiConnector is 'fail'"),
    ],
)
def test_the_settings_around_several_connectors_apply(
    changes: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's scheduler uses the outer settings, not each connector's own."""
    outer = config(kv_connector="MultiConnector", **changes)
    monkeypatch.setattr(connector, "get_current_vllm_config_or_none", lambda: outer)
    with pytest.raises(ValueError, match=text):
        connector.check_config(config())


def test_every_hash_algorithm_of_vllm_is_judged() -> None:
    from vllm.config.cache import PrefixCachingHashAlgo

    known = {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}
    assert set(PrefixCachingHashAlgo.__args__) == known


@pytest.mark.parametrize("on_device", [True, False])
def test_no_event_is_recorded_before_the_rank_needs_one(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    made = object.__new__(connector.KvferryConnector)
    made._connector_metadata = StepMetadata(written_through=5, needed_through=4)
    made._on_device = on_device
    made._checksums = SimpleNamespace(take=lambda orders: None, zero=lambda pages: None)  # type: ignore[assignment]
    made._rank = SimpleNamespace(  # type: ignore[assignment]
        announces=lambda through: through == 5, wrote=lambda *arguments, **named: reported.append((*arguments, named))
    )
    events: list[str] = []
    event = SimpleNamespace(record=lambda: events.append("recorded"), query=lambda: bool(events))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=70))
    made.wait_for_save()
    assert not made.fault
    assert reported == [(5, *((connector.record_end, 70) if on_device else (None, None)), {"needed": 4})]
    assert events == []
    assert connector.record_end()()
    assert events == ["recorded"]


PLAIN: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**PLAIN)
WINDOW = SlidingWindowSpec(**PLAIN, sliding_window=128)
CHUNK = ChunkedLocalAttentionSpec(**PLAIN, attention_chunk_size=64)
STATE = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def kv_cache(*specs: Any, **more: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(9, [], groups, **more)


@pytest.mark.parametrize(
    "changes", [{"pipeline_parallel_size": 2}, {"decode_context_parallel_size": 2}, {"enable_sleep_mode": True}]
)
def test_unsupported_settings_are_named(changes: dict[str, int]) -> None:
    ((name, value),) = changes.items()
    assert f"{name} is {value}" in (connector.why_unreachable(config(**changes), Settings.read({})) or "")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (kv_cache(FULL), None),
        (kv_cache(MLAAttentionSpec(**PLAIN)), None),
        (kv_cache(WINDOW), None),
        (kv_cache(WINDOW, FULL, CHUNK, STATE), None),
        (kv_cache(FULL, CircularBufferSpec(**PLAIN)), None),
        (kv_cache(), "no group whose pages are found by hashes (none)"),
        (kv_cache(CircularBufferSpec(**PLAIN)), "no group whose pages are found by hashes (CircularBufferSpec)"),
        (kv_cache(SinkFullAttentionSpec(**PLAIN)), "the model has layers of kind SinkFullAttentionSpec"),
        (
            kv_cache(FULL, SinkFullAttentionSpec(**PLAIN)),
            "group 1 of the model's KV cache (FullAttentionSpec, SinkFullAttentionSpec): the model has layers of kind",
        ),
        (kv_cache(FULL, FullAttentionSpec(**PLAIN, non_causal=True)), "layers that are not causal"),
        (
            kv_cache(FULL, dataclasses.replace(STATE, mamba_cache_mode="none")),
            "states are kept in mode 'none', in which none can be found again: set --mamba-cache-mode align",
        ),
        (kv_cache(FULL, hash_block_size=32), "pages of 16 tokens, and hashes of 32 tokens"),
    ],
)
def test_groups_that_are_not_served_are_named(found: Any, text: str | None) -> None:
    why = kv_groups.why_not_served(found)
    assert (why is None) == (text is None)
    assert text is None or text in (why or "")


def test_groups_in_host_memory_and_draft_layers_of_states_are_named() -> None:
    found = kv_cache(FULL, STATE)
    found.kv_cache_groups[1].is_eagle_group = True
    assert "draft layers use layers of kind MambaSpec" in (kv_groups.why_not_served(found) or "")
    found.kv_cache_groups[1].host_resident = True
    assert "has a group in host memory (FullAttentionSpec, MambaSpec)" in (kv_groups.why_not_served(found) or "")


def test_groups_are_translated_to_the_wire() -> None:
    every = {
        "full": FULL,
        "latent": MLAAttentionSpec(**PLAIN),
        "window": dataclasses.replace(WINDOW, extra_retained_tokens=3),
        "chunk": CHUNK,
        "state": STATE,
        "sink": SinkFullAttentionSpec(**PLAIN),
        "mixed": UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": WINDOW}),
    }
    found = KVCacheConfig(9, [], [KVCacheGroupSpec([name], spec) for name, spec in every.items()])
    described = kv_groups.groups_of(found, dict.fromkeys(every, "a tensor"))
    assert {(each.engine_page_tokens, each.device_pages) for each in described} == {(16, 9)}
    assert [(*each.tensors, each.role, each.attention, each.window_tokens) for each in described] == [
        ("full", "kv", "full", 0),
        ("latent", "latent", "full", 0),
        ("window", "kv", "sliding_window", 131),
        ("chunk", "kv", "chunked_local", 64),
        ("state", "state", "state", 0),
        ("sink", "kv", "other", 0),
        ("mixed", "kv", "other", 0),
    ]


def test_only_groups_that_are_found_by_hashes_are_registered() -> None:
    found = kv_cache(
        CircularBufferSpec(**PLAIN),
        FULL,
        dataclasses.replace(WINDOW, block_size=32),
        hash_block_size=16,
        cache_hit_alignment_tokens=32,
    )
    described = kv_groups.groups_of(found, dict.fromkeys(("layer.0", "layer.1", "layer.2"), "a tensor"))
    assert [(*each.tensors, each.engine_page_tokens) for each in described] == [("layer.1", 16), ("layer.2", 32)]
    served = kv_groups.served(found)
    assert (served.hash_tokens, served.hit_tokens, served.whole) == (16, 32, True)
    assert [(group.table, group.attention) for group in served.groups] == [(1, "full"), (2, "sliding_window")]
    assert kv_groups.served(kv_cache(FULL)) == Served((ServedGroup(0, 16, FULL.page_size_bytes),), 16, 16)


def test_the_number_of_shards_is_that_of_distinct_slices() -> None:
    every = kv_cache(FullAttentionSpec(**PLAIN))
    for heads, ranks, shards in (({8}, 2, 2), ({2}, 8, 2), ({1}, 4, 1), ({2, 4}, 8, 8), (set(), 8, 8)):
        assert kv_groups.shards(every, ranks, heads) == shards
    latent = MLAAttentionSpec(**PLAIN, max_tp_shards=1)
    assert kv_groups.shards(kv_cache(latent, latent), 4, {8}) == 1
    unknown = MLAAttentionSpec(**PLAIN)
    assert kv_groups.shards(kv_cache(latent, unknown), 4, {1}) == 4, "each rank may have its own slice of one layer"
    assert kv_groups.shards(kv_cache(latent, FullAttentionSpec(**PLAIN)), 4, {1}) == 4
    assert kv_groups.shards(kv_cache(FULL, STATE), 4, {1}) == 4, "each rank has its own part of a state"
    assert kv_groups.shards(kv_cache(latent, dataclasses.replace(STATE, tp_replicated=True)), 4, {1}) == 1


def model(heads: int, layers: list[dict[str, int]] | None = None, **config: Any) -> Any:
    architecture = SimpleNamespace(total_num_kv_heads=heads, per_layer_overrides=layers)
    return SimpleNamespace(model_arch_config=architecture, hf_config=SimpleNamespace(to_dict=lambda: config))


@pytest.mark.parametrize(
    ("target", "draft", "totals"),
    [
        (model(2, num_key_value_heads=2), None, {2}),
        (model(2), model(2), {2}),
        (model(2), model(4), {2, 4}),
        (model(2, [{}, {"total_num_kv_heads": 8}]), None, {2, 8}),
        (model(2, text_config={"num_key_value_heads": 2, "num_global_key_value_heads": 4}), None, {2, 4}),
        (model(2, num_kv_heads=[2, 2, 8]), None, {2, 8}),
        (model(2, num_key_value_heads=None, parts=[{"kv_heads": 3}]), None, {2, 3}),
    ],
)
def test_every_total_of_heads_counts(target: Any, draft: Any, totals: set[int]) -> None:
    speculative = SimpleNamespace(draft_model_config=draft) if draft else None
    found = SimpleNamespace(model_config=target, speculative_config=speculative)
    assert connector.kv_head_totals(found) == totals  # type: ignore[arg-type]


def test_a_mixed_group_is_judged_by_its_ranks() -> None:
    """vLLM's scheduler receives one layer of a group; only the ranks receive the layers that differ."""
    mixed = UniformTypeKVCacheSpecs(
        block_size=16,
        kv_cache_specs={"a": FullAttentionSpec(**PLAIN), "b": SlidingWindowSpec(**PLAIN, sliding_window=128)},
    )
    of_ranks = KVCacheConfig(9, [], [KVCacheGroupSpec(["a", "b"], mixed)])
    of_scheduler = generate_scheduler_kv_cache_config([of_ranks])
    assert kv_groups.why_not_served(of_scheduler) is None
    assert "SlidingWindowSpec" in (kv_groups.why_not_served(of_ranks) or "")
    (described,) = kv_groups.groups_of(of_ranks, dict.fromkeys("ab", "a tensor"))
    assert described.attention == "other", "its worker serves none of these"


def test_layers_that_are_not_causal_are_not_served() -> None:
    assert kv_groups.why_not_served(kv_cache(FullAttentionSpec(**PLAIN))) is None
    why = kv_groups.why_not_served(kv_cache(FullAttentionSpec(**PLAIN, non_causal=True)))
    assert "layers that are not causal" in (why or "")


def test_a_page_has_bytes_of_all_layers() -> None:
    spec, larger = FullAttentionSpec(**PLAIN), FullAttentionSpec(**{**PLAIN, "num_kv_heads": 3})
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": spec, "b": larger})
    for layers in (KVCacheGroupSpec(["a", "b", "c", "d"], spec), KVCacheGroupSpec(["a", "b"], mixed)):
        assert kv_groups.served(KVCacheConfig(9, [], [layers])).groups[0].page_bytes == 4 * spec.page_size_bytes


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"namespace_prefix": "ä/"}, "namespace_prefix is 'ä/': give a text of at most 256 ASCII characters"),
        ({"namespace_prefix": "x" * 257}, "give a text of at most 256 ASCII characters"),
        ({"socketdir": "/a"}, "unknown key 'socketdir': did you mean 'socket_dir'"),
        ({"socket_dir": "relative"}, "give an absolute path"),
        ({"socket_dir": "/" + "x" * 80}, "give a path of at most 80"),
        ({"replica": -1}, "replica is -1: give a whole number from 0 to 63"),
        ({"replica": True}, "replica is True"),
        ({"load_timeout_ms": "5"}, "load_timeout_ms is '5'"),
        ({"namespace": 3}, "namespace is 3: give a text"),
        ({"shared_after_reset": 1}, "shared_after_reset is 1: give true or false"),
        ({"weights": 7}, "weights is 7: give a text"),
        ({"layout": "HND"}, "layout is 'HND': give one of auto, engine, BLHNC, BLNHC"),
        ({"kv_memory": True}, "kv_memory is True: give one of auto, engine"),
        ({"verify": 101}, "verify is 101: give a whole number from 0 to 100"),
    ],
)
def test_wrong_extra_settings_are_refused(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refused:
        Settings.read(extra)
    assert text in str(refused.value)


def test_extra_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Settings.read({}) == Settings(Path("/run/user/7/kvferry"))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket_dir().name.startswith("kvferry-")
    read = Settings.read({"socket_dir": "/s", "replica": 2, "namespace": "a"})
    assert (read.socket_dir, read.replica, read.namespace) == (Path("/s"), 2, "a")
