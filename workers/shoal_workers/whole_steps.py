"""Tells agents which checkpoint is the newest that is whole in the object store. What they have of it stays on their
disks until a newer one is: a job that goes back to it then reads only that from the store which no survivor has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from shoal_workers.epoch_view import EpochView
from shoal_workers.messages import StoreHolds
from shoal_workers.record import JobRecord


class _Agent(Protocol):
    def send(self, message: object) -> None: ...


class WholeSteps:
    """Of one job. Use from one thread."""

    def __init__(self, job: str, record: JobRecord) -> None:
        self._job, self._record = job, record
        self._told: tuple[int, int] | None = None  # the epoch whose agents know of the step, and the step

    def look(self, epoch: EpochView | None, agents: Callable[[frozenset[str]], Iterable[_Agent]]) -> None:
        """To be called often. `agents` are those of nodes."""
        step = max(self._record.checkpoints, default=0)
        if epoch is None or not step or self._told == (epoch.number, step):
            return
        self._told = (epoch.number, step)
        for agent in agents(epoch.vital):
            agent.send(StoreHolds(job=self._job, step=step))
