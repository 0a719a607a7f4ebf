"""What the journal of a job of kind `ray_train` says beside what every job's says: its script's runs, workers, reports.

Steps of such a job are what its script reports (`ray.train.report`), counted from 1; an epoch is one start of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStarted:
    """The script was started on `node`, for the `attempt`th time."""

    kind: ClassVar[str] = "script_started"
    attempt: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAdjusted:
    """The `trainer`th trainer that the script made has, of what the script said, these settings of Shoal's instead:
    by the name of each, what it is, as text."""

    kind: ClassVar[str] = "trainer_adjusted"
    attempt: int
    trainer: int
    settings: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted:
    """From `step` on the workers of `epoch` train: one on each of `nodes` by rank, of those in `snapshot`
    (snapshot_to_mapping). `checkpoint` is what they may begin with, None where nothing was stored yet."""

    kind: ClassVar[str] = "workers_started"
    epoch: int
    trainer: int
    step: int
    nodes: tuple[str, ...]
    checkpoint: str | None
    snapshot: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReported:
    """Step `step` is what the worker of rank 0 reported, `duration_s` after the report before, or after the start of
    its epoch. `metrics` are its figures as the script named them; what JSON cannot carry stands there as text. `loss`
    is the one of them that the job names its metric, None where it is not among them or is no number."""

    kind: ClassVar[str] = "script_reported"
    epoch: int
    step: int
    metrics: dict[str, Any]
    loss: float | None
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReported:
    """What the script stored with step `step` stands at `uri`, where Ray Train keeps it."""

    kind: ClassVar[str] = "checkpoint_reported"
    epoch: int
    step: int
    uri: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPrinted:
    """Lines that the script and its workers printed, in order; `left_out` more of them were not kept before these."""

    kind: ClassVar[str] = "script_printed"
    attempt: int
    lines: tuple[str, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailed:
    """What the script, or one of its workers (`rank`, on `node`), ended with: `traceback` as Python wrote it."""

    kind: ClassVar[str] = "script_failed"
    attempt: int
    rank: int | None
    node: str
    problem: str
    traceback: str


ScriptEvent = (
    ScriptStarted
    | TrainerAdjusted
    | WorkersStarted
    | ScriptReported
    | CheckpointReported
    | ScriptPrinted
    | ScriptFailed
)
SCRIPT_EVENTS: tuple[type[ScriptEvent], ...] = (
    ScriptStarted,
    TrainerAdjusted,
    WorkersStarted,
    ScriptReported,
    CheckpointReported,
    ScriptPrinted,
    ScriptFailed,
)
