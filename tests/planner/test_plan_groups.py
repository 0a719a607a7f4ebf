"""Groups of a plan: exchanges by other algorithms than the direct one, as chosen, named, priced and kept."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_ground import make_cluster, make_job

from shoal_planner.answers import plan_answer
from shoal_planner.cluster import ClusterSnapshot, Link, Node, parse_cluster
from shoal_planner.collective_counts import link_fabric
from shoal_planner.costs import PER_PEER_S, CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.exchange_choices import exchanged
from shoal_planner.exchanges import Topology, topology
from shoal_planner.explanation import explanation
from shoal_planner.group_choice import DIRECT_DEVICES, groups_of, with_groups
from shoal_planner.groups import Group
from shoal_planner.loads import Holder, segments
from shoal_planner.picture import plan_svg
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage, parse_plan, plan_to_mapping
from shoal_planner.predict import unit_bytes, unit_exchange
from shoal_planner.profile import Profile
from shoal_planner.score import score, score_with
from shoal_planner.search import plan, step_s
from shoal_planner.simulate import simulate

JOB = make_job(layers=8, batch=64, hidden=2048, heads=16, seq_len=256, precision="bf16", vocab=8192, copies=0)
# Fast links within nodes of two makes, slow ones between them.
MIXED = make_cluster(
    ("fast", "A100-80G", 2, 8), ("slow", "V100-32G", 2, 4), memory_mib={}, intra_gb_per_s=100, inter_gbit_per_s=10
)


def a_plan(cluster: ClusterSnapshot, *, micro_batches: int, cut: int = 0) -> Plan:
    """A pipeline on every device; on nodes with a device too many for that, `cut` layers apart from the rest."""
    pipelines = []
    for node in cluster.nodes:
        for first in range(0, node.devices, 2 if cut else 1):
            replicas = [Replica(node=node.id, devices=(first + s,)) for s in range(2 if cut else 1)]
            bounds = [0, cut, 8] if cut else [0, 8]
            stages = tuple(
                Stage(layers=(chunk,), replicas=(replica,))
                for chunk, replica in zip(itertools.pairwise(bounds), replicas, strict=True)
            )
            pipelines.append(Pipeline(micro_batch=1, micro_batches=micro_batches, stages=stages))
    rest = 64 - sum(pipeline.samples for pipeline in pipelines[1:])
    pipelines[0] = dataclasses.replace(pipelines[0], micro_batches=rest)
    return Plan(pipelines=tuple(pipelines), copies=0)


def whole(cluster: ClusterSnapshot) -> Plan:
    return score(a_plan(cluster, micro_batches=2), JOB, cluster)


def costs_of(cluster: ClusterSnapshot) -> CostModel:
    return CostModel(JOB, cluster, Profile())


def test_a_mixed_cluster_is_served_level_by_level_and_the_plan_says_so() -> None:
    costs = costs_of(MIXED)
    direct = whole(MIXED)
    found = with_groups(direct, costs)
    (group,) = [group for group in found.groups if group.layers[1] - group.layers[0] == 8]
    assert group.collective == "tree: parameter_server 4, parameter_server 4x2 > halving_doubling 4"
    assert step_s(found) < step_s(direct)
    # Between nodes only what each has added up: three quarters of the bytes, not 23 of 24 parts of them.
    part = segments(direct, costs)[1]
    chosen = dataclasses.replace(part, collective=group.collective)
    ours, theirs = unit_exchange(chosen, costs), unit_exchange(part, costs)
    assert ours.seconds < theirs.seconds
    assert dict(ours.network_s)["fast-0"] == pytest.approx(dict(theirs.network_s)["fast-0"] * (3 / 4) / (23 / 24))


def test_what_the_search_answers_is_what_score_says_of_it() -> None:
    """Where there is so much to compute that plans are worth several nodes."""
    job = dataclasses.replace(
        JOB, train=dataclasses.replace(JOB.train, seq_len=4096, global_batch=256, sharding="none")
    )
    cluster = dataclasses.replace(
        MIXED, nodes=tuple(dataclasses.replace(node, inter_bytes_per_s=6e9) for node in MIXED.nodes)
    )
    result = plan(job, cluster)
    (group,) = (group for group in result.plan.groups if group.layers == (0, 8))
    assert group.collective == "tree: parameter_server 4x2 > parameter_server 2"
    assert "not added up directly where that takes longer (embedding by tree: halving_doubling 8" in result.plan.reason
    again = score(parse_plan(plan_answer(result, seed=0)), job, cluster)
    assert again.prediction == result.plan.prediction
    assert (again.groups, again.plan_id) == (result.plan.groups, result.plan.plan_id)
    bare = score(dataclasses.replace(again, groups=()), job, cluster)
    assert step_s(result.plan) < step_s(bare)
    assert result.candidates[0][1] == step_s(result.plan) == step_s(result.finalists[0])
    costs = CostModel(job, cluster, Profile())
    assert simulate(result.plan, costs).step_s < simulate(bare, costs).step_s


def test_who_only_holds_state_exchanges_directly() -> None:
    first, second, *others = whole(MIXED).pipelines
    idle = dataclasses.replace(second.stages[0].replicas[0], samples=0)
    stage = dataclasses.replace(first.stages[0], replicas=(*first.stages[0].replicas, idle))
    times = first.micro_batches + second.micro_batches
    lent = dataclasses.replace(first, micro_batches=times, stages=(stage,))
    found = score(Plan(pipelines=(lent, *others), copies=0), JOB, MIXED)
    assert with_groups(found, costs_of(MIXED)) == found
    with pytest.raises(InvalidField) as caught:
        dataclasses.replace(found, groups=(Group(layers=(0, 8), collective="ring"),))
    assert "groups = 1: must be left out where" in str(caught.value) and "runs no samples" in str(caught.value)


def test_a_running_plan_with_groups_stays_as_it_is() -> None:
    first = plan(JOB, MIXED).plan
    again = plan(JOB, MIXED, previous=first)
    assert again.change is not None and not again.change.move
    assert again.plan.plan_id == first.plan_id


def test_where_plans_are_proven_best_there_is_only_the_direct_exchange() -> None:
    small = make_cluster(("n", "A100-80G", 2, DIRECT_DEVICES // 2), memory_mib={}, inter_gbit_per_s=1)
    assert not plan(JOB, small).plan.groups
    one_more = dataclasses.replace(small, nodes=(*small.nodes, dataclasses.replace(small.nodes[0], id="x", devices=1)))
    assert with_groups(whole(one_more), costs_of(one_more)).groups


def test_no_groups_leave_the_id_and_the_document_as_they_were() -> None:
    bare = whole(MIXED)
    assert "groups" not in plan_to_mapping(bare)
    assert parse_plan({**plan_to_mapping(bare), "groups": []}).plan_id == bare.plan_id
    grouped = dataclasses.replace(bare, groups=(Group(layers=(0, 8), collective="ring"),))
    assert grouped.plan_id != bare.plan_id
    assert plan_to_mapping(grouped)["groups"] == [{"layers": [0, 8], "collective": "ring"}]
    assert parse_plan(plan_to_mapping(grouped)).groups == grouped.groups


def test_naming_the_direct_exchange_changes_no_figure() -> None:
    bare = whole(MIXED)
    groups = (Group(layers=(0, 0), collective="direct"), Group(layers=(0, 8), collective="direct"))
    assert score(dataclasses.replace(bare, groups=groups), JOB, MIXED).prediction == bare.prediction


@pytest.mark.parametrize(
    ("collective", "message"),
    [
        ("parameter_server 4x2", "groups = 'parameter_server 4x2': is for 8 replicas, and 24 take part"),
        ("halving_doubling", "is for a power of two, and 24 replicas take part"),
        ("tree: ring 8 > ring 4", "must be for the levels that the replicas stand on: 8, 4 > 4"),
    ],
)
def test_an_algorithm_that_is_not_for_its_replicas_is_refused(collective: str, message: str) -> None:
    given_plan = dataclasses.replace(whole(MIXED), groups=(Group(layers=(0, 8), collective=collective),))
    with pytest.raises(InvalidField) as caught:
        score(given_plan, JOB, MIXED)
    assert message in str(caught.value)


def test_groups_cut_where_they_begin_and_ends_of_the_model_may_differ() -> None:
    bare = a_plan(MIXED, micro_batches=2)
    groups = (
        Group(layers=(0, 0), collective="parameter_server"),
        Group(layers=(0, 3), collective="ring"),
        Group(layers=(5, 8), collective="tree: ring 8, ring 4 > halving_doubling 4"),
        Group(layers=(8, 8), collective="direct"),
    )
    parts = segments(dataclasses.replace(bare, groups=groups), costs_of(MIXED))
    assert [(part.first, part.last, part.collective) for part in parts] == [
        (0, 1, "parameter_server"),
        (1, 4, "ring"),
        (4, 6, "direct"),
        (6, 9, "tree: ring 8, ring 4 > halving_doubling 4"),
        (9, 10, "direct"),
    ]
    assert groups_of(parts) == groups
    without_ends = dataclasses.replace(bare, groups=groups[1:3])
    named = [part.collective for part in segments(without_ends, costs_of(MIXED))]
    assert named == ["ring", "ring", "direct", groups[2].collective, groups[2].collective]
    assert groups_of(segments(without_ends, costs_of(MIXED))) == groups[1:3]
    assert score(dataclasses.replace(bare, groups=groups), JOB, MIXED).prediction is not None


def test_replicas_of_some_layers_alone_have_an_algorithm_of_their_own() -> None:
    """Where pipelines are cut alike, both halves are held by one device in two of each node."""
    made = score(a_plan(MIXED, micro_batches=4, cut=3), JOB, MIXED)
    found = with_groups(made, costs_of(MIXED))
    assert [group.layers for group in found.groups] == [(0, 0), (0, 8), (8, 8)]
    ends_and_blocks = [group.collective.partition(" > ")[0] for group in found.groups]
    assert ends_and_blocks[0] == "tree: parameter_server 4, parameter_server 4x2"  # tied: with the last stages
    assert ends_and_blocks[1] == "tree: parameter_server 2, parameter_server 4"


def test_the_explanation_says_what_each_large_exchange_takes_and_what_others_would() -> None:
    costs = costs_of(MIXED)
    found = with_groups(whole(MIXED), costs)
    largest, *rest = exchanged(found, costs)
    assert (largest.holds, largest.num_replicas, largest.num_nodes) == ("layers 0-7", 24, 4)
    assert {one.holds for one in rest} == {"embedding", "head"}
    assert largest.collective == next(group.collective for group in found.groups if group.layers == (0, 8))
    taken = {other.collective: other.seconds for other in largest.others}
    assert {"direct", "ring"} <= set(taken) and largest.collective not in taken
    assert min(taken.values()) > largest.seconds and list(taken.values()) == sorted(taken.values())
    for name, seconds in taken.items():  # a plan that names it is priced by the same figure
        part = dataclasses.replace(segments(found, costs)[1], collective=name)
        assert 2 * 8 * unit_exchange(part, costs).seconds == pytest.approx(seconds)
    assert explanation(found, costs).exchanges == exchanged(found, costs)
    assert f"layers 0-7 by {largest.collective}" in plan_svg(found, MIXED).replace("&gt;", ">")
    split = dataclasses.replace(found, groups=(), sharding=Sharding(gradients="node", weights="node"))
    assert exchanged(split, costs) == ()
    with pytest.raises(InvalidField, match="groups = 2: must be left out where sharding splits weights or gradients"):
        dataclasses.replace(found, sharding=Sharding(gradients="node"))
    assert with_groups(score(split, JOB, MIXED), costs).groups == ()


# --- topologies ---


def holder(node: str, tp: int = 1, at: int = 0) -> Holder:
    return Holder(at, 0, 0, node, tp, 1.0)


def node(name: str, zone: str = "a", devices: int = 8, nics: int = 1) -> Node:
    return Node(
        id=name,
        device="A100-80G",
        devices=devices,
        host_memory_bytes=2**40,
        intra_bytes_per_s=1e11,
        inter_bytes_per_s=1e9,
        zone=zone,
        nics=nics,
    )


ZONES = ClusterSnapshot(
    nodes=(node("a-0"), node("a-1", nics=4), node("b-0", "b"), node("b-1", "b"), node("c-0", "c", nics=8)),
    links=(Link(from_zone="a", to_zone="b", bytes_per_s=1e8, latency_s=0.05),),
)


def place(*holders: Holder) -> Topology:
    return topology(holders, costs_of(ZONES))


def test_levels_without_neighbours_are_left_out() -> None:
    assert place(holder("a-0"), holder("a-0")).tree == 2
    assert place(holder("a-0"), holder("a-1"), holder("a-1")).tree == (2, 1)
    assert place(holder("a-0"), holder("a-1")).tree == 2
    assert place(holder("a-0"), holder("b-0")).tree == 2
    assert place(holder("a-0"), holder("a-0"), holder("b-0")).tree == (2, 1)
    assert place(holder("a-0"), holder("a-1"), holder("b-0")).tree == (2, 1)
    everywhere = [holder(name) for name in ("a-0", "a-1", "a-1", "b-0", "c-0")]
    assert place(*everywhere).tree == ((2, 1), (1,), (1,))


def test_ports_carry_what_all_flows_through_them_do() -> None:
    memory = costs_of(ZONES).device("a-0").memory_bytes_per_s

    def port(latency_s: float, bytes_per_s: float, tp: int = 1) -> object:
        peer_s = min(latency_s, PER_PEER_S)
        return link_fabric(latency_s, bytes_per_s, memory_bytes_per_s=memory * tp, peer_s=peer_s)

    two = place(holder("a-1"), holder("a-1"), holder("c-0"), holder("c-0"))
    assert two.joint == (port(15e-6, 1e11), port(60e-6, 2e9))  # two flows leave each node
    assert two.alone == (port(15e-6, 1e11), port(60e-6, 1e9))
    wide = place(holder("a-1", 2), holder("a-1", 4), holder("a-0", 2))
    assert wide.joint == (port(15e-6, 2e11, 2), port(60e-6, 1e9, 2))  # a-0 has one interface
    far = place(holder("a-0"), holder("a-1", 4), holder("b-0"), holder("b-1"))
    assert far.joint[-1] == port(0.05, 2e8)  # both nodes of b have a flow of their own
    assert far.alone[-1] == port(0.05, 1e8)
    assert far.spread == (1.0, 0.5)


@pytest.mark.parametrize("incast", [0.0, 2.0])
def test_where_many_senders_clog_a_receiver_no_more_than_it_takes_send_at_once(incast: float) -> None:
    """With latency out of the way, all serve all as far as the network takes it."""
    document = {
        "nodes": [{"name": "n", "device": "A100-80G", "count": 16, "inter_gbit_per_s": 10}],
        "links": [
            {"from": "default", "to": "default", "gbit_per_s": 10, "latency_ms": 0, "incast": incast, "fan_in": 4}
        ],
    }
    costs = costs_of(parse_cluster(document))
    for count in (2, 4, 8, 16):
        at = topology([holder(f"n-{number}") for number in range(count)], costs)
        best = at.best(1e9).name
        assert best == (
            "parameter_server" if count <= 4 or not incast else f"parameter_server {'4x2' if count == 8 else '4x4'}"
        )
    direct = [costs.half_exchange_s(frozenset({("n-0", 1), ("n-1", 1)}), count, 1e9) for count in (4, 8)]
    assert direct == pytest.approx([0.8 * 3 / 4, 0.8 * 7 / 8 * (1 + 4 * incast)])
    apart = costs_of(dataclasses.replace(parse_cluster(document), links=()))
    assert costs.link("n-0", "n-0").incast == apart.link("n-0", "n-1").incast == 0


def test_slow_zones_are_crossed_once() -> None:
    at = place(*(holder(name) for name in ("a-0", "a-0", "a-1", "a-1", "b-0", "b-0", "b-1", "b-1")))
    best = at.best(1e9)
    assert best.name.startswith("tree: parameter_server 2 > parameter_server 2 > parameter_server 2")
    assert at.node_bytes(best, by_levels=True) == pytest.approx(2e9 * (1 / 2 + 1 / 4))
    assert all(best.seconds <= other.seconds for other in at.others(1e9))


# --- properties ---

FIGURES = {
    "intra_bytes_per_s": (1e9, 1e12),
    "inter_bytes_per_s": (1e7, 1e11),
    "nics": (1, 8),
}


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSnapshot:
    nodes = []
    for number in range(draw(st.integers(2, 5))):
        figures = {name: draw(st.floats(*bounds)) for name, bounds in FIGURES.items() if name != "nics"}
        made = node(f"n-{number}", draw(st.sampled_from("aab")), draw(st.integers(1, 5)), draw(st.integers(1, 4)))
        nodes.append(dataclasses.replace(made, **figures))
    figures = {"bytes_per_s": (1e6, 1e10), "latency_s": (0, 0.1), "incast": (0, 1)}
    drawn = {name: draw(st.floats(*bounds)) for name, bounds in figures.items()}
    links = (Link(from_zone="a", to_zone="b", fan_in=draw(st.integers(2, 6)), **drawn),)
    return ClusterSnapshot(nodes=tuple(nodes), links=links)


def better(cluster: ClusterSnapshot, draw: st.DrawFn) -> ClusterSnapshot:
    number = draw(st.integers(0, len(cluster.nodes)))
    factor = draw(st.floats(1, 20))
    if number == len(cluster.nodes):
        link = cluster.links[0]
        quicker = dataclasses.replace(
            link,
            bytes_per_s=link.bytes_per_s * factor,
            latency_s=link.latency_s / factor,
            incast=link.incast / draw(st.sampled_from([1, 4, math.inf])),
        )
        return dataclasses.replace(cluster, links=(quicker,))
    name = draw(st.sampled_from(sorted(FIGURES)))
    old = cluster.nodes[number]
    value = old.nics + int(factor) if name == "nics" else getattr(old, name) * factor
    nodes = list(cluster.nodes)
    nodes[number] = dataclasses.replace(old, **{name: value})
    return dataclasses.replace(cluster, nodes=tuple(nodes))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[ClusterSnapshot, ClusterSnapshot]:
    cluster = draw(clusters())
    return cluster, better(cluster, draw)


@settings(max_examples=150)
@given(pairs())
def test_a_plan_with_groups_is_no_slower_than_without_nor_on_a_better_cluster(
    both: tuple[ClusterSnapshot, ClusterSnapshot],
) -> None:
    figures = []
    for cluster in both:
        made, costs = whole(cluster), costs_of(cluster)
        found = with_groups(made, costs)
        assert step_s(found) <= step_s(made)
        assert found == score_with(found, costs)
        figures.append(step_s(found))
    assert figures[1] <= figures[0] * (1 + 1e-9)


@settings(max_examples=100)
@given(pairs())
def test_an_algorithm_is_no_slower_on_better_links(both: tuple[ClusterSnapshot, ClusterSnapshot]) -> None:
    parts = [segments(whole(cluster), costs_of(cluster))[2] for cluster in both]
    places = [topology(part.holders, costs_of(cluster)) for part, cluster in zip(parts, both, strict=True)]
    num_bytes = unit_bytes(parts[0], costs_of(both[0]))
    if len(parts[0].holders) > 1:
        names = {found.name for found in (places[0].best(num_bytes), *places[0].others(num_bytes))}
        for name in names:
            before, after = (at.named(name, num_bytes).seconds for at in places)
            assert after <= before * (1 + 1e-9), name
