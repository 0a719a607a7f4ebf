"""Pools in the database: what connectors report of them, what they are told to do, and what became of it. What is to be
asked of a pool is decided by `shoal_planner.provisioning`, whenever `renting` looks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.cluster import Node
from shoal_planner.errors import InvalidField
from shoal_planner.provisioning import Act, PoolMemory, PoolSeen
from shoal_planner.rented_pools import RentedPool, parse_pools
from shoal_service import jobs, rentals
from shoal_service.models import JobRow
from shoal_service.models_pools import PoolEventRow, PoolRow
from shoal_service.shapes_pools import Pool, PoolEvent, PoolPrice, WishedPool

# A connector tells of its pools with each lease; what it does not tell of for so long is not to be asked for anything.
FRESH_S = 60.0
_TOLD_FOR_S = 3600.0
_KEPT_S = 90 * 86400.0
_COUNTERS: Mapping[str, str] = {
    "pool_asked": "num_asked",
    "nodes_came": "num_came",
    "pool_short": "num_short",
    "node_released": "num_released",
}
# Marks of a job's timeline.
WORDS: Mapping[str, str] = {
    "pool_asked": "asked",
    "pool_short": "short",
    "pool_withdrawn": "withdrawn",
    "nodes_came": "came",
    "nodes_went": "went",
    "node_released": "returned",
    "nothing_rented": "none",
}
_MOST_WORDS = 200


def check_report(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidField."""
    if reports:
        parse_pools([report["pool"] for report in reports])
    for index, report in enumerate(reports):
        if report["starting"] < 0:
            raise InvalidField(f"pools[{index}].starting", report["starting"], "must not be less than 0")


async def take_report(session: AsyncSession, cluster_id: str, reports: Sequence[dict[str, Any]]) -> None:
    """All pools that the cluster has now, as its connector sees them."""
    rows = {row.name: row for row in await of_cluster(session, cluster_id)}
    now_s = time.time()
    for report in reports:
        name = report["pool"]["name"]
        row = rows.pop(name, None)
        if row is None:
            counts = dict.fromkeys(_COUNTERS.values(), 0)
            session.add(PoolRow(cluster_id=cluster_id, name=name, about=report, seen_at_s=now_s, **counts))
        else:
            row.about, row.seen_at_s = report, now_s
    for gone in rows.values():
        await session.delete(gone)
        await rentals.end_of(session, cluster_id, gone.name, now_s)
    await session.flush()


async def of_cluster(session: AsyncSession, cluster_id: str) -> Sequence[PoolRow]:
    """In the order of names."""
    query = select(PoolRow).where(PoolRow.cluster_id == cluster_id).order_by(PoolRow.name)
    return (await session.scalars(query.execution_options(populate_existing=True))).all()


async def every(session: AsyncSession) -> Sequence[PoolRow]:
    return (await session.scalars(select(PoolRow).order_by(PoolRow.cluster_id, PoolRow.name))).all()


def is_fresh(row: PoolRow) -> bool:
    return row.seen_at_s > time.time() - FRESH_S


def pool(row: PoolRow) -> RentedPool:
    (found,) = parse_pools([row.about["pool"]])
    return found


def node_of(row: PoolRow) -> Node:
    """What each is like, at the price that holds now."""
    return dataclasses.replace(pool(row).node, price_per_hour=price(row))


def price(row: PoolRow) -> float:
    return row.price_per_hour if _is_told(row) and row.price_per_hour else pool(row).node.price_per_hour


def _is_told(row: PoolRow) -> bool:
    """Whether a cloud's own account of the price holds still."""
    return row.price_at_s is not None and row.price_at_s > time.time() - _TOLD_FOR_S


def seen(row: PoolRow) -> PoolSeen:
    known = pool(row)
    return PoolSeen(
        name=row.name,
        least=known.least,
        most=known.most,
        price_per_hour=price(row),
        zones=known.zones,
        nodes=tuple(row.about["nodes"]),
        starting=row.about["starting"],
        problem=row.about["problem"],
        said=row.about["said"],
        unreached=unreached(row),
        offered=row.not_offered is None,
    )


def unreached(row: PoolRow) -> str | None:
    """Why nobody can ask it now. Reports that were kept by an older version do not say."""
    return row.about.get("unreached")


def memory(row: PoolRow) -> PoolMemory | None:
    if row.memory is None:
        return None
    kept = dict(row.memory)
    lists = {name: tuple(kept[name]) for name in ("known", "leaving")}
    return PoolMemory(**{**kept, **lists, "unused": tuple((node, since_s) for node, since_s in kept["unused"])})


def remember(row: PoolRow, new: PoolMemory) -> bool:
    """Whether its connector has to hear of it."""
    before = memory(row)
    if before != new:
        # Replicas of an older version do not know all fields, and none is missed that is not set.
        row.memory = {name: value for name, value in dataclasses.asdict(new).items() if value is not None}
    return before is None or (before.target, before.leaving) != (new.target, new.leaving)


def tell(session: AsyncSession, row: PoolRow, act: Act, job_id: str | None) -> None:
    if counter := _COUNTERS.get(act.kind):
        setattr(row, counter, getattr(row, counter) + act.count)
    note(session, row.cluster_id, job_id, act)


def note(session: AsyncSession, cluster_id: str, job_id: str | None, act: Act) -> None:
    session.add(
        PoolEventRow(
            cluster_id=cluster_id,
            job_id=job_id,
            pool=act.pool,
            at_s=time.time(),
            kind=act.kind,
            count=act.count,
            reason=act.reason,
            nodes=list(act.nodes),
        )
    )


async def newest_events(session: AsyncSession, projects: frozenset[str] | None, limit: int) -> list[PoolEvent]:
    """As whoever sees these projects (None: all) may see them, newest first."""
    query = events_for(projects).order_by(PoolEventRow.id.desc()).limit(limit)
    found = (await session.execute(query)).all()
    return [event_resource(row, shown=projects is None or project in projects) for row, project in found]


async def newest_of_jobs(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, str]:
    """The reason of the newest event of each of these jobs that has one."""
    if not job_ids:
        return {}
    newest = select(func.max(PoolEventRow.id)).where(PoolEventRow.job_id.in_(job_ids)).group_by(PoolEventRow.job_id)
    rows = await session.scalars(select(PoolEventRow).where(PoolEventRow.id.in_(newest)))
    return {str(row.job_id): row.reason for row in rows}


async def words_of_job(session: AsyncSession, job_id: str) -> list[tuple[float, str, str]]:
    """The newest of what was rented for it, in order: when, a word for a mark, and the reason."""
    of_job = select(PoolEventRow).where(PoolEventRow.job_id == job_id)
    rows = (await session.scalars(of_job.order_by(PoolEventRow.id.desc()).limit(_MOST_WORDS))).all()
    return [(row.at_s, WORDS[row.kind], row.reason) for row in reversed(rows)]


def events_for(projects: frozenset[str] | None) -> Select[PoolEventRow, str]:
    """Events with the project of their job. Of one of other projects all are seen but why it gets nothing: that tells
    what it is like."""
    query = select(PoolEventRow, JobRow.project_id).outerjoin(JobRow, JobRow.id == PoolEventRow.job_id)
    if projects is None:
        return query
    return query.where(or_(PoolEventRow.kind != "nothing_rented", JobRow.project_id.in_(projects)))


async def leaving(session: AsyncSession, cluster_id: str) -> frozenset[str]:
    """Nodes that are given back, and may be there for a while."""
    rows = await of_cluster(session, cluster_id)
    return frozenset(node for row in rows if (kept := memory(row)) is not None for node in kept.leaving)


async def forget_old(session: AsyncSession) -> None:
    before_s = time.time() - _KEPT_S
    await session.execute(delete(PoolEventRow).where(PoolEventRow.at_s < before_s))
    await rentals.forget_nobodys(session, before_s)


async def wishes(session: AsyncSession, cluster_id: str) -> list[WishedPool] | None:
    """For the connector; None where there is nothing to tell yet."""
    found = [(row.name, kept) for row in await of_cluster(session, cluster_id) if (kept := memory(row)) is not None]
    if not found:
        return None
    return [{"name": name, "target": kept.target, "release": list(kept.leaving)} for name, kept in found]


def resource(row: PoolRow) -> Pool:
    """As REST shows it. `problem` is why it gives no more now, or cannot be asked; `asked_again_at` when it is asked
    again, where it was short."""
    known, kept, now_s = pool(row), memory(row) or PoolMemory(), time.time()
    away = unreached(row) and f"cannot be reached now: {unreached(row)}"
    paused = kept.not_before_s > now_s
    return {
        "cluster_id": row.cluster_id,
        "name": row.name,
        "device": known.node.device,
        "devices": known.node.devices,
        "spot": known.node.spot,
        "zones": list(known.zones) or [known.node.zone],
        "instance_type": known.instance_type,
        "min": known.least,
        "max": known.most,
        "nodes": list(row.about["nodes"]),
        "leaving": list(kept.leaving),
        "starting": row.about["starting"],
        "target": kept.target,
        "problem": row.not_offered or away or row.about["problem"] or row.about["said"],
        "asked_again_at": jobs.rfc3339(kept.not_before_s) if paused else None,
        **price_resource(row),
        "counts": {
            "num_asked": row.num_asked,
            "num_came": row.num_came,
            "num_short": row.num_short,
            "num_released": row.num_released,
        },
        "seen_at": jobs.rfc3339(row.seen_at_s),
    }


def price_resource(row: PoolRow) -> PoolPrice:
    told_at_s = row.price_at_s if _is_told(row) else None
    return {
        "price_per_hour": price(row),
        "source": "pools file" if told_at_s is None else str(row.price_source),
        "stated_at": jobs.rfc3339(row.seen_at_s if told_at_s is None else told_at_s),
    }


def price_words(row: PoolRow) -> str:
    """Who states what one of its nodes costs."""
    return f"pool {row.name} of cluster {row.cluster_id}: {price_resource(row)['source']}"


def event_resource(row: PoolEventRow, *, shown: bool = True) -> PoolEvent:
    """`shown`: whether whoever asks may see the job."""
    return {
        "id": row.id,
        "at": jobs.rfc3339(row.at_s),
        "at_s": row.at_s,
        "cluster_id": row.cluster_id,
        "job_id": row.job_id if shown else None,
        "pool": row.pool,
        "kind": row.kind,
        "count": row.count,
        "reason": row.reason,
        "nodes": row.nodes,
    }
