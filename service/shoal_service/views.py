"""What the pages show, gathered from the database as plain values; templates turn them into markup."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.errors import InvalidField
from shoal_recovery.journal import JobState
from shoal_service import clusters, jobs, journal, shares, timeline, trackers
from shoal_service.bulk_losses import losses_resource
from shoal_service.measured import measured_lines
from shoal_service.models import JobRow, JournalRow
from shoal_service.plan_map import plan_map
from shoal_service.script_views import script_sentence, script_view
from shoal_service.spending import Spending, spending_of
from shoal_service.timeline import Event, duration, num_bytes

MAX_EVENTS = 60
MAX_LOSSES = 20
_OTHER_KINDS = (
    *("checkpoint_committed", "checkpoint_failed", "figures_measured", "prediction_checked", "step_skipped"),
    *("model_seen", "share_changed", "share_taken"),
    *("evaluation_done", "store_failed", "store_recovered", "room_short"),
    *("script_started", "trainer_adjusted", "checkpoint_reported", "script_failed"),
)

_GLYPHS = {
    "queued": "\u25f7",
    "starting": "\u25d4",
    "running": "\u25b6",
    "draining": "\u21e3",
    "recovering": "\u21bb",
    "waiting": "\u29d7",
    "paused": "\u2016",
    "cancelling": "\u25cc",
    "succeeded": "\u2713",
    "failed": "\u2715",
    "cancelled": "\u2298",
}


def summary(row: JobRow) -> dict[str, Any]:
    """A job in a list and in the head of its page."""
    steps = jobs.num_steps(row)
    eta = jobs.eta_s(row)
    return {
        "id": row.id,
        "name": row.name,
        "state": row.state,
        "glyph": _GLYPHS[row.state],
        "code": row.state_code,
        "reason": row.reason,
        "since": jobs.rfc3339(row.since_at_s),
        "created": jobs.rfc3339(row.created_at_s),
        "step": row.step,
        "steps": steps,
        "percent": round(100 * row.step / steps, 1) if steps else 0.0,
        "script": jobs.is_script(row),
        "metric": row.spec.get("metric", "loss"),
        "loss": None if row.loss is None else f"{row.loss:.4f}",
        "evaluation": _evaluation(row),
        "tokens_per_s": None if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "step_s": None if row.step_s is None else duration(row.step_s),
        "eta": None if eta is None else duration(round(eta)),
        "epoch": row.epoch,
        "plan_id": row.plan_id,
        "recoveries": row.num_recoveries,
        "redone_steps": row.redone_steps,
        "lost_steps": row.lost_steps,
        "skipped_steps": row.skipped_steps,
        "store_problem": row.store_problem,
        "exchanges": _exchanges(row.exchanges),
        "cluster_id": row.cluster_id,
        "can_cancel": not jobs.ended(row) and row.wish != jobs.WISH_CANCELLED,
        "can_pause": not jobs.ended(row) and row.wish == jobs.WISH_RUN and jobs.has_store(row),
        "can_resume": not jobs.ended(row) and row.wish == jobs.WISH_PAUSED,
        "pausing": row.wish == jobs.WISH_PAUSED and row.state != JobState.PAUSED,
        "ended": jobs.ended(row),
        "version": row.version,
    }


def _evaluation(row: JobRow) -> dict[str, Any] | None:
    found = jobs.evaluation(row)
    if found is None:
        return None
    return {"step": found["step"], "loss": _figure(found["loss"]), "perplexity": _figure(found["perplexity"])}


_SENT = {"group": "within a device group", "node": "within a node", "zone": "between nodes", "world": "between zones"}
_EXCHANGED = {
    "stages": "activations between stages",
    "shards": "split weights and gradients",
    "gradients": "sums of gradients",
    "weights": "updated weights",
    "tensor": "tensor parallelism",
    "vote": "the vote",
}


def _exchanges(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    moved, waited = found["moved_bytes"], found["waited_s"]
    return {
        "step": found["step"],
        "share": f"{found['exposed_share']:.1%}",
        "most": f"{found['most_exposed_share']:.1%}",
        "sent": [(name, num_bytes(moved[link])) for link, name in _SENT.items() if moved.get(link)],
        "waited": [
            (name, duration(waited[kind]["mean"]), duration(waited[kind]["most"]))
            for kind, name in _EXCHANGED.items()
            if kind in waited
        ],
    }


def _figure(value: float | None) -> str:
    return "not a number" if value is None else f"{value:,.4f}" if value < 1000 else f"{value:,.0f}"


async def job_view(session: AsyncSession, job_id: str, epoch: int | None) -> dict[str, Any]:
    """All parts of a job's page. Raises NotFound."""
    row = await jobs.get(session, job_id)
    history = await journal.history(session, job_id)
    end_at_s = row.since_at_s if jobs.ended(row) else time.time()
    losses = await _losses_view(session, row)
    plans = [entry for entry in history if entry.kind == journal.PLAN_KIND]
    kinds = (*timeline.KINDS, *_OTHER_KINDS)
    return {
        "job": summary(row),
        "cost": _cost_view(spending_of(row, history)),
        "losses": losses,
        "cluster": await clusters.of_job(session, row),
        "share": shares.resource(await shares.of_job(session, job_id)),
        "trackers": await trackers.of_job(session, job_id),
        "plan": _plan_view(plans, epoch),
        "timeline": timeline.timeline(history, created_at_s=row.created_at_s, end_at_s=end_at_s) if history else None,
        "recoveries": timeline.recoveries(history, jobs.rfc3339),
        "bytes_total": _bytes_total(history),
        "script": await script_view(session, row) if jobs.is_script(row) else None,
        "events": [_event_line(entry) for entry in await journal.newest(session, job_id, MAX_EVENTS, kinds)],
    }


async def _losses_view(session: AsyncSession, row: JobRow) -> dict[str, Any] | None:
    """None where the job has no nodes, or its plan is none that this version can read."""
    adopted, stored_step = await journal.at_stake(session, row.id)
    try:
        found = await asyncio.to_thread(losses_resource, row, adopted, stored_step)
    except InvalidField:
        return None
    items = [
        {
            "domain": loss["domain"],
            "name": loss["name"],
            "nodes": len(loss["nodes"]),
            "bytes": num_bytes(loss["store_bytes"]) if loss["store_bytes"] else "nothing",
        }
        for loss in found["items"][:MAX_LOSSES]
    ]
    return {**found, "items": items, "total": num_bytes(found["state_bytes"])} if items else None


def _plan_view(plans: Sequence[Event], epoch: int | None) -> dict[str, Any] | None:
    chosen = [entry for entry in plans if epoch is None or entry.payload["epoch"] == epoch] or list(plans)
    if not chosen:
        return None
    entry = chosen[-1]
    payload = entry.payload
    try:
        drawn, problem = plan_map(payload["plan"], payload["snapshot"]), None
    except InvalidField as error:
        drawn, problem = None, str(error)
    return {
        "epoch": payload["epoch"],
        "plan_id": payload["plan_id"],
        "step": payload["step"],
        "reason": payload["reason"],
        "why": payload["plan"].get("reason", ""),
        "since": jobs.rfc3339(entry.at_s),
        "map": drawn,
        "problem": problem,
        "predicted": _predicted(payload["plan"].get("predicted")),
        "current": entry is plans[-1],
        "generations": [
            {"epoch": other.payload["epoch"], "plan_id": other.payload["plan_id"], "step": other.payload["step"]}
            for other in plans
        ],
    }


def _predicted(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    memory = (value.get("memory_bytes") or {}) | {
        f"{device}, host": count for device, count in (value.get("host_bytes") or {}).items()
    }
    return {
        "step": duration(value["step_s"]),
        "tokens_per_s": f"{value['tokens_per_s']:,.0f}",
        "terms": [(name.removesuffix("_s"), duration(seconds)) for name, seconds in value.get("terms", {}).items()],
        "memory": [(device, num_bytes(count)) for device, count in sorted(memory.items())],
    }


def _cost_view(found: Spending) -> dict[str, Any]:
    """`figures` are (name, amount, remark); none where no node has a price. Nothing unknown is shown as nothing."""
    now = sum(charge.num_nodes_now for charge in found.charges)
    of_nodes = f"for {now} node{'s' if now > 1 else ''}" if now else "no nodes"
    per_million = found.usd_per_million_tokens
    some_unknown, unknown_now = found.unpriced_node_hours > 0, found.unpriced_nodes_now > 0
    return {
        "figures": [
            ("Spent so far", _amount(found.usd, some_unknown), ""),
            ("Per hour now", _amount(found.usd_per_hour, unknown_now) if now else "-", of_nodes),
            (
                "Per million tokens",
                "-" if per_million is None else _amount(per_million, some_unknown),
                "over all steps so far",
            ),
        ]
        if found.usd is not None
        else [],
        "some_unknown": some_unknown,
        "unknown_hours": f"{found.unpriced_node_hours:,.3g}",
        "unknown_now": found.unpriced_nodes_now,
        "charges": [
            {
                "node": f"{charge.devices} x {charge.device}",
                "market": "spot" if charge.spot else "on demand",
                "now": charge.num_nodes_now,
                "ever": charge.num_nodes,
                "price": None if charge.price_per_hour is None else dollars(charge.price_per_hour),
                "hours": f"{charge.node_hours:,.3g}",
                "cost": None if charge.usd is None else dollars(charge.usd),
            }
            for charge in found.charges
        ],
    }


def _amount(usd: float | None, more_is_unknown: bool) -> str:
    return "unknown" if usd is None else f"{'at least ' if more_is_unknown else ''}{dollars(usd)}"


def dollars(usd: float) -> str:
    """For people: $0, $0.00021, $0.75, $41.20, $12,345."""
    if usd <= 0:
        return "$0"
    digits = 0 if usd >= 1000 else max(2, 1 - math.floor(math.log10(usd)))
    return f"${usd:,.{digits}f}"


def _bytes_total(history: Sequence[Event]) -> dict[str, str]:
    found = [entry.payload["num_bytes"] for entry in history if entry.kind == journal.RECOVERY_KIND]
    return {source: num_bytes(sum(each.get(source, 0) for each in found)) for source in timeline.SOURCES}


def _event_line(row: JournalRow) -> dict[str, Any]:
    return {"seq": row.seq, "at": jobs.rfc3339(row.at_s), "kind": row.kind.replace("_", " "), "text": _sentence(row)}


_CAME_OF = {
    "gone": "is gone, as announced",
    "withdrawn": "does not go away after all",
    "overdue": "is still there long after it was to go; it may be used again",
}


def _sentence(row: JournalRow) -> str:
    said = row.payload
    match row.kind:
        case "state_changed":
            return f"{said['state']}: {said['reason']}"
        case "plan_adopted":
            return f"plan {said['plan_id']} from step {said['step']} on, epoch {said['epoch']}: {said['reason']}"
        case "node_lost":
            return f"{said['node']}: {said['evidence']}, noticed after {duration(said['detect_s'])}"
        case "node_noticed":
            return f"{said['node']} is to go away in {duration(said['lead_s'])} ({said['source']}: {said['why']})"
        case "node_stays" | "node_slowed" | "node_recovered":
            return f"{said['node']}: {said['reason']}"
        case "notice_ended":
            return f"{said['node']} {_CAME_OF[said['outcome']]} ({said['source']})"
        case "share_changed":
            nodes = "all nodes" if said["nodes"] is None else ", ".join(said["nodes"]) or "no node"
            return f"may use {nodes}: {said['reason']}"
        case "share_taken":
            return "uses no other nodes any more"
        case "node_joined":
            return f"{said['node']}: {said['devices']} x {said['device']}"
        case "recovery_done":
            return f"{said['reason'].rstrip('.')}; steps again from {said['step']} after {duration(said['total_s'])}"
        case "checkpoint_committed":
            took = duration(said["duration_s"])
            return f"step {said['step']} stands in {said['uri']}: {num_bytes(said['num_bytes'])} in {took}"
        case "checkpoint_failed":
            return f"step {said['step']} was not stored in {said['uri']}: {said['problem']}"
        case "store_failed":
            return f"{said['uri']} does not take step {said['step']}: {said['problem']}; training goes on"
        case "store_recovered":
            return f"{said['uri']} works again after {duration(said['duration_s'])}: step {said['step']} stands there"
        case "room_short":
            where = "they lie on its disk" if said["on_disk"] else "nor has its disk: plans will keep less there"
            return f"{said['node']} has no room in memory for {num_bytes(said['num_bytes'])} of snapshots; {where}"
        case "evaluation_done":
            loss, took = float(said["loss"]), duration(said["duration_s"])
            return f"step {said['step']}: loss {loss:.4f} over {said['tokens']:,} held-out tokens; took {took}"
        case "step_skipped":
            return f"step {said['step']} is done without an update: {said['problem']}"
        case "figures_measured":
            return f"{'; '.join(measured_lines(said['profile']))}; took {duration(said['duration_s'])}"
        case "model_seen":
            module = said["model"]["module"]
            return f"{module['entrypoint']}: {module['shape']['layers']} blocks, {module['shape']['hidden']} wide"
        case "prediction_checked":
            times = said["measured_s"] / said["predicted_s"]
            predicted, measured = duration(said["predicted_s"]), duration(said["measured_s"])
            return f"a step of epoch {said['epoch']} takes {measured}; {predicted} were predicted ({times:.2f} times)"
        case other:
            return script_sentence(other, said) or other
