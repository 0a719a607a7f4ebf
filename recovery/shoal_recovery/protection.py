"""Which done steps are brought to safety before the step after the next begins. Pure.

Every step is the rule. Where a job says that every so-many-th is enough, those in between are lost with any node that
alone has a part of the state: so many steps are done again at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from shoal_planner.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Steps that are multiples of `every`, those of which the object store gets a checkpoint (`stored_every`; None:
    none does), and the last. Where an epoch begins and ends is brought to safety whatever its number is."""

    every: int
    stored_every: int | None
    last_step: int

    @classmethod
    def of(cls, job: JobSpec) -> Self:
        stored = job.checkpoint.every_steps if job.checkpoint.uri is not None else None
        return cls(every=job.checkpoint.protect_every, stored_every=stored, last_step=job.train.steps)

    def is_due(self, step: int) -> bool:
        stored = self.stored_every is not None and step % self.stored_every == 0
        return step % self.every == 0 or stored or step == self.last_step

    def newest(self, step: int, since: int) -> int:
        """The newest step up to `step` that is due, in an epoch that began `since` that one."""
        if step >= self.last_step:
            return self.last_step
        stored = 0 if self.stored_every is None else step // self.stored_every * self.stored_every
        return max(min(since, step), step // self.every * self.every, stored)
