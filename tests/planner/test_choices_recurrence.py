"""The recurrence over (layer, memory, strategy) against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from recurrence import Ints, pick, whole_units

from shoal_planner.choices import Floats
from shoal_planner.errors import InvalidField


def brute(seconds: Floats, units: Ints, relayout: Floats, most_units: int) -> float:
    """Every sequence of strategies."""
    num_layers, num_strategies = seconds.shape
    taken = np.array(list(itertools.product(range(num_strategies), repeat=num_layers)))
    layers = np.arange(num_layers)
    total_s = seconds[layers, taken].sum(axis=1) + relayout[taken[:, :-1], taken[:, 1:]].sum(axis=1)
    return float(total_s[units[layers, taken].sum(axis=1) <= most_units].min(initial=math.inf))


def total(seconds: Floats, relayout: Floats, taken: Ints) -> float:
    return float(seconds[np.arange(len(taken)), taken].sum() + relayout[taken[:-1], taken[1:]].sum())


@pytest.mark.parametrize("seed", range(100))
def test_equal_to_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_layers, num_strategies, most = int(rng.integers(1, 7)), int(rng.integers(1, 6)), int(rng.integers(0, 41))
    seconds = rng.random((num_layers, num_strategies))
    units = rng.integers(0, 14, (num_layers, num_strategies))
    relayout = rng.random((num_strategies, num_strategies)) * rng.choice([0.0, 0.3])
    np.fill_diagonal(relayout, 0.0)
    found = pick(seconds, units, most, relayout)
    for memory in {most, most // 2, most // 3}:
        assert found.seconds_V[memory] == pytest.approx(brute(seconds, units, relayout, memory), rel=1e-12)
    for memory in range(most + 1):
        taken = found.strategies_VL[memory]
        if math.isinf(found.seconds_V[memory]):
            assert (taken == -1).all()
        else:
            assert units[np.arange(num_layers), taken].sum() <= memory
            assert total(seconds, relayout, taken) == pytest.approx(found.seconds_V[memory], rel=1e-12)
    finite = found.seconds_V[np.isfinite(found.seconds_V)]
    assert (np.diff(finite) <= 0).all()


def test_a_dear_change_of_strategy_is_not_worth_a_cheap_layer() -> None:
    seconds, units = np.array([[1.0, 9.0], [2.0, 1.0], [1.0, 9.0]]), np.ones((3, 2), dtype=int)
    assert pick(seconds, units, 3).strategies_VL[3].tolist() == [0, 1, 0]
    dear = np.array([[0.0, 0.6], [0.6, 0.0]])
    assert pick(seconds, units, 3, dear).strategies_VL[3].tolist() == [0, 0, 0]


def test_units_are_rounded_up_so_that_what_fits_in_units_fits_in_bytes() -> None:
    assert whole_units([0, 1, 99, 100, 101], 100).tolist() == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("units", "most", "relayout"),
    [([[1]], 4, None), ([[1, -1]], 4, None), ([[1, 1]], -1, None), ([[1, 0.5]], 4, None), ([[1, 1]], 4, [[0.0]])],
)
def test_what_is_no_memory_or_no_table_is_refused(units: object, most: int, relayout: object) -> None:
    with pytest.raises(InvalidField):
        pick([[1.0, 2.0]], units, most, relayout)  # type: ignore[arg-type]


def test_seconds_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(InvalidField):
        pick([[math.nan]], [[1]], 1)
