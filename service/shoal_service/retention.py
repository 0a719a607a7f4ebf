"""How long history is kept: the journals of ended jobs, and all but the outline of their curves, go when their time is
over, in small batches, by one replica of this server. Jobs themselves stay.

What is gone is marked on the job before it goes, in the same transaction, so that answers can say so (410). A job whose
trackers have not taken all of it yet is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import TERMINAL
from shoal_service import curve_levels, duties, rentals
from shoal_service.database import Database
from shoal_service.errors import DatabaseAway, Gone
from shoal_service.models import CurveRow, JobRow, JournalRow, StepRow, TrackerRow
from shoal_service.turns import Turns

log = structlog.get_logger()

_DUTY = "retention"
_LOOK_S = 30.0
_LEASE_S = 120.0
_BATCH = 1000  # rows that go in one transaction
_PAUSE_S = 0.02  # between two: others have their turn
_JOBS = 100
_ENDED = tuple(state.value for state in TERMINAL)


class Retention:
    """Seconds since a job ended for which its events and its points are kept; None is for ever."""

    def __init__(self, database: Database, *, events_kept_s: float | None, points_kept_s: float | None) -> None:
        self._database = database
        self._events_kept_s = events_kept_s
        self._points_kept_s = points_kept_s
        self._holder = duties.new_holder()
        self._turns = Turns(_DUTY, self._turn, _LOOK_S)

    @property
    def _is_wanted(self) -> bool:
        return self._events_kept_s is not None or self._points_kept_s is not None

    def start(self) -> None:
        if self._is_wanted:
            self._turns.start()

    async def close(self) -> None:
        if self._is_wanted:
            await self._turns.close()
            with contextlib.suppress(DatabaseAway):  # the lease ends by itself
                async with self._database.write() as session:
                    await duties.release(session, self._holder)

    async def _turn(self) -> None:
        if await self._claim():
            await self.turn()

    async def _claim(self) -> bool:
        async with self._database.write() as session:
            return await duties.claim(session, _DUTY, self._holder, _LEASE_S)

    async def turn(self) -> None:
        """Removes all whose time is over now."""
        if self._points_kept_s is not None:
            for job_id in await self._over(self._points_kept_s, JobRow.is_thinned.is_(False)):
                await self._thin(job_id)
        if self._events_kept_s is not None:
            for job_id in await self._over(self._events_kept_s, JobRow.forgotten_seq < JobRow.last_seq):
                await self._forget(job_id)

    async def _over(self, kept_s: float, left: ColumnElement[bool]) -> Sequence[str]:
        waiting = select(TrackerRow.tool).where(TrackerRow.job_id == JobRow.id, TrackerRow.complete.is_(False))
        query = (
            select(JobRow.id)
            .where(JobRow.state.in_(_ENDED), JobRow.since_at_s < time.time() - kept_s, left, ~waiting.exists())
            .order_by(JobRow.since_at_s)
            .limit(_JOBS)
        )
        async with self._database.read() as session:
            return (await session.scalars(query)).all()

    async def _forget(self, job_id: str) -> None:
        more = True
        while more:
            async with self._database.write() as session:
                row = await session.get(JobRow, job_id, with_for_update=True)
                if row is None:
                    return
                until = min(row.forgotten_seq + _BATCH, row.last_seq)
                await session.execute(update(JobRow).where(JobRow.id == job_id).values(forgotten_seq=until))
                gone = (JournalRow.job_id == job_id, JournalRow.seq <= until)
                await session.execute(delete(JournalRow).where(*gone))
                await rentals.forget_job(session, job_id)  # without the journal nobody can tell what was in plans
                more = until < row.last_seq
            await self._let_others()
        log.info("the journal of a job is past its time", job=job_id)

    async def _thin(self, job_id: str) -> None:
        """Of every 32 steps the points with the lowest and the highest loss stay."""
        async with self._database.write() as session:
            row = await session.get(JobRow, job_id, with_for_update=True)
            if row is None:
                return
            await curve_levels.keep_up(session, job_id, redone_from=None, newest_step=row.step)
        width = curve_levels.WIDTHS[0]
        for first in range(0, row.step + 1, _BATCH // width * width):
            async with self._database.write() as session:
                await _thin_steps(session, job_id, first // width, (first + _BATCH) // width)
            await self._let_others()
        async with self._database.write() as session:
            await session.execute(delete(StepRow).where(StepRow.job_id == job_id, StepRow.rolled_back.is_(True)))
            await session.execute(update(JobRow).where(JobRow.id == job_id).values(is_thinned=True))
        log.info("the curve of a job is thinned", job=job_id)

    async def _let_others(self) -> None:
        """Raises DatabaseAway; ends this turn where another replica has taken over meanwhile."""
        await asyncio.sleep(_PAUSE_S)
        if self._turns.begun and not await self._claim():
            raise DatabaseAway("another replica does it by now")


async def _thin_steps(session: AsyncSession, job_id: str, first: int, end: int) -> None:
    width = curve_levels.WIDTHS[0]
    mine = (CurveRow.job_id == job_id, CurveRow.width == width, CurveRow.bucket >= first, CurveRow.bucket < end)
    kept: set[int] = set()
    buckets: list[int] = []
    for bucket, low, high in await session.execute(
        select(CurveRow.bucket, CurveRow.low_seq, CurveRow.high_seq).where(*mine)
    ):
        buckets.append(bucket)
        kept |= {low, high}
    if buckets:
        within = (StepRow.step >= min(buckets) * width, StepRow.step < (max(buckets) + 1) * width)
        gone = or_(StepRow.rolled_back.is_(True), StepRow.seq.not_in(kept))
        await session.execute(delete(StepRow).where(StepRow.job_id == job_id, *within, gone))


def check_kept(row: JobRow, after: int = 0) -> None:
    """Raises Gone where entries of the journal behind `after` are past their time."""
    if after < row.forgotten_seq:
        left: dict[str, Any] = {"forgotten_seq": row.forgotten_seq, "last_seq": row.last_seq}
        rest = "none is left" if row.forgotten_seq == row.last_seq else f"those behind {row.forgotten_seq} are left"
        detail = (
            f"the events of {row.id} up to number {row.forgotten_seq} are past the time for which this server keeps "
        )
        raise Gone("history_expired", f"{detail}them after a job has ended (events_kept_s); {rest}", **left)
