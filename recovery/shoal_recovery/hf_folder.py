"""Reads the config and the weights of a Hugging Face folder, wherever a store reaches: each interval by itself.

Owns the files and their headers (safetensors: eight bytes that say how long the JSON after them is, which says where
each tensor lies; the whole format is that simple). Does not own what tensors are called (`hf_layout`).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_planner.architecture import ModelSpec
from shoal_planner.errors import InvalidField
from shoal_planner.parameters import Parameter, parameters
from shoal_planner.strict import read
from shoal_recovery.errors import StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.hf_layout import Place, model_of_config, names_of, place_of
from shoal_recovery.store import Store

Array = npt.NDArray[np.float32]
CONFIG = "config.json"
_WHOLE = "model.safetensors"
_INDEX = f"{_WHOLE}.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTERS = "adapter_config.json"
_MOST_HEADER_BYTES = 100 * 1024**2  # what the format's own reader accepts
_LENGTH_BYTES = 8
_READ_BYTES = 1 << 26
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file, for its fingerprint
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """`offset`: of its first byte in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class HfFolder:
    """The place of a store as a folder. Everything raises StoreError where that cannot be read, and InvalidField, which
    names file and value, where it holds something else than is needed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @cached_property
    def model(self) -> ModelSpec:
        if not self.has(CONFIG) and self.has(_ADAPTERS):
            problem = "is there, and no config.json: these are adapters alone. Merge them first: "
            made = "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OUT)"
            raise InvalidField(self._store.uri, _ADAPTERS, problem + made)
        return read(ModelSpec, model_of_config(self._json(CONFIG)), CONFIG)

    def check(self, model: ModelSpec) -> None:
        """That all tensors of this model are there in the right shapes, and what is tied is not there as two; reads
        headers, and samples of what is there twice."""
        for parameter in parameters(model):
            found = self._find(place_of(model, parameter), parameter)
            for name in names_of(place_of(model, parameter), parameter):
                other = self._tensors.get(name, found)
                if other != found and not self._alike(found, other, parameter):
                    problem = "differs from the embedding, which config.json says it is: set tie_word_embeddings there"
                    raise InvalidField(f"{other.file}: {name}", list(other.shape), f"{problem} to false")

    def _alike(self, one: _Tensor, other: _Tensor, parameter: Parameter) -> bool:
        count = min(parameter.numel, _SAMPLE_BYTES)
        starts = sorted({(parameter.numel - count) * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
        return (one.shape, one.dtype) == (other.shape, other.dtype) and all(
            np.array_equal(self._elements(one, at, at + count), self._elements(other, at, at + count)) for at in starts
        )

    def fingerprint(self) -> str:
        """Of the headers of all files of weights, and of samples of what comes after these: the same wherever the
        folder is, and another for weights that were trained on."""
        found = hashlib.sha256()
        for file in self._files():
            (length,) = struct.unpack("<Q", self._store.read(file, 0, _LENGTH_BYTES))
            tensors = list(dict(self._header(file)).values())
            sizes = (math.prod(one.shape) * _ELEMENT_BYTES.get(one.dtype, 1) for one in tensors)
            ends = (one.offset + size for one, size in zip(tensors, sizes, strict=True))
            begin = _LENGTH_BYTES + length
            room = max(ends, default=begin) - begin - _SAMPLE_BYTES
            found.update(self._store.read(file, 0, begin))
            for number in range(_SAMPLES if room > 0 else 0):
                found.update(self._store.read(file, begin + room * number // (_SAMPLES - 1), _SAMPLE_BYTES))
            if room <= 0:
                found.update(self._store.read(file, begin))
        return f"sha256:{found.hexdigest()}"

    def values(self, model: ModelSpec, parameter: Parameter, first: int, last: int) -> Array:
        """Elements [first, last) of the flattened parameter as it is stored here."""
        place = place_of(model, parameter)
        tensor = self._find(place, parameter)
        if not place.turned:
            skipped = place.third * parameter.numel
            return self._elements(tensor, skipped + first, skipped + last)
        rows, columns = parameter.shape
        low, high = first // columns, -(-last // columns)
        ours = self._columns(tensor, place.third * rows + low, place.third * rows + high)
        return np.ascontiguousarray(ours.T).reshape(-1)[first - low * columns : last - low * columns]

    def _columns(self, tensor: _Tensor, low: int, high: int) -> Array:
        """[:, low:high] of a matrix, which is read from end to end: objects cannot be read in strides."""
        rows, columns = tensor.shape
        found = np.empty((rows, high - low), dtype=np.float32)
        at_once = max(1, _READ_BYTES // (columns * _ELEMENT_BYTES[tensor.dtype]))
        for row in range(0, rows, at_once):
            part = self._elements(tensor, row * columns, min(rows, row + at_once) * columns)
            found[row : row + at_once] = part.reshape(-1, columns)[:, low:high]
        return found

    def _elements(self, tensor: _Tensor, first: int, last: int) -> Array:
        size = _ELEMENT_BYTES[tensor.dtype]
        data = self._store.read(tensor.file, tensor.offset + first * size, (last - first) * size)
        if tensor.dtype == "BF16":  # the upper half of a float32
            return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(data, dtype="<f4" if tensor.dtype == "F32" else "<f2").astype(np.float32)

    def _find(self, place: Place, parameter: Parameter) -> _Tensor:
        names = (name for name in names_of(place, parameter) if name in self._tensors)
        if (tensor := next((self._tensors[name] for name in names), None)) is None:
            raise InvalidField(self._store.uri, place.name, "is a tensor that the folder does not have")
        shape = parameter.shape[::-1] if place.turned else parameter.shape
        shape = (*shape[:-1], shape[-1] * place.thirds)
        if tensor.shape != shape:
            raise InvalidField(f"{tensor.file}: {place.name}", list(tensor.shape), f"must have shape {list(shape)}")
        if tensor.dtype not in _ELEMENT_BYTES:
            problem = f"must be one of {', '.join(_ELEMENT_BYTES)}"
            raise InvalidField(f"{tensor.file}: {place.name}", tensor.dtype, problem)
        return tensor

    @cached_property
    def _tensors(self) -> Mapping[str, _Tensor]:
        return {name: tensor for file in self._files() for name, tensor in self._header(file)}

    def _header(self, file: str) -> Iterator[tuple[str, _Tensor]]:
        (length,) = struct.unpack("<Q", self._store.read(file, 0, _LENGTH_BYTES))
        if length > _MOST_HEADER_BYTES:
            raise InvalidField(file, length, "is no length of a header: it is no safetensors file")
        begin = end = _LENGTH_BYTES + length
        for name, entry in self._parsed(file, self._store.read(file, _LENGTH_BYTES, length)).items():
            if name == "__metadata__":
                continue
            try:
                shape = tuple(int(size) for size in entry["shape"])
                first, last = entry["data_offsets"]
                size = _ELEMENT_BYTES.get(entry["dtype"])
                whole = size is None or last - first == size * math.prod(shape)
            except (KeyError, TypeError, ValueError):
                whole = False
            if not whole:
                raise InvalidField(f"{file}: {name}", entry, "says of no tensor what it is and where")
            end = max(end, begin + last)
            yield name, _Tensor(file=file, dtype=entry["dtype"], shape=shape, offset=begin + first)
        self._check_ends(file, end)

    def _check_ends(self, file: str, end: int) -> None:
        """By its last byte: sizes take lists, which not all may ask for."""
        try:
            self._store.read(file, end - 1, 1)
        except (StoreUnreachable, StoreRefused):
            raise
        except StoreError as error:
            found = next((one.num_bytes for one in self._store.entries(file) if one.name == file), None)
            problem = f"bytes are not the {end} that its header tells of: it was cut short or replaced"
            raise InvalidField(f"{self._store.uri}/{file}", found, problem) from error

    def _files(self) -> tuple[str, ...]:
        """One file goes before an index of several, as with their own loaders."""
        if self.has(_WHOLE):
            return (_WHOLE,)
        if not self.has(_INDEX):
            pickled = [name for name in _PICKLED if self.has(name)]
            there = f"; {pickled[0]} is, which is not read" if pickled else ""
            made = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            problem = f"is not there, nor an index of several{there}. transformers writes it: {made}"
            raise InvalidField(self._store.uri, _WHOLE, problem)
        places = self._json(_INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(name, str) and name.endswith(".safetensors") and "/" not in name for name in places.values()
        ):
            raise InvalidField(f"{_INDEX}: weight_map", places, "must map names of tensors to files beside it")
        return tuple(sorted(set(places.values())))

    def is_there(self) -> bool:
        return self.has(CONFIG)

    def has(self, name: str) -> bool:
        """Without a list of all that is there, which may be a whole bucket."""
        try:
            return bool(self._store.read(name, 0, 1))
        except (StoreUnreachable, StoreRefused):
            raise
        except StoreError:
            return False

    def _json(self, name: str) -> Mapping[str, Any]:
        return self._parsed(name, self._store.read(name))

    def _parsed(self, name: str, text: bytes) -> Mapping[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise StoreError(self._store.uri, f"{name} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise StoreError(self._store.uri, f"{name} holds no mapping")
        return found
