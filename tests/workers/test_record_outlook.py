"""What a job's record says of time to come: from its journal alone, so a supervisor that begins anew knows it, too."""

from __future__ import annotations

from shoal_planner.cluster import parse_cluster
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.journal import CheckpointCommitted, NodeLost
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
