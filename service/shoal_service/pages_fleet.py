"""The pages of all jobs and of all nodes."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy import and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer
from starlette.responses import HTMLResponse, Response

from shoal_recovery.journal import TERMINAL, JobState
from shoal_service import api_nodes, clusters, drills, job_totals, jobs, people, rentals, shares, views
from shoal_service import pools as pools_of_clusters
from shoal_service.access import Principal
from shoal_service.fleet import pools
from shoal_service.gate import Caller
from shoal_service.job_filter import JobFilter
from shoal_service.job_history import newest_steps_at_s
from shoal_service.ledger import by_person, by_project
from shoal_service.measured import in_short
from shoal_service.models import JobRow
from shoal_service.panels_alerts import Alert, alerts_of, by_job, standing_of
from shoal_service.rendering import rendered
from shoal_service.services import Deps, Services
from shoal_service.signs import sign_of
from shoal_service.spending import spending_of

router = APIRouter()
_LIST = 50
_NODES = 100
_ASKED = 20  # of what was asked of pools, the newest
_ALERTS = 8
_UNHEARD = 20
_WATCHED = 200  # jobs that alerts are looked for in
_LATELY_S = 86400.0
_RECENT_JOBS = 20  # of which is told what each has cost
_WINDOW_S = 30 * 86400.0  # in which interruptions are counted


@router.get("/", response_class=HTMLResponse)
async def jobs_page(
    request: Request,
    deps: Deps,
    caller: Caller,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    state: Annotated[str, Query(max_length=20)] = "",
    name: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    """Newest first; of one `state` (or all that have not ended: `active`), and with a `name` that has this in it."""
    chosen = tuple(each for each in JobState if each == state or (state == "active" and each not in TERMINAL))
    wanted = JobFilter(projects=caller.projects(), states=chosen, name=name or None)
    async with deps.database.read() as session:
        rows, following = await jobs.list_page(session, wanted, limit=_LIST, cursor=cursor)
        bills, _ = await deps.ledger.of(session, rows)
        problems = await clusters.silences(session, rows)
        names = await people.names(session, {row.created_by for row in rows if row.created_by})
        counts = await _counts(session, caller)
        alerts = await _alerts(session, caller)
    values = {
        "jobs": [views.summary(row) for row in rows],
        "problems": problems,
        "names": names,
        "bills": {bill.job_id: bill for bill in bills},
        "next_cursor": following,
        "first_page": cursor is None,
        "counts": counts,
        "alerts": alerts[:_ALERTS],
        "more_alerts": max(0, len(alerts) - _ALERTS),
        "states": list(JobState),
        "chosen": {"state": state or "", "name": name},
    }
    return rendered(request, "jobs.html", values)


async def _counts(session: AsyncSession, caller: Principal) -> list[tuple[str, str, int]]:
    """(state, its sign, how many jobs), of states that there are, in their order."""
    seen = JobFilter(projects=caller.projects()).conditions()
    found = await session.execute(select(JobRow.state, func.count()).where(*seen).group_by(JobRow.state))
    by_state = {state: count for state, count in found.all()}
    return [(state, views.GLYPHS[state], by_state[state]) for state in JobState if state in by_state]


async def _alerts(session: AsyncSession, caller: Principal) -> list[tuple[str, str, Alert]]:
    """(id and name of a job, what somebody should look at), of the newest jobs that go on, or failed lately."""
    now_s = time.time()
    goes_on = JobRow.state.in_([state.value for state in JobState if state not in TERMINAL])
    failed = and_(JobRow.state == JobState.FAILED.value, JobRow.since_at_s > now_s - _LATELY_S)
    seen = (*JobFilter(projects=caller.projects()).conditions(), or_(goes_on, failed))
    # Without what is large and says nothing here: of so many rows to read that takes longer than all the rest.
    brief = select(JobRow).options(*(defer(column, raiseload=True) for column in (JobRow.spec, JobRow.exchanges)))
    rows = (await session.scalars(brief.where(*seen).order_by(JobRow.id.desc()).limit(_WATCHED))).all()
    names = {row.id: row.name for row in rows}
    scripts = await jobs.scripts_among(session, [row.id for row in rows if row.loss is None])
    every, stepped = await shares.of_jobs(session, list(names)), await newest_steps_at_s(session, list(names))
    odd = await job_totals.odd_losses(session, list(names))
    silent = await clusters.silences(session, rows)
    found = {}
    for row in rows:
        silence = silent[row.id]["reason"] if row.id in silent else None
        standing = standing_of(
            row,
            every.get(row.id),
            is_script=row.id in scripts,
            stepped_at_s=stepped.get(row.id),
            silence=silence,
            odd_loss=odd.get(row.id, ""),
        )
        found[row.id] = alerts_of(standing, now_s)
    return [(job_id, names[job_id], alert) for job_id, alert in by_job(found)]


@router.get("/nodes", response_class=HTMLResponse)
async def nodes_page(
    request: Request, deps: Deps, caller: Caller, page: Annotated[int, Query(ge=1, le=10_000)] = 1
) -> Response:
    """By pool first, then each node; those that somebody must know of go first."""
    nodes = await api_nodes.all_nodes(deps, caller)
    async with deps.database.read() as session:
        known = [clusters.resource(row) for row in await clusters.all_clusters(session)]
        unheard = await clusters.with_jobs_unheard(session, caller.projects(), _UNHEARD)
    nodes.sort(key=lambda node: (node.get("reclaim_at_s") is None, node["connected"], node["cluster_id"], node["id"]))
    part = nodes[(page - 1) * _NODES : page * _NODES]
    shown = [{**node, "measured": in_short(node["measured"]), "sign": sign_of(node)} for node in part]
    since_s = time.time() - _WINDOW_S
    async with deps.database.read() as session:
        records, not_read = await deps.fleet_records.since(session, caller.projects(), since_s)
    spent = await _recent(deps, caller)
    async with deps.database.read() as session:
        bills, missing = await deps.ledger.newest(session, caller.projects())
        persons = by_person(bills)
        names = await people.names(session, [each.of for each in persons])
    async with deps.database.read() as session:
        fresh = filter(pools_of_clusters.is_fresh, await pools_of_clusters.every(session))
        rented = [pools_of_clusters.resource(row) for row in fresh]
        drilled = [drills.kept_resource(row) for row in await drills.newest(session, _ASKED)]
        asked = await pools_of_clusters.newest_events(session, caller.projects(), _ASKED)
    values = {
        "now_s": time.time(),
        "rented": rented,
        "asked": asked,
        "drilled": drilled,
        "by_project": by_project(bills),
        "by_person": [(names.get(each.of, each.of), each) for each in persons],
        "num_billed": len(bills),
        "not_billed": missing,
        "nodes": shown,
        "clusters": known,
        "unheard": [(row.id, row.name, row.state, problem["reason"]) for row, problem in unheard],
        "pools": pools(nodes, records, since_s),
        "num_records": len(records),
        "not_read": not_read,
        "spent": spent,
        "page": page,
        "pages": -(-len(nodes) // _NODES),
        "num_nodes": len(nodes),
    }
    return rendered(request, "nodes.html", values)


async def _recent(deps: Services, caller: Principal) -> list[dict[str, Any]]:
    """Of the jobs that changed last: what they cost."""
    spent = []
    async with deps.database.read() as session:
        seen = JobFilter(projects=caller.projects()).conditions()
        query = select(JobRow).where(*seen).order_by(JobRow.updated_at_s.desc()).limit(_RECENT_JOBS)
        for row in (await session.scalars(query)).all():
            events = await deps.histories.of(session, row.id)
            found = spending_of(row, events, await rentals.of_job(session, row.id))
            if found.charges:
                spent.append({"job": views.summary(row), "usd": found.usd, **views.spent_in_short(found)})
    return spent
