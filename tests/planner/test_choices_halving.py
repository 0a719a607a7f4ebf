"""Successive halving: who goes on, and HetRL's acceptance on random clusters (PAPERS 7.7)."""

from __future__ import annotations

import math
import random

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.halving import halve
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.predict import predict
from shoal_planner.profile import Profile
from shoal_planner.simulate import simulate

CANDIDATES = 64
CLUSTERS = 20


def test_each_fidelity_judges_only_what_the_one_before_kept() -> None:
    judged: list[list[int]] = [[], [], []]

    def judge(fidelity: int, candidate: int) -> float:
        judged[fidelity].append(candidate)
        return abs(candidate - 10) if fidelity else candidate % 7

    found = halve(range(30), [lambda c, f=f: judge(f, c) for f in range(3)], (12, 4, 2))
    assert judged[0] == list(range(30))
    assert judged[1] == [0, 7, 14, 21, 28, 1, 8, 15, 22, 29, 2, 9]
    assert sorted(judged[2]) == [7, 8, 9, 14]
    assert found == [9, 8]


def test_of_equals_the_earlier_goes_on() -> None:
    assert halve("dcba", [lambda _: 1.0], (2,)) == ["d", "c"]


def test_what_is_impossible_does_not_go_on() -> None:
    assert halve((3, 1, 2), [lambda c: math.inf if c == 1 else c], (3,)) == [2, 3]
    assert halve((3, 1, 2), [lambda c: math.inf, lambda c: c], (3, 3)) == []


@pytest.mark.parametrize("keep", [(), (2, 1), (0,)])
def test_a_fidelity_without_its_number_is_refused(keep: tuple[int, ...]) -> None:
    with pytest.raises(InvalidField):
        halve((1, 2), [lambda c: c], keep)


# --- HetRL: 64 plans, three fidelities -------------------------------------------------------------------------------


def draw_costs(rng: random.Random) -> CostModel:
    kinds = ("T4", "L4", "V100-16G", "A10G")
    nodes = [(f"n{index}", rng.choice(kinds), 1, rng.choice((1, 1, 2))) for index in range(rng.randint(3, 5))]
    cluster = make_cluster(
        *nodes,
        memory_mib=dict.fromkeys(kinds, 16384),
        inter_gbit_per_s=rng.choice((1, 5, 25)),
        intra_gb_per_s=rng.choice((5, 30)),
    )
    job = make_job(layers=rng.randint(10, 16), batch=24, hidden=1024, seq_len=512, vocab=8192, precision="bf16")
    return CostModel(job, cluster, Profile())


def cuts(rng: random.Random, total: int, parts: int) -> list[tuple[int, int]]:
    """0 to `total` in ranges of at least one."""
    inner = sorted(rng.sample(range(1, total), parts - 1))
    return list(zip([0, *inner], [*inner, total], strict=True))


def draw_plan(rng: random.Random, costs: CostModel) -> Plan:
    """All devices but perhaps one as pipelines of any depths, with any cuts of the layers and of the batch."""
    refs = [ref for node in costs.snapshot.nodes for ref in node.refs()]
    refs = rng.sample(refs, rng.randint(len(refs) - 1, len(refs)))
    chains = cuts(rng, len(refs), rng.randint(1, len(refs)))
    shares = cuts(rng, costs.job.train.global_batch, len(chains))
    pipelines = []
    for (first_ref, last_ref), (first_sample, last_sample) in zip(chains, shares, strict=True):
        samples = last_sample - first_sample
        size = rng.choice([size for size in (1, 2, 3, 4) if samples % size == 0])
        layers = cuts(rng, costs.job.model.layers, last_ref - first_ref)
        stages = tuple(
            Stage(layers=(block,), replicas=(Replica(node=ref.node, devices=(ref.index,), samples=size),))
            for ref, block in zip(refs[first_ref:last_ref], layers, strict=True)
        )
        pipelines.append(Pipeline(micro_batch=size, micro_batches=samples // size, stages=stages))
    return Plan(pipelines=tuple(pipelines), copies=0)


def busiest_s(plan: Plan, costs: CostModel) -> float:
    """A lower bound: the blocks of the device that has most to do."""
    return max(
        pipeline.micro_batches
        * (stage.last - stage.first)
        * costs.part("block", replica.node, replica.tp, replica.samples).total_s
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    )


def test_hetrl_halving_finds_a_plan_as_good_with_a_quarter_of_the_simulations() -> None:
    close = 0
    for seed in range(CLUSTERS):
        rng = random.Random(seed)
        costs = draw_costs(rng)
        plans = [draw_plan(rng, costs) for _ in range(CANDIDATES)]
        true_s = [simulate(plan, costs).step_s for plan in plans]
        simulated = 0

        def simulated_s(at: int, true_s: list[float] = true_s) -> float:
            nonlocal simulated
            simulated += 1
            return true_s[at]

        found = halve(
            range(CANDIDATES),
            (
                lambda at, plans=plans, costs=costs: busiest_s(plans[at], costs),
                lambda at, plans=plans, costs=costs: predict(plans[at], costs).step_s,
                simulated_s,
            ),
            (CANDIDATES // 2, CANDIDATES // 8, 1),
        )
        assert simulated <= CANDIDATES // 4
        close += true_s[found[0]] <= 1.03 * min(true_s)
    assert close >= 18
