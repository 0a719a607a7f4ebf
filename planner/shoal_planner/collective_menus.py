"""The algorithms that a group can choose from, with their counts as arrays: all of a menu are costed at once.

Owns which algorithms are candidates, among the members of one level and across the levels of a tree. Does not own the
choice (`collectives`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal_planner.algorithms import Algorithm, Tree, depth, num_holders
from shoal_planner.collective_counts import Counts, counts_of

# Above so many members of a level, factorisations have at most MAX_FACTORS factors: the others gain next to nothing.
MANY_MEMBERS = 128
MAX_FACTORS = 3
# Up to so many holders, factorisations that cut across nodes are candidates, too.
MANY_HOLDERS = 32

Figures = NDArray[np.float64]
# Where holders stand: row h has the number of the branch of height h around each; height 0 is the holder itself.
Branches: TypeAlias = NDArray[np.int64]


class Menu(NamedTuple):
    """Counts of several algorithms: candidate x phase x level; `fan_in` is candidate x level. Phases follow each other,
    levels within a phase work side by side. All of both halves, in multiples of the vector's bytes."""

    algorithms: tuple[Algorithm, ...]
    rounds: Figures
    sent: Figures
    reduced: Figures
    touched: Figures
    peers: Figures
    fan_in: Figures


def factorisations(number: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations into factors above 1, at most `most` of them."""
    if number == 1:
        yield ()
        return
    if most != 1:
        for factor in range(2, number // 2 + 1):
            if number % factor == 0:
                for rest in factorisations(number // factor, None if most is None else most - 1):
                    yield (factor, *rest)
    yield (number,)


@functools.lru_cache(maxsize=1024)
def level_menu(members: int) -> Menu:
    """All algorithms among the members of one level; of equals, the first is taken."""
    return menu_of(tuple(_algorithms(members, MAX_FACTORS if members > MANY_MEMBERS else None)))


def menu_of(algorithms: tuple[Algorithm, ...]) -> Menu:
    """These among the members of one level."""
    counts = [counts_of(algorithm) for algorithm in algorithms]
    return Menu(
        algorithms=algorithms,
        rounds=np.array([[[found.rounds]] for found in counts], dtype=float),
        sent=np.array([[[found.sent]] for found in counts]),
        reduced=np.array([[[found.reduced]] for found in counts]),
        touched=np.array([[[found.touched]] for found in counts]),
        peers=np.array([[[found.peers]] for found in counts], dtype=float),
        fan_in=np.array([[found.fan_in] for found in counts], dtype=float),
    )


def _algorithms(members: int, most_factors: int | None) -> Iterator[Algorithm]:
    yield Algorithm(kind="parameter_server", holders=members)
    yield Algorithm(kind="ring", holders=members)
    if members & (members - 1) == 0:
        yield Algorithm(kind="halving_doubling", holders=members)
    for factors in factorisations(members, most_factors):
        # Nothing but twos is halving-doubling, message for message.
        if len(factors) > 1 and set(factors) != {2}:
            yield Algorithm(kind="parameter_server", holders=members, factors=factors)


@functools.lru_cache(maxsize=256)
def flat_menu(tree: Tree) -> Menu:
    """Algorithms that take all holders of the tree for members of one level, with what that means for its links."""
    holders = num_holders(tree)
    return flat_menu_of(tree, tuple(_algorithms(holders, 1 if holders > MANY_HOLDERS else None)))


def flat_menu_of(tree: Tree, candidates: tuple[Algorithm, ...]) -> Menu:
    """These over all holders of the tree."""
    branches = _branches(tree)
    phases = [_phases(algorithm, branches) for algorithm in candidates]
    shape = (len(candidates), max(map(len, phases)), depth(tree))
    rounds, sent, reduced, touched, peers = (np.zeros(shape) for _ in range(5))
    fan_in = np.zeros((shape[0], shape[2]))
    for at, found in enumerate(phases):
        for phase, level in itertools.product(range(len(found)), range(shape[2])):
            counts = found[phase][level]
            place = at, phase, level
            rounds[place], sent[place] = counts.rounds, counts.sent
            reduced[place], touched[place], peers[place] = counts.reduced, counts.touched, counts.peers
            fan_in[at, level] = max(fan_in[at, level], counts.fan_in)
    return Menu(
        algorithms=candidates,
        rounds=rounds,
        sent=sent,
        reduced=reduced,
        touched=touched,
        peers=peers,
        fan_in=fan_in,
    )


def _branches(tree: Tree) -> Branches:
    return np.array([np.repeat(np.arange(len(row)), row) for row in _sizes(tree)])


def _sizes(tree: Tree) -> list[list[int]]:
    """By height, from the holders up: how many holders each branch has."""
    if isinstance(tree, int):
        return [[1] * tree]
    below = zip(*map(_sizes, tree), strict=True)
    return [*(list(itertools.chain.from_iterable(rows)) for rows in below), list(map(num_holders, tree))]


def _phases(algorithm: Algorithm, branches: Branches) -> list[tuple[Counts, ...]]:
    """By phase and level: rounds of equal messages, with their mirror images."""
    if algorithm.kind == "ring":
        return [_ring_phase(branches)]
    factors = algorithm.factors
    if algorithm.kind == "halving_doubling":
        factors = (2,) * (algorithm.holders.bit_length() - 1)
    if len(factors) == 1:
        return [_exchange_phase(branches)]
    strides = itertools.accumulate((1, *factors[:-1]), lambda before, factor: before * factor)
    return [_factor_phase(branches, stride, factor) for stride, factor in zip(strides, factors, strict=True)]


def _ring_phase(branches: Branches) -> tuple[Counts, ...]:
    """Each holder talks to the next one, so one block crosses each port that any two neighbours have between them."""
    levels = _levels(branches, np.roll(branches, -1, axis=1))
    ring = counts_of(Algorithm(kind="ring", holders=branches.shape[1]))
    return tuple(ring if (levels == level).any() else Counts() for level in range(len(branches)))


def _exchange_phase(branches: Branches) -> tuple[Counts, ...]:
    """All with all: n of N holders of a branch send to those that share its vertex but not the branch."""
    n = branches.shape[1]
    whole = counts_of(Algorithm(kind="parameter_server", holders=n))
    around = [*(np.bincount(row)[row] for row in branches), np.full(n, n)]
    top = max(level for level, row in enumerate(branches) if row[-1] > 0)
    found = []
    for level, (own, above) in enumerate(itertools.pairwise(around)):
        sent = float((own * (above - own)).max()) / n
        # Every holder has inputs from as far as the top, so that is where its additions and messages belong.
        additions = whole if level == top else Counts()
        found.append(dataclasses.replace(additions, rounds=2 * (sent > 0), sent=2 * sent))
    return tuple(found)


def _levels(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The level that joins holders in these branches: they differ in all branches up to it."""
    found: NDArray[np.int64] = (ours != theirs).sum(axis=0) - 1
    return found


def _factor_phase(branches: Branches, stride: int, factor: int) -> tuple[Counts, ...]:
    """One level of a factorisation, in which holders send a part each to those that differ in one digit."""
    holders = np.arange(branches.shape[1])
    digit = holders // stride % factor
    peers = holders + ((digit + np.arange(1, factor)[:, None]) % factor - digit) * stride  # shift x holder
    levels = _levels(branches[:, None, :], branches[:, peers])
    block = 1 / (stride * factor)
    highest = levels.max(axis=0)
    found = []
    for level, row in enumerate(branches):
        sent = float(np.bincount(row, weights=(levels == level).sum(axis=0)).max()) * block
        reducing = int((highest == level).any())
        found.append(
            Counts(
                rounds=2 * (sent > 0),
                sent=2 * sent,
                reduced=reducing * (factor - 1) * block,
                touched=reducing * (factor + 1) * block,
                fan_in=reducing * factor,
                peers=2 * reducing * (factor - 2),  # however many levels they are on: of one holder
            )
        )
    return tuple(found)
