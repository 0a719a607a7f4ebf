"""The published answer to "which plan?": the plan itself, and what the search has to say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shoal_planner.lasting import expected_to_mapping
from shoal_planner.plan import Plan, Prediction, parse_plan, plan_to_mapping
from shoal_planner.search import PlanResult
from shoal_planner.strict import read


def plan_answer(result: PlanResult, *, seed: int) -> dict[str, Any]:
    """Plain JSON values; `parse_plan` reads them back as the same plan. `candidates` are best first; `goodput` is None
    where nobody knows how often nodes are lost."""
    return {
        **plan_to_mapping(result.plan),
        "seed": seed,
        "search_s": result.search_s,
        "truncated": result.truncated,
        "candidates": [{"plan": text, "step_s": step_s} for text, step_s in result.candidates],
        "goodput": expected_to_mapping(result.expected),
    }


def plan_of_answer(answer: Mapping[str, Any]) -> Plan:
    """The plan with the prediction that stands in the answer, if one does: not what this model says. Raises
    InvalidField."""
    plan, predicted = parse_plan(answer), answer.get("predicted")
    if not isinstance(predicted, Mapping) or not isinstance(predicted.get("memory_bytes"), Mapping):
        return plan
    maps = ("memory_bytes", "host_bytes")
    pairs = {**predicted, **{name: list(predicted[name].items()) for name in maps if name in predicted}}
    return dataclasses.replace(plan, prediction=read(Prediction, pairs, "predicted"))
