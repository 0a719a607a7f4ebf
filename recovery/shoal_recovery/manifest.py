"""The text of a manifest: a table of contents of one stored step, as JSON that can be read without Shoal.

    {"format": "shoal-manifest", "version": 1,
     "job": "job_...", "step": 40, "epoch": 3, "next_sample": 640,
     "marks": [[0, 25, 1, 71680, 12], ...],            only where data is tokenised: where samples begin in it
     "files": [["file:///data", 2, 4096, [["a.jsonl", "0a1b2c3d4e5f"], ...]], ...],     which data: URI, files, bytes
     "notes": "...",                                   what a reader without Shoal has to know
     "model": {"family": "llama", "layers": 8, "hidden": 256, ...},
     "element_type": "float32", "byte_order": "little",
     "parameters": {"layers.0.attention.o.weight": {"shape": [256, 256], "dimensions": ["in", "out"]}, ...},
     "objects": ["job_.../shards/...", ...],
     "columns": ["object", "parameter", "kind", "first", "last", "offset", "num_bytes", "checksum"],
     "pieces": [[0, "layers.0.attention.o.weight", "master", 0, 32768, 0, 131072, "crc32:0a1b2c3d"], ...],
     "checksum": "crc32:9f8e7d6c"}                     of all text before this field's comma; a reader may go without.
                                                       It ends every version, or one bit could make another of this

A row says: elements [first, last) of the flattened (row-major) parameter, of that kind, are the `num_bytes` bytes at
`offset` of objects[object], which is a safetensors file whose tensors are its rows. This file owns that form, both
ways, and refuses anything else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import ADAPTER_A, ADAPTER_B, Parameter, parameters
from shoal_planner.strict import read
from shoal_recovery.crc import checksum
from shoal_recovery.intervals import covers, merge
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, Kind, Manifest, ShardKey, StoredPiece

VERSION = 1
_NOTES = (
    "Each parameter is stored flattened in row-major order of its shape, cut into pieces [first, last). Kinds: master "
    "(the weights in full precision), exp_avg and exp_avg_sq (the moments of AdamW). Dimensions name what each "
    "dimension means: [in, out] is used as x @ W, [out, in] as x @ W.T. Checksums are CRC-32 (zlib) of the piece. An "
    "object is a safetensors file whose tensors, named parameter/kind/first-last, are its pieces. Where the model has "
    "lora, the parameters are adapters a and b beside matrices W of its base: these compute with W + alpha / rank b a."
)
_COLUMNS = ("object", "parameter", "kind", "first", "last", "offset", "num_bytes", "checksum")
_SEAL = ',"checksum":"'
_USED_AS_X_W = ("attention.o.weight", "mlp.down.weight")
_OF_A, _OF_B = f".{ADAPTER_A}.weight", f".{ADAPTER_B}.weight"
_KINDS: Mapping[str, Kind] = {kind.value: kind for kind in OWNED_KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredParameter:
    shape: tuple[int, ...]
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    version: int
    job: str
    step: int
    epoch: int
    next_sample: int
    parameters: dict[str, _StoredParameter]
    objects: tuple[str, ...]
    pieces: tuple[Any, ...]
    format: Literal["shoal-manifest"]
    element_type: Literal["float32"]
    byte_order: Literal["little"]
    columns: tuple[str, ...]
    model: ModelSpec | None = None  # not said by early versions
    notes: str = ""
    marks: tuple[tuple[int, ...], ...] = ()
    files: tuple[Any, ...] = ()
    checksum: str = ""


def manifest_to_json(manifest: Manifest, model: ModelSpec) -> str:
    """`model` gives the shapes. Raises InvalidField if the manifest is not a whole step of this model."""
    shapes = {
        parameter.fqn: {"shape": list(parameter.shape), "dimensions": _dimensions(parameter)}
        for parameter in parameters(model)
    }
    check_whole(manifest, model)
    objects = sorted({piece.object for piece in manifest.pieces})
    numbers = {name: number for number, name in enumerate(objects)}
    document = {
        "format": "shoal-manifest",
        "version": VERSION,
        "job": manifest.job,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "next_sample": manifest.next_sample,
        **({"marks": manifest.marks} if manifest.marks else {}),  # earlier versions read what has none
        **({"files": manifest.files} if manifest.files else {}),
        "notes": _NOTES,
        "model": dataclasses.asdict(model),
        "element_type": "float32",
        "byte_order": "little",
        "parameters": shapes,
        "objects": objects,
        "columns": list(_COLUMNS),
        "pieces": [_row(piece, numbers) for piece in manifest.pieces],
    }
    body = json.dumps(document, ensure_ascii=True, separators=(",", ":")).removesuffix("}")
    return f'{body}{_SEAL}{checksum(body.encode("ascii"))}"}}\n'


def manifest_from_json(text: str | bytes) -> Manifest:
    """Raises InvalidField on anything that `manifest_to_json` would not have written."""
    document = _document(text)
    manifest = Manifest(
        version=document.version,
        job=document.job,
        step=document.step,
        epoch=document.epoch,
        next_sample=document.next_sample,
        pieces=tuple(_piece(row, f"pieces[{index}]", document) for index, row in enumerate(document.pieces)),
        marks=document.marks,
        files=document.files,
    )
    _verify(document, text)
    return manifest


def model_from_json(text: str | bytes) -> ModelSpec | None:
    """The model that the manifest describes, if it does. Raises InvalidField as `manifest_from_json`."""
    document = _document(text)
    _verify(document, text)
    return document.model


def _document(text: str | bytes) -> _Document:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidField("manifest", text[:40], f"is not JSON ({error})") from error
    if isinstance(value, Mapping) and (told := value.get("version")) != VERSION:
        if value.get("checksum") != checksum(_body(text)):
            raise InvalidField("checksum", value.get("checksum"), f"is not that of the text, which says version {told}")
        raise InvalidField("version", told, f"only version {VERSION} can be read")
    document = read(_Document, value)
    if document.columns != _COLUMNS:
        raise InvalidField("columns", list(document.columns), f"must be {', '.join(_COLUMNS)}")
    return document


def _verify(document: _Document, text: str | bytes) -> None:
    """After everything else: what is wrong by itself is said more plainly."""
    if document.checksum and document.checksum != (right := checksum(_body(text))):
        raise InvalidField("checksum", document.checksum, f"is not that of the text, {right}")


def _body(text: str | bytes) -> bytes:
    """What the checksum at the end is of."""
    return (text.encode("utf-8") if isinstance(text, str) else bytes(text)).rpartition(_SEAL.encode("ascii"))[0]


def check_whole(manifest: Manifest, model: ModelSpec) -> None:
    """Whether every element of every parameter is there, in all stored kinds. Raises InvalidField."""
    held: dict[tuple[str, Kind], list[tuple[int, int]]] = {}
    for piece in manifest.pieces:
        held.setdefault((piece.key.fqn, piece.key.kind), []).append((piece.key.first, piece.key.last))
    for parameter in parameters(model):
        for kind in OWNED_KINDS:
            parts = merge(held.pop((parameter.fqn, kind), ()))
            if not covers(parts, (0, parameter.numel)) or parts[-1][1] > parameter.numel:
                raise InvalidField(
                    f"pieces of {parameter.fqn} {kind}", list(parts), f"must cover all of [0, {parameter.numel})"
                )
    for fqn, kind in held:
        raise InvalidField("pieces", f"{fqn} {kind}", "is not stored state of this model")


def _dimensions(parameter: Parameter) -> list[str]:
    if len(parameter.shape) == 1:
        if parameter.fqn.endswith(("q_norm.weight", "k_norm.weight")):
            return ["head"]
        return ["out"] if parameter.cut else ["hidden"]
    if parameter.fqn == "positions.weight":
        return ["position", "hidden"]
    if parameter.fqn in ("embedding.weight", "head.weight"):
        return ["vocabulary", "hidden"]
    if parameter.fqn.endswith(_OF_B):
        return ["out", "rank"]
    if parameter.fqn.endswith(_OF_A):
        return ["in", "rank"] if parameter.cut else ["rank", "in"]
    return ["in", "out"] if parameter.fqn.endswith(_USED_AS_X_W) else ["out", "in"]


def _row(piece: StoredPiece, numbers: Mapping[str, int]) -> list[int | str]:
    key, number = piece.key, numbers[piece.object]
    return [number, key.fqn, key.kind.value, key.first, key.last, piece.offset, piece.num_bytes, piece.checksum]


def _piece(row: object, path: str, document: _Document) -> StoredPiece:
    """By hand and not through `read`: a large model has a hundred thousand rows."""
    if not isinstance(row, Sequence) or len(row) != len(_COLUMNS):
        raise InvalidField(path, row, f"must be a row of {', '.join(_COLUMNS)}")
    number, fqn, kind, first, last, offset, num_bytes, checksum = row
    if not all(type(entry) is int and entry >= 0 for entry in (number, first, last, offset, num_bytes)):
        raise InvalidField(path, row, "object, first, last, offset and num_bytes must be whole numbers, zero or more")
    if number >= len(document.objects):
        raise InvalidField(path, row, f"names object {number} of {len(document.objects)}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidField(path, row, f"kind must be one of {', '.join(_KINDS)}")
    if not isinstance(fqn, str) or fqn not in document.parameters:
        raise InvalidField(path, row, "names a parameter that is not listed")
    if not first < last or num_bytes != (last - first) * ELEMENT_BYTES:
        raise InvalidField(path, row, f"num_bytes must be {ELEMENT_BYTES} * (last - first), and that not zero")
    if not isinstance(checksum, str):
        raise InvalidField(path, row, "checksum must be text")
    return StoredPiece(
        key=ShardKey(fqn=fqn, kind=_KINDS[kind], first=first, last=last),
        object=document.objects[number],
        offset=offset,
        num_bytes=num_bytes,
        checksum=checksum,
    )
