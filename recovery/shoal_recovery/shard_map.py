"""shard_map: who keeps which elements under a plan. The only code that turns a plan into intervals of state.

The rule, so that others can count elements without calling it: every rank whose stage has one of a parameter's units
holds it (its tp slice, or all of it where it is replicated). Holders contribute gradients; of a replicated parameter
only tp rank 0 does. The parameter is cut at the borders of all contributors, and each segment of n elements is split
among those who contribute it, in the order of ranks: with shares s_1 .. s_k (`Replica.state_share`), contributor i owns
[floor(n * (s_1 + .. + s_{i-1}) / S), floor(n * (s_1 + .. + s_i) / S)), where S is their sum. So equal shares differ by
at most one element per segment.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import Parameter, parameters, stage_units
from shoal_planner.plan import Plan, RankPlace
from shoal_recovery.intervals import Interval, merge
from shoal_recovery.state import RankState, ShardMap, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    rank: int
    interval: Interval
    contributes: bool
    share: int


def shard_map(plan: Plan, model: ModelSpec) -> ShardMap:
    """What every rank of `plan` keeps. Raises InvalidField if the plan is not one of this model."""
    if plan.num_layers != model.layers:
        raise InvalidField("pipelines", plan.num_layers, f"must cover the {model.layers} layers of the model")
    places, shares, by_unit = tuple(plan.places()), _integer_shares(plan), _places_by_unit(plan)
    holds: defaultdict[int, list[Span]] = defaultdict(list)
    contributes: defaultdict[int, list[Span]] = defaultdict(list)
    owns: defaultdict[int, list[Span]] = defaultdict(list)
    for parameter in sorted(parameters(model), key=lambda parameter: parameter.fqn):
        holders = _holders(parameter, by_unit, shares)
        for holder in holders:
            span = Span(fqn=parameter.fqn, first=holder.interval[0], last=holder.interval[1])
            holds[holder.rank].append(span)
            if holder.contributes:
                contributes[holder.rank].append(span)
        for rank, intervals in _owners([holder for holder in holders if holder.contributes]).items():
            owns[rank].extend(Span(fqn=parameter.fqn, first=first, last=last) for first, last in merge(intervals))
    return ShardMap(
        ranks=tuple(
            RankState(
                rank=place.rank,
                device=place.device,
                holds=tuple(holds[place.rank]),
                contributes=tuple(contributes[place.rank]),
                owns=tuple(owns[place.rank]),
            )
            for place in places
        )
    )


def _integer_shares(plan: Plan) -> dict[int, int]:
    """Each rank's `state_share` as a whole number, all by one factor: borders are then exact on every machine."""
    shares = {
        place.rank: Fraction(plan.pipelines[place.pipeline].stages[place.stage].replicas[place.replica].state_share)
        for place in plan.places()
    }
    factor = math.lcm(*(share.denominator for share in shares.values()))
    return {rank: int(share * factor) for rank, share in shares.items()}


def _places_by_unit(plan: Plan) -> dict[int, list[RankPlace]]:
    found: defaultdict[int, list[RankPlace]] = defaultdict(list)
    for place in plan.places():
        for unit in stage_units(plan, place.pipeline, place.stage):
            found[unit].append(place)
    return found


def _holders(parameter: Parameter, by_unit: Mapping[int, list[RankPlace]], shares: Mapping[int, int]) -> list[_Holder]:
    """In the order of ranks, each rank once even where it has both units of a tied embedding."""
    places = {place.rank: place for unit in parameter.units for place in by_unit[unit]}
    found: list[_Holder] = []
    for rank in sorted(places):
        place = places[rank]
        interval = parameter.interval(place.tp_rank, place.tp)
        if interval[0] < interval[1]:  # fewer rows than tp ranks leave some with none
            contributes = parameter.cut or place.tp_rank == 0
            found.append(_Holder(rank=rank, interval=interval, contributes=contributes, share=shares[rank]))
    return found


def _owners(contributors: Sequence[_Holder]) -> dict[int, list[Interval]]:
    """Splits every segment between two neighbouring borders among those who contribute it."""
    owned: defaultdict[int, list[Interval]] = defaultdict(list)
    borders = sorted({border for holder in contributors for border in holder.interval})
    for first, last in itertools.pairwise(borders):
        present = [holder for holder in contributors if holder.interval[0] <= first and last <= holder.interval[1]]
        for holder, interval in zip(present, _split(first, last, [holder.share for holder in present]), strict=True):
            owned[holder.rank].append(interval)
    return owned


def _split(first: int, last: int, shares: Sequence[int]) -> Iterator[Interval]:
    """Neighbouring intervals, in proportion to the shares; some may be empty."""
    total = sum(shares)
    sums = itertools.accumulate(shares, initial=0)
    return itertools.pairwise(first + (last - first) * part // total for part in sums)
