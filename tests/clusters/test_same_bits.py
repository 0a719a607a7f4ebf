"""Where the order of sums is the same before and after a recovery, so is every bit of the losses."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job

from shoal_planner.plan import parse_plan
from shoal_recovery.journal import PlanAdopted, RecoveryDone
from shoal_workers.exchange import SoloExchange
from shoal_workers.solo import RunRequest, run_rank


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_after_a_recovery_are_those_of_the_undisturbed_run_to_the_bit(tmp_path: Path, precision: str) -> None:
    text = tmp_path / "text"
    text.write_bytes(Path(argparse.__file__).read_bytes())
    spec = tiny_job(text.as_uri(), steps=60)
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, precision=precision))
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1)})
    try:
        with supervised(cluster, "bits", spec) as running:
            for step in (10, 30):
                running.reaches(step)
                known = len(running.events(RecoveryDone))
                cluster.kill_rank("bits", "a")
                running.recovers(known)
            running.succeeds()
            plans = {adopted.plan["plan_id"]: parse_plan(adopted.plan) for adopted in running.events(PlanAdopted)}
            (plan,) = plans.values()
            alone = run_rank(RunRequest(job=spec, plan=plan, until_step=spec.train.steps), 0, SoloExchange())
            assert running.losses() == dict(enumerate(alone.losses, start=1))
    finally:
        cluster.close()
