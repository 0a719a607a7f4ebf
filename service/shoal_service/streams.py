"""What pages hear while they are open: one stream for each, of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from shoal_service import jobs
from shoal_service.bell import CLUSTERS, JOBS, job_topic
from shoal_service.curve import point
from shoal_service.errors import DatabaseAway
from shoal_service.gate import streamed
from shoal_service.job_history import mark
from shoal_service.models import StepRow
from shoal_service.services import Deps, Services

router = APIRouter()
_LEAST_PAUSE_S = 0.25  # between two changes that a stream tells of: a page need not repaint more often
_MOST_POINTS = 500  # of which a stream tells at once; a page that missed more asks for the whole curve


@router.get("/jobs/{job_id}/stream")
async def job_stream(request: Request, deps: Deps, job_id: str) -> Response:
    """`change`, with the job's version, at every change; `points`, with the steps that were done since; `history`, when
    anything but steps happened; `end`."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
    return streamed(request, deps, _job_changes(deps, job_id, row.last_seq))


async def _job_changes(deps: Services, job_id: str, told_seq: int) -> AsyncIterator[ServerSentEvent]:
    topic, told, told_history = job_topic(job_id), None, ""
    while not deps.bell.closed:
        count = deps.bell.count(topic)
        try:
            async with deps.database.read() as session:
                row = await jobs.get(session, job_id)
                history, points = told_history, []
                if row.version != told:
                    history = await mark(session, row)
                    points = await _points(session, job_id, told_seq)
        except DatabaseAway:  # the stream outlives that
            await asyncio.sleep(deps.settings.poll_s)
            continue
        if row.version != told:
            told = row.version
            change = {"version": row.version, "state": row.state, "step": row.step}
            yield ServerSentEvent(json.dumps(change), event="change", sep="\n")
        if points:
            told_seq = points[-1].seq
            more = len(points) == _MOST_POINTS
            said = {"points": [point(each) for each in points], "more": more}
            yield ServerSentEvent(json.dumps(said), event="points", sep="\n")
        if history != told_history:
            told_history = history
            yield ServerSentEvent(json.dumps({"mark": history}), event="history", sep="\n")
        if jobs.ended(row):
            yield ServerSentEvent("{}", event="end", sep="\n")
            return
        await asyncio.sleep(_LEAST_PAUSE_S)
        await deps.bell.wait(topic, count, deps.bell.patience_s(deps.settings.poll_s))


async def _points(session: AsyncSession, job_id: str, after_seq: int) -> list[StepRow]:
    query = select(StepRow).where(StepRow.job_id == job_id, StepRow.seq > after_seq)
    newest = (await session.scalars(query.order_by(StepRow.seq.desc()).limit(_MOST_POINTS))).all()
    return list(reversed(newest))


@router.get("/stream")
async def list_stream(request: Request, deps: Deps) -> Response:
    """Tells when the list of jobs or of nodes may look different."""
    return streamed(request, deps, _list_changes(deps))


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
