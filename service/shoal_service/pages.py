"""The status page: routes that answer with HTML, and the streams that keep it live. What it shows is views.py's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.templating import Jinja2Templates

from shoal_service import api_clusters, api_jobs, auth, jobs, views
from shoal_service.bell import CLUSTERS, JOBS, job_topic
from shoal_service.errors import DatabaseAway, Problem
from shoal_service.gate import Caller
from shoal_service.job_filter import JobFilter
from shoal_service.measured import in_short
from shoal_service.services import Deps, Services
from shoal_service.timeline import num_bytes

router = APIRouter()
templates = Jinja2Templates(directory=Path(__file__).parent / "templates")
templates.env.filters["num_bytes"] = num_bytes
templates.env.trim_blocks = templates.env.lstrip_blocks = True
_LEAST_PAUSE_S = 0.25  # between two changes that a stream tells of: a page need not repaint more often
_LIST = 50
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def page(request: Request, name: str, values: dict[str, Any], status: int = 200) -> Response:
    session = getattr(request.state, "session", None)
    context = {**values, "csrf": None if session is None else auth.csrf_token(session)}
    return templates.TemplateResponse(request, name, context, status_code=status, headers=HEADERS)


def refused(request: Request, problem: Problem) -> Response:
    """A refusal as a page, for browsers."""
    title = "Sign in" if problem.status == 401 else problem.body()["title"]
    return page(request, "refused.html", {"problem": problem, "title": title}, problem.status)


@router.get("/", response_class=HTMLResponse)
async def jobs_page(
    request: Request, deps: Deps, caller: Caller, cursor: Annotated[str | None, Query(max_length=200)] = None
) -> Response:
    async with deps.database.read() as session:
        wanted = JobFilter(projects=caller.projects())
        rows, following = await jobs.list_page(session, wanted, limit=_LIST, cursor=cursor)
    values = {"jobs": [views.summary(row) for row in rows], "next_cursor": following, "first_page": cursor is None}
    return page(request, "jobs.html", values)


@router.get("/jobs/{job_id}", response_class=HTMLResponse)
async def job_page(request: Request, deps: Deps, job_id: str, epoch: int | None = None) -> Response:
    async with deps.database.read() as session:
        values = await views.job_view(session, job_id, epoch)
    return page(request, "job.html", {**values, "chosen_epoch": epoch})


@router.get("/nodes", response_class=HTMLResponse)
async def nodes_page(request: Request, deps: Deps, caller: Caller) -> Response:
    nodes = (await api_clusters.list_nodes(deps, caller))["items"]
    found = (await api_clusters.list_clusters(deps))["items"]
    shown = [{**node, "measured": in_short(node["measured"])} for node in nodes]
    return page(request, "nodes.html", {"nodes": shown, "clusters": found})


@router.post("/jobs/{job_id}/cancel")
async def cancel_from_page(deps: Deps, job_id: str) -> Response:
    await api_jobs.cancel(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/pause")
async def pause_from_page(deps: Deps, job_id: str) -> Response:
    await api_jobs.pause(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/resume")
async def resume_from_page(deps: Deps, job_id: str) -> Response:
    await api_jobs.resume(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.get("/jobs/{job_id}/stream")
async def job_stream(deps: Deps, job_id: str) -> Response:
    """Tells of every change of a job: `change` with its version, then `end`."""
    async with deps.database.read() as session:
        await jobs.get(session, job_id)
    return EventSourceResponse(_job_changes(deps, job_id), ping=15)


async def _job_changes(deps: Services, job_id: str) -> AsyncIterator[ServerSentEvent]:
    topic, told = job_topic(job_id), None
    while not deps.bell.closed:
        count = deps.bell.count(topic)
        try:
            async with deps.database.read() as session:
                row = await jobs.get(session, job_id)
        except DatabaseAway:  # the stream outlives that
            await asyncio.sleep(deps.settings.poll_s)
            continue
        if row.version != told:
            told = row.version
            change = {"version": row.version, "state": row.state, "step": row.step}
            yield ServerSentEvent(json.dumps(change), event="change", sep="\n")
        if jobs.ended(row):
            yield ServerSentEvent("{}", event="end", sep="\n")
            return
        await asyncio.sleep(_LEAST_PAUSE_S)
        await deps.bell.wait(topic, count, deps.bell.patience_s(deps.settings.poll_s))


@router.get("/stream")
async def list_stream(deps: Deps) -> Response:
    """Tells when the list of jobs or of nodes may look different."""
    return EventSourceResponse(_list_changes(deps), ping=15)


async def _list_changes(deps: Services) -> AsyncIterator[ServerSentEvent]:
    number = 0
    while not deps.bell.closed:
        count = deps.bell.count(JOBS)
        clusters = deps.bell.count(CLUSTERS)
        number += 1
        yield ServerSentEvent(json.dumps({"number": number}), event="change", sep="\n")
        await asyncio.sleep(1.0)
        if deps.bell.count(CLUSTERS) == clusters:
            # Twice the pause: with nothing rung here, another replica may still have written.
            await deps.bell.wait(JOBS, count, max(deps.settings.poll_s, 5.0))
