"""The choice of a schedule: nothing changes unless a job asks for it, and what is chosen is faster and fits."""

from __future__ import annotations

import dataclasses
import re

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.picture_timeline import timeline_svg
from shoal_planner.plan import Override, Pipeline, Plan, Replica, Stage
from shoal_planner.profile import Profile
from shoal_planner.reschedule import with_schedules
from shoal_planner.schedule import programs, prove
from shoal_planner.score import score_with
from shoal_planner.search import plan, step_s

# Neither device can hold the model alone, and few micro-batches leave long bubbles.
BASE = make_job(layers=16, batch=4, hidden=1024, seq_len=512, precision="bf16", copies=0)
JOB = dataclasses.replace(BASE, train=dataclasses.replace(BASE.train, recompute="none"))
CLUSTER = make_cluster(("n", "L4", 4, 1), memory_mib={"L4": 2600}, inter_gbit_per_s=400)


def asking(schedule: str, job: JobSpec = JOB) -> JobSpec:
    return dataclasses.replace(job, train=dataclasses.replace(job.train, schedule=schedule))  # type: ignore[arg-type]


def test_a_job_written_before_there_were_schedules_asks_for_1f1b() -> None:
    mapping = job_to_mapping(JOB)
    assert isinstance(mapping["train"], dict)
    del mapping["train"]["schedule"]
    assert parse_job(mapping) == JOB == asking("1f1b")
    assert plan(JOB, CLUSTER).plan.schedule == "1f1b"
    mapping["train"]["schedule"] = "gpipe"
    with pytest.raises(InvalidField, match="must be one of 1f1b, auto, interleaved, zero_bubble"):
        parse_job(mapping)


def test_the_fastest_schedule_is_taken_and_explained() -> None:
    plain, best = plan(JOB, CLUSTER).plan, plan(asking("auto"), CLUSTER).plan
    assert len(plain.pipelines[0].stages) > 1
    assert best.schedule != "1f1b" and step_s(best) < step_s(plain)
    assert re.search(r"by the schedule .*, \d+\.\d% faster than the best plan found with 1F1B", best.reason)
    for name in ("interleaved", "zero_bubble"):
        asked = plan(asking(name), CLUSTER).plan
        assert asked.schedule == name and step_s(asked) >= step_s(best)
        assert "than the best plan found with 1F1B" in asked.reason
        prove(programs(asked, JOB.model))
        assert score_with(asked, CostModel(JOB, CLUSTER, Profile())).prediction == asked.prediction
    assert plan(asking("interleaved"), CLUSTER).plan.pipelines[0].num_chunks > 1


@pytest.mark.parametrize("num_a100", [4, 8])
def test_what_is_slow_under_1f1b_alone_is_found_too(num_a100: int) -> None:
    """Here the plan that is best under zero bubble is none of the best under 1F1B: its stages wait for each other."""
    job = make_job(layers=32, batch=64, heads=32, hidden=4096, seq_len=4096, vocab=32000, tie=False, precision="bf16")
    kinds = (("a", "A100-80G", 1, num_a100), ("h", "H100-80G", 1, 4), ("l", "L4", 1, 4))
    cluster = make_cluster(*kinds, memory_mib={}, inter_gbit_per_s=25.0 * num_a100, intra_gb_per_s=100)
    named = {name: step_s(plan(asking(name, job), cluster).plan) for name in ("1f1b", "zero_bubble")}
    best = step_s(plan(asking("auto", job), cluster).plan)
    assert best <= named["zero_bubble"] < 0.97 * named["1f1b"]


def test_interleaved_by_name_keeps_to_one_chunk_where_memory_allows_no_more() -> None:
    """More chunks keep more micro-batches: wherever there is a plan with 1F1B, there is one."""
    job = make_job(layers=6, batch=8, hidden=64, heads=4, seq_len=32, vocab=256, tie=False, copies=0)
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, kv_heads=2, ffn=176))
    num_chunks = []
    for mib in (3.0, 4.5):
        cluster = make_cluster(("n", "cpu-2t", 4, 1), memory_mib={"cpu-2t": mib}, inter_gbit_per_s=100)
        assert plan(job, cluster).plan.schedule == "1f1b"
        found = plan(asking("interleaved", job), cluster).plan
        assert found.schedule == "interleaved"
        num_chunks.append(max(pipeline.num_chunks for pipeline in found.pipelines))
    assert num_chunks == [1, 2]


def test_nothing_is_interleaved_where_nobody_waits() -> None:
    alone = make_cluster(("n", "L4", 1, 1), memory_mib={})
    plain = plan(JOB, alone).plan
    assert plan(asking("auto"), alone).plan.plan_id == plain.plan_id
    assert plan(asking("interleaved"), alone).plan.pipelines == plain.pipelines


def test_a_running_plan_with_chunks_is_kept_or_left() -> None:
    job = asking("interleaved")
    running = plan(job, CLUSTER).plan
    assert plan(job, CLUSTER, previous=running).plan.plan_id == running.plan_id
    back = plan(JOB, CLUSTER, previous=running)
    assert back.change is not None and back.plan.schedule in ("1f1b", "interleaved")


def test_layers_keep_what_holds_for_them() -> None:
    stages = (
        Stage(
            layers=((0, 8),),
            replicas=(Replica(node="n-0", devices=(0,)),),
            overrides=(Override(layers=(2, 6), recompute="full"),),
        ),
        Stage(layers=((8, 16),), replicas=(Replica(node="n-0", devices=(1,)),)),
    )
    given = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=4, stages=stages),), copies=0)
    big = make_cluster(("n", "L4", 1, 4), memory_mib={})
    costs = CostModel(asking("interleaved"), big, Profile())
    found = with_schedules([score_with(given, costs)], costs, lambda made: score_with(made, costs))
    assert {made.pipelines[0].num_chunks for made in found} == set(range(2, 9))
    for made in found:
        first, last = made.pipelines[0].stages
        assert (first.num_layers, last.num_layers) == (8, 8)
        assert first.recomputed() == stages[0].recomputed() and last.recomputed() == stages[1].recomputed()


def test_the_engine_runs_every_schedule() -> None:
    for name in ("interleaved", "zero_bubble", "auto"):
        found = plan(asking(name), CLUSTER).plan
        assert name in (found.schedule, "auto")


def test_the_timeline_shows_the_works_of_each_schedule() -> None:
    costs = CostModel(JOB, CLUSTER, Profile())
    pictures = {name: timeline_svg(plan(asking(name), CLUSTER).plan, costs) for name in ("1f1b", "zero_bubble")}
    chunked = timeline_svg(plan(asking("interleaved"), CLUSTER).plan, costs)
    assert "gradients of weights of micro-batch 1" in pictures["zero_bubble"]
    assert ">gradients of weights<" in pictures["zero_bubble"] and ">backward<" not in pictures["zero_bubble"]
    assert "through chunk 1" in chunked and 'class="backward odd"' in chunked and ">odd chunks<" in chunked
    assert ">backward<" in pictures["1f1b"] and "gradients of weights" not in pictures["1f1b"]
