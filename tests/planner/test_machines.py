"""Machines with devices of several types: nodes that are parts of one host, what passes between them, and where copies
of their state stand."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from shoal_planner.cluster import ClusterSnapshot, parse_cluster, snapshot_from_mapping, snapshot_to_mapping
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.machines import exchange_parts
from shoal_planner.market import parse_market
from shoal_planner.node_kinds import MOST_PARTS
from shoal_planner.placement import Placement, backups
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.profile import KindLink, LinkFigure, Profile, link_kind
from shoal_planner.score import score, score_with
from shoal_planner.search import plan, step_s


def make_job(layers: int = 16, batch: int = 16, **train: Any) -> JobSpec:
    model = {"layers": layers, "hidden": 2048, "heads": 16, "ffn": 5504, "vocab": 32000}
    options = {"global_batch": batch, "seq_len": 1024, "steps": 1, "precision": "bf16", **train}
    return parse_job({"name": "parts", "model": model, "data": {"uri": "stdlib:"}, "train": options})


def boxes(count: int = 2, *, host: str | None = "box", network_gbit_per_s: float = 2.0, **more: Any) -> ClusterSnapshot:
    """Machines with two devices of each of two types, on a slow network."""
    shape: dict[str, Any] = {"count": count, "devices": 2, "intra_gb_per_s": 25, "host_memory_gib": 256, **more}
    shape |= {"inter_gbit_per_s": network_gbit_per_s} | ({"host": host} if host else {})
    entries = [{"name": name, "device": device, **shape} for name, device in (("a", "A100-40G"), ("b", "RTX3090"))]
    return parse_cluster({"nodes": entries})


def test_parts_of_a_machine_talk_without_the_network() -> None:
    costs = CostModel(make_job(), boxes(), Profile())
    within, between = costs.link("a-0", "b-0"), costs.link("a-0", "b-1")
    assert within == costs.link("a-0", "a-0")
    assert within.bytes_per_s == 25e9 and between.bytes_per_s == 0.25e9
    assert between == costs.link("a-0", "a-1")


def test_a_plan_uses_that_parts_are_near() -> None:
    """A model too large for one device, on a slow network: both types serve, where without that one of them idles."""
    job, cluster = make_job(layers=64, sharding="none"), boxes(network_gbit_per_s=1.0)
    found = plan(job, cluster).plan
    assert {replica.node[0] for replica in found.replicas()} == {"a", "b"}
    assert step_s(found) < 0.9 * step_s(plan(job, boxes(host=None, network_gbit_per_s=1.0)).plan)
    assert score(found, job, cluster) == found


def test_equal_parts_are_exchanged_where_that_keeps_more_within_machines() -> None:
    job = make_job(layers=8, batch=4)
    costs = CostModel(job, boxes(network_gbit_per_s=1.0), Profile())

    def through(*nodes: str) -> Pipeline:
        stages = tuple(
            Stage(layers=((4 * place, 4 * place + 4),), replicas=(Replica(node=node, devices=(0,), samples=1),))
            for place, node in enumerate(nodes)
        )
        return Pipeline(micro_batch=1, micro_batches=2, stages=stages)

    offered: dict[float, Plan] = {}

    def consider(made: Plan) -> float:
        scored = score_with(made, costs)
        offered[step_s(scored)] = scored
        return step_s(scored)

    crossed, straight = (
        score_with(Plan(pipelines=(through("a-0", first), through("a-1", second))), costs)
        for first, second in (("b-1", "b-0"), ("b-0", "b-1"))
    )
    exchange_parts(crossed, step_s(crossed), costs, consider)
    assert min(offered) == step_s(straight) < step_s(crossed)
    best = offered[min(offered)]
    for pipeline in best.pipelines:
        assert len({costs.node(stage.replicas[0].node).host for stage in pipeline.stages}) == 1
    offered.clear()
    exchange_parts(best, step_s(best), costs, consider)
    assert min(offered) >= step_s(best)


@pytest.mark.parametrize("seed", range(8))
def test_that_nodes_are_one_machine_is_never_a_loss(seed: int) -> None:
    chance = random.Random(f"machines {seed}")
    more = {"network_gbit_per_s": chance.choice([1.0, 10.0, 100.0]), "devices": chance.choice([1, 2])}
    job = make_job(layers=chance.choice([4, 8]), batch=chance.choice([4, 8]))
    apart, together = (step_s(plan(job, boxes(host=host, **more)).plan) for host in (None, "box"))
    assert together <= apart * (1 + 1e-9)


@pytest.mark.parametrize("intra_gb_per_s", [2, 25])
def test_one_machine_alone_plans_as_if_it_had_no_network(intra_gb_per_s: int) -> None:
    job = make_job(batch=32)
    slow, fast = (
        plan(job, boxes(1, network_gbit_per_s=rate, intra_gb_per_s=intra_gb_per_s)).plan for rate in (0.1, 10)
    )
    assert step_s(slow) == step_s(fast)
    assert slow.plan_id == fast.plan_id


def test_an_interface_that_is_faster_than_the_machine_is_no_loss() -> None:
    job, shape = make_job(batch=32), {"intra_gb_per_s": 2, "network_gbit_per_s": 100.0}
    apart, together = (step_s(plan(job, boxes(host=host, **shape)).plan) for host in (None, "box"))
    assert together <= apart * (1 + 1e-9)


def test_figures_of_links_between_machines_do_not_count_within_one() -> None:
    cluster = boxes(network_gbit_per_s=1.0)
    by_id = {node.id: node for node in cluster.nodes}
    between = KindLink(
        from_kind=link_kind(by_id["a-0"]), to_kind=link_kind(by_id["b-0"]), latency_s=1e-3, bytes_per_s=1e8, source="x"
    )
    costs = CostModel(make_job(), cluster, Profile(kind_links=(between,)).on(cluster.nodes))
    assert costs.link("a-0", "b-1").bytes_per_s == 1e8
    assert costs.link("a-0", "b-0").bytes_per_s == 25e9
    own = LinkFigure(from_node="a-0", to_node="b-0", latency_s=1e-6, bytes_per_s=9e9, source="x")
    costs = CostModel(make_job(), cluster, Profile(links=(own,), kind_links=(between,)).on(cluster.nodes))
    assert costs.link("b-0", "a-0").bytes_per_s == 9e9


def test_copies_stand_on_other_machines() -> None:
    nodes = boxes(3).nodes
    host = {node.id: node.host for node in nodes}
    for home, chosen in backups(nodes, 2).items():
        assert len({host[home], *(host[node] for node in chosen)}) == 3
    alone = boxes(1).nodes  # where there is one machine alone, its other part is better than nothing
    assert dict(backups(alone, 1)) == {"a-0": ("b-0",), "b-0": ("a-0",)}
    tiny = dataclasses.replace(alone[0], id="c-0", host=None, host_memory_bytes=2**30)  # far too small for a copy
    assert {backups((*alone, tiny), 1)[home] for home in ("a-0", "b-0")} == {("b-0",), ("a-0",)}


def test_a_node_with_the_name_of_a_machine_is_not_a_part_of_it() -> None:
    nodes = (*boxes(1).nodes, dataclasses.replace(boxes(1).nodes[0], id="box-0", host=None))
    assert backups(nodes, 1)["a-0"] == ("box-0",)


def test_who_owns_the_same_state_on_the_same_machine_does_not_stand_for_a_copy() -> None:
    placement = Placement(boxes(2).nodes, 1)
    (backup,) = placement.copies("a-0").sent
    assert backup in ("a-1", "b-1")
    assert placement.copies("a-0", frozenset({"b-0"})).sent == (backup,)
    (other,) = {"a-1", "b-1"} - {backup}
    assert placement.copies("a-0", frozenset({other})).live == (other,)


def test_of_very_many_parts_nobody_looks_at_which_belong_together() -> None:
    few, many = (CostModel(make_job(), boxes(count), Profile()) for count in (MOST_PARTS // 2, MOST_PARTS // 2 + 1))
    assert few.link("a-0", "b-0").bytes_per_s == 25e9
    assert many.link("a-0", "b-0").bytes_per_s == 0.25e9
    assert many.kind("a-0") == many.kind("a-1") != few.kind("b-0")


def test_a_snapshot_with_machines_comes_back_as_it_was() -> None:
    cluster = boxes()
    assert [node.host for node in cluster.nodes] == ["box-0", "box-1", "box-0", "box-1"]
    assert snapshot_from_mapping(snapshot_to_mapping(cluster)) == cluster
    assert "host" not in str(snapshot_to_mapping(boxes(host=None))).replace("host_memory", "")
    assert snapshot_from_mapping(snapshot_to_mapping(boxes(host=None))) == boxes(host=None)


def test_what_cannot_be_one_machine_is_refused() -> None:
    def refused(**more: Any) -> InvalidField:
        first, second = ({"name": name, "device": "L4", "host": "box"} for name in "ab")
        with pytest.raises(InvalidField) as raised:
            parse_cluster({"nodes": [first, second | more]})
        return raised.value

    assert (refused(zone="b").field, refused(spot=True).field) == ("nodes (b-0).zone", "nodes (b-0).spot")
    assert "is 'default' of a-0, which is a part of the same host box-0" in str(refused(zone="b"))
    assert refused(host="no host").field == "nodes[1].host"
    offer = {"name": "a", "device": "L4", "available": 1, "price_per_hour": 1.0, "host": "box"}
    with pytest.raises(InvalidField, match=r"offers\[0\].host = 'box': is not a field of an offer"):
        parse_market({"offers": [offer]})


def test_a_node_more_is_a_machine_of_its_own() -> None:
    job = make_job(layers=8, batch=8)
    before = plan(job, boxes()).plan
    whole = dataclasses.replace(boxes().nodes[0], id="c-0", host=None)
    larger = dataclasses.replace(boxes(), nodes=(*boxes().nodes, whole))
    assert step_s(plan(job, larger).plan) <= step_s(before) * 1.01
