"""The same arguments give the same plan, in any process; only the clock may cut a search short, and the answer says
so."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_clusters import Instance, draw_large, draw_small

from shoal_planner.errors import NoPlanFits
from shoal_planner.profile import Profile
from shoal_planner.search import PlanResult, plan

HERE = Path(__file__).parent
PRINT_PLANS = """
import json, sys
from random_clusters import draw_large, draw_small
from shoal_planner.errors import NoPlanFits
from shoal_planner.plan import plan_to_mapping
from shoal_planner.search import plan

def answer(instance):
    try:
        return plan_to_mapping(plan(instance.job, instance.cluster, seed=3, time_limit_s=600).plan)
    except NoPlanFits as error:
        return str(error)

before = set(sys.modules)
found = [answer(draw_small(seed)) for seed in range(4)]
found += [answer(draw_large(seed, 9, 24)) for seed in (1, 2)]
found.append(answer(draw_large(700026, 9, 40)))  # whose prices once were added up in the order of a set
json.dump({"plans": found, "loaded": sorted(set(sys.modules) - before)}, sys.stdout)
"""


def in_a_fresh_process(hash_seed: str) -> dict[str, list[object]]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_PLANS], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


def test_fresh_processes_with_other_hash_seeds_find_the_same_plans() -> None:
    first = in_a_fresh_process("1")
    assert len(first["plans"]) == 7
    assert first == in_a_fresh_process("2")
    assert not first["loaded"], "the first plan of a process waits for modules"


def answer(instance: Instance, looks: Iterator[int], tick_s: float) -> PlanResult | None:
    """Within a second, by a clock that moves on by `tick_s` whenever it is looked at."""
    try:
        return plan(instance.job, instance.cluster, Profile(), time_limit_s=1.0, clock=lambda: tick_s * next(looks))
    except NoPlanFits:
        return None


@pytest.mark.parametrize(
    "instances",
    [[draw_small(seed) for seed in range(4)], [draw_large(seed, 9, 12) for seed in (1, 4, 5, 7)]],
    ids=["small", "large"],
)
def test_only_a_search_that_was_cut_short_may_answer_otherwise(instances: list[Instance]) -> None:
    """However early the clock runs out, an answer says truncated unless it is the plan of a whole search."""
    num_cut = 0
    for instance in instances:
        looks = itertools.count()
        whole = answer(instance, looks, 0.0)
        if whole is None:
            continue
        assert not whole.truncated
        num_looks = next(looks)
        for share in (0.0, 0.2, 0.6):
            found = answer(instance, itertools.count(), 1 / (share * num_looks + 0.5))
            if found is None or found.truncated:
                num_cut += 1
            else:
                assert found.plan == whole.plan
    assert num_cut, "no limit was short enough to cut a search"
