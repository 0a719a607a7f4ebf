"""What can be planned and is not run yet: refused by name, and not planned for those who are to run it."""

from __future__ import annotations

import dataclasses

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.features import ALL, ENGINE, check_plan_runs
from shoal_planner.job import JobSpec
from shoal_planner.plan import Override, Pipeline, Plan, Replica, Stage
from shoal_planner.profile import Profile
from shoal_planner.score import score_with
from shoal_planner.search import plan, step_s

JOB = make_job()


def with_train(job: JobSpec, **changes: str) -> JobSpec:
    return dataclasses.replace(job, train=dataclasses.replace(job.train, **changes))  # type: ignore[arg-type]


def a_plan(stage: Stage) -> Plan:
    before = Stage(layers=((0, 4),), replicas=(Replica(node="a-0", devices=(0,)),))
    pipeline = Pipeline(micro_batch=1, micro_batches=16, stages=(before, stage))
    return Plan(pipelines=(pipeline,))


PLAIN = Stage(layers=((4, 8),), replicas=(Replica(node="b-0", devices=(0,)),))
# An engine that keeps all of its state on devices.
WHOLE = dataclasses.replace(ENGINE, offload=False)


def test_a_plan_that_the_engine_does_not_run_is_refused_by_name() -> None:
    given = a_plan(dataclasses.replace(PLAIN, overrides=(Override(layers=(5, 6), offload="optimizer"),)))
    with pytest.raises(InvalidField) as caught:
        check_plan_runs(given, WHOLE)
    named = "pipelines[0].stages[1].overrides[0].offload = 'optimizer': is planned and scored, but not run"
    assert named in str(caught.value)
    check_plan_runs(given, ALL)


def test_what_changes_nothing_is_not_refused() -> None:
    check_plan_runs(a_plan(dataclasses.replace(PLAIN, overrides=(Override(layers=(5, 6), offload="none"),))))
    check_plan_runs(a_plan(PLAIN))


# Either device can hold the model if some layers are run again, or some state is on the host; else they have to share
# it, which is slower.
TIGHT_JOB = make_job(layers=8, batch=4, hidden=1024, seq_len=4096, precision="bf16", copies=0)
TIGHT = make_cluster(("n", "L4", 1, 2), memory_mib={"L4": 3100})
WITHOUT = with_train(TIGHT_JOB, recompute="none")


def offloads(found: Plan) -> bool:
    return any(stage.offloaded() for pipeline in found.pipelines for stage in pipeline.stages)


def test_no_state_on_hosts_is_planned_for_the_engine() -> None:
    everything, engine = plan(WITHOUT, TIGHT), plan(WITHOUT, TIGHT, features=WHOLE)
    assert offloads(everything.plan) and not offloads(engine.plan)
    assert step_s(everything.plan) < step_s(engine.plan)
    check_plan_runs(engine.plan)


def test_a_running_plan_beyond_the_features_does_not_come_back() -> None:
    previous = plan(WITHOUT, TIGHT).plan
    assert plan(WITHOUT, TIGHT, previous=previous).plan.plan_id == previous.plan_id
    assert not offloads(plan(WITHOUT, TIGHT, previous=previous, features=WHOLE).plan)


def test_recomputation_is_planned_for_the_engine() -> None:
    found = plan(TIGHT_JOB, TIGHT, features=ENGINE).plan
    stages = [stage for pipeline in found.pipelines for stage in pipeline.stages]
    assert any(stage.recomputed()["none"] < stage.num_layers for stage in stages)
    check_plan_runs(found)
    scored = score_with(found, CostModel(TIGHT_JOB, TIGHT, Profile()))
    assert scored.prediction == found.prediction
