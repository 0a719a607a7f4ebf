"""Units whose weights and gradients come together in slices: the numbers of one process, in a part of the memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_runs import assert_holders_agree, job, worst_difference

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import parse_cluster
from shoal_planner.job import JobSpec, ModelSpec
from shoal_planner.levels import Sharding
from shoal_planner.memory import stage_memory, usable_bytes
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Pipeline, Plan, Replica, Schedule, Stage
from shoal_planner.search import plan as search
from shoal_workers.courier import STAGING
from shoal_workers.live import GATHERED
from shoal_workers.processes import PlanRun, Processes
from shoal_workers.solo import RunRequest, SoloRun, run_solo

STEPS = 20
BOUND = 1e-5
ZERO_3 = Sharding(weights="cluster", gradients="cluster")
NEAR = replace(ZERO_3, secondary=True)
_LONG = pytest.mark.long


def small(*, tied: bool) -> JobSpec:
    """With rows that no number of slices divides."""
    spec = job(tied=tied)
    model = ModelSpec(layers=3, hidden=32, heads=8, kv_heads=4, ffn=50, vocab=259, tie_embeddings=tied)
    return replace(spec, model=model, train=replace(spec.train, seq_len=16))


@pytest.fixture(scope="module")
def solo() -> dict[bool, SoloRun]:
    return {tied: run_solo(small(tied=tied), STEPS) for tied in (True, False)}


def replicas(*samples: int, tp: int = 1) -> tuple[Replica, ...]:
    """Of uneven shares, on two nodes."""
    return tuple(
        Replica(
            node=f"n{number % 2}",
            devices=tuple(range(number * tp, (number + 1) * tp)),
            tp=tp,
            samples=count,
            state_share=1.0 + number,
        )
        for number, count in enumerate(samples)
    )


def plan(sharding: Sharding, *stages: Stage, schedule: Schedule = "1f1b") -> Plan:
    pipeline = Pipeline(micro_batch=stages[0].samples, micro_batches=8 // stages[0].samples, stages=stages)
    return Plan(pipelines=(pipeline,), sharding=sharding, schedule=schedule)


def elsewhere(some: tuple[Replica, ...]) -> tuple[Replica, ...]:
    return tuple(replace(replica, node="n2") for replica in some)


INTERLEAVED = (
    Stage(layers=((0, 1), (2, 3)), replicas=replicas(1, 1), recompute="selective", slices=2),
    Stage(layers=((1, 2), (3, 3)), replicas=elsewhere(replicas(1, 1)), slices=3),
)
PLANS = {
    "uneven": replace(
        plan(ZERO_3, Stage(layers=((0, 3),), replicas=replicas(1, 3), slices=3)), overlap=Overlap(shards=True)
    ),
    "tp 2, run again": plan(NEAR, Stage(layers=((0, 3),), replicas=replicas(2, 2, tp=2), recompute="full", slices=2)),
    "interleaved": plan(ZERO_3, *INTERLEAVED, schedule="interleaved"),
    "for state, run again": plan(NEAR, Stage(layers=((0, 3),), replicas=replicas(2, 2, 0), recompute="full", slices=3)),
    "gradients alone": plan(
        Sharding(gradients="cluster"), Stage(layers=((0, 3),), replicas=replicas(2, 2), recompute="selective", slices=2)
    ),
    "weights alone, 2 stages": plan(
        Sharding(weights="cluster"),
        Stage(layers=((0, 1),), replicas=replicas(1, 1), slices=2),
        Stage(layers=((1, 3),), replicas=elsewhere(replicas(2, tp=2)), slices=3),
    ),
    "alone": plan(ZERO_3, Stage(layers=((0, 3),), replicas=replicas(4), slices=3)),
}


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("uneven", True),
        pytest.param("tp 2, run again", False, marks=_LONG),
        ("interleaved", True),
        pytest.param("for state, run again", True, marks=_LONG),
        pytest.param("gradients alone", True, marks=_LONG),
        pytest.param("weights alone, 2 stages", True, marks=_LONG),
        pytest.param("uneven", False, marks=_LONG),
        pytest.param("interleaved", False, marks=_LONG),
        pytest.param("alone", True, marks=_LONG),
    ],
)
def test_slices_equal_one_process(processes: Processes, solo: dict[bool, SoloRun], name: str, tied: bool) -> None:
    run = processes.run(RunRequest(job=small(tied=tied), plan=PLANS[name], until_step=STEPS))
    assert worst_difference(run.weights, solo[tied].weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo[tied].losses, rtol=1e-5)
    assert_holders_agree(run, small(tied=tied))


def wide() -> JobSpec:
    """All of its operators can be cut into four: heads, inner rows and rows of the vocabulary."""
    spec = job(tied=False, steps=2)
    model = ModelSpec(layers=2, hidden=64, heads=4, ffn=512, vocab=512, tie_embeddings=False)
    return replace(spec, model=model, train=replace(spec.train, seq_len=8))


def test_a_quarter_at_a_time_takes_less_than_a_third_and_gives_the_same(processes: Processes) -> None:
    """At most 30 % of the bytes that are made whole, and no more on the wire than the planner counts with."""

    def run(slices: int) -> PlanRun:
        stage = Stage(layers=((0, 2),), replicas=tuple(replace(one, state_share=1.0) for one in replicas(2, 2)))
        made = replace(plan(ZERO_3, replace(stage, slices=slices)), overlap=Overlap(shards=True))
        return processes.run(RunRequest(job=wide(), plan=made, until_step=2))

    whole, quarter = run(1), run(4)
    assert quarter.losses == pytest.approx(whole.losses, rel=1e-6)
    assert worst_difference(quarter.weights, whole.weights) <= 1e-6
    for one, other in zip(whole.ranks, quarter.ranks, strict=True):
        assert other.breakdown[GATHERED] <= 0.3 * one.breakdown[GATHERED]
        for slices, found in ((1, one), (4, other)):
            planned = stage_memory(
                wide().model,
                wide().train.seq_len,
                "fp32",
                tp=1,
                samples=2,
                in_flight=1,
                layers={"none": 2},
                embedding=True,
                head=True,
                owned=0.0,
                weights=0.5,
                gradients=0.5,
                slices=slices,
            )
            assert found.breakdown[GATHERED] + found.breakdown[STAGING] <= planned.staging


def test_a_job_that_fits_in_slices_alone_is_planned_and_runs_within_its_memory(processes: Processes) -> None:
    spec = job(steps=2)
    model = ModelSpec(layers=1, hidden=64, heads=1, ffn=2048, vocab=256)
    spec = replace(
        spec, model=model, train=replace(spec.train, seq_len=16), checkpoint=replace(spec.checkpoint, copies=0)
    )
    nodes, room = {"nodes": [{"name": "n", "device": "cpu-1t", "count": 4}]}, {"cpu-1t": {"memory_gib": 5.5 / 1024}}
    cluster = parse_cluster({**nodes, "devices": room})
    found = search(spec, cluster).plan
    assert found.pipelines[0].stages[0].slices > 1
    limit_bytes = int(usable_bytes(device_type("cpu-1t", cluster.overrides)))
    run = processes.run(RunRequest(job=spec, plan=found, until_step=2, limit_bytes=limit_bytes))
    assert run.losses == pytest.approx(run_solo(spec, 2).losses, rel=1e-5)
    assert found.prediction is not None
    for rank, predicted in zip(run.ranks, dict(found.prediction.memory_bytes).values(), strict=True):
        assert rank.peak_bytes <= predicted <= limit_bytes
