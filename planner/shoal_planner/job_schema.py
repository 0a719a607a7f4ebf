"""The JSON Schema of jobs, for editors and for checks before anything is sent: made from the dataclasses that read
them, so that it says what they say. What only the whole of a job can tell (which fields go together) it leaves to them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from shoal_planner.architecture import MODEL_RANGES, ModelSpec
from shoal_planner.job import CHECKPOINT_RANGES, TRAIN_RANGES, CheckpointSpec, JobSpec, TrainSpec
from shoal_planner.job_words import SCRIPT, TRAINED
from shoal_planner.presets import PRESETS
from shoal_planner.ranges import Range
from shoal_planner.script_spec import ScriptSpec
from shoal_planner.strict import hints_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_RANGES: Mapping[type[Any], Mapping[str, Range]] = {
    ModelSpec: MODEL_RANGES,
    TrainSpec: TRAIN_RANGES,
    CheckpointSpec: CHECKPOINT_RANGES,
}
_SCALARS: Mapping[object, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
_WRITTEN_BY_SHOAL = ("module", "lora")  # of a model
_MODELS = (["preset"], ["hf"], ["entrypoint"], ["layers", "hidden", "heads", "ffn", "vocab"])


def job_schema() -> dict[str, Any]:
    """Of a job of either kind, as plain JSON values."""
    trained, script = _object(JobSpec, "", TRAINED), _object(ScriptSpec, "", SCRIPT)
    trained["properties"] = {"kind": _kind("train", TRAINED), **trained["properties"]}
    trained["properties"]["model"] = _model(trained["properties"]["model"])
    script["properties"] = {"kind": _kind("ray_train", SCRIPT), **script["properties"]}
    script["required"] = ["kind", *script["required"]]
    return {
        "$schema": DIALECT,
        "title": "Shoal job",
        "description": "What to train, on which data, how long; the body of POST /v1/jobs.",
        "type": "object",
        "properties": {"kind": {"enum": ["train", "ray_train"], "description": TRAINED["kind"]}},
        "if": {"properties": {"kind": {"const": "ray_train"}}, "required": ["kind"]},
        "then": script,
        "else": trained,
    }


def _kind(kind: str, words: Mapping[str, str]) -> dict[str, Any]:
    return {"const": kind, "description": words["kind"]}


def _model(made: dict[str, Any]) -> dict[str, Any]:
    """With the fields that are spelled out before a model is read."""
    properties = {name: each for name, each in made["properties"].items() if name not in _WRITTEN_BY_SHOAL}
    extra: dict[str, dict[str, Any]] = {
        "preset": {"enum": sorted(PRESETS)},
        "hf": {"type": "string"},
        "entrypoint": {"type": "string"},
        "arguments": {"type": "object"},
    }
    for name, schema in extra.items():
        properties[name] = {**schema, "description": TRAINED[f"model.{name}"]}
    found = {name: each for name, each in made.items() if name != "required"}
    return {**found, "properties": properties, "anyOf": [{"required": names} for names in _MODELS]}


def _object(cls: type[Any], path: str, words: Mapping[str, str]) -> dict[str, Any]:
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        at = f"{path}.{field.name}" if path else field.name
        made = _of(hints_of(cls)[field.name], at, words)  # type: ignore[arg-type]
        made |= _range(_RANGES.get(cls, {}).get(field.name), made)
        if at in words:
            made["description"] = words[at]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        elif _is_plain(field.default):
            made["default"] = field.default
        properties[field.name] = made
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _range(limits: Range | None, made: Mapping[str, Any]) -> dict[str, Any]:
    if limits is None or not {"integer", "number"} & set(_types(made)):
        return {}
    return {"minimum": limits[0], "maximum": limits[1]}


def _types(made: Mapping[str, Any]) -> list[str]:
    kinds = made.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _of(hint: Any, path: str, words: Mapping[str, str]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _union([_of(each, path, words) for each in arguments])
    if hint is type(None):
        return {"type": "null"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return _list(arguments, path, words)
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], path, words)}
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast(type[Any], hint), path, words)
    return {"type": _SCALARS[hint]}


def _union(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Several simple types as one list of types, which editors show better than alternatives."""
    if all(set(option) == {"type"} for option in options):
        return {"type": [option["type"] for option in options]}
    return {"anyOf": options}


def _list(arguments: tuple[Any, ...], path: str, words: Mapping[str, str]) -> dict[str, Any]:
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], path, words)}
    items = [_of(each, path, words) for each in arguments]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
