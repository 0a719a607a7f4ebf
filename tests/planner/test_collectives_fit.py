"""Fabrics fitted to measured collectives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.collective_counting import halves, seconds
from benchmarks.fabric_fit import Measured, Part, fit_fabric, fit_three_terms, least_squares, mean_error
from shoal_planner.algorithms import Algorithm
from shoal_planner.collective_counts import Fabric, counts_of
from shoal_planner.errors import InvalidField

TRUTH = Fabric(
    alpha_s=40e-6,
    beta_s_per_byte=1e-9,
    gamma_s_per_byte=2e-10,
    delta_s_per_byte=3e-10,
    epsilon_s_per_byte=1.5e-10,
    fan_in=5,
)
ALGORITHMS = [
    *(Algorithm(kind="ring", holders=holders) for holders in (4, 8, 12)),
    *(Algorithm(kind="parameter_server", holders=holders) for holders in (3, 4, 6, 8, 12)),
    *(Algorithm(kind="reduce_broadcast", holders=holders) for holders in (4, 7)),
    Algorithm(kind="parameter_server", holders=8, factors=(4, 2)),
    Algorithm(kind="parameter_server", holders=12, factors=(3, 4)),
]
SIZES = [2.0**power for power in range(16, 27)]


def measure(truth: Fabric, noise: float = 0.0, parts: tuple[Part, ...] = ("both",)) -> list[Measured]:
    random = np.random.default_rng(1)
    points = []
    for algorithm, num_bytes, part in itertools.product(ALGORITHMS, SIZES, parts):
        whole = counts_of(algorithm)
        counts = {"both": whole, "reduce": halves(whole)[0], "gather": halves(whole)[1]}[part]
        took_s = seconds(counts, num_bytes, truth) * float(np.exp(noise * random.standard_normal()))
        points.append(Measured(algorithm=algorithm, num_bytes=num_bytes, seconds=took_s, part=part))
    return points


def test_an_exact_fabric_is_found_again() -> None:
    found = fit_fabric(measure(TRUTH, parts=("reduce", "gather", "both")))
    assert found.fan_in == TRUTH.fan_in
    for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte", "delta_s_per_byte", "epsilon_s_per_byte"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-5), name


def test_whole_collectives_tell_sending_and_adding_together() -> None:
    found = fit_fabric(measure(TRUTH))
    assert mean_error(measure(TRUTH), found) < 1e-6
    assert 2 * found.beta_s_per_byte + found.gamma_s_per_byte == pytest.approx(2 * 1e-9 + 2e-10)


def test_figures_that_are_zero_stay_zero() -> None:
    plain = Fabric(alpha_s=40e-6, beta_s_per_byte=1e-9)
    found = fit_fabric(measure(plain))
    assert found.alpha_s == pytest.approx(40e-6)
    assert found.beta_s_per_byte == pytest.approx(1e-9)
    assert max(found.gamma_s_per_byte, found.delta_s_per_byte, found.epsilon_s_per_byte) < 1e-15


def test_half_of_noisy_points_predicts_the_other_half_and_better_than_three_terms() -> None:
    points = measure(TRUTH, noise=0.05)
    given, kept = points[::2], points[1::2]
    assert mean_error(kept, fit_fabric(given)) < 0.06
    assert mean_error(kept, fit_three_terms(given)) > 0.09


def test_three_terms_have_no_more() -> None:
    found = fit_three_terms(measure(TRUTH))
    assert found.delta_s_per_byte == found.epsilon_s_per_byte == 0


def test_least_squares_matches_a_search_over_all_active_sets() -> None:
    random = np.random.default_rng(2)
    for _ in range(200):
        matrix, goal = random.standard_normal((9, 5)), random.standard_normal(9)
        if random.random() < 0.3:
            matrix[:, 1] = 2 * matrix[:, 0]  # columns that say the same
        best = min(_residuals(matrix, goal))
        found = least_squares(matrix, goal)
        assert (found >= 0).all()
        assert np.sum((matrix @ found - goal) ** 2) == pytest.approx(best, abs=1e-9)


def _residuals(matrix: NDArray[np.float64], goal: NDArray[np.float64]) -> list[float]:
    """Of every non-negative solution over a subset of the columns."""
    found = [float(goal @ goal)]
    for size in range(1, matrix.shape[1] + 1):
        for columns in itertools.combinations(range(matrix.shape[1]), size):
            solution = np.linalg.lstsq(matrix[:, columns], goal, rcond=None)[0]
            if (solution >= -1e-12).all():
                found.append(float(np.sum((matrix[:, columns] @ solution - goal) ** 2)))
    return found


def test_a_single_point_is_explained() -> None:
    point = Measured(algorithm=ALGORITHMS[0], num_bytes=1e6, seconds=1e-3)
    assert mean_error([point], fit_fabric([point])) < 1e-9


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidField, match="points = 0"):
        fit_fabric([])
    with pytest.raises(InvalidField, match="points = 0"):
        fit_three_terms([])
    with pytest.raises(InvalidField, match="seconds = 0"):
        Measured(algorithm=ALGORITHMS[0], num_bytes=1e6, seconds=0)
