"""What planning knows of jobs that train adapters: their state, what they are beside, what a backward leaves out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planner_ground import make_cluster

from shoal_planner.compute import backward_factor, matmul_flops
from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.memory import ELEMENT_BYTES, frozen_elements, snapshot_bytes, stage_memory
from shoal_planner.parameters import frozen, num_parameters, parameters
from shoal_planner.profile import Profile
from shoal_planner.score import score_with
from shoal_planner.search import plan

BASE = "s3://models/llama-7b"


def seven_billion(lora: dict[str, Any] | None, **train: Any) -> JobSpec:
    document = {
        "name": "fine",
        "model": {"preset": "llama-7b"},
        "data": {"uri": "stdlib:"},
        "train": {"global_batch": 16, "seq_len": 1024, "steps": 100, "precision": "bf16", "init_from": BASE}
        | train
        | {"lora": lora},
    }
    return parse_job(document)


ADAPTED, WHOLE = seven_billion({"rank": 16}), seven_billion(None)
ROOMY = make_cluster(("n", "A100-80G", 1, 1), memory_mib={"A100-80G": 2e6}, host_memory_gib=8192)


def test_adapters_are_a_small_part_of_what_a_model_has() -> None:
    """Of Llama's seven matrices at rank 16: 16 * (4 * 2 * 4096 + 3 * (4096 + 11008)) elements in each of 32 layers."""
    assert num_parameters(ADAPTED.model) == 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert sum(parameter.numel for parameter in frozen(ADAPTED.model)) == num_parameters(WHOLE.model)
    assert {parameter.units for parameter in parameters(ADAPTED.model)} == {(unit,) for unit in range(1, 33)}
    assert snapshot_bytes(num_parameters(ADAPTED.model)) < 0.01 * snapshot_bytes(num_parameters(WHOLE.model))


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_counts_what_is_frozen_once_and_nothing_more_of_it(tp: int) -> None:
    model, train = ADAPTED.model, ADAPTED.train
    usual: dict[str, Any] = {"tp": tp, "samples": 1, "in_flight": 1, "layers": {"none": 4}, "head": False}
    shape = (train.seq_len, train.precision)
    found = stage_memory(model, *shape, **usual, embedding=True, owned=0.0)
    still = frozen_elements(model, tp, 4, embedding=True, head=False)
    trained = found.gradients / 4
    assert found.weights == ELEMENT_BYTES["bf16"] * (still + trained)
    assert trained < 0.02 * still
    split = stage_memory(model, *shape, **usual, embedding=True, owned=0.0, weights=0.25, gradients=0.25)
    assert split.weights == ELEMENT_BYTES["bf16"] * (still + 0.25 * trained)


def test_a_backward_of_frozen_weights_is_about_a_forward() -> None:
    length = ADAPTED.train.seq_len
    assert 1.0 < backward_factor(ADAPTED.model, "block", length) < 1.1
    assert backward_factor(ADAPTED.model, "head", length) == 1.0
    assert backward_factor(ADAPTED.model, "embedding", length) == 0.0
    assert 1.0 < matmul_flops(ADAPTED.model, "block", length) / matmul_flops(WHOLE.model, "block", length) < 1.02
    adapted, whole = (plan(job, ROOMY).plan.prediction for job in (ADAPTED, WHOLE))
    assert adapted is not None and whole is not None
    assert 0.6 < adapted.step_s / whole.step_s < 0.8


def test_one_device_holds_what_many_would_need_to_train_it_all() -> None:
    single = make_cluster(("n", "A10G", 1, 1), memory_mib={"A10G": 24 * 1024}, host_memory_gib=64)
    found = plan(ADAPTED, single).plan
    scored = score_with(found, CostModel(ADAPTED, single, Profile()))
    assert scored.prediction == found.prediction
    with pytest.raises(NoPlanFits):
        plan(WHOLE, single)


def test_small_devices_share_a_base_unevenly() -> None:
    mixed = make_cluster(
        ("big", "A10G", 1, 1),
        ("small", "T4", 2, 1),
        memory_mib={"A10G": 14 * 1024, "T4": 7 * 1024},
        host_memory_gib=64,
        inter_gbit_per_s=25,
    )
    found = plan(ADAPTED, mixed).plan
    layers = [stage.num_layers for pipeline in found.pipelines for stage in pipeline.stages]
    assert len(layers) > 1 and len(set(layers)) > 1
    assert found.prediction is not None
    room = {"big-0:0": 14 * 2**30, "small-0:0": 7 * 2**30, "small-1:0": 7 * 2**30}
    assert all(num_bytes < room[device] for device, num_bytes in dict(found.prediction.memory_bytes).items())


def test_what_is_not_for_adapters_is_not_chosen() -> None:
    spread = make_cluster(("n", "A10G", 4, 1), memory_mib={"A10G": 8 * 1024}, host_memory_gib=64, inter_gbit_per_s=1)
    job = dataclasses.replace(ADAPTED, train=dataclasses.replace(ADAPTED.train, schedule="auto"))
    found = plan(job, spread).plan
    assert found.schedule != "zero_bubble"
    assert all(stage.slices == 1 for pipeline in found.pipelines for stage in pipeline.stages)
