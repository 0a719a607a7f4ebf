"""What ranks say to whoever watches them, and the orders that they get; `messages` has the wire form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal_workers.rows import Row

# --- reports ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first words to a supervisor: the highest epoch it knows and whether it is stepping in it.
    `cuda_devices`: how many it sees; None where the CPU may take their place."""

    pid: int
    epoch: int
    stepping: bool
    cuda_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted:
    """The rank has left every epoch before `epoch`. Its live state is whole at `step` (None: torn or empty), laid out
    as rank `layout_rank` of `layout_epoch`."""

    epoch: int
    step: int | None
    layout_epoch: int
    layout_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The rank gets on with what it was ordered to do: it is slow, not stuck."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The rank has its state and its groups, and steps. By tier, `num_bytes` are what it really took, `source_s` the
    time from the first byte to the last. `shards` are the largest of the `num_shards` that it took some of: rows of
    (tier, node or "", name, bytes, seconds)."""

    epoch: int
    step: int
    restore_s: float
    rebuild_s: float
    num_bytes: dict[str, int]
    source_s: dict[str, float]
    shards: list[Row] = field(default_factory=list)
    num_shards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """Sources did not give the rank what they were said to hold: rows of (row of the transfer, what was wrong, whether
    the source did not answer at all). It has everything else, and waits for Bring."""

    epoch: int
    rows: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step was voted and applied, or (`skipped` says why) is done without an update, as this rank saw it."""

    epoch: int
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    duration_s: float
    samples: list[Row]
    moved: list[Row]  # (link, bytes of all ranks)
    exposed: list[float]  # the share of time that ranks are in exchanges: on average, at most
    waited: list[Row]  # (kind of exchange, seconds of a rank on average, at most)
    computed_s: float  # by this rank, without its waits
    stalled_s: float = 0.0  # how much sooner the step could have been voted, had the one before been safe
    skipped: str | None = None
    marks: list[Row] = field(default_factory=list)  # where samples begin in the data, as far as this rank found out
    files: list[Row] = field(default_factory=list)  # which data that is, with the first step of an epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The rank ended its epoch in order, with everything safe: `finished`, or stopped as it was told."""

    epoch: int
    step: int
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The epoch cannot go on here. `fatal`: no other plan would help (not a lost peer but the job itself); `code` is a
    word for programs where a job fails for it. `local`: the fault is here, so a plan without this node may help."""

    epoch: int
    problem: str
    fatal: bool
    local: bool = False
    code: str = "rank_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rows of (part of the model, samples, forward and backward seconds, degree of tensor parallelism of which it did
    its share) of one device; elements that it updates. Or the `problem` for which nothing could be measured: an error
    in modules of the user's own."""

    rows: list[Row]
    updates_per_s: float
    problem: str = ""


# --- orders ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Leave every epoch before this one; answered by Halted. `or_end`: a process that cannot soon is to end."""

    epoch: int
    or_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Become `rank` of `plan` in `epoch`, with the state of `step` brought by `transfers` (rows; None: initialise);
    `evaluated`: it is known. `agents` maps nodes to addresses; `rendezvous` is the one where the epoch's ranks meet.
    `num_threads`: None unless this device is a CPU; `accelerated`: none of the plan is. `backups` are rows of (node,
    host, port) of agents that are sent all that the rank vouches for, with rows of spans behind them of those that are
    sent only these; of the spans in `mirrors`, which other ranks vouch for, it takes snapshots of its own memory.
    `marks` are those that ranks told with steps before, and `files` tell which data these are of. `token`, in
    hexadecimal, is what agents ask of the ranks of this epoch; it is not for journals or logs."""

    epoch: int
    job: str
    spec: dict[str, Any]
    plan: dict[str, Any]
    rank: int
    step: int
    evaluated: bool
    transfers: list[Row] | None
    agents: dict[str, Row]
    rendezvous: Row
    backups: list[Row]
    zones: dict[str, str]
    memory_limit_bytes: int | None
    host_limit_bytes: int | None
    num_threads: int | None
    accelerated: bool
    token: str = field(repr=False)
    mirrors: list[Row] = field(default_factory=list)
    marks: list[Row] = field(default_factory=list)
    files: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bring:
    """Where the rank gets what it told to lack: rows of transfers, as in Assign."""

    epoch: int
    transfers: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAfter:
    """All ranks leave together after this step or the first one that is still possible."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Time the parts of this job's model on this device, and its share of a block at these `degrees` of tensor
    parallelism; answered by Measured. `num_threads`: None unless a CPU."""

    spec: dict[str, Any]
    num_threads: int | None
    degrees: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """What a rank of this job needs whatever the plan is got ready, before anybody waits for it. Answered by
    Prepared."""

    spec: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeRoom:
    """So much memory of its process a rank on a CPU will need in the epoch that is to take it in. One that holds state
    makes no room beside that."""

    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """As far as it could be: what is wrong is told when it is needed."""
