"""Which of its limits a job is predicted to reach before it is done, told before anything is spent. Pure.

Predictions know of no losses and of no waiting, so a job that is told nothing may still reach them.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal_planner.limits import CostLimits, deadline_at_s, duration_s
from shoal_service.jobs import rfc3339
from shoal_service.shapes_jobs import Expected, Foretold
from shoal_service.timeline import duration

_HOUR_S = 3600.0


def foretold(limits: CostLimits, expected: Expected, now_s: float) -> list[Foretold]:
    """Of a job that would begin now. Codes: `budget_short`, `deadline_too_soon`, `max_duration_too_short`."""
    return list(_found(limits, expected, now_s))


def _found(limits: CostLimits, expected: Expected, now_s: float) -> Iterator[Foretold]:
    usd, budget_usd, takes_s = expected["usd"], limits.budget_usd, expected["hours"] * _HOUR_S
    if budget_usd is not None and usd is not None and usd > budget_usd:
        least = "at least " if expected["unpriced_nodes"] else "about "
        reason = (
            f"all steps cost {least}{usd:.2f} USD, {usd - budget_usd:.2f} USD more than "
            f"limits.budget_usd = {budget_usd:.2f}: {_rests(expected, budget_usd / usd)}"
        )
        yield {"code": "budget_short", "param": "limits.budget_usd", "reason": reason}
    if limits.deadline is not None and (left_s := deadline_at_s(limits.deadline) - now_s) < takes_s:
        reason = (
            f"all steps take about {duration(takes_s)}, until {rfc3339(now_s + takes_s)} if it begins now, "
            f"{duration(takes_s - left_s)} after limits.deadline = {limits.deadline}: "
            f"{_rests(expected, max(0.0, left_s) / takes_s)}"
        )
        yield {"code": "deadline_too_soon", "param": "limits.deadline", "reason": reason}
    if limits.max_duration is not None and (most_s := duration_s(limits.max_duration)) < takes_s:
        reason = (
            f"all steps take about {duration(takes_s)}, {duration(takes_s - most_s)} longer than "
            f"limits.max_duration = {limits.max_duration}: {_rests(expected, most_s / takes_s)}"
        )
        yield {"code": "max_duration_too_short", "param": "limits.max_duration", "reason": reason}


def _rests(expected: Expected, share: float) -> str:
    steps = expected["steps"]
    return f"it would rest after about {int(steps * share)} of {steps} steps"
