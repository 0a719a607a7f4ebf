"""Which nodes to rent for a job: under a budget, what is available and perhaps a deadline, for speed or for price.

Owns the choice and its reasons. Templates (`rent_templates`) are put together by an exact programme (`knapsack`), which
proposes fleets; each is then planned for as a whole and appraised by its expected goodput (`appraise`), and the best is
improved by exchanging nodes. So what is promised of the answer comes from its own plan, never from the sum of parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal_planner.appraise import Appraisal, Appraiser, Counts
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.goodput import DEFAULT_FIGURES, RecoveryFigures
from shoal_planner.job import JobSpec
from shoal_planner.market import Market
from shoal_planner.preemption import PreemptionRate
from shoal_planner.profile import Profile
from shoal_planner.ranges import check_range
from shoal_planner.rent_search import Wish, improve, propose, survives
from shoal_planner.rent_templates import Offered, cheapest_single, find_templates

Objective = Literal["throughput", "cost"]
# Devices planned for while fleets are compared: what makes an answer a matter of seconds, and the same on any machine.
MOST_DEVICES = 900
TIME_LIMIT_S = 60.0
# A fleet that keeps more of the nodes already rented may be this much worse: changing them costs a pause each.
KEEP_SHARE = 0.02
ALTERNATIVES = 5
# A fleet that keeps less of the steps that it makes than this does not train.
LEAST_SHARE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """So many nodes of an offer."""

    offer: str
    count: int
    price_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RentResult:
    """`alternatives` are the next best fleets, best first. `kept` of the nodes that had been rented before are in the
    answer, of `held` that are still to be had."""

    fleet: tuple[Rented, ...]
    best: Appraisal
    alternatives: tuple[tuple[tuple[Rented, ...], Appraisal], ...]
    reason: str
    num_plans: int
    search_s: float
    truncated: bool
    held: int = 0
    kept: int = 0

    def counts(self) -> dict[str, int]:
        return {entry.offer: entry.count for entry in self.fleet}


def rent(
    job: JobSpec,
    market: Market,
    budget_per_hour: float,
    *,
    objective: Objective = "throughput",
    deadline_h: float | None = None,
    survive: bool = False,
    previous: Mapping[str, int] | None = None,
    rates: Mapping[str, PreemptionRate] | None = None,
    done_steps: int = 0,
    profile: Profile | None = None,
    figures: RecoveryFigures = DEFAULT_FIGURES,
    seed: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> RentResult:
    """The fleet with the highest expected goodput, or the lowest price per token, among those found.

    `survive`: only fleets that hold a node that is not spot, or still fit the job without the spot nodes of any one
    device type. `rates` (by offer) go before what the market says of preemptions. `previous` is what is rented already,
    by offer: what can still be had of it is kept unless that is more than 2 % worse than the best fleet found. After
    `done_steps` of the job, hours and dollars are those of the rest. The same arguments give the same answer unless the
    time limit cut the search short between two fleets (`truncated`).

    Raises InvalidField if nothing can be bought, and NoPlanFits if no fleet found fits the job, gets anything done, or
    is done in time.
    """
    started_s = clock()
    check_range("budget", budget_per_hour, 1e-9, 1e9)
    if deadline_h is not None:
        check_range("deadline", deadline_h, 1e-9, 1e9)
    if not 0 <= done_steps < job.train.steps:
        raise InvalidField("done", done_steps, f"must be fewer steps than the job has ({job.train.steps:,}), or none")
    most = _affordable(job, market, budget_per_hour)

    def fresh() -> Appraiser:
        return Appraiser(
            job,
            market,
            profile=profile or Profile(),
            rates=rates or {},
            figures=figures,
            seed=seed,
            most_devices=MOST_DEVICES,
            done_steps=done_steps,
            time_limit_s=time_limit_s,
            clock=clock,
        )

    appraiser = fresh()
    held = tuple(min((previous or {}).get(offer.name, 0), offer.available) for offer in market.offers)
    wish = Wish(
        budget_per_hour=budget_per_hour,
        most=most,
        objective=objective,
        deadline_h=deadline_h,
        survive=survive,
        held=tuple(map(min, held, most)),
    )
    offered = find_templates(appraiser, most)
    for counts in propose(appraiser, offered, wish):
        appraiser.appraise(counts)
    improve(appraiser, offered, wish)
    if not appraiser.appraised():
        raise NoPlanFits(_too_little(appraiser, fresh(), wish))
    ranked = _ranked(appraiser, offered, wish)
    best = _kept_most(ranked, wish)
    return RentResult(
        fleet=_fleet(market, best.counts),
        best=best,
        alternatives=tuple((_fleet(market, other.counts), other) for other in ranked if other is not best)[
            :ALTERNATIVES
        ],
        reason=_reason(best, ranked, market, wish),
        num_plans=appraiser.num_plans,
        search_s=clock() - started_s,
        truncated=appraiser.truncated,
        held=sum(held),
        kept=sum(map(min, best.counts, held)),
    )


def _affordable(job: JobSpec, market: Market, budget_per_hour: float) -> Counts:
    """How many nodes of each offer can be had, if nothing else is. Raises InvalidField if that is none."""
    allowed = [
        offer
        for offer in market.offers
        if offer.available and (not job.limits.device_types or offer.node.device in job.limits.device_types)
    ]
    if not allowed:
        problem = "none is available"
        if job.limits.device_types:
            problem = f"none that limits.device_types ({', '.join(job.limits.device_types)}) allows is available"
        raise InvalidField("offers", [offer.name for offer in market.offers], problem)
    cheapest = min(allowed, key=lambda offer: (offer.price_per_hour, offer.name))
    if cheapest.price_per_hour > budget_per_hour * (1 + 1e-12):
        problem = f"buys nothing: the cheapest offer, {cheapest.name}, costs {cheapest.price_per_hour:g} an hour"
        raise InvalidField("budget", budget_per_hour, problem)
    return tuple(
        min(offer.available, int(budget_per_hour / offer.price_per_hour + 1e-9)) if offer in allowed else 0
        for offer in market.offers
    )


def _too_little(appraiser: Appraiser, beyond: Appraiser, wish: Wish) -> str:
    """Why no fleet fits, and for how much money one would: `beyond` has all its questions left."""
    counts, problem = appraiser.refusal
    market, allowed = appraiser.market, appraiser.job.limits.device_types
    text = (
        f"no fleet within {wish.budget_per_hour:g} USD an hour fits the job; "
        f"not even {describe(_fleet(market, counts))}: {problem}"
    )
    there = tuple(0 if allowed and offer.node.device not in allowed else offer.available for offer in market.offers)
    cheapest = cheapest_single(beyond, there)
    if cheapest is None:
        return f"{text}; nor does any fleet of a single offer that was tried, whatever it costs"
    price = market.price_per_hour({entry.offer: entry.count for entry in _fleet(market, cheapest)})
    fleet = describe(_fleet(market, cheapest))
    return f"{text}; the cheapest fleet of a single offer that fits, {fleet}, costs {price:.4g} USD an hour"


def _ranked(appraiser: Appraiser, offered: Offered, wish: Wish) -> list[Appraisal]:
    """Best first, each fleet once. Raises NoPlanFits, saying what stands in the way."""
    found = {appraisal.counts: appraisal for appraisal in appraiser.appraised()}
    budget = f"{wish.budget_per_hour:g} USD an hour"
    safe = [appraisal for appraisal in found.values() if not wish.survive or survives(appraiser, offered, appraisal)]
    if not safe:
        raise NoPlanFits(
            f"no fleet within {budget} fits the job after the loss of any one type of spot nodes, or has a node that "
            "is not spot"
        )
    ranked = sorted(safe, key=lambda appraisal: (*wish.order(appraisal), appraisal.counts))
    steps_per_s = ranked[0].tokens_per_s / appraiser.job.train.tokens_per_step
    if steps_per_s * ranked[0].goodput.step_s < LEAST_SHARE:
        raise NoPlanFits(
            f"every fleet found within {budget} loses nearly all that it does: "
            f"{describe(_fleet(appraiser.market, ranked[0].counts))} is interrupted "
            f"{ranked[0].goodput.interruptions_per_h:.3g} times an hour, at {ranked[0].goodput.step_s:.3g} s a step; "
            "checkpoints at shorter intervals, or hosts with memory for copies, may help"
        )
    if not wish.in_time(ranked[0]):
        fastest = min(safe, key=lambda appraisal: appraisal.hours)
        raise NoPlanFits(
            f"no fleet within {budget} is done in {wish.deadline_h:g} hours; the fastest found takes "
            f"{fastest.hours:.3g}: {describe(_fleet(appraiser.market, fastest.counts))}"
        )
    return ranked


def _kept_most(ranked: list[Appraisal], wish: Wish) -> Appraisal:
    limit = wish.loss(ranked[0]) * (1 + KEEP_SHARE)
    near = [appraisal for appraisal in ranked if wish.in_time(appraisal) and wish.loss(appraisal) <= limit]
    return max(near, key=lambda appraisal: sum(map(min, appraisal.counts, wish.held)))  # of equals the first


def _fleet(market: Market, counts: Counts) -> tuple[Rented, ...]:
    return tuple(
        Rented(offer=offer.name, count=count, price_per_hour=offer.price_per_hour)
        for offer, count in zip(market.offers, counts, strict=True)
        if count
    )


def _reason(best: Appraisal, ranked: list[Appraisal], market: Market, wish: Wish) -> str:
    parts = [
        f"{describe(_fleet(market, best.counts))} for {best.price_per_hour:.4g} USD an hour "
        f"{_worth(best)}; {best.copies_reason}"
    ]
    single = next((other for other in ranked if sum(map(bool, other.counts)) == 1), None)
    if single is best:
        parts.append("no mix of offers that was tried is better")
    elif single is not None:
        parts.append(f"the best of a single offer, {describe(_fleet(market, single.counts))}, {_worth(single)}")
    if best is not ranked[0]:
        worse = wish.loss(best) / wish.loss(ranked[0]) - 1
        parts.append(f"it keeps nodes that are rented already and is {worse:.1%} from the best fleet found")
    return "; ".join(parts) + "."


def _worth(appraisal: Appraisal) -> str:
    price = appraisal.usd_per_million_tokens
    return f"trains {appraisal.tokens_per_s:,.0f} tokens/s at {price:.3g} USD per million tokens"


def describe(fleet: tuple[Rented, ...]) -> str:
    """ "8 x a40 + 2 x t4" """
    return " + ".join(f"{entry.count} x {entry.offer}" for entry in fleet)
