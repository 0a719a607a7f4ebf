"""Why a plan takes what it does, as pages show it: the seconds of its stages, what holds it back, and how what was
predicted compares with what was measured. The arithmetic is the planner's."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_planner.answers import plan_of_answer
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.explanation import explanation
from shoal_planner.job import parse_job
from shoal_planner.loads import replica_loads, segments
from shoal_planner.predict import stage_times
from shoal_planner.profile import profile_from_mapping
from shoal_recovery.journal import PredictionChecked
from shoal_service.timeline import Event, duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """`stage_s`: by pipeline and stage, the seconds of a micro-batch, by what is known of the cluster today.
    `sentences` say what holds the plan back; `terms` are (meaning, seconds, share of the step)."""

    stage_s: tuple[tuple[float, ...], ...]
    sentences: tuple[str, ...]
    terms: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How long a step of an epoch was predicted to take, and took."""

    epoch: int
    predicted: str
    measured: str
    ratio: float
    num_steps: int


def reasons(spec: Mapping[str, Any], adopted: Mapping[str, Any], profile: Mapping[str, Any]) -> Reasons | None:
    """Of an adopted plan (the payload of its journal entry). None where this version cannot cost it. May take seconds
    for a large plan, once."""
    try:
        return _reasons(*(json.dumps(value) for value in (spec, adopted["plan"], adopted["snapshot"], profile)))
    except (InvalidField, NoPlanFits, KeyError):
        return None


@functools.lru_cache(maxsize=32)
def _reasons(spec: str, plan_text: str, snapshot: str, profile: str) -> Reasons:
    plan = plan_of_answer(json.loads(plan_text))
    known = profile_from_mapping(json.loads(profile))
    costs = CostModel(parse_job(json.loads(spec)), snapshot_from_mapping(json.loads(snapshot)), known)
    loads = defaultdict(list)
    for load in replica_loads(plan, costs, segments(plan, costs)):
        loads[load.pipeline].append(load)
    stages = tuple(
        tuple(stage.total_s for stage in stage_times(pipeline, loads[p], costs, ahead=plan.overlap.stages))
        for p, pipeline in enumerate(plan.pipelines)
    )
    if plan.prediction is None:
        return Reasons(stage_s=stages, sentences=(), terms=())
    found = explanation(plan, costs)
    return Reasons(
        stage_s=stages,
        sentences=found.binding.sentences,
        terms=tuple((term.meaning, term.seconds, term.share) for term in found.terms),
    )


def checked(events: Sequence[Event]) -> tuple[Checked, ...]:
    """The newest first."""
    return tuple(
        Checked(
            epoch=event.payload["epoch"],
            predicted=duration(event.payload["predicted_s"]),
            measured=duration(event.payload["measured_s"]),
            ratio=event.payload["measured_s"] / event.payload["predicted_s"],
            num_steps=event.payload["num_steps"],
        )
        for event in events
        if event.kind == PredictionChecked.kind and event.payload["predicted_s"] > 0
    )[::-1]
