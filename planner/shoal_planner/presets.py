"""Shapes of well-known models, and the options that each family of them has in common.

Owns the figures, which are those of the models' published configs. A job names one (`model.preset`), or a family with a
shape of its own; what it says beside that counts more.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from shoal_planner.errors import InvalidField
from shoal_planner.own_model import own_model

Options = Mapping[str, Any]

FAMILY_OPTIONS: Mapping[str, Options] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "norm_eps": 1e-6},
    "gpt2": {
        "gated_mlp": False,
        "activation": "gelu_tanh",
        "norm": "layer",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "learned_positions": 1024,
    },
}


def _preset(family: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **options: Any) -> Options:
    shape = {"family": family, "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab}
    return shape | {"tie_embeddings": False} | options


def _gpt2(layers: int, hidden: int, heads: int) -> Options:
    return _preset("gpt2", layers, hidden, heads, 4 * hidden, 50257, tie_embeddings=True)


def _llama1(layers: int, hidden: int, heads: int, ffn: int) -> Options:
    return _preset("llama", layers, hidden, heads, ffn, 32000, norm_eps=1e-6)


def _llama3(layers: int, hidden: int, heads: int, ffn: int, **options: Any) -> Options:
    return _preset("llama", layers, hidden, heads, ffn, 128256, kv_heads=8, rope_theta=500000.0, **options)


def _stretched(factor: float) -> dict[str, Any]:
    scaling = {"kind": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
    return {"rope_scaling": scaling | {"factor": factor}}


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **options: Any) -> Options:
    return _preset("qwen2", layers, hidden, heads, ffn, vocab, kv_heads=kv_heads, rope_theta=1e6, **options)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, **options: Any) -> Options:
    fixed = {"kv_heads": 8, "head_dim": 128, "rope_theta": 1e6}
    return _preset("qwen3", layers, hidden, heads, ffn, 151936, **fixed, **options)


PRESETS: Mapping[str, Options] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "tinyllama-1.1b": _preset("llama", 22, 2048, 32, 5632, 32000, kv_heads=4),
    "llama-7b": _llama1(32, 4096, 32, 11008),
    "llama-13b": _llama1(40, 5120, 40, 13824),
    "llama-30b": _llama1(60, 6656, 52, 17920),
    "llama-65b": _llama1(80, 8192, 64, 22016),
    "llama-2-7b": _preset("llama", 32, 4096, 32, 11008, 32000),
    "llama-2-13b": _preset("llama", 40, 5120, 40, 13824, 32000),
    "llama-2-70b": _preset("llama", 80, 8192, 64, 28672, 32000, kv_heads=8),
    "llama-3-8b": _llama3(32, 4096, 32, 14336),
    "llama-3-70b": _llama3(80, 8192, 64, 28672),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14336, **_stretched(8.0)),
    "llama-3.1-70b": _llama3(80, 8192, 64, 28672, **_stretched(8.0)),
    "llama-3.1-405b": _llama3(126, 16384, 128, 53248, **_stretched(8.0)),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, tie_embeddings=True, **_stretched(32.0)),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8192, tie_embeddings=True, **_stretched(32.0)),
    "mistral-7b-v0.1": _preset("mistral", 32, 4096, 32, 14336, 32000, kv_heads=8, window=4096),
    "mistral-7b": _preset("mistral", 32, 4096, 32, 14336, 32768, kv_heads=8, rope_theta=1e6),
    "mistral-nemo-12b": _preset("mistral", 40, 5120, 32, 14336, 131072, kv_heads=8, head_dim=128, rope_theta=1e6),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, tie_embeddings=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151936, tie_embeddings=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, 151936, tie_embeddings=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, 152064, norm_eps=1e-5),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648, 152064, norm_eps=1e-5),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, 152064, norm_eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tie_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tie_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
}


def spelled_out(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of a model with its preset's shape and its family's options, as far as it does not say otherwise; of
    a user's own modules as `own_model` has it. Raises InvalidField."""
    if "entrypoint" in model:
        return own_model(model)
    rest = {name: value for name, value in model.items() if name != "preset"}
    if "preset" in model:
        name = model["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            raise InvalidField("model.preset", name, _unknown(str(name)))
        rest = {**PRESETS[name], **rest}
    family = rest.get("family")
    return {**FAMILY_OPTIONS.get(family, {}), **rest} if isinstance(family, str) else rest


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, PRESETS, n=3)
    return f"is not known; did you mean {' or '.join(near)}?" if near else f"is none of {', '.join(PRESETS)}"
