"""The page of a job: routes that answer with the whole of it, or with one of its panels."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, Response

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import parse_job
from shoal_planner.profile import profile_from_mapping
from shoal_service import jobs, journal, panels, views
from shoal_service.compared_plans import compared_plans
from shoal_service.errors import NotFound, Problem
from shoal_service.job_history import mark
from shoal_service.models import ClusterRow
from shoal_service.panels import PANELS, panels_of
from shoal_service.panels_logs import LINES_ALONE, Choice, LogChoice
from shoal_service.rendering import fragment, rendered
from shoal_service.services import Deps, Services
from shoal_service.timeline import duration

router = APIRouter()
Epoch = Annotated[int | None, Query(ge=0)]
Window = Literal["all", "24h", "1h"]
Step = Annotated[int | None, Query(ge=0, lt=2**31)]


@router.get("/jobs/{job_id}", response_class=HTMLResponse)
async def job_page(
    request: Request,
    deps: Deps,
    job_id: str,
    log: Choice,
    epoch: Epoch = None,
    window: Window = "all",
    step: Step = None,
    complete: bool = False,
) -> Response:
    """Complete as it is, without scripts; of a large job, if that is asked for."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        seen = await mark(session, row)
        look = await panels.look_at(
            session, row, deps.histories, deps.stores, epoch=epoch, window=window, log=log, step=step
        )
        views_of = {
            name: await panels.shown(look, name, later=not complete and panels.put_off(look, name))
            for name in panels_of(row)
        }
    drawn = [
        fragment(request, f"panels/{name}.html", {**view, "chosen_epoch": epoch}) for name, view in views_of.items()
    ]
    parts = [(name, PANELS[name].link) for name in views_of if PANELS[name].link]
    return rendered(request, "job.html", {"job": views.summary(row), "panels": drawn, "parts": parts, "mark": seen})


@router.get("/jobs/{job_id}/panels/{name}", response_class=HTMLResponse)
async def job_panel(
    request: Request,
    deps: Deps,
    job_id: str,
    name: str,
    log: Choice,
    epoch: Epoch = None,
    window: Window = "all",
    step: Step = None,
) -> Response:
    """One panel as it stands in the page now."""
    shown = await _panel(deps, job_id, name, epoch=epoch, window=window, log=replace(log, most=LINES_ALONE), step=step)
    # What the reader chose stands in the address, so that a link to the page shows the same.
    given = {"epoch": epoch, "window": None if window == "all" else window, "step": step}
    choices = {key: "" if value is None else str(value) for key, value in given.items()} | log.given()
    kept = {key: value for key, value in choices.items() if value}
    chosen = f"?{urlencode(kept)}" if kept else ""
    headers = {"HX-Replace-Url": f"/jobs/{job_id}{chosen}#part-{name}"} if "choose" in request.query_params else {}
    return rendered(request, f"panels/{name}.html", {**shown, "chosen_epoch": epoch}, headers=headers)


async def _panel(
    deps: Services, job_id: str, name: str, *, epoch: int | None, window: str, log: LogChoice, step: int | None
) -> dict[str, Any]:
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        if name not in PANELS or name not in panels_of(row):
            raise NotFound("panel_not_found", f"name = {name!r}: the page of {job_id} has no such panel", "name")
        look = await panels.look_at(
            session, row, deps.histories, deps.stores, epoch=epoch, window=window, log=log, step=step
        )
        return await panels.shown(look, name)


@router.get("/jobs/{job_id}/compare", response_class=HTMLResponse)
async def compare_plans(request: Request, deps: Deps, job_id: str) -> Response:
    """What the search weighs for the nodes of the job's newest plan, by what is known of them today."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        adopted, _ = await journal.at_stake(session, job_id)
        cluster = None if row.cluster_id is None else await session.get(ClusterRow, row.cluster_id)
    if adopted is None or cluster is None:
        raise NotFound("no_plan_yet", f"{job_id} has no plan yet")
    try:
        found = await deps.planner.plan(
            parse_job(row.spec),
            snapshot_from_mapping(adopted["snapshot"]),
            profile_from_mapping(cluster.profile),
            seed=0,
        )
    except Problem as problem:
        return rendered(request, "compared.html", {"problem": problem})
    job = parse_job(row.spec)
    values = {
        "problem": None,
        "candidates": await asyncio.to_thread(compared_plans, found, job, adopted["snapshot"], cluster.profile),
        "search": duration(found.search_s),
        "truncated": found.truncated,
    }
    return rendered(request, "compared.html", values)
