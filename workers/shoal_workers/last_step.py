"""The end of a job waits until its last step stands in the object store: with its nodes all that it trained would go.

Owns how far that has come, and what the job says of it; what follows is decided in `decide`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from shoal_planner.job import JobSpec
from shoal_recovery.journal import JobState
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.epoch_view import EpochView
from shoal_workers.record import JobRecord

_SAY_AFTER_S = 3.0
_SAVE_AGAIN_S, _LONGEST_PAUSE_S = 5.0, 60.0


class LastStep:
    """`wait_s` without anything new arriving in the store is how long the job waits. Use from one thread."""

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        commits: CheckpointCommits,
        clock: Callable[[], float],
        wait_s: float,
    ) -> None:
        self._uri = spec.checkpoint.uri
        self._step = spec.train.steps
        self._record = record
        self._commits = commits
        self._clock = clock
        self._wait_s = wait_s
        self._began_s: float | None = None
        self._moved_s = 0.0
        self._mark: tuple[int, int] | None = None
        self._epoch = 0
        self._saving_s = -math.inf
        self._pause_s = _SAVE_AGAIN_S

    def ended(self, epoch: EpochView | None) -> Literal["finished", "stopped"] | None:
        """How the epoch ended: what it did is safe then. Where the last step is stored, nobody is needed any more."""
        if epoch is None:
            over = self._record.newest_step == self._step and self._step in self._record.checkpoints
            return "finished" if over else None
        if epoch.ended is not None:
            self._commits.safe(epoch.last_step)
        return epoch.ended

    def seen(self, epoch: EpochView | None) -> Literal["safe", "coming", "missing", "never"]:
        """Of a job whose ranks have done all steps. `missing`: nobody is about to bring it, for it could not be
        brought, or who was to bring it is gone."""
        if epoch is None or epoch.ended != "finished" or self._uri is None or self._step in self._record.checkpoints:
            self._mark = None
            return "safe"
        now_s = self._clock()
        if self._began_s is None:
            self._began_s, self._epoch = now_s, epoch.number
        mark = epoch.number, self._commits.num_arrived
        if mark != self._mark or self._record.state is JobState.RECOVERING:
            self._mark, self._moved_s = mark, now_s
        if now_s - self._moved_s > self._wait_s:
            return "never"
        if now_s - self._began_s > _SAY_AFTER_S and self._record.state is JobState.RUNNING:
            reason = f"All steps are done; step {self._step}, the last one, is on its way to {self._uri}."
            self._record.say("storing_last_step", reason)
        if epoch.number != self._epoch:
            return "missing"
        may_try = now_s - self._saving_s >= self._pause_s
        return "missing" if may_try and self._commits.settled(self._step) else "coming"

    @property
    def told(self) -> str:
        """What became of it where it never came."""
        failed = self._record.store_failed
        why = "" if failed is None else f" ({failed.problem})"
        return f"step {self._step}, the last one, could not be brought to {self._uri}{why}"

    def saves(self, epoch: EpochView | None) -> None:
        """It was ordered from whoever holds it."""
        self._saving_s, self._pause_s = self._clock(), min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._epoch = self._epoch if epoch is None else epoch.number
