"""What pages show of rows of the database, as plain values; templates turn them into markup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_recovery.journal import JobState
from shoal_service import jobs
from shoal_service.bulk_losses import losses_resource
from shoal_service.measured import measured_lines
from shoal_service.models import JobRow, JournalRow
from shoal_service.script_views import script_sentence
from shoal_service.spending import Spending
from shoal_service.timeline import duration, num_bytes
from shoal_service.words import dollars

MAX_EVENTS = 50
MAX_LOSSES = 20

GLYPHS = {
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
        "project": row.project_id,
        "created_by": row.created_by,
        "state": row.state,
        "glyph": GLYPHS[row.state],
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
        "can_checkpoint": jobs.can_checkpoint(row),
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
    "safety": "until the state of the step before was safe (no exchange)",
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


def losses_view(row: JobRow, adopted: Mapping[str, Any], stored_step: int | None) -> dict[str, Any] | None:
    """None where the job has no nodes. Raises InvalidField."""
    found = losses_resource(row, adopted, stored_step)
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


def predicted_view(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    memory = (value.get("memory_bytes") or {}) | {
        f"{device}, host": count for device, count in (value.get("host_bytes") or {}).items()
    }
    return {
        "step": duration(value["step_s"]),
        "bubble": _bubble(value),
        "tokens_per_s": f"{value['tokens_per_s']:,.0f}",
        "terms": [(name.removesuffix("_s"), duration(seconds)) for name, seconds in value.get("terms", {}).items()],
        "memory": [(device, num_bytes(count)) for device, count in sorted(memory.items())],
    }


def _bubble(value: Mapping[str, Any]) -> str:
    """The share of a predicted step in which devices wait for other stages."""
    bubble_s = max(0.0, float(value.get("terms", {}).get("bubble_s", 0.0)))
    return f"{bubble_s / value['step_s']:.1%}" if value["step_s"] else ""


def cost_view(found: Spending) -> dict[str, Any]:
    """`figures` are (name, amount, remark); none where no node has a price. Nothing unknown is shown as nothing."""
    now = sum(charge.num_nodes_now for charge in found.charges)
    of_nodes = f"for {now} node{'s' if now > 1 else ''}" if now else "no nodes"
    per_million = found.usd_per_million_tokens
    some_unknown, unknown_now = found.unpriced_node_hours > 0, found.unpriced_nodes_now > 0
    return {
        "figures": [
            ("Spent so far", _amount(found.usd, some_unknown), ""),
            ("Per hour now", _amount(found.usd_per_hour, unknown_now) if now else "-", of_nodes),
            *(
                [("Of it beside plans", dollars(found.beside_plans_usd), "machines that started, waited or were idle")]
                if found.beside_plans_usd
                else []
            ),
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


def event_line(row: JournalRow) -> dict[str, Any]:
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
        case "checkpoint_asked":
            return f"step {said['step']} is to go to the store, as somebody asked"
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
        case "step_done":
            return f"step {said['step']}: loss {float(said['loss']):.4f}, took {duration(said['duration_s'])}"
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


def spent_in_short(found: Spending) -> dict[str, str]:
    """For the head of a page: `spent` and `per_hour`, in words where not everything is known."""
    now = sum(charge.num_nodes_now for charge in found.charges)
    return {
        "spent": "-" if not found.charges else _amount(found.usd, found.unpriced_node_hours > 0),
        "per_hour": _amount(found.usd_per_hour, found.unpriced_nodes_now > 0) if now else "-",
    }
