"""What ranks exchange once a step, round by round: the routes of `reduction`, by the algorithms that a plan names.

An algorithm (`collective_messages`) is among holders, the replicas that hold a unit, and sends numbered blocks. Here
holders become ranks and blocks become spans: what a holder vouches for is its block, whatever its share, or its blocks,
if it owns several. A rank of one holder and a rank of another exchange of each block what both have, so replicas need
not have the same degree of tensor parallelism. Where nothing is named, everybody sends everybody's part at once: those
of a node among themselves before, unless a backward would wait for that (`overlap.gradients`).

Pure functions, as those of `reduction`: each send has its receive, in the same round, by construction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal_planner.algorithms import DIRECT
from shoal_planner.collective_messages import MessagePlan, Round, message_plan
from shoal_planner.errors import InvalidField
from shoal_planner.groups import collective_of
from shoal_planner.holder_trees import arranged
from shoal_planner.job import ModelSpec
from shoal_planner.plan import Plan
from shoal_planner.schedule import sync_units
from shoal_planner.slices import Portion
from shoal_recovery.intervals import merge
from shoal_recovery.state import ShardMap, Span, common
from shoal_workers.reduction import (
    NO_ROUTES,
    Message,
    UnitRoutes,
    beside_routes,
    gather_routes,
    of_home,
    reduce_routes,
    spread_routes,
)

Rounds = tuple[UnitRoutes, ...]
RoundsByUnit = Mapping[int, Rounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Of one rank, by unit: how gradients come to who vouches for them (`reduces`), the sums from there to other owners
    (`spreads`), and updated weights from owners to who keeps them (`gathers`). A round may begin when the one before
    has ended; all who exchange a unit have as many rounds for it."""

    reduces: RoundsByUnit
    spreads: RoundsByUnit
    gathers: RoundsByUnit


def ways(plan: Plan, model: ModelSpec, shards: ShardMap, rank: int, zones: Mapping[str, str]) -> Ways:
    """`zones` are those of nodes, one zone for all that are not in it. Raises InvalidField where an algorithm is not
    for the replicas that hold a unit."""
    found: Iterator[dict[int, Rounds]] = (
        {portion.unit: (routes,) for portion, routes in routes_of(shards, model, rank).items()}
        for routes_of in (reduce_routes, spread_routes, gather_routes)
    )
    reduces, spreads, gathers = found
    beside = beside_routes(shards, model, rank)
    for unit, messages, members in _named(plan, model, rank, zones):
        group = _Group(unit, messages, members, _has(shards, members, unit, model))
        reduces[unit] = group.rounds(rank, messages.reduce_rounds)
        back = group.rounds(rank, messages.gather_rounds)
        if plan.sharding.optimizer == "none":  # all own all: they need the sums, and make weights of them by themselves
            spreads[unit] = back
        else:
            gathers[unit] = (*back, beside.get(Portion(unit), NO_ROUTES))
    return Ways(reduces=reduces, spreads=spreads, gathers=gathers)


_Members = tuple[tuple[int, ...], ...]  # the ranks of each holder of a unit, in the order of its algorithm


def _named(
    plan: Plan, model: ModelSpec, rank: int, zones: Mapping[str, str]
) -> Iterator[tuple[int, MessagePlan, _Members]]:
    """The units that this rank exchanges by an algorithm, or in more rounds than one."""
    ranks: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for place in plan.places() if plan.exchanges_whole else ():
        ranks[place.pipeline, place.stage, place.replica].append(place.rank)
    units = {(p, s): sync_units(plan, model, p, s) for p, s, _ in ranks}
    for unit in range(model.layers + 2):
        name = collective_of(plan.groups, plan.num_layers, unit, unit + 1)
        holders = [(p, s, r) for p, s, r in ranks if unit in units[p, s]]
        if len(holders) < 2 or not any(rank in ranks[holder] for holder in holders):
            continue
        nodes = [plan.pipelines[p].stages[s].replicas[r].node for p, s, r in holders]
        tree, order = arranged(nodes, zones)
        if name == DIRECT and (isinstance(tree, int) or plan.overlap.gradients):
            continue
        try:
            messages = message_plan(name, tree)
        except InvalidField as error:
            raise InvalidField("groups", error.value, error.problem) from error
        yield unit, messages, tuple(tuple(ranks[holders[at]]) for at in order)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Has:
    """What a rank has of a unit: gradients that it gives, and what it vouches for."""

    gives: tuple[Span, ...]
    vouches: tuple[Span, ...]


def _has(shards: ShardMap, members: _Members, unit: int, model: ModelSpec) -> Mapping[int, _Has]:
    states = {state.rank: state for state in shards.ranks}
    return {
        rank: _Has(
            gives=of_home(states[rank].contributes, unit, model), vouches=of_home(states[rank].vouches, unit, model)
        )
        for ranks in members
        for rank in ranks
    }


class _Group:
    """Those who exchange a unit, and the blocks that its algorithm sends."""

    def __init__(self, unit: int, messages: MessagePlan, members: _Members, has: Mapping[int, _Has]) -> None:
        self._unit = unit
        self._members = members
        self._has = has
        self._blocks: list[tuple[Span, ...]] = [() for _ in messages.owners]
        for at, ranks in enumerate(members):
            own = [block for block, owner in enumerate(messages.owners) if owner == at]
            spans = [span for rank in ranks for span in has[rank].vouches]
            for block, part in zip(own, _parts(spans, len(own)), strict=True):
                self._blocks[block] = part

    def rounds(self, rank: int, rounds: Iterable[Round]) -> Rounds:
        return tuple(self._routes(rank, messages) for messages in rounds)

    def _routes(self, rank: int, messages: Round) -> UnitRoutes:
        """What this rank sends and receives in a round: to and from each other holder all of its blocks at once."""
        here = next(at for at, ranks in enumerate(self._members) if rank in ranks)
        leaving: defaultdict[int, list[Span]] = defaultdict(list)
        coming: defaultdict[int, list[Span]] = defaultdict(list)
        for message in messages:
            for end, other, found in (
                (message.sender, message.receiver, leaving),
                (message.receiver, message.sender, coming),
            ):
                if end == here:
                    found[other] += (span for block in self._blocks[message.first : message.last] for span in block)
        return UnitRoutes(
            sends=tuple(
                Message(portion=Portion(self._unit), source=rank, destination=other, spans=spans)
                for other, spans in self._with_ranks(rank, leaving)
            ),
            receives=tuple(
                Message(portion=Portion(self._unit), source=other, destination=rank, spans=spans)
                for other, spans in self._with_ranks(rank, coming)
            ),
        )

    def _with_ranks(self, rank: int, passed: Mapping[int, list[Span]]) -> list[tuple[int, tuple[Span, ...]]]:
        """From what passes between this rank's holder and others: between this rank and others, in their order."""
        found = []
        for holder, spans in passed.items():
            ours = common(self._has[rank].gives, joined(spans))
            found += [(other, common(ours, self._has[other].gives)) for other in self._members[holder]]
        return sorted((other, spans) for other, spans in found if spans)


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sorted and without neighbours."""
    by_name: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        by_name[span.fqn].append((span.first, span.last))
    return tuple(
        Span(fqn=fqn, first=first, last=last) for fqn, some in sorted(by_name.items()) for first, last in merge(some)
    )


def _parts(spans: Sequence[Span], count: int) -> list[tuple[Span, ...]]:
    """These elements in so many parts that are as equal as can be."""
    total = sum(span.numel for span in spans)
    borders = [total * number // count for number in range(count + 1)]
    found: list[list[Span]] = [[] for _ in range(count)]
    offset = 0
    for span in spans:
        for part, low, high in zip(found, borders, borders[1:], strict=False):
            first, last = max(low, offset), min(high, offset + span.numel)
            if first < last:
                part.append(Span(fqn=span.fqn, first=span.first + first - offset, last=span.first + last - offset))
        offset += span.numel
    return [tuple(part) for part in found]
