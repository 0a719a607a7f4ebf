"""A rank that is killed under a plan that splits everything: the others go on with what they keep and own, and training
is that of one process."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job

from shoal_planner import search
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import JobSpec
from shoal_planner.levels import Sharding
from shoal_planner.plan import Override, Pipeline, Plan, Replica, Stage
from shoal_planner.search import PlanResult
from shoal_recovery.journal import RecoveryDone, StepDone
from shoal_workers import changer, foresight
from shoal_workers.solo import run_solo

SPLIT = Sharding(weights="node", gradients="node")
# What one process keeps of it changes with who is left: whole copies with all who hold them, then parts of them.
WHOLE = Sharding(weights="cluster", optimizer="none")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path, {"a": ("cpu-1t", 2), "b": ("cpu-1t", 2)})
    yield started
    started.close()


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices are one stage and split its state, in one way or the other as they are many or few. The last of many
    only holds its part, and many have some on their hosts."""

    def plan(spec: JobSpec, snapshot: ClusterSnapshot, *args: Any, **options: Any) -> PlanResult:
        found = search.plan(spec, snapshot, *args, **{**options, "previous": None})
        devices = [(node.id, device) for node in snapshot.nodes for device in range(node.devices)]
        samples = [2, 1, 1, 0] if len(devices) == 4 else [1] * 2
        replicas = tuple(
            Replica(node=node, devices=(device,), samples=count, state_share=1.0 + device)
            for (node, device), count in zip(devices, samples, strict=True)
        )
        hosted = (Override(layers=(1, 3), offload="optimizer"),) if len(devices) == 4 else ()
        stage = Stage(layers=((0, spec.model.layers),), replicas=replicas, overrides=hosted)
        size = sum(samples)
        pipeline = Pipeline(micro_batch=size, micro_batches=spec.train.global_batch // size, stages=(stage,))
        made = Plan(pipelines=(pipeline,), sharding=SPLIT if len(devices) == 4 else WHOLE, copies=found.plan.copies)
        return dataclasses.replace(found, plan=made, change=None)

    for module in (changer, foresight):
        monkeypatch.setattr(module, "search_plan", plan)


def test_a_killed_rank_of_a_split_plan_costs_at_most_one_step(cluster: ProcessCluster) -> None:
    """To the plan of those who are left, and back to all: weights come from the masters of whoever has them, and state
    goes from hosts to devices and back."""
    spec = tiny_job(Path(argparse.__file__).as_uri(), steps=60, min_devices=2)
    with supervised(cluster, "split", spec) as running:
        running.reaches(5)
        assert running.devices() == {"a", "b"}
        known = len(running.events(RecoveryDone))
        cluster.kill_rank("split", "a", 1)
        done = running.recovers(known)
        assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
        assert done.redone_steps <= 1
        assert done.num_bytes["own"] > 0
        running.succeeds()
        losses = running.losses()
        assert {link for step in running.events(StepDone) for link, _ in step.moved_bytes} == {"node", "zone"}
    reference = run_solo(spec, 60).losses
    assert sorted(losses) == list(range(1, 61))
    assert max(abs(losses[step] - loss) / loss for step, loss in enumerate(reference, start=1)) < 1e-4
