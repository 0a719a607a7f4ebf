"""Clusters that come to us: leases of their connectors, what they consist of, and what they are wished to run."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import AT_REST, JobState
from shoal_service import jobs, journal, pools, queueing, shares, signs, storages
from shoal_service.errors import Conflict, NotFound
from shoal_service.models import ClusterRow, JobRow
from shoal_service.shapes_clusters import Cluster
from shoal_service.shapes_jobs import ClusterOfJob, JobProblem, WishedDrill, WishedJob, Wishes, WishOfControl

CLUSTER_SILENT = "cluster_silent"
_AT_REST = tuple(state.value for state in AT_REST)
_OPEN = tuple(state.value for state in JobState if state not in AT_REST)
_BEGUN = tuple(state for state in _OPEN if state != JobState.QUEUED.value)


async def renew(
    session: AsyncSession,
    cluster_id: str,
    *,
    holder: str,
    lease_s: float,
    snapshot: dict[str, Any],
    profile: dict[str, Any],
    fault_tolerant_head: bool | None,
    ages_s: Mapping[str, tuple[float, str]] | None = None,
) -> ClusterRow:
    """Takes or renews the lease. `ages_s`: by node, for how long nothing was heard of it, and by whom. Raises Conflict
    while another holder's lasts."""
    now = time.time()
    row = await session.get(ClusterRow, cluster_id, populate_existing=True, with_for_update=True)
    if row is not None:
        check_holder(row, holder, now)
    else:
        row = ClusterRow(id=cluster_id)
        session.add(row)
    row.holder, row.lease_until_s, row.updated_at_s = holder, now + lease_s, now
    row.snapshot, row.profile, row.fault_tolerant_head = snapshot, profile, fault_tolerant_head
    row.signs = signs.taken(row.signs, ages_s or {}, now)
    try:
        await session.flush()
    except IntegrityError as error:
        raise Conflict("lease_held", f"cluster {cluster_id} has come through another connector just now") from error
    return row


def check_holder(row: ClusterRow, holder: str, now: float) -> None:
    if row.holder != holder and row.lease_until_s > now:
        raise Conflict(
            "lease_held",
            f"holder = {holder!r}: {row.holder!r} speaks for cluster {row.id} until {jobs.rfc3339(row.lease_until_s)}",
            holder=row.holder,
            lease_until=jobs.rfc3339(row.lease_until_s),
        )


async def get(session: AsyncSession, cluster_id: str) -> ClusterRow:
    """Raises NotFound."""
    row = await session.get(ClusterRow, cluster_id, populate_existing=True)
    if row is None:
        raise NotFound("cluster_not_found", f"cluster_id = {cluster_id!r}: there is no such cluster", "cluster_id")
    return row


async def all_clusters(session: AsyncSession) -> Sequence[ClusterRow]:
    return (await session.scalars(select(ClusterRow).order_by(ClusterRow.id))).all()


def connected(row: ClusterRow) -> bool:
    return row.lease_until_s > time.time()


async def adopt_waiting(session: AsyncSession, cluster_id: str) -> list[str]:
    """Gives every job that waits for any cluster to this one; returns their ids."""
    query = select(JobRow.id).where(JobRow.cluster_id.is_(None), JobRow.state == JobState.QUEUED.value)
    waiting = list((await session.scalars(query)).all())
    if waiting:
        await session.execute(
            update(JobRow)
            .where(JobRow.id.in_(waiting), JobRow.cluster_id.is_(None), JobRow.state == JobState.QUEUED.value)
            .values(
                cluster_id=cluster_id,
                version=JobRow.version + 1,
                updated_at_s=time.time(),
                state_code="submitted",
                reason=f"waits for cluster {cluster_id}",
            )
        )
    return waiting


async def scheduled(session: AsyncSession, cluster_id: str, waiting: Select[str] | None = None) -> Sequence[JobRow]:
    """All jobs of this cluster that have begun and do not rest, and of those that wait the ones whose turn comes
    first, or these `waiting` ones, by id."""
    mine = select(JobRow).where(JobRow.cluster_id == cluster_id)
    begun = await session.scalars(mine.where(JobRow.state.not_in((*_AT_REST, JobState.QUEUED.value))))
    chosen = queueing.in_turn(cluster_id) if waiting is None else waiting
    queued = await session.scalars(select(JobRow).where(JobRow.id.in_(chosen)))
    return sorted([*begun.all(), *queued.all()], key=lambda row: row.id)


async def wishes(session: AsyncSession, cluster_id: str, drills: Sequence[WishedDrill]) -> Wishes:
    """All jobs of this cluster that have not ended and do not rest, these drills, and what is asked of its pools. The
    version depends on what is wished alone, not on progress."""
    rows = await scheduled(session, cluster_id)
    told = {job: shares.wish(share) for job, share in (await shares.of_jobs(session, [row.id for row in rows])).items()}
    specs = await storages.located_specs(session, rows)
    listed: list[WishedJob] = [
        {
            "id": row.id,
            "spec": specs[row.id],
            "wish": _wish(row, told[row.id]),
            "last_seq": row.last_seq,
            "saves": row.saves,
            **told[row.id],
        }
        for row in rows
    ]
    wanted = [(job["id"], job["wish"], job["saves"], job["share"]["version"]) for job in listed]
    asked = await pools.wishes(session, cluster_id)
    essence = json.dumps([wanted, [drill["id"] for drill in drills], asked])
    version = int.from_bytes(hashlib.sha256(essence.encode()).digest()[:6])
    return {"version": version, "jobs": listed, "drills": list(drills), "pools": asked}


def _wish(row: JobRow, told: WishOfControl) -> str:
    """A job that has to make room for another one rests for a while, whatever its user wants but its end."""
    return jobs.WISH_PAUSED if row.wish == jobs.WISH_RUN and told["why"] is not None else row.wish


async def active_jobs(session: AsyncSession) -> Sequence[JobRow]:
    """Jobs that run by a plan now."""
    query = select(JobRow).where(JobRow.state.in_(_BEGUN), JobRow.plan_seq.is_not(None))
    return (await session.scalars(query)).all()


async def active_scripts(session: AsyncSession) -> Sequence[JobRow]:
    """Jobs whose scripts run now, or are to."""
    rows = await session.scalars(select(JobRow).where(JobRow.state.in_(_BEGUN), JobRow.plan_seq.is_(None)))
    return [row for row in rows if jobs.is_script(row)]


def if_head_dies(row: ClusterRow) -> str:
    """For people. Folders on disks are named after the cluster, so only one of that name finds them."""
    if row.fault_tolerant_head is None:
        return "not known: its connector does not say what becomes of its jobs"
    if row.fault_tolerant_head:
        return "training goes on: what the head knows is kept outside of it, and it is there again when it comes back"
    return (
        f"the cluster ends with it: jobs go on on a cluster that connects as {row.id} again, from disks of its nodes "
        "that survived or from their object store, or on one of another name, from their object store alone; a job "
        "that has stored no step waits for the nodes that have its state"
    )


async def of_job(session: AsyncSession, job: JobRow) -> ClusterOfJob | None:
    """What there is to say of the cluster that has a job; `problem` where it is not heard of, and what comes of it."""
    row = None if job.cluster_id is None else await session.get(ClusterRow, job.cluster_id)
    if row is None:
        return None
    heard = jobs.rfc3339(row.updated_at_s)
    return {
        "id": row.id,
        "connected": connected(row),
        "heard_of_at": heard,
        "fault_tolerant_head": row.fault_tolerant_head,
        "if_head_dies": if_head_dies(row),
        "problem": None if connected(row) or job.state in _AT_REST else await _silence(session, job, row),
    }


async def silences(session: AsyncSession, found: Sequence[JobRow]) -> dict[str, JobProblem]:
    """By job, of those whose cluster is not heard of, and that do not rest. Only told: what they do is not known here,
    and nothing is done to them, so when the cluster is heard of again it is as if this had never been said."""
    wanted = {job.cluster_id for job in found if job.state not in _AT_REST}
    query = select(ClusterRow).where(ClusterRow.id.in_(wanted), ClusterRow.lease_until_s <= time.time())
    silent = {row.id: row for row in await session.scalars(query)}
    problems: dict[str, JobProblem] = {}
    for job in found:
        row = silent.get(job.cluster_id or "")
        if row is not None and job.state not in _AT_REST:
            reason = await _silence(session, job, row)
            problems[job.id] = {"code": CLUSTER_SILENT, "since": jobs.rfc3339(row.updated_at_s), "reason": reason}
    return problems


async def with_jobs_unheard(
    session: AsyncSession, projects: frozenset[str] | None, limit: int
) -> list[tuple[JobRow, JobProblem]]:
    """The newest jobs of these projects (None: all) whose clusters are not heard of, and what there is to say of it."""
    query = select(JobRow).join(ClusterRow, ClusterRow.id == JobRow.cluster_id)
    query = query.where(ClusterRow.lease_until_s <= time.time(), JobRow.state.in_(_OPEN))
    if projects is not None:
        query = query.where(JobRow.project_id.in_(projects))
    rows = (await session.scalars(query.order_by(JobRow.id.desc()).limit(limit))).all()
    problems = await silences(session, rows)
    return [(row, problems[row.id]) for row in rows if row.id in problems]


async def _silence(session: AsyncSession, job: JobRow, row: ClusterRow) -> str:
    _, stored = await journal.at_stake(session, job.id)
    what = f"cluster {row.id} has not been heard of since {jobs.rfc3339(row.updated_at_s)}"
    if job.wish == jobs.WISH_CANCELLED:
        return f"{what}; the job is cancelled once it is heard of again, or counts as lost"
    if not await journal.has_begun(session, job.id):
        return f"{what}; the job has not begun, and begins on whichever cluster can let it begin first"
    if row.fault_tolerant_head:
        what += "; training may well go on there"
    if stored is None:
        return f"{what}; no step of the job stands in an object store, so it waits for that cluster"
    stays = "if it stays away, the job goes on on the next one that connects and has a plan for it"
    return f"{what}; {stays}, from step {stored} or a newer one"


def resource(row: ClusterRow) -> Cluster:
    nodes = row.snapshot["nodes"]
    return {
        "id": row.id,
        "holder": row.holder,
        "connected": connected(row),
        "lease_until": jobs.rfc3339(row.lease_until_s),
        "updated_at": jobs.rfc3339(row.updated_at_s),
        "fault_tolerant_head": row.fault_tolerant_head,
        "if_head_dies": if_head_dies(row),
        "num_nodes": len(nodes),
        "num_devices": sum(node["devices"] for node in nodes),
    }
