"""Schedules and recomputation, in pairs with every other part of a layout: the numbers of one process, within the
memory that the plan predicts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from engine_runs import LAYERS, assert_holders_agree, assert_same_bits, job, part, plan, run_poisoned, worst_difference
from planner_ground import make_cluster

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.job import Schedule
from shoal_planner.plan import Override, Pipeline, Plan, Recompute, Stage
from shoal_planner.predict import predict
from shoal_planner.profile import Profile
from shoal_planner.search import plan as search
from shoal_workers.exchange import SoloExchange
from shoal_workers.processes import Processes
from shoal_workers.segments import ACTIVATIONS
from shoal_workers.solo import RunRequest, SoloRun, run_rank, run_solo, solo_plan

STEPS = 20
BOUND = 1e-5
LITTLE_MIB = 4.0  # on each of four devices; the job's state alone takes six
CLUSTER = make_cluster(("here", "cpu-2t", 1, 8), memory_mib={})
STAGES = plan((4, (part(2, (1, 2)), part(4, (1, 2)))))
TENSOR = plan((4, (part(2, (2, 2)), part(4, (2, 2)))))
REPLICAS = plan((2, (part(3, (1, 3), (1, 1)), part(3, (2, 4)))))
PIPELINES = plan((5, (part(2, (2, 1)), part(3, (1, 1)), part(1, (1, 1)))), (3, (part(6, (1, 1)),)))


def under(schedule: Schedule, plan: Plan, usual: Recompute = "none") -> Plan:
    """The plan, two chunks a stage if interleaved; what is recomputed in full is so but for a layer of each stage."""
    pipelines = tuple(_chunked(pipeline) if schedule == "interleaved" else pipeline for pipeline in plan.pipelines)
    return replace(
        plan,
        schedule=schedule,
        pipelines=tuple(
            replace(pipeline, stages=tuple(_recomputing(stage, usual) for stage in pipeline.stages))
            for pipeline in pipelines
        ),
    )


def _chunked(pipeline: Pipeline) -> Pipeline:
    count = len(pipeline.stages)
    if count == 1:
        return pipeline
    borders = [LAYERS * index // (2 * count) for index in range(2 * count + 1)]
    parts = list(itertools.pairwise(borders))
    stages = tuple(
        replace(stage, layers=(parts[index], parts[count + index])) for index, stage in enumerate(pipeline.stages)
    )
    return replace(pipeline, stages=stages)


def _recomputing(stage: Stage, usual: Recompute) -> Stage:
    other = Override(layers=(stage.first, stage.first + 1), recompute="selective")
    return replace(stage, recompute=usual, overrides=(other,) if usual == "full" else ())


@pytest.fixture(scope="module")
def solo() -> dict[bool, SoloRun]:
    return {tied: run_solo(job(tied=tied), STEPS) for tied in (True, False)}


@pytest.mark.parametrize(
    ("schedule", "usual", "layout", "tied"),
    [
        pytest.param("interleaved", "none", TENSOR, True, marks=pytest.mark.long),
        ("interleaved", "full", PIPELINES, False),
        ("zero_bubble", "selective", PIPELINES, True),
        ("zero_bubble", "full", TENSOR, False),
        pytest.param("1f1b", "selective", REPLICAS, False, marks=pytest.mark.long),
        pytest.param("1f1b", "full", PIPELINES, True, marks=pytest.mark.long),
        pytest.param("interleaved", "selective", REPLICAS, True, marks=pytest.mark.long),
        pytest.param("zero_bubble", "none", REPLICAS, True, marks=pytest.mark.long),
    ],
)
def test_equals_one_process_within_the_predicted_memory(
    processes: Processes, solo: dict[bool, SoloRun], schedule: Schedule, usual: Recompute, layout: Plan, tied: bool
) -> None:
    asked, given = job(tied=tied), under(schedule, layout, usual)
    run = processes.run(RunRequest(job=asked, plan=given, until_step=STEPS))
    assert worst_difference(run.weights, solo[tied].weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo[tied].losses, rtol=1e-5)
    assert_holders_agree(run, asked)
    assert run.ranks[0].reports[0].samples == ((0, 8),)
    cluster = ClusterSnapshot(nodes=tuple(replace(node, id="here") for node in CLUSTER.nodes))
    predicted = dict(predict(given, CostModel(asked, cluster, Profile())).memory_bytes)
    for place, rank in zip(given.places(), run.ranks, strict=True):
        assert rank.peak_bytes <= predicted[str(place.device)], rank.breakdown


def test_heads_that_wait_are_within_the_predicted_memory(processes: Processes) -> None:
    """With 9 micro-batches in four stages of four chunks the last stage works on other chunks beside what its head
    keeps of several, which is more than one head takes in its backward."""
    plain = job(tied=False)
    asked = replace(
        plain,
        model=replace(plain.model, layers=16, vocab=8192),
        train=replace(plain.train, global_batch=9, seq_len=128, precision="bf16"),
    )
    (pipeline,) = plan((9, tuple(part(4, (1, 1)) for _ in range(4)))).pipelines
    stages = tuple(
        replace(stage, layers=tuple((4 * chunk + s, 4 * chunk + s + 1) for chunk in range(4)))
        for s, stage in enumerate(pipeline.stages)
    )
    given = replace(
        plan((9, (part(1, (1, 1)),))), schedule="interleaved", pipelines=(replace(pipeline, stages=stages),)
    )
    run = processes.run(RunRequest(job=asked, plan=given, until_step=1))
    cluster = ClusterSnapshot(nodes=tuple(replace(node, id="here") for node in CLUSTER.nodes))
    predicted = dict(predict(given, CostModel(asked, cluster, Profile())).memory_bytes)
    for place, rank in zip(given.places(), run.ranks, strict=True):
        assert rank.peak_bytes <= predicted[str(place.device)], rank.breakdown
    assert run.ranks[-1].breakdown[ACTIVATIONS] > 3 * 4 * asked.train.seq_len * asked.model.vocab


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_what_is_planned_for_little_memory_runs_in_it(
    processes: Processes, solo: dict[bool, SoloRun], schedule: Schedule
) -> None:
    plain = job(tied=False)
    asked = replace(plain, train=replace(plain.train, schedule=schedule))
    little = make_cluster(("n", "cpu-2t", 4, 1), memory_mib={"cpu-2t": LITTLE_MIB}, inter_gbit_per_s=100)
    found = search(asked, little).plan
    assert found.schedule == schedule
    stages = [stage for pipeline in found.pipelines for stage in pipeline.stages]
    assert any(stage.offloaded() or stage.recomputed()["none"] < stage.num_layers for stage in stages), "all were easy"
    run = processes.run(RunRequest(job=asked, plan=found, until_step=5, limit_bytes=int(LITTLE_MIB * 2**20)))
    np.testing.assert_allclose(run.losses, solo[False].losses[:5], rtol=1e-5)


def test_when_a_stage_does_what_does_not_change_a_bit(processes: Processes) -> None:
    """Nor does putting off the gradients of weights, or where layers run."""
    asked = job(tied=False)
    plain, *others = (
        processes.run(RunRequest(job=asked, plan=under(schedule, STAGES), until_step=5))
        for schedule in ("1f1b", "interleaved", "zero_bubble")
    )
    for other in others:
        assert_same_bits(other.state, plain.state)
        assert other.losses == plain.losses


def test_bf16_gradients_that_are_put_off_are_added_up_in_fp32(processes: Processes) -> None:
    asked = job(tied=False, precision="bf16")
    plain, split = (
        processes.run(RunRequest(job=asked, plan=under(schedule, STAGES), until_step=2))
        for schedule in ("1f1b", "zero_bubble")
    )
    assert_same_bits(split.state, plain.state)


@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("zero_bubble", marks=pytest.mark.long)])
def test_evaluations_run_the_forwards_of_any_schedule_in_the_memory_of_a_step(
    processes: Processes, schedule: Schedule
) -> None:
    asked = job(tied=False, steps=2)
    asked = replace(asked, train=replace(asked.train, eval_every=1, eval_batches=2))
    runs = [
        processes.run(RunRequest(job=each, plan=under(schedule, PIPELINES, "selective"), until_step=2))
        for each in (asked, job(tied=False, steps=2))
    ]
    alone = run_rank(RunRequest(job=asked, plan=solo_plan(asked), until_step=2), 0, SoloExchange())
    expected = [found.loss for found in alone.evaluations]
    assert len(expected) == 2
    for rank in runs[0].ranks:
        np.testing.assert_allclose([found.loss for found in rank.evaluations], expected, rtol=1e-5)
    assert [rank.peak_bytes for rank in runs[0].ranks] == [rank.peak_bytes for rank in runs[1].ranks]


def test_a_layer_that_is_not_finite_is_found_whichever_chunk_it_is_in(processes: Processes) -> None:
    """The forwards of all chunks run once more, without their backwards."""
    given = under("interleaved", STAGES)
    for refusal in processes.call(2, run_poisoned, RunRequest(job=job(), plan=given, until_step=2), 0):
        assert "the first value that is not finite comes out of layer 0, on rank 0 (here:0)" in refusal.reason
