"""A job that has done all its steps is over when the last one stands in its store, and not before; real processes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import assert_same_training, supervised, tiny_job

from shoal_planner.job import CheckpointSpec, JobSpec
from shoal_recovery.checkpoints import list_manifests
from shoal_recovery.journal import CheckpointFailed, RecoveryDone, StepDone
from shoal_recovery.store import open_store

SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1)}
STEPS = 10


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path / "nodes", SHAPES)
    yield started
    started.close()


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A file where the folder of the store should be."""
    path = tmp_path / "store"
    path.write_text("in the way")
    return path


def job(folder: Path, store: Path) -> JobSpec:
    path = folder / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    checkpoint = CheckpointSpec(uri=store.as_uri(), every_steps=1000)
    return tiny_job(path.as_uri(), steps=STEPS, min_devices=2, checkpoint=checkpoint)


def test_a_job_is_not_over_before_its_last_step_is_stored(
    cluster: ProcessCluster, tmp_path: Path, blocked: Path
) -> None:
    """It could not be stored, its owner dies, and then the store works again: what others hold is brought there."""
    spec = job(tmp_path, blocked)
    with supervised(cluster, "ends", spec) as running:
        running.reaches(STEPS)
        running.eventually(lambda: running.code == "storing_last_step")
        assert f"step {STEPS}, the last one, is on its way to {spec.checkpoint.uri}" in running.reason
        running.eventually(lambda: running.events(CheckpointFailed))
        assert not running.supervisor.ended.is_set()
        gone = sorted(running.devices())[0]
        cluster.kill_node(gone)
        running.recovers()
        blocked.unlink()
        running.succeeds()
        assert list_manifests(open_store(str(spec.checkpoint.uri)), "ends") == (STEPS,)
        (recovery,) = running.events(RecoveryDone)
        assert (recovery.step, recovery.redone_steps, recovery.lost_steps) == (STEPS, 0, 0)
        assert len(running.events(StepDone)) == STEPS
        assert_same_training(running, spec)
