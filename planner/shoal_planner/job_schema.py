"""The JSON Schema of jobs, for editors and for checks before anything is sent. What only the whole of a job can tell
(which fields go together) it leaves to those who read jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_planner.architecture import MODEL_RANGES, ModelSpec
from shoal_planner.data_spec import STORAGE, DataSpec, SourceSpec
from shoal_planner.job import CHECKPOINT_RANGES, MOST_NAME, TRAIN_RANGES, CheckpointSpec, JobSpec, TrainSpec
from shoal_planner.job_words import SCRIPT, TRAINED
from shoal_planner.labels import KEY, LONGEST_LABEL, MOST_LABELS
from shoal_planner.limits import LimitsSpec
from shoal_planner.presets import PRESETS
from shoal_planner.script_spec import ScriptCheckpointSpec, ScriptLimitsSpec, ScriptSpec
from shoal_planner.value_schema import DIALECT, Shaper

_RANGES = {ModelSpec: MODEL_RANGES, TrainSpec: TRAIN_RANGES, CheckpointSpec: CHECKPOINT_RANGES}
_NAME = {"type": "string", "minLength": 1, "maxLength": MOST_NAME}
_LABELS = {
    "type": "object",
    "maxProperties": MOST_LABELS,
    "propertyNames": {"pattern": f"^{KEY.pattern}$"},
    "additionalProperties": {"type": "string", "maxLength": LONGEST_LABEL},
}
_SOURCE = {"type": ["string", "null"], "pattern": "^(/|file:///|s3://|stdlib:$)"}
_STORE = {"type": ["string", "null"], "pattern": "^(file|s3)://"}
_PROFILE = {"type": ["string", "null"], "pattern": f"^{STORAGE.pattern}$"}
_MONEY = {"type": ["number", "null"], "exclusiveMinimum": 0}
_SHAPES: dict[tuple[type[Any], str], dict[str, Any]] = {
    **{(kind, "name"): _NAME for kind in (JobSpec, ScriptSpec)},
    **{(kind, "labels"): _LABELS for kind in (JobSpec, ScriptSpec)},
    **{(kind, "storage"): _PROFILE for kind in (DataSpec, SourceSpec, CheckpointSpec)},
    **{
        (kind, name): _MONEY for kind in (LimitsSpec, ScriptLimitsSpec) for name in ("max_price_per_hour", "budget_usd")
    },
    (SourceSpec, "uri"): {**_SOURCE, "type": "string"},
    (DataSpec, "uri"): _SOURCE,
    (DataSpec, "eval_uri"): _SOURCE,
    (CheckpointSpec, "uri"): _STORE,
    (ScriptCheckpointSpec, "uri"): {**_STORE, "type": "string"},
}
_WRITTEN_BY_SHOAL = ("module", "lora")  # of a model
_MODELS = (["preset"], ["hf"], ["entrypoint"], ["layers", "hidden", "heads", "ffn", "vocab"])


def job_schema() -> dict[str, Any]:
    """Of a job of either kind, as plain JSON values."""
    return {
        "$schema": DIALECT,
        "title": "Shoal job",
        "description": "What to train, on which data, how long; the body of POST /v1/jobs.",
        "type": "object",
        "properties": {"kind": {"enum": ["train", "ray_train"], "description": TRAINED["kind"]}},
        "if": {"properties": {"kind": {"const": "ray_train"}}, "required": ["kind"]},
        "then": script_schema(),
        "else": trained_schema(),
    }


def trained_schema() -> dict[str, Any]:
    """Of a job of kind `train` as users write it."""
    found = Shaper(words=TRAINED, ranges=_RANGES, shapes=_SHAPES).of(JobSpec)
    found["properties"] = {"kind": _kind("train", TRAINED), **found["properties"]}
    found["properties"]["model"] = _model(found["properties"]["model"])
    return found


def script_schema() -> dict[str, Any]:
    """Of a job of kind `ray_train`."""
    found = Shaper(words=SCRIPT, ranges=_RANGES, shapes=_SHAPES).of(ScriptSpec)
    found["properties"] = {"kind": _kind("ray_train", SCRIPT), **found["properties"]}
    found["required"] = ["kind", *found["required"]]
    return found


def kept_schema() -> dict[str, Any]:
    """Of a job of kind `train` as `job_to_mapping` writes it, whatever of its model Shoal has found out."""
    found = Shaper(words=TRAINED, ranges=_RANGES, shapes=_SHAPES).of(JobSpec)
    del found["properties"]["model"]["properties"]["lora"]
    return found


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
