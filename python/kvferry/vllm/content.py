"""Names everything that the bytes of a page depend on, in addition to the tokens: above all the weights.

This module makes two texts. The *namespace* of an engine separates its pages from all that were computed differently.
The *content* is a readable summary in one line, and is part of each registration of KV memory.

The namespace of weights that cannot be identified names this start of the engine: their pages are shared with no other
engine and with no later start, instead of being confused with those of other weights under the same name.
"""

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from kvferry import files, hub
from kvferry.vllm import compat
from kvferry.weights import Weights, cut, described, identify, models_elsewhere, sorted_json, without_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvferry.vllm.settings import Settings

logger = logging.getLogger("vllm.kvferry")

#: Longest content, in bytes. Longer names in it are cut; the digest is always whole.
CONTENT_BYTES_MAX = 512
#: Load formats with which vLLM reads only files at the model's path. Others keep a copy elsewhere, on disk or in
#: memory, or belong to plugins.
READ_FROM_PATH = frozenset(
    (
        "auto",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    )
)
#: LoRA options that change no page: how many adapters there may be at a time, and which one a request gets.
_LORA_HARMLESS = frozenset(
    ("default_mm_loras", "max_cpu_loras", "max_lora_rank", "max_loras", "specialize_active_lora")
)


def start_of(config: "VllmConfig") -> bytes:
    """Returns 16 bytes that name this start of this engine, equal in all its processes."""
    index = config.parallel_config.data_parallel_index
    parts = (config.kv_transfer_config.engine_id, config.instance_id, index)
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


def namespace_of(config: "VllmConfig", settings: "Settings", weights: "Weights") -> str:
    """Returns a text of everything that page bytes depend on, except for the tokens and the memory's shape."""
    from vllm.platforms import current_platform

    model, cache, load = config.model_config, config.cache_config, config.load_config
    parts = {
        "vllm": compat.version(),
        **_weights_parts(config, weights.name, weights.revision),
        "load_format": load.load_format,
        "ignored": getattr(load, "ignore_patterns", None),
        "draft": _draft(config, settings),
        "config": sorted_json(without_path(model.hf_config.to_dict())),
        "code_revision": getattr(model, "code_revision", None),
        "config_path": model.hf_config_path,
        "overrides": model.hf_overrides,
        "max_model_len": model.max_model_len,
        "multimodal": model.multimodal_config,
        "hash": cache.prefix_caching_hash_algo,
        "platform": current_platform.get_device_name(),
        "attention": config.attention_config,
        "namespace": settings.namespace,
    }
    return "\n".join(f"{name}={described(value)}" for name, value in parts.items())


def content_of(config: "VllmConfig", settings: "Settings") -> str:
    """Returns one line of at most :data:`CONTENT_BYTES_MAX` bytes: model, revision, dtype and quantisation.

    The line ends with a digest of all these parts, so that cut names still differ. Weights that cannot be identified
    are named by their files or path alone: their namespace already separates their pages, and engines with different
    content cannot share a leader.
    """
    model = config.model_config
    weights = weights_of(config, settings)
    parts = _weights_parts(config, weights.content, weights.revision)
    if settings.verify:
        # A page is verified only if every engine that may have stored it has recorded its checksum.
        parts["verify"] = settings.verify
    digest = hashlib.blake2b(described(parts).encode(), digest_size=16).hexdigest()
    shown = (
        ("", weights.model),
        ("revision ", weights.revision or "default"),
        ("dtype ", described(model.dtype)),
        ("quantization ", described(model.quantization)),
        ("KV ", described(config.cache_config.cache_dtype)),
        *((("verify ", str(settings.verify)),) if settings.verify else ()),
    )
    text = ", ".join(label + cut(name) for label, name in shown)
    # A character takes up to 4 bytes.
    room = CONTENT_BYTES_MAX - len(digest) - 2
    return f"{text.encode()[:room].decode(errors='ignore')}, {digest}"


def adapters_of(config: "VllmConfig") -> str:
    """Returns the LoRA options on which the bytes of an adapter's pages depend."""
    lora = getattr(config, "lora_config", None)
    options = {name: value for name, value in vars(lora).items() if name not in _LORA_HARMLESS} if lora else {}
    return sorted_json(options)


#: Further options of vLLM's cache that decide how the bytes of a page are read.
_CACHE_DTYPES = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "kv_cache_dtype_skip_layers")


def _weights_parts(config: "VllmConfig", weights: str, revision: str | None) -> dict[str, Any]:
    model, load = config.model_config, config.load_config
    dummy = load.load_format == "dummy"
    return {
        "model": weights,
        "revision": revision,
        "dtype": model.dtype,
        "quantization": (model.quantization, model.quantization_config),
        "kv_cache_dtype": config.cache_config.cache_dtype,
        # Types of states, which can have one size, and which layers keep the model's type.
        "cache_dtypes": {name: getattr(config.cache_config, name, None) for name in _CACHE_DTYPES},
        "loader": sorted_json(load.model_loader_extra_config),
        "dummy_weights": (model.seed, config.parallel_config.world_size) if dummy else None,
    }


def _draft(config: "VllmConfig", settings: "Settings") -> str | None:
    """Names the draft model, whose layers have pages of their own; None without one, or if it is the model itself.

    Weights that cannot be identified are named by their path alone: wrong draft pages only lower the acceptance of
    draft tokens, and change no output.
    """
    model = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    if model is None or model is config.model_config:
        return None
    path = model.model_weights or model.model
    snapshot = hub.snapshot_at(path)
    local = files.look(path) if snapshot is None else None
    branches = bool(snapshot is None and local is None and not model.model_weights)
    if path == _path(config) and not (branches and model.revision != config.model_config.revision):
        # The draft layers are part of the model's own checkpoint.
        return "of the model"
    if local is not None:
        return local.text(declared=bool(settings.weights))
    repository, commit = snapshot or (path, hub.commit_of(path, model.revision, config.load_config.download_dir))
    return f"{repository} at commit {commit}"


def _path(config: "VllmConfig") -> str:
    # `model` is a new folder with each start if the weights come from object storage: `model_weights` is set then.
    return config.model_config.model_weights or config.model_config.model


def weights_of(config: "VllmConfig", settings: "Settings") -> Weights:
    """Names the weights by the files at their path. Called after they were loaded."""
    model, load = config.model_config, config.load_config
    return identify(
        _path(config),
        model.revision,
        dummy=load.load_format == "dummy",
        from_path=load.load_format in READ_FROM_PATH and not any(models_elsewhere(model.hf_config.to_dict())),
        cache=load.download_dir,
        config_commit=getattr(model.hf_config, "_commit_hash", None),
        declared=settings.weights,
        start=start_of(config).hex(),
    )


def tell_unknown_weights(config: "VllmConfig", weights: Weights) -> None:
    """Logs a warning if pages will not be shared, with the reason."""
    if not weights.shared:
        logger.warning(
            "kvferry: the weights of %s cannot be identified, or their files changed while the engine started: pages "
            "are shared with no other engine and with no later start; give a commit as the revision, or name the "
            'weights in kv_connector_extra_config: "weights"',
            _path(config),
        )


def tell_identity(config: "VllmConfig", settings: "Settings", namespace: str) -> None:
    """Logs what other engines must have in common with this one, so that operators can compare engines that miss."""
    texts = (namespace, content_of(config, settings))
    logger.info(
        "kvferry: engines share pages if they log the same namespace and content: namespace %s, content %s",
        *(hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts),
    )
