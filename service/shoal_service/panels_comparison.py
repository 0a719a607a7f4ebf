"""What a job has cost beside what it would have cost on nodes that are all alike and on demand. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service import jobs
from shoal_service.models import JobRow
from shoal_service.models_comparison import ComparisonRow
from shoal_service.shapes_history import OnDemandPlan
from shoal_service.spending import Spending


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Spending):
    """`on_demand_plan` is null until somebody has looked, and where no price of such nodes is stated."""

    on_demand_plan: OnDemandPlan | None


def on_demand_plan(kept: ComparisonRow | None, spent: Spending, row: JobRow) -> OnDemandPlan | None:
    """For the tokens of the steps that count. Predictions that are off for the job's own plan are taken to be as much
    off for these nodes."""
    if kept is None or kept.found is None:
        return None
    found = kept.found
    times = 1.0
    if kept.plan_seq == row.plan_seq and row.tokens_per_s:
        times = found["wanted_tokens_per_s"] / row.tokens_per_s
    per_million = found["usd_per_million_tokens"] * times
    usd = per_million * jobs.num_tokens(row) / 1e6
    known = spent.usd is not None and not spent.unpriced_node_hours
    return {
        "device": found["device"],
        "devices": found["devices"],
        "num_nodes": found["num_nodes"],
        "price_per_hour": found["price_per_hour"],
        "price_source": found["price_source"],
        "usd_per_hour": found["usd_per_hour"],
        "step_s": found["step_s"],
        "tokens_per_s": found["tokens_per_s"],
        "wanted_tokens_per_s": found["wanted_tokens_per_s"],
        "as_fast": found["as_fast"],
        "measured_by_predicted": times,
        "usd_per_million_tokens": per_million,
        "usd": usd,
        "saved_usd": usd - (spent.usd or 0.0) if known else None,
        "compared_at": jobs.rfc3339(kept.at_s),
    }
