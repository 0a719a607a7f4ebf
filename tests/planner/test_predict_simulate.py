"""The closed form beside the simulated step, on plans that the search chooses (docs/adr/0009)."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest
from random_clusters import draw_large, draw_small
from random_plans import random_plan

from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.overlap import NOTHING, Overlap
from shoal_planner.predict import predict
from shoal_planner.profile import Profile
from shoal_planner.search import plan, step_s
from shoal_planner.simulate import simulate


def test_the_closed_form_is_near_the_simulated_step() -> None:
    ratios = []
    for seed in range(8):
        instance = draw_small(seed)
        try:
            job = dataclasses.replace(instance.job, train=dataclasses.replace(instance.job.train, overlap="auto"))
            found = plan(job, instance.cluster, time_limit_s=600).plan
        except NoPlanFits:
            continue
        costs = CostModel(job, instance.cluster, Profile())
        ratios.append(step_s(found) / simulate(found, costs).step_s)
    assert len(ratios) >= 6
    assert abs(statistics.median(ratios) - 1) < 0.01
    assert sum(abs(ratio - 1) <= 0.05 for ratio in ratios) >= 0.75 * len(ratios)
    assert min(ratios) > 0.98 and max(ratios) < 2.2


@pytest.mark.parametrize(("overlap", "least"), [(Overlap(stages=True), 0.999), (NOTHING, 0.93)])
def test_the_closed_form_is_never_shorter_than_the_simulated_step(overlap: Overlap, least: float) -> None:
    """Of any plan, not only of those that a search finds good: with pipelines that are cut at different layers, stages
    that recompute and stages that do not, replicas of unequal shares. Where nothing is received ahead a few are: a
    stage then waits for what comes from both sides, and the closed form counts each border to one of them."""
    ratios = []
    for draw, seeds in ((draw_small, range(60)), (draw_large, range(10))):
        for seed in seeds:
            instance, rng = draw(seed), random.Random(seed)
            costs = CostModel(instance.job, instance.cluster, Profile())
            for _ in range(3):
                made = dataclasses.replace(random_plan(rng, instance), overlap=overlap)
                ratios.append(predict(made, costs).step_s / simulate(made, costs).step_s)
    assert min(ratios) > least
    assert sum(ratio < 0.999 for ratio in ratios) <= 0.03 * len(ratios)
    assert sum(ratio < 1.05 for ratio in ratios) > 0.8 * len(ratios)
