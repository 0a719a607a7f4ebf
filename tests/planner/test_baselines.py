"""The plans that people make without a planner, which the benchmark compares with: legal, dealt as their names say."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.baselines import FAMILIES, Family, best, deal
from benchmarks.planner import brief, geometric_mean
from benchmarks.planner_cases import ROOT
from benchmarks.planner_child import measured
from benchmarks.planner_clusters import MIXED, SIZES, Ground
from shoal_planner.cluster import parse_cluster
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.plan import check_plan, parse_plan
from shoal_planner.score import score

CLUSTER: dict[str, Any] = {
    "nodes": [
        {"name": "fast", "device": "A100-80G", "devices": 2, "host_memory_gib": 512, "inter_gbit_per_s": 200},
        {"name": "slow", "device": "A10G", "devices": 2, "host_memory_gib": 512, "inter_gbit_per_s": 200},
    ]
}
JOB: dict[str, Any] = {
    "name": "small",
    "model": {"layers": 12, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "tie_embeddings": False},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 32, "seq_len": 2048, "steps": 1, "precision": "bf16"},
}


def small(**model: int) -> JobSpec:
    return parse_job({**JOB, "model": {**JOB["model"], **model}})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_best_of_a_family_is_a_plan_of_the_job_with_equal_pipelines(family: Family) -> None:
    found = best(family, small(), parse_cluster(CLUSTER))
    assert found.plan is not None and found.num_tried > 10 and not found.why
    check_plan(found.plan, small())
    assert len({(len(pipeline.stages), pipeline.micro_batches) for pipeline in found.plan.pipelines}) == 1
    again = score(found.plan, small(), parse_cluster(CLUSTER)).prediction
    assert again is not None and again.step_s == found.step_s


def test_a_family_of_which_nothing_fits_says_why() -> None:
    found = best("uniform", small(layers=400, hidden=8192), parse_cluster(CLUSTER))
    assert found.plan is None and found.step_s is None
    assert "GiB" in found.why


@pytest.mark.parametrize(
    ("layers", "weights", "dealt"), [(10, [1, 1, 1], [4, 3, 3]), (8, [1, 3], [2, 6]), (3, [1, 1, 100], [1, 1, 1])]
)
def test_blocks_are_dealt_by_weight_one_at_least(layers: int, weights: list[float], dealt: list[int]) -> None:
    assert deal(layers, weights) == dealt


def test_a_measured_call_is_a_first_call_elsewhere() -> None:
    call = measured(JOB, CLUSTER)
    assert call.plan is not None and call.cpu_s > 0 and not call.truncated
    check_plan(parse_plan(call.plan), small())
    assert "@" in brief(call)
    after = measured(JOB, CLUSTER, previous=call.plan, without=("slow-0",))
    assert after.plan is not None
    assert {ref.node for ref in parse_plan(after.plan).devices()} == {"fast-0"}


def test_a_call_without_a_plan_says_why() -> None:
    call = measured({**JOB, "model": {**JOB["model"], "layers": 400, "hidden": 8192}}, CLUSTER)
    assert call.plan is None and "GiB" in call.error
    assert "no plan" in brief(call)


@pytest.mark.parametrize("ground", [*SIZES, *MIXED], ids=lambda ground: ground.name)
def test_grounds_are_documents_of_the_published_forms(ground: Ground) -> None:
    snapshot = parse_cluster(ground.cluster)
    assert parse_job(ground.job).train.global_batch <= 4096
    assert len({node.device for node in snapshot.nodes}) > 1
    if ground in SIZES:
        assert snapshot.num_devices == int(ground.name.partition("x")[0])


def test_the_mean_is_of_what_is_there() -> None:
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([None]) is None


def test_the_benchmark_answers_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks.planner", "--json", "--only", "cpu:16", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found = json.loads(done.stdout)
    assert found["benchmark"] == "planner"
    assert list(found["results"]) == ["cpu_s.16"]
    assert found["runs"]["cpu_s.16"][0]["step_s"] > 0


def test_a_part_that_is_not_known_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner", "--only", "nonsense"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr
