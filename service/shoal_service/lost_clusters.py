"""Clusters that count as lost, and jobs that were cancelled there: nobody is left who could end them, so they are
cancelled here. They are no cluster's from then on. Should theirs come back, it ends what still runs of them, as it does
with all that is not its own.

Owns when a cluster counts as lost. What becomes of jobs that are to go on is takeover.py's.
"""

from __future__ import annotations

import time

import structlog
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import JobState
from shoal_service import jobs, journal
from shoal_service.awake import Awake
from shoal_service.bell import CLUSTERS, JOBS, Bell, job_topic
from shoal_service.database import Database
from shoal_service.models import ClusterRow, JobRow
from shoal_service.status import moved
from shoal_service.turns import Turns

log = structlog.get_logger()

_LOOK_S = 2.0


def lost(lost_s: float, awake: Awake) -> ColumnElement[bool]:
    """Of a cluster: its lease is over for `lost_s`, and this process listened for a whole lease of it and as long
    again."""
    lease_s = ClusterRow.lease_until_s - ClusterRow.updated_at_s
    late = ClusterRow.lease_until_s < time.time() - lost_s
    return late & (lease_s <= awake.for_s() - lost_s)


class LostClusters:
    """`start` in a running event loop."""

    def __init__(self, database: Database, bell: Bell, lost_s: float, awake: Awake) -> None:
        self._database = database
        self._bell = bell
        self._lost_s = lost_s
        self._awake = awake
        self._turns = Turns("lost-clusters", self.look, _LOOK_S)

    def start(self) -> None:
        self._turns.start()

    async def close(self) -> None:
        await self._turns.close()

    async def look(self) -> None:
        """Ends what is being cancelled on clusters that have become lost."""
        async with self._database.read() as session:
            query = select(JobRow.id).join(ClusterRow, ClusterRow.id == JobRow.cluster_id)
            found = (await session.scalars(query.where(*self._nobody_ends()).order_by(JobRow.id))).all()
        for job_id in found:
            async with self._database.write() as session:
                row = await self.end_cancelled(session, await jobs.get(session, job_id, to_change=True))
            if jobs.ended(row):
                self._bell.ring(CLUSTERS, JOBS, job_topic(job_id))

    async def end_cancelled(self, session: AsyncSession, row: JobRow) -> JobRow:
        """The row, cancelled if it was being cancelled and nobody is there to say when that is done."""
        gone = select(ClusterRow).join(JobRow, ClusterRow.id == JobRow.cluster_id)
        cluster = await session.scalar(gone.where(JobRow.id == row.id, *self._nobody_ends()))
        if cluster is None:
            return row
        heard = jobs.rfc3339(cluster.updated_at_s)
        reason = f"cancelled while cluster {cluster.id}, not heard of since {heard}, was away"
        if await journal.has_begun(session, row.id):
            reason += "; what still runs of it there ends should that cluster come back"
        status = moved(jobs.status_of(row), JobState.CANCELLED, "cancelled_by_user", reason, time.time())
        if await jobs.put_status(session, row, status, cluster_id=None):
            log.warning("job of a lost cluster is cancelled", job=row.id, cluster=cluster.id)
        return await jobs.get(session, row.id)

    def _nobody_ends(self) -> tuple[ColumnElement[bool], ...]:
        """Of a job and its cluster. One that has not begun has nothing to lose by being ended too early."""
        unheard = ~journal.begun() & (ClusterRow.lease_until_s < time.time())
        return JobRow.state == JobState.CANCELLING.value, lost(self._lost_s, self._awake) | unheard
