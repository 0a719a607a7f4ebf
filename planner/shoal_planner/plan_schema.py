"""The JSON Schema of PLAN documents: what `parse_plan` reads, and what answers add to that."""

from __future__ import annotations

from typing import Any

from shoal_planner.goodput import Goodput
from shoal_planner.plan import PlanDocument
from shoal_planner.pools import PoolRate
from shoal_planner.predicted import Prediction
from shoal_planner.value_schema import DIALECT, Shaper

_BYTES = {"type": "object", "additionalProperties": {"type": "number"}}
_IN_ANSWERS = ("plan_id", "seed", "search_s", "truncated", "candidates", "goodput")


def plan_schema() -> dict[str, Any]:
    """Of a PLAN, as plain JSON values. What a search added may stand there, and is not read."""
    found = Shaper().of(PlanDocument)
    found["properties"] |= _added()
    return {
        "$schema": DIALECT,
        "title": "Shoal plan",
        "description": "Which device runs which layers, on how many samples.",
        **found,
    }


def plan_answer_schema() -> dict[str, Any]:
    """Of what a search answers with."""
    found = plan_schema()
    always = ("schedule", "copies", "sharding", "unused", "reason")
    return {**found, "required": [*found["required"], *always, *_IN_ANSWERS]}


def _added() -> dict[str, Any]:
    shapes = {(Prediction, name): _BYTES for name in ("memory_bytes", "host_bytes")}
    candidate = {"plan": {"type": "string"}, "step_s": {"type": "number"}}
    return {
        "plan_id": {"type": "string"},
        "seed": {"type": "integer"},
        "search_s": {"type": "number"},
        "truncated": {"type": "boolean", "description": "Whether the search ended before it was done."},
        "predicted": Shaper(shapes=shapes).of(Prediction),
        "candidates": {
            "type": "array",
            "items": {"type": "object", "properties": candidate, "required": list(candidate)},
        },
        "goodput": {"anyOf": [_goodput(), {"type": "null"}]},
        "explanation": {"type": "object"},
        "profile": {"type": "object"},
    }


def _goodput() -> dict[str, Any]:
    """What is expected of a plan on nodes that are lost now and then."""
    found = Shaper().of(Goodput)
    options = {"type": "array", "items": Shaper().of(Goodput), "description": "By how many copies, fewest first."}
    rates = {"type": "array", "items": Shaper().of(PoolRate)}
    found["properties"] |= {"reason": {"type": "string"}, "options": options, "rates": rates}
    found["required"] += ["reason", "options", "rates"]
    return found
