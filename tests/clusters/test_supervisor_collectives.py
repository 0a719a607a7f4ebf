"""Jobs whose plans name algorithms for their gradients go on when a rank is killed, by another algorithm or none."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from process_cluster import ProcessCluster
from supervised import Supervised, supervised, tiny_job

from shoal_planner import search
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.groups import Group
from shoal_planner.job import DataSpec, JobSpec, LimitsSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, parse_plan
from shoal_planner.search import PlanResult
from shoal_recovery.journal import PlanAdopted, RecoveryDone
from shoal_workers import changer, foresight
from shoal_workers.solo import run_solo

TEXT = Path(argparse.__file__).as_uri()
NAMES = {4: "tree: parameter_server 2 > halving_doubling 2", 2: "ring"}


def all_alike(spec: JobSpec, snapshot: ClusterSnapshot, *args: Any, **options: Any) -> PlanResult:
    """A pipeline on every device, whose algorithm depends on how many there are."""
    found = search.plan(spec, snapshot, *args, **{**options, "previous": None})
    devices = [(node.id, device) for node in snapshot.nodes for device in range(node.devices)]
    pipelines = tuple(
        Pipeline(
            micro_batch=1,
            micro_batches=spec.train.global_batch // len(devices),
            stages=(
                Stage(
                    layers=((0, spec.model.layers),),
                    replicas=(Replica(node=node, devices=(device,), state_share=1.0 + number),),
                ),
            ),
        )
        for number, (node, device) in enumerate(devices)
    )
    groups = (Group(layers=(0, spec.model.layers), collective=NAMES[len(devices)]),)
    made = Plan(pipelines=pipelines, groups=groups, copies=found.plan.copies)
    return dataclasses.replace(found, plan=made, change=None)


def test_a_killed_rank_changes_the_algorithm_and_costs_at_most_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (changer, foresight):
        monkeypatch.setattr(module, "search_plan", all_alike)
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 2), "b": ("cpu-1t", 2)})
    try:
        spec = tiny_job(TEXT, steps=20, min_devices=2)
        with supervised(cluster, "named", spec) as running:
            running.reaches(3)
            known = len(running.events(RecoveryDone))
            cluster.kill_rank("named", "a", 1)
            done = running.recovers(known)
            assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
            assert done.redone_steps <= 1
            running.succeeds()
            assert {NAMES[4], NAMES[2]} <= set(collectives(running))
            check_losses(running)
    finally:
        cluster.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_the_search_chooses_for_nine_devices_runs_and_goes_on_with_six(tmp_path: Path) -> None:
    cluster = ProcessCluster(tmp_path, {name: ("cpu-1t", 3) for name in "abc"})
    try:
        spec = JobSpec(
            name="nine",
            model=ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=256),
            data=DataSpec(uri=TEXT),
            train=TrainSpec(global_batch=90, seq_len=128, steps=12, warmup_steps=5, sharding="none"),
            limits=LimitsSpec(min_devices=6),
        )
        with supervised(cluster, "nine", spec) as running:
            running.reaches(2)
            assert collectives(running)[-1].startswith("tree: ")
            known = len(running.events(RecoveryDone))
            cluster.kill_node("b")
            assert running.recovers(known).lost_steps == 0
            running.succeeds()
            assert len(running.devices()) == 2
            check_losses(running)
    finally:
        cluster.close()


def collectives(running: Supervised) -> list[str]:
    """What each plan names for its first layer."""
    plans = [parse_plan(event.plan) for event in running.events(PlanAdopted)]
    return [next((group.collective for group in plan.groups if group.layers[1]), "direct") for plan in plans]


def check_losses(running: Supervised) -> None:
    reference = run_solo(running.spec, running.spec.train.steps).losses
    losses = running.losses()
    assert sorted(losses) == list(range(1, len(reference) + 1))
    assert max(abs(losses[step] - loss) / loss for step, loss in enumerate(reference, start=1)) < 1e-4
