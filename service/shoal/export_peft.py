"""Adapters of a stored step as a folder of peft's: adapter_config.json and adapter_model.safetensors.

Owns the files and their names. Where queries, keys and values are one matrix there (GPT-2), their adapters are one pair
there: A of all on top of each other, B with each in its own rows and columns, and a rank and alpha that are as many
times larger, so that what they add has the same scale.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
from safetensors.numpy import save_file

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.lora import Adapters
from shoal_planner.parameters import ADAPTER_A, ADAPTER_B, parameters, without_adapters
from shoal_recovery.first_weights import base_of
from shoal_recovery.hf_layout import Place, place_of
from shoal_recovery.reading import read_parameters
from shoal_recovery.state import Manifest
from shoal_recovery.store import Store

_PREFIX = "base_model.model."


def export_peft(store: Store, manifest: Manifest, model: ModelSpec, folder: Path) -> tuple[Path, ...]:
    """Writes the float32 adapters; what was written. Raises StoreError, OSError, and InvalidField for a model without
    adapters."""
    lora = model.lora
    if lora is None:
        raise InvalidField("format", "peft", "needs a job with train.lora: this one trained all weights")
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    counts: dict[str, int] = {}  # of ours in each of theirs, by the name that a config has for these
    tensors: dict[str, Any] = {}
    for name, pairs in _pairs(store, manifest, model):
        counts[_target(model, name)] = len(pairs)
        first, second = _together(pairs)
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = first
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = second
    config.write_text(json.dumps(_config(model, lora, counts), indent=2) + "\n", encoding="ascii")
    save_file(tensors, weights, metadata={"format": "pt"})
    return config, weights


_Pair = tuple[Place, Any, Any]


def _pairs(store: Store, manifest: Manifest, model: ModelSpec) -> Iterator[tuple[str, list[_Pair]]]:
    """By the name of their module: A as [rank, in] and B as [out, rank], with the place of the matrix."""
    whole = {parameter.fqn: parameter for parameter in parameters(without_adapters(model))}
    known = {parameter.fqn: parameter for parameter in parameters(model)}
    modules: defaultdict[str, list[_Pair]] = defaultdict(list)
    first: Any = None
    for fqn, data in read_parameters(store, manifest, model):
        values = np.frombuffer(data, dtype="<f4").reshape(known[fqn].shape)
        if f".{ADAPTER_A}." in fqn:
            first = np.ascontiguousarray(values.T) if known[fqn].cut else values  # cut along its inputs
            continue
        place = place_of(model, whole[fqn.replace(f".{ADAPTER_B}.", ".")])
        modules[place.name.removesuffix(".weight")].append((place, first, values))
    yield from modules.items()


def _together(pairs: list[_Pair]) -> tuple[Any, Any]:
    """The pair of their module."""
    place, first, second = pairs[0]
    if place.thirds == 1:
        return first, second
    rows, rank = second.shape
    joined = np.zeros((place.thirds * rows, len(pairs) * rank), dtype=np.float32)
    for index, (here, _, values) in enumerate(pairs):
        joined[here.third * rows : (here.third + 1) * rows, index * rank : (index + 1) * rank] = values
    return np.concatenate([one for _, one, _ in pairs]), joined


def _target(model: ModelSpec, name: str) -> str:
    """The end of a module's name that tells it from others of its block."""
    return ".".join(name.split(".")[-2:]) if model.family == "gpt2" else name.rpartition(".")[2]


def _config(model: ModelSpec, lora: Adapters, counts: Mapping[str, int]) -> dict[str, Any]:
    several = {name: count for name, count in counts.items() if count > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _path(base_of(lora).uri),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(counts),
        "rank_pattern": {name: count * lora.rank for name, count in several.items()},
        "alpha_pattern": {name: count * lora.alpha for name, count in several.items()},
        "fan_in_fan_out": model.family == "gpt2",  # whose matrices are stored as [in, out]
        "inference_mode": True,
    }


def _path(uri: str) -> str:
    """As their loaders want it: folders without a scheme."""
    parts = urlsplit(uri)
    return url2pathname(parts.path) if parts.scheme == "file" else uri
