"""Names everything that the bytes of a page depend on, in addition to the tokens and salts that SGLang hashes.

The *namespace* of an engine separates its pages from all that were computed differently. The *content* is a readable
summary in one line, and is part of each registration of KV memory.
"""

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from kvferry import files
from kvferry.sglang import interface
from kvferry.sglang.harmless import HARMLESS
from kvferry.weights import Weights, cut, described, identify, models_elsewhere, sorted_json, without_path

if TYPE_CHECKING:
    from kvferry.sglang.settings import Settings

logger = logging.getLogger("kvferry")

#: Longest content, in bytes. Longer names in it are cut; the digest is always whole.
CONTENT_BYTES_MAX = 512
#: Load formats with which SGLang reads only files at the model's path.
READ_FROM_PATH = frozenset(
    (
        "auto",
        "fastsafetensors",
        "gguf",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    )
)
#: Ends of the names of arguments that are files or folders.
_NAMES_OF_FILES = ("_path", "_file", "_dir")
#: Arguments of SGLang on which the weights in memory depend, beside their files.
_OF_WEIGHTS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "torchao_config",
    "model_loader_extra_config",
)


def of_weights(arguments: dict[str, Any], hf_config: Any, settings: "Settings", start: str) -> Weights:
    """Names the weights by the files at their path. Called after they were loaded.

    ``arguments`` are SGLang's, with the values that it uses.
    """
    load_format = getattr(arguments.get("load_format"), "value", arguments.get("load_format"))
    weight_cache = arguments.get("weight_cache_mode") or "off"
    here = load_format in READ_FROM_PATH and weight_cache == "off" and not any(models_elsewhere(hf_config.to_dict()))
    return identify(
        arguments["model_path"],
        arguments.get("revision"),
        dummy=load_format == "dummy",
        from_path=here,
        cache=arguments.get("download_dir"),
        config_commit=getattr(hf_config, "_commit_hash", None),
        declared=settings.weights,
        start=start,
    )


def namespace_of(
    arguments: dict[str, Any],
    hf_config: Any,
    settings: "Settings",
    weights: Weights,
    start: str,
    *,
    ranks: int,
    pool: Any,
) -> str:
    """Returns a text of everything that page bytes depend on, except for the tokens and the memory's shape."""
    import torch

    device = next(iter(getattr(pool, "kv_buffer", None) or pool.k_buffer)).device
    parts = {
        "sglang": interface.version(),
        **_weights_parts(arguments, weights.name, weights.revision, ranks, pool),
        **_of_computation(arguments, settings, start),
        "config": sorted_json(without_path(hf_config.to_dict())),
        "page_size": pool.page_size,
        "platform": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "namespace": settings.namespace,
    }
    return "\n".join(f"{name}={described(value)}" for name, value in parts.items())


def _of_computation(arguments: dict[str, Any], settings: "Settings", start: str) -> dict[str, Any]:
    """Returns the arguments on which pages may depend. Files that they name are identified like those of weights."""

    def named(value: Any, *, is_file: bool = False) -> Any:
        if isinstance(value, dict):
            return {key: named(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [named(each) for each in value]
        if not isinstance(value, str) or not value:
            return value
        if value[0] in "{[":
            try:
                return named(json.loads(value))
            except ValueError:
                return value
        local = files.look(value)
        if settings.weights:
            return local.text(declared=True) if local is not None else value
        if local is not None and local.changed_at <= files.began_at():
            return local.text()
        # A file that has changed since the engine began, or is gone, may not be the one that was read.
        return f"{value} of start {start}" if local is not None or is_file else value

    found = {name: value for name, value in arguments.items() if name not in HARMLESS}
    return {
        f"argument {name}": sorted_json(named(found[name], is_file=name.endswith(_NAMES_OF_FILES)))
        for name in sorted(found)
    }


def content_of(arguments: dict[str, Any], weights: Weights, *, ranks: int, pool: Any) -> str:
    """Returns one line of at most :data:`CONTENT_BYTES_MAX` bytes, which ends with a digest of all parts."""
    parts = _weights_parts(arguments, weights.content, weights.revision, ranks, pool)
    digest = hashlib.blake2b(described(parts).encode(), digest_size=16).hexdigest()
    shown = (
        ("SGLang, ", weights.model),
        ("revision ", weights.revision or "default"),
        ("dtype ", described(arguments.get("dtype"))),
        ("quantization ", described(arguments.get("quantization"))),
        ("KV ", described(pool.dtype)),
    )
    text = ", ".join(label + cut(name) for label, name in shown)
    # A character takes up to 4 bytes.
    room = CONTENT_BYTES_MAX - len(digest) - 2
    return f"{text.encode()[:room].decode(errors='ignore')}, {digest}"


def _weights_parts(
    arguments: dict[str, Any], weights: str, revision: str | None, ranks: int, pool: Any
) -> dict[str, Any]:
    return {
        "engine": "sglang",
        "model": weights,
        "revision": revision,
        "ranks": ranks,
        "pool": (type(pool).__name__, str(pool.dtype), str(pool.store_dtype)),
        **{name: sorted_json(arguments.get(name)) for name in _OF_WEIGHTS},
    }


def tell_unknown_weights(weights: Weights) -> None:
    """Logs a warning if pages will not be shared, with the reason."""
    if not weights.shared:
        logger.warning(
            "kvferry: the weights of %s cannot be identified, or their files changed while the engine started: pages "
            "are shared with no other engine and with no later start; give a commit as the revision, or name the "
            'weights in linker_extra_config: "weights"',
            weights.model,
        )
