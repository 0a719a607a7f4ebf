"""Which done steps are brought to safety, held to the plain enumeration of all that are due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_recovery.protection import Protection


@given(
    every=st.integers(1, 12),
    stored_every=st.none() | st.integers(1, 12),
    last_step=st.integers(1, 60),
    since=st.integers(0, 60),
    ran=st.integers(0, 60),
)
def test_the_newest_step_is_the_last_of_all_that_are_due(
    every: int, stored_every: int | None, last_step: int, since: int, ran: int
) -> None:
    since = min(since, last_step)
    step = min(since + ran, last_step)
    protection = Protection(every=every, stored_every=stored_every, last_step=last_step)
    due = [since, *(number for number in range(since + 1, step + 1) if protection.is_due(number))]
    assert protection.newest(step, since) == max(due)
    assert step - max(due) < every


@pytest.mark.parametrize(
    ("checkpoint", "due"),
    [
        (CheckpointSpec(), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (CheckpointSpec(protect_every=4), [4, 8, 9]),
        (CheckpointSpec(protect_every=4, uri="file:///x", every_steps=3), [3, 4, 6, 8, 9]),
    ],
)
def test_a_job_says_which_are_due(checkpoint: CheckpointSpec, due: list[int]) -> None:
    job = JobSpec(
        name="j",
        model=ModelSpec(layers=1, hidden=8, heads=1, ffn=8, vocab=256),
        data=DataSpec(uri="stdlib:"),
        train=TrainSpec(global_batch=1, seq_len=4, steps=9),
        checkpoint=checkpoint,
    )
    assert [step for step in range(1, 10) if Protection.of(job).is_due(step)] == due
