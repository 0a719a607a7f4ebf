"""Teams on one node of a small cluster: they win where stages would wait, and a better cluster has them, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from random_clusters import CHANGES, draw_small, slow_device

from shoal_planner import cluster_search
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.exact import MOST_DEVICES
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.node_teams import try_node_teams
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.search import plan, step_s


def billions(**train: Any) -> JobSpec:
    """A model of seven billion parameters, whose state no device holds alone."""
    return parse_job(
        {
            "name": "seven",
            "model": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": 64, "seq_len": 2048, "steps": 10, "precision": "bf16", **train},
        }
    )


def one_node(device: str, devices: int = 8) -> ClusterSnapshot:
    return parse_cluster({"nodes": [{"name": "n", "device": device, "devices": devices, "intra_gb_per_s": 250}]})


def offered(job: JobSpec, cluster: ClusterSnapshot) -> list[Plan]:
    costs, found = CostModel(job, cluster, Profile()), list[Plan]()

    def consider(made: Plan) -> float:
        found.append(made)
        return step_s(made)

    try_node_teams(costs, 0, float("inf"), consider)
    return found


@pytest.mark.parametrize(("device", "gain"), [("A100-40G", 1.1), ("A100-80G", 1.02), ("RTX4090", 1.05)])
def test_a_model_too_large_for_a_device_is_split_among_those_of_a_node(
    device: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan(billions(), one_node(device)).plan
    (pipeline,) = found.pipelines
    assert len(pipeline.stages) == 1 and found.sharding.weights == "node"
    monkeypatch.setattr(cluster_search, "try_node_teams", lambda *_: None)
    without = plan(billions(), one_node(device)).plan
    assert step_s(found) * gain < step_s(without)


def test_state_that_is_to_be_whole_is_not_split() -> None:
    assert not offered(billions(sharding="none"), one_node("A100-80G"))


def test_as_many_devices_take_part_as_the_job_asks_for() -> None:
    job = billions()
    asking = dataclasses.replace(job, limits=dataclasses.replace(job.limits, min_devices=7))
    found = offered(asking, one_node("A100-40G"))
    assert found and all(made.num_devices >= 7 for made in found)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_best_of_them_is_no_slower_on_a_better_cluster(seed: int) -> None:
    instance = draw_small(seed)

    def best_s(cluster: ClusterSnapshot) -> float:
        return min(map(step_s, offered(instance.job, cluster)), default=float("inf"))

    for change in (*CHANGES.values(), slow_device):
        what, cluster = change(instance)
        if cluster.num_devices <= MOST_DEVICES:
            assert best_s(cluster) <= best_s(instance.cluster) * (1 + 1e-9), what
