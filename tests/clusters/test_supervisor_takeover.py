"""A job that goes on in another life of a cluster, while the one that had it may be dead, or only not heard of."""

from __future__ import annotations

import argparse
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import WAIT_S, Supervised, supervised, tiny_job

from shoal_planner.job import CheckpointSpec, JobSpec
from shoal_recovery import tenure
from shoal_recovery.checkpoints import list_manifests, load_manifest
from shoal_recovery.journal import (
    CheckpointCommitted,
    CheckpointFailed,
    ClusterEntered,
    JobState,
    NodeJoined,
    PlanAdopted,
    RecoveryDone,
    StepDone,
)
from shoal_recovery.store import open_store
from shoal_workers import supervisor
from shoal_workers.nodes import NodeSeen
from shoal_workers.solo import run_solo

SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 1)}


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[tuple[ProcessCluster, ProcessCluster]]:
    """Two lives of one cluster, or two clusters: with nodes of the same names, and nothing else in common."""
    found = ProcessCluster(tmp_path / "old", SHAPES), ProcessCluster(tmp_path / "new", SHAPES)
    yield found
    for each in found:
        each.close()


def job(folder: Path, steps: int, every_steps: int) -> JobSpec:
    path = folder / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    store = CheckpointSpec(uri=(folder / "store").as_uri(), every_steps=every_steps, keep=1000)
    return tiny_job(path.as_uri(), steps=steps, min_devices=2, checkpoint=store)


@pytest.mark.long
def test_two_clusters_never_both_store_the_same_job(
    clusters: tuple[ProcessCluster, ProcessCluster], tmp_path: Path
) -> None:
    """The old one lives on and trains, until it would store something: then it ends what it has of the job."""
    old, new = clusters
    spec = job(tmp_path, 60_000, 5)
    store = open_store(str(spec.checkpoint.uri))
    with supervised(old, "both", spec) as first:
        first.eventually(lambda: len(first.events(CheckpointCommitted)) >= 2)
        history = first.supervisor.entries_after(0, 0.0)
        short = dataclasses.replace(spec, train=dataclasses.replace(spec.train, steps=history_step(history) + 150))
        second = Supervised(new, "both", short, history=history)
        done = second.recovers()
        assert done.cause == "resumed"
        assert done.num_bytes["store"] > 0 == done.num_bytes["node"] == done.num_bytes["peer"]
        assert second.epoch.epoch == 1000, "objects of the two would have the same names"
        first.eventually(first.supervisor.ended.is_set)
        assert not old.pids("both")
        assert "another cluster has taken the job over" in first.events(CheckpointFailed)[-1].problem
        last = first.events(CheckpointCommitted)[-1].step
        second.succeeds()
        assert tenure.holder(store, "both") == (2, new.life())
        entered = [(event.cluster, event.incarnation) for event in second.events(ClusterEntered)]
        assert entered == [(life.cluster, life.incarnation) for life in (old.life(), new.life())]
        for step in list_manifests(store, "both"):
            epoch = load_manifest(store, "both", step).epoch
            assert epoch == 1000 or step <= last
        # Of steps that the old one stored unheard nobody here knows the loss; all others are those of one training.
        losses, reference = second.losses(), run_solo(short, short.train.steps).losses
        assert set(losses) >= {*range(1, history_step(history) + 1), *range(done.step + 1, short.train.steps + 1)}
        assert all(abs(loss / reference[step - 1] - 1) < 1e-4 for step, loss in losses.items())


def history_step(history: tuple[object, ...]) -> int:
    return max(entry.event.step for entry in history if isinstance(entry.event, StepDone))  # type: ignore[attr-defined]


def test_a_job_that_was_begun_never_begins_again_by_itself(
    clusters: tuple[ProcessCluster, ProcessCluster], tmp_path: Path
) -> None:
    """Nothing of it stands in the store, and nobody here has it: it waits, and says so; and goes on when they are back
    who do."""
    old, new = clusters
    spec = job(tmp_path, 100_000, 50_000)
    with supervised(old, "waits", spec) as first:
        first.reaches(5)
        first.vanish()
    history = first.supervisor.entries_after(0, 0.0)
    with supervised(new, "waits", spec, history=history) as second:
        second.becomes(JobState.WAITING)
        assert second.code == "state_lost"
        assert second.reason.endswith("Waiting for nodes that have it.")
        assert len(second.events(PlanAdopted)) == len(first.events(PlanAdopted))
    assert not list_manifests(open_store(str(spec.checkpoint.uri)), "waits")


class SlowToCome(ProcessCluster):
    """Ranks of one node take long to start."""

    slow = "c"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {**SHAPES, self.slow: ("cpu-1t", 1)})
        self.come = threading.Event()

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        if seen.node.id == self.slow:
            self.come.wait()
        return super().rank(seen, job, index)


def test_an_epoch_is_taken_over_without_a_node_that_is_on_its_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_ADOPT_WAIT_S", 2 * WAIT_S)  # so a supervisor that waits for it is seen to
    cluster = SlowToCome(tmp_path)
    spec = job(tmp_path, 100_000, 50_000)
    cluster.kill_node(cluster.slow)
    try:
        with supervised(cluster, "coming", spec) as first:
            first.reaches(5)
            first.vanish()
            seen, epoch = first.step, first.epoch.epoch
            cluster.bring_back(cluster.slow)
            second = Supervised(cluster, "coming", spec, restarted=True)
            second.reaches(seen + 5)
            assert second.epoch.epoch == epoch
            cluster.come.set()
            second.eventually(lambda: cluster.slow in {event.node for event in second.events(NodeJoined)})
            second.supervisor.cancel()
            assert second.ends() is JobState.CANCELLED
    finally:
        cluster.come.set()
        cluster.close()


def test_what_survived_in_the_folders_of_the_nodes_is_gone_on_from(tmp_path: Path) -> None:
    """The head is another one, every process is new; the nodes still have what their agents kept, and the journal."""
    spec = job(tmp_path, 100_000, 50_000)
    old = ProcessCluster(tmp_path / "nodes", SHAPES)
    with supervised(old, "disks", spec) as first:
        first.reaches(5)
        first.vanish()
        known = first.supervisor.entries_after(0, 0.0)[:5]  # the control plane has not heard of the rest
        seen = first.step
        old.kill_node(*SHAPES, wipe=False)
    old.close()
    new = ProcessCluster(tmp_path / "nodes", SHAPES)
    try:
        with supervised(new, "disks", spec, history=known) as second:
            done = second.recovers()
            assert done.lost_steps == 0 and done.redone_steps <= 1
            assert done.num_bytes["store"] == 0 < done.num_bytes["node"]
            assert second.epoch.step >= seen - 1
            assert len([event for event in second.events(RecoveryDone)]) == 1
            second.steps_on()
    finally:
        new.close()
