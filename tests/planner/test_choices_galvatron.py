"""Galvatron's candidates of a layer, counted, and the recurrence over them (PAPERS 5.1, 5.2).

The decision trees are here and not in the planner: in Shoal the degrees of a layer are those of its stage, which the
search sets for any number of devices; what is left to choose by layer is in `choices`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from recurrence import pick


class Strategy(NamedTuple):
    """Pipeline depth, the levels of the tree below it from the top (paradigm, degree), and whether to recompute."""

    depth: int
    levels: tuple[tuple[str, int], ...]
    recompute: bool = False

    def degree(self, paradigm: str) -> int:
        return dict(self.levels).get(paradigm, 1)


def strategies(devices: int, *, pruned: bool, recompute: bool = False) -> Iterator[Strategy]:
    """All trees over a power of two of devices; pruned: data parallelism is either replicated or sharded, not both."""
    kinds = (False, True) if recompute else (False,)
    for depth in _powers(1, devices):
        for levels in _trees(devices // depth, ("dp", "sdp", "tp")):
            if not (pruned and {"dp", "sdp"} <= {paradigm for paradigm, _ in levels}):
                for kind in kinds:
                    yield Strategy(depth, levels, kind)


def _trees(devices: int, paradigms: tuple[str, ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Ordered choices of paradigms, each at most once, whose degrees multiply to the devices."""
    if devices == 1:
        yield ()
        return
    for paradigm, degree in itertools.product(paradigms, _powers(2, devices)):
        for rest in _trees(devices // degree, tuple(other for other in paradigms if other != paradigm)):
            yield ((paradigm, degree), *rest)


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


@pytest.mark.parametrize(
    ("devices", "everything", "pruned"),
    [(2, 4, 4), (4, 13, 11), (8, 34, 22), (16, 73, 37), (32, 136, 56), (64, 229, 79)],
)
def test_the_candidates_of_a_layer_are_as_many_as_galvatrons(devices: int, everything: int, pruned: int) -> None:
    for rule, count in ((False, everything), (True, pruned)):
        assert len(set(strategies(devices, pruned=rule))) == count
        assert len(set(strategies(devices, pruned=rule, recompute=True))) == 2 * count


def test_the_candidates_use_all_devices_and_each_paradigm_once() -> None:
    for strategy in strategies(16, pruned=True):
        paradigms = [paradigm for paradigm, _ in strategy.levels]
        assert strategy.depth * math.prod(degree for _, degree in strategy.levels) == 16
        assert len(set(paradigms)) == len(paradigms)


def test_the_recurrence_over_galvatrons_candidates_equals_brute_force() -> None:
    """Four layers on four devices: each picks its tree, and another cut of activations between two costs."""
    found = [entry for entry in strategies(4, pruned=True, recompute=True) if entry.depth == 1]
    work = np.random.default_rng(1).uniform(1, 2, 4)

    def seconds(layer: int, strategy: Strategy) -> float:
        exchange = 0.1 * (strategy.degree("tp") - 1) + 0.05 * (strategy.degree("sdp") - 1)
        return float(work[layer] * (4 / 3 if strategy.recompute else 1) + exchange)

    def units(strategy: Strategy) -> int:
        state = 8 // (strategy.degree("tp") * strategy.degree("sdp"))
        return state + (1 if strategy.recompute else 2 + 4 // strategy.degree("tp"))

    seconds_LS = np.array([[seconds(layer, strategy) for strategy in found] for layer in range(4)])
    units_LS = np.array([[units(strategy) for strategy in found]] * 4)
    relayout = np.array([[0.05 * (one.degree("tp") != other.degree("tp")) for other in found] for one in found])
    best = pick(seconds_LS, units_LS, 60, relayout)
    taken = np.array(list(itertools.product(range(len(found)), repeat=4)))
    total_s = seconds_LS[np.arange(4), taken].sum(axis=1) + relayout[taken[:, :-1], taken[:, 1:]].sum(axis=1)
    used = units_LS[np.arange(4), taken].sum(axis=1)
    for memory in range(61):
        assert best.seconds_V[memory] == pytest.approx(total_s[used <= memory].min(initial=math.inf), rel=1e-12)
    assert math.isinf(best.seconds_V[used.min() - 1])
    assert {found[at].recompute for at in best.strategies_VL[used.min()]} == {True}
    mixed = [len({found[at].degree("tp") for at in row}) > 1 for row in best.strategies_VL[used.min() :]]
    assert any(mixed)
    assert not mixed[-1]
