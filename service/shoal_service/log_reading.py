"""Reading what a job printed, for REST and for pages: a page of lines, the time around a journal entry, and the refusal
where lines are not kept any more."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import jobs, log_store
from shoal_service.errors import Gone, NotFound
from shoal_service.log_chunks import Wanted
from shoal_service.log_store import Page
from shoal_service.models import JournalRow, LogRow

AROUND_S = 30.0


async def around(session: AsyncSession, job_id: str, event: int) -> tuple[float, float]:
    """From when to when lines belong to an entry of the journal. Raises NotFound."""
    entry = await session.get(JournalRow, (job_id, event))
    if entry is None:
        raise NotFound("event_not_found", f"event = {event}: {job_id} has no such journal entry", "event")
    return entry.at_s - AROUND_S, entry.at_s + AROUND_S


async def page(
    session: AsyncSession, row: LogRow | None, wanted: Wanted, start: int | None, tail: int | None, limit: int
) -> Page:
    """The newest `tail`, or at most `limit` from number `start` on (None: the first)."""
    if row is None:
        return Page(lines=(), next_line=1, more=False)
    if tail is not None:
        return await log_store.newest(session, row, wanted, tail)
    return await log_store.read(session, row, wanted, start or row.first_line, limit)


async def check_kept(session: AsyncSession, row: LogRow | None, wanted: Wanted, start: int | None) -> None:
    """Raises Gone where all that is asked for may have been there once."""
    if row is None or row.forgotten is None:
        return
    oldest_s = await log_store.oldest_at_s(session, row.job_id)
    if start is not None and start < row.first_line:
        which = f"lines {start} to {row.first_line - 1} are"
    elif oldest_s is None:
        which = "its lines are all"
    elif wanted.until_s is not None and wanted.until_s < oldest_s:
        which = f"lines before {jobs.rfc3339(oldest_s)} are"
    else:
        return
    raise Gone("logs_forgotten", f"{row.job_id}: {which} not kept any more: {row.forgotten}")
