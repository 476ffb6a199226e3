"""Tiny models with several groups of pages: windows, chunks and states beside full attention.

The names and shapes of the weights are those of Hugging Face's classes. The values are random, and scaled so that the
log-probabilities depend on every page of the KV and on every state: ``load_format="dummy"`` has weights so small that a
wrong page would not show.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_model import make
from safetensors.torch import save_file

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_WINDOW_TOKENS = 128


@functools.cache
def gemma3() -> Path:
    """A window of 128 tokens, and full attention, with pages of one size."""
    return _model(
        "gemma3_text",
        "Gemma3ForCausalLM",
        norm=0.0,
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=_WINDOW_TOKENS,
        query_pre_attn_scalar=32,
        rms_norm_eps=1e-6,
    )


@functools.cache
def gemma4() -> Path:
    """A window of 128 tokens, and full attention with heads twice as large: its pages have half the tokens."""
    return _model(
        "gemma4_text",
        "Gemma4ForCausalLM",
        head_dim=32,
        global_head_dim=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=_WINDOW_TOKENS,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=512,
        rms_norm_eps=1e-6,
    )


@functools.cache
def gpt_oss() -> Path:
    """A window of 128 tokens, and full attention, both with sinks; experts without quantisation."""
    return _model(
        "gpt_oss",
        "GptOssForCausalLM",
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=_WINDOW_TOKENS,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
    )


@functools.cache
def lfm2() -> Path:
    """Short convolutions, whose states are small, and full attention. vLLM always ties the two embeddings."""
    return _model(
        "lfm2",
        "Lfm2ForCausalLM",
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        conv_dim=128,
        tie_word_embeddings=True,
        block_dim=128,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        norm_eps=1e-5,
    )


@functools.cache
def mamba2() -> Path:
    """Mamba 2 and full attention, without experts."""
    return _model(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=64,
        position_embedding_type="rope",
        attention_multiplier=32**-0.5,
        rms_norm_eps=1e-5,
    )


@functools.cache
def gdn() -> Path:
    """Gated delta nets and full attention.

    The kernels for the CPU want bfloat16 and heads of 128. vLLM wants experts in at least one layer. Attention has
    large heads, so that a page as large as a state has few tokens.
    """
    return _model(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        norm=0.0,
        num_key_value_heads=4,
        head_dim=64,
        mlp_only_layers=[0, 1, 2],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
    )


@functools.cache
def llama4() -> Path:
    """Attention within chunks of 128 tokens, and full attention; experts in every layer."""
    return _model(
        "llama4_text",
        "Llama4ForCausalLM",
        head_dim=32,
        no_rope_layers=[1, 0] * 2,
        attention_chunk_size=_WINDOW_TOKENS,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=256,
        rms_norm_eps=1e-5,
    )


def _model(kind: str, architecture: str, *, norm: float = 1.0, **changes: Any) -> Path:
    """Writes a model of this Hugging Face kind. ``norm`` is the weight of a norm that does not scale."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**_COMMON, **changes}
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).state_dict()
    chance = torch.Generator().manual_seed(0)
    if config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes.pop("model.embed_tokens.weight")
    weights = {name: _weight(name, tuple(tensor.shape), chance, norm) for name, tensor in shapes.items()}
    if config["tie_word_embeddings"]:
        weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    folder = make(kind, {**config, "architectures": [architecture], "model_type": kind})
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def _weight(name: str, shape: tuple[int, ...], chance: torch.Generator, norm: float) -> torch.Tensor:
    """Random values that keep the activations near 1."""

    def random(scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=chance) * scale

    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    match part:
        case "embed_tokens":
            return random(1.0)
        case "lm_head":
            return random(3 * shape[-1] ** -0.5)
        case "A_log":
            return torch.zeros(shape)
        case "D" | "layer_scalar":
            return torch.ones(shape)
        case "dt_bias":
            # Steps from 1/500 to 1/10: some heads forget within a page, others remember several pages.
            steps = torch.logspace(math.log10(0.002), -1, shape[0])
            return steps.expm1().log()
        case "norm" if "linear_attn" in name:
            # The only norm of its model whose weight is not an offset from 1.
            return torch.ones(shape) + random(0.1)
        case _ if "norm" in part:
            return torch.full(shape, norm) + random(0.1)
        case _ if len(shape) == 1 or "bias" in part:
            return random(0.3)
        case "gate_up_proj" | "down_proj" if "experts" in name:
            return random(shape[1] ** -0.5)
        case _:
            return random(shape[-1] ** -0.5)


@dataclass(frozen=True)
class Hybrid:
    """A model, and what an engine needs to compute it right on the CPU."""

    make: Callable[[], Path]
    #: A multiple of the unit at which hits end.
    chunk_tokens: int
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> dict[str, Any]:
        """Arguments with which prompts of any length have the same results with a hit as without, to the last bit.

        The engine then prefills in chunks of ``chunk_tokens``, with and without a hit, while it runs one request. Other
        chunks round differently: from 250 tokens on with ``gemma4``, from 650 on with the others. The states of
        ``mamba2`` after generated tokens differ by rounding in any case: another kernel computes them.
        """
        return {**self.arguments, "max_num_batched_tokens": self.chunk_tokens, "max_num_seqs": 8}


#: The models by name.
HYBRIDS = {
    "gemma3": Hybrid(gemma3, 32),
    "gemma4": Hybrid(gemma4, 64),
    "gpt_oss": Hybrid(gpt_oss, 32),
    # The kernel for the CPU that rotates queries and keys takes their heads for tokens.
    "lfm2": Hybrid(lfm2, 32, {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}),
    # The kernel for the CPU cannot save the state at a boundary within a chunk: no chunk may be longer than a page.
    "mamba2": Hybrid(mamba2, 64, {"max_num_batched_tokens": 64, "max_num_seqs": 8}),
    "gdn": Hybrid(gdn, 64, {"dtype": "bfloat16"}),
    # Without the variable, vLLM computes chunks as full attention does, in one group.
    "llama4": Hybrid(llama4, 32, environment={"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"}),
}
