"""Names everything that the bytes of a page depend on, in addition to the tokens: above all the weights.

The *namespace* of an engine separates its pages from all that were computed differently. The *content* is a readable
summary in one line, and is part of each registration of KV memory. Weights that cannot be identified are named by this
start of the engine: their pages are shared with no other engine and with no later start.
"""

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from kvferry.trtllm import compat
from kvferry.trtllm.settings import Settings, variable_of
from kvferry.weights import cut, identify

logger = logging.getLogger("kvferry")

#: Longest content, in bytes. Longer names in it are cut; the digest is always whole.
CONTENT_BYTES_MAX = 512
#: Load formats with which only files at the model's path are read.
_READ_FROM_PATH = frozenset(("auto",))
#: Arguments that change no byte of a page, or that are named in another way. All others separate engines: an argument
#: that is unknown here costs hits, and never a wrong page.
_ELSEWHERE = frozenset(
    (
        *("model", "revision", "load_format", "kv_connector_config", "kv_cache_config"),
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "postprocess_tokenizer_dir"),
        *("max_batch_size", "max_num_tokens", "max_input_len", "scheduler_config", "batch_wait_timeout_ms"),
        *("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", "stream_interval", "num_postprocess_workers"),
        *("enable_iter_perf_stats", "enable_iter_req_stats", "print_iter_log", "iter_stats_max_iterations"),
        *("request_stats_max_iterations", "return_perf_metrics", "perf_metrics_max_requests", "otlp_traces_endpoint"),
        *("gather_generation_logits", "garbage_collection_gen0_threshold", "reasoning_parser", "mpi_session"),
        *("disable_overlap_scheduler", "enable_chunked_prefill", "guided_decoding_backend", "sampler_type"),
        *("cuda_graph_config", "cache_transceiver_config", "env_overrides", "gpus_per_node", "trust_remote_code"),
    )
)
#: Arguments of the KV cache that change no byte of a page.
_CACHE_ELSEWHERE = frozenset(
    (
        *("free_gpu_memory_fraction", "max_tokens", "host_cache_size", "event_buffer_max_size", "max_gpu_total_bytes"),
        *("onboard_blocks", "secondary_offload_min_priority", "attention_dp_events_gather_period_ms"),
        *("enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse", "use_uvm", "iteration_stats_interval"),
    )
)


@dataclass(frozen=True)
class Identity:
    """What an engine's pages depend on, beside the tokens and the memory's shape."""

    #: The weights, and whether every engine with these weights has this name.
    weights: str
    shared: bool
    #: Path or name of the model, and its revision, for display.
    model: str
    revision: str | None
    dtype: str
    page_tokens: int
    #: All other arguments.
    arguments: str
    #: For :meth:`content`, equal on all ranks and in all starts.
    shown: str

    def namespace(self, settings: Settings) -> bytes:
        """Returns the namespace of the engine's pages, 32 bytes after the prefix."""
        parts = [compat.version(), self.weights, self.arguments, settings.namespace, settings.weights]
        digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=32).digest()
        return settings.namespace_prefix.encode() + digest

    def content(self) -> bytes:
        """Returns one line of at most :data:`CONTENT_BYTES_MAX` bytes that names model and arguments."""
        parts = [compat.version(), self.shown, self.revision, self.dtype, self.arguments]
        digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        text = f"{cut(self.model)}, revision {cut(self.revision or 'default')}, dtype {cut(self.dtype)}"
        room = CONTENT_BYTES_MAX - len(digest) - 2
        return f"{text.encode()[:room].decode(errors='ignore')}, {digest}".encode()


def identity_of(llm_args: Any, settings: Settings, start: bytes) -> Identity:
    """Names the weights and the arguments of an engine. ``start`` names this start of it."""
    arguments = fields_of(llm_args)
    cache = fields_of(arguments.get("kv_cache_config"))
    path = str(arguments["model"])
    revision = str(arguments["revision"]) if arguments.get("revision") is not None else None
    load_format = _word(arguments.get("load_format", "auto"))
    weights = identify(
        path,
        revision,
        dummy=False,
        from_path=load_format in _READ_FROM_PATH and arguments.get("checkpoint_loader") is None,
        cache=None,
        config_commit=None,
        declared=settings.weights,
        start=start.hex(),
    )
    rest = {name: value for name, value in arguments.items() if name not in _ELSEWHERE}
    rest["kv_cache_config"] = {name: value for name, value in cache.items() if name not in _CACHE_ELSEWHERE}
    rest["load_format"] = load_format
    return Identity(
        weights=weights.name,
        shared=weights.shared,
        model=path,
        revision=revision,
        dtype=f"{arguments.get('dtype', 'auto')}, KV {cache.get('dtype', 'auto')}",
        page_tokens=int(cache["tokens_per_block"]),
        arguments=sorted_json(rest),
        shown=weights.content,
    )


def tell_unknown_weights(identity: Identity) -> None:
    """Logs a warning if pages will not be shared, with the reason."""
    if not identity.shared:
        logger.warning(
            "kvferry: the weights of %s cannot be identified, or their files changed while the engine started: pages "
            "are shared with no other engine and with no later start; give a commit of the Hub, or name the weights in "
            "%s",
            identity.model,
            variable_of("weights"),
        )


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a model of pydantic, or of another object, without private ones; of None: nothing."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    names = getattr(type(value), "model_fields", None) or vars(value)
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def sorted_json(value: Any) -> str:
    """Returns JSON that is equal in every process: without the order of keys, and without addresses of objects."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(sorted_json(each) for each in value)
    if isinstance(value, dict):
        return {f"{type(key).__name__} {key}": _plain(each) for key, each in value.items()}
    if hasattr(type(value), "model_fields"):
        return [type(value).__name__, _plain(fields_of(value))]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _word(value: Any) -> str:
    """Returns the name of an enum's member, or a text, in lower case."""
    return str(getattr(value, "name", value)).lower()
