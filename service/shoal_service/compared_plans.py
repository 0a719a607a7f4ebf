"""What the search weighs for the nodes of a job: seconds, dollars, and what binds each plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.costs import CostModel
from shoal_planner.explanation import explanation
from shoal_planner.job import JobSpec
from shoal_planner.profile import profile_from_mapping
from shoal_planner.search import PlanResult
from shoal_service.timeline import duration

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """`behind`: by which share a step takes longer than that of the first. None where some node has no price, as the
    job has all of them whether a plan uses them or not."""

    words: str
    step: str
    behind: float
    usd_per_million_tokens: float | None
    binds: str


def compared_plans(
    found: PlanResult, job: JobSpec, snapshot: Mapping[str, Any], profile: Mapping[str, Any]
) -> tuple[ComparedPlan, ...]:
    """Best first. May take a second. Raises InvalidField."""
    costs = CostModel(job, snapshot_from_mapping(dict(snapshot)), profile_from_mapping(dict(profile)))
    best_s = found.candidates[0][1] if found.candidates else 1.0
    usd_per_s = _usd_per_s(snapshot["nodes"])
    bound = [explanation(plan, costs).binding.sentences for plan in found.finalists]
    return tuple(
        ComparedPlan(
            words=words,
            step=duration(seconds),
            behind=seconds / best_s - 1,
            usd_per_million_tokens=None if usd_per_s is None else usd_per_s * seconds / job.train.tokens_per_step * 1e6,
            binds=sentences[0] if sentences else "",
        )
        for (words, seconds), sentences in zip(found.candidates, bound, strict=True)
    )


def _usd_per_s(nodes: Iterable[Mapping[str, Any]]) -> float | None:
    prices = [float(node.get("price_per_hour") or 0.0) for node in nodes]
    return sum(prices) / _HOUR_S if prices and all(price > 0 for price in prices) else None
