"""What the largest exchanges of a plan take, by their own algorithm and by others.

Owns which are looked at. Does not own what an algorithm takes (`exchanges`) nor which one a plan has (`group_choice`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shoal_planner.algorithms import DIRECT
from shoal_planner.costs import CostModel
from shoal_planner.exchanges import topology
from shoal_planner.loads import Segment, segments
from shoal_planner.plan import Plan
from shoal_planner.predict import unit_bytes, unit_exchange

MAX_EXCHANGES = 4
_MAX_OVER_ALL = 3  # others that do not go level by level, the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    collective: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What some replicas exchange in a step: the gradients and weights of what they all hold. Seconds are as if nothing
    else passed the same interfaces; `others` are fastest first."""

    holds: str
    num_replicas: int
    num_nodes: int
    collective: str
    seconds: float
    others: tuple[Alternative, ...]


def exchanged(plan: Plan, costs: CostModel) -> tuple[Exchanged, ...]:
    """Those that take longest; none where there is but one way. Raises KeyError for an unknown node."""
    if not plan.exchanges_whole:
        return ()
    parts = [part for part in segments(plan, costs) if len(part.holders) > 1]
    alike = itertools.groupby(parts, key=lambda part: (_sort(part, plan), part.holders, part.collective))
    found = [_exchanged(tuple(run), plan, costs) for _, run in alike]
    return tuple(sorted(found, key=lambda one: -one.seconds)[:MAX_EXCHANGES])


def _exchanged(parts: tuple[Segment, ...], plan: Plan, costs: CostModel) -> Exchanged:
    part = dataclasses.replace(parts[0], last=parts[-1].last)
    chosen, *others = (
        Alternative(collective=name, seconds=seconds)
        for name, seconds in ((part.collective, _seconds(part, costs)), *_others(part, costs))
    )
    return Exchanged(
        holds=_holds(part, plan),
        num_replicas=len(part.holders),
        num_nodes=len({holder.node for holder in part.holders}),
        collective=chosen.collective,
        seconds=chosen.seconds,
        others=tuple(sorted(others, key=lambda other: (other.seconds, other.collective))),
    )


def _others(part: Segment, costs: CostModel) -> Iterator[tuple[str, float]]:
    place, num_bytes, count = topology(part.holders, costs), unit_bytes(part, costs), part.last - part.first
    over_all = sorted(place.others(num_bytes), key=lambda found: found.seconds)
    found = {one.name: count * one.seconds for one in (place.best(num_bytes), *over_all[:_MAX_OVER_ALL])}
    found[DIRECT] = _seconds(dataclasses.replace(part, collective=DIRECT), costs)
    return ((name, seconds) for name, seconds in found.items() if name != part.collective)


def _seconds(part: Segment, costs: CostModel) -> float:
    return 2 * (part.last - part.first) * unit_exchange(part, costs).seconds


def _sort(part: Segment, plan: Plan) -> int:
    """Ends of the model have sizes of their own."""
    return -1 if part.first == 0 else int(part.first > plan.num_layers)


def _holds(part: Segment, plan: Plan) -> str:
    match _sort(part, plan):
        case -1:
            return "embedding"
        case 1:
            return "head"
    return f"layer {part.first - 1}" if part.last == part.first + 1 else f"layers {part.first - 1}-{part.last - 2}"
