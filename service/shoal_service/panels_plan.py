"""What is shown of a job's plans: the map of one of them with what changed from the one before, why it is as it is, and
what the loss of nodes would cost. From plain values to plain values; drawing is the templates'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal_planner.errors import InvalidField
from shoal_recovery.journal import AT_REST, JobState
from shoal_service import jobs, views
from shoal_service.models import JobRow
from shoal_service.plan_changes import plan_change
from shoal_service.plan_map import NOBODY, plan_map
from shoal_service.plan_reasons import checked, reasons
from shoal_service.survival import survival
from shoal_service.timeline import Event, num_bytes


def plan_panel(
    spec: Mapping[str, Any],
    plans: Sequence[Event],
    recoveries: Sequence[Event],
    epoch: int | None,
    profile: Mapping[str, Any],
    held_s: Mapping[str, float] = NOBODY,
) -> dict[str, Any]:
    """Of the newest plan, or the newest of `epoch`. `plan` is None where there is none. `held_s`: by node, for how long
    the job has had it."""
    index = next((i for i in reversed(range(len(plans))) if epoch in (None, plans[i].payload["epoch"])), len(plans) - 1)
    if index < 0:
        return {"plan": None}
    entry = plans[index]
    payload = entry.payload
    why = reasons(spec, payload, profile)
    try:
        held_s = held_s if index == len(plans) - 1 else NOBODY  # of a plan that is over it tells nothing
        drawn = plan_map(payload["plan"], payload["snapshot"], why.stage_s if why else None, held_s)
        problem = None
    except InvalidField as error:
        drawn, problem = None, str(error)
    return {
        "plan": {
            "epoch": payload["epoch"],
            "plan_id": payload["plan_id"],
            "step": payload["step"],
            "reason": payload["reason"],
            "why": payload["plan"].get("reason", ""),
            "since": jobs.rfc3339(entry.at_s),
            "map": drawn,
            "problem": problem,
            "predicted": views.predicted_view(payload["plan"].get("predicted")),
            "current": index == len(plans) - 1,
            "number": index + 1,
            "count": len(plans),
            "epochs": [other.payload["epoch"] for other in plans],
            "change": _change(plans, index),
            "moved": _moved(recoveries, payload["epoch"]),
        }
    }


def _change(plans: Sequence[Event], index: int) -> dict[str, Any] | None:
    if index == 0:
        return None
    before = plans[index - 1].payload
    try:
        return {"from": before["epoch"], "found": plan_change(before["plan"], plans[index].payload["plan"])}
    except InvalidField:
        return None


def _moved(recoveries: Sequence[Event], epoch: int) -> list[tuple[str, str]] | None:
    """Bytes by source that the change to this epoch took; None where no recovery led to it."""
    found = [event for event in recoveries if event.payload["epoch"] == epoch]
    if not found:
        return None
    counts = found[-1].payload["num_bytes"]
    return [(source, num_bytes(counts.get(source, 0))) for source in ("own", "node", "peer", "store")]


def why_panel(spec: Mapping[str, Any], events: Sequence[Event], profile: Mapping[str, Any]) -> dict[str, Any]:
    plans = [event for event in events if event.kind == "plan_adopted"]
    if not plans:
        return {"why": None}
    payload = plans[-1].payload
    return {
        "why": {
            "reason": payload["plan"].get("reason") or payload["reason"],
            "epoch": payload["epoch"],
            "found": reasons(spec, payload, profile),
            "checked": checked(events)[:12],
        }
    }


def losses_panel(row: JobRow, adopted: Mapping[str, Any] | None, stored_step: int | None) -> dict[str, Any]:
    """`survival` and `losses` are None where the job has no nodes, or its plan is none that this version can read."""
    if adopted is None or JobState(row.state) in (*AT_REST, JobState.QUEUED):
        return {"losses": None, "survival": None}
    try:
        found = survival(row.spec, adopted)
        whole = sum(count for _, count in found.coverage) or 1
        return {
            "losses": views.losses_view(row, adopted, stored_step),
            "survival": found,
            "coverage": [(nodes, num_bytes(count), 100 * count / whole) for nodes, count in found.coverage],
        }
    except InvalidField:
        return {"losses": None, "survival": None}
