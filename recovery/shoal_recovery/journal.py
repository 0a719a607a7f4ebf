"""The journal of a job: append-only entries with sequence numbers, written by its supervisor, kept by agents on two
nodes and, for good, by the control plane. One entry is one JSON object: `seq`, `at_s` (wall time, for display), `kind`
and the fields of that kind. This file owns the wire form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from shoal_planner.strict import ANY_FLOAT, read
from shoal_recovery.journal_scripts import SCRIPT_EVENTS, ScriptEvent
from shoal_recovery.journal_shares import SHARE_EVENTS, ShareEvent


class JobState(StrEnum):
    """The lifecycle of a job, as it stands on the wire."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    RECOVERING = "recovering"
    WAITING = "waiting"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
# Nothing of the job runs anywhere. One that is paused stands in the object store, and may go on from there.
AT_REST = TERMINAL | {JobState.PAUSED}
_ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.DRAINING, JobState.RECOVERING, JobState.WAITING})
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLING, JobState.CANCELLED, JobState.FAILED})
    | {JobState.PAUSED},
    JobState.STARTING: _ACTIVE | {JobState.PAUSED, JobState.CANCELLING} | TERMINAL,
    JobState.RUNNING: _ACTIVE | {JobState.PAUSED, JobState.CANCELLING} | TERMINAL,
    JobState.DRAINING: _ACTIVE | {JobState.PAUSED, JobState.CANCELLING} | TERMINAL,
    JobState.RECOVERING: _ACTIVE | {JobState.PAUSED, JobState.CANCELLING} | TERMINAL,
    JobState.WAITING: _ACTIVE | {JobState.PAUSED, JobState.CANCELLING} | TERMINAL,
    JobState.PAUSED: _ACTIVE | {JobState.QUEUED, JobState.CANCELLING} | TERMINAL,
    JobState.CANCELLING: TERMINAL,
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The job is in another state; `code` is stable for machines (`node_lost`), `reason` a sentence for people."""

    kind: ClassVar[str] = "state_changed"
    state: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEntered:
    """From here on the job is in the hands of `cluster`, in the life of it that `incarnation` tells from others."""

    kind: ClassVar[str] = "cluster_entered"
    cluster: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAdopted:
    """From `step` on the ranks of `epoch` run `plan` (published form) on `snapshot` (snapshot_to_mapping). All nodes
    together send `network_bytes_per_parameter` for the copies of each step's state."""

    kind: ClassVar[str] = "plan_adopted"
    epoch: int
    plan_id: str
    step: int
    reason: str
    plan: dict[str, Any]
    snapshot: dict[str, Any]
    network_bytes_per_parameter: float = 0.0  # early journals do not say


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Step `step` (the first is 1) was voted by all ranks and applied, or is done without an update (`skipped`).
    `samples` are the half-open ranges of sample numbers that first stages really fed; `moved_bytes` is what all ranks
    sent since the vote before, by link: within a device group, a node, a zone, or between zones (`world`). `exposed` is
    the share of that time that ranks spent in exchanges other than votes, on average and at most; `waited_s` are the
    seconds, likewise, by what was exchanged; `safety` among them are those until the state of the step before was safe.
    `stalled_s` of its time would have been saved if no rank had waited for that."""

    kind: ClassVar[str] = "step_done"
    epoch: int
    step: int
    loss: float = field(metadata=ANY_FLOAT)
    grad_norm: float = field(metadata=ANY_FLOAT)
    lr: float
    tokens: int
    duration_s: float
    samples: tuple[tuple[int, int], ...]
    moved_bytes: tuple[tuple[str, int], ...] = ()
    exposed: tuple[float, float] | None = None
    waited_s: tuple[tuple[str, float, float], ...] = ()
    stalled_s: float | None = None  # early journals do not say
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped:
    """What came out of step `step` is no finite number, twice, and the job's `train.on_nan` is `skip`: the step is done
    without an update. Its StepDone follows."""

    kind: ClassVar[str] = "step_skipped"
    epoch: int
    step: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """The mean loss over `tokens` held-out tokens, the same ones each time, with the weights of step `step`. Once for
    each step after which one is due."""

    kind: ClassVar[str] = "evaluation_done"
    epoch: int
    step: int
    loss: float = field(metadata=ANY_FLOAT)
    tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """`ranks_alone`: its agent answered all the same, so what is lost are its ranks."""

    kind: ClassVar[str] = "node_lost"
    node: str
    evidence: str
    detect_s: float
    ranks_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    kind: ClassVar[str] = "node_joined"
    node: str
    device: str
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNoticed:
    """`source` has told, for the reason `why`, that the node goes away in `lead_s`. From now on no plan is made with
    it, unless none fits without it."""

    kind: ClassVar[str] = "node_noticed"
    node: str
    source: str
    why: str
    lead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStays:
    """The node is to go away, but no plan fits without it: the job goes on with it until it is gone."""

    kind: ClassVar[str] = "node_stays"
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlowed:
    """The node is a straggler: up, and `slowdown` times slower than it should be. Plans count on it as that."""

    kind: ClassVar[str] = "node_slowed"
    node: str
    slowdown: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecovered:
    """The node counts as no straggler any more."""

    kind: ClassVar[str] = "node_recovered"
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeEnded:
    """What came of a notice: the node is `gone`; or it is there and may be used again, because the notice was
    `withdrawn`, or is `overdue`."""

    kind: ClassVar[str] = "notice_ended"
    node: str
    source: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailed:
    """What a recovery was to take from `source`, where it lies in `object` as state of `step`, was not there or not as
    it was sealed. `num_bytes` are those of the shards concerned; `instead` is where they came from."""

    source: str
    object: str
    step: int
    num_bytes: int
    problem: str
    instead: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBrought:
    """What rank `to` (`node:index`) took in a recovery of `shard`, a snapshot's part that was sealed whole: from `node`
    (empty: from the object store, where it is the object's name), by `source`, one of the tiers. `took_s` is from the
    first byte that was asked for to the last that had been checked."""

    source: str
    node: str
    shard: str
    to: str
    num_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDone:
    """A change of plan in flight has ended: the ranks of `epoch` step again from `step`.

    `redone_steps` were done but not yet safe; `lost_steps` were safe and yet had to be done again (never, by design).
    Phases in seconds: detect (blow to notice), decide (plan and restore plan), restore (bytes), rebuild (groups,
    buffers); `num_bytes` by tier: own, node, peer, store, and `source_s` the time from the first byte to the last that
    the slowest rank took from there; `shards` are the largest of the `num_shards` parts that came from other than own
    memory, largest first. `plan_before` (empty: none) and `plan_after` are ids of plans; `nodes_lost`, `nodes_joined`
    and `nodes_drained` (left before they were lost, because they were to go away) of nodes.
    """

    kind: ClassVar[str] = "recovery_done"
    epoch: int
    cause: str
    reason: str
    step: int
    redone_steps: int
    lost_steps: int
    detect_s: float
    decide_s: float
    restore_s: float
    rebuild_s: float
    total_s: float
    num_bytes: dict[str, int]
    nodes_lost: tuple[str, ...] = ()
    nodes_joined: tuple[str, ...] = ()
    nodes_drained: tuple[str, ...] = ()
    source_s: dict[str, float] = field(default_factory=dict)
    shards: tuple[ShardBrought, ...] = ()
    num_shards: int = 0  # early journals do not say
    failed_sources: tuple[SourceFailed, ...] = ()
    plan_before: str = ""
    plan_after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """Step `step` stands whole in the object store."""

    kind: ClassVar[str] = "checkpoint_committed"
    step: int
    epoch: int
    uri: str
    num_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAsked:
    """Somebody wants the newest step in the object store now, for the `number`th time: that will be `step`, which nodes
    were told before it was done."""

    kind: ClassVar[str] = "checkpoint_asked"
    number: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """The upload of this step did not succeed; training goes on."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    uri: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    """The object store does not take step `step`, at present; training goes on, and what waits is brought later. Said
    once, until it works again."""

    kind: ClassVar[str] = "store_failed"
    uri: str
    step: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecovered:
    """The object store works again: step `step` stands there. It failed for `duration_s`."""

    kind: ClassVar[str] = "store_recovered"
    uri: str
    step: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomShort:
    """A node had no room in memory for `num_bytes` of the job's snapshots. They lie on its disk (`on_disk`), or have no
    room there either: then plans count on `room_bytes` there, and keep fewer copies or none on that node."""

    kind: ClassVar[str] = "room_short"
    node: str
    num_bytes: int
    on_disk: bool
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FiguresMeasured:
    """What was found out about devices and links: `profile` (profile_to_mapping) adds to what was known. `num_bytes`
    crossed links for it."""

    kind: ClassVar[str] = "figures_measured"
    profile: dict[str, Any]
    num_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """A worker has built the modules of the user's own, and run them once: the `model` of the job as it is from now on,
    with the shape that was found, and the `packages` that hold the code."""

    kind: ClassVar[str] = "model_seen"
    model: dict[str, Any]
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionChecked:
    """How long a step of `epoch` really takes (the median of `num_steps` of them), and what its plan predicted."""

    kind: ClassVar[str] = "prediction_checked"
    epoch: int
    step: int
    num_steps: int
    predicted_s: float
    measured_s: float


Event = (
    StateChanged
    | ClusterEntered
    | PlanAdopted
    | StepDone
    | StepSkipped
    | EvaluationDone
    | NodeLost
    | NodeJoined
    | NodeNoticed
    | NodeStays
    | NodeSlowed
    | NodeRecovered
    | NoticeEnded
    | RecoveryDone
    | CheckpointCommitted
    | CheckpointAsked
    | CheckpointFailed
    | StoreFailed
    | RoomShort
    | StoreRecovered
    | FiguresMeasured
    | PredictionChecked
    | ModelSeen
    | ScriptEvent
    | ShareEvent
)
EVENTS: Mapping[str, type[Event]] = {
    event.kind: event
    for event in (
        StateChanged,
        ClusterEntered,
        PlanAdopted,
        StepDone,
        StepSkipped,
        EvaluationDone,
        NodeLost,
        NodeJoined,
        NodeNoticed,
        NodeStays,
        NodeSlowed,
        NodeRecovered,
        NoticeEnded,
        RecoveryDone,
        CheckpointCommitted,
        CheckpointAsked,
        CheckpointFailed,
        StoreFailed,
        RoomShort,
        StoreRecovered,
        FiguresMeasured,
        PredictionChecked,
        ModelSeen,
        *SCRIPT_EVENTS,
        *SHARE_EVENTS,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`seq` counts from 1 without gaps within a job."""

    seq: int
    at_s: float
    event: Event


def entry_to_mapping(entry: Entry) -> dict[str, Any]:
    return {"seq": entry.seq, "at_s": entry.at_s, "kind": entry.event.kind, **dataclasses.asdict(entry.event)}


def entry_from_mapping(value: Mapping[str, Any]) -> Entry:
    """Raises InvalidField or KeyError on anything that `entry_to_mapping` did not write."""
    rest = {key: item for key, item in value.items() if key not in ("seq", "at_s", "kind")}
    return Entry(seq=int(value["seq"]), at_s=float(value["at_s"]), event=read(EVENTS[value["kind"]], rest))
