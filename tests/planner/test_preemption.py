"""Rates of preemption: reading histories, estimating rates, and what they mean for several nodes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shoal_planner.errors import InvalidField
from shoal_planner.pool_history import (
    Observed,
    PoolChange,
    PoolHistory,
    counted_history,
    event_history,
    observe,
    read_history,
)
from shoal_planner.preemption import (
    ON_DEMAND,
    PUBLIC_PRIOR,
    PreemptionRate,
    RatePrior,
    estimate,
    fit_prior,
    known_rate,
    unknown_rate,
)

TRACES = Path(__file__).parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the recordings of real spot pools are not here")


def test_counts_become_losses_and_exposure() -> None:
    observed = observe(read_history("t_s,available\n0,4\n3600,1\n5400,3\n7200,3\n", "pool"))
    assert observed.losses == ((3, 4),)
    assert observed.exposure_node_h == pytest.approx(4 + 0.5 * 1 + 0.5 * 3)
    assert (observed.lost_nodes, observed.bulk_nodes, observed.bulk_shares()) == (3, 3, (0.75,))


def test_events_of_one_moment_are_one_loss() -> None:
    text = "t_s,op,node\n0,add,a\n0,add,b\n0,add,c\n3600,remove,a\n3600,remove,b\n3600,add,d\n7200,remove,d\n"
    history = read_history(text, "pool", end_s=10800)
    observed = observe(history)
    assert observed.losses == ((2, 3), (1, 2))
    assert observed.exposure_node_h == pytest.approx(3 + 2 + 1)
    assert [change.num_nodes for change in history.changes] == [3, -2, 1, -1]


def test_a_node_that_comes_and_goes_in_one_moment_was_never_there() -> None:
    history = event_history("pool", [(0.0, "add", "a"), (5.0, "add", "b"), (5.0, "remove", "b"), (9.0, "remove", "a")])
    assert history.changes == (PoolChange(at_s=0.0, num_nodes=1), PoolChange(at_s=9.0, num_nodes=-1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "pool.columns = '': must be t_s,available or t_s,op,node"),
        ("a,b\n1,2\n", "pool.columns = 'a,b'"),
        ("t_s,available\n", "must have at least one row"),
        ("t_s,available\n0,4\nx,3\n", "pool line 3.t_s = 'x': must be a number"),
        ("t_s,available\n0,4,5\n", "pool line 2 = '0,4,5': must have 2 columns"),
        ("t_s,available\n5,4\n0,3\n", "pool line 3.t_s = 0.0: must not lie before 5"),
        ("t_s,available\n0,-4\n", "pool line 2.available = '-4': must be a whole number"),
        ("t_s,available\n0,4.5\n", "pool line 2.available = '4.5': must be a whole number"),
        ("t_s,op,node\n0,grow,a\n", "pool at 0 s.op = 'grow': must be add or remove"),
        ("t_s,op,node\n0,remove,a\n", "pool at 0 s.node = 'a': is not there"),
        ("t_s,op,node\n0,add,a\n1,add,a\n", "pool at 1 s.node = 'a': is there already"),
    ],
)
def test_histories_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_history(text, "pool")
    assert words in str(caught.value)


def test_a_history_that_ends_before_it_is_over() -> None:
    with pytest.raises(InvalidField, match="must lie between"):
        event_history("pool", [(0.0, "add", "a"), (9.0, "remove", "a")], end_s=8.0)
    with pytest.raises(InvalidField, match="at least one row"):
        event_history("pool", [])
    with pytest.raises(InvalidField, match="takes away more nodes"):
        PoolHistory(pool="pool", start_s=0, end_s=9, changes=(PoolChange(at_s=1, num_nodes=-1),))


def simulated(draw: random.Random, pool: str, per_node_h: float, hours: float) -> PoolHistory:
    """Ten nodes that are replaced at once, each lost at this rate."""
    rows: list[tuple[float, int]] = [(0.0, 10)]
    at_h = draw.expovariate(10 * per_node_h)
    while at_h < hours:
        rows += [(at_h * 3600, 9), (at_h * 3600, 10)]
        at_h += draw.expovariate(10 * per_node_h)
    return counted_history(pool, [*rows, (hours * 3600, 10)])


def test_estimates_find_the_rates_that_made_the_histories() -> None:
    draw = random.Random(1)
    rates = [draw.gammavariate(4, 0.05) for _ in range(200)]
    seen = [observe(simulated(draw, f"pool-{index}", rate, 20)) for index, rate in enumerate(rates)]
    prior = fit_prior(seen)
    assert prior.per_node_h == pytest.approx(0.2, rel=0.1)
    assert prior.shape / prior.node_h**2 == pytest.approx(4 * 0.05**2, rel=0.35)
    pairs = list(zip(rates, seen, strict=True))

    def error(guess: list[float]) -> float:
        return sum((found - rate) ** 2 for found, (rate, _) in zip(guess, pairs, strict=True))

    shrunk = error([estimate(observed, prior).per_node_h for _, observed in pairs])
    assert shrunk < error([observed.lost_nodes / observed.exposure_node_h for _, observed in pairs])
    assert shrunk < error([prior.per_node_h for _ in pairs])


def test_pools_that_differ_by_chance_alone_are_taken_for_one() -> None:
    draw = random.Random(2)
    seen = [observe(simulated(draw, f"pool-{index}", 0.2, 20)) for index in range(50)]
    prior = fit_prior(seen)
    assert prior.node_h > 500  # as if so many hours had been seen of each
    assert estimate(seen[0], prior).per_node_h == pytest.approx(0.2, rel=0.1)


def test_a_quiet_pool_is_not_taken_to_be_safe() -> None:
    quiet = Observed(pool="quiet", exposure_node_h=40, losses=())
    rate = estimate(quiet)
    assert 0 < rate.per_node_h < unknown_rate().per_node_h
    assert rate.deviation_per_h < unknown_rate().deviation_per_h
    assert "0 nodes lost in 40 node-hours" in rate.reason
    long = estimate(Observed(pool="quiet", exposure_node_h=40_000, losses=()))
    assert long.per_node_h < 0.001


def test_a_long_history_speaks_for_itself() -> None:
    observed = Observed(pool="pool", exposure_node_h=1e6, losses=((1, 10),) * 50_000)
    rate = estimate(observed)
    assert rate.per_node_h == pytest.approx(0.05, rel=0.001)
    assert rate.single_per_h == pytest.approx(rate.per_node_h, rel=0.01)


def test_shocks_that_a_pool_has_seen_are_its_own() -> None:
    losses = ((2, 20), (10, 20)) * 40
    rate = estimate(Observed(pool="pool", exposure_node_h=4800, losses=losses))
    assert rate.per_node_h == pytest.approx(0.1, rel=0.03)
    assert sum(weight for _, weight in rate.shares) == pytest.approx(1)
    assert {round(share, 6) for share, _ in rate.shares} == {0.1, 0.5}
    assert rate.single_per_h < 0.01 * rate.per_node_h


def test_shocks_hit_fewer_moments_and_more_nodes() -> None:
    alone = PreemptionRate(single_per_h=0.1)
    shaken = PreemptionRate(single_per_h=0.0, shocks_per_h=0.2, shares=((0.5, 1.0),))
    assert alone.per_node_h == shaken.per_node_h == 0.1
    assert alone.interruptions_per_h(10) == pytest.approx(1.0)
    assert shaken.interruptions_per_h(10) == pytest.approx(0.2 * (1 - 0.5**10))
    assert alone.interruptions_per_h(1) == shaken.interruptions_per_h(1) == 0.1
    assert alone.any_lost_per_h((2,)) == 0
    assert shaken.any_lost_per_h((2,)) == pytest.approx(0.2 * 0.25)
    assert shaken.any_lost_per_h((2, 2)) == pytest.approx(0.2 * (1 - 0.75**2))
    assert alone.any_lost_per_h((1, 1, 2)) == pytest.approx(0.2)


def test_a_stated_rate_is_kept_and_comes_partly_in_shocks() -> None:
    rate = known_rate(0.4)
    assert rate.per_node_h == pytest.approx(0.4)
    assert rate.shocks_per_h > 0
    assert known_rate(0.0).per_node_h == 0
    assert known_rate(0.4, RatePrior(shape=1, node_h=1)).shocks_per_h == 0
    assert 0 < ON_DEMAND.per_node_h < 0.001 < PUBLIC_PRIOR.per_node_h


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: RatePrior(shape=0, node_h=1), "shape"),
        (lambda: RatePrior(shape=1, node_h=1, bulk_share=0.5), "shares"),
        (lambda: RatePrior(shape=1, node_h=1, clump=0.5), "clump"),
        (lambda: PreemptionRate(single_per_h=-1), "single_per_h"),
        (lambda: PreemptionRate(single_per_h=1, shocks_per_h=1), "shares"),
        (lambda: fit_prior([Observed(pool="quiet", exposure_node_h=4, losses=())]), "pools"),
    ],
)
def test_rates_that_cannot_be(made: Any, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        made()
    assert caught.value.field == field


def recordings() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((TRACES / "index.json").read_text(encoding="utf-8"))
    return found


def observed_in(entry: dict[str, Any]) -> Observed:
    text = (TRACES / entry["file"]).read_text(encoding="utf-8")
    end_s = entry.get("segment_s") if entry["kind"] == "events" else None
    return observe(read_history(text, entry["id"], end_s=end_s))


@needs_traces
def test_the_recordings_say_what_their_index_says() -> None:
    assert len(recordings()) > 40
    for entry in recordings():
        observed = observed_in(entry)
        assert observed.lost_nodes == entry["instances_lost"], entry["id"]
        assert len(observed.losses) == entry["loss_events"], entry["id"]
        if not entry.get("segment_s") and entry["kind"] == "count":
            nodes_h = entry["mean_available"] * entry["duration_s"] / 3600
            assert observed.exposure_node_h == pytest.approx(nodes_h, rel=0.05), entry["id"]


@needs_traces
def test_the_public_prior_is_that_of_the_recordings() -> None:
    """Of GPU pools in which instances were held; one recording has been cut into several files, of which one counts."""
    held = [
        observed_in(entry)
        for entry in recordings()
        if entry["id"].startswith(("bamboo", "sky_preem")) and "(CPU)" not in entry["instance"]
    ]
    prior = fit_prior(held)
    assert len(held) == 12
    assert PUBLIC_PRIOR.shape == pytest.approx(prior.shape, rel=0.01)
    assert PUBLIC_PRIOR.node_h == pytest.approx(prior.node_h, rel=0.01)
    assert PUBLIC_PRIOR.bulk_share == pytest.approx(prior.bulk_share, abs=0.01)
    assert PUBLIC_PRIOR.clump == pytest.approx(prior.clump, rel=0.01)
    assert [share for share, _ in PUBLIC_PRIOR.shares] == pytest.approx([share for share, _ in prior.shares], abs=0.01)


@needs_traces
def test_shocks_of_a_real_pool_interrupt_less_often_than_its_nodes_are_lost() -> None:
    (entry,) = (entry for entry in recordings() if entry["id"] == "bamboo_gcp_v100x1-east1c")
    rate = estimate(observed_in(entry))
    lost_per_h = entry["lost_per_hour"] / entry["mean_available"]
    assert rate.per_node_h == pytest.approx(lost_per_h, rel=0.05)
    # 55 drops of 9.4 nodes on average: 76 nodes are hit about 2.3 times an hour, not 21.
    assert rate.interruptions_per_h(76) == pytest.approx(entry["loss_events"] * 3600 / entry["duration_s"], rel=0.35)
