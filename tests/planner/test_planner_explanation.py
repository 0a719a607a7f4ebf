"""Explanations of plans: figures that agree with the prediction, and answers to "what if" that hold when tried."""

from __future__ import annotations

import dataclasses
import json

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner import marginals
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, DeviceRef, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.explanation import MAX_CANDIDATES, Explanation, explanation, explanation_to_mapping, prediction_of
from shoal_planner.job import JobSpec, LimitsSpec
from shoal_planner.left_out import left_out, variants
from shoal_planner.marginals import explain_fully
from shoal_planner.memory import HEADROOM_SHARE, usable_bytes
from shoal_planner.plan import Override, Pipeline, Plan, Replica, Stage, check_plan
from shoal_planner.profile import Profile
from shoal_planner.score import score_with
from shoal_planner.search import PlanResult, plan

JOB = make_job(layers=6, batch=8, heads=4, hidden=1024, seq_len=1024)  # enough work to share out
CLUSTER = parse_cluster(
    {
        "nodes": [
            {"name": "big", "device": "A100-80G", "devices": 2, "inter_gbit_per_s": 100, "price_per_hour": 4.0},
            {"name": "small", "device": "T4", "devices": 2, "inter_gbit_per_s": 100, "price_per_hour": 0.4},
        ]
    }
)


def costs_of(job: JobSpec = JOB, snapshot: ClusterSnapshot = CLUSTER) -> CostModel:
    return CostModel(job, snapshot, Profile())


def explained(
    job: JobSpec = JOB, snapshot: ClusterSnapshot = CLUSTER, budget: int | None = None
) -> tuple[PlanResult, Explanation]:
    result = plan(job, snapshot)
    return result, explain_fully(result.plan, costs_of(job, snapshot), result.finalists, budget=budget)


def test_terms_and_candidates_are_those_of_the_predictions() -> None:
    result = plan(JOB, CLUSTER)
    found = explanation(result.plan, costs_of(), result.finalists)
    predicted = prediction_of(result.plan)
    assert sum(term.share for term in found.terms) == pytest.approx(1)
    assert sum(term.seconds for term in found.terms) == pytest.approx(predicted.step_s)
    chosen, *others = found.candidates
    assert chosen.chosen and chosen.behind == 0 and chosen.terms == predicted.terms
    assert 2 <= len(found.candidates) <= MAX_CANDIDATES
    assert len({entry.plan for entry in found.candidates}) == len(found.candidates)
    assert [entry.step_s for entry in others] == sorted(entry.step_s for entry in others)
    for entry in others:
        assert not entry.chosen and entry.behind == pytest.approx(entry.step_s / chosen.step_s - 1)
    assert found.reason == result.plan.reason
    mapping = explanation_to_mapping(found)
    assert json.loads(json.dumps(mapping)) == mapping and mapping["left_out"] == []


def two_pipelines() -> Plan:
    """The second is slow in its second stage, which holds most layers on one T4."""
    fast = Stage(layers=((0, 6),), replicas=(Replica(node="big-0", devices=(0,)),))
    stages = (
        Stage(layers=((0, 1),), replicas=(Replica(node="big-0", devices=(1,)),)),
        Stage(layers=((1, 6),), replicas=(Replica(node="small-0", devices=(0,)),)),
    )
    return Plan(
        pipelines=(
            Pipeline(micro_batch=1, micro_batches=4, stages=(fast,)),
            Pipeline(micro_batch=1, micro_batches=4, stages=stages),
        )
    )


def test_what_binds_is_the_slowest_stage_of_the_slowest_pipeline() -> None:
    costs = costs_of()
    scored = score_with(two_pipelines(), costs)
    found = explanation(scored, costs).binding
    slow = found.bottleneck
    assert (slow.pipeline, slow.stage, slow.micro_batches) == (1, 1, 4)
    assert (slow.holds, slow.devices, slow.device_type) == ("layers 1-5 + head", "small-0:0", "T4")
    assert slow.fastest_stage_s < slow.stage_s and slow.fastest_pipeline_s < slow.pipeline_s
    predicted = prediction_of(scored)
    rest_s = predicted.terms.gradient_s + predicted.terms.optimizer_s
    assert slow.pipeline_s == pytest.approx(predicted.step_s - rest_s)
    most = max(predicted.memory_bytes, key=lambda entry: entry[1] / (15 if entry[0].startswith("small") else 80))
    assert (found.memory.device, found.memory.used_bytes) == most
    network = predicted.terms.tensor_s + predicted.terms.pipeline_s + predicted.terms.gradient_s
    assert found.network_share == pytest.approx(network / predicted.step_s)
    text = " ".join(found.sentences)
    for words in (
        "pipeline 1 sets the pace",
        "layers 1-5 + head on small-0:0 (T4)",
        "memory does not bind",
        "the fastest",
    ):
        assert words in text, words
    assert getattr(predicted.terms, found.term) == max(dataclasses.astuple(predicted.terms))


def test_memory_that_is_nearly_used_up_binds_too() -> None:
    scored = score_with(two_pipelines(), costs_of())
    used = dict(prediction_of(scored).memory_bytes)["small-0:0"]
    device = device_type("T4")
    context = device.memory_bytes * (1 - HEADROOM_SHARE) - usable_bytes(device)
    mib = (used / 0.98 + context) / (1 - HEADROOM_SHARE) / 2**20
    tight = make_cluster(("big", "A100-80G", 1, 2), ("small", "T4", 1, 2), memory_mib={"T4": mib})
    costs = costs_of(snapshot=tight)
    found = explanation(score_with(two_pipelines(), costs), costs).binding
    assert found.memory.device == "small-0:0" and found.memory.share == pytest.approx(0.98, abs=0.001)
    assert "memory binds too" in found.sentences[2]


def test_one_more_of_each_kind_is_what_a_plan_on_the_larger_cluster_says() -> None:
    result, found = explained()
    assert [(entry.adds, entry.device_type, entry.num_devices) for entry in found.marginals] == [
        ("device", "A100-80G", 1), ("device", "T4", 1), ("node", "A100-80G", 2), ("node", "T4", 2)
    ]  # fmt: skip
    assert found.num_plans == len(found.marginals) and found.skipped == ""
    before = prediction_of(result.plan).tokens_per_s
    for entry in found.marginals:
        assert entry.gain == pytest.approx(entry.tokens_per_s / before - 1) and entry.gain >= 0
        assert entry.used or entry.gain == 0
    node = found.marginals[2]
    again = dataclasses.replace(CLUSTER.nodes[0], id="big-1")
    larger = dataclasses.replace(CLUSTER, nodes=(*CLUSTER.nodes, again))
    assert node.tokens_per_s == pytest.approx(max(before, prediction_of(plan(JOB, larger).plan).tokens_per_s))


def test_a_device_that_slows_everybody_is_left_out_and_its_cost_is_told() -> None:
    nodes = [
        {"name": "big", "device": "A100-80G", "devices": 2, "inter_gbit_per_s": 100},
        {"name": "far", "device": "cpu-1t", "inter_gbit_per_s": 0.001},
    ]
    snapshot = parse_cluster({"nodes": nodes, "devices": {"cpu-1t": {"memory_gib": 4}}})
    result, found = explained(snapshot=snapshot)
    assert result.plan.unused == ("far-0:0",)
    (entry,) = found.left_out
    assert (entry.device_type, entry.devices, entry.problem) == ("cpu-1t", ("far-0:0",), "")
    assert entry.behind is not None and entry.behind > 0.05
    assert entry.step_s is not None and entry.step_s > prediction_of(result.plan).step_s
    assert "takes" in entry.reason and "longer" in entry.reason


def test_variants_give_one_more_device_a_part_and_keep_the_rest() -> None:
    overrides = (Override(layers=(0, 2), recompute="full"), Override(layers=(5, 6), offload="optimizer"))
    shared = (Replica(node="big-0", devices=(0,), samples=3), Replica(node="big-0", devices=(1,)))
    stages = (
        Stage(layers=((0, 5),), replicas=shared, overrides=overrides[:1]),
        Stage(layers=((5, 6),), replicas=(Replica(node="small-0", devices=(0,), samples=4),), overrides=overrides[1:]),
    )
    given = Plan(pipelines=(Pipeline(micro_batch=4, micro_batches=2, stages=stages),))
    added = DeviceRef(node="small-0", index=1)
    named = tuple(variants(given, costs_of(), added))
    found = [variant for _, variant in named]
    for variant in found:
        check_plan(variant, JOB)
        assert variant.devices() == given.devices() | {added}
    shapes = {
        tuple(tuple(stage.layers[0] for stage in pipeline.stages) for pipeline in plan.pipelines) for plan in found
    }
    assert shapes == {
        (((0, 1), (1, 5), (5, 6)),), (((0, 5), (5, 6), (6, 6)),), (((0, 5), (5, 6)),), (((0, 5), (5, 6)), ((0, 6),))
    }  # fmt: skip
    cut = next(variant for variant in found if len(variant.pipelines[0].stages) == 3).pipelines[0].stages[1]
    assert cut.overrides == (Override(layers=(1, 2), recompute="full"),)
    samples = [tuple(replica.samples for replica in variant.pipelines[0].stages[0].replicas) for variant in found]
    assert (2, 1, 1) in samples and (3, 1, 0) in samples
    assert {how for how, _ in named} >= {
        "a stage of its own before stage 0 of pipeline 0",
        "one sample of each micro-batch in stage 1 of pipeline 0",
        "state alone in stage 0 of pipeline 0",
        "a pipeline of its own with one micro-batch of pipeline 0",
    }
    scored = score_with(given, costs_of())
    (entry,) = left_out(scored, costs_of())
    assert entry.devices == ("small-0:1",) and entry.step_s is not None


def test_a_plan_that_cannot_be_divided_says_so() -> None:
    job = make_job(layers=1, batch=1)
    stage = Stage(layers=((0, 1),), replicas=(Replica(node="big-0", devices=(0,)),))
    given = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(stage,)),))
    costs = costs_of(job)
    found = {entry.device_type: entry for entry in left_out(score_with(given, costs), costs)}
    assert found["T4"].step_s is not None  # it may still hold state, or the head
    assert found["A100-80G"].devices == ("big-0:1",)


def test_devices_that_the_job_excludes_are_neither_tried_nor_added() -> None:
    job = dataclasses.replace(JOB, limits=LimitsSpec(device_types=("A100-80G",)))
    _, found = explained(job)
    (entry,) = found.left_out
    assert entry.devices == ("small-0:0", "small-0:1") and entry.step_s is None
    assert entry.reason == "limits.device_types allows A100-80G only"
    assert {added.device_type for added in found.marginals} == {"A100-80G"}


def test_a_device_that_cannot_take_part_is_left_out_with_the_reason() -> None:
    snapshot = make_cluster(("big", "A100-80G", 1, 1), ("tiny", "T4", 1, 1), memory_mib={"T4": 620})
    _, found = explained(snapshot=snapshot)
    (entry,) = found.left_out
    assert entry.devices == ("tiny-0:0",) and entry.step_s is None
    assert entry.reason.startswith("no way to give tiny-0:0 a part of the work fits: needs ") and entry.problem


def test_searches_are_bounded() -> None:
    _, found = explained(budget=1)
    assert found.num_plans == 1
    assert found.skipped.startswith("not asked, to bound the searches: one ")
    result, none = explained(budget=0)
    assert (none.num_plans, none.marginals) == (0, ())
    assert none.terms == explanation(result.plan, costs_of()).terms


def test_a_search_that_gives_up_leaves_the_plan_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    result = plan(JOB, CLUSTER)

    def giving_up(*_: object, **__: object) -> PlanResult:
        raise NoPlanFits("none was found in time")

    monkeypatch.setattr(marginals, "search", giving_up)
    found = explain_fully(result.plan, costs_of(), result.finalists)
    assert [(entry.gain, entry.used) for entry in found.marginals] == [(0.0, False)] * 4
