"""The wish of a user that the newest step goes to the object store now, while training goes on.

A step is brought to the store by the agents, as its snapshots are sealed, so they have to know of it before it is done:
the step that is asked for lies a little ahead. Where that was too little for one of them, or a change of plan came in
between, another one is asked for. Owns that wish; what arrives is `CheckpointCommits`' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from shoal_planner.job import JobSpec
from shoal_recovery.journal import CheckpointAsked, JobState
from shoal_workers.epoch_view import EpochView
from shoal_workers.messages import AlsoUpload
from shoal_workers.record import JobRecord

_AHEAD_S = 1.0
_LATE_STEPS = 20
_LATE_S = 15.0


class _Agent(Protocol):
    def send(self, message: object) -> None: ...


class SaveNow:
    """`want` may be called by any thread, everything else by one."""

    def __init__(self, job: str, spec: JobSpec, record: JobRecord, clock: Callable[[], float]) -> None:
        self._job, self._spec, self._record, self._clock = job, spec, record, clock
        self._number = 0
        self._ordered: tuple[int, int] | None = None  # the epoch and the step that its agents were told of
        self._ordered_s = 0.0

    def want(self, number: int) -> None:
        """For the `number`th time; it is said again until the job is over."""
        self._number = max(self._number, number)

    def look(self, epoch: EpochView | None, agents: Callable[[frozenset[str]], Iterable[_Agent]]) -> None:
        """To be called often. `agents` are those of nodes."""
        if epoch is None or self._record.state is not JobState.RUNNING:
            return
        asked = self._record.asked
        if self._number > (0 if asked is None else asked.number):
            step = self._ahead(epoch)
            self._record.append(CheckpointAsked(number=self._number, step=step))
            self._order(epoch, step, agents)
        elif asked is not None and self._lacks(asked) and self._is_lost(epoch):
            self._order(epoch, self._ahead(epoch), agents)

    def _lacks(self, asked: CheckpointAsked) -> bool:
        """As long as no step that is as new stands there."""
        return max(self._record.checkpoints, default=0) < asked.step and self._record.store_failed is None

    def _is_lost(self, epoch: EpochView) -> bool:
        if self._ordered is None or self._ordered[0] != epoch.number:
            return True
        return epoch.last_step > self._ordered[1] + _LATE_STEPS and self._clock() - self._ordered_s > _LATE_S

    def _ahead(self, epoch: EpochView) -> int:
        recent = sorted(self._record.recent_steps_s)
        step_s = recent[len(recent) // 2] if recent else _AHEAD_S
        ahead = 2 + math.ceil(_AHEAD_S / max(step_s, 1e-3))
        every = self._spec.checkpoint.protect_every  # of other steps there are no snapshots
        step = -(-(max(epoch.last_step, epoch.step) + ahead) // every) * every
        return min(step, self._spec.train.steps)

    def _order(self, epoch: EpochView, step: int, agents: Callable[[frozenset[str]], Iterable[_Agent]]) -> None:
        self._ordered, self._ordered_s = (epoch.number, step), self._clock()
        for agent in agents(epoch.vital):
            agent.send(AlsoUpload(job=self._job, step=step))
