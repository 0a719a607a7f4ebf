"""Shares each cluster out among its jobs: reads how things stand, lets `allot` decide, writes what jobs are told.

It looks whenever the connector of a cluster asks for its wishes: there is nobody else who could obey. Several replicas
may look at once; what was decided on figures that have changed meanwhile is dropped. Owns no rule of who gets what.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.allotment import Allotment, Contender, allot
from shoal_planner.cluster import ClusterSnapshot, snapshot_from_mapping
from shoal_planner.fitting import Fitting, Known
from shoal_planner.profile import profile_from_mapping
from shoal_planner.script_spec import AnyJob, parse_any_job
from shoal_recovery.journal import AT_REST, JobState
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service import clusters, drills, jobs, journal, pools, shares
from shoal_service.bell import CLUSTERS, JOBS, Bell, job_topic
from shoal_service.database import Database
from shoal_service.models import ClusterRow, JobRow, ShareRow
from shoal_service.standing import WAITING_CODES, Standing, standing_of

log = structlog.get_logger()

_LEAVES_AT_S = 1.0  # of a node that is given back: always the same, so that nothing is decided anew because of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that a decision depends on; equal ones lead to the same one."""

    contenders: tuple[Contender, ...]
    snapshot: ClusterSnapshot
    specs: Mapping[str, AnyJob]
    rented: Mapping[str, str]  # what was asked of pools for it last, or came of it


class Scheduler:
    """`decided` is told how many seconds each decision took."""

    def __init__(
        self,
        database: Database,
        bell: Bell,
        time_limit_s: float,
        decided: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._database = database
        self._bell = bell
        self._limit_s = time_limit_s
        self._decided = decided
        self._locks: dict[str, asyncio.Lock] = {}
        self._settled: dict[str, Seen] = {}
        self._known: dict[str, dict[str, Known]] = {}

    async def look(self, cluster_id: str) -> None:
        """Returns when the shares of this cluster are as they should be now."""
        async with self._locks.setdefault(cluster_id, asyncio.Lock()):
            async with self._database.read() as session:
                cluster = await clusters.get(session, cluster_id)
                seen = await seen_of(session, cluster)
            if seen == self._settled.get(cluster_id):
                return
            began_s = time.monotonic()
            found = await asyncio.to_thread(self._decide, cluster, seen)
            self._decided(time.monotonic() - began_s)
            told = await self._write(cluster_id, seen, found)
            if told is None:
                return
            self._settled[cluster_id] = seen
            if told:
                self._settled.pop(cluster_id)  # what was told changes what is seen
                self._bell.ring(CLUSTERS, JOBS, *map(job_topic, told))

    def _decide(self, cluster: ClusterRow, seen: Seen) -> tuple[Allotment, ...]:
        """In a thread: plans are searched for. A job that is alone has all there is and will be, and no plan need be
        known."""
        if len(seen.contenders) == 1 and not _has_caps(seen.contenders[0]):
            (alone,) = seen.contenders
            everything = frozenset(node.id for node in seen.snapshot.nodes)
            return (Allotment(job=alone.id, target=everything, grant=everything if alone.wants else alone.share),)
        known = self._known.setdefault(cluster.id, {})
        fits = Fitting(seen.specs, seen.snapshot, profile_from_mapping(cluster.profile), known, self._limit_s)
        return allot(seen.contenders, seen.snapshot.nodes, fits)

    async def _write(self, cluster_id: str, seen: Seen, found: Sequence[Allotment]) -> list[str] | None:
        """The jobs that were told something; None where nothing holds any more that this was decided on."""
        async with self._database.write() as session:
            locked = select(ClusterRow).where(ClusterRow.id == cluster_id).with_for_update()
            cluster = (await session.scalars(locked.execution_options(populate_existing=True))).one()
            if await seen_of(session, cluster) != seen:
                return None
            rows = {row.id: row for row in await jobs.of_ids(session, list(seen.specs))}
            told = await shares.of_jobs(session, list(rows))
            alone = len(seen.contenders) == 1 and not _has_caps(seen.contenders[0])
            by_id = {contender.id: contender for contender in seen.contenders}
            news = []
            for each in found:
                standing = standing_of(each, by_id, found, cluster_id)
                if rented := seen.rented.get(each.job):
                    standing = dataclasses.replace(standing, waits=f"{standing.waits}; {rented}")
                if await _tell(session, rows[each.job], told[each.job], each, standing, alone=alone):
                    news.append(each.job)
        return news


async def _tell(
    session: AsyncSession, row: JobRow, share: ShareRow, found: Allotment, standing: Standing, *, alone: bool
) -> bool:
    """Whether that was news to anybody."""
    before = (share.code, share.position, share.hold)
    nodes = None if alone and row.wish == jobs.WISH_RUN and share.hold is None else sorted(found.grant)
    kept = share.nodes is None and row.wish != jobs.WISH_RUN  # it rests soon, and then it has nothing
    news = not kept and shares.tell(share, nodes, standing.told)
    share.code, share.position = standing.code, found.position
    if found.preempted_by is not None and share.hold is None:
        share.hold, share.hold_words = shares.PREEMPTED, standing.held
        log.info("job makes room", job=row.id, needed_by=found.preempted_by)
    elif found.preempted_by is None and share.hold == shares.PREEMPTED:  # who needed its nodes does so no more
        share.hold, share.hold_words = None, ""
    await session.flush()
    if row.state == JobState.QUEUED and row.wish == jobs.WISH_RUN and (said := _said(row, found, standing)):
        code, reason = said
        if (row.state_code, row.reason) != said:
            status = dataclasses.replace(jobs.status_of(row), state_code=code, reason=reason)
            news |= await jobs.put_status(session, row, status)
    return news or before != (share.code, share.position, share.hold)


def _said(row: JobRow, found: Allotment, standing: Standing) -> tuple[str, str] | None:
    """Code and reason of a job in the queue; None where what it says of itself holds. How it comes that it waits again
    stays the beginning of its reason."""
    preempted = row.state_code == shares.PREEMPTED
    begin = row.reason.partition(". ")[0] + ". " if preempted else ""
    if not found.grant:
        return (shares.PREEMPTED if preempted else standing.code), f"{begin}{standing.waits}"
    if row.state_code not in WAITING_CODES:
        return None
    return "submitted", f"{begin}begins on {len(found.grant)} nodes of cluster {row.cluster_id}"


async def seen_of(session: AsyncSession, cluster: ClusterRow) -> Seen:
    """How things stand there now."""
    rows = await clusters.scheduled(session, cluster.id)
    told = await shares.of_jobs(session, [row.id for row in rows])
    ends_at_s = dict.fromkeys(await pools.leaving(session, cluster.id), _LEAVES_AT_S)
    ends_at_s |= {drill["node"]: drill["ends_at_s"] for drill in drills.current(cluster, time.time())}
    snapshot = snapshot_from_mapping(cluster.snapshot)
    nodes = tuple(
        dataclasses.replace(node, reclaim_at_s=ends_at_s.get(node.id, node.reclaim_at_s)) for node in snapshot.nodes
    )
    everything = frozenset(node.id for node in nodes)
    found = [await contender_of(session, row, told[row.id], everything) for row in rows]
    return Seen(
        contenders=tuple(contender for contender, _ in found),
        snapshot=dataclasses.replace(snapshot, nodes=nodes),
        specs={contender.id: spec for contender, spec in found},
        rented=await pools.newest_of_jobs(session, [each.id for each, spec in found if shares.may_rent(spec)]),
    )


async def contender_of(
    session: AsyncSession, row: JobRow, share: ShareRow, everything: frozenset[str]
) -> tuple[Contender, AnyJob]:
    spec = parse_any_job(row.spec)
    limits, begun = spec.limits, row.state != JobState.QUEUED
    told = everything if share.nodes is None else everything.intersection(share.nodes)
    contender = Contender(
        id=row.id,
        project=project_of(row),
        priority=share.priority,
        created_at_s=row.created_at_s,
        share=told,
        uses=told | (everything if share.held is None else everything.intersection(share.held)),
        plan=await planned_nodes(session, row) & everything,
        begun=begun,
        wants=row.wish == jobs.WISH_RUN and row.state not in (*AT_REST, JobState.CANCELLING),
        yields=begun and jobs.has_store(row),
        device_types=limits.device_types,
        max_devices=limits.max_devices,
        max_price_per_hour=limits.max_price_per_hour,
    )
    return contender, spec


def project_of(row: JobRow) -> str:
    """Whose fair share its nodes count to."""
    return row.project_id


def _has_caps(job: Contender) -> bool:
    return job.max_devices is not None or job.max_price_per_hour is not None


async def planned_nodes(session: AsyncSession, row: JobRow) -> frozenset[str]:
    """The nodes that its newest plan, or its newest workers, have a place on."""
    if row.state == JobState.QUEUED:
        return frozenset()
    if jobs.is_script(row):
        started = await journal.newest(session, row.id, 1, (WorkersStarted.kind,))
        return frozenset(started[0].payload["nodes"] if started else ())
    if row.plan_seq is None:
        return frozenset()
    (entry,) = await journal.entries_after(session, row.id, row.plan_seq - 1, 1)
    return frozenset(journal.plan_nodes(entry.payload["plan"]))
