"""What may stand in a plan, by who has to run it: the model can predict more than the engine of this version runs.

Owns the list of differences, and the words in which plans are refused for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_planner.errors import InvalidField
from shoal_planner.plan import Plan

_NOT_YET = "is planned and scored, but not run by the engine of this version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """`offload`: optimizer state in host memory."""

    offload: bool


ALL = Features(offload=True)
ENGINE = Features(offload=True)


def check_plan_runs(plan: Plan, features: Features = ENGINE) -> None:
    """Raises InvalidField, naming the first field of the plan that goes beyond these features."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for index, override in enumerate(stage.overrides):
                if override.offload != "none" and not features.offload:
                    path = f"pipelines[{p}].stages[{s}].overrides[{index}]"
                    raise InvalidField(f"{path}.offload", override.offload, _NOT_YET)
