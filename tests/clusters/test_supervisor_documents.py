"""A job that sees each document by itself loses the node in the middle of its pipeline: those who take over its layers
find the same documents, and the curve goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from document_ground import write
from process_cluster import ProcessCluster
from supervised import assert_same_training, supervised, tiny_job

from shoal_planner import search
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import JobSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.search import PlanResult
from shoal_recovery.journal import RecoveryDone
from shoal_workers import changer, foresight
from shoal_workers.solo import run_solo

STEPS = 40
LAYERS = {1: ((0, 4),), 2: ((0, 1), (1, 4)), 3: ((0, 1), (1, 2), (2, 4))}  # of each stage, by the number of nodes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path / "nodes", {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1)})
    yield started
    started.close()


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pipeline of all nodes, a stage on each."""

    def plan(spec: JobSpec, snapshot: ClusterSnapshot, *args: Any, **options: Any) -> PlanResult:
        found = search.plan(spec, snapshot, *args, **{**options, "previous": None})
        stages = tuple(
            Stage(layers=(layers,), replicas=(Replica(node=node.id, devices=(0,), samples=1),))
            for node, layers in zip(snapshot.nodes, LAYERS[len(snapshot.nodes)], strict=True)
        )
        pipeline = Pipeline(micro_batch=1, micro_batches=spec.train.global_batch, stages=stages)
        return dataclasses.replace(found, plan=Plan(pipelines=(pipeline,), copies=found.plan.copies), change=None)

    for module in (changer, foresight):
        monkeypatch.setattr(module, "search_plan", plan)


def test_a_lost_node_leaves_losses_as_they_were(cluster: ProcessCluster, tmp_path: Path) -> None:
    tiny = tiny_job("stdlib:", steps=STEPS, min_devices=2)
    train = dataclasses.replace(tiny.train, lr=1e-2)  # so that it soon matters what attention sees
    spec = dataclasses.replace(tiny, data=write(tmp_path / "data"), train=train)
    with supervised(cluster, "apart", spec) as running:
        running.reaches(8)
        assert running.devices() == {"a", "b", "c"}
        cluster.kill_node("b")
        done = running.recovers()
        assert (done.lost_steps, running.devices()) == (0, {"a", "c"})
        running.succeeds()
        assert_same_training(running, spec)
        across = dataclasses.replace(spec, data=dataclasses.replace(spec.data, attention="sequence"))
        others = run_solo(across, STEPS).losses
        assert max(abs(loss - others[step - 1]) for step, loss in running.losses().items()) > 0.01
        assert len(running.events(RecoveryDone)) == 1
