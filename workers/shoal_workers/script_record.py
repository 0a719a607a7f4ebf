"""The history of a job of kind `ray_train` as its supervisor keeps it. As in JobRecord, all comes from the journal."""

from __future__ import annotations

from collections.abc import Callable

from shoal_recovery.journal import Entry
from shoal_recovery.journal_scripts import (
    CheckpointReported,
    ScriptPrinted,
    ScriptReported,
    ScriptStarted,
    WorkersStarted,
)
from shoal_workers.keeper import Keeper
from shoal_workers.record import JobRecord


class ScriptRecord(JobRecord):
    """`step` is the newest that counts, `stored_step` the newest of them that has a checkpoint, `stored` which step
    each checkpoint is of. `workers` are those that were started last since the script was, on node `seat`."""

    def __init__(self, keeper: Keeper, clock: Callable[[], float]) -> None:
        super().__init__(keeper, clock)
        self.attempt = 0
        self.seat = ""
        self.num_lines = 0
        self.workers: WorkersStarted | None = None
        self.step = 0
        self.stored_step = 0
        self.stored: dict[str, int] = {}
        self.begun_at: dict[int, int] = {}  # the step that each of the script's trainers began at
        self.steps_since_launch = 0
        self.last_epoch = 0

    def _note(self, entry: Entry) -> None:
        super()._note(entry)
        match entry.event:
            case ScriptStarted(attempt=attempt, node=node):
                self.attempt, self.seat = attempt, node
                self.workers, self.num_lines, self.steps_since_launch = None, 0, 0
            case ScriptPrinted(lines=lines, left_out=left_out):
                self.num_lines += len(lines) + left_out
            case WorkersStarted() as event:
                self.workers, self.last_epoch, self.step = event, event.epoch, event.step
                self.stored_step = 0 if event.checkpoint is None else event.step
                self.begun_at.setdefault(event.trainer, event.step)
            case ScriptReported(step=step):
                self.step = step
                self.steps_since_launch += 1
            case CheckpointReported(step=step, uri=uri):
                self.stored[uri], self.stored_step = step, step
            case _:
                pass
