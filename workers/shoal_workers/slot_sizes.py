"""How much memory the snapshots of a plan take, node by node: what agents are told to make ready. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import ModelSpec
from shoal_planner.plan import Plan
from shoal_recovery.placement import place_copies
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, Span
from shoal_workers.slot_files import Sizes


def slot_sizes(plan: Plan, snapshot: ClusterSnapshot, model: ModelSpec) -> dict[str, Sizes]:
    """What the agents of these nodes need for the snapshots of a plan."""
    shards = shard_map(plan, model)
    local: defaultdict[str, list[int]] = defaultdict(list)
    copies: defaultdict[str, list[int]] = defaultdict(list)
    for state, placed in zip(shards.ranks, place_copies(shards, snapshot, plan.copies), strict=True):
        local[state.device.node] += (_num_bytes(state.vouches), _num_bytes(placed.mirrors))
        for node, spans in placed.sent:
            copies[node].append(_num_bytes(spans))
    return {node.id: Sizes(local=_sorted(local[node.id]), copies=_sorted(copies[node.id])) for node in snapshot.nodes}


def _num_bytes(spans: Iterable[Span]) -> int:
    """Of their state."""
    return sum(span.numel for span in spans) * len(OWNED_KINDS) * ELEMENT_BYTES


def _sorted(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(filter(None, sizes), reverse=True))
