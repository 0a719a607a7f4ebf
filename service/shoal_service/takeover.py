"""Jobs of clusters that are gone are given to clusters that are there, without a user's hand.

A cluster that does not renew its lease may train on all the same; nobody can tell from here. So a job is taken from it
only where nothing is lost by that: it has not begun, or a step of it stands in its object store. There the cluster that
goes on with it says first that the other one's time is over (`shoal_recovery.tenure`). A job whose state is nowhere
else waits for the cluster that has it. Where what a head knows outlasts it, jobs step on without it for as long as they
may (`orphaned_s` of the workers), and those steps would have to be done again: there the wait is as long.

Silence says something only of a time in which somebody listened. A control plane that was away, or had no turn, begins
to count anew: every cluster that is there has renewed its lease before a job of it is given away.

Owns which jobs these are and the giving; that a cluster is there is known when it renews its lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence

import structlog
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.profile import profile_from_mapping
from shoal_planner.script_spec import ScriptSpec, parse_any_job
from shoal_recovery.journal import AT_REST, CheckpointCommitted, JobState
from shoal_recovery.journal_scripts import CheckpointReported
from shoal_service import clusters, duties, jobs, journal, lost_clusters
from shoal_service.awake import Awake
from shoal_service.bell import CLUSTERS, JOBS, Bell, job_topic
from shoal_service.database import Database
from shoal_service.errors import BadInput, DatabaseAway
from shoal_service.models import ClusterRow, JobRow, JournalRow
from shoal_service.planning import Planner, check_place
from shoal_service.status import moved

log = structlog.get_logger()

_STORED = (CheckpointCommitted.kind, CheckpointReported.kind)
_LEASE_S = 60.0
_LEAVE = tuple(state.value for state in JobState if state not in (*AT_REST, JobState.CANCELLING))


class Takeover:
    """`lost_s` is how long a cluster may be late with its lease before its jobs go elsewhere, `standing_s` how long one
    may whose head is fault tolerant."""

    def __init__(
        self, database: Database, planner: Planner, bell: Bell, lost_s: float, standing_s: float, awake: Awake
    ) -> None:
        self._database = database
        self._planner = planner
        self._bell = bell
        self._lost_s = lost_s
        self._standing_s = max(lost_s, standing_s)
        self._awake = awake
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._no_plan: set[tuple[str, str, str]] = set()
        self._holder = duties.new_holder()

    def look(self, cluster_id: str) -> None:
        """Beside the request that it is called from: a search for plans takes its time."""
        task = self._looking.get(cluster_id)
        if task is None or task.done():
            self._looking[cluster_id] = asyncio.create_task(self._look(cluster_id), name=f"takeover-{cluster_id}")

    async def close(self) -> None:
        for task in self._looking.values():
            task.cancel()
        await asyncio.gather(*self._looking.values(), return_exceptions=True)

    async def _look(self, cluster_id: str) -> None:
        try:
            await self._give_what_fits(cluster_id)
        except DatabaseAway:  # the lease is renewed again, and looked then
            log.warning("jobs of lost clusters are not known at present", cluster=cluster_id)

    async def _give_what_fits(self, cluster_id: str) -> None:
        async with self._database.read() as session:
            cluster = await clusters.get(session, cluster_id)
            found = await _orphans(session, cluster_id, self._gone())
        if not found or not await self._claim(cluster_id):
            return
        for row in found:
            if await self._fits(row, cluster):
                await self._give(row, cluster_id)

    async def _claim(self, cluster_id: str) -> bool:
        """Searching for plans takes its time, and another replica may have heard of the cluster just now, too."""
        async with self._database.write() as session:
            return await duties.claim(session, f"takeover {cluster_id}", self._holder, _LEASE_S)

    def _gone(self) -> ColumnElement[bool]:
        stands = ClusterRow.fault_tolerant_head.is_(True)
        soon, late = (lost_clusters.lost(wait_s, self._awake) for wait_s in (self._lost_s, self._standing_s))
        return (soon & ~stands) | late

    async def _fits(self, row: JobRow, cluster: ClusterRow) -> bool:
        """Where no plan of the job fits now none will be searched for again until the cluster is another one."""
        nodes = hashlib.sha256(json.dumps(cluster.snapshot, sort_keys=True).encode()).hexdigest()
        key = row.id, cluster.id, nodes
        if key in self._no_plan:
            return False
        snapshot, profile = snapshot_from_mapping(cluster.snapshot), profile_from_mapping(cluster.profile)
        try:
            job = parse_any_job(row.spec)
            if isinstance(job, ScriptSpec) or not job.model.is_known:
                check_place(job.limits.device_types, snapshot)
            else:
                await self._planner.plan(job, snapshot, profile)
        except BadInput as error:
            log.info("job of a lost cluster does not fit here", job=row.id, cluster=cluster.id, why=error.detail)
            self._no_plan.add(key)
            return False
        return True

    async def _give(self, row: JobRow, cluster_id: str) -> None:
        lost, status, now_s = row.cluster_id, jobs.status_of(row), time.time()
        reason = f"cluster {lost} has not been heard of for long; waits for cluster {cluster_id}"
        state = status.state if status.state is JobState.QUEUED else JobState.WAITING
        async with self._database.write() as session:
            if await journal.has_begun(session, row.id):
                reason += ", which goes on from what the object store has"
            status = moved(status, state, "cluster_lost", reason, now_s)
            # It may have been heard of while a plan was searched for.
            gone = select(ClusterRow.id).where(ClusterRow.id == lost, self._gone()).with_for_update()
            if await session.scalar(gone) is None:
                return
            given = await jobs.put_status(session, row, status, cluster_id=cluster_id)
        if given:
            log.warning("job given to another cluster", job=row.id, lost=lost, cluster=cluster_id)
            self._bell.ring(CLUSTERS, JOBS, job_topic(row.id))


async def _orphans(session: AsyncSession, cluster_id: str, gone: ColumnElement[bool]) -> Sequence[JobRow]:
    """Jobs that may leave their clusters, which are `gone`."""
    stored = select(JournalRow.seq).where(JournalRow.job_id == JobRow.id, JournalRow.kind.in_(_STORED))
    query = (
        select(JobRow)
        .join(ClusterRow, ClusterRow.id == JobRow.cluster_id)
        .where(JobRow.state.in_(_LEAVE), ClusterRow.id != cluster_id, gone)
        .where(~journal.begun() | stored.exists())
        .order_by(JobRow.id)
    )
    return (await session.scalars(query)).all()
