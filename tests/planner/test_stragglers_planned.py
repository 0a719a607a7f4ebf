"""Nodes that are slower than their type: what they cost, how plans deal with them, and what they are called."""

from __future__ import annotations

import dataclasses

import pytest

from shoal_planner.busy import busy_s
from shoal_planner.cluster import GIB, ClusterSnapshot, Node, snapshot_from_mapping, snapshot_to_mapping
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.explain import describe
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.moving import Outlook
from shoal_planner.picture import plan_svg
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_planner.search import plan as search_plan

NAMES = ("a", "b", "c")
JOB = JobSpec(
    name="job",
    model=ModelSpec(layers=4, hidden=256, heads=4, ffn=512, vocab=256),
    data=DataSpec(uri="stdlib:"),
    train=TrainSpec(global_batch=12, seq_len=64, steps=1000),
)


def cluster(**speeds: float) -> ClusterSnapshot:
    nodes = tuple(
        Node(
            id=name,
            device="cpu-1t",
            devices=1,
            host_memory_bytes=4 * GIB,
            intra_bytes_per_s=1e11,
            inter_bytes_per_s=1e11,
        )
        for name in NAMES
    )
    return ClusterSnapshot(nodes=nodes).at_speeds(speeds)


def step_s(plan: Plan, snapshot: ClusterSnapshot) -> float:
    found = score(plan, JOB, snapshot).prediction
    assert found is not None
    return found.step_s


def samples(plan: Plan, node: str) -> int:
    return sum(
        pipeline.micro_batches * replica.samples
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        if replica.node == node
    )


def test_all_that_a_slow_node_computes_takes_longer_and_nothing_else() -> None:
    fast, slow = CostModel(JOB, cluster(), Profile()), CostModel(JOB, cluster(b=0.5), Profile())
    for part in ("block", "embedding", "head"):
        usual, found = fast.part(part, "b", 2, 3, "full"), slow.part(part, "b", 2, 3, "full")  # type: ignore[arg-type]
        assert (found.forward_s, found.backward_s) == (2 * usual.forward_s, 2 * usual.backward_s)
        assert found.weight_s == 2 * usual.weight_s
        assert found.tensor_forward_s == usual.tensor_forward_s
        assert slow.part(part, "a", 2, 3, "full") == usual  # type: ignore[arg-type]
    assert slow.update_s("b", 1e6, 1e5) == 2 * fast.update_s("b", 1e6, 1e5)
    assert slow.link("a", "b") == fast.link("a", "b")
    assert slow.kind("a") == slow.kind("c") != slow.kind("b")


def test_each_device_is_busy_for_its_micro_batches_and_its_update() -> None:
    plan = search_plan(JOB, cluster()).plan
    usual, found = (busy_s(plan, CostModel(JOB, snapshot, Profile())) for snapshot in (cluster(), cluster(b=0.25)))
    assert usual.keys() == plan.devices()
    for device, seconds in found.items():
        assert seconds == pytest.approx(usual[device] * (4 if device.node == "b" else 1))
    assert all(0 < seconds <= step_s(plan, cluster()) for seconds in usual.values())


def test_a_straggler_gets_less_to_do_or_nothing_and_gets_it_back() -> None:
    even = search_plan(JOB, cluster()).plan
    assert {samples(even, name) for name in NAMES} == {4}
    before = even
    for speed, most in ((0.5, 3), (0.05, 0)):
        slow = cluster(b=speed)
        found = search_plan(JOB, slow, previous=before, outlook=Outlook(restart_s=0.5))
        assert found.change is not None and found.change.move
        assert samples(found.plan, "b") <= most
        assert step_s(found.plan, slow) < step_s(even, slow)
        before = found.plan
    again = search_plan(JOB, cluster(), previous=before, outlook=Outlook(restart_s=0.5))
    assert again.change is not None and again.change.move
    assert samples(again.plan, "b") == 4


def test_a_job_that_is_about_to_end_stays_as_it_is() -> None:
    even, slow = search_plan(JOB, cluster()).plan, cluster(b=0.5)
    found = search_plan(JOB, slow, previous=even, outlook=Outlook(restart_s=2.0, steps_left=3))
    assert found.change is not None and not found.change.move
    assert "Stays" in found.plan.reason


def test_a_slow_node_is_called_by_its_type_and_its_speed_wherever_plans_are_explained() -> None:
    slow = cluster(b=0.5)
    assert [node.device_label for node in slow.nodes] == ["cpu-1t", "cpu-1t at 50% speed", "cpu-1t"]
    assert snapshot_from_mapping(snapshot_to_mapping(slow)) == slow
    even = score(search_plan(JOB, cluster()).plan, JOB, slow)
    assert "cpu-1t at 50% speed" in describe(even, slow)
    drawn = plan_svg(even, slow)
    assert "cpu-1t at 50% speed: 1 of 1 in use" in drawn
    assert "cpu-1t: 2 of 2 in use" in drawn
    old = {key: value for key, value in snapshot_to_mapping(slow).items() if key != "nodes"}
    plain = [dataclasses.asdict(node) for node in cluster().nodes]
    for node in plain:
        del node["speed"]
    assert snapshot_from_mapping({**old, "nodes": plain}) == cluster(), "what earlier journals have"


@pytest.mark.parametrize("speed", [0.0, 1.5])
def test_a_speed_is_a_share(speed: float) -> None:
    with pytest.raises(InvalidField, match="speed"):
        cluster(b=speed)
