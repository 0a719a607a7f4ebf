"""Which collective suits a group of holders on a topology, and what it takes there.

Owns the choice, from the nodes up as GenTree (arXiv 2409.04202) does it. Does not own the candidates
(`collective_menus`), the cost model (`collective_counts`) nor the messages (`collective_plans`) that a choice becomes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal_planner.collective_counts import Fabric
from shoal_planner.collective_menus import Figures, Menu, flat_menu, level_menu
from shoal_planner.collective_plans import Algorithm, MessagePlan, Tree, all_reduce, depth, tree_all_reduce
from shoal_planner.errors import InvalidField
from shoal_planner.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelAlgorithm:
    """What members of a level do; level 0 is inside a node. A level whose vertices differ in size has several."""

    level: int
    algorithm: Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The best all-reduce of a group.

    `name`: `none` (a single holder), `tree` (level by level), or an algorithm over all holders at once, as they count
    through the tree. `reduce_s` is the reduce-scatter, with all additions; `gather_s` the all-gather; each may run
    alone. `bytes_per_level`: what the busiest port of each level sends in both.
    """

    name: str
    steps: tuple[LevelAlgorithm, ...]
    reduce_s: float
    gather_s: float
    bytes_per_level: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.reduce_s + self.gather_s

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """By step: the fan-ins in order; a ring and halving-doubling have twos in effect, and say their members."""
        return tuple(step.algorithm.factors or (step.algorithm.holders,) for step in self.steps)


class _Fabrics(NamedTuple):
    """The figures of a fabric for each level."""

    alpha: Figures
    beta: Figures
    gamma: Figures
    delta: Figures
    epsilon: Figures
    fan_in: Figures


class _Vertex(NamedTuple):
    """The vertices of a level with so many branches, and the largest part of the vector that one holder below any of
    them has when the branches are done."""

    level: int
    members: int
    part: float


def choose(
    holders_per_node: tuple[int, ...],
    num_bytes: float,
    inside: Fabric,
    between: Fabric,
    *,
    gather_bytes: float | None = None,
) -> Collective:
    """The fastest all-reduce of `num_bytes` among holders on nodes, any number on each.

    A half costs `reduce_s` for the reduce-scatter of `num_bytes`, and `gather_s` for the all-gather of `gather_bytes`
    (left out: the same), so that gradients may travel in another precision than weights. Holders count through nodes,
    the fullest node first. `inside` is the fabric of a node, where each holder has a port; `between` joins nodes, each
    with one port, whose rate is that of all its network interfaces.
    """
    tree = tuple(sorted(holders_per_node, reverse=True))
    return choose_on(tree, num_bytes, (inside, between), gather_bytes=gather_bytes)


def choose_on(
    tree: Tree, num_bytes: float, fabrics: tuple[Fabric, ...], *, gather_bytes: float | None = None
) -> Collective:
    """As `choose`, on a tree of any depth with a fabric for each level, inside a node first. Raises InvalidField."""
    if len(fabrics) != depth(tree):
        raise InvalidField("fabrics", len(fabrics), f"must be one for each of {depth(tree)} levels")
    gathered = num_bytes if gather_bytes is None else gather_bytes
    check_range("num_bytes", num_bytes, 0, 2.0**60)
    check_range("gather_bytes", gathered, 0, 2.0**60)
    return _choose(tree, float(num_bytes), float(gathered), fabrics)


def messages(collective: Collective, tree: Tree) -> MessagePlan:
    """The messages of a choice, for the tree that it was made on (holders of `choose`: sorted, fullest node first)."""
    if collective.name not in ("tree", "none"):
        return all_reduce(collective.steps[0].algorithm)
    picked = {(step.level, step.algorithm.holders): step.algorithm for step in collective.steps}
    return tree_all_reduce(
        tree, lambda level, members: picked.get((level, members)) or Algorithm(kind="ring", holders=members)
    )


@functools.lru_cache(maxsize=1024)
def _choose(tree: Tree, num_bytes: float, gather_bytes: float, fabrics: tuple[Fabric, ...]) -> Collective:
    best = _by_level(tree, num_bytes, gather_bytes, fabrics)
    if len(_vertices(tree)) < 2:
        return best  # a single vertex: its menu is all there is
    menu = flat_menu(tree)
    table = _table(fabrics)
    reduce_s, gather_s = _half_seconds(menu, num_bytes, table, True), _half_seconds(menu, gather_bytes, table, False)
    at = int(np.argmin(reduce_s + gather_s))
    if float(reduce_s[at] + gather_s[at]) >= best.seconds * (1 - 1e-12):
        return best
    level = int(np.flatnonzero(menu.sent[at].sum(axis=0))[-1])
    return Collective(
        name=menu.algorithms[at].name,
        steps=(LevelAlgorithm(level=level, algorithm=menu.algorithms[at]),),
        reduce_s=float(reduce_s[at]),
        gather_s=float(gather_s[at]),
        bytes_per_level=tuple(float(share) for share in menu.sent[at].sum(axis=0) * (num_bytes + gather_bytes) / 2),
    )


def _by_level(tree: Tree, num_bytes: float, gather_bytes: float, fabrics: tuple[Fabric, ...]) -> Collective:
    """The best at each level by itself: what a level sends does not depend on how the one below added up."""
    steps: list[LevelAlgorithm] = []
    reduce_s, gather_s, sent = ([0.0] * len(fabrics) for _ in range(3))
    for level, vertices in itertools.groupby(_vertices(tree), key=lambda vertex: vertex.level):
        table = _table((fabrics[level],))
        menus = [_scaled(level_menu(vertex.members), vertex.part) for vertex in vertices]
        halves = [
            (_half_seconds(menu, num_bytes, table, True), _half_seconds(menu, gather_bytes, table, False))
            for menu in menus
        ]
        picked = _picks(halves)
        reduce_s[level] = max(float(half[at]) for (half, _), at in zip(halves, picked, strict=True))
        gather_s[level] = max(float(half[at]) for (_, half), at in zip(halves, picked, strict=True))
        shares = [float(menu.sent[at, 0, 0]) for menu, at in zip(menus, picked, strict=True)]
        sent[level] = max(shares) * (num_bytes + gather_bytes) / 2
        algorithms = [menu.algorithms[at] for menu, at in zip(menus, picked, strict=True)]
        steps += [LevelAlgorithm(level=level, algorithm=algorithm) for algorithm in algorithms]
    return Collective(
        name="none" if not steps else steps[0].algorithm.name if len(steps) == 1 else "tree",
        steps=tuple(steps),
        reduce_s=sum(reduce_s),
        gather_s=sum(gather_s),
        bytes_per_level=tuple(sent),
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
    for bound in np.unique(np.concatenate([reducing for reducing, _ in halves])):
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
    names = ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte", "delta_s_per_byte", "epsilon_s_per_byte", "fan_in")
    return _Fabrics(*(np.array([getattr(fabric, name) for fabric in fabrics], dtype=float) for name in names))


def _half_seconds(menu: Menu, num_bytes: float, table: _Fabrics, reducing: bool) -> Figures:
    """By candidate. Both halves have half the rounds and half the bytes; all additions fall into the first. What the
    paper's incast term charges is what crowds a port, so each half bears its half."""
    paced = menu.rounds / 2 * table.alpha + num_bytes * menu.sent / 2 * table.beta
    if reducing:
        paced = paced + num_bytes * (menu.reduced * table.gamma + menu.touched * table.delta)
    excess = np.maximum(menu.fan_in - table.fan_in, 0) * menu.sent.sum(axis=1) / 2 * table.epsilon
    found: Figures = paced.max(axis=2).sum(axis=1) + num_bytes * excess.sum(axis=1)
    return found
