"""How well steps of real runs by others are predicted, with the factors of a cluster fitted on five of its runs.

Usage: python -m benchmarks.prediction [--json] [--choices N]

The runs to fit on are chosen before anything is compared: those whose recorded values are doubtful, as a value that may
be wrong should not judge, then those that `choose_runs` says tell most, from the plans alone. Error and rank are of all
others. `share.*` is the part of N random choices of five runs (any five, doubtful ones or not) after which the others
are predicted with a median error of at most 10 % and a rank correlation of at least 0.95. `peer_*` is what the
repository that recorded the runs had predicted for the same others, and `peer_scaled_*` that after one factor, fitted
on the same five.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.measured_runs import NamedRun, RecordedCluster, load
from benchmarks.reporting import answer
from shoal_planner.calibrate import calibrate, choose_runs
from shoal_planner.calibration import FACTORS, Calibration
from shoal_planner.costs import CostModel
from shoal_planner.job import JobSpec
from shoal_planner.predict import predict
from shoal_planner.profile import Profile

NUM_FITTED = 5
LARGEST_ERROR = 0.10
SMALLEST_RANK = 0.95


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of theirs."""
    order = sorted(values)
    return [(2 * order.index(value) + order.count(value) + 1) / 2 for value in values]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""
    return statistics.correlation(ranks(one), ranks(other))


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return statistics.median(abs(guess / truth - 1) for guess, truth in zip(predicted, measured, strict=True))


def predictions(cluster: RecordedCluster, runs: Iterable[NamedRun], calibration: Calibration | None) -> list[float]:
    """Seconds of a step of each."""
    costs: dict[JobSpec, CostModel] = {}
    found = []
    for named in runs:
        job = named.run.job
        if job not in costs:
            costs[job] = CostModel(job, cluster.snapshot, Profile(calibration=calibration))
        found.append(predict(named.run.plan, costs[job]).step_s)
    return found


def chosen_runs(cluster: RecordedCluster) -> tuple[int, ...]:
    """By the rule above."""
    plans = [(named.run.job, named.run.plan) for named in cluster.runs]
    return choose_runs(plans, cluster.snapshot, count=NUM_FITTED, known=cluster.doubtful)


def fit(cluster: RecordedCluster, chosen: Sequence[int]) -> Calibration:
    return calibrate([cluster.runs[index].run for index in chosen], cluster.snapshot)


def others(cluster: RecordedCluster, chosen: Sequence[int]) -> list[NamedRun]:
    return [named for index, named in enumerate(cluster.runs) if index not in chosen]


def judge(cluster: RecordedCluster, chosen: Sequence[int]) -> tuple[float, float]:
    """Median error and rank correlation of the runs that were not chosen, after a fit on those that were."""
    rest = others(cluster, chosen)
    predicted = predictions(cluster, rest, fit(cluster, chosen))
    measured = [named.run.step_s for named in rest]
    return median_error(predicted, measured), rank_correlation(predicted, measured)


def random_choices(cluster: RecordedCluster, count: int) -> list[tuple[int, ...]]:
    """Different ones; all where there are no more."""
    size = len(cluster.runs)
    if math.comb(size, NUM_FITTED) <= count:
        return list(itertools.combinations(range(size), NUM_FITTED))
    source, found = random.Random(0), set[tuple[int, ...]]()
    while len(found) < count:
        found.add(tuple(sorted(source.sample(range(size), NUM_FITTED))))
    return sorted(found)


def report(cluster: RecordedCluster, num_choices: int) -> tuple[dict[str, float | None], dict[str, Any]]:
    chosen = chosen_runs(cluster)
    calibration = fit(cluster, chosen)
    rest = others(cluster, chosen)
    measured = [named.run.step_s for named in rest]
    plain, fitted = predictions(cluster, rest, None), predictions(cluster, rest, calibration)
    judged = [judge(cluster, choice) for choice in random_choices(cluster, num_choices)]
    reached = [error <= LARGEST_ERROR and rank >= SMALLEST_RANK for error, rank in judged]
    results: dict[str, float | None] = {
        "median_error": median_error(fitted, measured),
        "rank": rank_correlation(fitted, measured),
        "largest_error": max(abs(guess / truth - 1) for guess, truth in zip(fitted, measured, strict=True)),
        "unfitted_median_error": median_error(plain, measured),
        "unfitted_rank": rank_correlation(plain, measured),
        "share": statistics.mean(reached),
        "share_error": statistics.mean(error <= LARGEST_ERROR for error, _ in judged),
        "share_rank": statistics.mean(rank >= SMALLEST_RANK for _, rank in judged),
        **_peer(cluster, chosen),
    }
    runs = {
        "fitted_on": [cluster.runs[index].name for index in chosen],
        "factors": {name: getattr(calibration, name) for name in FACTORS},
        "choices": len(judged),
        "others": [
            {"run": named.name, "measured_s": named.run.step_s, "predicted_s": guess, "peer_s": named.peer_s}
            for named, guess in zip(rest, fitted, strict=True)
        ],
    }
    if rest[0].peer_s is None:
        runs["peer"] = "the file records no prediction of the peer for these runs"
    return {f"{name}.{cluster.name}": value for name, value in results.items()}, runs


def _peer(cluster: RecordedCluster, chosen: Sequence[int]) -> dict[str, float | None]:
    rest = others(cluster, chosen)
    peer = [named.peer_s for named in rest if named.peer_s is not None]
    fitted = [named for named in (cluster.runs[index] for index in chosen) if named.peer_s]
    if len(peer) < len(rest) or not fitted:
        return {"peer_median_error": None, "peer_rank": None, "peer_scaled_median_error": None}
    measured = [named.run.step_s for named in rest]
    factor = math.exp(statistics.mean(math.log(named.run.step_s / (named.peer_s or math.nan)) for named in fitted))
    return {
        "peer_median_error": median_error(peer, measured),
        "peer_rank": rank_correlation(peer, measured),
        "peer_scaled_median_error": median_error([factor * guess for guess in peer], measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--choices", type=int, default=60, help="random choices of runs to fit on, per cluster")
    arguments = parser.parse_args()
    results: dict[str, float | None] = {}
    runs: dict[str, Any] = {}
    for cluster in load():
        found, details = report(cluster, arguments.choices)
        results.update(found)
        runs[cluster.name] = details
    answer("prediction", results, runs)


if __name__ == "__main__":
    main()
