"""Small models of the published families, as transformers writes them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama 3.1, biases": lambda: transformers.LlamaConfig(
        **COMMON, rope_parameters=LLAMA3 | {"rope_theta": 5000.0}, attention_bias=True, mlp_bias=True
    ),
    "llama, linear": lambda: transformers.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, hidden_act="gelu"
    ),
    "mistral, wide heads": lambda: transformers.MistralConfig(**COMMON, head_dim=32, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3, yarn": lambda: transformers.Qwen3Config(
        **COMMON, head_dim=32, rope_parameters=YARN | {"rope_theta": 5000.0}, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=256,
        n_embd=64,
        n_layer=6,
        n_head=4,
        n_positions=48,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation="eager",
    ),
}
# Narrower than what they are asked to go on with.
WINDOWS: dict[str, Any] = {
    "mistral, windows": lambda: transformers.MistralConfig(**COMMON, sliding_window=16),
    "qwen2, late windows": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=16, max_window_layers=2
    ),
    "qwen3, some windows": lambda: transformers.Qwen3Config(
        **COMMON,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
}


def save_family(name: str, folder: Path) -> Path:
    """With random values in all vectors too; in what has windows, with matrices so large that these matter."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config((CONFIGS | WINDOWS)[name]())
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif name in WINDOWS:
                tensor.mul_(4)
    model.save_pretrained(folder)
    return folder
