"""Plainer clusters within a cluster: every plan of one is a plan of the cluster, and takes no longer there.

Owns which of them are searched by themselves. What tells nodes apart gives a search more to choose from, and so other
places to begin and to end: a node that is a little better than its like, or one node more, must not hide what is found
without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.options import Kind, group_kinds, usable_nodes

# Of two nodes that differ in one of these alone, the better one can do all that the other can. Numbers of devices are
# levelled up to this ratio, as beyond it too many would be idle, or where so small a part of such nodes has more.
_FIGURES = ("intra_bytes_per_s", "inter_bytes_per_s", "nics", "host_memory_bytes", "devices")
_IDLE, _ODD = 4 / 3, 1 / 4
# Kinds of nodes that are so small a part of all, and worth as little, are left out together, as one more of them must
# not hide what is found without the others; then others up to a larger part, and so many at most.
_DUST, _ALL_DUST = 1 / 16, 1 / 8
_PART, _MOST = 1 / 4, 2


def plainer(costs: CostModel) -> Iterator[ClusterSnapshot]:
    """With nodes made equal that differ in one figure alone; of that, without the kinds of nodes that are worth next to
    nothing; then without the kind that is worth least of the others, and without the next one, too; then the kind alone
    that is worth most, if that is most of all."""
    levelled = _levelled(costs)
    if levelled is not costs:
        yield levelled.snapshot
    costs, kinds = levelled, _by_worth(levelled)
    left, part, dust = costs.snapshot, _PART * sum(_worth(kind, costs) for kind in kinds), _dust(kinds, costs)
    if len(dust) > 1:  # one alone is the first of the others
        left = _without(dust, costs)
        yield left
        kinds = kinds[len(dust) :]
    for number, kind in enumerate(kinds[:-1]):
        part -= _worth(kind, costs)
        if part < 0:
            return
        left = left.without(kind.nodes)
        # A kind more, which is worth little, must not put what is found without all of these out of reach.
        if number < _MOST or number == len(kinds) - 2:
            yield left


def plainest(costs: CostModel) -> Iterator[ClusterSnapshot]:
    """With nodes made equal and without those that are worth next to nothing, if there are any."""
    levelled = _levelled(costs)
    dust = _dust(_by_worth(levelled), levelled)
    if dust or levelled is not costs:
        yield _without(dust, levelled)


def alone(costs: CostModel) -> Iterator[ClusterSnapshot]:
    """Each kind of node alone."""
    kinds = _by_worth(costs)
    for kind in kinds if len(kinds) > 1 else ():
        yield costs.snapshot.without(node.id for node in costs.snapshot.nodes if node.id not in kind.nodes)


def ever_fewer(costs: CostModel) -> Iterator[ClusterSnapshot]:
    """Without the kind of node that is worth least, without the next one, too, until one kind is left."""
    left = costs.snapshot
    for kind in _by_worth(costs)[:-1]:
        left = left.without(kind.nodes)
        yield left


def _by_worth(costs: CostModel) -> list[Kind]:
    kinds = group_kinds(usable_nodes(costs.job, costs.snapshot), costs)
    return sorted(kinds, key=lambda kind: _worth(kind, costs))


def _levelled(costs: CostModel) -> CostModel:
    found = level(usable_nodes(costs.job, costs.snapshot))
    if not found:
        return costs
    nodes = tuple(found.get(node.id, node) for node in costs.snapshot.nodes)
    return CostModel(costs.job, dataclasses.replace(costs.snapshot, nodes=nodes), costs.profile)


def _without(kinds: list[Kind], costs: CostModel) -> ClusterSnapshot:
    return costs.snapshot.without([name for kind in kinds for name in kind.nodes])


def _dust(kinds: list[Kind], costs: CostModel) -> list[Kind]:
    """The first of these, which are in the order of their worth. Slow devices may be many, and have memory."""
    figures = [(_worth(kind, costs), float(kind.devices)) for kind in kinds]
    whole = [sum(figure) for figure in zip(*figures, strict=True)]
    number, part = 0, [0.0, 0.0]
    for figure in figures[:-1]:
        part = [before + value for before, value in zip(part, figure, strict=True)]
        if any(value > _DUST * all_ for value, all_ in zip(figure, whole, strict=True)):
            break
        if any(value > _ALL_DUST * all_ for value, all_ in zip(part, whole, strict=True)):
            break
        number += 1
    return kinds[:number]


def _worth(kind: Kind, costs: CostModel) -> float:
    return kind.devices / costs.part("block", kind.node.id, 1, 1).total_s


def level(nodes: tuple[Node, ...]) -> dict[str, Node]:
    """By id, those nodes that become as plain as another one."""
    found: dict[str, Node] = {}
    for figure in _FIGURES:
        values: dict[object, list[float]] = {}
        for node in nodes:
            values.setdefault(_but(node, figure), []).append(getattr(node, figure))
        for node in nodes:
            value, others = getattr(node, figure), values[_but(node, figure)]
            near = value / _IDLE if figure == "devices" else 0.0
            lower = min(other for other in others if other >= near)
            if figure == "devices" and sum(other > min(others) for other in others) <= _ODD * len(others):
                lower = min(others)
            if lower < value and node.id not in found:
                found[node.id] = _with(node, figure, lower)
    return found


def _with(node: Node, figure: str, value: Any) -> Node:
    group = min(node.device_group, value) if figure == "devices" else node.device_group
    return dataclasses.replace(node, **{figure: value, "device_group": group})


def _but(node: Node, figure: str) -> object:
    """Equal for nodes that differ in this figure alone, as far as costs hang on it."""
    figures = (getattr(node, other) for other in _FIGURES if other != figure)
    return node.device, node.speed, node.zone, node.device_group, node.group_bytes_per_s, *figures
