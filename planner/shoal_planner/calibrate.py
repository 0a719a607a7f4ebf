"""Fits a cluster's Calibration to whole steps that were measured: a few pairs of plan and seconds.

Six factors, each with the catalogue or what is usual as its prior: a regularised least squares of log(predicted /
measured), so that two runs already help and six determine what they can tell of. A factor of which the runs say
nothing stays at 1. Also says which of several plans to measure, from the plans alone, and what a fit is worth for plans
that it has not seen. Does not own what the factors do (`calibration`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_planner.calibration import FACTORS, Calibration
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_planner.predict import predict
from shoal_planner.profile import Profile

_Vector = NDArray[np.float64]
_Misses = Callable[[NDArray[np.float64]], NDArray[np.float64]]

# How far from 1 each factor may well be, as the standard deviation of its logarithm. The catalogue's efficiency is
# good to a third or so; how often activations cross memory and what a kernel's start takes depend on the framework and
# the host; a node's nominal link may carry a twelfth of its rate where devices cannot reach each other directly;
# networks are shared, and protocols have a price.
# Parts timed by themselves are off by what a step adds to them, which is little.
SPREADS = {"compute": 0.35, "passes": 1.0, "kernel": 1.0, "inside": 1.5, "network": 0.4, "parts": 0.2}
# Where a factor is expected, if runs depend on it at all: exchanges over a network reach about half of its rate.
USUAL = {"network": 0.5}
# A smaller change of the logarithm of seconds than this for one of the factor is rounding: the run says nothing of it.
_LEAST_SLOPE = 1e-6
# What the closed form and one measurement leave unexplained, likewise.
NOISE = 0.05
_DIFFERENCE = 1e-4
_ROUNDS = 60
_MOST_PER_ROUND = 1.0
# What many runs predict of each other takes this many fits.
_FOLDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A plan of a job that ran, and the seconds that a step of it took: the median, after the first few. `name` is for
    people."""

    job: JobSpec
    plan: Plan
    step_s: float
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf"):
            raise InvalidField("step_s", self.step_s, "must be more than zero")


def calibrate(
    runs: Sequence[MeasuredRun], snapshot: ClusterSnapshot, profile: Profile | None = None, *, source: str = ""
) -> Calibration:
    """The factors that explain these runs best. They replace those that the profile has. Raises InvalidField without a
    run, and KeyError for a node that the cluster lacks."""
    if not runs:
        raise InvalidField("runs", [], "must have at least one entry")
    profile = profile or Profile()
    measured = np.log([run.step_s for run in runs])

    def misses(x: _Vector) -> _Vector:
        return _predicted(x, [(run.job, run.plan) for run in runs], snapshot, profile) - measured

    x = _fit(misses)
    error = float(np.mean(np.abs(np.exp(misses(x)) - 1)))
    return dataclasses.replace(_calibration(x), source=source or f"{len(runs)} measured runs", error=error)


def predicted_s(
    runs: Sequence[MeasuredRun], snapshot: ClusterSnapshot, profile: Profile | None = None
) -> tuple[float, ...]:
    """Seconds of a step of each run by this profile; what was measured is not looked at."""
    profile = profile or Profile()
    return _seconds([(run.job, run.plan) for run in runs], snapshot, profile)


def cross_predicted_s(
    runs: Sequence[MeasuredRun], snapshot: ClusterSnapshot, profile: Profile | None = None
) -> tuple[float, ...]:
    """Seconds of a step of each run by a fit on the others, a tenth of many runs at a time: what is to be expected for
    plans that did not run yet. Raises InvalidField with fewer than two runs."""
    if len(runs) < 2:
        raise InvalidField("runs", len(runs), "must be at least two, to predict one from the others")
    profile = profile or Profile()
    found: dict[int, float] = {}
    folds = min(len(runs), _FOLDS)
    for fold in range(folds):
        out = range(fold, len(runs), folds)
        rest = [run for index, run in enumerate(runs) if index % folds != fold]
        fitted = dataclasses.replace(profile, calibration=calibrate(rest, snapshot, profile))
        found.update(zip(out, predicted_s([runs[index] for index in out], snapshot, fitted), strict=True))
    return tuple(found[index] for index in range(len(runs)))


def choose_runs(
    plans: Sequence[tuple[JobSpec, Plan]],
    snapshot: ClusterSnapshot,
    profile: Profile | None = None,
    *,
    count: int = 5,
    known: Sequence[int] = (),
) -> tuple[int, ...]:
    """Which `count` of these plans tell most about the factors when measured, `known` (numbers of plans) among them.

    One after the other, each the one that leaves the smallest uncertainty (D-optimal). Looks at predictions alone.
    Raises InvalidField, and KeyError for a node that the cluster lacks.
    """
    if not len(known) <= count <= len(plans):
        problem = f"must be {len(known)} (known) to {len(plans)} (plans)"
        raise InvalidField("count", count, problem)
    slopes = _slopes(lambda x: _predicted(x, plans, snapshot, profile or Profile()), np.zeros(len(FACTORS))) / NOISE
    chosen = list(known)
    information = np.diag(_spreads() ** -2) + slopes[chosen].T @ slopes[chosen]
    while len(chosen) < count:
        spread = np.linalg.inv(information)
        # What measuring a plan adds to the determinant of the information: one more than this, times.
        gains = {index: float(row @ spread @ row) for index, row in enumerate(slopes) if index not in chosen}
        best = max(gains, key=lambda index: gains[index])
        chosen.append(best)
        information = information + np.outer(slopes[best], slopes[best])
    return tuple(sorted(chosen))


def _predicted(
    x: _Vector, plans: Sequence[tuple[JobSpec, Plan]], snapshot: ClusterSnapshot, profile: Profile
) -> _Vector:
    """Logarithms of the seconds of a step."""
    return np.log(_seconds(plans, snapshot, dataclasses.replace(profile, calibration=_calibration(x))))


def _seconds(plans: Sequence[tuple[JobSpec, Plan]], snapshot: ClusterSnapshot, profile: Profile) -> tuple[float, ...]:
    costs: dict[JobSpec, CostModel] = {}
    for job, _ in plans:
        if job not in costs:
            costs[job] = CostModel(job, snapshot, profile)
    return tuple(predict(plan, costs[job]).step_s for job, plan in plans)


def _calibration(x: _Vector) -> Calibration:
    compute, passes, kernel, inside, network, parts = (float(factor) for factor in np.exp(x))
    return Calibration(compute=compute, passes=passes, kernel=kernel, inside=inside, network=network, parts=parts)


def _spreads() -> _Vector:
    return np.array([SPREADS[name] for name in FACTORS])


def _fit(misses: _Misses) -> _Vector:
    """Levenberg and Marquardt: Gauss-Newton steps, shortened while they do not help."""
    usual = np.log([USUAL.get(name, 1.0) for name in FACTORS])
    touched = np.abs(_slopes(misses, np.zeros(len(FACTORS)))).max(axis=0) > _LEAST_SLOPE
    centre = np.where(touched, usual, 0.0)

    def weighted(x: _Vector) -> _Vector:
        return np.concatenate([misses(x) / NOISE, (x - centre) / _spreads()])

    x, damping = centre, 1e-2
    residual = weighted(x)
    for _ in range(_ROUNDS):
        slopes = _slopes(weighted, x)
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ residual)
        step = np.clip(step, -_MOST_PER_ROUND, _MOST_PER_ROUND)
        tried = weighted(x + step)
        gain = residual @ residual - tried @ tried
        if gain > 0:
            x, residual, damping = x + step, tried, damping / 4
        else:
            damping *= 8
        if 0 <= gain < 1e-9 or np.abs(step).max() < 1e-7:
            break
    return x


def _slopes(function: _Misses, x: _Vector) -> _Vector:
    return np.stack(
        [(function(x + move) - function(x - move)) / (2 * _DIFFERENCE) for move in _DIFFERENCE * np.eye(len(x))], axis=1
    )
