"""All ways to form pipelines from the devices of a small cluster, each up to exchange of equal devices.

Owns the enumeration alone; what a pipeline costs is asked elsewhere.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from shoal_planner.candidates import Unit, Word
from shoal_planner.cluster import Node
from shoal_planner.job import ModelSpec
from shoal_planner.node_kinds import Shape, node_shape

Kinds = dict[tuple[Shape, int], int]  # numbers (shape, tp); one dict for a whole search, so that kinds mean the same
Key = tuple[tuple[tuple[int, int], ...], ...]


def tp_degrees(model: ModelSpec, most: int) -> tuple[int, ...]:
    """The degrees of tensor parallelism that divide the heads and the key heads, up to `most`."""
    return tuple(tp for tp in range(1, most + 1) if model.heads % tp == 0 and model.num_kv_heads % tp == 0)


def layouts(
    nodes: tuple[Node, ...], degrees: tuple[int, ...], apart: frozenset[str], kinds: Kinds
) -> Iterator[tuple[Unit, ...]]:
    """Every way to cut each node's devices into units; nodes of one shape in one order only. Devices may stay out
    later, so all devices are in some unit here."""
    shapes = sorted({node_shape(node, apart) for node in nodes}, key=repr)
    groups = [[node for node in nodes if node_shape(node, apart) == shape] for shape in shapes]
    choices = []
    for group in groups:
        cuts = list(_cuts(group[0].devices, degrees))
        choices.append(list(itertools.combinations_with_replacement(cuts, len(group))))
    for choice in itertools.product(*choices):
        pairs = itertools.chain.from_iterable(
            zip(group, cuts, strict=True) for group, cuts in zip(groups, choice, strict=True)
        )
        yield form_units(pairs, apart, kinds)


def form_units(cuts: Iterable[tuple[Node, tuple[int, ...]]], apart: frozenset[str], kinds: Kinds) -> tuple[Unit, ...]:
    """The units of nodes cut into these tp degrees, sorted by kind and node."""
    found = []
    for node, cut in cuts:
        first = 0
        for tp in cut:
            kind = kinds.setdefault((node_shape(node, apart), tp), len(kinds))
            found.append(Unit(kind=kind, node=node.id, devices=tuple(range(first, first + tp))))
            first += tp
    return tuple(sorted(found))


def _cuts(devices: int, degrees: tuple[int, ...], most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Partitions of a number of devices into degrees, largest first."""
    if not devices:
        yield ()
    for tp in reversed(degrees):
        if tp <= devices and (most is None or tp <= most):
            for rest in _cuts(devices - tp, degrees, tp):
                yield (tp, *rest)


def arrangements(units: tuple[Unit, ...], most_pipelines: int, seen: set[Key]) -> Iterator[tuple[Word, ...]]:
    """Every set of at least one pipeline over some of the units, each set once up to exchange of equal units, and
    none whose key is in `seen`, to which keys are added.

    Pipelines come in the order of their first unit, and of equal units the first unused one is taken; so a set is met
    more than once only where pipelines of equal first kinds exchange places, and those are dropped by their key.
    """
    for words in _extend(units, (), most_pipelines):
        key = _canonical(words)
        if key not in seen:
            seen.add(key)
            yield words


def _canonical(words: tuple[Word, ...]) -> Key:
    """Equal only for sets that differ by exchange of equal units: nodes are named by where they first appear."""
    names: dict[str, int] = {}
    ordered = sorted(words, key=lambda word: [unit.kind for unit in word])
    return tuple(tuple((unit.kind, names.setdefault(unit.node, len(names))) for unit in word) for word in ordered)


def _extend(units: tuple[Unit, ...], words: tuple[Word, ...], most: int) -> Iterator[tuple[Word, ...]]:
    used = {unit for word in words for unit in word}
    if words:
        yield words
    for unit in _distinct(units, used):
        if words:
            yield from _extend(units, (*words[:-1], (*words[-1], unit)), most)
        if len(words) < most and (not words or unit > words[-1][0]):
            yield from _extend(units, (*words, (unit,)), most)


def _distinct(units: tuple[Unit, ...], used: set[Unit]) -> Iterator[Unit]:
    """Unused units, of interchangeable ones the first: those of one kind on one node, or on equally cut nodes that are
    still untouched."""
    cuts: dict[str, list[int]] = defaultdict(list)
    for unit in units:
        cuts[unit.node].append(unit.kind)
    touched = {unit.node for unit in used}
    fresh: dict[tuple[int, ...], str] = {}
    seen: set[tuple[int, str]] = set()
    for unit in units:
        if unit in used or (unit.kind, unit.node) in seen:
            continue
        if unit.node in touched or fresh.setdefault(tuple(cuts[unit.node]), unit.node) == unit.node:
            seen.add((unit.kind, unit.node))
            yield unit
