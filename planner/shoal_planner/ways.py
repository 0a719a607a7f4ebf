"""Sets of pipelines before they have devices: on which nodes the units of each stand, and how wide they are.

Owns these values, what is free beside them, and which of them take as long. How they are changed is up to `ways_steps`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal_planner.cluster import Node
from shoal_planner.costs import CostModel
from shoal_planner.finish import Unit, Word
from shoal_planner.options import tp_degrees


class Place(NamedTuple):
    """A unit before it has devices."""

    node: str
    tp: int


Way = tuple[Place, ...]  # of a pipeline
Ways = tuple[Way, ...]
Shape = tuple[tuple[int, int], ...]  # kinds and degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The nodes that there are to use, and what tells them apart."""

    nodes: Mapping[str, Node]
    kind: Mapping[str, int]
    device: Mapping[str, int]  # what is on the node, whatever its links are
    degrees: tuple[int, ...]

    def free(self, ways: Ways) -> Counter[str]:
        found = Counter({name: node.devices for name, node in self.nodes.items()})
        for way in ways:
            for place in way:
                found[place.node] -= place.tp
        return found

    def named(self, ways: Ways) -> object:
        """Equal for sets that take as long, as far as that is quickly told."""
        used: dict[str, list[int]] = {}
        found = []
        for way in ways:
            names: dict[str, int] = {}
            found.append(tuple((self.kind[node], tp, names.setdefault(node, len(names))) for node, tp in way))
            for node, place in names.items():
                used.setdefault(node, []).append(place)
        return tuple(sorted(found)), tuple(sorted((self.kind[node], *sorted(places)) for node, places in used.items()))

    def shape(self, way: Way) -> Shape:
        return tuple((self.kind[place.node], place.tp) for place in way)


def ground_of(nodes: Iterable[Node], costs: CostModel) -> Ground:
    found = {node.id: node for node in nodes}
    widest = max(node.devices for node in found.values())
    types = sorted({node.device_label for node in found.values()})
    return Ground(
        nodes=found,
        kind={name: costs.kind(name) for name in found},
        device={name: types.index(node.device_label) for name, node in found.items()},
        degrees=tp_degrees(costs, widest),
    )


def ways_of(words: tuple[Word, ...]) -> Ways:
    return tuple(tuple(Place(unit.node, unit.tp) for unit in word) for word in words)


def words_of(ways: Ways) -> tuple[Word, ...]:
    """With devices, counted from 0 in each node."""
    used: Counter[str] = Counter()
    words = []
    for way in ways:
        word = []
        for node, tp in way:
            word.append(Unit(node, tuple(range(used[node], used[node] + tp))))
            used[node] += tp
        words.append(tuple(word))
    return tuple(words)


def blocks_of(shape: Shape) -> list[tuple[int, int]]:
    """First and last + 1 of runs of equal units."""
    found, at = [], 0
    for _, run in itertools.groupby(shape):
        length = len(list(run))
        found.append((at, at + length))
        at += length
    return found


def take(free: Counter[str], kind: int, tp: int, near: Way, ground: Ground) -> str | None:
    """A node of this kind with so many free devices: one that the pipeline is on, else the one with the least room."""
    best, best_key = None, (2, 0)
    own = {place.node for place in near}
    for name, count in free.items():
        if count >= tp and ground.kind[name] == kind:
            key = (0 if name in own else 1, count)
            if key < best_key:
                best, best_key = name, key
    return best
