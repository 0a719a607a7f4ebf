"""Which nodes are interchangeable: equal in everything that costs depend on, and not told apart by measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.profile import Profile

# Measured links within this factor, and latencies below this, count as alike.
ALIKE = 2.0
NOISE_S = 2e-3
# Parts of machines are told apart, and a search takes the longer the more kinds of nodes there are. Of more parts than
# these nobody looks at which belong together: what passes between them counts as if it went over their interfaces.
MOST_PARTS = 16
Shape = tuple[object, ...]


def node_kinds(snapshot: ClusterSnapshot, profile: Profile) -> dict[str, int]:
    """By node, the number of its kind; kinds count from 0 in the order of node ids."""
    apart = told_apart(profile) | parts_of_machines(snapshot.nodes).keys()
    numbers: dict[Shape, int] = {}
    return {node.id: numbers.setdefault(node_shape(node, apart), len(numbers)) for node in snapshot.nodes}


def parts_of_machines(nodes: Iterable[Node]) -> dict[str, str]:
    """By node, the machine that it shares with others; of up to MOST_PARTS such nodes."""
    hosts = [(node.id, node.host) for node in nodes if node.host is not None]
    count = Counter(host for _, host in hosts)
    found = {node: host for node, host in hosts if count[host] > 1}
    return found if len(found) <= MOST_PARTS else {}


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
