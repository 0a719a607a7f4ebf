"""The time limit of a search holds for the largest jobs that are accepted, and what is cut short still is a plan."""

from __future__ import annotations

import itertools
import time

import pytest

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.errors import NoPlanFits
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.search import plan

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
    # What comes after: one finalist is simulated whatever the time. Without a limit these took minutes.
    assert time.process_time() - started_s < 10
    assert result.truncated and result.plan.global_batch == job.train.global_batch


def test_what_needs_no_search_is_told_at_once() -> None:
    asked = itertools.count()
    with pytest.raises(NoPlanFits, match="snapshots of the model need"):
        plan(make_job(layers=2000, hidden=8192), LARGE, clock=lambda: float(next(asked)))
    assert next(asked) < 3


def test_a_search_that_finds_nothing_ends_and_says_that_it_was_cut_short() -> None:
    tight = parse_cluster(
        {
            "nodes": [{"name": f"n{index}", "device": "cpu-1t", "inter_gbit_per_s": 1 + index} for index in range(6)],
            "devices": {"cpu-1t": {"memory_gib": 0.004}},
        }
    )
    ticks = itertools.count()
    with pytest.raises(NoPlanFits, match="none was found within 21 s, and the search is not over; needs"):
        plan(make_job(), tight, time_limit_s=1, clock=lambda: float(next(ticks)))
