"""Expectation in the choice of a plan: copies by what they cost and save, only where rates are known, and from whom."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rent_ground import rent_job

from shoal_planner.answers import plan_answer, plan_of_answer
from shoal_planner.cluster import ClusterSnapshot, Node, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.goodput import RecoveryFigures, expected_goodput
from shoal_planner.lasting import Losses
from shoal_planner.moving import UNKNOWN, Outlook, uptime_s
from shoal_planner.pools import PoolNode, Sighting, node_pools, rates_known, seen_pools
from shoal_planner.preemption import PUBLIC_PRIOR, PreemptionRate
from shoal_planner.profile import KindLink, Profile, link_kind
from shoal_planner.search import PlanResult, plan

JOB = rent_job(batch=64)


def cluster(count: int = 4, **fields: Any) -> ClusterSnapshot:
    node = {"name": "a", "device": "A100-80G", "count": count, "spot": True, "inter_gbit_per_s": 100, **fields}
    return parse_cluster({"nodes": [node]})


def planned(snapshot: ClusterSnapshot, rate: PreemptionRate | None = None, **job: Any) -> PlanResult:
    pools = None if rate is None else {node.id: PoolNode(pool="p", rate=rate) for node in snapshot.nodes}
    return plan(rent_job(batch=64, **job), snapshot, outlook=Outlook(pools=pools))


def test_where_nobody_knows_rates_plans_are_what_they_were() -> None:
    for spot in (False, True):
        found = planned(cluster(spot=spot))
        assert (found.plan.copies, found.expected) == (1, None)
        assert plan_answer(found, seed=0)["goodput"] is None
        assert "With preemptions" not in found.plan.reason
    assert not rates_known(cluster()) and not rates_known(cluster(), {"gone-0": PoolNode(pool="p", rate=SINGLY)})


SINGLY = PreemptionRate(single_per_h=0.2)
SHAKEN = PreemptionRate(single_per_h=0.0, shocks_per_h=3.0, shares=((0.5, 1.0),))


def test_copies_are_chosen_by_what_they_save_and_cost() -> None:
    assert planned(cluster(), SINGLY).plan.copies >= 1
    assert planned(cluster(), SHAKEN).plan.copies > 1  # one copy is lost with the state in every fourth shock
    rare = PreemptionRate(single_per_h=0.001)
    slow = planned(cluster(inter_gbit_per_s=0.02), rare, every_steps=1)
    assert slow.expected is not None and slow.plan.copies == 1  # though it would get more done without
    assert [option.copies for option in slow.expected.options] == [0, 1, 2, 3]
    assert slow.expected.options[0].tokens_per_s > slow.expected.goodput.tokens_per_s
    assert "is planned only where checkpoint.copies is 0" in slow.plan.reason
    assert planned(cluster(inter_gbit_per_s=0.02), rare, every_steps=1, copies=0).plan.copies == 0
    assert planned(cluster(), SHAKEN, copies=1).plan.copies == 1


def test_what_copies_cost_follows_from_links_as_they_were_measured() -> None:
    snapshot = cluster(preemptions_per_hour=0.5)
    spec = rent_job(batch=64, every_steps=1)
    label = plan(spec, snapshot).plan
    kind = link_kind(snapshot.nodes[0])
    slow = KindLink(from_kind=kind, to_kind=kind, latency_s=1e-4, bytes_per_s=2.5e6, source="measured")
    stated, measured = (
        Losses(CostModel(spec, snapshot, profile), UNKNOWN).expected(label)
        for profile in (Profile(), Profile(kind_links=(slow,)).on(snapshot.nodes))
    )
    assert stated is not None and measured is not None
    assert measured.goodput.step_s > 100 * stated.goodput.step_s


def test_a_job_that_lost_a_node_keeps_the_copy_of_its_state() -> None:
    """As before the loss, whatever a copy costs; unless no other node is left, or has room."""
    there = [Sighting(at_s=0.0, node=node, there=True) for node in cluster(3, inter_gbit_per_s=0.02).nodes]

    def after_loss(left: int, **fields: Any) -> PlanResult:
        left_nodes = cluster(left, inter_gbit_per_s=0.02, **fields)
        seen = seen_pools([*there, Sighting(at_s=60.0, node=there[-1].node, there=False)], 120.0)
        return plan(JOB, left_nodes, outlook=Outlook(pools=seen))

    kept = after_loss(2)
    assert kept.expected is not None and kept.plan.copies == 1
    assert kept.expected.options[0].tokens_per_s > kept.expected.goodput.tokens_per_s
    alone = after_loss(1)
    assert alone.plan.copies == 0 and "without copies, as there is no other node for one" in alone.plan.reason
    full = after_loss(2, host_memory_gib=40)
    assert full.plan.copies == 0 and "without copies, as hosts have no room for one" in full.plan.reason
    assert "Its state has no copies on other nodes, as the plans with one do not fit: " in full.plan.reason
    assert "Its state has no copies, as there is no other node." in planned(cluster(1)).plan.reason
    assert "no other node" not in planned(cluster(1), copies=0).plan.reason


def test_the_answer_says_what_is_expected_and_who_knows_the_rates() -> None:
    snapshot = parse_cluster(
        {
            "nodes": [
                {"name": "a", "device": "A100-80G", "count": 2, "spot": True, "preemptions_per_hour": 0.3},
                {"name": "b", "device": "A100-80G", "count": 1, "spot": True, "zone": "west"},
                {"name": "c", "device": "A100-80G", "count": 1},
            ]
        }
    )
    found = plan(JOB, snapshot)
    answer = plan_answer(found, seed=0)
    goodput = answer["goodput"]
    assert found.plan.prediction is not None and goodput["copies"] == answer["copies"]
    assert goodput["tokens_per_s"] == pytest.approx(goodput["share"] * found.plan.prediction.tokens_per_s)
    assert 0 < goodput["share"] < 1
    sources = {rate["pool"]: (rate["num_nodes"], rate["source"]) for rate in goodput["rates"]}
    assert sources["A100-80G in default, 0.3 an hour"] == (2, "as stated")
    assert "public recordings" in sources["A100-80G in west"][1]
    assert "not a spot node" in sources["A100-80G in default, on demand"][1]
    assert "With preemptions, " in found.plan.reason
    assert plan_of_answer(answer) == found.plan


def test_a_plan_from_elsewhere_is_expected_to_do_what_its_own_copies_let_it() -> None:
    snapshot = cluster(preemptions_per_hour=0.5)
    costs = CostModel(JOB, snapshot, Profile())
    found = plan(JOB, snapshot)
    losses = Losses(costs, UNKNOWN)
    bare = losses.expected(dataclasses.replace(found.plan, copies=0))
    assert bare is not None and found.expected is not None
    assert bare.goodput.copies == 0 and bare.goodput.tokens_per_s < 0.98 * found.expected.goodput.tokens_per_s
    assert bare.goodput == expected_goodput(
        found.plan, JOB, snapshot, node_pools(snapshot), copies=0, figures=RecoveryFigures(fixed_s=UNKNOWN.restart_s)
    )
    assert Losses(CostModel(JOB, cluster(), Profile()), UNKNOWN).expected(found.plan) is None


def test_of_plans_nearly_as_fast_the_one_that_loses_less() -> None:
    """Nodes that are lost every minute would add a little to the speed of steady ones."""
    snapshot = parse_cluster(
        {
            "nodes": [
                {"name": "steady", "device": "A100-80G", "count": 6, "inter_gbit_per_s": 100},
                {
                    "name": "shaky",
                    "device": "A40",
                    "count": 2,
                    "spot": True,
                    "inter_gbit_per_s": 100,
                    "preemptions_per_hour": 60.0,
                },
            ]
        }
    )
    costs = CostModel(JOB, snapshot, Profile())
    calm = plan(JOB, snapshot.without([f"shaky-{i}" for i in range(2)])).plan
    fast = plan(JOB, dataclasses.replace(snapshot, nodes=tuple(_unstated(node) for node in snapshot.nodes))).plan
    assert {replica.node for replica in fast.replicas()} & {"shaky-0", "shaky-1"}
    losses = Losses(costs, UNKNOWN)
    assert losses.step_s(calm) < losses.step_s(fast)
    assert losses.best(sorted([calm, fast], key=_step_s)) == calm


def _step_s(made: Any) -> float:
    return float(made.prediction.step_s)


def _unstated(node: Node) -> Node:
    return dataclasses.replace(node, preemptions_per_hour=None)


def test_uptime_and_goodput_count_interruptions_alike() -> None:
    snapshot = cluster(preemptions_per_hour=0.4)
    found = plan(JOB, snapshot)
    assert found.expected is not None
    assert uptime_s(snapshot, UNKNOWN) == pytest.approx(3600 / found.expected.goodput.interruptions_per_h)


def sightings(*rows: tuple[float, str, bool], spot: bool = True) -> list[Sighting]:
    nodes = {node.id: node for node in cluster(8, spot=spot).nodes}
    return [Sighting(at_s=at_s, node=nodes[node], there=there) for at_s, node, there in rows]


def test_a_cluster_learns_from_its_own_losses() -> None:
    there = [(0.0, f"a-{index}", True) for index in range(4)]
    assert seen_pools(sightings(*there), 36_000.0) == {}
    once = seen_pools(sightings(*there, (7200.0, "a-1", False)), 36_000.0)
    assert once.keys() == {"a-0", "a-1", "a-2", "a-3"} and {node.pool for node in once.values()} == {
        "A100-80G in default"
    }
    rate = once["a-0"].rate
    assert 0 < rate.per_node_h < PUBLIC_PRIOR.per_node_h
    assert "1 nodes lost in 32 node-hours" in rate.reason and "public recordings" in rate.reason
    assert seen_pools(sightings(*there, (7200.0, "a-1", False), spot=False), 36_000.0) == {}


def test_losses_within_a_minute_are_one_shock() -> None:
    there = [(0.0, f"a-{index}", True) for index in range(4)]
    together = sightings(*there, (100.0, "a-0", False), (120.0, "a-4", True), (130.0, "a-1", False))
    apart = sightings(*there, (100.0, "a-0", False), (120.0, "a-4", True), (900.0, "a-1", False))
    one, two = (seen_pools(rows, 3600.0)["a-2"].rate for rows in (together, apart))
    assert one.shocks_per_h * sum(w for _, w in one.shares) > 0 and one.shares == ((0.5, 1.0),)
    assert two.single_per_h > one.single_per_h
    late = sightings((0.0, "a-0", True), (10.0, "a-0", False), (20.0, "a-1", True), (30.0, "a-1", False))
    assert "2 nodes lost" in seen_pools(late, 40.0)["a-0"].rate.reason  # what was not there was not shaken


def test_rates_are_for_spot_nodes() -> None:
    with pytest.raises(InvalidField, match=r"nodes\[0\].preemptions_per_hour = 0.5: is only for nodes with spot: true"):
        cluster(spot=False, preemptions_per_hour=0.5)
    with pytest.raises(InvalidField, match=r"preemptions_per_hour = -1.0: must be zero or more"):
        cluster(preemptions_per_hour=-1)
