"""Steps of real runs by others, predicted after a fit on five of them. Skipped where the recorded runs are not."""

from __future__ import annotations

import pytest

from benchmarks.measured_runs import DEFAULT_PATH, RecordedCluster, load
from benchmarks.prediction import (
    LARGEST_ERROR,
    NUM_FITTED,
    SMALLEST_RANK,
    chosen_runs,
    judge,
    predictions,
    random_choices,
    rank_correlation,
)
from shoal_planner.plan import check_plan

pytestmark = pytest.mark.skipif(not DEFAULT_PATH.exists(), reason="the recorded runs lie outside the repository")
CLUSTERS = ("amp-homo", "sailor-rtx")


@pytest.fixture(scope="module")
def recorded() -> dict[str, RecordedCluster]:
    return {cluster.name: cluster for cluster in load()}


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 3, 4], [1, 1, 3, 4]) == pytest.approx(4.5 / 22.5**0.5)


@pytest.mark.parametrize("name", CLUSTERS)
def test_recorded_runs_are_plans(recorded: dict[str, RecordedCluster], name: str) -> None:
    cluster = recorded[name]
    assert len(cluster.runs) == {"amp-homo": 47, "sailor-rtx": 9}[name]
    nodes = {node.id: node for node in cluster.snapshot.nodes}
    for named in cluster.runs:
        check_plan(named.run.plan, named.run.job)
        assert all(ref.index < nodes[ref.node].devices for ref in named.run.plan.devices())


@pytest.mark.parametrize("name", CLUSTERS)
def test_five_runs_predict_all_others(recorded: dict[str, RecordedCluster], name: str) -> None:
    cluster = recorded[name]
    chosen = chosen_runs(cluster)
    assert len(chosen) == NUM_FITTED
    error, rank = judge(cluster, chosen)
    assert error <= LARGEST_ERROR
    assert rank >= SMALLEST_RANK


@pytest.mark.long
def test_most_other_choices_of_runs_do_as_well(recorded: dict[str, RecordedCluster]) -> None:
    """sailor-rtx is judged by error alone: ranks of four runs of which two differ by 0.4 % are left to chance."""
    judged = {
        name: [judge(recorded[name], choice) for choice in random_choices(recorded[name], 5)] for name in CLUSTERS
    }
    reached = [error <= LARGEST_ERROR and rank >= SMALLEST_RANK for error, rank in judged["amp-homo"]]
    assert sum(reached) > len(reached) / 2
    errors = [error <= LARGEST_ERROR for error, _ in judged["sailor-rtx"]]
    assert sum(errors) > len(errors) / 2


def test_plans_are_told_apart_without_any_fit(recorded: dict[str, RecordedCluster]) -> None:
    for cluster in recorded.values():
        plain = predictions(cluster, cluster.runs, None)
        assert rank_correlation(plain, [named.run.step_s for named in cluster.runs]) > 0.7
