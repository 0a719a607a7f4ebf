"""What the loss of many nodes at once would cost, before it happens: the bytes of state that only the object store
would still hold. Pure.

Nodes go together by failure domain: a node by itself, a pool (nodes of one device type in one zone, bought in one way:
clouds take such nodes ten at a time), a whole zone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal_planner.cluster import Node
from shoal_planner.pools import pool_name
from shoal_recovery.placement import held_by
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, ShardMap

Domain = Literal["node", "pool", "zone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLoss:
    """If all `nodes` of the domain called `name` went at once: `store_bytes` of master and moments stand nowhere but in
    the store then."""

    domain: Domain
    name: str
    nodes: tuple[str, ...]
    store_bytes: int


def bulk_losses(shards: ShardMap, nodes: tuple[Node, ...], copies: int) -> tuple[BulkLoss, ...]:
    """One for each node, pool and zone of these nodes, on which the ranks of `shards` run and keep `copies` copies of
    every step; what would cost most goes first."""
    kept = _bytes_by_holders(shards, nodes, copies)
    found = [
        BulkLoss(
            domain=domain,
            name=name,
            nodes=tuple(sorted(members)),
            store_bytes=sum(num_bytes for holders, num_bytes in kept.items() if holders <= members),
        )
        for domain, name, members in _domains(nodes)
    ]
    return tuple(sorted(found, key=lambda loss: (-loss.store_bytes, -len(loss.nodes), loss.domain, loss.name)))


def _bytes_by_holders(shards: ShardMap, nodes: tuple[Node, ...], copies: int) -> Counter[frozenset[str]]:
    """Bytes of state by the nodes whose agents have a snapshot of them."""
    kept: Counter[frozenset[str]] = Counter()
    for holders, numel in held_by(shards, nodes, copies):
        kept[holders] += numel * len(OWNED_KINDS) * ELEMENT_BYTES
    return kept


def _domains(nodes: tuple[Node, ...]) -> Iterator[tuple[Domain, str, frozenset[str]]]:
    zones: defaultdict[str, set[str]] = defaultdict(set)
    pools: defaultdict[str, set[str]] = defaultdict(set)
    for node in nodes:
        zones[node.zone].add(node.id)
        pools[pool_name(node)].add(node.id)
        yield "node", node.id, frozenset((node.id,))
    for name, members in pools.items():
        yield "pool", name, frozenset(members)
    for name, members in zones.items():
        yield "zone", name, frozenset(members)
