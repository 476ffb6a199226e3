"""Tests of the layout that the connector asks vLLM for."""

import contextlib
import dataclasses
import logging
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.memory import _View
from kvferry.vllm import layouts

PLAIN: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
FULL = FullAttentionSpec(**PLAIN)
STATE = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def backend(sizes: list[Any], supported: list[str] | None = None, name: str = "FLASH_ATTN") -> Any:
    """A backend of vLLM's, as far as layouts are concerned."""
    found = None if supported is None else tuple(KVCacheLayout[each] for each in supported)
    return SimpleNamespace(
        get_name=lambda: name,
        get_supported_kernel_block_sizes=lambda spec=None: sizes,
        supported_kv_cache_layouts=lambda: found,
        customize_spec=lambda spec: spec,
        full_cls_name=lambda: (name, str(sizes)),
        __hash__=lambda self: id(self),
    )


class Layer(AttentionLayerBase):
    def __init__(self, backend: Any, spec: Any):
        self.backend, self.spec = backend, spec

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


class Backend:
    """A hashable stand-in for a backend's class."""

    def __init__(self, *arguments: Any, **named: Any):
        vars(self).update(vars(backend(*arguments, **named)))


ANY = Backend([MultipleOf(16)])
BLACKWELL = Backend([16, 32, 64], ["LBHNC", "BLHNC"], name="FLASHINFER")
LAYERS_APART = Backend([MultipleOf(16)], ["LBNHC"], name="FLEX_ATTENTION")
SMALL_BLOCKS = Backend([16], name="FLASHMLA")


def config(layers: list[Layer], layout: str | None = None, **changes: Any) -> Any:
    extra = {} if layout is None else {"layout": layout}
    transfer: dict[str, Any] = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    names = {str(number): layer for number, layer in enumerate(layers)}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=names),
        kv_transfer_config=SimpleNamespace(**{**transfer, **changes.pop("transfer", {})}, engine_id="e"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(**changes),
    )


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "current_platform", SimpleNamespace(is_cuda=lambda: True, device_type="cuda"))
    monkeypatch.setattr(layouts, "set_current_vllm_config", lambda config: contextlib.nullcontext())


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "current_platform", SimpleNamespace(is_cuda=lambda: False, device_type="cpu"))


def asked(*arguments: Any, **named: Any) -> str | None:
    """What vLLM's engine core gets, by its own call."""
    return get_kv_connector_cache_layout(config(*arguments, **named))


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        ([Layer(ANY, FULL)] * 2, "BLNHC"),
        ([Layer(BLACKWELL, FULL)], "BLHNC"),
        ([Layer(ANY, FULL), Layer(BLACKWELL, FULL)], "BLHNC"),
        ([Layer(ANY, MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1}))], "BLNHC"),
        ([Layer(ANY, FULL), Layer(ANY, SlidingWindowSpec(**PLAIN, sliding_window=64))], "BLNHC"),
        ([Layer(ANY, FULL), Layer(LAYERS_APART, None)], "BLNHC"),
    ],
)
def test_whole_pages_are_asked_for_where_that_is_certain_to_work(layers: list[Layer], layout: str) -> None:
    """The order within a block is that of the layout which vLLM would use."""
    assert asked(layers) == layout
    assert asked(layers, "auto") == layout
    assert asked(layers, "engine") is None


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([], "the model's layers are in other processes"),
        ([Layer(ANY, FULL), Layer(LAYERS_APART, FULL)], "FLEX_ATTENTION of layer 1 supports LBNHC: use one of these"),
        (
            [Layer(SMALL_BLOCKS, dataclasses.replace(FULL, block_size=64))],
            "FLASHMLA of layer 0 reads blocks of 16 tokens, into which a page of 64 tokens cannot be split: "
            "use --block-size 16",
        ),
        ([Layer(ANY, FULL), Layer(ANY, STATE)], "layer 1 has a MambaSpec"),
        ([Layer(ANY, FULL), Layer(ANY, dataclasses.replace(FULL, head_size=16))], "differ in size"),
        ([Layer(ANY, FULL), Layer(ANY, dataclasses.replace(FULL, block_size=32, head_size=4))], "differ in size"),
        ([Layer(ANY, dataclasses.replace(FULL, page_size_padded=4096))], "compressed or padded pages"),
        ([Layer(ANY, dataclasses.replace(FULL, tokens_per_state=Fraction(4)))], "compressed or padded pages"),
        ([Layer(Backend([16], ["BLHNC"]), FULL)], "it is BLHNC"),
        ([Layer(Backend([48]), FULL)], "could not be checked"),
    ],
)
def test_otherwise_the_engine_keeps_its_own_layout(
    layers: list[Layer], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvferry")
    assert asked(layers) is None
    assert "the engine's own layout of the KV cache is used" in caplog.text
    assert why in caplog.text


def test_an_engine_that_is_not_served_keeps_its_own_layout() -> None:
    unserved = config([Layer(ANY, FULL)])
    unserved.parallel_config.pipeline_parallel_size = 2
    assert get_kv_connector_cache_layout(unserved) is None


@pytest.mark.usefixtures("cpu")
def test_on_the_cpu_no_layout_is_asked_for() -> None:
    assert asked([Layer(ANY, FULL)]) is None
    with pytest.raises(ValueError, match=r"layout is 'BLHNC', and the platform is cpu: .* set layout to 'engine'"):
        asked([Layer(ANY, FULL)], "BLHNC")


def test_a_named_layout_is_asked_for_unless_a_layer_cannot_use_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kvferry")
    assert asked([Layer(ANY, FULL), Layer(ANY, STATE)], "BLHNC") == "BLHNC"
    assert not caplog.text
    assert asked([], "BLNHC") == "BLNHC"
    assert "layout BLNHC is asked for unchecked" in caplog.text
    with pytest.raises(ValueError, match="layout is 'BLNHC', and FLASHINFER of layer 0 supports LBHNC, BLHNC"):
        asked([Layer(BLACKWELL, FULL)], "BLNHC")
    with pytest.raises(ValueError, match="use --block-size 16, or set layout to 'engine'"):
        asked([Layer(SMALL_BLOCKS, dataclasses.replace(FULL, block_size=64))], "BLHNC")
    with pytest.raises(ValueError, match="layout is 'HND': give one of auto, engine, BLHNC, BLNHC"):
        asked([], "HND")


def test_beside_other_connectors_a_layout_must_be_named() -> None:
    """vLLM refuses an engine whose connectors want different layouts."""
    ours: dict[str, Any] = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
    }
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    outer: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
    both = config([Layer(ANY, FULL)], transfer={**outer, "kv_connector_extra_config": {"connectors": [ours, other]}})
    both.attention_config = SimpleNamespace(hisparse_config=None)
    assert KVConnectorFactory.get_connector_class(both.kv_transfer_config).__name__ == "MultiConnector"
    assert get_kv_connector_cache_layout(both) == "LBHNC", "the other connector's"
    named = {**ours, "kv_connector_extra_config": {"layout": "BLHNC"}}
    both.kv_transfer_config.kv_connector_extra_config = {"connectors": [named]}
    assert get_kv_connector_cache_layout(both) == "BLHNC"


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC"])
@pytest.mark.parametrize("groups", [1, 2])
def test_vllm_places_the_layers_of_a_page_beside_each_other(layout: str, groups: int) -> None:
    """With the specs that are certain to work, and vLLM's own allocation: a page is one range."""
    specs = [FULL, SlidingWindowSpec(**PLAIN, sliding_window=64)][:groups]
    found = [KVCacheGroupSpec([f"{group}.{n}" for n in range(3)], spec) for group, spec in enumerate(specs)]
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    wanted: Any = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    kv_cache = get_kv_cache_config_from_groups(wanted, found, 9 * 3 * FULL.page_size_bytes)
    caches = allocate_kv_cache(kv_cache, torch.device("cpu"), KVCacheLayout[layout], [16] * groups)
    for group in found:
        tensors = [caches[name] for name in group.layer_names]
        views = [_View.of(tensor, 9) for tensor in tensors]
        first = tensors[0].data_ptr()
        page = FULL.page_size_bytes
        assert [tensor.data_ptr() - first for tensor in tensors] == [0, page, 2 * page]
        for tensor, view in zip(tensors, views, strict=True):
            assert view.page_elements * tensor.element_size() == page
            assert view.strides[0] * tensor.element_size() == 3 * page
