"""Tiny models: a configuration, a tokenizer of bytes, and random weights."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_FOLDER = tempfile.TemporaryDirectory(prefix="kvferry-models-")

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "attention_bias": False,
}


@functools.cache
def llama(seed: int = 0) -> Path:
    """Full attention in every layer: one group of pages. Another seed gives other weights of the same shape."""
    wanted = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    folder = make(f"llama-{seed}", {**_COMMON, **wanted, "tie_word_embeddings": False})
    save_file(_llama_weights(seed), str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def _llama_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights, large enough that the generated tokens depend on every page of the prompt."""
    chance = torch.Generator().manual_seed(seed)
    hidden, inner, vocabulary = _COMMON["hidden_size"], _COMMON["intermediate_size"], _COMMON["vocab_size"]
    values = _COMMON["num_key_value_heads"] * _COMMON["head_dim"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance) * shape[-1] ** -0.5

    weights = {
        "model.embed_tokens.weight": random(vocabulary, hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocabulary, hidden) * 3,
    }
    for layer in range(_COMMON["num_hidden_layers"]):
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (values, hidden)),
            ("self_attn.v_proj", (values, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    return weights


@functools.cache
def gemma() -> Path:
    """Sliding windows and full attention: two groups of pages."""
    wanted = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    }
    return make("gemma", {**_COMMON, **wanted})


def make(name: str, config: dict[str, Any]) -> Path:
    """Writes a configuration and the tokenizer of bytes into a new folder. Returns the folder."""
    folder = Path(_FOLDER.name) / name
    folder.mkdir()
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    vocabulary = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(vocabulary[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for file, content in (
        ("config.json", config),
        ("generation_config.json", ends),
        ("tokenizer_config.json", {**described, "pad_token": "<pad>", "model_max_length": 4096}),
    ):
        (folder / file).write_text(json.dumps(content))
    return folder
