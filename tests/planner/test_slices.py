"""Operator splitting in plans: where matrices are cut, what is refused by name, and when the search takes slices."""

from __future__ import annotations

import dataclasses

import pytest
import recount

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec, ModelSpec, Schedule, parse_job
from shoal_planner.memory import HEADROOM_SHARE, stage_memory
from shoal_planner.overlap import Overlap
from shoal_planner.parameters import parameters
from shoal_planner.plan import Pipeline, Plan, Recompute, Replica, Sharding, Stage, parse_plan, plan_to_mapping
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_planner.search import plan
from shoal_planner.sharding import shards
from shoal_planner.slices import UNCUT, Slicing, check_slices, cuts, largest_portion, num_slices

MODEL = ModelSpec(layers=2, hidden=16, heads=8, kv_heads=4, ffn=22, vocab=37, tie_embeddings=False)
ZERO_3 = Sharding(weights="cluster", gradients="cluster")


@pytest.mark.parametrize(("slices", "tp"), [(1, 2), (2, 1), (3, 2), (8, 2)])
def test_portions_are_all_of_a_parameter_and_each_rank_has_a_part_of_each_slice(slices: int, tp: int) -> None:
    slicing = Slicing(slices=slices, tp=tp)
    sizes: dict[tuple[int, int], int] = {}
    for parameter in parameters(MODEL):
        found = cuts(MODEL, parameter, slicing)
        assert [cut.first for cut in found] == [0, *(cut.last for cut in found[:-1])]
        assert found[-1].last == parameter.numel
        if not parameter.cut or slices == 1:
            assert [cut.number for cut in found] == [0]
            continue
        row = parameter.shape[1]
        assert all(cut.first < cut.last and cut.first % row == cut.last % row == 0 for cut in found)
        for rank in range(tp):
            first, last = parameter.interval(rank, tp)
            own = [cut for cut in found if first <= cut.first and cut.last <= last]
            assert sum(cut.last - cut.first for cut in own) == last - first
            numbers = [cut.number for cut in own]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            for cut in own if rank == tp - 1 else ():
                key = parameter.units[0], cut.number
                sizes[key] = sizes.get(key, 0) + cut.last - cut.first
    if slices > 1:
        for unit, vectors in ((0, 0), (1, 32), (3, 16)):
            counted = {number: size for (its, number), size in sizes.items() if its == unit}
            assert sorted(counted) == list(range(1, 1 + num_slices(MODEL, unit, slicing)))
            assert largest_portion(MODEL, unit, slicing) == vectors + max(counted.values())


def test_attention_has_no_more_slices_than_key_heads() -> None:
    assert num_slices(MODEL, 1, Slicing(slices=8, tp=2)) == 2 + 8
    assert num_slices(MODEL, 1, Slicing(slices=2)) == 4
    assert [num_slices(MODEL, unit, UNCUT) for unit in range(4)] == [0] * 4


def a_plan(slices: int, sharding: Sharding = ZERO_3, tp: tuple[int, int] = (1, 1), schedule: Schedule = "1f1b") -> Plan:
    replicas = tuple(Replica(node=f"n-{n}", devices=tuple(range(count)), tp=count) for n, count in enumerate(tp))
    stage = Stage(layers=((0, 2),), replicas=replicas, slices=slices)
    return Plan(
        pipelines=(Pipeline(micro_batch=2, micro_batches=4, stages=(stage,)),), sharding=sharding, schedule=schedule
    )


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (a_plan(0), "= 0: must be at least 1"),
        (a_plan(2, Sharding()), "= 2: must be 1 where sharding splits neither weights nor gradients"),
        (a_plan(2, tp=(1, 2)), "= 2: must be 1 where the replicas of a stage have different tp (1, 2)"),
        (a_plan(12, tp=(2, 2)), "= 12: must be at most 11: so many rows"),
        (
            dataclasses.replace(a_plan(2), overlap=Overlap(tensor_chunks=2)),
            "= 2: must be 1 where overlap.tensor_chunks is",
        ),
        (a_plan(2, schedule="zero_bubble"), "= 2: must be 1 where the schedule is 'zero_bubble'"),
    ],
    ids=["none", "whole", "degrees", "rows", "chunks", "schedule"],
)
def test_what_can_not_be_in_slices_is_refused_by_name(given: Plan, problem: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_slices(given, MODEL)
    assert f"pipelines[0].stages[0].slices {problem}" in str(caught.value)


def test_plans_say_slices_only_where_there_are_several() -> None:
    whole, sliced = plan_to_mapping(a_plan(1)), plan_to_mapping(a_plan(3))
    assert '"slices"' not in str(whole).replace("'", '"')
    assert parse_plan(whole) == a_plan(1) and parse_plan(sliced) == a_plan(3)
    assert whole["plan_id"] != sliced["plan_id"]


def job() -> JobSpec:
    """One layer, which no stages share, and one head, which no tensor parallelism cuts."""
    return parse_job(
        {
            "name": "wide",
            "model": {"layers": 1, "hidden": 128, "heads": 1, "ffn": 2048, "vocab": 256},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": 8, "seq_len": 32, "steps": 3},
            "checkpoint": {"copies": 0},
        }
    )


def four(memory_mib: float) -> ClusterSnapshot:
    devices = {"cpu-1t": {"memory_gib": memory_mib / 1024}}
    return parse_cluster({"nodes": [{"name": "n", "device": "cpu-1t", "count": 4}], "devices": devices})


def all_of_them(slices: int) -> Plan:
    """All devices share all there is, and run a sample each."""
    replicas = tuple(Replica(node=f"n-{number}", devices=(0,)) for number in range(4))
    stage = Stage(layers=((0, 1),), replicas=replicas, slices=slices)
    pipeline = Pipeline(micro_batch=4, micro_batches=2, stages=(stage,))
    return Plan(pipelines=(pipeline,), sharding=ZERO_3, copies=0)


def room_mib(slices: int) -> float:
    """On a device, for no more than that plan in so many slices."""
    prediction = score(all_of_them(slices), job(), four(1024)).prediction
    assert prediction is not None
    return max(dict(prediction.memory_bytes).values()) / (1 - HEADROOM_SHARE) / 2**20 + 0.01


def test_what_fits_in_slices_alone_is_planned_in_slices() -> None:
    last_s = 0.0
    for slices in (1, 4, 8):
        cluster = four(room_mib(slices))
        found = plan(job(), cluster).plan
        assert score(found, job(), cluster) == found
        assert found.prediction is not None and found.prediction.step_s >= last_s, "more memory is never slower"
        last_s = found.prediction.step_s
        if slices == 1:
            continue
        ((stage,),) = (pipeline.stages for pipeline in found.pipelines)
        assert 1 < stage.slices <= 8
        assert f"weights and gradients come together in {stage.slices} slices of a unit" in found.reason
        assert f"(in {stage.slices} slices)" in plan(job(), cluster).candidates[0][0]
        assert dict(found.prediction.memory_bytes) == pytest.approx(recount.device_bytes(found, job(), cluster))
        with pytest.raises(NoPlanFits):
            score(all_of_them(1), job(), cluster)


def test_slices_cost_messages_and_full_recomputation_gathers_them_again() -> None:
    costs = CostModel(job(), four(1024), Profile())

    def shared_s(slices: int, recompute: Recompute) -> tuple[float, float]:
        (pipeline,) = all_of_them(slices).pipelines
        stage = dataclasses.replace(pipeline.stages[0], recompute=recompute)
        made = dataclasses.replace(all_of_them(slices), pipelines=(dataclasses.replace(pipeline, stages=(stage,)),))
        found = shards(made, costs)[0, 0, 0]
        return found.forward_s, found.backward_s

    plain, sliced = shared_s(1, "none"), shared_s(4, "none")
    message_s = costs.half_exchange_s(frozenset({("n-0", 1), ("n-1", 1)}), 4, 0.0)
    more_s = (1 + 4 + 4 + 4) * message_s  # attention has one head, and the tied vocabulary is gathered for both ends
    assert sliced == pytest.approx((plain[0] + more_s + 4 * message_s, plain[1] + 2 * (more_s + 4 * message_s)))
    assert shared_s(1, "full") == plain
    assert shared_s(4, "full")[0] == sliced[0] and shared_s(4, "full")[1] > sliced[1]
    times = [costs.stage("n-0", 1, 1, {"none": 1}, embedding=True, head=True, slices=n).total_s for n in (1, 2, 4)]
    assert times[0] < times[1] < times[2]


def test_a_slice_takes_its_part_of_what_is_made_whole() -> None:
    """And of buffers on the wire, down to what is exchanged at the end of a step."""

    def staging(slices: int, share: float) -> float:
        return stage_memory(
            job().model, 32, "fp32", tp=1, samples=1, in_flight=1, layers={"none": 1}, embedding=True, head=True,
            owned=0.0, weights=share, gradients=share, slices=slices,
        ).staging  # fmt: skip

    whole, quarter, eighth = (staging(slices, 0.01) for slices in (1, 4, 8))
    attention = 4 * 128 * 128
    assert quarter == 20 * (2 * 128 + 3 * 512 * 128)
    assert eighth == 20 * (2 * 128 + 3 * 256 * 128) < 0.15 * whole
    assert staging(2048, 0.01) == 20 * (2 * 128 + attention), "one head is never cut"
    assert staging(8, 0.5) == 12 * eighth / 20 + 8 * 0.5 * (whole / 20)
