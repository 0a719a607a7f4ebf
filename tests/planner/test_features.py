"""What can be planned and is not run yet: refused by name, and not planned for those who are to run it."""

from __future__ import annotations

import dataclasses

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.features import ALL, ENGINE, check_job_runs, check_plan_runs
from shoal_planner.job import JobSpec
from shoal_planner.plan import Override, Pipeline, Plan, Replica, Sharding, Stage
from shoal_planner.profile import Profile
from shoal_planner.score import score_with
from shoal_planner.search import plan, step_s

JOB = make_job()


def with_train(job: JobSpec, **changes: str) -> JobSpec:
    return dataclasses.replace(job, train=dataclasses.replace(job.train, **changes))  # type: ignore[arg-type]


def a_plan(stage: Stage, sharding: Sharding | None = None) -> Plan:
    before = Stage(layers=((0, 4),), replicas=(Replica(node="a-0", devices=(0,)),))
    pipeline = Pipeline(micro_batch=1, micro_batches=16, stages=(before, stage))
    return Plan(pipelines=(pipeline,), sharding=sharding or Sharding())


PLAIN = Stage(layers=((4, 8),), replicas=(Replica(node="b-0", devices=(0,)),))
# An engine that keeps all of its state on each device that computes with it.
WHOLE = dataclasses.replace(ENGINE, idle_holders=False, whole_optimizer=False, sharded=False, offload=False)
IDLE = Replica(node="c-0", devices=(0,), samples=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            a_plan(dataclasses.replace(PLAIN, overrides=(Override(layers=(5, 6), offload="optimizer"),))),
            "pipelines[0].stages[1].overrides[0].offload = 'optimizer': is planned and scored, but not run",
        ),
        (
            a_plan(dataclasses.replace(PLAIN, replicas=(*PLAIN.replicas, IDLE))),
            "pipelines[0].stages[1].replicas[1].samples = 0: ",
        ),
        (a_plan(PLAIN, Sharding(optimizer="none")), "sharding.optimizer = 'none': "),
        (a_plan(PLAIN, Sharding(gradients="node")), "sharding.gradients = 'node': is planned and scored, but not run"),
        (a_plan(PLAIN, Sharding(weights="group")), "sharding.weights = 'group': "),
    ],
    ids=["offload", "idle", "sharding", "gradients", "weights"],
)
def test_a_plan_that_the_engine_does_not_run_is_refused_by_name(given: Plan, message: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_plan_runs(given, WHOLE)
    assert message in str(caught.value)
    check_plan_runs(given, ALL)


def test_what_changes_nothing_is_not_refused() -> None:
    check_plan_runs(a_plan(dataclasses.replace(PLAIN, overrides=(Override(layers=(5, 6), offload="none"),))))
    check_plan_runs(a_plan(PLAIN))


def test_a_job_that_the_engine_does_not_run_is_refused_by_name() -> None:
    job, cluster = with_train(JOB, sharding="none"), make_cluster(("a", "cpu-2t", 2, 1), memory_mib={})
    with pytest.raises(InvalidField) as caught:
        plan(job, cluster, features=WHOLE)
    assert "train.sharding = 'none': is planned and scored, but not run by the engine" in str(caught.value)
    assert plan(job, cluster).plan.prediction is not None
    check_job_runs(job, ALL)
    for held in ({"recompute": "none"}, {"overlap": "none"}):
        check_job_runs(with_train(JOB, **held))


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
