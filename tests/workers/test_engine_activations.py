"""What a unit keeps for its backward: as much as is planned for it, whatever is recomputed, and never at the price of
the numbers."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from engine_runs import assert_same_bits, job

from benchmarks.gpu_prediction import cluster, settings
from shoal_planner.job import JobSpec
from shoal_planner.memory import block_activation_bytes
from shoal_planner.plan import Override, Recompute
from shoal_planner.score import score
from shoal_workers.exchange import SoloExchange
from shoal_workers.segments import ACTIVATIONS
from shoal_workers.solo import RankRun, RunRequest, run_rank, solo_plan, whole_state

JOB = job(tied=False)
GPU_RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_prediction.json"
Precision = Literal["fp32", "bf16"]
KINDS: tuple[Recompute, ...] = ("none", "selective", "full")


def run(spec: JobSpec, usual: Recompute, *overrides: Override, steps: int = 1) -> RankRun:
    whole = solo_plan(spec)
    (pipeline,) = whole.pipelines
    stage = replace(pipeline.stages[0], recompute=usual, overrides=overrides)
    plan = replace(whole, pipelines=(replace(pipeline, stages=(stage,)),))
    return run_rank(RunRequest(job=spec, plan=plan, until_step=steps), 0, SoloExchange())


def kept_bytes(layers: int, usual: Recompute, *overrides: Override, precision: Precision = "fp32") -> int:
    train = replace(JOB.train, precision=precision)
    spec = replace(JOB, model=replace(JOB.model, layers=layers), train=train)
    return run(spec, usual, *overrides).breakdown[ACTIVATIONS]


def planned_bytes(kind: Recompute, precision: Precision = "fp32") -> float:
    train = JOB.train
    return train.global_batch * block_activation_bytes(JOB.model, train.seq_len, precision, 1, kind)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_keeps_what_is_planned(kind: Recompute, precision: Precision) -> None:
    """In fp32 the plan reckons with kernels that need keys and values for all heads, which this processor's do not."""
    three, two = (kept_bytes(layers, kind, precision=precision) for layers in (3, 2))
    model, train = JOB.model, JOB.train
    copied = 2 * 4 * (model.query_width - model.key_width) if precision == "fp32" and kind != "full" else 0
    assert three - two == planned_bytes(kind, precision) - train.global_batch * train.seq_len * copied


def test_what_a_gpu_took_is_what_is_predicted() -> None:
    """Its recorded peaks, of a whole model on one device. With one micro-batch gradients come into memory that is free
    by then, which plans do not count with."""
    recorded = json.loads(GPU_RUNS.read_text(encoding="utf-8"))["runs"]
    snapshot = cluster(recorded["type"])
    shares: dict[str, float] = {}
    for setting in settings():
        prediction = score(setting.plan, setting.job, snapshot).prediction
        assert prediction is not None
        real_bytes = recorded["steps"][setting.name]["real_bytes"]
        shares[setting.name] = real_bytes / dict(prediction.memory_bytes)["here-0:0"]
        assert (0.78 if setting.micro_batches == 1 else 0.9) < shares[setting.name] <= 1
    assert statistics.median(shares.values()) > 0.93


def test_at_most_one_block_is_whole_where_all_are_run_again() -> None:
    assert kept_bytes(4, "full") <= 4 * planned_bytes("full") + planned_bytes("none")
    both = Override(layers=(1, 3), recompute="full")
    assert kept_bytes(4, "none", both) == kept_bytes(2, "none") + 2 * planned_bytes("full")


def test_recomputing_in_full_does_not_change_a_bit() -> None:
    plain, again = (run(JOB, kind, steps=3) for kind in ("none", "full"))
    assert_same_bits(whole_state(JOB, [plain]), whole_state(JOB, [again]))
    assert plain.losses == again.losses
