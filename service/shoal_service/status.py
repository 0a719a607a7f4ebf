"""What a job's journal says of it: a frozen Status, and how each entry advances it. Pure; the database is jobs.py's."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import assert_never

from shoal_recovery.journal import (
    TERMINAL,
    TRANSITIONS,
    CheckpointAsked,
    CheckpointCommitted,
    CheckpointFailed,
    ClusterEntered,
    Entry,
    EvaluationDone,
    FiguresMeasured,
    JobState,
    ModelSeen,
    NodeJoined,
    NodeLost,
    NodeNoticed,
    NodeRecovered,
    NodeSlowed,
    NodeStays,
    NoticeEnded,
    PlanAdopted,
    PredictionChecked,
    RecoveryDone,
    RoomShort,
    StateChanged,
    StepDone,
    StepSkipped,
    StoreFailed,
    StoreRecovered,
)
from shoal_recovery.journal_scripts import (
    CheckpointReported,
    ScriptFailed,
    ScriptPrinted,
    ScriptReported,
    ScriptStarted,
    TrainerAdjusted,
    WorkersStarted,
)
from shoal_recovery.journal_shares import ShareChanged, ShareTaken
from shoal_service.shapes_jobs import Exchanges

_NEWEST_SHARE = 0.2  # weight of the newest step in the smoothed step time: about five steps of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`step` is the newest done step of the branch that counts, `loss` that of the newest one that was not skipped;
    `eval_step`, `eval_loss` and `eval_s` (how long it took) are of the newest evaluation. `step_s` and `tokens_per_s`
    are smoothed. `exchanges` is what ranks exchanged in the newest step, as REST shows it. `skipped_steps` counts those
    of the branch that counts, once `journal.append` is through: what is rolled back is found in the database.
    `store_problem` says why the object store takes no checkpoints at present."""

    state: JobState
    state_code: str
    reason: str
    since_at_s: float
    last_seq: int = 0
    step: int = 0
    epoch: int = 0
    loss: float | None = None
    eval_step: int | None = None
    eval_loss: float | None = None
    eval_s: float | None = None
    exchanges: Exchanges | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    plan_id: str | None = None
    plan_seq: int | None = None
    num_recoveries: int = 0
    redone_steps: int = 0
    lost_steps: int = 0
    skipped_steps: int = 0
    store_problem: str | None = None

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL


def finite(value: float) -> float | None:
    """The value, or None where it is not a finite number, which JSON cannot carry."""
    return value if math.isfinite(value) else None


def moved(status: Status, state: JobState, code: str, reason: str, at_s: float) -> Status:
    """The status in another state, or the same status where the table has no such transition.

    A supervisor that has not yet heard of a cancellation still reports `running`; the table keeps that from undoing
    the user's wish. Staying in a state with another reason is allowed, and keeps the time since when.
    """
    if state is status.state and not status.terminal:
        return dataclasses.replace(status, state_code=code, reason=reason)
    if state not in TRANSITIONS[status.state]:
        return status
    return dataclasses.replace(status, state=state, state_code=code, reason=reason, since_at_s=at_s)


def advance(status: Status, entry: Entry) -> Status:
    """The status after one more entry. Raises ValueError for a state that does not exist."""
    status = dataclasses.replace(status, last_seq=entry.seq)
    event = entry.event
    match event:
        case StateChanged():
            return moved(status, JobState(event.state), event.code, event.reason, entry.at_s)
        case PlanAdopted():
            # The pace of the old plan says nothing of the new one's.
            return dataclasses.replace(
                status,
                epoch=event.epoch,
                plan_id=event.plan_id,
                plan_seq=entry.seq,
                step_s=None,
                tokens_per_s=None,
            )
        case StepDone():
            return _stepped(status, event)
        case WorkersStarted():
            return dataclasses.replace(status, epoch=event.epoch, step_s=None)
        case ScriptReported():
            step_s = _smoothed(status.step_s, event.duration_s)
            return dataclasses.replace(status, step=event.step, epoch=event.epoch, loss=event.loss, step_s=step_s)
        case RecoveryDone():
            return dataclasses.replace(
                status,
                epoch=event.epoch,
                num_recoveries=status.num_recoveries + 1,
                redone_steps=status.redone_steps + event.redone_steps,
                lost_steps=status.lost_steps + event.lost_steps,
            )
        case EvaluationDone():
            return dataclasses.replace(
                status, eval_step=event.step, eval_loss=finite(event.loss), eval_s=event.duration_s
            )
        case StepSkipped():
            return dataclasses.replace(status, skipped_steps=status.skipped_steps + 1)
        case StoreFailed():
            return dataclasses.replace(status, store_problem=event.problem)
        case StoreRecovered():
            return dataclasses.replace(status, store_problem=None)
        case NodeLost() | NodeJoined() | CheckpointCommitted() | CheckpointFailed() | CheckpointAsked():
            return status
        case ClusterEntered() | NodeNoticed() | NodeStays() | NodeSlowed() | NodeRecovered() | NoticeEnded():
            return status
        case RoomShort():
            return status
        case FiguresMeasured() | PredictionChecked() | ModelSeen():
            return status
        case ScriptStarted() | TrainerAdjusted() | CheckpointReported() | ScriptPrinted() | ScriptFailed():
            return status
        case ShareChanged() | ShareTaken():
            return status
        case _:
            assert_never(event)


def _stepped(status: Status, event: StepDone) -> Status:
    step_s = _smoothed(status.step_s, event.duration_s)
    return dataclasses.replace(
        status,
        step=event.step,
        epoch=event.epoch,
        loss=status.loss if event.skipped else finite(event.loss),
        step_s=step_s,
        tokens_per_s=event.tokens / step_s if step_s > 0 else None,
        exchanges=_exchanges(event),
    )


def _smoothed(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_SHARE * (newest - before)


def _exchanges(event: StepDone) -> Exchanges | None:
    """None in journals of versions that did not tell."""
    if event.exposed is None:
        return None
    mean_share, most_share = event.exposed
    return {
        "step": event.step,
        "exposed_share": mean_share,
        "most_exposed_share": most_share,
        "waited_s": {kind: {"mean": mean_s, "most": most_s} for kind, mean_s, most_s in event.waited_s},
        "moved_bytes": dict(event.moved_bytes),
    }
