"""The time limit of a search holds for the largest jobs that are accepted, and what is cut short still is a plan."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
from random_clusters import draw_large

from shoal_planner import cluster_search
from shoal_planner import search as planner_search
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.cluster_search import Search
from shoal_planner.errors import NoPlanFits
from shoal_planner.finish import Word
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.search import plan, step_s

SMALL = parse_cluster(
    {"nodes": [{"name": name, "device": name, "devices": 2} for name in ("A100-80G", "V100-32G", "T4")]}
)
LARGE = parse_cluster(
    {"nodes": [{"name": name, "device": name, "devices": 4, "count": 2} for name in ("A100-80G", "V100-32G", "T4")]}
)


def make_job(layers: int = 8, batch: int = 16, hidden: int = 128) -> JobSpec:
    return parse_job(
        {
            "name": "limits",
            "model": {"layers": layers, "hidden": hidden, "heads": 8, "ffn": 2 * hidden, "vocab": 256},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": batch, "seq_len": 128, "steps": 1},
        }
    )


@pytest.mark.parametrize("cluster", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("job", [make_job(layers=2000), make_job(batch=65536)], ids=["layers", "batch"])
def test_the_largest_jobs_keep_to_the_time_limit(job: JobSpec, cluster: ClusterSnapshot) -> None:
    started_s = time.process_time()
    result = plan(job, cluster, time_limit_s=0.5)
    # The first round that finds a plan is never cut.
    assert time.process_time() - started_s < 10
    assert result.plan.global_batch == job.train.global_batch


def test_what_needs_no_search_is_told_at_once() -> None:
    asked = itertools.count()
    with pytest.raises(NoPlanFits, match="snapshots of the model need"):
        plan(make_job(layers=2000, hidden=8192), LARGE, clock=lambda: float(next(asked)))
    assert next(asked) < 3


def test_what_is_late_is_cut_short_between_rounds_and_says_so() -> None:
    """The first round that finds a plan is never cut: there is a plan however short the time."""
    now_s = itertools.count()
    whole = plan(make_job(), LARGE, clock=lambda: 0.0)
    assert not whole.truncated
    cut = plan(make_job(), LARGE, time_limit_s=0.5, clock=lambda: float(next(now_s)))
    assert cut.truncated
    assert step_s(cut.plan) >= step_s(whole.plan)
    assert cut.num_candidates < whole.num_candidates


def test_steps_from_plan_to_plan_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a thousand of them, and more on every part of the cluster."""
    instance, finite = draw_large(4, 9, 11), list[bool]()
    judge = Search._judged

    def counted(search: Search, words: tuple[Word, ...]) -> float:
        seconds = judge(search, words)
        finite.append(math.isfinite(seconds))
        return seconds

    monkeypatch.setattr(Search, "_judged", counted)
    found = plan(instance.job, instance.cluster, time_limit_s=1.0, clock=lambda: 10.0 if any(finite) else 0.0)
    assert found.truncated and finite.index(True) == len(finite) - 1


def test_no_part_of_a_cluster_is_looked_at_again_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other look would see more, another look indeed changes nothing."""
    instance, looked_at = draw_large(4, 9, 11), list[ClusterSnapshot]()
    look_at = planner_search._look_at

    def counted(look: planner_search._Look, search: Search) -> bool:
        looked_at.append(look.others)
        return look_at(look, search) and not again

    monkeypatch.setattr(planner_search, "_look_at", counted)
    again = False
    once = plan(instance.job, instance.cluster, time_limit_s=600)
    assert len(looked_at) == len(set(looked_at)) > 1
    again = True
    looked_at.clear()
    assert plan(instance.job, instance.cluster, time_limit_s=600).plan == once.plan
    assert len(looked_at) > len(set(looked_at))


def test_a_whole_search_is_not_said_to_be_cut_short_because_it_ends_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What proves the best plan of a few devices is either begun or not."""
    proving = list[bool]()
    search_exactly = cluster_search.search_exactly

    def told(*given: Any) -> bool:
        proving.append(True)
        return search_exactly(*given)

    monkeypatch.setattr(cluster_search, "search_exactly", told)
    job = make_job(layers=4, batch=4)
    found = plan(job, SMALL, time_limit_s=1.0, clock=lambda: 10.0 if proving else 0.0)
    assert proving and not found.truncated


def test_a_search_that_finds_nothing_looks_everywhere_and_names_what_binds() -> None:
    tight = parse_cluster(
        {
            "nodes": [{"name": f"n{index}", "device": "cpu-1t", "inter_gbit_per_s": 1 + index} for index in range(6)],
            "devices": {"cpu-1t": {"memory_gib": 0.004}},
        }
    )
    now_s = itertools.count()
    with pytest.raises(NoPlanFits, match=r"needs .* MiB on n\d-0, which has 4.1"):
        plan(make_job(), tight, time_limit_s=1, clock=lambda: float(next(now_s)))
