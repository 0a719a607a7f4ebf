"""Equal parts of different machines, exchanged in a plan where that keeps more within machines.

Owns which are exchanged. To the search such parts are as different as any nodes, so that it seldom tries all orders.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping

from shoal_planner.costs import CostModel
from shoal_planner.node_kinds import node_shape
from shoal_planner.plan import Plan, Stage

_MOST_LOOKS = 400  # at exchanged plans, for each plan


def exchange_parts(plan: Plan, seconds: float, costs: CostModel, consider: Callable[[Plan], float]) -> None:
    """Offers `consider`, which answers with its seconds, the plan with any two equal parts exchanged, goes on from the
    fastest as long as that is faster than before (`seconds` at first), and ends where none is."""
    left = _MOST_LOOKS
    while True:
        best, found = seconds, None
        for here, there in _pairs(plan, costs):
            if left == 0:
                return
            left -= 1
            changed = _renamed(plan, {here: there, there: here})
            if (its_s := consider(changed)) < best:
                best, found = its_s, changed
        if found is None:
            return
        plan, seconds = found, best


def _pairs(plan: Plan, costs: CostModel) -> list[tuple[str, str]]:
    """Of parts that are equal but for their machines, at least one of which the plan uses."""
    used = {replica.node for replica in plan.replicas()}
    alike: dict[object, list[str]] = defaultdict(list)
    for node in costs.snapshot.nodes:
        if node.host is not None:
            alike[node_shape(node, frozenset())].append(node.id)
    pairs = itertools.chain(*(itertools.combinations(nodes, 2) for nodes in alike.values()))
    return [pair for pair in pairs if not used.isdisjoint(pair)]


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    def stage(old: Stage) -> Stage:
        replicas = (dataclasses.replace(one, node=names.get(one.node, one.node)) for one in old.replicas)
        return dataclasses.replace(old, replicas=tuple(replicas))

    pipelines = tuple(
        dataclasses.replace(pipeline, stages=tuple(map(stage, pipeline.stages))) for pipeline in plan.pipelines
    )
    return dataclasses.replace(plan, pipelines=pipelines, prediction=None, unused=())
