"""The published answer to "which plan?": the plan itself, and what the search has to say of it."""

from __future__ import annotations

from typing import Any

from shoal_planner.plan import plan_to_mapping
from shoal_planner.search import PlanResult


def plan_answer(result: PlanResult, *, seed: int) -> dict[str, Any]:
    """Plain JSON values; `parse_plan` reads them back as the same plan. `candidates` are best first."""
    return {
        **plan_to_mapping(result.plan),
        "seed": seed,
        "search_s": result.search_s,
        "truncated": result.truncated,
        "candidates": [{"plan": text, "step_s": step_s} for text, step_s in result.candidates],
    }
