"""Who sends which gradients and which weights to whom: a pure function of the ShardMap.

Every rank derives the messages that concern it from the map of the whole world, so that each send has its receive, with
the same spans in the same order, by construction. Gradients go from whoever contributes an interval to its owner,
weights from the owner to whoever holds it. A parameter travels with its first unit. Owners sum contributions in the
order of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_recovery.intervals import Interval, clip, merge
from shoal_recovery.state import RankState, ShardMap, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The spans of one unit that `source` packs, in this order, into one buffer for `destination`."""

    unit: int
    source: int
    destination: int
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRoutes:
    """What one rank sends and receives for one unit, each in the order of the other ranks."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Routes = Mapping[int, UnitRoutes]
_Side = Mapping[str, tuple[Interval, ...]]  # what a rank gives or takes, by parameter


def reduce_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The gradients that `rank` sends to owners, and receives as one; by unit, for units with any."""
    return _routes(shards, model, rank, gives=lambda state: state.contributes, takes=lambda state: state.owns)


def gather_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The weights that `rank` sends as their owner, and receives as a holder; by unit, for units with any."""
    return _routes(shards, model, rank, gives=lambda state: state.owns, takes=lambda state: state.holds)


_Choice = Callable[[RankState], tuple[Span, ...]]


def _routes(shards: ShardMap, model: ModelSpec, rank: int, *, gives: _Choice, takes: _Choice) -> Routes:
    order = {parameter.fqn: (parameter.units[0], index) for index, parameter in enumerate(parameters(model))}
    own = next(state for state in shards.ranks if state.rank == rank)
    own_gives, own_takes = _side(gives(own)), _side(takes(own))
    sends: defaultdict[int, list[Message]] = defaultdict(list)
    receives: defaultdict[int, list[Message]] = defaultdict(list)
    for other in sorted((state for state in shards.ranks if state.rank != rank), key=lambda state: state.rank):
        for unit, spans in _common(own_gives, _side(takes(other)), order).items():
            sends[unit].append(Message(unit=unit, source=rank, destination=other.rank, spans=spans))
        for unit, spans in _common(_side(gives(other)), own_takes, order).items():
            receives[unit].append(Message(unit=unit, source=other.rank, destination=rank, spans=spans))
    return {
        unit: UnitRoutes(sends=tuple(sends[unit]), receives=tuple(receives[unit]))
        for unit in sorted({*sends, *receives})
    }


def _side(spans: tuple[Span, ...]) -> _Side:
    found: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        found[span.fqn].append((span.first, span.last))
    return {fqn: merge(intervals) for fqn, intervals in found.items()}


def _common(gives: _Side, takes: _Side, order: Mapping[str, tuple[int, int]]) -> dict[int, tuple[Span, ...]]:
    """What one side gives and the other takes, by unit; spans in the order of the model, then of elements."""
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for fqn in sorted(gives.keys() & takes.keys(), key=order.__getitem__):
        found[order[fqn][0]].extend(_spans(fqn, gives[fqn], takes[fqn]))
    return {unit: tuple(spans) for unit, spans in found.items() if spans}


def _spans(fqn: str, gives: tuple[Interval, ...], takes: tuple[Interval, ...]) -> Iterator[Span]:
    for interval in gives:
        for first, last in clip(interval, takes):
            yield Span(fqn=fqn, first=first, last=last)
