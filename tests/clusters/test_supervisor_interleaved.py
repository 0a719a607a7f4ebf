"""A rank that is killed under an interleaved plan whose exchanges overlap: the curve goes on as if it had not been."""

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
from shoal_planner.cluster import ClusterSnapshot, DeviceRef
from shoal_planner.job import JobSpec
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.search import PlanResult
from shoal_recovery.journal import RecoveryDone
from shoal_workers import changer, foresight
from shoal_workers.solo import run_solo

STEPS = 60
CHUNKS = (((0, 1), (2, 3)), ((1, 2), (3, 4)))  # of the two stages of each pipeline


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path, {"a": ("cpu-1t", 2), "b": ("cpu-1t", 2)})
    yield started
    started.close()


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of devices, of both nodes where there are two, is an interleaved pipeline of two stages."""

    def plan(spec: JobSpec, snapshot: ClusterSnapshot, *args: Any, **options: Any) -> PlanResult:
        found = search.plan(spec, snapshot, *args, **{**options, "previous": None})
        devices = [
            DeviceRef(node=node.id, index=index)
            for index in range(max(node.devices for node in snapshot.nodes))
            for node in snapshot.nodes
        ]
        pairs = [devices[first : first + 2] for first in range(0, len(devices), 2)]
        times = spec.train.global_batch // len(pairs)
        pipelines = tuple(Pipeline(micro_batch=1, micro_batches=times, stages=_stages(pair)) for pair in pairs)
        made = Plan(
            pipelines=pipelines,
            schedule="interleaved",
            overlap=Overlap(stages=True),
            copies=found.plan.copies,
        )
        return dataclasses.replace(found, plan=made, change=None)

    for module in (changer, foresight):
        monkeypatch.setattr(module, "search_plan", plan)


def _stages(pair: list[DeviceRef]) -> tuple[Stage, ...]:
    return tuple(
        Stage(layers=chunks, replicas=(Replica(node=device.node, devices=(device.index,), samples=1),))
        for device, chunks in zip(pair, CHUNKS, strict=True)
    )


@pytest.mark.long
def test_a_killed_rank_of_an_interleaved_plan_costs_at_most_one_step(cluster: ProcessCluster) -> None:
    spec = tiny_job(Path(argparse.__file__).as_uri(), steps=STEPS, min_devices=2)
    with supervised(cluster, "chunks", spec) as running:
        running.reaches(5)
        assert running.devices() == {"a", "b"}
        known = len(running.events(RecoveryDone))
        cluster.kill_rank("chunks", "a", 1)
        done = running.recovers(known)
        assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
        assert done.redone_steps <= 1
        running.succeeds()
        losses = running.losses()
    reference = run_solo(spec, STEPS).losses
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert max(abs(losses[step] - loss) / loss for step, loss in enumerate(reference, start=1)) < 1e-4
