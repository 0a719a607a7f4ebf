"""The values of recovery: what state a plan needs where, what survivors hold, and what moves.

State has global coordinates: a parameter's name, the kind of state, an interval of its flat elements. No rank, stage or
tensor-parallel degree ever appears in a key, so any layout restores into any other by interval subtraction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shoal_planner.cluster import DeviceRef
from shoal_planner.slices import UNCUT, Slicing
from shoal_recovery.intervals import Interval, clip, subtract

ELEMENT_BYTES = 4  # master and both moments are fp32 everywhere


class Kind(StrEnum):
    """What is kept of a parameter. `weight` is what the model computes with; it is `master` in the job's precision."""

    WEIGHT = "weight"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


OWNED_KINDS = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShardKey:
    """Elements [first, last) of the flattened parameter `fqn`, of one kind."""

    fqn: str
    kind: Kind
    first: int
    last: int

    def __post_init__(self) -> None:
        assert 0 <= self.first < self.last, self

    @property
    def numel(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """Elements [first, last) of the flattened parameter `fqn`, whatever the kind."""

    fqn: str
    first: int
    last: int

    def __post_init__(self) -> None:
        assert 0 <= self.first < self.last, self

    @property
    def numel(self) -> int:
        return self.last - self.first

    def key(self, kind: Kind) -> ShardKey:
        return ShardKey(fqn=self.fqn, kind=kind, first=self.first, last=self.last)


def common(some: tuple[Span, ...], others: tuple[Span, ...]) -> tuple[Span, ...]:
    """What both have; each sorted and without neighbours."""
    return _each(some, others, clip)


def without(some: tuple[Span, ...], others: tuple[Span, ...]) -> tuple[Span, ...]:
    """What the others lack of these; each sorted and without neighbours."""
    return _each(some, others, subtract)


def _each(
    some: tuple[Span, ...],
    others: tuple[Span, ...],
    rule: Callable[[Interval, Sequence[Interval]], tuple[Interval, ...]],
) -> tuple[Span, ...]:
    by_name: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in others:
        by_name[span.fqn].append((span.first, span.last))
    return tuple(
        Span(fqn=span.fqn, first=first, last=last)
        for span in some
        for first, last in rule((span.first, span.last), by_name.get(span.fqn, ()))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circles:
    """With whom a rank shares each kind of state: who has the same number, among all ranks of the plan. Ranks of one
    replica are in one circle, and `tp_rank` tells them apart."""

    weights: int
    gradients: int
    optimizer: int
    node: int = 0  # of one stage, who shares a node
    tp_rank: int = 0
    tp: int = 1


ALONE = Circles(weights=0, gradients=0, optimizer=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank keeps under a plan, each sorted.

    It computes with the weights of `holds`, and gives gradients of `contributes` (a subset: of a replicated parameter
    only tp rank 0). Between uses it keeps the weights of `keeps`: its part of what its circle holds. The gradients of
    `sums` add up on it through a step. It has master and moments of `owns`; of each element one owner `vouches`: there
    its gradient is summed over all circles, and is counted in the norm, and this copy of the state is snapshotted.
    What it sums `alone` its circle does not share, though it shares others: it takes nobody's gradients of it before
    the end of a step. Of what it owns, master and moments of `hosted` lie in the memory of its node's host.

    Where the plan asks for that, nodes hold together within a step: the rank has `near` of the weights that its node
    gathered, and sums gradients of `relays` for its node before they go on to others.

    Where adapters are trained it also computes with the weights of `frozen`. Nobody owns these: whoever lacks them
    reads them again from where training began.
    """

    rank: int
    device: DeviceRef
    holds: tuple[Span, ...]
    keeps: tuple[Span, ...]
    contributes: tuple[Span, ...]
    sums: tuple[Span, ...]
    owns: tuple[Span, ...]
    vouches: tuple[Span, ...]
    near: tuple[Span, ...] = ()
    relays: tuple[Span, ...] = ()
    alone: tuple[Span, ...] = ()
    hosted: tuple[Span, ...] = ()
    frozen: tuple[Span, ...] = ()
    circles: Circles = ALONE
    slicing: Slicing = UNCUT  # of the units that it runs

    @property
    def vouched_keys(self) -> tuple[ShardKey, ...]:
        """What a snapshot of this rank has."""
        return tuple(span.key(kind) for kind in OWNED_KINDS for span in self.vouches)

    @property
    def shares_gradients(self) -> bool:
        return self.sums != self.contributes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """Who keeps what under one plan. For every element of every parameter exactly one rank vouches; it owns it, too."""

    ranks: tuple[RankState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """State in the memory of a rank process that survived; only that same process (device) can use it in place."""

    device: DeviceRef
    step: int
    keys: tuple[ShardKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a shard lies inside an object: `offset` and `num_bytes` within it, and the checksum of those bytes."""

    key: ShardKey
    offset: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's shards of one step, immutable and verified, in the care of `node`'s agent under `name`. A `mirror` is
    of what another rank vouches for: the same state, updated by another device, so perhaps not to the last bit."""

    node: str
    name: str
    step: int
    pieces: tuple[Piece, ...]
    mirror: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All that survivors hold."""

    live: tuple[Live, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A shard in the object store: bytes [offset, offset + num_bytes) of `object`."""

    key: ShardKey
    object: str
    offset: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole step in the object store. It is written last: it exists, so the step is complete.

    `next_sample` is the data cursor: the position in the order of samples at which the next step begins. `marks` are
    rows of where samples of about then begin in data whose samples are made of documents, `files` rows of which data
    that is; both mean something to ranks alone.
    """

    version: int
    job: str
    step: int
    epoch: int
    next_sample: int
    pieces: tuple[StoredPiece, ...]
    marks: tuple[tuple[int, ...], ...] = ()
    files: tuple[Any, ...] = ()


class Tier(StrEnum):
    """Where restored bytes come from, nearest first."""

    OWN = "own"
    NODE = "node"
    PEER = "peer"
    STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes that one rank needs. `key` is what it becomes (a weight may come from master: `source_kind`).

    `node` and `name` say which agent's snapshot (tiers node and peer), `name` which object (tier store);
    `offset` and `num_bytes` are within it. For tier own all of these are empty: the rank has it in place.
    `checksum` is that of the whole shard that these bytes are in, after `before_bytes` and before `after_bytes` of it.
    """

    rank: int
    key: ShardKey
    source_kind: Kind
    tier: Tier
    num_bytes: int
    node: str | None = None
    name: str | None = None
    offset: int = 0
    checksum: str | None = None
    before_bytes: int = 0
    after_bytes: int = 0

    @property
    def shard_bytes(self) -> int:
        """Of the whole shard in its source."""
        return self.before_bytes + self.num_bytes + self.after_bytes

    @property
    def source_key(self) -> ShardKey:
        return replace(self.key, kind=self.source_kind)

    @property
    def is_derived(self) -> bool:
        """A weight that is made of the rank's own master, which must be there by then."""
        return self.tier is Tier.OWN and self.key.kind is Kind.WEIGHT and self.source_kind is Kind.MASTER


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How every rank of a new plan gets its state, all of one step."""

    step: int
    transfers: tuple[Transfer, ...]

    def bytes_by_tier(self) -> dict[Tier, int]:
        """All four tiers, zero where nothing comes from."""
        found: Counter[Tier] = Counter()
        for transfer in self.transfers:
            found[transfer.tier] += transfer.num_bytes
        return {tier: found[tier] for tier in Tier}
