"""Jobs that wait for one cluster go to another one that has idle nodes for them, without a user's hand.

A job belongs to one cluster at any moment, and only that one can start it. So it goes only where it has not begun, and
its cluster was never told that it may use a node of it: nobody there can be starting it. Both clusters are held still
meanwhile, so neither gives it nodes, and no other one takes it.

Owns which jobs these are and the giving. What it would get there is `allot`'s, as if it had been submitted there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Text, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.allotment import Allotment, Contender, allot
from shoal_planner.fitting import Fitting, Known
from shoal_planner.profile import profile_from_mapping
from shoal_planner.script_spec import AnyJob
from shoal_recovery.journal import Entry, JobState, StateChanged
from shoal_service import clusters, jobs, journal, shares
from shoal_service.bell import CLUSTERS, JOBS, Bell, job_topic
from shoal_service.database import Database
from shoal_service.errors import DatabaseAway
from shoal_service.models import ClusterRow, JobRow, JournalRow, ShareRow
from shoal_service.queueing import SEEN
from shoal_service.scheduler import Seen, contender_of, seen_of
from shoal_service.standing import MOVED_CODE

log = structlog.get_logger()

_AT_LEAST_S = 5.0  # that it waits where it is: its own cluster may be about to give it nodes
_TRIED = 20  # at a time: plans are searched for


def takes(seen: Sequence[Contender], candidate: Contender, found: Sequence[Allotment]) -> bool:
    """Whether a cluster with the jobs `seen` can let the candidate begin now, on nodes that nobody there has or gets.
    `found` are the shares of all of them together."""
    shares_now = {job.id: job.share for job in seen}
    kept = all(shares_now[each.job] <= each.target for each in found if each.job in shares_now)
    return kept and any(each.job == candidate.id and each.grant for each in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A job of another cluster, as a contender here."""

    row: JobRow
    contender: Contender
    spec: AnyJob


class Moving:
    """`look` when a cluster is heard of."""

    def __init__(self, database: Database, bell: Bell, time_limit_s: float) -> None:
        self._database = database
        self._bell = bell
        self._limit_s = time_limit_s
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, dict[str, Known]] = {}
        self._tried: dict[str, dict[str, int]] = {}

    def look(self, cluster_id: str) -> None:
        """Beside the request that it is called from: a search for plans takes its time."""
        task = self._looking.get(cluster_id)
        if task is None or task.done():
            self._looking[cluster_id] = asyncio.create_task(self._look(cluster_id), name=f"moving-{cluster_id}")

    async def close(self) -> None:
        for task in self._looking.values():
            task.cancel()
        await asyncio.gather(*self._looking.values(), return_exceptions=True)

    async def _look(self, cluster_id: str) -> None:
        try:
            async with self._database.read() as session:
                cluster = await clusters.get(session, cluster_id)
                ids = await _elsewhere(session, cluster_id)
                seen = await seen_of(session, cluster) if ids else None
                if seen is None or not _idle(seen):
                    return
                rows = await jobs.of_ids(session, self._next(cluster_id, ids))
                waiting = [await _as_here(session, row) for row in rows]
            taken = await asyncio.to_thread(self._first, cluster, seen, waiting)
            if taken is not None:
                await self._move(taken, cluster_id, seen)
        except DatabaseAway:  # it is looked again when the lease is renewed
            log.warning("jobs that wait elsewhere are not known at present", cluster=cluster_id)

    def _next(self, cluster_id: str, ids: Sequence[str]) -> list[str]:
        """Those that were tried least often first, so that what fits nowhere is in nobody's way."""
        tried = self._tried.get(cluster_id, {})
        chosen = sorted(ids, key=lambda job: tried.get(job, 0))[:_TRIED]  # a stable order: else as they came
        self._tried[cluster_id] = {job: tried.get(job, 0) + (job in chosen) for job in ids}
        return chosen

    def _first(self, cluster: ClusterRow, seen: Seen, waiting: Sequence[_Waiting]) -> _Waiting | None:
        """In a thread. The first that can begin here."""
        known, profile = self._known.setdefault(cluster.id, {}), profile_from_mapping(cluster.profile)
        specs = {**seen.specs, **{each.row.id: each.spec for each in waiting}}
        fits = Fitting(specs, seen.snapshot, profile, known, self._limit_s)
        for each in sorted(waiting, key=lambda each: (-each.contender.priority, each.contender.created_at_s)):
            found = allot([*seen.contenders, each.contender], seen.snapshot.nodes, fits)
            if takes(seen.contenders, each.contender, found):
                return each
        return None

    async def _move(self, each: _Waiting, cluster_id: str, seen: Seen) -> None:
        before, now_s = each.row.cluster_id, time.time()
        reason = f"waited for cluster {before}; cluster {cluster_id} has idle nodes for it, and it waits there now"
        async with self._database.write() as session:
            both = select(ClusterRow).where(ClusterRow.id.in_((before, cluster_id))).order_by(ClusterRow.id)
            held = await session.scalars(both.with_for_update().execution_options(populate_existing=True))
            here = next(row for row in held.all() if row.id == cluster_id)
            row = await jobs.get(session, each.row.id, to_change=True)
            may = row.version == each.row.version and await _is_nowhere(session, row.id)
            if not may or not clusters.connected(here) or await seen_of(session, here) != seen:
                return
            said = StateChanged(state=JobState.QUEUED, code=MOVED_CODE, reason=reason)
            await journal.append(session, row, [Entry(seq=row.last_seq + 1, at_s=now_s, event=said)])
            row = await jobs.get(session, row.id)
            await jobs.put_status(session, row, jobs.status_of(row), cluster_id=cluster_id)
        log.info("job waits for another cluster", job=row.id, before=before, cluster=cluster_id)
        self._bell.ring(CLUSTERS, JOBS, job_topic(row.id))


def _idle(seen: Seen) -> bool:
    used = frozenset[str]().union(*(job.uses | job.share for job in seen.contenders))
    return any(node.id not in used and node.reclaim_at_s is None for node in seen.snapshot.nodes)


async def _elsewhere(session: AsyncSession, cluster_id: str) -> Sequence[str]:
    """Jobs that may leave the queues of other clusters, the first of each project first."""
    first = (ShareRow.priority.desc(), JobRow.created_at_s, JobRow.id)
    turn = func.row_number().over(partition_by=JobRow.project_id, order_by=first)
    query = select(JobRow.id).join(ShareRow, ShareRow.job_id == JobRow.id)
    waits = (JobRow.state == JobState.QUEUED.value, JobRow.wish == jobs.WISH_RUN, JobRow.cluster_id != cluster_id)
    long_ago_s = time.time() - _AT_LEAST_S
    just_moved = select(JournalRow.seq).where(JournalRow.job_id == JobRow.id, JournalRow.at_s > long_ago_s).exists()
    long = (JobRow.since_at_s < long_ago_s, ~just_moved)
    untold = (cast(ShareRow.nodes, Text) == "[]", cast(ShareRow.held, Text) == "[]", ShareRow.hold.is_(None))
    query = query.where(*waits, *long, *untold, ~journal.begun()).order_by(turn, *first).limit(SEEN)
    return (await session.scalars(query)).all()


async def _is_nowhere(session: AsyncSession, job_id: str) -> bool:
    share = await shares.of_job(session, job_id)
    return share.nodes == [] and share.held == []


async def _as_here(session: AsyncSession, row: JobRow) -> _Waiting:
    """As if it had been submitted here."""
    contender, spec = await contender_of(session, row, await shares.of_job(session, row.id), frozenset())
    return _Waiting(row=row, contender=contender, spec=spec)
