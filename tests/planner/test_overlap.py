"""What of a plan's exchanges goes on beside computing: the field, what it hides, and when it is chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.algorithms import DIRECT
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.groups import Group
from shoal_planner.hiding import hideable_among
from shoal_planner.job import JobSpec, ModelSpec
from shoal_planner.levels import Sharding
from shoal_planner.overlap import AHEAD, NOTHING, Overlap
from shoal_planner.overlap_choice import overlapping, received_ahead, with_overlap
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, parse_plan, plan_to_mapping
from shoal_planner.predict import predict
from shoal_planner.profile import Profile
from shoal_planner.programs import Reduce
from shoal_planner.schedule import programs, prove
from shoal_planner.score import score_with
from shoal_planner.search import plan, step_s
from shoal_planner.simulate import simulate

JOB = make_job(layers=8, batch=16, hidden=1024, seq_len=1024, precision="bf16", copies=0)
GPUS = make_cluster(("n", "A100-80G", 2, 2), memory_mib={}, intra_gb_per_s=10.0)


def slow(cluster: ClusterSnapshot, *, inside: float = 1.0, between: float = 1.0) -> ClusterSnapshot:
    """With links at these shares of their rates."""
    nodes = (
        dataclasses.replace(
            node,
            intra_bytes_per_s=node.intra_bytes_per_s * inside,
            inter_bytes_per_s=node.inter_bytes_per_s * between,
        )
        for node in cluster.nodes
    )
    return dataclasses.replace(cluster, nodes=tuple(nodes))


def replica(node: str, *devices: int, samples: int = 1) -> Replica:
    return Replica(node=node, devices=devices, tp=len(devices), samples=samples)


def stages(*parts: Stage, times: int = 8, **fields: Any) -> Plan:
    return Plan(pipelines=(Pipeline(micro_batch=parts[0].samples, micro_batches=times, stages=parts),), **fields)


ONE = stages(Stage(layers=((0, 8),), replicas=(replica("n-0", 0), replica("n-1", 0))))
TWO = stages(
    Stage(layers=((0, 4),), replicas=(replica("n-0", 0, samples=2),)),
    Stage(layers=((4, 8),), replicas=(replica("n-1", 0, samples=2),)),
)
TENSOR = stages(Stage(layers=((0, 8),), replicas=(replica("n-0", 0, 1, samples=2),)))
ZERO_3 = dataclasses.replace(ONE, sharding=Sharding(weights="cluster", gradients="cluster"))


def seconds(given: Plan, cluster: ClusterSnapshot, job: JobSpec = JOB, **overlap: Any) -> float:
    costs = CostModel(job, cluster, Profile())
    return predict(dataclasses.replace(given, overlap=Overlap(**overlap)), costs).step_s


# --- the field -------------------------------------------------------------------------------------------------------


def test_it_is_part_of_the_document_and_of_the_id_where_anything_overlaps() -> None:
    assert "overlap" not in plan_to_mapping(TWO)
    given = dataclasses.replace(TWO, overlap=Overlap(stages=True, tensor_chunks=4))
    mapping = plan_to_mapping(given)
    assert mapping["overlap"] == {"stages": True, "shards": False, "gradients": False, "tensor_chunks": 4}
    assert parse_plan(mapping) == given
    assert given.plan_id != TWO.plan_id


@pytest.mark.parametrize(
    ("field", "overlap", "changes"),
    [
        ("overlap.shards", {"shards": True}, {}),
        ("overlap.gradients", {"gradients": True}, {"sharding": {"gradients": "node"}}),
        ("overlap.gradients", {"gradients": True}, {"schedule": "interleaved"}),
        ("overlap.gradients", {"gradients": True}, {"groups": [{"layers": [0, 8], "collective": "ring"}]}),
        ("overlap.tensor_chunks", {"tensor_chunks": 0}, {}),
        ("overlap.tensor_chunks", {"tensor_chunks": 65}, {}),
        ("overlap.stages", {"stages": 1}, {}),
        ("overlap.stage", {"stage": True}, {}),
    ],
)
def test_what_cannot_overlap_is_refused_by_name(field: str, overlap: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_plan(plan_to_mapping(TWO) | changes | {"overlap": overlap})
    assert caught.value.field == field


def test_a_direct_exchange_that_is_named_may_overlap() -> None:
    direct = Group(layers=(0, 8), collective=DIRECT)
    assert dataclasses.replace(ONE, groups=(direct,), overlap=Overlap(gradients=True)).overlap.gradients


def test_gradients_are_summed_in_the_order_in_which_a_backward_makes_them() -> None:
    """Also where pipelines are cut at different layers, and such programs are as sound as others."""
    pipelines = (*TWO.pipelines, *stages(Stage(layers=((0, 8),), replicas=(replica("n-0", 1),))).pipelines)
    given = Plan(pipelines=pipelines, overlap=Overlap(gradients=True))
    found = programs(given, JOB.model)
    prove(found)
    for program in found:
        units = [item.unit for item in program if isinstance(item, Reduce)]
        assert units == sorted(units, reverse=True)


# --- what is hidden --------------------------------------------------------------------------------------------------


def test_of_split_state_the_longer_of_exchanging_and_computing_counts() -> None:
    network = slow(GPUS, between=0.05)
    plain, hidden = seconds(ZERO_3, network), seconds(ZERO_3, network, shards=True)
    costs = CostModel(JOB, network, Profile())
    terms = predict(ZERO_3, costs).terms
    assert terms.gradient_s > terms.compute_s
    assert hidden == pytest.approx(plain - terms.compute_s), "all computing is beside what passes"
    fast = seconds(ZERO_3, slow(GPUS, between=50.0), shards=True)
    assert fast == pytest.approx(terms.compute_s + terms.optimizer_s, rel=0.01), "all that passes is beside computing"


def test_more_in_flight_than_1f1b_has_would_hide_what_passes_between_stages() -> None:
    """Of two stages the last has one micro-batch in flight, so that about half of what passes stays exposed."""
    costs = CostModel(JOB, slow(GPUS, between=0.5), Profile())
    plain, ahead = (dataclasses.replace(TWO, overlap=Overlap(stages=on)) for on in (False, True))
    assert 0.5 < predict(ahead, costs).step_s / predict(plain, costs).step_s < 0.9
    assert simulate(ahead, costs).step_s < 0.97 * simulate(plain, costs).step_s
    assert predict(ahead, costs).step_s > 0.999 * simulate(ahead, costs).step_s


def test_sums_of_gradients_hide_behind_the_last_backward() -> None:
    network = slow(GPUS, between=0.2)
    costs = CostModel(JOB, network, Profile())
    plain, hidden = (dataclasses.replace(ONE, overlap=Overlap(gradients=on)) for on in (False, True))
    assert predict(hidden, costs).step_s < predict(plain, costs).step_s
    assert predict(hidden, costs).step_s == pytest.approx(simulate(hidden, costs).step_s, rel=0.03)


def test_more_chunks_hide_more_until_their_latencies_take_it_back() -> None:
    """The latency of a message decides how many chunks are too many."""
    job = make_job(layers=8, batch=16, hidden=8192, seq_len=4096, precision="bf16", copies=0)
    found = [seconds(TENSOR, GPUS, job, tensor_chunks=chunks) for chunks in (1, 2, 4, 64)]
    assert found[2] < found[1] < found[0]
    assert found[3] > found[2]


def test_cpus_of_one_node_carry_what_they_exchange_themselves() -> None:
    cpus = make_cluster(("c", "cpu-2t", 2, 2), memory_mib={})
    given = dataclasses.replace(
        TENSOR, pipelines=stages(Stage(layers=((0, 8),), replicas=(replica("c-0", 0, 1, samples=2),))).pipelines
    )
    assert seconds(given, cpus, tensor_chunks=4) > seconds(given, cpus)
    costs = CostModel(JOB, cpus, Profile())
    assert hideable_among(costs, ["c-0"]) == 0.0
    assert 0.5 < hideable_among(costs, ["c-0", "c-1"]) < 1.0, "between nodes the wire takes longer than they do"
    assert hideable_among(CostModel(JOB, GPUS, Profile()), ["n-0", "n-1"]) == 1.0


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "network", "chosen"),
    [
        (TWO, slow(GPUS, between=0.5), Overlap(stages=True, gradients=True)),
        (ZERO_3, slow(GPUS, between=0.05), Overlap(shards=True)),
        (ONE, slow(GPUS, between=0.2), Overlap(gradients=True)),
        (TENSOR, slow(GPUS, inside=0.02), Overlap(tensor_chunks=2)),
        (TENSOR, make_cluster(("n", "cpu-2t", 2, 2), memory_mib={}), NOTHING),
    ],
)
def test_what_pays_is_chosen(given: Plan, network: ClusterSnapshot, chosen: Overlap) -> None:
    costs = CostModel(JOB, network, Profile())
    plain, scored = (score_with(made, costs) for made in (given, received_ahead(given, JOB)))
    found = with_overlap(scored, costs)
    assert found.overlap == chosen
    assert found.overlap == NOTHING or step_s(found) < step_s(plain)
    assert found.overlap in (NOTHING, AHEAD) or step_s(found) < step_s(scored)
    held = dataclasses.replace(JOB, train=_held(JOB))
    assert received_ahead(given, held) is given
    assert with_overlap(plain, CostModel(held, network, Profile())).overlap == NOTHING


def test_what_is_not_for_a_plan_leaves_it_as_it_is() -> None:
    costs = CostModel(JOB, GPUS, Profile())
    scored = score_with(ZERO_3, costs)
    assert overlapping(scored, costs, Overlap(gradients=True)) is scored
    assert overlapping(scored, costs, Overlap(shards=True)).overlap.shards


def test_a_search_answers_with_it_says_so_and_leaves_the_running_plan_its_own() -> None:
    job = dataclasses.replace(JOB, model=ModelSpec(layers=4, hidden=1024, heads=8, ffn=2048, vocab=256))
    job = dataclasses.replace(job, limits=dataclasses.replace(job.limits, min_devices=2))
    network = slow(make_cluster(("n", "A100-80G", 2, 1), memory_mib={}), between=0.3)
    found = plan(job, network).plan
    assert found.overlap.stages
    assert "beside computing go on what passes between stages" in found.reason
    assert step_s(found) < step_s(plan(dataclasses.replace(job, train=_held(job)), network).plan)
    running = dataclasses.replace(found, overlap=NOTHING)
    again = plan(job, network, previous=running)
    assert again.change is not None and (again.plan.plan_id == running.plan_id or again.change.move)


def test_layers_are_divided_for_what_stages_take_when_they_receive_ahead() -> None:
    """Three equal devices on slow links: the last stage, which sends nothing on, gets the most layers where sending
    takes time of its own, and the fewest where it does not."""
    network = slow(make_cluster(("n", "A100-80G", 3, 1), memory_mib={}), between=0.5)
    cuts = [(first, second) for first in range(1, 8) for second in range(first + 1, 8)]
    best: dict[Overlap, tuple[float, tuple[int, int]]] = {}
    for overlap, allowed in ((NOTHING, "none"), (AHEAD, "auto")):
        train = dataclasses.replace(JOB.train, overlap=allowed)
        job = dataclasses.replace(JOB, train=train, limits=dataclasses.replace(JOB.limits, min_devices=3))
        costs = CostModel(job, network, Profile())
        best[overlap] = min((predict(_in_three(cut, overlap), costs).step_s, cut) for cut in cuts)
        assert step_s(plan(job, network).plan) <= best[overlap][0] * (1 + 1e-9)
    assert best[NOTHING][1] == (1, 3)
    assert best[AHEAD][1] == (3, 6)


def _in_three(cut: tuple[int, int], overlap: Overlap) -> Plan:
    ends = (0, *cut, 8)
    parts = (Stage(layers=((ends[s], ends[s + 1]),), replicas=(replica(f"n-{s}", 0),)) for s in range(3))
    return stages(*parts, times=16, overlap=overlap)


def _held(job: JobSpec) -> Any:
    return dataclasses.replace(job.train, overlap="none")
