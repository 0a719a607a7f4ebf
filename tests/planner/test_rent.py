"""Which fleet is rented: against single offers, under budgets, deadlines and what is available, and when markets
change."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from rent_ground import AVAILABLE, PRICES, market, offer, rent_job

from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.market import Market, parse_market
from shoal_planner.preemption import PreemptionRate
from shoal_planner.rent import RentResult, rent
from shoal_planner.rent_answers import rent_answer
from shoal_planner.score import score
from shoal_planner.search import plan

SMALL = (6, 4, 0, 2, 0, 0)  # few enough nodes that a fleet is planned for in no time


JOB = rent_job(batch=64)
FAST = 100  # Gbit/s, so that small fleets spend their time on training


def no_clock() -> float:
    """So that only the number of devices ends a search, and answers do not depend on the machine."""
    return 0.0


@functools.cache
def small(budget: float, **options: Any) -> RentResult:
    return rent(JOB, market(SMALL, spot=True, inter_gbit_per_s=FAST), budget, clock=no_clock, **options)


def assert_within(result: RentResult, offers: Market, budget: float) -> None:
    bought = result.counts()
    assert all(bought[name] <= offers.offer(name).available for name in bought)
    assert offers.price_per_hour(bought) <= budget + 1e-9
    assert result.best.price_per_hour == pytest.approx(offers.price_per_hour(bought))


def single_offer_tokens_per_s(job: JobSpec, offers: Market, budget: float) -> float:
    """The best that a plan makes of as many nodes of one offer as can be had and paid for."""
    best = 0.0
    for made in offers.offers:
        count = min(made.available, int(budget / made.price_per_hour + 1e-9))
        if count:
            try:
                found = plan(job, offers.snapshot({made.name: count}), time_limit_s=60)
            except NoPlanFits:
                continue
            assert found.plan.prediction is not None
            best = max(best, found.plan.prediction.tokens_per_s)
    return best


def test_a_fleet_within_budget_and_market_that_beats_any_single_offer() -> None:
    offers = market(SMALL, inter_gbit_per_s=FAST)
    result = rent(JOB, offers, 6, clock=no_clock)
    assert_within(result, offers, 6)
    assert result.best.plan.prediction is not None
    assert result.best.plan.prediction.tokens_per_s > 1.05 * single_offer_tokens_per_s(JOB, offers, 6)
    assert not result.truncated


def test_where_hosts_have_room_for_copies_or_for_what_else_a_plan_keeps_there_the_plan_goes_on() -> None:
    """Of hosts that would have room for a copy, were there no optimizer state: the fleet has none, and says so."""
    t4 = {"name": "t4", "device": "T4", "available": 2, "price_per_hour": 0.3, "host_memory_gib": 115, "spot": True}
    offers = parse_market({"offers": [{**t4, "inter_gbit_per_s": 5}]})
    best = rent(rent_job(layers=44, batch=8), offers, 1, clock=no_clock).best
    assert (best.counts, best.plan.copies, best.goodput.copies) == ((2,), 0, 0)
    why = "without copies, as hosts have no room for one copy beside what else the plan keeps there, "
    assert best.copies_reason.startswith(why)


def test_the_answer_is_a_plan_for_exactly_these_nodes() -> None:
    result = small(6)
    best = result.best
    assert {node.id for node in best.snapshot.nodes} == {ref.node for ref in best.plan.devices()}
    assert score(best.plan, JOB, best.snapshot) == best.plan
    assert best.goodput.copies == best.plan.copies
    assert result.counts() == {
        name: len([node for node in best.snapshot.nodes if node.id.rsplit("-", 1)[0] == name])
        for name in result.counts()
    }
    assert "tokens/s at" in result.reason and "interruptions an hour" in result.reason


def test_the_same_question_has_the_same_answer() -> None:
    again = rent(JOB, market(SMALL, spot=True, inter_gbit_per_s=FAST), 6, clock=no_clock)
    assert (again.fleet, again.best, again.reason, again.num_plans) == (
        small(6).fleet,
        small(6).best,
        small(6).reason,
        small(6).num_plans,
    )


@pytest.mark.long
def test_more_money_is_never_worse() -> None:
    speeds = [small(budget).best.tokens_per_s for budget in (1.2, 3, 6, 100)]
    assert speeds == sorted(speeds)


def test_for_cost_fewer_tokens_at_a_lower_price() -> None:
    fast, cheap = small(6), small(6, objective="cost")
    assert cheap.best.usd_per_million_tokens < fast.best.usd_per_million_tokens
    assert cheap.best.tokens_per_s < fast.best.tokens_per_s
    assert all(cheap.best.usd_per_million_tokens <= other.usd_per_million_tokens for _, other in cheap.alternatives)


def test_a_deadline_makes_the_cheapest_fleet_that_is_done_in_time() -> None:
    fast, cheap = small(6), small(6, objective="cost")
    deadline_h = (fast.best.hours + cheap.best.hours) / 2
    timely = small(6, objective="cost", deadline_h=deadline_h)
    assert timely.best.hours <= deadline_h < cheap.best.hours
    assert cheap.best.usd_per_million_tokens < timely.best.usd_per_million_tokens
    assert timely.best.usd_per_million_tokens <= fast.best.usd_per_million_tokens
    with pytest.raises(NoPlanFits, match=r"no fleet within 6 USD an hour is done in 0.1 hours; the fastest"):
        small(6, deadline_h=0.1)


def test_unsafe_nodes_are_worth_less() -> None:
    """Of two offers alike, the one that is lost less often."""
    names = {"calm": 0.001, "rough": 2.0}
    offers = parse_market(
        {
            "offers": [
                {**offer("A40", 4, spot=True, preemptions_per_hour=rate), "name": name} for name, rate in names.items()
            ]
        }
    )
    assert set(rent(JOB, offers, 2.2, clock=no_clock).counts()) == {"calm"}
    rates = {"calm": PreemptionRate(single_per_h=3.0), "rough": PreemptionRate(single_per_h=0.001)}
    assert set(rent(JOB, offers, 2.2, rates=rates, clock=no_clock).counts()) == {"rough"}


def test_a_fleet_that_survives_the_loss_of_a_type() -> None:
    unlike = parse_market({"offers": [offer("RTX4090", 8, spot=True), offer("A40", 2, spot=True, price_per_hour=1.2)]})
    plain = rent(JOB, unlike, 4.3, clock=no_clock)
    assert set(plain.counts()) == {"rtx4090"}
    safe = rent(JOB, unlike, 4.3, survive=True, clock=no_clock)
    assert safe.counts()["a40"] >= 1 and safe.counts()["rtx4090"] >= 2
    with pytest.raises(NoPlanFits, match="after the loss of any one type of spot nodes"):
        rent(JOB, market((8, 0, 0, 0, 0, 0), spot=True), 4.3, survive=True, clock=no_clock)
    anchored = parse_market({"offers": [offer("RTX4090", 6, spot=True), {**offer("RTX4090", 2), "name": "steady"}]})
    assert rent(JOB, anchored, 4.3, survive=True, clock=no_clock).counts()["steady"] >= 1


def fits(job: JobSpec, offers: Market, counts: dict[str, int]) -> bool:
    try:
        plan(job, offers.snapshot(counts))
    except NoPlanFits:
        return False
    return True


def test_a_model_that_takes_nodes_of_several_kinds() -> None:
    """No offer alone holds it; together they do."""
    offers = market((1, 1, 0, 0, 0, 0), spot=True, host_memory_gib=1024)
    sizes = (rent_job(layers=layers, batch=8) for layers in range(24, 400, 8))
    job = next(job for job in sizes if not any(fits(job, offers, {name: 1}) for name in ("a40", "rtx4090")))
    assert rent(job, offers, 5, clock=no_clock).counts() == {"a40": 1, "rtx4090": 1}


def test_a_model_that_takes_an_odd_number_of_nodes() -> None:
    offers = market((7, 0, 0, 0, 0, 0), spot=True, host_memory_gib=1024)
    sizes = (rent_job(layers=layers, batch=8) for layers in range(24, 400, 8))
    job = next(job for job in sizes if not fits(job, offers, {"rtx4090": 2}))
    found = rent(job, offers, 5, objective="cost", clock=no_clock)
    assert found.counts()["rtx4090"] >= 3
    assert 3 in {other.counts[-1] for other in (found.best, *(other for _, other in found.alternatives))}


def test_a_node_that_only_keeps_copies_is_rented_too() -> None:
    """The network is too slow to train over, and the job asks for a copy of its state on another node."""
    offers = market((0, 2, 0, 0, 0, 0), inter_gbit_per_s=0.01)
    result = rent(rent_job(batch=8, copies=1), offers, 2, clock=no_clock)
    assert result.counts() == {"a40": 2}
    assert len({ref.node for ref in result.best.plan.devices()}) == 1
    assert rent(rent_job(batch=8, copies=0), offers, 2, clock=no_clock).counts() == {"a40": 1}


def test_a_budget_that_buys_nothing_names_the_cheapest_offer() -> None:
    with pytest.raises(InvalidField) as caught:
        rent(JOB, market(SMALL), 0.4)
    assert str(caught.value) == "budget = 0.4: buys nothing: the cheapest offer, rtx4090, costs 0.53 an hour"
    with pytest.raises(InvalidField, match=r"budget = -3: must be more than zero"):
        rent(JOB, market(SMALL), -3)
    with pytest.raises(InvalidField, match="none is available"):
        rent(JOB, market((0,) * 6), 10)


def test_a_budget_that_buys_too_little_says_what_is_lacking() -> None:
    with pytest.raises(
        NoPlanFits, match=r"no fleet within 0.53 USD an hour fits the job; .* 1 x rtx4090: needs .* on rtx4090-0"
    ):
        rent(rent_job(layers=72), market(SMALL), 0.53)


@pytest.mark.long
def test_a_market_on_which_nothing_gets_done_says_so() -> None:
    offers = market(SMALL, spot=True, preemptions_per_hour=3000)
    with pytest.raises(NoPlanFits, match=r"loses nearly all that it does: .* is interrupted .* times an hour"):
        rent(JOB, offers, 6, clock=no_clock)


def test_only_allowed_devices_are_rented() -> None:
    limited = dataclasses.replace(JOB, limits=dataclasses.replace(JOB.limits, device_types=("L40",)))
    assert set(rent(limited, market(SMALL), 6, clock=no_clock).counts()) == {"l40"}
    with pytest.raises(InvalidField, match=r"limits\.device_types"):
        rent(limited, market((4, 4, 0, 0, 0, 0)), 6)


def test_limits_of_the_job_hold_for_the_fleet_and_not_for_its_parts() -> None:
    job = rent_job(batch=64, copies=2)
    many = dataclasses.replace(job, limits=dataclasses.replace(job.limits, min_devices=4))
    result = rent(many, market(SMALL, spot=True), 4, objective="cost", clock=no_clock)
    assert sum(result.counts().values()) >= 4
    assert result.best.plan.copies == 2
    with pytest.raises(NoPlanFits, match=r"limits\.min_devices is 4"):
        rent(many, market(SMALL, spot=True), 1.7, clock=no_clock)


@pytest.mark.long
def test_a_market_of_many_large_nodes_is_no_matter_of_minutes() -> None:
    """As many devices are planned for as for any other market: large fleets are few, and one at least is appraised."""
    offers = parse_market(
        {
            "offers": [
                offer(device, 60, devices=8, price_per_hour=8 * price, host_memory_gib=2048, inter_gbit_per_s=FAST)
                for device, price in PRICES.items()
            ]
        }
    )
    result = rent(rent_job(), offers, 300, clock=no_clock)
    assert_within(result, offers, 300)
    assert result.num_plans < 60


def test_a_clock_that_runs_out_cuts_the_search_short_and_says_so() -> None:
    ticks = iter(range(10**6))
    result = rent(
        JOB, market(SMALL, spot=True, inter_gbit_per_s=FAST), 6, time_limit_s=3, clock=lambda: float(next(ticks))
    )
    assert result.truncated
    assert_within(result, market(SMALL), 6)


def test_the_answer_is_plain_json() -> None:
    result, offers = small(6), market(SMALL, spot=True, inter_gbit_per_s=FAST)
    answer = rent_answer(result, offers, budget_per_hour=6, seed=0)
    assert {entry["offer"]: entry["count"] for entry in answer["fleet"]} == result.counts()
    assert answer["price_per_hour"] <= 6 and answer["usd"] == pytest.approx(answer["hours"] * answer["price_per_hour"])
    assert answer["plan"]["predicted"]["step_s"] > 0
    assert answer["goodput"]["copies"] == answer["plan"]["copies"]
    assert answer["alternatives"] and answer["truncated"] is False


@pytest.mark.long
def test_when_the_market_changes_what_survives_is_kept() -> None:
    """A scripted provider: some of the nodes held are taken away, and another offer has become cheaper."""
    before, held = market(SMALL, spot=True, inter_gbit_per_s=FAST), small(6).counts()
    lost = {name: max(0, count - 1) for name, count in held.items()}
    after = parse_market(
        {
            "offers": [
                {
                    **offer(made.node.device, lost.get(made.name, made.available), spot=True),
                    "price_per_hour": made.price_per_hour * (0.98 if made.name == "l40" else 1),
                }
                for made in before.offers
            ]
        }
    )
    fresh = rent(JOB, after, 6, clock=no_clock)
    again = rent(JOB, after, 6, previous=held, clock=no_clock)
    assert_within(again, after, 6)
    assert again.held == sum(lost.values())
    assert again.kept >= sum(min(fresh.counts().get(name, 0), count) for name, count in lost.items())
    assert again.best.tokens_per_s >= 0.98 * fresh.best.tokens_per_s


def test_of_fleets_that_are_nearly_as_good_the_one_that_is_there_already() -> None:
    """Twins at the same price: without the past the first is taken, with it the one that is held."""
    offers = parse_market({"offers": [{**offer("A40", 3), "name": name} for name in ("one", "two")]})
    held = {"two": 2}
    assert rent(JOB, offers, 1.1, previous=held, clock=no_clock).counts() == held
    kept = rent(JOB, offers, 1.65, previous={"one": 1, "two": 1}, clock=no_clock)
    assert kept.kept == kept.held == 2


def test_what_is_held_is_given_up_where_that_pays() -> None:
    offers = market((0, 4, 0, 0, 0, 1), spot=True, inter_gbit_per_s=FAST)
    result = rent(JOB, offers, 3.1, previous={"a40": 1}, clock=no_clock)
    assert "h100-80g" in result.counts() or result.counts()["a40"] > 1
    assert result.best.tokens_per_s > 1.5 * rent(JOB, offers, 0.56, clock=no_clock).best.tokens_per_s


@pytest.mark.long
def test_four_markets_and_three_budgets() -> None:
    """Never over budget or market, never worse than the best single offer, better in at least half of the cases."""
    better = 0
    for available in AVAILABLE:
        offers = market(available, spot=False)
        for budget in (15, 30, 60):
            result = rent(rent_job(), offers, budget)
            assert_within(result, offers, budget)
            assert result.best.plan.prediction is not None
            mixed = result.best.plan.prediction.tokens_per_s
            single = single_offer_tokens_per_s(rent_job(), offers, budget)
            assert mixed >= single * (1 - 1e-9), (available, budget)
            assert not result.truncated and result.num_plans < 60
            better += mixed > single * 1.001
    assert better >= 6
    assert len(PRICES) == 6
