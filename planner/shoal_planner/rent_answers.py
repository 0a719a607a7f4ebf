"""The published answer to "which nodes shall I rent?": plain JSON values."""

from __future__ import annotations

import dataclasses
from typing import Any

from shoal_planner.appraise import Appraisal
from shoal_planner.market import Market
from shoal_planner.plan import plan_to_mapping
from shoal_planner.rent import Rented, RentResult


def rent_answer(result: RentResult, market: Market, *, budget_per_hour: float, seed: int) -> dict[str, Any]:
    """`fleet` says what to rent, `plan` what runs on it. `tokens_per_s` and `hours` are expected with preemptions;
    `plan.predicted` is without any. `rates` say how often nodes of each offer are lost, and who says so. `alternatives`
    are best first."""
    return {
        "fleet": [_entry(entry, market) for entry in result.fleet],
        "budget_per_hour": budget_per_hour,
        **_figures(result.best),
        "reason": result.reason,
        "goodput": dataclasses.asdict(result.best.goodput),
        "rates": [dataclasses.asdict(rate) for rate in result.best.rates],
        "plan": plan_to_mapping(result.best.plan),
        "alternatives": [
            {"fleet": {entry.offer: entry.count for entry in fleet}, **_figures(appraisal)}
            for fleet, appraisal in result.alternatives
        ],
        "held": result.held,
        "kept": result.kept,
        "seed": seed,
        "num_plans": result.num_plans,
        "search_s": result.search_s,
        "truncated": result.truncated,
    }


def _entry(entry: Rented, market: Market) -> dict[str, Any]:
    node = market.offer(entry.offer).node
    return {
        "offer": entry.offer,
        "count": entry.count,
        "device": node.device,
        "devices": node.devices,
        "zone": node.zone,
        "spot": node.spot,
        "price_per_hour": entry.price_per_hour,
    }


def _figures(appraisal: Appraisal) -> dict[str, Any]:
    """None where a fleet is expected to get nothing done."""
    done = appraisal.tokens_per_s > 0
    return {
        "price_per_hour": appraisal.price_per_hour,
        "tokens_per_s": appraisal.tokens_per_s,
        "usd_per_million_tokens": appraisal.usd_per_million_tokens if done else None,
        "hours": appraisal.hours if done else None,
        "usd": appraisal.price_per_hour * appraisal.hours if done else None,
    }
