"""How much memory the snapshots of a plan take, node by node: what agents are told to make ready. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import ModelSpec
from shoal_planner.plan import Plan
from shoal_recovery.placement import backups
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the slots of a node, in bytes, the largest first: for its own ranks and for copies from other nodes."""

    local: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()

    def or_more(self, other: Sizes) -> Sizes:
        """Enough for either."""
        return Sizes(local=_larger(self.local, other.local), copies=_larger(self.copies, other.copies))


def slot_sizes(plan: Plan, snapshot: ClusterSnapshot, model: ModelSpec) -> dict[str, Sizes]:
    """What the agents of these nodes need for the snapshots of a plan."""
    local: defaultdict[str, list[int]] = defaultdict(list)
    for state in shard_map(plan, model).ranks:
        local[state.device.node].append(sum(key.numel for key in state.vouched_keys) * ELEMENT_BYTES)
    copies: defaultdict[str, list[int]] = defaultdict(list)
    for node, others in backups(snapshot.nodes, plan.copies).items():
        for other in others:
            copies[other].extend(local[node])
    return {node.id: Sizes(local=_sorted(local[node.id]), copies=_sorted(copies[node.id])) for node in snapshot.nodes}


def _sorted(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(filter(None, sizes), reverse=True))


def _larger(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, zip_longest(some, others, fillvalue=0)))
