"""A fabric from measured collectives: the figures of GenModel that explain what was seen.

Owns the fit. Does not own measuring (`collectives`) nor the model (`shoal_planner.collective_counts`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from benchmarks.collective_counting import halves, seconds
from shoal_planner.algorithms import Algorithm
from shoal_planner.collective_counts import Counts, Fabric, counts_of
from shoal_planner.errors import InvalidField
from shoal_planner.ranges import check_ranges

Figures = NDArray[np.float64]
Part = Literal["both", "reduce", "gather"]
# Names of the figures, in the order of the terms of GenModel.
_TERMS = ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte", "delta_s_per_byte", "epsilon_s_per_byte")
_CLASSIC = 3  # latency, bandwidth and reduction alone
# A gradient this small beside the largest figure is rounding, not a way to a better fit.
_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one all-reduce took, or its reduce-scatter or all-gather alone: all holders had a vector of `num_bytes`, and
    a port each."""

    algorithm: Algorithm
    num_bytes: float
    seconds: float
    part: Part = "both"

    def __post_init__(self) -> None:
        check_ranges(self, {"num_bytes": (1, 2.0**60), "seconds": (1e-9, 1e6)})

    @property
    def counts(self) -> Counts:
        whole = counts_of(self.algorithm)
        match self.part:
            case "both":
                return whole
            case "reduce":
                return halves(whole)[0]
            case "gather":
                return halves(whole)[1]
        assert_never(self.part)


def fit_fabric(points: Sequence[Measured]) -> Fabric:
    """The six figures of GenModel with the least squared relative error, none negative; `fan_in` is tried over all
    whole numbers that tell the points apart. Raises InvalidField without points.

    Every all-reduce of the table sends twice what it adds, so that only points of halves can tell sending from adding;
    without any, what is found explains both together.
    """
    _check(points)
    largest = max(point.counts.fan_in for point in points)
    fits = [_fit(points, len(_TERMS), fan_in) for fan_in in range(2, max(largest, 3))]
    return min(fits, key=lambda found: found[0])[1]


def fit_three_terms(points: Sequence[Measured]) -> Fabric:
    """As `fit_fabric` with latency, bandwidth and reduction alone: the older model, to compare with."""
    _check(points)
    return _fit(points, _CLASSIC, 2)[1]


def mean_error(points: Sequence[Measured], fabric: Fabric) -> float:
    """Mean of |predicted - measured| / measured."""
    return statistics.fmean(abs(seconds(point.counts, point.num_bytes, fabric) / point.seconds - 1) for point in points)


def least_squares(matrix: Figures, goal: Figures) -> Figures:
    """The x >= 0 that makes |matrix x - goal| least (Lawson and Hanson's active sets)."""
    found = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    limit = _TOLERANCE * max(1.0, float(np.abs(matrix.T @ goal).max(initial=0.0)))
    # Each round frees a figure; the number of rounds is bounded because rounding could else free one for ever.
    for _ in range(10 * matrix.shape[1]):
        slope = np.where(free, -np.inf, matrix.T @ (goal - matrix @ found))
        if slope.max() <= limit:
            break
        free[int(slope.argmax())] = True
        found = _step_to_feasible(matrix, goal, found, free)
    return found


def _step_to_feasible(matrix: Figures, goal: Figures, found: Figures, free: NDArray[np.bool_]) -> Figures:
    """The best over the free figures; whichever would turn negative is bound to zero on the way. Changes `free`."""
    while True:
        best = np.zeros_like(found)
        best[free] = np.linalg.lstsq(matrix[:, free], goal, rcond=None)[0]
        falling = free & (best <= 0)
        if not falling.any():
            return best
        span = found[falling] - best[falling]
        share = float(np.min(np.divide(found[falling], span, out=np.zeros_like(span), where=span > 0)))
        found = found + share * (best - found)
        free &= found > 0
        found = np.where(free, found, 0.0)


def _check(points: Sequence[Measured]) -> None:
    if not points:
        raise InvalidField("points", 0, "must be at least one measured collective")


def _fit(points: Sequence[Measured], num_terms: int, fan_in: int) -> tuple[float, Fabric]:
    """The squared error and the figures. Rows are divided by what was measured, so that errors are relative; columns
    by their length, so that seconds and seconds per byte weigh alike."""
    rows = np.array([_row(point, fan_in)[:num_terms] for point in points])
    rows /= np.array([point.seconds for point in points])[:, None]
    lengths = np.linalg.norm(rows, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    goal = np.ones(len(points))
    scaled = least_squares(rows / scale, goal)
    error = float(np.sum((rows / scale @ scaled - goal) ** 2))
    figures = dict(zip(_TERMS, map(float, scaled / scale), strict=False))
    return error, Fabric(
        alpha_s=figures["alpha_s"],
        beta_s_per_byte=figures["beta_s_per_byte"],
        gamma_s_per_byte=figures["gamma_s_per_byte"],
        delta_s_per_byte=figures.get("delta_s_per_byte", 0.0),
        epsilon_s_per_byte=figures.get("epsilon_s_per_byte", 0.0),
        fan_in=fan_in,
    )


def _row(point: Measured, fan_in: int) -> tuple[float, ...]:
    counts = point.counts
    return (
        counts.rounds,
        counts.sent * point.num_bytes,
        counts.reduced * point.num_bytes,
        counts.touched * point.num_bytes,
        max(counts.fan_in - fan_in, 0) * counts.sent * point.num_bytes,
    )
