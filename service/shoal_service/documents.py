"""JSON Schemas of what the API carries and the packages below define: jobs, clusters, plans, journals. Each is made
from the dataclasses that read it. `openapi` makes components of them, which bodies and answers name
(`shapes.document`). Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shoal_planner.architecture import ModelSpec
from shoal_planner.cluster import (
    LINK_RANGES,
    NODE_ID,
    NODE_RANGES,
    OVERRIDE_RANGES,
    ClusterSnapshot,
    DeviceOverride,
    Link,
    Node,
)
from shoal_planner.cluster_schema import cluster_schema, market_schema, pool_schema
from shoal_planner.job_schema import job_schema, kept_schema, script_schema, trained_schema
from shoal_planner.plan_schema import plan_answer_schema, plan_schema
from shoal_planner.profile import KindLink, LinkFigure, Profile, UpdateRate
from shoal_planner.value_schema import Shaper
from shoal_recovery.bulk_loss import BulkLoss
from shoal_recovery.journal import EVENTS, FiguresMeasured, JobState, ModelSeen, PlanAdopted, RecoveryDone, StateChanged
from shoal_recovery.journal_scripts import WorkersStarted

_Schema = dict[str, Any]
_Shapes = dict[tuple[type[Any], str], _Schema]
_RANGES = {Node: NODE_RANGES, DeviceOverride: OVERRIDE_RANGES, Link: LINK_RANGES}
_IDS: _Shapes = {(Node, "id"): {"type": "string", "pattern": f"^{NODE_ID.pattern}$"}}
_AT = {"type": "string", "format": "date-time"}
_NUMBERED = {"seq": {"type": "integer", "minimum": 1}, "at_s": {"type": "number"}}
# What users write and editors check, by the name under which it is published.
WRITTEN: Mapping[str, Callable[[], _Schema]] = {
    "job": job_schema,
    "cluster": cluster_schema,
    "market": market_schema,
    "plan": plan_schema,
}


def reference(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


@functools.cache
def components() -> Mapping[str, _Schema]:
    """By name. What users write is called a document; the rest is as the control plane keeps and shows it."""
    written = {"ClusterDocument": cluster_schema(), "PlanDocument": plan_schema(), "Plan": plan_answer_schema()}
    return {
        "TrainJob": _titled("A job that Shoal plans and shards", trained_schema()),
        "ScriptJob": _titled("A script for Ray Train", script_schema()),
        "JobDocument": {"title": "JobDocument", "anyOf": [reference("TrainJob"), reference("ScriptJob")]},
        "JobChanges": changes_of(trained_schema(), script_schema()),
        "TrainJobSpec": _titled("A job of kind train with all that it left out", kept_schema()),
        "JobSpec": {"title": "JobSpec", "anyOf": [reference("TrainJobSpec"), reference("ScriptJob")]},
        **{name: {key: each for key, each in made.items() if key != "$schema"} for name, made in written.items()},
        "ClusterSnapshot": Shaper(ranges=_RANGES, shapes=_IDS).of(ClusterSnapshot),
        "SnapshotBesideNodes": _beside_nodes(),
        "PoolDocument": pool_schema(),
        "Profile": Shaper().of(Profile),
        "NodeOfCluster": _node(),
        "JournalEntry": _journal("What a supervisor writes down.", {}),
        "JournalEvent": _journal("An entry of a job's journal.", {"at": _AT}),
        "Recovery": _recovery(),
        "PlanInForce": _plan_in_force(),
        "BulkLoss": Shaper().of(BulkLoss),
    }


def _titled(description: str, made: _Schema) -> _Schema:
    return {"description": description, **made}


def changes_of(*documents: _Schema) -> _Schema:
    """Of a JSON merge patch (RFC 7396) of any of these: a field may be left out, or be null, which takes it away."""
    return {"title": "JobChanges", "anyOf": [_patch(document) for document in documents]}


def _patch(made: _Schema) -> _Schema:
    if "anyOf" in made and "properties" not in made:
        return {**_without_default(made), "anyOf": [_patch(option) for option in made["anyOf"]]}
    if "properties" not in made and isinstance(made.get("additionalProperties"), dict):  # names of the user's own
        return {"type": "object", "additionalProperties": _or_null(_patch(made["additionalProperties"]))}
    if "properties" not in made:
        return _without_default(made)
    properties = {name: _or_null(_patch(each)) for name, each in made["properties"].items()}
    return {"type": "object", "properties": properties, "additionalProperties": {"type": "null"}}


def _without_default(made: _Schema) -> _Schema:
    """What is left out of a patch stays as it was."""
    return {key: each for key, each in made.items() if key != "default"}


def _or_null(made: _Schema) -> _Schema:
    return made if not made else {"anyOf": [made, {"type": "null"}]}


def _beside_nodes() -> _Schema:
    found = Shaper(ranges=_RANGES, shapes=_IDS).of(ClusterSnapshot)
    return {**found, **_required({k: v for k, v in found["properties"].items() if k != "nodes"}, [])}


def _node() -> _Schema:
    """A node as its cluster says it is, who uses it, and what was measured of it."""
    shaper = Shaper()
    found = Shaper(ranges=_RANGES, shapes=_IDS).of(Node)
    links = {"type": "array", "items": {"anyOf": [shaper.of(KindLink), shaper.of(LinkFigure)]}}
    update = {"anyOf": [shaper.of(UpdateRate), {"type": "null"}]}
    measured = {"layers": {"type": "integer"}, "update": update, "links": links}
    beside = {
        "reclaim_at_s": {"type": ["number", "null"], "description": "When it goes away, while that is known."},
        "measured": _whole(measured),
        "cluster_id": {"type": "string"},
        "connected": {"type": "boolean"},
        "seen_at": _AT,
        "heard_at": {"anyOf": [_AT, {"type": "null"}], "description": "Its last sign of life; null: not told."},
        "heard_by": {"enum": ["processes", "ray", None], "description": "Whose heartbeats they were, or who lists it."},
        "jobs": {"type": "array", "items": {"type": "string"}},
    }
    return {**found, "properties": found["properties"] | beside, "required": [*found["required"], *beside]}


def _whole(properties: _Schema) -> _Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


_SHAPES: _Shapes = {
    (PlanAdopted, "plan"): reference("PlanDocument"),
    (PlanAdopted, "snapshot"): reference("ClusterSnapshot"),
    (WorkersStarted, "snapshot"): reference("ClusterSnapshot"),
    (FiguresMeasured, "profile"): reference("Profile"),
    (ModelSeen, "model"): Shaper().of(ModelSpec),
    (StateChanged, "state"): {"enum": [state.value for state in JobState]},
}


def _event(event: type[Any]) -> _Schema:
    return Shaper(shapes=_SHAPES).of(event)


def _journal(description: str, more: _Schema) -> _Schema:
    """One of all kinds of entries, by their `kind`; what early journals do not say may be lacking."""
    options = []
    for kind, event in EVENTS.items():
        made = _event(event)
        beside = {**_NUMBERED, **more, "kind": {"const": kind}}
        properties, required = {**beside, **made["properties"]}, [*beside, *made["required"]]
        about = (event.__doc__ or "").strip()
        options.append({**made, "title": event.__name__, "description": about} | _required(properties, required))
    return {"description": description, "anyOf": options}


def _required(properties: _Schema, required: list[str]) -> _Schema:
    return {"properties": properties, "required": required}


def _recovery() -> _Schema:
    made = _event(RecoveryDone)
    rates = {"type": "object", "additionalProperties": {"type": "number"}, "description": "By source."}
    beside = {**_NUMBERED, "at": _AT, "bytes": made["properties"].pop("num_bytes"), "bytes_per_s": rates}
    text, number = {"type": "string"}, {"type": "number"}
    known = {
        "node": text,
        "notice": {"anyOf": [_whole({"source": text, "why": text, "lead_s": number}), {"type": "null"}]},
        "loss": {"anyOf": [_whole({"evidence": text, "detect_s": number}), {"type": "null"}]},
        "loss_after_notice_s": {"type": ["number", "null"]},
    }
    words = "How each node that it was for came to be known to go: by a notice, or by its loss."
    beside["known_by"] = {"type": "array", "items": _whole(known), "description": words}
    required = [name for name in made["required"] if name != "num_bytes"]
    return {**made, **_required({**beside, **made["properties"]}, [*beside, *required])}


def _plan_in_force() -> _Schema:
    made = _event(PlanAdopted)
    generation = {
        "seq": _NUMBERED["seq"],
        "since": _AT,
        "epoch": {"type": "integer"},
        "plan_id": {"type": "string"},
        "step": {"type": "integer"},
        "reason": {"type": "string"},
    }
    beside = {
        "seq": _NUMBERED["seq"],
        "since": _AT,
        "since_at_s": {"type": "number"},
        "generations": {"type": "array", "items": _whole(generation)},
    }
    return {**made, **_required({**beside, **made["properties"]}, [*beside, *made["required"]])}
