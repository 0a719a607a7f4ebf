"""What replicas take to add up their gradients by each algorithm, where they stand: on nodes, and these in zones.

Owns the topology of a group of replicas: its levels, and what the ports there carry. Does not own the figures of links
(`costs`), what an algorithm makes of a topology (`collectives`), nor which one a plan names (`groups`).

A port's rate is the least, and its latency the greatest, that any of its level has: so a better link, more interfaces
or faster memory never make an exchange slower.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal_planner.algorithms import Tree
from shoal_planner.collective_counts import Fabric, link_fabric
from shoal_planner.collectives import Collective, by_level, named, over_all
from shoal_planner.costs import PER_PEER_S, CostModel, LinkCost
from shoal_planner.holder_trees import tree_of
from shoal_planner.loads import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where replicas stand. Levels at which nobody has a neighbour are left out.

    `joint` are fabrics by level for algorithms that go level by level, so that all replicas of a node, or all nodes of
    a zone, use its links at once; `alone` for all others, where it may fall to one replica to send for all. `spread`:
    which part of what leaves the port of a level leaves a single node, by level.
    """

    tree: Tree
    joint: tuple[Fabric, ...]
    alone: tuple[Fabric, ...]
    spread: tuple[float, ...]

    def best(self, num_bytes: float) -> Collective:
        """The fastest of those that put least through the interfaces of nodes."""
        return by_level(self.tree, num_bytes, self.joint)

    def named(self, name: str, num_bytes: float) -> Collective:
        """Raises InvalidField where the algorithm is not for so many replicas, or not for such nodes and zones."""
        return named(name, self.tree, num_bytes, self.joint, self.alone)

    def others(self, num_bytes: float) -> tuple[Collective, ...]:
        """All that do not go level by level."""
        return over_all(self.tree, num_bytes, self.alone)

    def node_bytes(self, found: Collective, by_levels: bool) -> float:
        """What leaves the busiest node in both halves of an all-reduce."""
        spread = self.spread if by_levels else tuple(map(math.ceil, self.spread))
        return sum(sent * part for sent, part in zip(found.bytes_per_level, spread, strict=True))


class _Site(NamedTuple):
    """A node with replicas: how many, how many of its interfaces they use together, and at least one of them."""

    node: str
    zone: str
    holders: int
    lanes: int
    least_lanes: int


class _Level(NamedTuple):
    joint: Fabric
    alone: Fabric
    spread: float


def topology(holders: Iterable[Holder], costs: CostModel) -> Topology:
    """Of at least two replicas. Raises KeyError for an unknown node."""
    degrees: dict[str, list[int]] = defaultdict(list)
    for holder in holders:
        degrees[holder.node].append(holder.tp)
    nodes = sorted((costs.kind(node_id), *sorted(found)) for node_id, found in degrees.items())
    return costs.once(("topology", *nodes), lambda: _topology(degrees, costs))


def _topology(degrees: Mapping[str, list[int]], costs: CostModel) -> Topology:
    """`degrees`: by node, of its replicas. The same for equal replicas on other nodes of the same kinds."""
    sites, narrowest = _sites(degrees, costs), min(map(min, degrees.values()))
    zones: dict[str, list[_Site]] = defaultdict(list)
    for site in sites:
        zones[site.zone].append(site)
    some = _standing_for_all(sites, costs)
    memory = min(costs.device(site.node).memory_bytes_per_s for site in some) * narrowest
    crowded = [len(zone) for zone in zones.values()]
    levels, tree = [], tree_of([[site.holders for site in zone] for zone in zones.values()])
    if any(site.holders > 1 for site in sites):
        levels.append(_inside([site for site in some if site.holders > 1], narrowest, memory, costs))
    if max(crowded) > 1:
        near = [pair for pair in itertools.combinations(some, 2) if pair[0].zone == pair[1].zone]
        levels.append(_between(near, memory, costs))
    if len(zones) > 1:
        far = [pair for pair in itertools.combinations(some, 2) if pair[0].zone != pair[1].zone]
        levels.append(_across(far, zones, memory, costs))
    return Topology(
        tree=tree,
        joint=tuple(level.joint for level in levels),
        alone=tuple(level.alone for level in levels),
        spread=tuple(level.spread for level in levels),
    )


def _sites(degrees: Mapping[str, list[int]], costs: CostModel) -> list[_Site]:
    """The nodes, fullest first."""
    sites = []
    for node_id, found in degrees.items():
        node = costs.node(node_id)
        lanes, least = min(node.nics, sum(found)), min(node.nics, min(found))
        sites.append(_Site(node=node_id, zone=node.zone, holders=len(found), lanes=lanes, least_lanes=least))
    return sorted(sites, key=lambda site: (-site.holders, site.node))


def _standing_for_all(sites: list[_Site], costs: CostModel) -> list[_Site]:
    """Of equal nodes with equal replicas two: they have all links that there are."""
    found: dict[object, list[_Site]] = defaultdict(list)
    for site in sites:
        found[costs.kind(site.node), site.holders > 1, site.lanes, site.least_lanes].append(site)
    return [site for alike in found.values() for site in alike[:2]]


def _inside(sites: list[_Site], lanes: int, memory: float, costs: CostModel) -> _Level:
    links = [costs.link(site.node, site.node) for site in sites]
    fabric = _fabric(links, min(link.bytes_per_s for link in links) * lanes, memory)
    return _Level(joint=fabric, alone=fabric, spread=0.0)


def _between(pairs: list[tuple[_Site, _Site]], memory: float, costs: CostModel) -> _Level:
    links = [costs.link(here.node, there.node) for here, there in pairs]
    both = tuple(zip(links, pairs, strict=True))
    # Between parts of one machine nothing goes over an interface: each flow is on its own.
    wide = [
        1 if costs.are_one_machine(here.node, there.node) else min(here.lanes, there.lanes) for here, there in pairs
    ]
    joint = min(link.bytes_per_s * lanes for link, lanes in zip(links, wide, strict=True))
    alone = min(
        link.bytes_per_s * min(lanes, here.least_lanes, there.least_lanes)
        for (link, (here, there)), lanes in zip(both, wide, strict=True)
    )
    return _Level(joint=_fabric(links, joint, memory), alone=_fabric(links, alone, memory), spread=1.0)


def _across(pairs: list[tuple[_Site, _Site]], zones: dict[str, list[_Site]], memory: float, costs: CostModel) -> _Level:
    """Between zones: all nodes of a zone have their own flows to others, as `costs` takes it of any two nodes."""
    links = [costs.link(here.node, there.node) for here, there in pairs]
    slowest = min(link.bytes_per_s for link in links)
    joint = slowest * min(sum(site.lanes for site in zone) for zone in zones.values())
    alone = slowest * min(site.least_lanes for pair in pairs for site in pair)
    return _Level(
        joint=_fabric(links, joint, memory),
        alone=_fabric(links, alone, memory),
        spread=1 / min(map(len, zones.values())),
    )


def _fabric(links: list[LinkCost], bytes_per_s: float, memory: float) -> Fabric:
    latency_s = max(link.latency_s for link in links)
    crowded = [link for link in links if link.incast]
    return link_fabric(
        latency_s,
        bytes_per_s,
        memory_bytes_per_s=memory,
        incast=max((link.incast for link in crowded), default=0.0),
        fan_in=min((link.fan_in for link in crowded), default=2),
        peer_s=min(latency_s, PER_PEER_S),
    )
