"""A stored step in the layout of Hugging Face's Llama: config.json and model.safetensors, or several of these with an
index. Owns names, orientation and the config; what stands in a checkpoint is shoal_recovery's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_recovery.reading import read_parameters
from shoal_recovery.state import Manifest
from shoal_recovery.store import Store

_FILE_BYTES = 4 * 1024**3
_METADATA = {"format": "pt"}  # without it, their loader refuses a file
_NAMES = {"embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
_NAMES["head.weight"] = "lm_head.weight"
_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_TURNED = ("attention.o", "mlp.down")  # stored as [in, out]


def export_hf(
    store: Store, manifest: Manifest, model: ModelSpec, seq_len: int | None, folder: Path, file_bytes: int = _FILE_BYTES
) -> tuple[Path, ...]:
    """Writes the float32 weights, at most about `file_bytes` to a file; what was written. Raises StoreError, OSError,
    and InvalidField for a model that is no Llama of theirs."""
    if not model.gated_mlp:
        raise InvalidField("model.gated_mlp", False, "Hugging Face's Llama has a gated MLP")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(_config(model, seq_len), indent=2) + "\n", encoding="ascii")
    weights = _write(_tensors(store, manifest, model), _num_files(model, file_bytes), file_bytes, folder)
    return (config, *weights)


def _config(model: ModelSpec, seq_len: int | None) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    return config if seq_len is None else config | {"max_position_embeddings": seq_len}


def _tensors(store: Store, manifest: Manifest, model: ModelSpec) -> Iterator[tuple[str, Any]]:
    shapes = {parameter.fqn: parameter.shape for parameter in parameters(model)}
    for fqn, data in read_parameters(store, manifest, model):
        name, turned = _renamed(fqn)
        values = np.frombuffer(data, dtype="<f4").reshape(shapes[fqn])
        yield name, np.ascontiguousarray(values.T) if turned else values


def _renamed(fqn: str) -> tuple[str, bool]:
    """Their name of a parameter, and whether theirs is the transpose."""
    if fqn in _NAMES:
        return _NAMES[fqn], False
    _, layer, part = fqn.removesuffix(".weight").split(".", 2)
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight", part in _TURNED


def _num_files(model: ModelSpec, file_bytes: int) -> int:
    """As `_write` fills them, so that each can be named before the next is begun."""
    count, filled = 1, 0
    for parameter in parameters(model):
        num_bytes = 4 * parameter.numel
        if filled and filled + num_bytes > file_bytes:
            count, filled = count + 1, 0
        filled += num_bytes
    return count


def _write(tensors: Iterator[tuple[str, Any]], num_files: int, file_bytes: int, folder: Path) -> tuple[Path, ...]:
    batch: dict[str, Any] = {}
    places: dict[str, str] = {}
    written: list[Path] = []

    def save() -> None:
        number = len(written) + 1
        name = "model.safetensors" if num_files == 1 else f"model-{number:05d}-of-{num_files:05d}.safetensors"
        save_file(batch, folder / name, metadata=_METADATA)
        written.append(folder / name)
        places.update(dict.fromkeys(batch, name))
        batch.clear()

    total = filled = 0
    for name, values in tensors:
        if batch and filled + values.nbytes > file_bytes:
            save()
            filled = 0
        batch[name] = values
        filled += values.nbytes
        total += values.nbytes
    save()
    if num_files > 1:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
        written.append(index)
    return tuple(written)
