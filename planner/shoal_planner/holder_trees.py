"""Where the holders of a layer stand, as trees: holders on nodes, and these in zones.

The one place of this rule: the planner chooses and costs algorithms by these trees, and the engine counts holders
through them, so that both mean the same messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shoal_planner.algorithms import Tree


def tree_of(zones: Sequence[Sequence[int]]) -> Tree:
    """From the number of holders on each node of each zone; the fullest branches come first. A level is left out where
    none of its vertices has two branches."""
    branches = [_branch(zone, zones) for zone in zones]
    branches.sort(key=_fullness, reverse=True)
    if len(branches) == 1:
        return branches[0]
    return len(branches) if branches == [1] * len(branches) else tuple(branches)


def arranged(nodes: Sequence[str], zones: Mapping[str, str]) -> tuple[Tree, tuple[int, ...]]:
    """Of holders on these nodes, the tree, and the holders in the order in which they count through it. `zones` are
    those of nodes, one zone for all that are not in it."""
    by_node: defaultdict[str, list[int]] = defaultdict(list)
    for holder, node in enumerate(nodes):
        by_node[node].append(holder)
    by_zone: defaultdict[str, list[list[int]]] = defaultdict(list)
    for node, holders in sorted(by_node.items(), key=lambda item: (-len(item[1]), item[0])):
        by_zone[zones.get(node, "")].append(holders)
    counts = {zone: [len(holders) for holders in here] for zone, here in by_zone.items()}
    every = list(counts.values())
    ordered = sorted(by_zone, key=lambda zone: _fullness(_branch(counts[zone], every)), reverse=True)
    return tree_of(every), tuple(holder for zone in ordered for holders in by_zone[zone] for holder in holders)


def _branch(zone: Sequence[int], zones: Sequence[Sequence[int]]) -> Tree:
    """As all zones have the level between nodes, or none has; and all nodes that of their holders, or none has."""
    if all(holders == 1 for other in zones for holders in other):
        return len(zone)
    return tuple(zone) if any(len(other) > 1 for other in zones) else zone[0]


def _fullness(tree: Tree) -> tuple[int, ...]:
    return (tree,) if isinstance(tree, int) else tuple(size for branch in tree for size in _fullness(branch))
