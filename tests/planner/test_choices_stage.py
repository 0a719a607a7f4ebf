"""From a job to a stage that fits: choices priced by the planner's own costs and memory, as a plan, predicted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.choices import Choice, LayerFigures, options, overrides
from shoal_planner.cluster import GIB
from shoal_planner.costs import CostModel
from shoal_planner.memory import (
    GRADIENT_BYTES,
    HEADROOM_SHARE,
    OPTIMIZER_BYTES,
    StageBytes,
    stage_bytes,
    usable_bytes,
)
from shoal_planner.mixes import cheapest
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.predict import predict
from shoal_planner.profile import Profile

LAYERS, BATCH, SIZE = 6, 24, 4
NODE = "n-0"


def make_costs(memory_gib: float) -> CostModel:
    job = make_job(layers=LAYERS, batch=BATCH, hidden=1024, seq_len=1024, vocab=8192, precision="bf16")
    return CostModel(job, make_cluster(("n", "L4", 1, 1), memory_mib={"L4": memory_gib * 1024}), Profile())


def whole_stage(costs: CostModel) -> StageBytes:
    train = costs.job.train
    return stage_bytes(costs.job.model, train.seq_len, train.precision, 1, SIZE, embedding=True, head=True)


def figures(costs: CostModel) -> LayerFigures:
    line = whole_stage(costs)
    plain, selective, full = (
        costs.part("block", NODE, 1, SIZE, kind).total_s for kind in ("none", "selective", "full")
    )
    elements = line.block_elements
    return LayerFigures(
        micro_batches=BATCH / SIZE,
        in_flight=1.0,
        kept_bytes=line.block_flight["none"],
        selective_bytes=line.block_flight["selective"],
        full_bytes=line.block_flight["full"],
        again_bytes=line.again,
        selective_s=selective - plain,
        full_s=full - plain,
        weight_bytes=elements * (line.state_size - GRADIENT_BYTES),
        gradient_bytes=elements * GRADIENT_BYTES,
        optimizer_bytes=elements * OPTIMIZER_BYTES,
        host_s=costs.update_s(NODE, elements, elements) - costs.update_s(NODE, elements),
    )


def room_for_blocks(costs: CostModel) -> float:
    line = whole_stage(costs)
    return usable_bytes(costs.device(NODE)) - line.empty(1.0) - line.flight


def make_plan(choices: Sequence[Choice], counts: Sequence[int]) -> Plan:
    recompute, rest = overrides(0, choices, counts)
    stage = Stage(
        layers=((0, LAYERS),),
        replicas=(Replica(node=NODE, devices=(0,), samples=SIZE),),
        recompute=recompute,
        overrides=rest,
    )
    pipeline = Pipeline(micro_batch=SIZE, micro_batches=BATCH // SIZE, stages=(stage,))
    return Plan(pipelines=(pipeline,), copies=0)


def used_bytes(plan: Plan, costs: CostModel) -> float:
    return max(used for _, used in predict(plan, costs).memory_bytes)


@pytest.mark.parametrize("lacking", [0.05, 0.3, 0.6])
def test_the_fastest_plan_that_fits_of_all_that_the_choices_allow(lacking: float) -> None:
    ample = make_costs(24)
    found = options(figures(ample))
    assert len(found.choices) == 6
    plain = make_plan((Choice(),), (LAYERS,))
    saved = lacking * LAYERS * (found.bytes[0] - found.bytes.min())
    spare = usable_bytes(ample.device(NODE)) - used_bytes(plain, ample)
    costs = make_costs(24 - (spare + saved) / (1 - HEADROOM_SHARE) / GIB)
    least_s, counts = cheapest(found, [LAYERS], [room_for_blocks(costs)])
    plan = make_plan(found.choices, counts[0].tolist())
    have = usable_bytes(costs.device(NODE))
    assert used_bytes(plan, costs) <= have < used_bytes(plain, costs)
    extra_s = predict(plan, costs).step_s - predict(plain, costs).step_s
    assert extra_s == pytest.approx(least_s[0], rel=1e-6)
    for taken in itertools.combinations_with_replacement(range(len(found.choices)), LAYERS):
        other = make_plan(found.choices, [taken.count(c) for c in range(len(found.choices))])
        if used_bytes(other, costs) <= have:
            assert predict(other, costs).step_s >= predict(plan, costs).step_s * (1 - 1e-9)


def test_less_of_everything_but_seconds() -> None:
    """Each choice frees memory of the stage as much as it says, rounded to whole bytes."""
    costs = make_costs(24)
    found = options(figures(costs))
    plain = used_bytes(make_plan((Choice(),), (LAYERS,)), costs)
    for choice, num_bytes, peak in zip(found.choices, found.bytes, found.peak_bytes, strict=True):
        freed = plain - used_bytes(make_plan((choice,), (LAYERS,)), costs)
        assert freed == pytest.approx(LAYERS * (found.bytes[0] - num_bytes) - peak, abs=LAYERS + 1)
