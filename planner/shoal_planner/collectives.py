"""Which collective suits a group of holders on a topology, and what any of them takes there.

Owns the choice, from the nodes up as GenTree (arXiv 2409.04202) does it. Does not own the candidates
(`collective_menus`), the cost model (`collective_counts`) nor what the topology of a plan is (`exchanges`).

Seconds are sums and maxima of what a fabric charges, and a choice is the least over candidates that depend on the tree
alone, so that nothing that gets faster makes a choice slower.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal_planner.algorithms import Algorithm, Tree, algorithm_of, depth, is_tree, levels_of, num_holders, tree_name
from shoal_planner.collective_counts import Fabric
from shoal_planner.collective_menus import Figures, Menu, flat_menu, flat_menu_of, level_menu, menu_of
from shoal_planner.distinct import distinct
from shoal_planner.errors import InvalidField
from shoal_planner.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelAlgorithm:
    """What members of a level do; level 0 is inside a node. A level whose vertices differ in size has several."""

    level: int
    algorithm: Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An all-reduce of a group.

    `reduce_s` is the reduce-scatter, with all additions; `gather_s` the all-gather. `bytes_per_level`: what the busiest
    port of each level sends in both.
    """

    steps: tuple[LevelAlgorithm, ...]
    reduce_s: float
    gather_s: float
    bytes_per_level: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.reduce_s + self.gather_s

    @property
    def name(self) -> str:
        """As a plan says it: `none` for a single holder, an algorithm over all holders at once, as they count through
        the tree, or what each level does."""
        if len(self.steps) < 2:
            return self.steps[0].algorithm.name if self.steps else "none"
        levels = itertools.groupby(self.steps, key=lambda step: step.level)
        return tree_name([[step.algorithm for step in steps] for _, steps in levels])


class _Fabrics(NamedTuple):
    """The figures of a fabric for each level."""

    alpha: Figures
    beta: Figures
    gamma: Figures
    delta: Figures
    epsilon: Figures
    fan_in: Figures
    peer: Figures


class _Vertex(NamedTuple):
    """The vertices of a level with so many branches, and the largest part of the vector that one holder below any of
    them has when the branches are done."""

    level: int
    members: int
    part: float


def by_level(tree: Tree, num_bytes: float, fabrics: tuple[Fabric, ...]) -> Collective:
    """The fastest all-reduce that goes level by level: what a level sends does not depend on how the one below added
    up, so each has its best by itself, and the least that can pass its ports does.

    Holders count through nodes. `fabrics` are those of the levels, inside a node first; between nodes each has one
    port, whose rate is that of all its network interfaces. Raises InvalidField.
    """
    _check(tree, num_bytes, fabrics)
    return _by_level(tree, float(num_bytes), fabrics)


def over_all(tree: Tree, num_bytes: float, fabrics: tuple[Fabric, ...]) -> tuple[Collective, ...]:
    """All algorithms that take all holders of the tree for members of one level."""
    _check(tree, num_bytes, fabrics)
    return () if num_holders(tree) < 2 else _flat(flat_menu(tree), num_bytes, fabrics)


def named(
    name: str, tree: Tree, num_bytes: float, fabrics: tuple[Fabric, ...], alone: tuple[Fabric, ...]
) -> Collective:
    """That of a plan's name (but `direct`); `alone` are the fabrics of algorithms that do not go level by level. Raises
    InvalidField if it is not for such a tree."""
    best = by_level(tree, num_bytes, fabrics)
    if best.name == name:
        return best
    if not is_tree(name):
        return _flat(flat_menu_of(tree, (algorithm_of(name, num_holders(tree)),)), num_bytes, alone)[0]
    found = algorithms_by_level(name, tree)
    return _joined(tree, num_bytes, fabrics, lambda level, members: menu_of((found[level, members],)))


def algorithms_by_level(name: str, tree: Tree) -> Mapping[tuple[int, int], Algorithm]:
    """Of a tree's name, by level and number of branches what such a vertex does; names pass over levels at which
    nothing branches. Raises InvalidField if it is not for such a tree."""
    levels = [{algorithm.holders: algorithm for algorithm in level} for level in levels_of(name)]
    sizes: defaultdict[int, set[int]] = defaultdict(set)
    for vertex in _vertices(tree):
        sizes[vertex.level].add(vertex.members)
    if [set(level) for level in levels] != [sizes[level] for level in sorted(sizes)]:
        shown = " > ".join(", ".join(map(str, sorted(sizes[level], reverse=True))) for level in sorted(sizes))
        raise InvalidField("collective", name, f"must be for the levels that the replicas stand on: {shown}")
    return {
        (level, members): algorithm
        for level, named_level in zip(sorted(sizes), levels, strict=True)
        for members, algorithm in named_level.items()
    }


def _check(tree: Tree, num_bytes: float, fabrics: tuple[Fabric, ...]) -> None:
    if len(fabrics) != depth(tree):
        raise InvalidField("fabrics", len(fabrics), f"must be one for each of {depth(tree)} levels")
    check_range("num_bytes", num_bytes, 0, 2.0**60)


@functools.lru_cache(maxsize=1024)
def _by_level(tree: Tree, num_bytes: float, fabrics: tuple[Fabric, ...]) -> Collective:
    return _joined(tree, num_bytes, fabrics, lambda _, members: level_menu(members))


def _joined(tree: Tree, num_bytes: float, fabrics: tuple[Fabric, ...], menu: Callable[[int, int], Menu]) -> Collective:
    """`menu(level, members)`: what a vertex may do."""
    steps: list[LevelAlgorithm] = []
    reduce_s, gather_s, sent = ([0.0] * len(fabrics) for _ in range(3))
    for level, vertices in itertools.groupby(_vertices(tree), key=lambda vertex: vertex.level):
        table = _table((fabrics[level],))
        menus = [_scaled(menu(level, vertex.members), vertex.part) for vertex in vertices]
        halves = [
            (_half_seconds(menu, num_bytes, table, True), _half_seconds(menu, num_bytes, table, False))
            for menu in menus
        ]
        picked = _picks(halves)
        reduce_s[level] = max(float(half[at]) for (half, _), at in zip(halves, picked, strict=True))
        gather_s[level] = max(float(half[at]) for (_, half), at in zip(halves, picked, strict=True))
        sent[level] = max(float(menu.sent[at, 0, 0]) for menu, at in zip(menus, picked, strict=True)) * num_bytes
        algorithms = [menu.algorithms[at] for menu, at in zip(menus, picked, strict=True)]
        steps += [LevelAlgorithm(level=level, algorithm=algorithm) for algorithm in algorithms]
    return Collective(steps=tuple(steps), reduce_s=sum(reduce_s), gather_s=sum(gather_s), bytes_per_level=tuple(sent))


def _flat(menu: Menu, num_bytes: float, fabrics: tuple[Fabric, ...]) -> tuple[Collective, ...]:
    table = _table(fabrics)
    reduce_s, gather_s = _half_seconds(menu, num_bytes, table, True), _half_seconds(menu, num_bytes, table, False)
    sent = menu.sent.sum(axis=1) * num_bytes
    return tuple(
        Collective(
            steps=(
                LevelAlgorithm(level=int(np.flatnonzero(sent[at])[-1]) if sent[at].any() else 0, algorithm=algorithm),
            ),
            reduce_s=float(reduce_s[at]),
            gather_s=float(gather_s[at]),
            bytes_per_level=tuple(map(float, sent[at])),
        )
        for at, algorithm in enumerate(menu.algorithms)
    )


def _scaled(menu: Menu, part: float) -> Menu:
    """For holders that have only a part of what their port sends; the rest is with others behind the same port."""
    return menu._replace(reduced=menu.reduced * part, touched=menu.touched * part)


def _picks(halves: Sequence[tuple[Figures, Figures]]) -> list[int]:
    """By vertex of a level, the candidate to take. All vertices end a half before the next begins, so what counts is
    the longest reduce-scatter plus the longest all-gather: each bound on the former allows a least of the latter."""
    if len(halves) == 1:
        return [int(np.argmin(halves[0][0] + halves[0][1]))]
    least: tuple[float, float, float] | None = None
    for bound in distinct(np.concatenate([reducing for reducing, _ in halves])):
        gathers = [np.min(gathering[reducing <= bound], initial=np.inf) for reducing, gathering in halves]
        found = (float(bound + max(gathers)), float(bound), float(max(gathers)))
        least = found if least is None else min(least, found)
    assert least is not None
    _, reduce_s, gather_s = least
    allowed = [(reducing <= reduce_s) & (gathering <= gather_s) for reducing, gathering in halves]
    return [
        int(np.argmin(np.where(mask, reducing + gathering, np.inf)))
        for mask, (reducing, gathering) in zip(allowed, halves, strict=True)
    ]


@functools.lru_cache(maxsize=1024)
def _vertices(tree: Tree) -> tuple[_Vertex, ...]:
    """The vertices with more than one branch, from the nodes up."""
    found: dict[tuple[int, int], float] = {}
    _visit(tree, depth(tree) - 1, found)
    return tuple(_Vertex(level=level, members=members, part=found[level, members]) for level, members in sorted(found))


def _visit(tree: Tree, level: int, found: dict[tuple[int, int], float]) -> float:
    """The largest part of the vector that one holder below has in the end."""
    if isinstance(tree, int):
        members, part = tree, 1.0
    else:
        members, part = len(tree), max(_visit(branch, level - 1, found) for branch in tree)
    if members > 1:
        found[level, members] = max(part, found.get((level, members), 0.0))
    return part / members


@functools.lru_cache(maxsize=256)
def _table(fabrics: tuple[Fabric, ...]) -> _Fabrics:
    names = (
        "alpha_s",
        "beta_s_per_byte",
        "gamma_s_per_byte",
        "delta_s_per_byte",
        "epsilon_s_per_byte",
        "fan_in",
        "peer_s",
    )
    return _Fabrics(*(np.array([getattr(fabric, name) for fabric in fabrics], dtype=float) for name in names))


def _half_seconds(menu: Menu, num_bytes: float, table: _Fabrics, reducing: bool) -> Figures:
    """By candidate. Both halves have half the rounds and half the bytes; all additions fall into the first. What the
    paper's incast term charges is what crowds a port, so each half bears its half."""
    paced = menu.rounds / 2 * table.alpha + menu.peers / 2 * table.peer + num_bytes * menu.sent / 2 * table.beta
    if reducing:
        paced = paced + num_bytes * (menu.reduced * table.gamma + menu.touched * table.delta)
    excess = np.maximum(menu.fan_in - table.fan_in, 0) * menu.sent.sum(axis=1) / 2 * table.epsilon
    found: Figures = paced.max(axis=2).sum(axis=1) + num_bytes * excess.sum(axis=1)
    return found
