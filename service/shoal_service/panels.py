"""The parts of a job's page: which there are, what each is made of, and when it looks different. A part is drawn in the
page and, whenever something happened, alone again (`/jobs/ID/panels/NAME`)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import AT_REST, EvaluationDone, JobState
from shoal_service import (
    clusters,
    comparison,
    job_totals,
    jobs,
    journal,
    log_store,
    pools,
    rentals,
    shares,
    storages,
    timeline,
    trackers,
    views,
)
from shoal_service.checkpoint_facts import held_up_s, is_commit
from shoal_service.continuity import continuity
from shoal_service.goodput import goodput, num_devices
from shoal_service.job_history import KINDS, Histories, event_of, first_steps_s, newest_steps_at_s
from shoal_service.models import ClusterRow, JobRow
from shoal_service.panels_alerts import alerts_of, standing_of
from shoal_service.panels_checkpoints import KINDS as CHECKPOINT_KINDS
from shoal_service.panels_checkpoints import checkpoints
from shoal_service.panels_comparison import on_demand_plan
from shoal_service.panels_curves import marks
from shoal_service.panels_events import events_shown
from shoal_service.panels_goodput import WINDOWS, goodput_panel
from shoal_service.panels_limits import budget_of, limits_panel
from shoal_service.panels_logs import NEWEST, LogChoice, logs_panel
from shoal_service.panels_money import money, on_demand_prices
from shoal_service.panels_nodes import nodes_panel
from shoal_service.panels_plan import losses_panel, plan_panel, why_panel
from shoal_service.panels_prices import price_histories, price_sources
from shoal_service.panels_recovery import in_full, recoveries_panel
from shoal_service.panels_step import step_panel
from shoal_service.script_views import script_view
from shoal_service.seams import pairs_of, seams_of
from shoal_service.spending import Rented, Spending, spending_of
from shoal_service.step_sums import EpochSteps, StepSums, step_sums
from shoal_service.store_looks import StoreLook, StoreLooks
from shoal_service.timeline import Event
from shoal_service.utilisation import NodeUse, in_percent, mfu_per_rate, node_uses

_EVENT_KINDS = (
    *KINDS,
    *("checkpoint_committed", "checkpoint_failed", "figures_measured", "step_skipped", "model_seen"),
    *("checkpoint_asked", "share_changed", "share_taken"),
    *("evaluation_done", "store_failed", "store_recovered", "room_short"),
    *("script_started", "trainer_adjusted", "checkpoint_reported", "script_failed"),
)
_MOST_EVALUATIONS = 1000
_LARGE = 64  # devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a panel is made of. `now_s` is when the job ended, if it has; `epoch`, `window`, `log` and `step` are
    what the reader chose."""

    session: AsyncSession
    row: JobRow
    history: Sequence[Event]
    rented: Sequence[Rented]
    steps: StepSums
    stores: StoreLooks
    cluster: ClusterRow | None
    now_s: float
    epoch: int | None = None
    window: str = "all"
    log: LogChoice = NEWEST
    step: int | None = None

    @property
    def plans(self) -> Sequence[Event]:
        return [event for event in self.history if event.kind == journal.PLAN_KIND]

    @property
    def holds_nodes(self) -> bool:
        return JobState(self.row.state) not in (*AT_REST, JobState.QUEUED)

    def spending(self) -> Spending:
        return spending_of(self.row, self.history, self.rented)


View = dict[str, Any]


async def _head(look: Look) -> View:
    plan = look.plans[-1].payload if look.plans and look.holds_nodes else None
    limits = look.row.spec.get("limits") or {}
    spent = look.spending()
    share = await shares.of_job(look.session, look.row.id)
    stepped = await newest_steps_at_s(look.session, [look.row.id])
    cluster = await clusters.of_job(look.session, look.row)
    silence = None if cluster is None else cluster["problem"]
    odd = (await job_totals.odd_losses(look.session, [look.row.id])).get(look.row.id, "")
    standing = standing_of(
        look.row,
        share,
        is_script=jobs.is_script(look.row),
        stepped_at_s=stepped.get(look.row.id),
        silence=silence,
        odd_loss=odd,
    )
    rate = mfu_per_rate(look.plans).get(look.row.epoch)
    return {
        "cluster": cluster,
        "alerts": alerts_of(standing, look.now_s),
        "ended_seq": look.history[-1].seq if look.history and jobs.ended(look.row) else None,
        "mfu": None if rate is None or look.row.tokens_per_s is None else in_percent(rate * look.row.tokens_per_s),
        "max_devices": limits.get("max_devices"),
        "budget": budget_of(look.row.spec, spent),
        "share": shares.resource(share),
        "trackers": await trackers.of_job(look.session, look.row.id),
        "script": await script_view(look.session, look.row) if jobs.is_script(look.row) else None,
        "devices": None if plan is None else num_devices(plan["plan"]),
        "cluster_devices": None if plan is None else sum(node["devices"] for node in plan["snapshot"]["nodes"]),
        "min_devices": limits.get("min_devices", 1),
        "device_types": limits.get("device_types") or [],
        "spent": spent,
        "spent_parts": views.spent_in_short(spent),
    }


async def _curves(look: Look) -> View:
    stored = await journal.newest(look.session, look.row.id, 200, ("checkpoint_committed",))
    pairs, seams = await pairs_of(look.session, look.row.id), await seams_of(look.session, look.row.id, look.history)
    return {
        "marks": marks(look.history, [event_of(row) for row in reversed(stored)], jobs.rfc3339),
        "continuity": continuity(pairs, seams),
        "redone": look.row.redone_steps,
        "mfu_per_rate": mfu_per_rate(look.plans),
        "tokens_per_step": None if jobs.is_script(look.row) else _tokens_per_step(look.row),
    }


def _tokens_per_step(row: JobRow) -> int:
    return int(row.spec["train"]["global_batch"]) * int(row.spec["train"]["seq_len"])


async def _plan(look: Look) -> View:
    profile = {} if look.cluster is None else look.cluster.profile
    recoveries = [event for event in look.history if event.kind == journal.RECOVERY_KIND]
    spans = timeline.node_spans(look.history, look.now_s) if look.holds_nodes else {}
    held_s = {name: look.now_s - found[-1][0] for name, found in spans.items() if found[-1][2] is None}
    return await asyncio.to_thread(plan_panel, look.row.spec, look.plans, recoveries, look.epoch, profile, held_s)


async def _why(look: Look) -> View:
    profile = {} if look.cluster is None else look.cluster.profile
    return await asyncio.to_thread(why_panel, look.row.spec, look.history, profile)


async def _nodes(look: Look) -> View:
    heard_s = None if look.cluster is None else look.cluster.updated_at_s
    uses: Mapping[str, NodeUse] = {}
    if look.plans and look.holds_nodes:
        adopted, step_s = look.plans[-1].payload, look.row.step_s if look.row.state == JobState.RUNNING else None
        uses = await asyncio.to_thread(node_uses, look.row.spec, adopted, step_s)
    return {
        "uses": uses,
        "nodes": nodes_panel(look.history, look.now_s, heard=look.cluster.signs if look.cluster else None)
        if look.holds_nodes
        else None,
        "now_s": time.time(),
        "heard_at": None if heard_s is None else jobs.rfc3339(heard_s),
        "connected": look.cluster is not None and clusters.connected(look.cluster),
        "cluster_id": look.row.cluster_id,
    }


async def _timeline(look: Look) -> View:
    rented = await pools.words_of_job(look.session, look.row.id)
    if not look.history and not rented:
        return {"timeline": None}
    since_s = look.row.created_at_s
    return {"timeline": timeline.timeline(look.history, created_at_s=since_s, end_at_s=look.now_s, rented=rented)}


async def _recoveries(look: Look) -> View:
    found = [event for event in look.history if event.kind == journal.RECOVERY_KIND]
    first = await first_steps_s(look.session, look.row.id, in_full(found))
    stored = [event_of(row) for row in await journal.newest(look.session, look.row.id, 20, CHECKPOINT_KINDS[:1])]
    return recoveries_panel(found, stored, first, look.history) | {
        "has_logs": await log_store.get(look.session, look.row.id) is not None
    }


async def _losses(look: Look) -> View:
    _, stored_step = await journal.at_stake(look.session, look.row.id)
    adopted = look.plans[-1].payload if look.plans else None
    return await asyncio.to_thread(losses_panel, look.row, adopted, stored_step)


async def _steps(look: Look, since_s: float | None) -> Sequence[EpochSteps]:
    if since_s is None:
        return await look.steps.of(look.session, look.row.id)
    return await step_sums(look.session, look.row.id, since_s=since_s)


async def _goodput(look: Look) -> View:
    seconds = WINDOWS[look.window]
    since_s = None if seconds is None else look.now_s - seconds
    evaluated = await journal.newest(look.session, look.row.id, _MOST_EVALUATIONS, (EvaluationDone.kind,))
    found = goodput(
        look.history,
        await _steps(look, since_s),
        created_at_s=look.row.created_at_s,
        end_at_s=look.now_s,
        evaluation_s=sum(e.payload["duration_s"] for e in evaluated if since_s is None or e.at_s >= since_s),
        since_s=since_s,
    )
    return {"goodput": goodput_panel(found, look.window)}


async def _money(look: Look) -> View:
    spent = look.spending()
    every = await clusters.all_clusters(look.session)
    there = [node for row in every for node in row.snapshot["nodes"]]
    of_pools = await pools.every(look.session)
    to_be_had = [dataclasses.asdict(pools.node_of(row)) for row in of_pools]
    named = {
        node: f"pool {row.name}: {pools.price_resource(row)['source']}"
        for row in of_pools
        for node in row.about["nodes"]
    }
    found = money(
        look.history,
        spent,
        await look.steps.of(look.session, look.row.id),
        on_demand_prices([*there, *to_be_had]),
        look.rented,
        created_at_s=look.row.created_at_s,
        end_at_s=look.now_s,
        eta_s=jobs.eta_s(look.row),
    )
    compared = await comparison.of_job(look.session, look.row.id)
    return {
        "cost": views.cost_view(spent),
        "money": found,
        "alike": on_demand_plan(compared, spent, look.row),
        "not_alike": None if compared is None else compared.reason,
        "prices": price_histories(look.history),
        "price_sources": [
            (each, jobs.rfc3339(each.since_s)) for each in price_sources(look.history, named) if look.holds_nodes
        ],
        "price_end_s": max(1.0, look.now_s - look.plans[0].at_s) if look.plans else 1.0,
        "budget": budget_of(look.row.spec, spent),
        "stated_at": None if found.stated_at_s is None else jobs.rfc3339(found.stated_at_s),
        "spent_usd": spent.usd,
    }


async def _checkpoints(look: Look) -> View:
    rows = await journal.newest(look.session, look.row.id, 50, CHECKPOINT_KINDS)
    found = await _store_look(look)
    newest = [event_of(row) for row in rows]
    saved = [(event.payload["epoch"], event.payload["step"]) for event in newest if is_commit(event)]
    waited_s = await held_up_s(look.session, look.row.id, saved)
    recoveries = [event for event in look.history if event.kind == journal.RECOVERY_KIND]
    shown = checkpoints(newest, found, waited_s, recoveries)
    place = look.row.spec.get("checkpoint") or {}
    return {
        "look": found,
        "looked_at": None if found is None else jobs.rfc3339(found.at_s),
        "in_memory": look.holds_nodes and look.row.step > 0,
        "checkpoints": [
            (found, jobs.rfc3339(found.at_s), found.verified and jobs.rfc3339(found.verified.at_s)) for found in shown
        ],
        "uri": place.get("uri"),
        "every_steps": place.get("every_steps"),
        "keep": place.get("keep"),
    }


async def _store_look(look: Look) -> StoreLook | None:
    """None of a script: what it stores, and how, is its own."""
    if jobs.is_script(look.row):
        return None
    place = ((await storages.located_of(look.session, look.row)).get("checkpoint") or {}).get("uri")
    return None if place is None else await look.stores.newest(look.row.id, place)


async def _script(look: Look) -> View:
    return {"script": await script_view(look.session, look.row)}


async def _logs(look: Look) -> View:
    return await logs_panel(look.session, look.row.id, look.log)


async def _limits(look: Look) -> View:
    share = await shares.of_job(look.session, look.row.id)
    return {"limits": limits_panel(look.row.spec, look.spending(), look.now_s), "warning": share.warning}


async def _events(look: Look) -> View:
    newest, chosen = await events_shown(look.session, look.row.id, look.log.event, _EVENT_KINDS)
    has_logs = await log_store.get(look.session, look.row.id) is not None
    return {"events": [views.event_line(entry) for entry in newest], "has_logs": has_logs, "event": chosen}


async def _step(look: Look) -> View:
    if look.step is None:
        return {"step": None, "times": (), "newest": look.row.step}
    return await step_panel(look.session, look.row, look.step)


async def _nothing(look: Look) -> View:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`link`: what leads to it at the top of the page; `on_steps`: it shows what every step changes.
    `planned` panels are of jobs with plans, `scripted` ones of jobs
    that run scripts. `heavy` ones take seconds for a large plan, and come after the rest of the page. While the job
    goes on it is drawn again every `every_s`, even if nothing happened."""

    title: str
    link: str
    gather: Callable[[Look], Awaitable[View]]
    on_steps: bool = False
    planned: bool = True
    scripted: bool = True
    heavy: bool = False
    every_s: int = 30


PANELS: Mapping[str, Panel] = {
    "head": Panel(title="Job", link="", gather=_head, on_steps=True),
    "curves": Panel(title="Curves", link="Curves", gather=_curves),
    "metrics": Panel(title="What the script reports", link="", gather=_script, planned=False, on_steps=True),
    "plan": Panel(title="Plan: which device runs which layers", link="Plan", gather=_plan, scripted=False),
    "nodes": Panel(title="Nodes", link="Nodes", gather=_nodes, every_s=5),
    "timeline": Panel(title="Preemptions and recoveries", link="Timeline", gather=_timeline),
    "recoveries": Panel(title="Recoveries", link="Recoveries", gather=_recoveries, scripted=False),
    "losses": Panel(
        title="What the job survives right now", link="Survival", gather=_losses, scripted=False, heavy=True
    ),
    "goodput": Panel(title="Goodput", link="Goodput", gather=_goodput),
    "cost": Panel(title="Cost", link="Cost", gather=_money),
    "limits": Panel(title="Limits and budget", link="Limits", gather=_limits),
    "checkpoints": Panel(title="Checkpoints", link="Checkpoints", gather=_checkpoints),
    "why": Panel(title="Why this plan", link="Why", gather=_why, scripted=False),
    "exchanges": Panel(title="Exchanges in a step", link="", gather=_nothing, on_steps=True, scripted=False),
    "step": Panel(title="One step", link="Step", gather=_step),
    "logs": Panel(title="Logs", link="Logs", gather=_logs),
    "events": Panel(title="Events", link="Events", gather=_events),
}


def panels_of(row: JobRow) -> Mapping[str, Panel]:
    """Those that a job of its kind has, in the order of the page."""
    script = jobs.is_script(row)
    return {name: panel for name, panel in PANELS.items() if (panel.scripted if script else panel.planned)}


async def look_at(
    session: AsyncSession,
    row: JobRow,
    histories: Histories,
    stores: StoreLooks,
    *,
    epoch: int | None,
    window: str,
    log: LogChoice,
    step: int | None,
) -> Look:
    return Look(
        session=session,
        row=row,
        history=await histories.of(session, row.id),
        rented=await rentals.of_job(session, row.id),
        steps=histories.steps,
        stores=stores,
        cluster=None if row.cluster_id is None else await session.get(ClusterRow, row.cluster_id),
        now_s=row.since_at_s if jobs.ended(row) else time.time(),
        epoch=epoch,
        window=window,
        log=log,
        step=step,
    )


def put_off(look: Look, name: str) -> bool:
    """Whether the page is better drawn without this panel, which is asked for once it is there."""
    return PANELS[name].heavy and bool(look.plans) and num_devices(look.plans[-1].payload["plan"]) > _LARGE


async def shown(look: Look, name: str, *, later: bool = False) -> View:
    """What the template of a panel needs: `job`, `panel`, and what is its own; nothing of that `later`."""
    panel = PANELS[name]
    own = {"later": True} if later else await panel.gather(look)
    return {"job": views.summary(look.row), "panel": panel, "name": name, "window": look.window, **own}
