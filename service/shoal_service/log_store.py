"""Printed lines in the database: adding what is brought, reading it back piece by piece, forgetting what is old.

Owns that a line which is brought twice is stored once, and that no reading takes more than its share of time: it ends
after so many bytes, and says where to go on.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Select

from shoal_service.log_chunks import (
    CHUNK_BYTES,
    CHUNK_LINES,
    Line,
    Wanted,
    cut,
    found,
    packed,
    summary,
    unpacked,
)
from shoal_service.models import LogChunkRow, LogRow, LogSourceRow

_OPENED_BYTES = 2**24  # by one reading
_AT_ONCE = 8  # chunks that are fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Lines of one source, by their numbers there, which grow."""

    source: str
    lines: tuple[tuple[int, Line], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Lines that were wanted, each with its number; `next_line` is where to go on, and `more` whether there is anything
    there by now."""

    lines: tuple[tuple[int, Line], ...]
    next_line: int
    more: bool


async def append(session: AsyncSession, job_id: str, brought: Sequence[Brought], limit_bytes: int) -> bool:
    """Whether anything of it is new. Of the job at most `limit_bytes` are kept, the newest."""
    known = {each.source: await _source(session, job_id, each.source) for each in brought}
    fresh = [line for each in brought for number, line in each.lines if number > known[each.source].last_number]
    if not fresh:
        return False
    for each in brought:
        known[each.source].last_number = max(known[each.source].last_number, each.lines[-1][0])
    row = await get(session, job_id, locked=True)
    if row is None:
        row = LogRow(job_id=job_id, next_line=1, first_line=1, num_bytes=0, forgotten=None)
        session.add(row)
        await session.flush()
    await _add(session, row, sorted(fresh, key=lambda line: line.at_s))
    if row.num_bytes > limit_bytes:
        await _shorten(session, row, limit_bytes)
    return True


async def _source(session: AsyncSession, job_id: str, source: str) -> LogSourceRow:
    row = await session.get(LogSourceRow, (job_id, source), with_for_update=True)
    if row is None:
        row = LogSourceRow(job_id=job_id, source=source, last_number=0)
        session.add(row)
    return row


async def get(session: AsyncSession, job_id: str, *, locked: bool = False) -> LogRow | None:
    """None of a job that has printed nothing."""
    return await session.get(LogRow, job_id, with_for_update=locked, populate_existing=True)


async def _add(session: AsyncSession, row: LogRow, lines: list[Line]) -> None:
    """To the newest chunk, as long as that is small."""
    newest = await session.scalar(_chunks(row.job_id).order_by(LogChunkRow.first_line.desc()).limit(1))
    first_line = row.next_line
    before = 0
    if newest is not None and newest.num_bytes < CHUNK_BYTES and newest.num_lines < CHUNK_LINES:
        first_line, before = newest.first_line, newest.num_bytes
        lines = [*await asyncio.to_thread(unpacked, newest.content), *lines]
        await session.delete(newest)
        await session.flush()
    for chunk in cut(lines):
        told = summary(chunk)
        content = await asyncio.to_thread(packed, chunk)
        session.add(LogChunkRow(job_id=row.job_id, first_line=first_line, content=content, **dataclasses.asdict(told)))
        first_line += told.num_lines
        row.num_bytes += told.num_bytes
    row.num_bytes -= before
    row.next_line = first_line


async def _shorten(session: AsyncSession, row: LogRow, limit_bytes: int) -> None:
    held = row.num_bytes
    sizes = select(LogChunkRow.first_line, LogChunkRow.num_lines, LogChunkRow.num_bytes)
    rows = await session.execute(sizes.where(LogChunkRow.job_id == row.job_id).order_by(LogChunkRow.first_line))
    for first_line, num_lines, num_bytes in rows:
        if held <= limit_bytes or first_line + num_lines == row.next_line:
            break
        held -= num_bytes
        row.first_line, row.num_bytes = first_line + num_lines, held
        row.forgotten = f"the job printed more than the {limit_bytes} bytes that are kept of it"
    await session.flush()
    await session.execute(
        delete(LogChunkRow).where(LogChunkRow.job_id == row.job_id, LogChunkRow.first_line < row.first_line)
    )


async def forget(session: AsyncSession, before_s: float, why: str) -> int:
    """Chunks of which all is older; how many there were."""
    old = LogChunkRow.last_at_s < before_s
    count = 0
    for job_id in (await session.scalars(select(LogChunkRow.job_id).where(old).distinct())).all():
        row = await get(session, job_id, locked=True)
        assert row is not None
        chosen = select(LogChunkRow.first_line, LogChunkRow.num_lines, LogChunkRow.num_bytes, LogChunkRow.last_at_s)
        rows = await session.execute(chosen.where(LogChunkRow.job_id == job_id).order_by(LogChunkRow.first_line))
        for first_line, num_lines, num_bytes, last_at_s in rows:
            if last_at_s >= before_s:
                break
            row.first_line, row.num_bytes, row.forgotten = first_line + num_lines, row.num_bytes - num_bytes, why
            count += 1
        await session.flush()
        await session.execute(
            delete(LogChunkRow).where(LogChunkRow.job_id == job_id, LogChunkRow.first_line < row.first_line)
        )
    return count


async def oldest_at_s(session: AsyncSession, job_id: str) -> float | None:
    """When the first line that is kept was printed; None where none is."""
    first = select(LogChunkRow.first_at_s).where(LogChunkRow.job_id == job_id)
    return await session.scalar(first.order_by(LogChunkRow.first_line).limit(1))


async def read(session: AsyncSession, row: LogRow, wanted: Wanted, line: int, limit: int) -> Page:
    """At most `limit` of what is wanted, oldest first, from number `line` on."""
    begin = select(LogChunkRow.first_line).where(LogChunkRow.job_id == row.job_id, LogChunkRow.first_line <= line)
    position = await session.scalar(begin.order_by(LogChunkRow.first_line.desc()).limit(1)) or 0
    taken: list[tuple[int, Line]] = []
    opened = 0
    while opened < _OPENED_BYTES:
        query = _where(_chunks(row.job_id), wanted).where(LogChunkRow.first_line >= position)
        chunks = (await session.scalars(query.order_by(LogChunkRow.first_line).limit(_AT_ONCE))).all()
        if not chunks:
            # `row` was read before: what came meanwhile has been taken, too.
            return Page(lines=tuple(taken), next_line=max(line, row.next_line, position), more=False)
        for chunk in chunks:
            opened += chunk.num_bytes
            hits = await asyncio.to_thread(found, chunk.content, wanted)
            numbered = [(chunk.first_line + place, hit) for place, hit in hits if chunk.first_line + place >= line]
            taken.extend(numbered[: limit - len(taken)])
            if len(taken) == limit:
                following = taken[-1][0] + 1
                return Page(lines=tuple(taken), next_line=following, more=following < row.next_line)
            position = chunk.first_line + chunk.num_lines
        session.expunge_all()  # else a long reading would hold all that it has opened
    return Page(lines=tuple(taken), next_line=position, more=position < row.next_line)


async def newest(session: AsyncSession, row: LogRow, wanted: Wanted, limit: int) -> Page:
    """The newest of what is wanted, at most `limit`, oldest first; fewer where one reading does not reach them."""
    taken: list[tuple[int, Line]] = []
    opened, position = 0, row.next_line
    while opened < _OPENED_BYTES and len(taken) < limit:
        query = _where(_chunks(row.job_id), wanted).where(LogChunkRow.first_line < position)
        chunks = (await session.scalars(query.order_by(LogChunkRow.first_line.desc()).limit(_AT_ONCE))).all()
        if not chunks:
            break
        for chunk in chunks:
            opened, position = opened + chunk.num_bytes, chunk.first_line
            hits = await asyncio.to_thread(found, chunk.content, wanted)
            taken.extend((chunk.first_line + place, hit) for place, hit in reversed(hits))
        session.expunge_all()
    return Page(lines=tuple(reversed(taken[:limit])), next_line=row.next_line, more=False)


def _chunks(job_id: str) -> Select[LogChunkRow]:
    return select(LogChunkRow).where(LogChunkRow.job_id == job_id)


def _where(query: Select[LogChunkRow], wanted: Wanted) -> Select[LogChunkRow]:
    """Without chunks that cannot have what is wanted."""
    query = query.where(LogChunkRow.worst >= wanted.worst)
    if wanted.attempt is not None:
        query = query.where(LogChunkRow.first_attempt <= wanted.attempt, LogChunkRow.last_attempt >= wanted.attempt)
    if wanted.since_s is not None:
        query = query.where(LogChunkRow.last_at_s >= wanted.since_s)
    if wanted.until_s is not None:
        query = query.where(LogChunkRow.first_at_s <= wanted.until_s)
    return query
