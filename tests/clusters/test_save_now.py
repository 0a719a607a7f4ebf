"""A checkpoint that a user asks for: the newest step goes to the object store, and training goes on meanwhile."""

from __future__ import annotations

from pathlib import Path

from process_cluster import ProcessCluster
from supervised import Supervised, tiny_job

from shoal_planner.job import CheckpointSpec
from shoal_recovery.checkpoints import list_manifests
from shoal_recovery.journal import CheckpointAsked, CheckpointCommitted, JobState, PlanAdopted, StateChanged
from shoal_recovery.store import open_store


def test_the_newest_step_is_stored_when_it_is_asked_for_and_training_goes_on(tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)})
    spec = tiny_job("stdlib:", steps=1_000_000, checkpoint=CheckpointSpec(uri=uri, every_steps=900_000))
    running = Supervised(cluster, "job_1", spec)
    try:
        running.reaches(2)
        assert not running.events(CheckpointCommitted)
        for number in (1, 2):
            running.supervisor.checkpoint(number)
            running.supervisor.checkpoint(number)  # said again, as a connector does
            running.eventually(lambda number=number: len(running.events(CheckpointCommitted)) == number)
        asked = running.events(CheckpointAsked)
        assert [event.number for event in asked] == [1, 2]
        stored = [event.step for event in running.events(CheckpointCommitted)]
        assert all(at >= event.step for at, event in zip(stored, asked, strict=True))
        assert set(list_manifests(open_store(uri), "job_1")) == set(stored)
        running.reaches(stored[-1] + 2)
        assert {event.state for event in running.events(StateChanged)} == {"starting", "running"}
        assert len(running.events(PlanAdopted)) == 1
        # A supervisor that comes after this one knows which wishes were obeyed.
        running.vanish()
        after = Supervised(cluster, "job_1", spec, restarted=True)
        running = after
        after.supervisor.checkpoint(2)
        after.steps_on()
        assert [event.number for event in after.events(CheckpointAsked)] == [1, 2]
        assert after.state is JobState.RUNNING
    finally:
        running.supervisor.cancel()
        running.supervisor.ended.wait(20.0)
        cluster.close()
