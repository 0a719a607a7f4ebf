"""How long a job waits for its last step to be stored, and what counts as getting on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_cluster import LIFE
from supervised import tiny_job

from shoal_planner.cluster import DeviceRef
from shoal_planner.job import CheckpointSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.journal import JobState, StateChanged
from shoal_workers import messages as m
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.epoch_view import EpochView
from shoal_workers.keeper import Keeper
from shoal_workers.last_step import LastStep
from shoal_workers.record import JobRecord

STEPS, WAIT_S = 5, 100.0
STAGE = Stage(layers=((0, 4),), replicas=(Replica(node="a", devices=(0,)),))
PLAN = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(STAGE,)),))


class Ground:
    """A job that has done its steps in epoch 1 at second 0."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        spec = tiny_job("stdlib:", steps=STEPS, checkpoint=CheckpointSpec(uri=folder.as_uri(), every_steps=100))
        self.record = JobRecord(Keeper("j", lambda: 0.0), lambda: self.now_s)
        for state in (JobState.STARTING, JobState.RUNNING):
            self.record.append(StateChanged(state=state.value, code="", reason=""))
        self.commits = CheckpointCommits("j", spec, LIFE, lambda result: None)
        self.last = LastStep(spec, self.record, self.commits, lambda: self.now_s, WAIT_S)

    def at(self, now_s: float, epoch: int = 1, *, finished: bool = True) -> str:
        self.now_s = now_s
        view = EpochView.begun(epoch, PLAN, None, 0, frozenset({"a"}))  # type: ignore[arg-type]
        if finished:
            view.hear(DeviceRef(node="a", index=0), m.Left(epoch=epoch, step=STEPS, finished=True), now_s)
        return self.last.seen(view)

    def arrives(self, name: str, step: int = STEPS, problem: str | None = None) -> None:
        self.commits.uploaded(m.Uploaded(job="j", step=step, epoch=1, name=name, rows=[], problem=problem))


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    made = Ground(tmp_path)
    yield made
    made.commits.close()


def test_it_is_waited_for_as_long_as_anything_new_arrives(ground: Ground) -> None:
    """An older step that is on its way before it is as good; what is brought again is not."""
    assert ground.at(0.0) == "coming"
    ground.arrives("x", step=4)
    assert ground.at(90.0) == "coming"
    ground.arrives("x")
    assert ground.at(180.0) == "coming"
    for second in (210.0, 240.0, 270.0):
        ground.commits.try_again(1, STEPS)
        ground.arrives("x")
        ground.arrives("y", problem="the disk is full")
        assert ground.at(second) != "never"
    assert ground.at(281.0) == "never"


@pytest.mark.parametrize(
    "between",
    [
        lambda ground: ground.at(150.0, 2, finished=False),
        lambda ground: ground.last.seen(None),
        lambda ground: None,
    ],
    ids=["it steps again", "it waits for nodes", "a change of plan"],
)
def test_the_clock_begins_anew_with_a_plan(ground: Ground, between: Callable[[Ground], object]) -> None:
    assert ground.at(0.0) == "coming"
    between(ground)
    assert ground.at(1000.0, 2) == "missing"
    assert ground.at(1099.0, 2) == "missing"
    assert ground.at(1101.0, 2) == "never"


def test_a_recovery_takes_its_time(ground: Ground) -> None:
    assert ground.at(0.0) == "coming"
    ground.record.append(StateChanged(state=JobState.RECOVERING.value, code="", reason=""))
    assert ground.at(5000.0) == "coming"


def test_a_job_whose_last_step_is_stored_needs_no_plan(ground: Ground) -> None:
    """It had to wait for nodes while that was brought."""
    assert ground.last.ended(None) is None
    ground.record.checkpoints.add(STEPS)
    assert ground.last.ended(None) is None, "that was not done in the history that counts"
    ground.record.starts[1] = STEPS
    ground.record.plans[1] = PLAN
    assert ground.last.ended(None) == "finished"
    assert ground.last.seen(None) == "safe"
