"""What agents, ranks and supervisors say to each other: one frozen dataclass per message, and its wire form.

Fields are plain JSON values; layouts, snapshots and transfers travel as the compact rows of `rows.py`. Of evaluations
ranks speak in the journal's words. An unknown kind or field raises ProtocolError.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal_recovery.journal import EvaluationDone
from shoal_workers.log_messages import LogsAre as LogsAre
from shoal_workers.log_messages import ReadLogs as ReadLogs
from shoal_workers.rank_messages import Assign as Assign
from shoal_workers.rank_messages import Bring as Bring
from shoal_workers.rank_messages import Halt as Halt
from shoal_workers.rank_messages import Halted as Halted
from shoal_workers.rank_messages import Hello as Hello
from shoal_workers.rank_messages import Lacking as Lacking
from shoal_workers.rank_messages import Left as Left
from shoal_workers.rank_messages import MakeRoom as MakeRoom
from shoal_workers.rank_messages import Measure as Measure
from shoal_workers.rank_messages import Measured as Measured
from shoal_workers.rank_messages import Prepare as Prepare
from shoal_workers.rank_messages import Prepared as Prepared
from shoal_workers.rank_messages import Progress as Progress
from shoal_workers.rank_messages import Ready as Ready
from shoal_workers.rank_messages import Stepped as Stepped
from shoal_workers.rank_messages import StopAfter as StopAfter
from shoal_workers.rank_messages import Trouble as Trouble
from shoal_workers.rows import Row
from shoal_workers.save_messages import AlsoUpload as AlsoUpload
from shoal_workers.save_messages import StoreHolds as StoreHolds

M = TypeVar("M")


class ProtocolError(Exception):
    """The other side speaks another version, or is not one of ours."""


# --- to an agent: each is answered by one message ---


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlots:
    """A rank of `epoch` will write snapshots of this layout; answered by SlotsOpen. `backups` are rows of (node, host,
    port) of agents that are sent a copy of each, and behind them runs of rows of the layout, [first, last), where it is
    a part; `upload` says when one goes to the object store. `mirror`: another rank vouches for all of it. The process
    has written the snapshots that it has `left`, and never writes them again: their memory may be given to it anew."""

    job: str
    epoch: int
    rank: int
    layout: list[Row]
    backups: list[Row]
    upload_uri: str | None
    upload_every: int
    last_step: int
    left: list[str] = field(default_factory=list)
    mirror: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSnapshot:
    """The rank is about to write the snapshot of this step; answered by SlotFree once nothing needs the old content.
    `reports` are what it said of steps and evaluations, as Stepped and EvaluationDone, since it began one before."""

    job: str
    name: str
    step: int
    reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealSnapshot:
    """The slot is written; answered by Done when the snapshot stands here and, unless it is to be `here` alone, on
    every backup."""

    job: str
    name: str
    step: int
    here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSnapshot:
    """A copy for safe keeping; the payload is the whole slot. `checksums` in the order of the layout; `uri`: the object
    store that this step is brought to, None for the others."""

    job: str
    name: str
    step: int
    layout: list[Row]
    checksums: list[str]
    uri: str | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)  # those of BeginSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInventory:
    """Answered by InventoryIs, with every shard of the job; `verified`: that passes its checksum now. Otherwise all are
    told as they were sealed: whoever fetches one verifies it, and a change of plan does not wait for the others. Of
    steps of an `epoch` `after` this one, and of evaluations from it on, the reports of ranks are wanted, too."""

    job: str
    verified: bool = True
    epoch: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetEpoch:
    """Answered by EpochIs."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSignal:
    """Which signal this process of the job, on the node of the agent, died of. Answered by SignalIs."""

    job: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Byte ranges (offset, length) of a snapshot; answered by Fetched with the bytes as payload."""

    job: str
    name: str
    step: int
    ranges: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Bring this snapshot into the object store; answered by Done at once, the result comes as Uploaded."""

    job: str
    name: str
    step: int
    uri: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Snapshots of epochs before this one are not needed any more (of no epoch at all: `before_epoch` None), and no new
    ones of those epochs are taken."""

    job: str
    before_epoch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeReady:
    """Memory for snapshots of these sizes in bytes is made, so that an epoch to come need not wait for it; `copies`
    come from other nodes. It may be one that nodes are `joining`, or one that follows a loss: enough for either is
    kept, and no other. Answered by Done when it is there."""

    job: str
    local: list[int]
    copies: list[int]
    joining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendJournal:
    job: str
    entries: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJournal:
    """Answered by JournalIs."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetKey:
    """Rendezvous of an epoch: ranks leave what their peers need to connect."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetKey:
    """Answered by KeyIs as soon as the key is set, or with no value after `timeout_s`."""

    key: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Bytes for nothing but the time that they take: the payload. Answered by Probed as soon as it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLink:
    """Find out within about `limit_s` what messages to the agent at this address cost; answered by LinkProbed."""

    host: str
    port: int
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbed:
    """Medians: one way of a small message, and of what flows; the other side counted `received_bytes`."""

    latency_s: float
    bytes_per_s: float
    num_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveNotice:
    """The agent's node goes away in `lead_s`, says `source`, for the reason `why`; answered by Done. The same `name`
    again is the same notice."""

    source: str
    name: str
    why: str
    lead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """From now on this connection carries Heartbeat and whatever the other side has to report."""

    job: str
    after_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The answer to a Heartbeat, now and then: that of `at_s` has come. Who says it knows of epochs up to this one."""

    at_s: float
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """The agent sends heartbeats to these agents and listens for theirs: rows of (node, host, port)."""

    peers: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsOpen:
    name: str
    paths: list[str]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFree:
    """Which of the slots the rank may write."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryIs:
    """Only shards that are as they were sealed, as far as was looked; `spoilt` are rows of (snapshot, step, the shard's
    four fields, what is wrong with it) of those that are not."""

    snapshots: list[Row]
    spoilt: list[Row]
    reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochIs:
    """The highest epoch of the job that the agent has heard of; 0 for none."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalIs:
    """Its name; None: it said nothing of one."""

    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """`around`: of each range, the CRC-32 of what lies before and behind it in its shard."""

    problem: str | None
    around: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalIs:
    entries: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyIs:
    value: str | None


# --- reports of an agent to whoever watches it; those of ranks and orders to them are in `rank_messages` ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Of an agent or a rank: `at_s` is its own time of saying so. `silent`: rows of (node, how long the agent has not
    heard that node's agent, once it did)."""

    at_s: float
    silent: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """A snapshot stands in the object store, as these stored pieces; or does not, and `problem` says why."""

    job: str
    step: int
    epoch: int
    name: str
    rows: list[Row]
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadDelayed:
    """Snapshots up to this step wait on the agent's disk, and will be brought when the store allows."""

    job: str
    step: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomShort:
    """The agent's node had no room in memory for so many bytes of snapshots of the job: they lie on its disk now, or
    nowhere. `room_bytes` is what it has for snapshots of all jobs, with what these take already."""

    job: str
    num_bytes: int
    on_disk: bool
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """The agent's node is to go away: in `lead_s` when the notice came, in `left_s` from now on."""

    source: str
    why: str
    lead_s: float
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The notice of this source does not hold any more."""

    source: str


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(OpenSlots, BeginSnapshot, SealSnapshot, PutSnapshot, GetInventory, GetEpoch, EpochIs, Fetch, Upload, Retire),
        *(MakeReady, ReadLogs, LogsAre, AlsoUpload, StoreHolds, GetSignal, SignalIs),
        *(AppendJournal, ReadJournal, SetKey, GetKey, Watch, Done, SlotsOpen, SlotFree, InventoryIs, Fetched),
        *(JournalIs, KeyIs),
        *(
            Heard,
            Attend,
            Probe,
            Probed,
            ProbeLink,
            LinkProbed,
            GiveNotice,
            Noticed,
            Withdrawn,
            UploadDelayed,
            RoomShort,
        ),
        *(Heartbeat, Uploaded, Hello, Halted, Progress, Ready, Stepped, EvaluationDone, Left, Trouble, Measured),
        *(Halt, Assign, Bring, Lacking, StopAfter, Measure, Prepare, Prepared, MakeRoom),
    )
}


Reported = Stepped | EvaluationDone  # of a step, by the ranks that did it


def encode(message: Any) -> dict[str, Any]:
    """The wire form of a message of this file."""
    fields = {one.name: getattr(message, one.name) for one in dataclasses.fields(message)}
    return {"kind": type(message).__name__, **fields}


def decode(wire: dict[str, Any]) -> Any:
    """The message; match on its type. Raises ProtocolError."""
    try:
        kind = _KINDS[wire["kind"]]
        return kind(**{key: value for key, value in wire.items() if key != "kind"})
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"cannot read a message of kind {wire.get('kind')!r}: {error}") from error


def decode_as(kind: type[M], wire: dict[str, Any]) -> M:
    """The message, which must be of this kind. Raises ProtocolError."""
    message = decode(wire)
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {message}")
    return message
