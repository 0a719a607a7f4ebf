"""Looks for jobs that make no progress, and has it told: once for each time that one gets stuck. What that means is
progress.py's. One replica does it for all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import AT_REST, JobState
from shoal_service import duties, jobs, outbox
from shoal_service.awake import Awake
from shoal_service.database import Database
from shoal_service.errors import DatabaseAway
from shoal_service.job_totals import figures_of
from shoal_service.models import ClusterRow, JobRow
from shoal_service.models_watching import JobTotalsRow
from shoal_service.outbox import Told
from shoal_service.progress import Stuck, stuck
from shoal_service.turns import Turns

log = structlog.get_logger()

_DUTY = "lookout"
_LEASE_S = 20.0
_LOOK_S = 10.0
# Journals that waited for this server come a while after the leases of their clusters: until then none is judged.
_LISTENED_S = 60.0
_BEGUN = tuple(state.value for state in JobState if state not in (*AT_REST, JobState.QUEUED))


class Lookout:
    """`start` in a running event loop. `limit_s`: after how long without progress a job is stuck."""

    def __init__(self, database: Database, awake: Awake, limit_s: float, listened_s: float = _LISTENED_S) -> None:
        self._database = database
        self._awake = awake
        self._limit_s = limit_s
        self._listened_s = listened_s
        self._holder = duties.new_holder()
        self._has_claimed = False
        self._turns = Turns(_DUTY, self._turn, _LOOK_S)

    def start(self) -> None:
        self._turns.start()

    async def close(self) -> None:
        await self._turns.close()
        if self._has_claimed:
            with contextlib.suppress(DatabaseAway):  # the lease ends by itself
                async with self._database.write() as session:
                    await duties.release(session, self._holder)

    async def _turn(self) -> None:
        if self._awake.for_s() >= self._listened_s:
            await self.look()

    async def look(self) -> None:
        async with self._database.read() as session:
            found = await find_stuck(session, self._limit_s)
        if not found or not await self._claim():
            return
        for job_id, what in found:
            async with self._database.write() as session:
                row = await jobs.get(session, job_id)
                more = {"code": what.code, "reason": what.reason, "since": jobs.rfc3339(what.since_s)}
                once = f"{what.code}:{what.since_s:.3f}"
                if await outbox.announce(session, row, Told.STUCK, once=once, **more):
                    log.warning("job makes no progress", job=job_id, code=what.code, why=what.reason)

    async def _claim(self) -> bool:
        async with self._database.write() as session:
            self._has_claimed = await duties.claim(session, _DUTY, self._holder, _LEASE_S)
        return self._has_claimed


async def find_stuck(session: AsyncSession, limit_s: float) -> Sequence[tuple[str, Stuck]]:
    """As far as their clusters were heard of: of what those did since, nothing is known."""
    query = (
        select(JobRow.id, JobRow.state, JobRow.step_s, ClusterRow.updated_at_s, JobTotalsRow.figures)
        .join(JobTotalsRow, JobTotalsRow.job_id == JobRow.id)
        .join(ClusterRow, ClusterRow.id == JobRow.cluster_id)
        .where(JobRow.state.in_(_BEGUN))
        .order_by(JobRow.id)
    )
    found = []
    for job_id, state, step_s, heard_s, figures in await session.execute(query):
        what = stuck(figures_of(figures), JobState(state), step_s, heard_s, limit_s)
        if what is not None:
            found.append((job_id, what))
    return found
