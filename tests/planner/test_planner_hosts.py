"""Room for snapshots on hosts: a node keeps its own and what others back up on it, over a change of plan too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.job import CheckpointSpec, JobSpec, parse_job
from shoal_planner.loads import replica_loads, segments
from shoal_planner.memory import snapshot_bytes
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Plan, parse_plan
from shoal_planner.profile import Profile
from shoal_planner.score import kept_elements, score
from shoal_planner.search import plan

JOB: JobSpec = parse_job(
    {
        "name": "hosts",
        "model": {"layers": 8, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256},
        "data": {"uri": "stdlib:"},
        "train": {"global_batch": 4, "seq_len": 32, "steps": 1},
    }
)
STATE_BYTES = 2 * 2 * 12 * num_parameters(JOB.model)


def cluster(**host_memory_bytes: float) -> ClusterSnapshot:
    nodes = [
        {"name": name, "device": "cpu-1t", "host_memory_gib": size / 2**30} for name, size in host_memory_bytes.items()
    ]
    return parse_cluster({"nodes": nodes})


def pipeline(*stages: tuple[str, int, int], copies: int = 1) -> Plan:
    found: list[dict[str, Any]] = [
        {"layers": [[first, last]], "replicas": [{"node": f"{node}-0", "devices": [0]}]} for node, first, last in stages
    ]
    return parse_plan({"copies": copies, "pipelines": [{"micro_batch": 1, "micro_batches": 4, "stages": found}]})


def kept(given: Plan, snapshot: ClusterSnapshot) -> dict[str, float]:
    costs = CostModel(JOB, snapshot, Profile())
    return kept_elements(given, replica_loads(given, costs, segments(given, costs)), costs)


def test_what_a_node_keeps_for_others_is_what_they_own() -> None:
    """a backs up c, b backs up a, c backs up b; a owns one block of eight."""
    snapshot = cluster(a=1e9, b=1e9, c=1e9)
    given = pipeline(("a", 0, 1), ("b", 1, 8))
    costs = CostModel(JOB, snapshot, Profile())
    loads = replica_loads(given, costs, segments(given, costs))
    owned = {load.replica.node: load.owned for load in loads}
    assert kept(given, snapshot) == pytest.approx(
        {"a-0": owned["a-0"], "b-0": owned["b-0"] + owned["a-0"], "c-0": owned["b-0"]}
    )


def test_a_node_that_only_keeps_backups_needs_room_too() -> None:
    given = pipeline(("a", 0, 8))
    score(given, JOB, cluster(a=1.02 * STATE_BYTES, b=1.02 * STATE_BYTES))
    with pytest.raises(NoPlanFits, match="on the host of b-0 for snapshots"):
        score(given, JOB, cluster(a=1.02 * STATE_BYTES, b=0.9 * STATE_BYTES))


def test_a_node_with_little_state_may_be_the_backup_of_one_with_much() -> None:
    given = pipeline(("a", 0, 1), ("b", 1, 8))
    room = cluster(a=1.02 * STATE_BYTES, b=1.02 * STATE_BYTES)
    score(given, JOB, room)  # each keeps all: its own and the other's, and not twice its own
    with pytest.raises(NoPlanFits, match="on the host of a-0 for snapshots"):
        score(given, JOB, cluster(a=0.5 * STATE_BYTES, b=2 * STATE_BYTES))


def test_old_and_new_snapshots_stand_side_by_side() -> None:
    assert snapshot_bytes(num_parameters(JOB.model)) == STATE_BYTES
    with pytest.raises(NoPlanFits, match="on the host of a-0 for snapshots"):
        score(pipeline(("a", 0, 8), copies=0), JOB, cluster(a=0.6 * STATE_BYTES))


def test_the_search_finds_the_plan_that_hosts_have_room_for() -> None:
    snapshot = cluster(a=3 * STATE_BYTES, b=0.8 * STATE_BYTES, c=0.8 * STATE_BYTES)
    found = plan(JOB, snapshot).plan
    room = {node.id: node.host_memory_bytes for node in snapshot.nodes}
    assert all(snapshot_bytes(elements) <= room[node_id] for node_id, elements in kept(found, snapshot).items())


def test_where_no_host_has_room_for_a_copy_automatic_copies_are_none_and_the_reason_says_so() -> None:
    tight = cluster(a=1.05 * STATE_BYTES, b=0.96 * STATE_BYTES)
    found = plan(JOB, tight).plan
    assert found.copies == 0
    assert "Its state has no copies on other nodes, as the plans with one do not fit: needs" in found.reason
    assert score(found, JOB, tight).prediction == found.prediction
    with pytest.raises(NoPlanFits, match="snapshots"):
        plan(dataclasses.replace(JOB, checkpoint=CheckpointSpec(copies=1)), tight)
    ample = plan(JOB, cluster(a=1.05 * STATE_BYTES, b=1.05 * STATE_BYTES)).plan
    assert ample.copies == 1 and "no copies" not in ample.reason


def test_what_all_hosts_together_lack_for_copies_is_told_too() -> None:
    found = plan(JOB, cluster(a=0.6 * STATE_BYTES, b=0.6 * STATE_BYTES)).plan
    assert found.copies == 0
    assert "snapshots of the model need" in found.reason
    with pytest.raises(NoPlanFits, match="snapshots of the model need"):
        plan(JOB, cluster(a=0.4 * STATE_BYTES, b=0.4 * STATE_BYTES))
