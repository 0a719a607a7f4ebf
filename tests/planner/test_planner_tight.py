"""Devices with room for a model, if some of it is computed again or kept on the host."""

from __future__ import annotations

import dataclasses

from planner_ground import make_cluster, make_job

from shoal_planner.costs import CostModel
from shoal_planner.memory import snapshot_bytes
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.score import score_with
from shoal_planner.search import plan, step_s

# Either device can hold the model if some layers are run again, or some state is on the host; else they have to share
# it, which is slower.
JOB = make_job(layers=8, batch=4, hidden=1024, seq_len=4096, precision="bf16", copies=0)
TIGHT = make_cluster(("n", "L4", 1, 2), memory_mib={"L4": 2800})
WITHOUT = dataclasses.replace(JOB, train=dataclasses.replace(JOB.train, recompute="none"))


def offloads(found: Plan) -> bool:
    return any(stage.offloaded() for pipeline in found.pipelines for stage in pipeline.stages)


def test_state_goes_to_a_host_that_has_room_where_devices_would_have_to_share_the_model() -> None:
    snapshots = int(snapshot_bytes(num_parameters(JOB.model))) + 1
    full = tuple(dataclasses.replace(node, host_memory_bytes=snapshots) for node in TIGHT.nodes)
    hosted, shared = plan(WITHOUT, TIGHT).plan, plan(WITHOUT, dataclasses.replace(TIGHT, nodes=full)).plan
    assert offloads(hosted) and not offloads(shared)
    assert step_s(hosted) < step_s(shared)
    assert plan(WITHOUT, TIGHT, previous=hosted).plan.plan_id == hosted.plan_id


def test_recomputation_is_planned_where_memory_is_short() -> None:
    found = plan(JOB, TIGHT).plan
    stages = [stage for pipeline in found.pipelines for stage in pipeline.stages]
    assert any(stage.recomputed()["none"] < stage.num_layers for stage in stages)
    scored = score_with(found, CostModel(JOB, TIGHT, Profile()))
    assert scored.prediction == found.prediction
