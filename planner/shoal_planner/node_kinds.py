"""Which nodes are interchangeable: equal in everything that costs depend on, and not told apart by measurements."""

from __future__ import annotations

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.profile import Profile

# Measured links within this factor, and latencies below this, count as alike.
ALIKE = 2.0
NOISE_S = 2e-3
Shape = tuple[object, ...]


def node_kinds(snapshot: ClusterSnapshot, profile: Profile) -> dict[str, int]:
    """By node, the number of its kind; kinds count from 0 in the order of node ids."""
    apart = told_apart(profile)
    numbers: dict[Shape, int] = {}
    return {node.id: numbers.setdefault(node_shape(node, apart), len(numbers)) for node in snapshot.nodes}


def told_apart(profile: Profile) -> frozenset[str]:
    """Nodes that differ from others of their shape by measured links: all measured ones, unless the links between nodes
    are so alike that only noise tells them apart."""
    figures = [figure for figure in profile.links if figure.from_node != figure.to_node]
    if not figures:
        return frozenset()
    rates = [figure.bytes_per_s for figure in figures]
    latencies = [figure.latency_s for figure in figures]
    if max(rates) <= ALIKE * min(rates) and max(latencies) <= max(ALIKE * min(latencies), NOISE_S):
        return frozenset()
    return frozenset(node for figure in figures for node in (figure.from_node, figure.to_node))


def node_shape(node: Node, apart: frozenset[str]) -> Shape:
    """Nodes of equal shape are interchangeable."""
    return (
        node.device,
        node.speed,
        node.devices,
        node.intra_bytes_per_s,
        node.inter_bytes_per_s,
        node.nics,
        node.zone,
        node.device_group,
        node.group_bytes_per_s or 0.0,
        node.host_memory_bytes,
        node.id if node.id in apart else "",
    )
