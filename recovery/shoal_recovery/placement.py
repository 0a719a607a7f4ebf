"""On which other nodes the snapshots of a node are copied. Pure and deterministic."""

from __future__ import annotations

from collections import Counter

from shoal_planner.cluster import Node


def backups(nodes: tuple[Node, ...], copies: int) -> dict[str, tuple[str, ...]]:
    """For each of `nodes` (those that own state), `copies` others that keep its snapshots too, the first choice first;
    fewer where there are not enough others.

    A zone that has no copy yet goes before one that has, because zones fail as a whole; then the node that keeps the
    fewest copies so far; then the next one in the order of ids, counted round from the node itself.
    """
    ordered = sorted(nodes, key=lambda node: node.id)
    load: Counter[str] = Counter()
    chosen: dict[str, list[str]] = {node.id: [] for node in ordered}
    zones: dict[str, set[str]] = {node.id: {node.zone} for node in ordered}
    # One copy of every node before the second of any: so the evenness of first choices does not hang on later ones.
    for _ in range(min(copies, len(ordered) - 1)):
        for place, node in enumerate(ordered):
            others = [
                (other.zone in zones[node.id], load[other.id], distance, other)
                for distance, other in enumerate(ordered[place + 1 :] + ordered[:place])
                if other.id not in chosen[node.id]
            ]
            backup = min(others, key=lambda choice: choice[:3])[3]
            chosen[node.id].append(backup.id)
            zones[node.id].add(backup.zone)
            load[backup.id] += 1
    return {node_id: tuple(backup_ids) for node_id, backup_ids in chosen.items()}
