"""On which other nodes the snapshots of a node are copied. Pure and deterministic.

Here, and not where state is moved, because a plan must know whether the hosts have room for it.
"""

from __future__ import annotations

import itertools
from collections import Counter

from shoal_planner.cluster import Node


def backups(nodes: tuple[Node, ...], copies: int) -> dict[str, tuple[str, ...]]:
    """For each of `nodes` (those that own state), `copies` others that keep its snapshots too, the first choice first;
    fewer where there are not enough others.

    A zone that has no copy yet goes before one that has, because zones fail as a whole; then the node that keeps the
    fewest copies so far; then the next one in the order of ids, counted round from the node itself.
    """
    ring = _Ring(tuple(sorted(nodes, key=lambda node: node.id)))
    # One copy of every node before the second of any: so the evenness of first choices does not hang on later ones.
    for _ in range(min(copies, len(nodes) - 1)):
        for place in range(len(nodes)):
            ring.choose(place)
    return {
        node.id: tuple(ring.nodes[other].id for other in chosen)
        for node, chosen in zip(ring.nodes, ring.chosen, strict=True)
    }


class _Ring:
    """Nodes by place in the order of ids: what each has chosen, and how many copies each keeps."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        self.chosen: list[list[int]] = [[] for _ in nodes]
        self._load = [0] * len(nodes)
        self._num_by_load = Counter(self._load)
        self._num_zones = len({node.zone for node in nodes})

    def choose(self, place: int) -> None:
        backup = self._best(place)
        self.chosen[place].append(backup)
        before = self._load[backup]
        self._load[backup] += 1
        self._num_by_load.update({before + 1: 1, before: -1})
        self._num_by_load += Counter()  # drops what has come down to zero

    def _best(self, place: int) -> int:
        """The first that nobody can beat ends the round: on a large cluster most choices are near."""
        taken = self.chosen[place]
        reached = {self.nodes[other].zone for other in (place, *taken)}
        some_fresh = len(reached) < self._num_zones
        least = (False, min(self._num_by_load))
        best, best_key = -1, least
        for other in itertools.chain(range(place + 1, len(self.nodes)), range(place)):
            if other not in taken:
                key = (some_fresh and self.nodes[other].zone in reached, self._load[other])
                if best < 0 or key < best_key:
                    best, best_key = other, key
                if best_key == least:
                    break
        return best
