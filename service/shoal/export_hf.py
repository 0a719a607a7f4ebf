"""A stored step as a folder of Hugging Face's: config.json and model.safetensors, or several of these with an index.

Owns the files. What they are called inside, and what stands in a checkpoint, is shoal_recovery's.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters, without_adapters
from shoal_recovery.first_weights import ReadWeights, stored_weights
from shoal_recovery.hf_beside import kept_beside, said_beside
from shoal_recovery.hf_folder import CONFIG
from shoal_recovery.hf_layout import also_named, config_of_model, place_of
from shoal_recovery.state import Manifest
from shoal_recovery.store import Store

_INDEX = "model.safetensors.index.json"
_FILE_BYTES = 4 * 1024**3
_METADATA = {"format": "pt"}  # without it, their loader refuses a file


def export_hf(
    store: Store, manifest: Manifest, model: ModelSpec, seq_len: int | None, folder: Path, file_bytes: int = _FILE_BYTES
) -> tuple[Path, ...]:
    """Writes the float32 weights, at most about `file_bytes` to a file, and what was kept beside them; what was
    written. `seq_len` is how long contexts may be where nothing was. Adapters are merged into their base. Raises
    StoreError, OSError, and InvalidField for a model that its family there cannot be."""
    whole = without_adapters(model)
    beside = kept_beside(store, manifest.job)
    config = config_of_model(whole, seq_len, said_beside(beside))
    folder.mkdir(parents=True, exist_ok=True)
    num_files = _num_files(whole, file_bytes)
    _check_free(folder, num_files)
    file = folder / CONFIG
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="ascii")
    weights = _write(_tensors(stored_weights(store, manifest, model), whole), num_files, file_bytes, folder)
    others = [(folder / name, data) for name, data in sorted(beside.items()) if name != CONFIG]
    for path, data in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return (file, *weights, *(path for path, _ in others))


def _check_free(folder: Path, num_files: int) -> None:
    """Files of another export would be taken for a part of this one, or for all of it."""
    ours = {_name(number, num_files) for number in range(1, num_files + 1)} | ({_INDEX} if num_files > 1 else set())
    others = sorted(path.name for path in folder.glob("model*.safetensors*") if path.name not in ours)
    if others:
        raise FileExistsError(f"{folder} has weights of something else: {', '.join(others)}")


def _name(number: int, num_files: int) -> str:
    return "model.safetensors" if num_files == 1 else f"model-{number:05d}-of-{num_files:05d}.safetensors"


def _tensors(read: ReadWeights, model: ModelSpec) -> Iterator[tuple[str, Any]]:
    """By their names. What is one tensor there comes when its last part has."""
    parts: defaultdict[str, list[Any]] = defaultdict(list)
    for parameter in parameters(model):
        place = place_of(model, parameter)
        values = read(parameter, 0, parameter.numel).reshape(parameter.shape)
        parts[place.name].append(values.T if place.turned else values)
        if place.third + 1 == place.thirds:
            whole = np.ascontiguousarray(np.concatenate(parts.pop(place.name), axis=-1))
            for name in (place.name, *also_named(model, parameter)):
                yield name, whole


def _num_bytes(model: ModelSpec) -> Iterator[int]:
    """Of each tensor, in that order."""
    sizes: Counter[str] = Counter()
    for parameter in parameters(model):
        place = place_of(model, parameter)
        sizes[place.name] += 4 * parameter.numel
        if place.third + 1 == place.thirds:
            yield from (sizes[place.name],) * (1 + len(also_named(model, parameter)))


def _num_files(model: ModelSpec, file_bytes: int) -> int:
    """As `_write` fills them, so that each can be named before the next is begun."""
    count, filled = 1, 0
    for num_bytes in _num_bytes(model):
        if filled and filled + num_bytes > file_bytes:
            count, filled = count + 1, 0
        filled += num_bytes
    return count


def _write(tensors: Iterator[tuple[str, Any]], num_files: int, file_bytes: int, folder: Path) -> tuple[Path, ...]:
    batch: dict[str, Any] = {}
    places: dict[str, str] = {}
    written: list[Path] = []

    def save() -> None:
        name = _name(len(written) + 1, num_files)
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
        index = folder / _INDEX
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
        written.append(index)
    return tuple(written)
