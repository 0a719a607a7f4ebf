"""The packing alone: its linear programme against all corners of the polytope, its whole packings against the stock."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.options import Floats
from shoal_planner.packing import Simplex, pack, worth


@st.composite
def instances(draw: st.DrawFn) -> tuple[Floats, Floats, Floats]:
    """Values, needs and stock; every template needs something."""
    kinds, num = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    values = draw(st.lists(st.integers(0, 20), min_size=num, max_size=num))
    needs = draw(st.lists(st.lists(st.integers(0, 4), min_size=kinds, max_size=kinds), min_size=num, max_size=num))
    stock = draw(st.lists(st.integers(0, 12), min_size=kinds, max_size=kinds))
    rows = [[*row[:-1], max(1, row[-1])] if not any(row) else row for row in needs]
    return np.array(values, float), np.array(rows, float), np.array(stock, float)


def corners(values: Floats, needs: Floats, stock: Floats) -> float:
    """The best value of all basic solutions: so many columns, slacks included, as there are kinds of stock."""
    num, kinds = needs.shape
    columns = np.concatenate([needs, np.eye(kinds)])
    worths = np.concatenate([values, np.zeros(kinds)])
    best = 0.0
    for chosen in itertools.combinations(range(num + kinds), kinds):
        basis = columns[list(chosen)].T
        if abs(np.linalg.det(basis)) > 1e-9:
            amounts = np.linalg.solve(basis, stock)
            if (amounts >= -1e-9).all():
                best = max(best, float(worths[list(chosen)] @ amounts))
    return best


@settings(deadline=None, max_examples=300)
@given(instances())
def test_fractions_are_worth_as_much_as_any(instance: tuple[Floats, Floats, Floats]) -> None:
    values, needs, stock = instance
    found, fractions, worths = worth(values, needs, stock)
    assert found == pytest.approx(corners(values, needs, stock), abs=1e-6)
    assert (fractions >= 0).all() and (fractions @ needs <= stock + 1e-6).all()
    assert values @ fractions == pytest.approx(found)
    # What the stock is worth proves it: nothing gains, and all of it together is worth what was found.
    assert (worths >= 0).all() and (needs @ worths >= values - 1e-6).all()
    assert stock @ worths == pytest.approx(found, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(instances(), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 40))
def test_where_one_question_ended_the_next_may_begin(
    instance: tuple[Floats, Floats, Floats], factors: list[int], enough: int
) -> None:
    values, needs, stock = instance
    simplex = Simplex(needs, stock)
    for factor in factors:
        some = np.roll(values, factor) * factor
        best = worth(some, needs, stock)[0]
        reached = simplex.best(some, enough)
        assert (reached >= enough - 1e-9) == (best >= enough - 1e-9) and reached <= best + 1e-6
        assert simplex.best(some) == pytest.approx(best, abs=1e-6)
        assert (simplex.fractions() @ needs <= stock + 1e-6).all()


def whole(values: Floats, needs: Floats, stock: Floats) -> float:
    """The best sum of values of whole templates."""
    best, fits = 0.0, [range(int((stock[row > 0] // row[row > 0]).min()) + 1) for row in needs]
    for counts in itertools.product(*fits):
        if (np.array(counts) @ needs <= stock).all():
            best = max(best, float(values @ np.array(counts)))
    return best


@settings(deadline=None, max_examples=200)
@given(instances(), st.integers(1, 60))
def test_packings_stay_within_the_stock_and_leave_no_room(instance: tuple[Floats, Floats, Floats], wanted: int) -> None:
    values, needs, stock = instance
    found = pack(values, needs, stock, wanted=wanted)
    assert found
    for packing in found:
        counts = np.zeros(len(values))
        for row, count in packing.counts:
            counts[row] = count
        left = stock - counts @ needs
        assert (left >= 0).all() and (counts >= 0).all()
        assert values @ counts == pytest.approx(packing.value)
        assert not ((needs <= left).all(axis=1) & (values > 0)).any(), "another template would fit"
    enough = [min(packing.value, wanted) for packing in found]
    assert enough == sorted(enough, reverse=True)


def test_packings_are_nearly_always_as_good_as_any() -> None:
    """A beam is no proof, and it keeps the whole part of the fractional best; what is missed is little on the whole."""
    rng = np.random.default_rng(7)
    missed = []
    for _ in range(150):
        kinds, num = int(rng.integers(1, 4)), int(rng.integers(2, 5))
        needs = rng.integers(0, 4, (num, kinds)).astype(float)
        needs[np.arange(num), rng.integers(0, kinds, num)] += 1
        values, stock = rng.integers(1, 20, num).astype(float), rng.integers(3, 12, kinds).astype(float)
        best = whole(values, needs, stock)
        found = pack(values, needs, stock, wanted=np.inf)[0].value
        assert found <= best + 1e-9
        missed.append(1 - found / best if best else 0.0)
    assert np.mean(np.array(missed) > 1e-9) <= 0.08
    assert np.mean(missed) <= 0.01


def test_nothing_is_packed_where_nothing_fits() -> None:
    values, needs, stock = np.array([3.0]), np.array([[2.0]]), np.array([1.0])
    assert worth(values, needs, stock)[0] == pytest.approx(1.5)
    assert [packing.counts for packing in pack(values, needs, stock, wanted=1)] == [()]
