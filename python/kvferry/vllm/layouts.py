"""The layout of the KV cache that the connector asks vLLM for: one in which a page is one range over all layers.

By default vLLM keeps the layers apart, so that a page is one range for each layer. In a layout whose outermost axis is
that of the blocks, a page is copied as one range. Such a layout cannot split a block of the engine into smaller blocks
of a kernel, and vLLM does not start then: without a setting, the connector asks only where it can check every layer.
"""

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = logging.getLogger("vllm.kvferry")

#: For each layout of vLLM that keeps layers apart, the one with the same order within a block: kernels read the same
#: bytes of a block in the same order, and pages are shared with engines of either layout.
_WHOLE_PAGES = {"LBNHC": "BLNHC", "LBHNC": "BLHNC"}


class _Layer(NamedTuple):
    name: str
    backend: Any
    spec: "KVCacheSpec"


def required(config: "VllmConfig", setting: str, *, alone: bool, served: bool) -> str | None:
    """Returns the layout to ask vLLM for; None for the engine's own.

    ``alone``: no other connector of this engine may want another layout. ``served``: kvferry can copy pages of this
    engine at all.

    Raises:
        ValueError: the setting names a layout with which this engine cannot run.
    """
    if setting == "engine":
        return None
    if setting != "auto":
        return _named(config, setting)
    if not current_platform.is_cuda() or not served:
        return None
    try:
        layout, why = _best(config, alone)
    except Exception:
        # Whatever the layers and their backends do on such questions, the engine starts with its own layout.
        logger.exception("kvferry: the layers could not be checked")
        layout, why = None, "the layers could not be checked"
    if layout is None:
        logger.info("kvferry: the engine's own layout of the KV cache is used: %s", why)
    return layout


def _named(config: "VllmConfig", layout: str) -> str:
    if not current_platform.is_cuda():
        raise ValueError(
            f"layout is {layout!r}, and the platform is {current_platform.device_type}: only engines on CUDA devices "
            "can be asked for a layout, set layout to 'engine'"
        )
    with set_current_vllm_config(config):
        layers = _layers(config)
        why = why_impossible(layers, layout)
    if why is not None:
        raise ValueError(f"layout is {layout!r}, and {why}, or set layout to 'engine'")
    if not layers:
        logger.info("kvferry: layout %s is asked for unchecked: the model's layers are in other processes", layout)
    return layout


def _best(config: "VllmConfig", alone: bool) -> tuple[str | None, str]:
    """Returns a layout that is certain to work; or None, and why there is none."""
    if not alone:
        return None, "other connectors may need another one"
    with set_current_vllm_config(config):
        layers = _layers(config)
        if not layers:
            return None, "the model's layers are in other processes; set layout to 'BLHNC' or 'BLNHC' to change it"
        own = get_supported_kv_cache_layouts({layer.backend: None for layer in layers})[0].name
        layout = _WHOLE_PAGES.get(own)
        if layout is None:
            return None, f"it is {own}"
        why = why_impossible(layers, layout) or why_uncertain(layers)
    return (layout, "") if why is None else (None, why)


def _layers(config: "VllmConfig") -> list[_Layer]:
    """Returns the layers with KV; none if the engine's core has no rank in its process."""
    found = []
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():  # type: ignore[type-abstract]
        spec = layer.get_kv_cache_spec(config)
        if spec is not None:
            backend = layer.get_attn_backend()
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(backend, spec)
            found.append(_Layer(name, backend, spec))
    return found


def why_impossible(layers: list[_Layer], layout: str) -> str | None:
    """Returns why a layout of whole pages does not work with one of the layers, and a remedy; None if there is none."""
    for name, backend, spec in layers:
        supported = backend.supported_kv_cache_layouts()
        names = None if supported is None else [each.name for each in supported]
        if names is not None and layout not in names:
            return f"{backend.get_name()} of layer {name} supports {', '.join(names)}: use one of these"
        if isinstance(spec, AttentionSpec):
            tokens = select_common_block_size(spec.block_size, [backend], [spec])
            if tokens != spec.block_size:
                return (
                    f"{backend.get_name()} of layer {name} reads blocks of {tokens} tokens, into which a page of "
                    f"{spec.block_size} tokens cannot be split: use --block-size {tokens}"
                )
    return None


def why_uncertain(layers: list[_Layer]) -> str | None:
    """Returns why vLLM may still change the pages of these layers, or split them; None if that is certain not to."""
    for name, _, spec in layers:
        if not isinstance(spec, AttentionSpec):
            return f"layer {name} has a {type(spec).__name__}"
        if spec.tokens_per_state > 1 or spec.page_size_padded is not None:
            return f"layer {name} has compressed or padded pages"
    sizes = {(spec.block_size, spec.page_size_bytes) for _, _, spec in layers}
    return "pages of the layers differ in size" if len(sizes) > 1 else None
