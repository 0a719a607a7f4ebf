"""Which algorithm the gradients of each part of a plan are added up by.

Owns the choice for a plan whose devices and layers stand. There are two candidates for the whole of it: the direct
exchange everywhere, and by each group of replicas the fastest of the algorithms that put least through the interfaces
of nodes. Which these are depends on where replicas stand alone, and the seconds of either are sums and maxima of what
links and memory take: so the better of the two is never slower than the direct exchange, nor on a better cluster.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from shoal_planner.algorithms import DIRECT
from shoal_planner.costs import CostModel
from shoal_planner.exchanges import topology
from shoal_planner.groups import Group
from shoal_planner.loads import Segment, segments
from shoal_planner.plan import Plan
from shoal_planner.predict import Exchange, together_s, unit_bytes, unit_exchange
from shoal_planner.score import score_with

# Plans of so few devices are proven best, and never worse on a better cluster, under the direct exchange. What is
# chosen after the search could break the latter: another plan may gain more by it than the one that was best before.
DIRECT_DEVICES = 8
_ALIKE = 1 + 1e-9


def with_groups(plan: Plan, costs: CostModel) -> Plan:
    """A plan that was scored, with algorithms where they make its predicted step shorter; else as it is."""
    assert plan.prediction is not None and not plan.groups
    if not plan.exchanges_whole or costs.snapshot.num_devices <= DIRECT_DEVICES:
        return plan
    direct = [(part, unit_exchange(part, costs)) for part in segments(plan, costs)]
    chosen = [_chosen(part, exchange, costs) for part, exchange in direct]
    if together_s(chosen) >= together_s(direct):
        return plan
    groups = groups_of([part for part, _ in chosen])
    found = score_with(dataclasses.replace(plan, groups=groups, prediction=None), costs)
    assert found.prediction is not None
    return found if found.prediction.step_s < plan.prediction.step_s else plan


def _chosen(part: Segment, direct: Exchange, costs: CostModel) -> tuple[Segment, Exchange]:
    """The direct exchange only if it puts as little through the interfaces of nodes, and is no slower."""
    if len(part.holders) < 2:
        return part, direct
    best = topology(part.holders, costs).best(unit_bytes(part, costs))
    found = dataclasses.replace(part, collective=best.name)
    ours = unit_exchange(found, costs)
    both = zip(direct.network_s, ours.network_s, strict=True)
    alike = all(theirs_s <= ours_s * _ALIKE for (_, theirs_s), (_, ours_s) in both)
    return (part, direct) if alike and direct.seconds <= ours.seconds else (found, ours)


def groups_of(parts: Sequence[Segment]) -> tuple[Group, ...]:
    """As few as say the algorithm of every part: all units of a plan in order."""
    blocks = [(name, tuple(alike)) for name, alike in itertools.groupby(parts[1:-1], key=lambda part: part.collective)]
    num_layers = parts[-1].first - 1
    found = list(_end(parts[0].collective, blocks[0][0], 0))
    for name, alike in blocks:
        if name != DIRECT:
            found.append(Group(layers=(alike[0].first - 1, alike[-1].last - 1), collective=name))
    return (*found, *_end(parts[-1].collective, blocks[-1][0], num_layers))


def _end(name: str, beside: str, at: int) -> Iterator[Group]:
    """An end of the model, where it does not go with the blocks beside it."""
    if name != beside:
        yield Group(layers=(at, at), collective=name)
