"""Whatever a plan can choose, in pairs with everything else that it can choose: the numbers of one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from engine_runs import LAYERS, assert_holders_agree, job, worst_difference

from shoal_planner.job import JobSpec, ModelSpec
from shoal_planner.levels import LEVELS, DeviceGroups, Sharding
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, SoloRun, run_solo

STEPS = 20
BOUND = 1e-5
BF16_STEPS = 200
BF16_BOUND = 0.01
GROUP_SIZE = 4
# `apart` is what the second of two replicas does not share with the first one, `tp` that of the very first one.
Row = dict[str, Any]
_Pair = tuple[tuple[str, Any], tuple[str, Any]]
CHOICES: dict[str, tuple[Any, ...]] = dict(
    gradients=LEVELS,
    optimizer=LEVELS,
    weights=LEVELS,
    schedule=("1f1b", "interleaved", "zero_bubble"),
    recompute=("none", "selective", "full"),
    stages=(1, 2, 3),
    apart=("device", "group", "node"),
    replicas=(1, 2),
    tp=(1, 2),
    pipelines=(1, 2),
)
WITHIN = {  # how far apart replicas may be that a level splits something among
    "none": ("device", "group", "node"),
    "group": ("device",),
    "node": ("device", "group"),
    "cluster": ("device", "group", "node"),
}
NUM_LAYOUTS = 23
BORDERS = {1: (0, 6), 2: (0, 2, 6), 3: (0, 1, 4, 6)}
CHUNK_BORDERS = {1: (0, 6), 2: (0, 1, 3, 4, 6), 3: (0, 1, 2, 3, 4, 5, 6)}


@pytest.fixture(scope="module")
def solo() -> dict[bool, SoloRun]:
    return {tied: run_solo(job(tied=tied), STEPS) for tied in (True, False)}


@pytest.fixture(scope="module")
def full_losses() -> dict[bool, tuple[float, ...]]:
    """Of 200 steps in fp32."""
    return {tied: run_solo(_narrow_job(tied=tied, precision="fp32"), BF16_STEPS).losses for tied in (True, False)}


@pytest.mark.long
@pytest.mark.parametrize("number", range(NUM_LAYOUTS))
def test_a_layout_equals_one_process(processes: Processes, solo: dict[bool, SoloRun], number: int) -> None:
    tied, chosen = number % 2 == 0, layouts()[number]
    run = processes.run(RunRequest(job=job(tied=tied), plan=plan_of(chosen), until_step=STEPS))
    assert worst_difference(run.weights, solo[tied].weights) <= BOUND, chosen
    np.testing.assert_allclose(run.losses, solo[tied].losses, rtol=1e-5)
    assert_holders_agree(run, job(tied=tied))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(NUM_LAYOUTS))
def test_bf16_in_a_layout_stays_within_a_hundredth_for_200_steps(
    processes: Processes, full_losses: dict[bool, tuple[float, ...]], number: int
) -> None:
    tied, chosen = number % 2 == 0, layouts()[number]
    spec, full = _narrow_job(tied=tied, precision="bf16"), full_losses[tied]
    run = processes.run(RunRequest(job=spec, plan=plan_of(chosen), until_step=BF16_STEPS))
    assert full[-1] < full[0] - 1.5
    assert run.losses != full
    np.testing.assert_allclose(run.losses, full, rtol=BF16_BOUND, err_msg=str(chosen))
    assert_holders_agree(run, spec)


def _narrow_job(*, tied: bool, precision: Literal["fp32", "bf16"]) -> JobSpec:
    """The engine's job with a model that makes 200 steps in seconds."""
    asked = job(tied=tied, precision=precision, steps=BF16_STEPS, lr=1e-3)
    model = ModelSpec(layers=LAYERS, hidden=32, heads=4, kv_heads=2, ffn=88, vocab=256, tie_embeddings=tied)
    return replace(asked, model=model, train=replace(asked.train, seq_len=16))


def test_every_two_choices_that_go_together_do_in_some_layout() -> None:
    assert len(layouts()) == NUM_LAYOUTS
    assert {pair for row in layouts() for pair in itertools.combinations(row.items(), 2)} == set(pairs())
    for row in layouts():
        plan_of(row)


def pairs() -> Iterator[_Pair]:
    for one, other in itertools.combinations(CHOICES, 2):
        for values in itertools.product(CHOICES[one], CHOICES[other]):
            if is_possible(dict(zip((one, other), values, strict=True))):
                yield (one, values[0]), (other, values[1])


def is_possible(row: Row) -> bool:
    """Gradients are split no further than what needs them whole, and nothing among replicas that are not there or too
    far apart: that would split nothing. Optimizer state is split among pipelines, too (cluster)."""
    gradients, optimizer = row.get("gradients", "none"), row.get("optimizer", "cluster")
    reach = LEVELS if row.get("replicas", 2) == 2 else ("none",)
    reach = tuple(level for level in reach if row.get("apart", "device") in WITHIN[level])
    return (
        LEVELS.index(gradients) <= LEVELS.index(optimizer)
        and {gradients, row.get("weights", "none")} <= set(reach)
        and optimizer in (*reach, "cluster")
    )


@functools.cache
def layouts() -> tuple[Row, ...]:
    """Each begins with a pair that is missing yet, and goes on with what makes most others."""
    missing, found = dict.fromkeys(pairs()), list[Row]()
    while missing:
        row = dict(next(iter(missing)))
        for name, values in CHOICES.items():
            rows = [{**row, name: value} for value in values] if name not in row else [row]
            row = max(filter(is_possible, rows), key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        found.append({name: row[name] for name in CHOICES})
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return tuple(found)


def pairs_of(row: Row) -> Iterator[_Pair]:
    return itertools.combinations([(name, row[name]) for name in CHOICES if name in row], 2)


def plan_of(chosen: Row) -> Plan:
    """Cut unevenly, with unequal replicas and, of two pipelines, one of a single stage."""
    beside = chosen["pipelines"] - 1
    samples, times = ((2,), 4 - beside) if chosen["replicas"] == 1 else ((3 - beside, 1), 2)
    borders = CHUNK_BORDERS if chosen["schedule"] == "interleaved" else BORDERS
    parts = tuple(itertools.pairwise(borders[chosen["stages"]]))
    stages = tuple(
        Stage(
            layers=parts[number :: chosen["stages"]],
            replicas=tuple(replica(chosen, number, second, count) for second, count in enumerate(samples)),
            recompute=chosen["recompute"],
        )
        for number in range(chosen["stages"])
    )
    pipelines = [Pipeline(micro_batch=sum(samples), micro_batches=times, stages=stages)]
    if beside:
        alone = Replica(node="n1", devices=(10 * GROUP_SIZE,), tp=1, samples=2)
        whole = Stage(layers=((0, LAYERS),), replicas=(alone,), recompute=chosen["recompute"])
        pipelines.append(Pipeline(micro_batch=2, micro_batches=1, stages=(whole,)))
    return Plan(
        pipelines=tuple(pipelines),
        schedule=chosen["schedule"],
        sharding=Sharding(weights=chosen["weights"], gradients=chosen["gradients"], optimizer=chosen["optimizer"]),
        device_groups=tuple(DeviceGroups(node=node, size=GROUP_SIZE) for node in ("n0", "n1")),
    )


def replica(chosen: Row, stage: int, second: int, samples: int) -> Replica:
    """Of a stage: the first in a device group of its own, the second in it, in another one, or on another node."""
    group = stage + (3 if second and chosen["apart"] == "group" else 0)
    first = GROUP_SIZE * group + (2 if second and chosen["apart"] == "device" else 0)
    tp = 1 if second or stage else chosen["tp"]
    node = "n1" if second and chosen["apart"] == "node" else "n0"
    return Replica(node=node, devices=tuple(range(first, first + tp)), tp=tp, samples=samples)
