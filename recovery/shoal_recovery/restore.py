"""plan_restore: from what survivors hold and the store has, how every rank of a new plan gets its state.

Pure. Owns the choice of the step (the newest that is whole) and of the source of every byte (nearest first: own memory,
the node's agent, another agent in its zone, one elsewhere, the store; peers as near as each other evenly loaded). Does
not move bytes.

The caller vouches that everything with one step number is one state: agents drop snapshots of steps that recovery went
back behind, and a step is stored only once it is safe.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_recovery.errors import StateLost
from shoal_recovery.holdings import NOTHING, Address, Coverage, Holdings, Source, holdings
from shoal_recovery.intervals import Interval, clip, merge, subtract
from shoal_recovery.state import (
    ELEMENT_BYTES,
    OWNED_KINDS,
    Inventory,
    Kind,
    Manifest,
    RankState,
    RecoveryPlan,
    ShardKey,
    ShardMap,
    Span,
    Tier,
    Transfer,
)

Precision = Literal["fp32", "bf16"]
_WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}
_NUM_EXAMPLES = 3
_MOST_PASSES = 8  # two or three are the rule

Zones = Mapping[str, str]  # by node; those that are not in it are in one zone
NO_ZONES: Zones = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Elements [first, last) that a rank needs as `kind`. `source` is None where they are in its own memory."""

    rank: int
    fqn: str
    kind: Kind
    source_kind: Kind
    first: int
    last: int
    tier: Tier = Tier.OWN
    source: Source | None = None

    @property
    def numel(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A part that any of several other nodes can send, which are as near as each other."""

    part: _Part
    sources: tuple[Source, ...]


def whole_steps(inventory: Inventory, manifests: tuple[Manifest, ...], model: ModelSpec) -> tuple[int, ...]:
    """The steps of which survivors and store together have master and both moments of every element, newest first.

    Counts live memory, too, which only its own process can use: a step listed here may still be out of reach of a
    particular plan. `plan_restore` decides that.
    """
    held = _held(inventory, manifests)
    return tuple(step for step in sorted(held, reverse=True) if next(_missing(held[step], model), None) is None)


def plan_restore(
    wanted: ShardMap,
    inventory: Inventory,
    manifests: tuple[Manifest, ...],
    model: ModelSpec,
    precision: Precision,
    zones: Zones = NO_ZONES,
) -> RecoveryPlan:
    """Every rank gets master and moments of what it owns and weights of what it keeps, all of the newest whole step.

    Transfers are sorted by rank, and within a rank weights come last: one of tier own with source_kind MASTER is cast
    from the rank's own master, which must be there by then. A transfer never spans two shards of its source, and
    carries the checksum of the one that it lies in. Raises StateLost.
    """
    unusable: tuple[int, list[_Part]] | None = None
    for step in whole_steps(inventory, manifests, model):
        parts, missing = _parts(wanted, holdings(step, inventory, manifests), zones)
        if not missing:
            return RecoveryPlan(step=step, transfers=tuple(_transfer(part, precision) for part in _joined(parts)))
        unusable = unusable or (step, missing)
    if unusable is not None:
        step, missing = unusable
        why = f"step {step} is left whole only in memory that no rank of the new plan can use: they lack"
        raise _lacking(why, map(_wanted, missing))
    raise _lost(_held(inventory, manifests), model)


def plan_again(
    failed: Iterable[Transfer],
    step: int,
    wanted: ShardMap,
    inventory: Inventory,
    manifests: tuple[Manifest, ...],
    precision: Precision,
    zones: Zones = NO_ZONES,
) -> tuple[Transfer, ...]:
    """The same bytes of the same `step` from what is there now: their sources did not give them, and have been left out
    of the inventory and the manifests. Raises StateLost where nobody else has them."""
    found = holdings(step, inventory, manifests)
    search = _Search(found, zones)
    for transfer in failed:
        key = transfer.key
        part = _Part(
            rank=transfer.rank,
            fqn=key.fqn,
            kind=key.kind,
            source_kind=transfer.source_kind,
            first=key.first,
            last=key.last,
        )
        search.add(part, wanted.ranks[transfer.rank].device.node)
    if search.missing:
        raise _lacking(f"of step {step}, nobody else has", map(_wanted, search.missing))
    return tuple(_transfer(part, precision) for part in _joined(search.parts()))


def _held(inventory: Inventory, manifests: Iterable[Manifest]) -> dict[int, dict[Address, list[Interval]]]:
    held: defaultdict[int, defaultdict[Address, list[Interval]]] = defaultdict(lambda: defaultdict(list))

    def add(step: int, keys: Iterable[ShardKey]) -> None:
        of_step = held[step]
        for key in keys:
            of_step[key.fqn, key.kind].append((key.first, key.last))

    for live in inventory.live:
        add(live.step, live.keys)
    for snapshot in inventory.snapshots:
        add(snapshot.step, (piece.key for piece in snapshot.pieces))
    for manifest in manifests:
        add(manifest.step, (piece.key for piece in manifest.pieces))
    return dict(held)


def _missing(held: dict[Address, list[Interval]], model: ModelSpec) -> Iterator[ShardKey]:
    for parameter in parameters(model):
        for kind in OWNED_KINDS:
            for first, last in subtract((0, parameter.numel), merge(held.get((parameter.fqn, kind), ()))):
                yield ShardKey(fqn=parameter.fqn, kind=kind, first=first, last=last)


def _lost(held: dict[int, dict[Address, list[Interval]]], model: ModelSpec) -> StateLost:
    if not held:
        return StateLost("neither survivors nor the store have any state of this job", ())
    step = max(held)
    why = f"no step is whole in what survivors and the store have; the newest, step {step}, lacks"
    return _lacking(why, _missing(held[step], model))


def _lacking(why: str, keys: Iterable[ShardKey]) -> StateLost:
    """With how much that is in all, each element counted once, and examples."""
    by_address: defaultdict[Address, list[Interval]] = defaultdict(list)
    for key in keys:
        by_address[key.fqn, key.kind].append((key.first, key.last))
    lost = [(address, interval) for address, intervals in by_address.items() for interval in merge(intervals)]
    num_bytes = ELEMENT_BYTES * sum(last - first for _, (first, last) in lost)
    num_parameters = len({fqn for fqn, _ in by_address})
    what = f"{_counted(len(lost), 'interval')} of {_counted(num_parameters, 'parameter')}, {num_bytes:,} bytes in all"
    examples = (f"{fqn} {kind} [{first}, {last})" for (fqn, kind), (first, last) in lost[:_NUM_EXAMPLES])
    return StateLost(f"{why} {what}, for example", tuple(examples))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _wanted(part: _Part) -> ShardKey:
    return ShardKey(fqn=part.fqn, kind=part.source_kind, first=part.first, last=part.last)


def _parts(wanted: ShardMap, found: Holdings, zones: Zones) -> tuple[list[_Part], list[_Part]]:
    """Every part with its source, and the parts that nobody can supply."""
    search = _Search(found, zones)
    for state in wanted.ranks:
        in_place, lacking = _at_home(state, found)
        search.settled.extend(in_place)
        for part in lacking:
            search.add(part, state.device.node)
    return search.parts(), search.missing


class _Search:
    """Where parts come from that are not at home."""

    def __init__(self, found: Holdings, zones: Zones) -> None:
        self._found = found
        self._zones = zones
        self._choices: list[_Choice] = []
        self.settled: list[_Part] = []
        self.missing: list[_Part] = []

    def add(self, part: _Part, node: str) -> None:
        """`part` of a rank on `node`."""
        address = (part.fqn, part.source_kind)
        for first, last, sources in self._found.agents.get(address, NOTHING).cut(part.first, part.last):
            near = [source for source in sources if source.node == node]
            if near:
                self.settled.append(_cut(part, first, last, Tier.NODE, min(near)))
            elif sources:
                zone = self._zones.get(node)
                nearer = tuple(source for source in sources if self._zones.get(str(source.node)) == zone)
                self._choices.append(_Choice(part=_cut(part, first, last), sources=nearer or sources))
            else:
                self._from_store(_cut(part, first, last), self._found.store.get(address, NOTHING))

    def parts(self) -> list[_Part]:
        return [*self.settled, *_spread(self._choices)]

    def _from_store(self, part: _Part, stored: Coverage) -> None:
        for first, last, sources in stored.cut(part.first, part.last):
            if sources:
                self.settled.append(_cut(part, first, last, Tier.STORE, min(sources)))
            else:
                self.missing.append(_cut(part, first, last))


def _at_home(state: RankState, found: Holdings) -> tuple[list[_Part], list[_Part]]:
    """What the rank has in its own memory, and what has to come from elsewhere. A weight follows from the master that
    the same rank owns, so the same bytes are never fetched twice."""
    in_place: list[_Part] = []
    lacking: list[_Part] = []
    masters: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in state.owns:
        masters[span.fqn].append((span.first, span.last))
        for kind in OWNED_KINDS:
            live = found.live_intervals(state.device, (span.fqn, kind))
            in_place.extend(_inside(state.rank, span, kind, kind, live))
            lacking.extend(_outside(state.rank, span, kind, kind, live))
    for span in state.keeps:
        live = found.live_intervals(state.device, (span.fqn, Kind.WEIGHT))
        in_place.extend(_inside(state.rank, span, Kind.WEIGHT, Kind.WEIGHT, live))
        owned = merge(masters[span.fqn])
        for gap in _outside(state.rank, span, Kind.WEIGHT, Kind.MASTER, live):
            rest = Span(fqn=span.fqn, first=gap.first, last=gap.last)
            in_place.extend(_inside(state.rank, rest, Kind.WEIGHT, Kind.MASTER, owned))
            lacking.extend(_outside(state.rank, rest, Kind.WEIGHT, Kind.MASTER, owned))
    return in_place, lacking


def _inside(rank: int, span: Span, kind: Kind, source_kind: Kind, parts: tuple[Interval, ...]) -> list[_Part]:
    return [
        _Part(rank=rank, fqn=span.fqn, kind=kind, source_kind=source_kind, first=first, last=last)
        for first, last in clip((span.first, span.last), parts)
    ]


def _outside(rank: int, span: Span, kind: Kind, source_kind: Kind, parts: tuple[Interval, ...]) -> list[_Part]:
    return [
        _Part(rank=rank, fqn=span.fqn, kind=kind, source_kind=source_kind, first=first, last=last)
        for first, last in subtract((span.first, span.last), parts)
    ]


def _cut(part: _Part, first: int, last: int, tier: Tier = Tier.OWN, source: Source | None = None) -> _Part:
    """Spelled out: `replace` would take half of the time of a large restore."""
    return _Part(
        rank=part.rank,
        fqn=part.fqn,
        kind=part.kind,
        source_kind=part.source_kind,
        first=first,
        last=last,
        tier=tier,
        source=source,
    )


def _spread(choices: Iterable[_Choice]) -> Iterator[_Part]:
    """Largest first, each from the node that has the fewest bytes to send so far; then parts move to other sources as
    long as that leaves the fuller of the two with less."""
    load: Counter[str] = Counter()

    def rank_sources(source: Source) -> tuple[int, Source]:
        assert source.node is not None, source
        return load[source.node], source

    ordered = sorted(choices, key=lambda choice: (-choice.part.numel, _order(choice.part)))
    chosen: list[Source | None] = [None] * len(ordered)
    moved = True
    for _ in range(_MOST_PASSES):
        if not moved:
            break
        moved = False
        for index, choice in enumerate(ordered):
            best, before = min(choice.sources, key=rank_sources), chosen[index]
            num_bytes = choice.part.numel * ELEMENT_BYTES
            if before is None or load[str(best.node)] + num_bytes < load[str(before.node)]:
                load[str(best.node)] += num_bytes
                if before is not None:
                    load[str(before.node)] -= num_bytes
                chosen[index], moved = best, True
    for choice, source in zip(ordered, chosen, strict=True):
        yield _cut(choice.part, choice.part.first, choice.part.last, Tier.PEER, source)


def _order(part: _Part) -> tuple[int, bool, str, Kind, int]:
    return part.rank, part.kind is Kind.WEIGHT, part.fqn, part.kind, part.first


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """In the order of transfers; neighbours from one shard become one."""
    joined: list[_Part] = []
    for part in sorted(parts, key=_order):
        if joined and _continues(joined[-1], part):
            joined[-1] = _cut(part, joined[-1].first, part.last, part.tier, part.source)
        else:
            joined.append(part)
    return joined


def _continues(one: _Part, other: _Part) -> bool:
    return (
        one.last == other.first
        and (one.rank, one.fqn, one.kind) == (other.rank, other.fqn, other.kind)
        and (one.source_kind, one.tier, one.source) == (other.source_kind, other.tier, other.source)
    )


def _transfer(part: _Part, precision: Precision) -> Transfer:
    element_bytes = _WEIGHT_BYTES[precision] if part.source_kind is Kind.WEIGHT else ELEMENT_BYTES
    here = Transfer(
        rank=part.rank,
        key=ShardKey(fqn=part.fqn, kind=part.kind, first=part.first, last=part.last),
        source_kind=part.source_kind,
        tier=part.tier,
        num_bytes=part.numel * element_bytes,
    )
    source = part.source
    if source is None:
        return here
    return replace(
        here,
        node=source.node,
        name=source.name,
        offset=source.offset + (part.first - source.first) * ELEMENT_BYTES,
        checksum=source.checksum,
        before_bytes=(part.first - source.first) * ELEMENT_BYTES,
        after_bytes=(source.last - part.last) * ELEMENT_BYTES,
    )
