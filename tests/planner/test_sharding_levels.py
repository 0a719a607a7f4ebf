"""Weights and gradients that replicas of a stage share: what each keeps, and what passing them round takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import recount

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.explain import describe
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.loads import replica_loads, segments
from shoal_planner.memory import held_elements, unit_elements
from shoal_planner.picture import plan_svg
from shoal_planner.plan import Level, Plan, Sharding, parse_plan, plan_to_mapping
from shoal_planner.predict import predict, synchronisation_s
from shoal_planner.profile import Profile
from shoal_planner.score import kept_elements, score
from shoal_planner.sharding import circles_of
from shoal_planner.simulate import simulate

# Two nodes of four devices, in groups of two (PAPERS 2.1, halved).
CLUSTER = parse_cluster(
    {
        "nodes": [
            {
                "name": "n",
                "count": 2,
                "device": "A100-40G",
                "devices": 4,
                "device_group": 2,
                "group_gb_per_s": 200,
                "intra_gb_per_s": 50,
                "inter_gbit_per_s": 100,
            }
        ]
    }
)
LAYERS = 4


def make_job(batch: int = 8, **model: Any) -> JobSpec:
    return parse_job(
        {
            "name": "levels",
            "model": {"layers": LAYERS, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000, **model},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": batch, "seq_len": 512, "steps": 1, "precision": "bf16"},
        }
    )


def replica(node: int, *devices: int, samples: int = 1, share: float = 1.0) -> dict[str, Any]:
    return {
        "node": f"n-{node}",
        "devices": devices,
        "tp": len(devices),
        "samples": samples,
        "state_share": share,
    }


def one_stage(*replicas: dict[str, Any], times: int = 1, levels: tuple[Level, Level] = ("none", "none")) -> Plan:
    """One pipeline of one stage."""
    entry = {
        "micro_batch": sum(one["samples"] for one in replicas),
        "micro_batches": times,
        "stages": [{"layers": [[0, LAYERS]], "replicas": list(replicas)}],
    }
    return parse_plan({"pipelines": [entry], "sharding": {"weights": levels[0], "gradients": levels[1]}})


EVERY = [replica(node, device) for node in range(2) for device in range(4)]


def costs_of(job: JobSpec, cluster: ClusterSnapshot = CLUSTER) -> CostModel:
    return CostModel(job, cluster, Profile())


def at(plan: Plan, weights: Level, gradients: Level) -> Plan:
    return dataclasses.replace(plan, sharding=Sharding(weights=weights, gradients=gradients))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("none", [(0,), (1,), (2,), (3,), (4,)]),
        ("group", [(0,), (1, 2), (3,), (4,)]),
        ("node", [(0, 1, 2), (3, 4)]),
        ("cluster", [(0, 1, 2, 3, 4)]),
    ],
)
def test_who_shares_follows_from_where_devices_are(level: Level, expected: list[tuple[int, ...]]) -> None:
    """A replica that spans two device groups shares with nobody in them."""
    plan = one_stage(replica(0, 0), replica(0, 2), replica(0, 3), replica(1, 1, 2), replica(1, 3))
    found = circles_of(plan.pipelines[0].stages[0], level, costs_of(make_job()))
    assert [circle.members for circle in found] == expected
    assert all(sum(circle.parts) == pytest.approx(1) for circle in found)


@pytest.mark.parametrize("levels", [("group", "node"), ("node", "node"), ("none", "node"), ("cluster", "cluster")])
def test_the_resident_state_is_that_of_the_degrees(levels: tuple[Level, Level]) -> None:
    """2/s_w + 4/s_g + 12/s_o bytes an element (DESIGN 3, PAPERS 2.3)."""
    degree = {"none": 1, "group": 2, "node": 4, "cluster": 8}
    job = make_job()
    costs, plan = costs_of(job), one_stage(*EVERY, levels=levels)
    elements = held_elements(job.model, 1, LAYERS, embedding=True, head=True)
    for load in replica_loads(plan, costs, segments(plan, costs)):
        assert load.memory.weights == pytest.approx(2 * elements / degree[levels[0]])
        assert load.memory.gradients == pytest.approx(4 * elements / degree[levels[1]])
        assert load.memory.optimizer == pytest.approx(12 * elements / 8)
    assert dict(predict(plan, costs).memory_bytes) == pytest.approx(recount.device_bytes(plan, job, CLUSTER))


@pytest.mark.parametrize(("level", "degree"), [("none", 1), ("group", 2), ("node", 4)])
def test_optimizer_state_within_circles(level: Level, degree: int) -> None:
    """Each circle has all of it, and the sums of gradients go on to the other circles; a node snapshots its part."""
    job = make_job()
    costs = costs_of(job)
    plan = dataclasses.replace(one_stage(*EVERY), sharding=Sharding(weights="node", optimizer=level))
    elements = held_elements(job.model, 1, LAYERS, embedding=True, head=True)
    loads = replica_loads(plan, costs, segments(plan, costs))
    assert all(load.memory.optimizer == pytest.approx(12 * elements / degree) for load in loads)
    split = at(plan, "node", "none")
    reduce_s, gather_s = synchronisation_s(plan, costs, segments(plan, costs))
    least_s, same_s = synchronisation_s(split, costs, segments(split, costs))
    assert reduce_s > least_s
    assert gather_s == (0.0 if level == "none" else same_s)
    assert simulate(plan, costs).terms.gradient_s == pytest.approx(predict(plan, costs).terms.gradient_s, rel=0.05)
    if level != "none":
        assert sum(kept_elements(plan, loads, costs).values()) == pytest.approx((1 + plan.copies) * elements)


def test_uneven_parts_and_devices_that_only_hold_them() -> None:
    job = make_job()
    plan = one_stage(replica(0, 0, share=3.0), replica(0, 1, samples=0), levels=("node", "node"))
    costs = costs_of(job)
    busy, idle = replica_loads(plan, costs, segments(plan, costs))
    assert busy.memory.weights == pytest.approx(3 * idle.memory.weights)
    assert busy.memory.gradients == pytest.approx(3 * idle.memory.gradients)
    assert busy.shards.total_s > 0 == idle.shards.total_s
    assert idle.memory.activations == 0
    even = one_stage(replica(0, 0), replica(0, 1, samples=0), levels=("node", "node"))
    assert predict(plan, costs).terms.gradient_s > predict(even, costs).terms.gradient_s
    assert dict(predict(plan, costs).memory_bytes) == pytest.approx(recount.device_bytes(plan, job, CLUSTER))


def test_a_gather_and_a_scatter_take_what_the_links_let_through() -> None:
    """With one micro-batch, two gathers and a scatter for one of each (OSDP): half as much again. A tied embedding is
    passed round for both of its ends."""
    job = make_job(tie_embeddings=False)
    costs = costs_of(job)
    whole, split = (predict(one_stage(*EVERY, levels=levels), costs).terms for levels in _ALL_OR_NOTHING)
    assert split.gradient_s == pytest.approx(1.5 * whole.gradient_s, rel=1e-6)
    assert split.compute_s == pytest.approx(whole.compute_s)
    size = 2 * sum(unit_elements(job.model, unit, 1) for unit in range(LAYERS + 2))
    pair = one_stage(replica(0, 0), replica(0, 1), levels=("group", "none"))
    load = replica_loads(pair, costs, segments(pair, costs))[0]
    latency_s = costs.link("n-0", "n-0").latency_s
    assert load.shards.forward_s == pytest.approx(size / 2 / 200e9 + (LAYERS + 2) * latency_s)


_ALL_OR_NOTHING: tuple[tuple[Level, Level], ...] = (("none", "none"), ("cluster", "cluster"))


def test_what_crosses_nodes_at_the_end_does_not_grow_with_micro_batches() -> None:
    """PAPERS 2.4: three levels pass round inside nodes for each micro-batch, and cross them once a step."""
    job, once = make_job(batch=64), make_job(batch=8)
    ends, inside = [], []
    for some, times in ((once, 1), (job, 8)):
        plan, costs = one_stage(*EVERY, times=times, levels=("group", "node")), costs_of(some)
        ends.append(synchronisation_s(plan, costs, segments(plan, costs)))
        inside.append(predict(plan, costs).terms.gradient_s - sum(ends[-1]))
    assert ends[0] == ends[1]
    assert inside[1] == pytest.approx(8 * inside[0])
    # Between two nodes that keep a quarter of the gradients on each device, a quarter of them crosses.
    plan, costs = one_stage(*EVERY, times=8), costs_of(job)
    reduce_s, _ = synchronisation_s(plan, costs, segments(plan, costs))
    assert ends[1][0] < reduce_s


def test_a_slow_link_makes_sharing_across_it_dear() -> None:
    """PAPERS 2.6 (d): three levels beat sharding over all devices where nodes are far apart."""
    nodes = tuple(dataclasses.replace(node, inter_bytes_per_s=node.inter_bytes_per_s / 10) for node in CLUSTER.nodes)
    costs = costs_of(make_job(batch=64), dataclasses.replace(CLUSTER, nodes=nodes))
    plan = one_stage(*EVERY, times=8)
    three, all_over = (predict(at(plan, *levels), costs).step_s for levels in _THREE_OR_ALL)
    assert all_over > 2 * three
    carried = predict(at(plan, "cluster", "cluster"), costs)
    assert carried.terms.gradient_s > carried.terms.compute_s


_THREE_OR_ALL: tuple[tuple[Level, Level], ...] = (("group", "node"), ("cluster", "cluster"))


@pytest.mark.parametrize("levels", [("group", "node"), ("cluster", "cluster"), ("node", "none")])
def test_the_simulated_step_passes_round_as_much(levels: tuple[Level, Level]) -> None:
    job = make_job(batch=32)
    costs, plan = costs_of(job), one_stage(*EVERY, times=4, levels=levels)
    closed, simulated = predict(plan, costs), simulate(plan, costs)
    assert simulated.step_s == pytest.approx(closed.step_s, rel=0.05)
    assert simulated.terms.gradient_s == pytest.approx(closed.terms.gradient_s, rel=0.05)


def test_levels_are_told_and_survive_a_round_trip() -> None:
    plan = one_stage(*EVERY, levels=("group", "node"))
    assert parse_plan(plan_to_mapping(plan)) == plan
    assert describe(plan, CLUSTER) == (
        "[4 on 8 A100-40G] 1 x 8, weights split by device group, gradients split by node"
    )
    assert "Weights split by device group, gradients split by node<" in plan_svg(plan, CLUSTER)
    assert "split by" not in plan_svg(at(plan, "none", "none"), CLUSTER)
    both = at(plan, "cluster", "cluster")
    assert describe(both, CLUSTER).endswith(", weights and gradients split by stage")
    assert len({plan.plan_id, both.plan_id, at(plan, "none", "none").plan_id}) == 3
    assert score(plan, make_job(), CLUSTER).prediction == predict(plan, costs_of(make_job()))


def test_a_tied_embedding_is_passed_round_by_all_who_hold_it() -> None:
    job, untied = make_job(tie_embeddings=True), make_job(tie_embeddings=False)
    costs = costs_of(job)
    plan = one_stage(*EVERY, levels=("node", "node"))
    assert dict(predict(plan, costs).memory_bytes) == pytest.approx(recount.device_bytes(plan, job, CLUSTER))
    assert predict(plan, costs).terms.gradient_s < predict(plan, costs_of(untied)).terms.gradient_s
