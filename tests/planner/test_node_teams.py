"""Teams on one node of a small cluster: they win where stages would wait, and a better cluster has them, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from random_clusters import CHANGES, draw_small, slow_device

from shoal_planner import cluster_search
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.exact import MOST_DEVICES
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.memory import unit_elements
from shoal_planner.node_teams import try_node_teams
from shoal_planner.overlap_choice import with_overlap
from shoal_planner.picture import plan_svg
from shoal_planner.plan import Plan, parse_plan, plan_to_mapping
from shoal_planner.profile import Profile
from shoal_planner.score import score, score_with
from shoal_planner.search import plan, step_s
from shoal_planner.whole_layers import with_whole_layers


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


def one_node(device: str, devices: int = 8, **figures: float) -> ClusterSnapshot:
    node = {"name": "n", "device": device, "devices": devices, "intra_gb_per_s": 250}
    return parse_cluster({"nodes": [node], "devices": {device: figures}})


def offered(job: JobSpec, cluster: ClusterSnapshot) -> list[Plan]:
    costs, found = CostModel(job, cluster, Profile()), list[Plan]()

    def consider(made: Plan) -> float:
        found.append(made)
        return step_s(made)

    try_node_teams(costs, 0, float("inf"), consider)
    return found


def with_whole(layers: int, **sharding: str) -> Plan:
    """Seven billion parameters on eight devices, two samples each; the last layers are whole."""
    whole = [{"layers": [32 - layers, 32], "sharding": "none"}] if layers else []
    replicas = [{"node": "n-0", "devices": [device], "samples": 1} for device in range(8)]
    stage = {"layers": [[0, 32]], "replicas": replicas, "overrides": whole, "recompute": "full"}
    pipelines = [{"micro_batch": 8, "micro_batches": 8, "stages": [stage]}]
    return parse_plan({"pipelines": pipelines, "copies": 0, "sharding": sharding})


def test_whole_layers_are_exchanged_once_a_step_and_take_the_memory_for_it() -> None:
    """Of eight micro-batches, each layer that is whole spares seven scatterings and fifteen gatherings of sixteen."""
    job, cluster = billions(overlap="none"), one_node("A100-80G")
    split, whole = (score(with_whole(layers, weights="node", gradients="node"), job, cluster) for layers in (0, 8))
    assert split.prediction is not None and whole.prediction is not None
    costs = CostModel(job, cluster, Profile())
    elements = unit_elements(job.model, 1, 1)
    half_s = costs.half_exchange_s(frozenset([("n-0", 1)]), 8, elements * 2.0)
    spared_s = split.prediction.terms.gradient_s - whole.prediction.terms.gradient_s
    assert spared_s == pytest.approx(8 * (3 * 8 - 2) * half_s, rel=1e-6)
    more = dict(whole.prediction.memory_bytes)["n-0:0"] - dict(split.prediction.memory_bytes)["n-0:0"]
    assert more >= 8 * elements * (2 + 4) * 7 / 8
    assert parse_plan(plan_to_mapping(whole)).plan_id == whole.plan_id != split.plan_id


def test_as_many_layers_are_whole_as_memory_allows() -> None:
    """Where nothing goes on beside computing they make steps shorter; one more would not fit."""
    job, cluster = billions(overlap="none"), one_node("A100-40G", memory_gib=32)
    costs = CostModel(job, cluster, Profile())
    split = score_with(with_whole(0, weights="node", gradients="node"), costs)
    seconds, better = with_whole_layers(split, costs)
    (stage,) = better.pipelines[0].stages
    assert seconds == step_s(better) < step_s(split) and 0 < stage.whole() < 32
    with pytest.raises(NoPlanFits):
        score_with(with_whole(stage.whole() + 1, weights="node", gradients="node"), costs)
    found = plan(job, cluster).plan
    assert found.pipelines[0].stages[0].whole() > 0 and step_s(found) <= seconds
    assert "whole on each replica" in plan_svg(found, cluster)


def test_nothing_may_be_whole_where_nothing_is_split() -> None:
    with pytest.raises(InvalidField) as refused:
        with_whole(8, weights="none")
    assert refused.value.field == "pipelines[0].stages[0].overrides[0].sharding"


@pytest.mark.parametrize(("devices", "batch"), [(8, 16), (4, 8)])
def test_of_teams_those_whose_exchanges_hide_are_found_on_slow_links(devices: int, batch: int) -> None:
    """With all that is passed round counted, recomputation and tensor parallelism that spare some of it look better."""
    shape = {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 5504, "vocab": 32000}
    train = {"global_batch": batch, "seq_len": 2048, "steps": 10, "precision": "bf16"}
    job = parse_job({"name": "one", "model": shape, "data": {"uri": "stdlib:"}, "train": train})
    node = {"name": "n", "device": "RTX4090", "devices": devices, "intra_gb_per_s": 12}
    found = plan(job, parse_cluster({"nodes": [node]})).plan
    (pipeline,) = found.pipelines
    (stage,) = pipeline.stages
    assert found.sharding.weights == "node" and found.overlap.shards
    assert len(stage.replicas) == devices and stage.replicas[0].tp == 1


@pytest.mark.parametrize(("device", "gain"), [("A100-40G", 1.05), ("A100-80G", 1.02), ("RTX4090", 1.05)])
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


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_the_best_of_them_is_no_slower_on_a_better_cluster(seed: int) -> None:
    instance = draw_small(seed)

    def best_s(cluster: ClusterSnapshot) -> float:
        return min(map(step_s, offered(instance.job, cluster)), default=float("inf"))

    for change in (*CHANGES.values(), slow_device):
        what, cluster = change(instance)
        if cluster.num_devices <= MOST_DEVICES:
            assert best_s(cluster) <= best_s(instance.cluster) * (1 + 1e-9), what


def test_with_more_memory_more_layers_may_be_whole_and_never_to_the_worse() -> None:
    """Seconds are convex in their number: the most that fit are not the best."""
    job, found = billions(global_batch=1016), []
    for memory in (57, 58, 59):
        nodes = [{"name": "n", "device": "A100-80G", "devices": 8, "intra_gb_per_s": 2.54}]
        cluster = parse_cluster({"nodes": nodes, "devices": {"A100-80G": {"memory_gib": memory}}})
        costs = CostModel(job, cluster, Profile())
        found.append(min(step_s(with_overlap(score_with(made, costs), costs)) for made in offered(job, cluster)))
    assert found == sorted(found, reverse=True)
