"""Sends a tree of spans for each recovery, where the operator names a receiver. One replica does it for all. How far it
is stands with the job's figures: a tree is noted as sent after the receiver has taken it, and one that is sent twice,
because of a kill in between, has the same ids."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import structlog
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import RecoveryDone
from shoal_service import duties, jobs, journal
from shoal_service.database import Database
from shoal_service.errors import DatabaseAway
from shoal_service.models import JobRow, JournalRow
from shoal_service.models_watching import JobTotalsRow
from shoal_service.recovery_spans import Span, Traced, spans_of
from shoal_service.settings import Settings
from shoal_service.turns import Turns

log = structlog.get_logger()

_DUTY = "traces"
_LEASE_S = 20.0
_LOOK_S = 2.0
_JOBS = 20
_RECOVERIES = 50
_OLDEST_S = 86400.0  # receivers refuse what is older, and nobody looks for it


class Export(Protocol):
    def send(self, spans: Sequence[Span]) -> bool: ...

    def close(self) -> None: ...


def open_export(settings: Settings) -> Export | None:
    """Raises ValueError where the libraries are missing that this needs."""
    endpoint = settings.traces_endpoint
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"SHOAL_OTLP_ENDPOINT = {endpoint!r}: must begin with http:// or https://")
    try:
        from shoal_service.trace_export import OtlpExport
    except ModuleNotFoundError as error:
        raise ValueError(f"SHOAL_OTLP_ENDPOINT needs {error.name}: install shoal[otel] from its wheel") from error
    return OtlpExport(endpoint)


class Traces:
    """`start` in a running event loop; without an `export` it does nothing."""

    def __init__(self, database: Database, export: Export | None) -> None:
        self._database = database
        self._export = export
        self._holder = duties.new_holder()
        self._turns = Turns(_DUTY, self._look, _LOOK_S)

    def start(self) -> None:
        if self._export is not None:
            self._turns.start()

    async def close(self) -> None:
        if self._export is None:
            return
        await self._turns.close()
        self._export.close()
        with contextlib.suppress(DatabaseAway):  # the lease ends by itself
            async with self._database.write() as session:
                await duties.release(session, self._holder)

    async def _look(self) -> None:
        assert self._export is not None
        async with self._database.read() as session:
            found = await _untraced(session)
        if not found or not await self._claim():
            return
        for row, first_seq in found:
            async with self._database.read() as session:
                done = await _recoveries(session, row.id, first_seq)
            traced = Traced(job_id=row.id, project=row.project_id, name=row.name)
            fresh = [each for each in done if each.at_s > time.time() - _OLDEST_S]
            spans = [span for each in fresh for span in spans_of(traced, each.seq, each.at_s, each.payload)]
            if spans and not await asyncio.to_thread(self._export.send, spans):
                log.warning("the receiver of traces does not take them; they are sent again", job=row.id)
                return
            await self._note(row.id, done[-1].seq if done else first_seq)

    async def _claim(self) -> bool:
        async with self._database.write() as session:
            return await duties.claim(session, _DUTY, self._holder, _LEASE_S)

    async def _note(self, job_id: str, last_seq: int) -> None:
        async with self._database.write() as session:
            await jobs.get(session, job_id, to_change=True)  # its journal does not grow meanwhile
            left = await _recoveries(session, job_id, last_seq + 1)
            trace_from = left[0].seq if left else None
            await session.execute(
                update(JobTotalsRow).where(JobTotalsRow.job_id == job_id).values(trace_from=trace_from)
            )


async def _untraced(session: AsyncSession) -> Sequence[tuple[JobRow, int]]:
    query = select(JobRow, JobTotalsRow.trace_from).join(JobTotalsRow, JobTotalsRow.job_id == JobRow.id)
    rows = await session.execute(query.where(JobTotalsRow.trace_from.is_not(None)).order_by(JobRow.id).limit(_JOBS))
    return [(row, first_seq) for row, first_seq in rows if first_seq is not None]


async def _recoveries(session: AsyncSession, job_id: str, first_seq: int) -> Sequence[JournalRow]:
    return await journal.entries_after(session, job_id, first_seq - 1, _RECOVERIES, (RecoveryDone.kind,))
