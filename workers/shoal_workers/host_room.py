"""How much of its host each rank may use for state: what snapshots leave of it, by what ranks there have to keep. Pure.

Half of that, as what a plan keeps on hosts stands beside what the one before it kept, while plans change.
"""

from __future__ import annotations

from collections import Counter

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.memory import GENERATIONS, snapshot_bytes
from shoal_recovery.placement import RankCopies, host_elements
from shoal_recovery.state import RankState, ShardMap, Span


def host_limits(shards: ShardMap, snapshot: ClusterSnapshot, copies: tuple[RankCopies, ...]) -> tuple[int, ...]:
    """Bytes, in the order of ranks; 0 for those that keep nothing there. `copies`: where those of the state stand."""
    hosted: Counter[str] = Counter()
    for state in shards.ranks:
        hosted[state.device.node] += _numel(state.hosted)
    kept = host_elements(shards, copies)

    def limit(state: RankState) -> int:
        node = state.device.node
        room_bytes = snapshot.node(node).host_memory_bytes - snapshot_bytes(kept[node])
        part = _numel(state.hosted) / hosted[node] if hosted[node] else 0.0
        return int(max(0.0, room_bytes / GENERATIONS * part))

    return tuple(limit(state) for state in shards.ranks)


def _numel(spans: tuple[Span, ...]) -> int:
    return sum(span.numel for span in spans)
