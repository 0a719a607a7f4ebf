"""Jobs that their users let rest: stopped after a step, stored, and gone on with elsewhere; over real processes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import Supervised, assert_same_training, supervised, tiny_job

from shoal_planner.job import CheckpointSpec, JobSpec
from shoal_recovery.checkpoints import list_manifests
from shoal_recovery.journal import CheckpointCommitted, JobState, NodeJoined, RecoveryDone, StateChanged, StepDone
from shoal_recovery.store import open_store

SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 2), "c": ("cpu-1t", 1)}
OTHERS = {"x": ("cpu-1t", 1), "y": ("cpu-2t", 1)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path_factory.mktemp("nodes"), SHAPES)
    yield started
    started.close()


def job(folder: Path, *, steps: int, min_devices: int = 3) -> JobSpec:
    path = folder / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    store = CheckpointSpec(uri=(folder / "store").as_uri(), every_steps=1000)
    return tiny_job(path.as_uri(), steps=steps, min_devices=min_devices, checkpoint=store)


def test_a_job_rests_in_its_store_and_goes_on_on_another_cluster(cluster: ProcessCluster, tmp_path: Path) -> None:
    """After the same step on all ranks, which stands in the store before they end; nothing is done again. Whoever comes
    to a job that rests without being told to go on leaves it."""
    spec = job(tmp_path, steps=40)
    with supervised(cluster, "rests", spec) as first:
        first.reaches(5)
        assert first.supervisor.pause(True)
        assert first.ends() is JobState.PAUSED, first.story()
        assert not first.supervisor.pause(False), "it would not be heard any more"
        step = first.step
        assert list_manifests(open_store(str(spec.checkpoint.uri)), "rests") == (step,)
        assert first.reason == f"Paused on request; step {step} stands in {spec.checkpoint.uri}."
        paused = first.events(StateChanged)[-1]
        assert any(isinstance(event, CheckpointCommitted) for event in first.events_before(paused))
        assert not cluster.pids("rests")
        kept = [path for path in cluster.memory_of("a").glob("rests/*") if path.is_file()]
        assert not kept, "its snapshots still take memory"
        again = Supervised(cluster, "rests", spec, restarted=True)
        assert again.ends() is JobState.PAUSED
        assert len(again.supervisor.entries_after(0, 0.0)) == len(first.supervisor.entries_after(0, 0.0))
    other = ProcessCluster(tmp_path / "others", OTHERS)
    history = first.supervisor.entries_after(0, 0.0)
    spec_there = dataclasses.replace(spec, limits=dataclasses.replace(spec.limits, min_devices=2))
    try:
        second = Supervised(other, "rests", spec_there, history=history)
        second.succeeds()
        (done,) = second.events(RecoveryDone)
        assert (done.cause, done.step, done.redone_steps, done.lost_steps) == ("resumed", step, 0, 0)
        assert done.num_bytes["store"] > 0 == done.num_bytes["node"] == done.num_bytes["peer"]
        assert second.devices() == set(OTHERS)
        assert second.epoch.epoch == first.epoch.epoch + 1
        assert {event.node for event in second.events(NodeJoined)} == {*SHAPES, *OTHERS}
        assert_same_training(second, spec)
        assert [event.step for event in second.events(StepDone)] == list(range(1, 41))
    finally:
        other.close()


def test_a_pause_waits_for_a_store_that_takes_nothing_and_can_be_called_off(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    """Training goes on meanwhile."""
    spec = job(tmp_path, steps=100_000)
    blocked = tmp_path / "store"
    blocked.write_text("a file where the folder should be")
    with supervised(cluster, "blocked", spec) as running:
        running.eventually(lambda: running.state is JobState.FAILED or running.step > 3)
        running.supervisor.pause(True)
        running.eventually(lambda: running.code == "pause_waits")
        assert running.reason.startswith("The pause waits for the object store, and training goes on: file://")
        running.steps_on()
        running.supervisor.pause(False)
        running.eventually(lambda: running.code == "running")
        running.steps_on()
        running.supervisor.pause(True)
        blocked.unlink()
        assert running.ends() is JobState.PAUSED
        assert len(running.events(StepDone)) == running.step
        assert list_manifests(open_store(str(spec.checkpoint.uri)), "blocked") == (running.step,)


def test_a_pause_before_the_first_step_and_while_it_waits_for_nodes(cluster: ProcessCluster, tmp_path: Path) -> None:
    """The step that stands in the store is the newest safe one; a job that never began begins when it is resumed."""
    never = job(tmp_path, steps=5, min_devices=9)
    with supervised(cluster, "never", never) as running:
        running.becomes(JobState.WAITING)
        running.supervisor.pause(True)
        assert running.ends() is JobState.PAUSED
        assert running.reason == "Paused on request; no step was done yet."
        begins = Supervised(cluster, "never", job(tmp_path, steps=5), history=running.supervisor.entries_after(0, 0.0))
        begins.succeeds()
        assert_same_training(begins, never)
    spec = job(tmp_path, steps=100_000, min_devices=4)
    with supervised(cluster, "short", spec) as running:
        running.reaches(5)
        cluster.kill_node("c")
        running.becomes(JobState.WAITING)
        running.supervisor.pause(True)
        assert running.ends() is JobState.PAUSED, running.story()
        (stored,) = list_manifests(open_store(str(spec.checkpoint.uri)), "short")
        assert running.step - 1 <= stored <= running.step
    cluster.heal()


@pytest.mark.long
def test_nodes_lost_on_the_way_to_rest_cost_nothing_that_was_done(cluster: ProcessCluster, tmp_path: Path) -> None:
    spec = job(tmp_path, steps=100_000, min_devices=3)
    with supervised(cluster, "lossy", spec) as running:
        running.reaches(5)
        asked = running.supervisor._changer.save
        victims = ["c"]

        def save() -> int | None:
            if victims:
                cluster.kill_node(victims.pop())
            return asked()

        running.supervisor._changer.save = save  # type: ignore[method-assign]
        running.supervisor.pause(True)
        assert running.ends() is JobState.PAUSED, running.story()
        for done in running.events(RecoveryDone):  # none where all was on its way already
            assert (done.nodes_lost, done.redone_steps, done.lost_steps) == (("c",), 0, 0)
        assert not victims
        assert list_manifests(open_store(str(spec.checkpoint.uri)), "lossy") == (running.step,)
    cluster.heal()
