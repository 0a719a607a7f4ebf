"""What a job's record says of time to come: from its journal alone, so a supervisor that begins anew knows it, too."""

from __future__ import annotations

import dataclasses

from shoal_planner.cluster import parse_cluster
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.journal import CheckpointCommitted, EvaluationDone, NodeLost, PlanAdopted, StepDone, StepSkipped
from shoal_workers import messages as m
from shoal_workers.keeper import Keeper
from shoal_workers.record import JobRecord, plan_adopted

CLUSTER = parse_cluster({"nodes": [{"name": "n", "device": "cpu-1t", "count": 3, "spot": True}]})
PLAN = Plan(
    pipelines=(
        Pipeline(
            micro_batch=1,
            micro_batches=1,
            stages=(Stage(layers=((0, 2),), replicas=(Replica(node="n-0", devices=(0,)),)),),
        ),
    )
)


def test_a_job_learns_how_often_its_nodes_are_lost() -> None:
    now = [1000.0]
    record = JobRecord(Keeper("job", lambda: now[0]), lambda: now[0])
    record.append(plan_adopted(1, PLAN, 0, CLUSTER))
    now[0] += 36_000.0
    assert not record.outlook.pools  # nobody knows anything as long as none was lost
    record.append(NodeLost(node="n-1", evidence="closed connection", detect_s=0.1))
    record.append(plan_adopted(2, PLAN, 7, CLUSTER.without(["n-1"])))
    now[0] += 36_000.0
    record.append(plan_adopted(3, PLAN, 9, CLUSTER))
    pools = record.outlook.pools
    assert pools is not None and pools.keys() == {"n-0", "n-1", "n-2"}
    assert "1 nodes lost in 50 node-hours" in pools["n-2"].rate.reason
    after = JobRecord(Keeper("job", lambda: now[0]), lambda: now[0])
    after.adopt(record.keeper.entries())
    assert after.outlook == record.outlook
    for each in (record, after):
        each.keeper.close()


def test_what_a_change_of_plan_goes_back_behind_cannot_be_lost_again() -> None:
    record = JobRecord(Keeper("job", lambda: 0.0), lambda: 0.0)
    for epoch, step in ((1, 14), (2, 5)):
        record.append(plan_adopted(epoch, PLAN, step, CLUSTER))
        assert record.done_step == step
    record.keeper.close()


def test_checkpoints_behind_which_a_change_of_plan_goes_back_count_no_more() -> None:
    """They were read and found spoilt: whoever pauses, or loses a node again, must not rely on them."""
    record = JobRecord(Keeper("job", lambda: 0.0), lambda: 0.0)
    record.append(plan_adopted(1, PLAN, 0, CLUSTER))
    for step in (90, 100):
        record.append(CheckpointCommitted(step=step, epoch=1, uri="s3://b", num_bytes=1, duration_s=0.1))
    record.append(plan_adopted(2, PLAN, 90, CLUSTER))
    assert record.checkpoints == {90} and record.history().stored_step == 90
    after = JobRecord(Keeper("job", lambda: 0.0), lambda: 0.0)
    after.adopt(record.keeper.entries())
    assert after.checkpoints == {90}
    for each in (record, after):
        each.keeper.close()


def stepped(epoch: int, step: int, skipped: str | None = None) -> m.Stepped:
    return m.Stepped(
        epoch=epoch,
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens=64,
        duration_s=0.1,
        samples=[[step - 1, step]],
        moved=[],
        exposed=[0.0, 0.0],
        waited=[],
        computed_s=0.1,
        skipped=skipped,
    )


def test_steps_that_nobody_had_reported_are_written_down_once_and_up_to_what_is_gone_on_from() -> None:
    keeper = Keeper("job", lambda: 0.0)
    record = JobRecord(keeper, lambda: 0.0)
    record.append(plan_adopted(1, PLAN, 0, CLUSTER))
    record.stepped(stepped(1, 1))
    record.append(plan_adopted(2, PLAN, 1, CLUSTER))
    record.stepped(stepped(2, 2))
    of_another = [stepped(1, step) for step in range(1, 9)]  # which went on from step 1, and does not count
    kept = [stepped(2, step, "not finite" if step == 4 else None) for step in (5, 4, 3, 2, 3)]
    spoilt = dataclasses.replace(stepped(2, 3), samples=[[1]])
    record.unheard([spoilt], 3)
    for _ in range(2):
        record.unheard([*of_another, *kept], 4)
    assert (record.done_step, record.newest_step) == (4, 4)
    events = [entry.event for entry in keeper.entries_after(0, 0.0)]
    assert [(one.epoch, one.step) for one in events if isinstance(one, StepDone)] == [(1, 1), (2, 2), (2, 3), (2, 4)]
    assert [one.step for one in events if isinstance(one, StepSkipped)] == [4]


def test_evaluations_that_nobody_had_heard_of_are_written_down_once_behind_their_steps() -> None:
    keeper = Keeper("job", lambda: 0.0)
    record = JobRecord(keeper, lambda: 0.0)
    record.append(plan_adopted(1, PLAN, 0, CLUSTER))
    for step in (1, 2):
        record.stepped(stepped(1, step))
    record.append(evaluated(1, 1))
    of_another = evaluated(2, 2)
    for _ in range(2):
        record.unheard([evaluated(1, 5), *(evaluated(1, step) for step in (3, 2, 1)), of_another, stepped(1, 3)], 4)
    said = [entry.event for entry in keeper.entries_after(0, 0.0) if not isinstance(entry.event, PlanAdopted)]
    assert [(type(one), one.step) for one in said] == [
        (StepDone, 1),
        (StepDone, 2),
        (EvaluationDone, 1),
        (EvaluationDone, 2),
        (StepDone, 3),
        (EvaluationDone, 3),
    ]


def evaluated(epoch: int, step: int) -> EvaluationDone:
    return EvaluationDone(epoch=epoch, step=step, loss=1.0, tokens=64, duration_s=0.1)
