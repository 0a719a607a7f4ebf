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
# levelled up to this ratio: beyond it too many would be idle.
_FIGURES = ("intra_bytes_per_s", "inter_bytes_per_s", "nics", "host_memory_bytes", "devices")
_IDLE = 4 / 3
# Kinds of nodes are left out up to this part of what all are worth, and so many at most: what one more node hides.
_PART, _MOST = 1 / 4, 2


def plainer(costs: CostModel) -> Iterator[ClusterSnapshot]:
    """With nodes made equal that differ in one figure alone; then without the kind of node that is worth least, and
    without the next one, too; then the kind alone that is worth most, if that is most of all."""
    levelled = level(usable_nodes(costs.job, costs.snapshot))
    if levelled:
        nodes = tuple(levelled.get(node.id, node) for node in costs.snapshot.nodes)
        yield dataclasses.replace(costs.snapshot, nodes=nodes)
    kinds = _by_worth(costs)
    left, part = costs.snapshot, _PART * sum(_worth(kind, costs) for kind in kinds)
    for number, kind in enumerate(kinds[:-1]):
        part -= _worth(kind, costs)
        if part < 0:
            return
        left = left.without(kind.nodes)
        # A kind more, which is worth little, must not put what is found without all of these out of reach.
        if number < _MOST or number == len(kinds) - 2:
            yield left


def ever_fewer(costs: CostModel) -> Iterator[ClusterSnapshot]:
    """Without the kind of node that is worth least, without the next one, too, until one kind is left."""
    left = costs.snapshot
    for kind in _by_worth(costs)[:-1]:
        left = left.without(kind.nodes)
        yield left


def _by_worth(costs: CostModel) -> list[Kind]:
    kinds = group_kinds(usable_nodes(costs.job, costs.snapshot), costs)
    return sorted(kinds, key=lambda kind: _worth(kind, costs))


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
            value = getattr(node, figure)
            near = value / _IDLE if figure == "devices" else 0.0
            lower = min(other for other in values[_but(node, figure)] if other >= near)
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
