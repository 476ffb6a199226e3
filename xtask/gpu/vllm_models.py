"""Models for vLLM that need no download: two small ones with random weights, and the shape of a large one."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_SMALL: dict[str, Any] = {
    **_ENDS,
    "pad_token_id": 0,
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
#: Architecture, weight of a norm that does not scale, and configuration of the small models, by Hugging Face's kind.
_MODELS: dict[str, tuple[str, float, dict[str, Any]]] = {
    # Full attention in every layer: one group of pages.
    "llama": (
        "LlamaForCausalLM",
        1.0,
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
        },
    ),
    # Windows of 128 tokens beside full attention: two groups of pages.
    "gemma3_text": (
        "Gemma3ForCausalLM",
        0.0,
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 128,
            "query_pre_attn_scalar": 64,
            "rms_norm_eps": 1e-6,
        },
    ),
}
#: The kinds of the small models, by the names that the command line has for them.
SMALL = {"llama": "llama", "gemma3": "gemma3_text"}
#: The configuration of Llama 3.1 8B, as far as it decides about shapes.
LLAMA_8B: dict[str, Any] = {
    **_ENDS,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def small(name: str, folder: Path) -> Path:
    """Writes a small model whose log-probabilities depend on every byte of its KV.

    The weights that vLLM makes up itself (``load_format="dummy"``) are so small that a wrong page would not show.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = SMALL[name]
    architecture, norm, changes = _MODELS[kind]
    config = {**_SMALL, **changes}
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).state_dict()
    chance = torch.Generator().manual_seed(0)
    weights = {name: _weight(name, tuple(tensor.shape), chance, norm) for name, tensor in shapes.items()}
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    return described(folder, {**config, "architectures": [architecture], "model_type": kind})


def _weight(name: str, shape: tuple[int, ...], chance: torch.Generator, norm: float) -> torch.Tensor:
    """Random values that keep activations near 1, and logits far enough apart for a choice of tokens."""
    random = torch.randn(*shape, generator=chance)
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if "norm" in part:
        return norm + 0.1 * random
    match part:
        case "embed_tokens":
            return random
        case "lm_head":
            return 3 * shape[-1] ** -0.5 * random
        case _:
            return shape[-1] ** -0.5 * random


def described(folder: Path, config: dict[str, Any]) -> Path:
    """Writes the configuration of a model into its folder, and returns the folder."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of bfloat16 for keys and values of one token in every layer, with full attention in each."""
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
