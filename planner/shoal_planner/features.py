"""What may stand in a plan, by who has to run it: the model can predict more than the engine of this version runs.

Owns the list of differences, and the words in which jobs and plans are refused for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_planner.algorithms import DIRECT
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan, Replica, Stage

_NOT_YET = "is planned and scored, but not run by the engine of this version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """`offload`: optimizer state in host memory. `idle_holders`: devices that run no samples and only hold state.
    `whole_optimizer`: optimizer state of which there are several owners (sharding other than cluster). `sharded`:
    weights and gradients that are split within a step. `collectives`: algorithms other than the direct exchange."""

    offload: bool
    idle_holders: bool
    whole_optimizer: bool
    sharded: bool
    collectives: bool


ALL = Features(
    offload=True,
    idle_holders=True,
    whole_optimizer=True,
    sharded=True,
    collectives=True,
)
ENGINE = Features(
    offload=True,
    idle_holders=True,
    whole_optimizer=True,
    sharded=True,
    collectives=False,
)


def check_job_runs(job: JobSpec, features: Features = ENGINE) -> None:
    """Raises InvalidField, naming the field of the job that no plan within these features can serve."""
    if job.train.sharding == "none" and not features.whole_optimizer:
        raise InvalidField("train.sharding", "none", f"{_NOT_YET}; leave it out or say 'auto'")


def check_plan_runs(plan: Plan, features: Features = ENGINE) -> None:
    """Raises InvalidField, naming the first field of the plan that goes beyond these features."""
    if plan.sharding.optimizer != "cluster" and not features.whole_optimizer:
        raise InvalidField("sharding.optimizer", plan.sharding.optimizer, _NOT_YET)
    for name in ("weights", "gradients"):
        level = getattr(plan.sharding, name)
        if level != "none" and not features.sharded:
            raise InvalidField(f"sharding.{name}", level, _NOT_YET)
    for index, group in enumerate(plan.groups):
        if group.collective != DIRECT and not features.collectives:
            raise InvalidField(f"groups[{index}].collective", group.collective, _NOT_YET)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            path = f"pipelines[{p}].stages[{s}]"
            _check_layers(stage, path, features)
            for r, replica in enumerate(stage.replicas):
                _check_replica(replica, f"{path}.replicas[{r}]", features)


def _check_layers(stage: Stage, path: str, features: Features) -> None:
    for index, override in enumerate(stage.overrides):
        if override.offload != "none" and not features.offload:
            raise InvalidField(f"{path}.overrides[{index}].offload", override.offload, _NOT_YET)


def _check_replica(replica: Replica, path: str, features: Features) -> None:
    if not replica.samples and not features.idle_holders:
        raise InvalidField(f"{path}.samples", 0, _NOT_YET)
