"""Adapters are trained as peft trains them, under every kind of plan; what they are beside stays as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runs import LAYOUTS, assert_holders_agree, hosting, worst_difference
from lora_ground import lora_job, save_llama, theirs, train_plainly
from planner_ground import make_cluster

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.groups import Group
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.levels import Sharding
from shoal_planner.overlap import Overlap
from shoal_planner.parameters import frozen, parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.predict import predict
from shoal_planner.profile import Profile
from shoal_recovery.shard_map import shard_map
from shoal_workers.first_values import first_values
from shoal_workers.live import FROZEN, GRADIENTS
from shoal_workers.processes import PlanRun, Processes
from shoal_workers.solo import RunRequest, run_solo

STEPS = 10
BOUND = 1e-4  # of adapters that begin at zero and learn ten times as fast as whole models do
LORAS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4},
    "q and v": {"rank": 3, "alpha": 12, "targets": ["q", "v"]},
    "what is summed": {"rank": 8, "targets": ["o", "down"]},
}
_NODE = make_cluster(("here", "cpu-2t", 1, 8), memory_mib={}).nodes[0]
CLUSTER = ClusterSnapshot(nodes=tuple(replace(_NODE, id=name) for name in ("here", "n")))
_PAIR = tuple(Replica(node="n", devices=(2 * first, 2 * first + 1), tp=2, samples=2) for first in (0, 1))
_TWO = (Replica(node="n", devices=(0, 1), tp=2, samples=2),), (Replica(node="n", devices=(2,), samples=2),)
PLANS = {
    **LAYOUTS,
    "state on hosts": hosting(LAYOUTS["3 stages beside 1"], (1, 5)),
    "all split": Plan(
        pipelines=(
            Pipeline(
                micro_batch=4,
                micro_batches=2,
                stages=(Stage(layers=((0, 6),), replicas=_PAIR, recompute="selective"),),
            ),
        ),
        sharding=Sharding(weights="cluster", gradients="cluster"),
    ),
    "recomputed, in chunks": Plan(
        pipelines=(
            Pipeline(
                micro_batch=2,
                micro_batches=4,
                stages=(
                    Stage(layers=((0, 4),), replicas=_TWO[0], recompute="full"),
                    Stage(layers=((4, 6),), replicas=_TWO[1], recompute="selective"),
                ),
            ),
        ),
        overlap=Overlap(stages=True, gradients=True, tensor_chunks=2),
    ),
}

_REPLICAS = tuple(
    Replica(node=name, devices=(0, 1), tp=2, samples=count) for name, count in (("a", 2), ("b", 2), ("c", 0))
)
MORE_PLANS = {
    "in a ring": replace(LAYOUTS["two equal pipelines"], groups=(Group(layers=(0, 6), collective="ring"),)),
    "quantised, one without samples": Plan(
        pipelines=(Pipeline(micro_batch=4, micro_batches=2, stages=(Stage(layers=((0, 6),), replicas=_REPLICAS),)),),
        sharding=Sharding(weights="cluster", gradients="cluster", gather="int8", scatter="int4", secondary=True),
    ),
    "interleaved": Plan(
        pipelines=(
            Pipeline(
                micro_batch=4,
                micro_batches=2,
                stages=(
                    Stage(layers=((0, 1), (3, 5)), replicas=(Replica(node="n", devices=(0, 1), tp=2, samples=4),)),
                    Stage(layers=((1, 3), (5, 6)), replicas=(Replica(node="n", devices=(2,), samples=4),)),
                ),
            ),
        ),
        schedule="interleaved",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("theirs")
    save_llama(found)
    return found


@pytest.fixture(scope="module", params=LORAS)
def spec(request: pytest.FixtureRequest, folder: Path) -> JobSpec:
    return lora_job(folder, LORAS[request.param])


def test_losses_are_those_of_peft(spec: JobSpec, folder: Path) -> None:
    ours = run_solo(spec, STEPS).losses
    np.testing.assert_allclose(ours, train_plainly(theirs(folder, spec), spec, STEPS), rtol=2e-5)
    assert ours[-1] < ours[0] - 0.02


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_trains_the_same_adapters(processes: Processes, folder: Path, name: str) -> None:
    spec = lora_job(folder, LORAS["all"])
    run = processes.run(RunRequest(job=spec, plan=PLANS[name], until_step=STEPS))
    alone = run_solo(spec, STEPS)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-5)
    assert worst_difference(run.weights, alone.weights) <= BOUND
    assert_holders_agree(run, spec)
    assert_base_untouched(run, spec, PLANS[name])
    predicted = dict(predict(PLANS[name], CostModel(spec, CLUSTER, Profile())).memory_bytes)
    for place, rank in zip(PLANS[name].places(), run.ranks, strict=True):
        assert rank.peak_bytes <= predicted[str(place.device)], rank.breakdown
        frozen_bytes = 4 * sum(span.numel for span in rank.frozen)
        assert rank.breakdown[FROZEN] == frozen_bytes > 3 * rank.breakdown.get(GRADIENTS, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_PLANS)
def test_other_plans_do_so_too(processes: Processes, folder: Path, name: str) -> None:
    spec, quantised = lora_job(folder, LORAS["all"]), name.startswith("quantised")
    run = processes.run(RunRequest(job=spec, plan=MORE_PLANS[name], until_step=STEPS))
    alone = run_solo(spec, STEPS)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=2e-2 if quantised else 1e-5)
    if not quantised:
        assert worst_difference(run.weights, alone.weights) <= BOUND
    assert_holders_agree(run, spec)
    assert_base_untouched(run, spec, MORE_PLANS[name])


@pytest.mark.filterwarnings("ignore")  # torch warns of what it does itself when it compiles
@pytest.mark.long  # compilers take their time
def test_what_is_between_products_may_be_compiled(folder: Path) -> None:
    spec = lora_job(folder, LORAS["q and v"])
    compiled = run_solo(replace(spec, train=replace(spec.train, compile=True)), STEPS)
    np.testing.assert_allclose(compiled.losses, run_solo(spec, STEPS).losses, rtol=1e-5)


def assert_base_untouched(run: PlanRun, spec: JobSpec, plan: Plan) -> None:
    """To the bit, in all that any rank computes with; and together that is all of the base."""
    known, read = {parameter.fqn: parameter for parameter in frozen(spec.model)}, first_values(spec)
    shards, held = shard_map(plan, spec.model), 0
    for state, rank in zip(shards.ranks, run.ranks, strict=True):
        assert sorted(rank.frozen) == list(state.frozen)
        for span, values in rank.frozen.items():
            held += span.numel
            assert values.tobytes() == read(known[span.fqn], span.first, span.last).numpy().tobytes(), span
    assert held >= sum(parameter.numel for parameter in known.values())
    assert all(span.fqn not in known for state in shards.ranks for span in (*state.owns, *state.keeps, *state.vouches))


def test_state_is_that_of_the_adapters_alone(spec: JobSpec) -> None:
    lora = spec.model.lora
    assert lora is not None
    rows = spec.model.matrix_rows
    expected = spec.model.layers * lora.rank * sum(rows[name] + spec.model.hidden for name in lora.names)
    assert sum(parameter.numel for parameter in parameters(spec.model)) == expected
    for plan in LAYOUTS.values():
        states = shard_map(plan, spec.model).ranks
        assert sum(key.numel for state in states for key in state.vouched_keys) == 3 * expected


def test_in_half_precision(folder: Path) -> None:
    """The base is rounded once, masters of adapters are not."""
    spec = lora_job(folder, LORAS["all"], precision="bf16")
    whole = run_solo(lora_job(folder, LORAS["all"]), STEPS)
    np.testing.assert_allclose(run_solo(spec, STEPS).losses, whole.losses, rtol=2e-2)


@pytest.mark.parametrize(
    ("lora", "train", "said"),
    [
        ({"rank": 0}, {}, r"train.lora.rank = 0: must be"),
        ({"rank": 33}, {}, r"train.lora.rank = 33: must be at most 32, the smaller dimension of k"),
        ({"rank": 4, "alpha": 0}, {}, r"train.lora.alpha = 0"),
        ({"rank": 4, "targets": []}, {}, r"train.lora.targets = .*must name a matrix"),
        ({"rank": 4, "targets": ["q", "w"]}, {}, r"train.lora.targets\[1\] = 'w': must be one of q, k, v, o, gate, up"),
        ({"rank": 4, "targets": ["c_proj"]}, {}, r"train.lora.targets\[0\] = 'c_proj': must be one of q, k, v"),
        ({"rank": 4, "targets": ["q", "q_proj"]}, {}, r"train.lora.targets\[1\] = 'q': is named twice"),
        ({"r": 4}, {}, r"train.lora.r = 4: is not a known field; did you mean 'rank'\?"),
        ({"rank": 4, "targets": "q"}, {}, r"train.lora.targets = 'q': must be"),
        ({"rank": 4, "targets": ["q", "q"]}, {}, r"train.lora.targets\[1\] = 'q': is named twice"),
        ({"rank": 4, "dropout": 0.1}, {}, r"train.lora.dropout = 0.1: is not supported"),
        ({"rank": 4}, {"schedule": "zero_bubble"}, r"train.schedule = 'zero_bubble': puts gradients"),
        ({"rank": 4}, {"init_from": None}, r"train.lora = 'rank 4': needs model.hf or train.init_from"),
        ({"alpha": 4}, {}, r"train.lora.rank = .*is required"),
    ],
)
def test_what_cannot_be_is_named(folder: Path, lora: dict[str, Any], train: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lora_job(folder, lora, **train)


def test_matrices_may_be_named_as_peft_names_them(folder: Path) -> None:
    named, short = (
        lora_job(folder, {"rank": 4, "targets": names}) for names in (["q_proj", "down_proj"], ["q", "down"])
    )
    assert named == short


def test_a_matrix_that_a_family_does_not_have_is_named(folder: Path) -> None:
    document = job_to_mapping(lora_job(folder, {"rank": 4, "targets": ["gate"]}))
    document["model"] = {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 2, "ffn": 64, "vocab": 256}
    with pytest.raises(ValueError, match=r"targets\[0\] = 'gate': is no matrix .*, which have q, k, v, o, up, down"):
        parse_job(document)


def test_a_job_says_the_same_again(spec: JobSpec) -> None:
    assert parse_job(job_to_mapping(spec)) == spec
    document = job_to_mapping(spec)
    document["model"] = {**document["model"], "lora": {"rank": 1}}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"model.lora = .*is what train.lora says"):
        parse_job(document)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": "zero_bubble"}, r"schedule = 'zero_bubble': puts gradients of weights off"),
        ({"slices": 2}, r"pipelines\[0\].stages\[0\].slices = 2: must be 1 where adapters are trained"),
    ],
)
def test_plans_that_are_not_for_adapters_are_refused(folder: Path, change: dict[str, Any], said: str) -> None:
    spec, plan = lora_job(folder, LORAS["all"]), PLANS["all split"]
    if "slices" in change:
        (pipeline,) = plan.pipelines
        plan = replace(plan, pipelines=(replace(pipeline, stages=(replace(pipeline.stages[0], **change),)),))
    else:
        plan = replace(plan, **change)
    with pytest.raises(ValueError, match=said):
        shard_map(plan, spec.model)
