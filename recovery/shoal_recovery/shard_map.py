"""shard_map: who keeps which elements under a plan. The only code that turns a plan into intervals of state.

The rule, so that others can count elements without calling it. Every rank whose stage has one of a parameter's units
has a slice of it (its tp slice, or all of it where it is replicated), and holds it if it runs samples. Holders
contribute gradients; of a replicated parameter only tp rank 0 does.

What is split is divided level by level, from the smallest circle that the plan names (`planner/circles`: device group,
node, stage) to all who have a slice: in each circle the parameter is cut at the borders of what its members have from
the level before, and each piece of n elements goes to those who have it, in the order of ranks, in proportion to the
sums s_1 .. s_k of the shares (`Replica.state_share`) in their circles of the level before (at first: to their own
shares): number i gets [floor(n * (s_1 + .. + s_{i-1}) / S), floor(n * (s_1 + .. + s_i) / S)), where S is their sum. So
in every circle a rank's part is its share of the circle's, up to rounding; and what it has at a level lies within what
it has at the levels below: what circles sum at the end of a step is summed by those who keep the same part.

Of a replicated parameter other tp ranks keep the same weights as tp rank 0 of their replica. What is frozen is never
split, nor are weights and gradients of blocks that a stage keeps whole: there a rank keeps and sums its whole slice.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

from shoal_planner.circles import circles
from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.levels import LEVELS, Level
from shoal_planner.parameters import Parameter, frozen, parameters, stage_units
from shoal_planner.plan import Override, Plan, RankPlace, Replica
from shoal_planner.slices import check_slices, slicing_of
from shoal_recovery.intervals import Interval, merge
from shoal_recovery.state import Circles, RankState, ShardMap, Span

_NODE: tuple[Level] = ("node",)
_Parts = Mapping[int, tuple[Interval, ...]]  # by rank
_Place = tuple[int, int, int]  # pipeline, stage and replica


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """What a rank would hold of a parameter if nothing were split. `leads`: it speaks for its replica, if others there
    have the same."""

    place: RankPlace
    interval: Interval
    leads: bool


def is_replicated(plan: Plan) -> bool:
    """Whether each replica keeps weights and optimizer state of the whole model: what lost ones had nobody takes
    over."""
    sharding = plan.sharding
    return sharding.weights == sharding.optimizer == "none" and all(len(one.stages) == 1 for one in plan.pipelines)


def shard_map(plan: Plan, model: ModelSpec) -> ShardMap:
    """What every rank of `plan` keeps. Raises InvalidField if the plan is not one of this model."""
    if plan.num_layers != model.layers:
        raise InvalidField("pipelines", plan.num_layers, f"must cover the {model.layers} layers of the model")
    check_slices(plan, model)
    division, by_unit = _Division(plan), _places_by_unit(plan)
    hosted = _marked_units(plan, lambda override: override.offload == "optimizer")
    whole = _marked_units(plan, lambda override: override.sharding == "none")
    found: defaultdict[tuple[str, int], list[Span]] = defaultdict(list)  # by field of RankState and rank
    for parameter in sorted(parameters(model), key=lambda parameter: parameter.fqn):
        slices = _slices(parameter, by_unit)
        for name, parts in division.divide(slices, whole.get(parameter.units[0], frozenset())).items():
            for rank, intervals in parts.items():
                found[name, rank].extend(Span(fqn=parameter.fqn, first=first, last=last) for first, last in intervals)
        for rank in hosted.get(parameter.units[0], ()):
            found["hosted", rank].extend(span for span in found["owns", rank] if span.fqn == parameter.fqn)
    for parameter in sorted(frozen(model), key=lambda parameter: parameter.fqn):
        for rank, (first, last) in division.runs_with(_slices(parameter, by_unit)):
            found["frozen", rank].append(Span(fqn=parameter.fqn, first=first, last=last))
    return ShardMap(
        ranks=tuple(
            RankState(
                rank=place.rank,
                device=place.device,
                circles=division.circles(place),
                slicing=slicing_of(plan.pipelines[place.pipeline].stages[place.stage]),
                **{name: tuple(found[name, place.rank]) for name in _FIELDS},
            )
            for place in plan.places()
        )
    )


_FIELDS = (
    "holds",
    "keeps",
    "contributes",
    "sums",
    "alone",
    "owns",
    "vouches",
    "near",
    "relays",
    "hosted",
    "frozen",
)


class _Division:
    """How one plan divides each of its parameters."""

    def __init__(self, plan: Plan) -> None:
        self._sharding = plan.sharding
        self._shares = _integer_shares(plan)
        self._busy = {place.rank: _replica(plan, place).samples > 0 for place in plan.places()}
        wanted = {self._sharding.weights, self._sharding.gradients}
        if self._sharding.secondary or self._sharding.relayed:
            wanted.add("node")
        if self._sharding.optimizer != "cluster":  # which is the last one of all: among whoever holds a weight
            wanted.add(self._sharding.optimizer)
        self._levels = tuple(level for level in LEVELS if level in wanted and level != "none")
        used: tuple[Level, ...] = ("none", *self._levels)
        self._circle = {level: _numbers(plan, level) for level in {*used, *_NODE}}

    def circles(self, place: RankPlace) -> Circles:
        sharding, key = self._sharding, _key(place)
        return Circles(
            weights=self._circle[sharding.weights][key],
            gradients=self._circle[sharding.gradients][key],
            optimizer=0 if sharding.optimizer == "cluster" else self._circle[sharding.optimizer][key],
            node=self._circle["node"][key],
            tp_rank=place.tp_rank,
            tp=place.tp,
        )

    def runs_with(self, slices: Sequence[_Slice]) -> Iterator[tuple[int, Interval]]:
        """What each rank that runs samples has of a parameter that nobody owns: its slice, whatever is split."""
        return ((one.place.rank, one.interval) for one in slices if self._busy[one.place.rank])

    def divide(self, slices: Sequence[_Slice], unsplit: Set[int] = frozenset()) -> dict[str, _Parts]:
        """By field of RankState what each rank has of a parameter, which is split among none of the ranks `unsplit`."""
        leading = [one for one in slices if one.leads]
        whole = {one.place.rank: (one.interval,) for one in slices}
        by_level, vouches = self._by_level(leading)
        contributes = {one.place.rank: whole[one.place.rank] for one in leading if self._busy[one.place.rank]}
        holds = {rank: intervals for rank, intervals in whole.items() if self._busy[rank]}
        keeps: _Parts = holds
        sums: _Parts = contributes
        if self._sharding.weights != "none":
            keeps = _for_replicas(slices, by_level[self._sharding.weights])
        if self._sharding.gradients != "none":
            sums = by_level[self._sharding.gradients]
        owns = vouches if self._sharding.optimizer == "cluster" else by_level[self._sharding.optimizer]
        near = _for_replicas(slices, by_level["node"]) if self._sharding.secondary else {}
        relays = by_level["node"] if self._sharding.relayed else {}
        if unsplit:
            # Who runs nothing needs the gradient of what it owns; where it sums nothing at all that is known of it.
            sharing = self._sharding.gradients != "none"
            idle = {rank: part for rank, part in owns.items() if sharing and not self._busy[rank]}
            keeps, sums = _instead(keeps, holds, unsplit), _instead(sums, {**contributes, **idle}, unsplit)
            near, relays = _instead(near, {}, unsplit), _instead(relays, {}, unsplit)
        return {
            "holds": holds,
            "keeps": keeps,
            "contributes": contributes,
            "sums": sums,
            "alone": {rank: sums[rank] for rank in unsplit if rank in sums},
            "owns": owns,
            "vouches": vouches,
            "near": near,
            "relays": relays,
        }

    def _by_level(self, leading: Sequence[_Slice]) -> tuple[dict[Level, _Parts], _Parts]:
        """What each rank has if no more is split than at a level, for the plan's levels; and among all."""
        parts: _Parts = {one.place.rank: (one.interval,) for one in leading}
        weights = {rank: self._shares[rank] for rank in parts}
        found: dict[Level, _Parts] = {"none": parts}
        for level in self._levels:
            members: defaultdict[int, list[int]] = defaultdict(list)
            for one in leading:
                members[self._circle[level][_key(one.place)]].append(one.place.rank)
            parts = {
                rank: part for ranks in members.values() for rank, part in _split_up(ranks, parts, weights).items()
            }
            sums = {number: self._replica_shares(ranks, leading) for number, ranks in members.items()}
            weights = {rank: sums[number] for number, ranks in members.items() for rank in ranks}
            found[level] = parts
        return found, _split_up(sorted(parts), parts, weights)

    def _replica_shares(self, ranks: Sequence[int], leading: Sequence[_Slice]) -> int:
        """Of a circle: each of its replicas once, however many ranks it has."""
        replicas = {_key(one.place): self._shares[one.place.rank] for one in leading if one.place.rank in ranks}
        return sum(replicas.values())


def _replica(plan: Plan, place: RankPlace) -> Replica:
    return plan.pipelines[place.pipeline].stages[place.stage].replicas[place.replica]


def _key(place: RankPlace) -> _Place:
    return place.pipeline, place.stage, place.replica


def _numbers(plan: Plan, level: Level) -> dict[_Place, int]:
    """The circle that each replica is in at a level, by number."""
    counter = itertools.count()
    found: dict[_Place, int] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for circle in circles(stage, level, plan.group_size):
                number = next(counter)
                found |= {(p, s, member): number for member in circle.members}
    return found


def _integer_shares(plan: Plan) -> dict[int, int]:
    """Each rank's `state_share` as a whole number, all by one factor: borders are then exact on every machine."""
    shares = {place.rank: Fraction(_replica(plan, place).state_share) for place in plan.places()}
    factor = math.lcm(*(share.denominator for share in shares.values()))
    return {rank: int(share * factor) for rank, share in shares.items()}


def _places_by_unit(plan: Plan) -> dict[int, list[RankPlace]]:
    found: defaultdict[int, list[RankPlace]] = defaultdict(list)
    for place in plan.places():
        for unit in stage_units(plan, place.pipeline, place.stage):
            found[unit].append(place)
    return found


def _marked_units(plan: Plan, is_marked: Callable[[Override], bool]) -> dict[int, set[int]]:
    """By unit, the ranks whose stage says so of it. Of blocks alone it does: unit 1 + i is layer i."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for place in plan.places():
        for override in plan.pipelines[place.pipeline].stages[place.stage].overrides:
            if is_marked(override):
                for layer in range(*override.layers):
                    found[layer + 1].add(place.rank)
    return found


def _instead(parts: _Parts, others: _Parts, ranks: Set[int]) -> _Parts:
    """The parts, but for these ranks what the others say, which may be nothing."""
    changed = {rank: others[rank] for rank in ranks if rank in others}
    return {rank: part for rank, part in parts.items() if rank not in ranks} | changed


def _slices(parameter: Parameter, by_unit: Mapping[int, list[RankPlace]]) -> list[_Slice]:
    """In the order of ranks, each rank once even where it has both units of a tied embedding."""
    places = {place.rank: place for unit in parameter.units for place in by_unit[unit]}
    found: list[_Slice] = []
    for rank in sorted(places):
        place = places[rank]
        interval = parameter.interval(place.tp_rank, place.tp)
        if interval[0] < interval[1]:  # fewer rows than tp ranks leave some with none
            found.append(_Slice(place=place, interval=interval, leads=parameter.cut or place.tp_rank == 0))
    return found


def _for_replicas(slices: Sequence[_Slice], parts: _Parts) -> _Parts:
    """As those who lead: ranks beside them in their replica have what they have."""
    lead = {_key(one.place): one.place.rank for one in slices if one.leads}
    return {one.place.rank: parts[one.place.rank if one.leads else lead[_key(one.place)]] for one in slices}


def _split_up(ranks: Sequence[int], parts: _Parts, weights: Mapping[int, int]) -> dict[int, tuple[Interval, ...]]:
    """What these ranks have, each piece between two neighbouring borders split among those who have it."""
    if len(ranks) == 1:
        return {ranks[0]: parts[ranks[0]]}
    found: defaultdict[int, list[Interval]] = defaultdict(list)
    for first, last, present in _pieces(ranks, parts):
        for rank, interval in zip(present, _split(first, last, [weights[rank] for rank in present]), strict=True):
            found[rank].append(interval)
    return {rank: merge(found[rank]) for rank in ranks}


def _pieces(ranks: Sequence[int], parts: _Parts) -> Iterator[tuple[int, int, list[int]]]:
    """Between all neighbouring borders, who is there, in the order of `ranks`."""
    borders = sorted({border for rank in ranks for interval in parts[rank] for border in interval})
    index = {border: number for number, border in enumerate(borders)}
    present: list[list[int]] = [[] for _ in borders]
    for rank in ranks:
        for first, last in parts[rank]:
            for number in range(index[first], index[last]):
                present[number].append(rank)
    for (first, last), here in zip(itertools.pairwise(borders), present, strict=False):
        if here:
            yield first, last, here


def _split(first: int, last: int, shares: Sequence[int]) -> Iterator[Interval]:
    """Neighbouring intervals, in proportion to the shares; some may be empty."""
    total = sum(shares)
    sums = itertools.accumulate(shares, initial=0)
    return itertools.pairwise(first + (last - first) * part // total for part in sums)
