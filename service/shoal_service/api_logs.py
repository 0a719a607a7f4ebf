"""REST: what a job printed, on whatever rank and node, and taking it from connectors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession
from sse_starlette import ServerSentEvent
from starlette.responses import JSONResponse, Response

from shoal_service import clusters, jobs, log_reading, log_store
from shoal_service.bell import log_topic
from shoal_service.bodies import LogBatch, Moment
from shoal_service.cursors import OF_PAGE_BEFORE, described_text
from shoal_service.errors import BadInput, DatabaseAway
from shoal_service.gate import streamed
from shoal_service.log_chunks import Line, Wanted
from shoal_service.log_store import Brought, Page
from shoal_service.models import JobRow, LogRow
from shoal_service.problems import documented
from shoal_service.services import Deps, Services
from shoal_service.shapes_clusters import Printed
from shoal_service.shapes_jobs import Forgotten, LogLine, LogLines

router = APIRouter(prefix="/v1/jobs/{job_id}/logs", tags=["logs"])
_PAGE = 5000
_STREAMED_PAGE = 500
_LATE_S = 5.0  # lines may come so long after the word that their job has ended
_LARGEST = 2**53
_NUMBER = "([0-9]{1,15}|[1-8][0-9]{15})"
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"model": LogLines, "description": "A page, or a stream", "content": {"text/event-stream": {}}}
}
Level = Literal["debug", "info", "warning", "error"]


@router.get("", responses={**_STREAMED, **documented(404, 410)})
async def get_logs(
    request: Request,
    deps: Deps,
    job_id: str,
    rank: Annotated[int | None, Query(ge=0, le=_LARGEST, description="Only of this rank.")] = None,
    node: Annotated[str | None, Query(max_length=200, description="Only of this node.")] = None,
    attempt: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only of this attempt (epoch).")] = None,
    level: Annotated[Level | None, Query(description="Only lines at least as serious.")] = None,
    search: Annotated[str | None, Query(min_length=1, max_length=200, description="In whatever case.")] = None,
    since: Annotated[Moment | None, Query(description="Only from here on.")] = None,
    until: Annotated[Moment | None, Query(description="Only up to here.")] = None,
    event: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Only 30 s around this journal entry.")] = None,
    tail: Annotated[int | None, Query(ge=1, le=_PAGE, description="Only so many, the newest.")] = None,
    cursor: Annotated[Annotated[str, described_text(f"^line_{_NUMBER}$", 40)] | None, OF_PAGE_BEFORE] = None,
    limit: Annotated[int, Query(ge=1, le=_PAGE)] = 500,
    watch: bool = False,
    last_event_id: Annotated[Annotated[str, described_text(f"^{_NUMBER}$", 40)] | None, Header()] = None,
) -> Response:
    """Printed lines in the order in which they came. A page may have fewer than `limit`, or none, and a `next_cursor`
    all the same: reading goes on there. With `watch=1` or `Accept: text/event-stream` a stream whose ids are line
    numbers; it goes on from `Last-Event-ID`, and ends with the event `end` once the job has. 410 where what is asked
    for is not kept any more."""
    if tail is not None and cursor is not None:
        raise BadInput("invalid_field", f"tail = {tail}: cannot be combined with a cursor", "tail")
    async with deps.database.read() as session:
        await jobs.get(session, job_id)
        row = await log_store.get(session, job_id)
        since_s = None if since is None else since.timestamp()
        until_s = None if until is None else until.timestamp()
        if event is not None:
            since_s, until_s = await _around(session, job_id, event, since_s, until_s)
        wanted = Wanted(
            rank=rank, node=node, attempt=attempt, level=level, search=search, since_s=since_s, until_s=until_s
        )
        start = None if cursor is None else _read_cursor(cursor)
        streams = watch or "text/event-stream" in request.headers.get("accept", "")
        last_line = None if last_event_id is None else _read_number(last_event_id, "Last-Event-ID")
        if streams and last_line is not None:
            start, tail = last_line + 1, None
        await log_reading.check_kept(session, row, wanted, start)
        if not streams:
            return JSONResponse(_resource(row, await log_reading.page(session, row, wanted, start, tail, limit)))
    return streamed(request, deps, _follow(deps, job_id, wanted, start, tail))


async def _around(
    session: AsyncSession, job_id: str, event: int, since_s: float | None, until_s: float | None
) -> tuple[float, float]:
    if since_s is not None or until_s is not None:
        raise BadInput("invalid_field", f"event = {event}: cannot be combined with since or until", "event")
    return await log_reading.around(session, job_id, event)


def _resource(row: LogRow | None, page: Page) -> LogLines:
    forgotten: Forgotten | None = None
    if row is not None and row.forgotten:
        forgotten = {"lines": row.first_line - 1, "reason": row.forgotten}
    return {
        "items": [_item(number, line) for number, line in page.lines],
        "next_cursor": _cursor(page.next_line) if page.more else None,
        "forgotten": forgotten,
    }


def _item(number: int, line: Line) -> LogLine:
    return {
        "line": number,
        "at": jobs.rfc3339(line.at_s),
        "level": line.level,
        "attempt": line.attempt,
        "rank": line.rank,
        "node": line.node,
        "text": line.text,
    }


def _cursor(line: int) -> str:
    return f"line_{line}"


def _read_cursor(cursor: str) -> int:
    if not cursor.startswith("line_"):
        raise BadInput("invalid_field", f"cursor = {cursor!r}: is not a cursor of this list", "cursor")
    return _read_number(cursor.removeprefix("line_"), "cursor")


def _read_number(text: str, param: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 16 or int(text) > _LARGEST:
        raise BadInput("invalid_field", f"{param} = {text!r}: must be the number of a line", param)
    return int(text)


async def _follow(
    deps: Services, job_id: str, wanted: Wanted, start: int | None, tail: int | None
) -> AsyncIterator[ServerSentEvent]:
    topic = log_topic(job_id)
    while not deps.bell.closed:
        count = deps.bell.count(topic)
        try:
            async with deps.database.read() as session:
                job = await jobs.get(session, job_id)
                row = await log_store.get(session, job_id)
                page = await log_reading.page(session, row, wanted, start, tail, _STREAMED_PAGE)
        except DatabaseAway:  # the stream outlives that
            await asyncio.sleep(deps.settings.poll_s)
            continue
        for number, line in page.lines:
            yield ServerSentEvent(json.dumps(_item(number, line)), event="line", id=str(number), sep="\n")
        start, tail = page.next_line, None
        if page.more:
            await asyncio.sleep(0)  # others have their turn
            continue
        if jobs.ended(job) and time.time() - job.updated_at_s > _LATE_S:
            yield ServerSentEvent(json.dumps(_end(job)), event="end", sep="\n")
            return
        await deps.bell.wait(topic, count, deps.settings.poll_s)


def _end(job: JobRow) -> dict[str, Any]:
    return {"state": job.state, "code": job.state_code, "reason": job.reason}


@router.post("", tags=["connectors"], responses=documented(404, 409, ok=Printed), response_model=None)
async def bring_logs(deps: Deps, job_id: str, batch: LogBatch) -> Printed:
    """Adds printed lines. Of each source those that are known are skipped; also a cluster that had the job before,
    as its journal says, may bring what was printed there."""
    brought = [
        Brought(
            source=f"{source.node}@{source.life}",
            lines=tuple(
                (number, Line(at_s=at_s, level=level, attempt=attempt, rank=rank, node=source.node, text=text))
                for number, at_s, level, attempt, rank, text in source.lines
            ),
        )
        for source in batch.sources
        if source.lines
    ]
    async with deps.database.write() as session:
        await jobs.get(session, job_id)
        cluster = await clusters.get(session, batch.cluster_id)
        clusters.check_holder(cluster, batch.holder, time.time())
        fresh = await log_store.append(session, job_id, brought, deps.settings.log_bytes_per_job)
    if fresh:
        deps.bell.ring(log_topic(job_id))
    return {"fresh": fresh}
