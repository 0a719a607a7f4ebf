"""Drills: notices that a node is to go away, wished by a user. They stand with their cluster until it was told, and a
little longer, and are kept as what was asked for; what comes of one is in the journals of the jobs that it concerns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from shoal_service import clusters
from shoal_service.errors import Conflict, NotFound
from shoal_service.jobs import rfc3339
from shoal_service.models import ClusterRow
from shoal_service.models_drills import DrillRow
from shoal_service.shapes_clusters import Drill, KeptDrill
from shoal_service.shapes_jobs import WishedDrill

_TOLD_FOR_S = 60.0  # a connector that is being restarted hears of it, too


async def announce(
    session: AsyncSession, node: str, cluster_id: str | None, notice_s: float, created_by: str
) -> dict[str, Any]:
    """Wishes that this node is told that it goes away in `notice_s`, whatever was wished before. Raises NotFound and
    Conflict."""
    rows = (await session.scalars(select(ClusterRow).order_by(ClusterRow.id).with_for_update())).all()
    found = [row for row in rows if cluster_id in (None, row.id) and node in _nodes(row)]
    if not found:
        where = "no cluster" if cluster_id is None else f"cluster {cluster_id}"
        raise NotFound("node_not_found", f"node = {node!r}: {where} has such a node", "node")
    row = found[0]
    if len(found) > 1:
        owners = ", ".join(row.id for row in found)
        raise Conflict("node_ambiguous", f"node = {node!r}: {owners} have one of that name; say which (cluster_id)")
    if not clusters.connected(row):
        raise Conflict("cluster_not_connected", f"node = {node!r}: nobody speaks for cluster {row.id} now")
    now_s = time.time()
    drill = {"id": f"drill_{ULID()}", "node": node, "lead_s": notice_s, "ends_at_s": now_s + notice_s}
    row.drills = [*(one for one in current(row, now_s) if one["node"] != node), drill]
    times = {"at_s": now_s, "ends_at_s": now_s + notice_s}
    session.add(DrillRow(id=drill["id"], cluster_id=row.id, node=node, created_by=created_by, **times))
    return {"cluster_id": row.id, **drill}


async def newest(session: AsyncSession, limit: int, before: str | None = None) -> Sequence[DrillRow]:
    """All that were ever asked for, newest first, older than the one with the id `before`."""
    query = select(DrillRow).order_by(DrillRow.id.desc()).limit(limit)
    return (await session.scalars(query if before is None else query.where(DrillRow.id < before))).all()


def kept_resource(row: DrillRow) -> KeptDrill:
    told: dict[str, Any] = {
        "id": row.id,
        "node": row.node,
        "lead_s": row.ends_at_s - row.at_s,
        "ends_at_s": row.ends_at_s,
    }
    over = row.ends_at_s <= time.time()
    return {**resource(told, row.cluster_id), "at": rfc3339(row.at_s), "created_by": row.created_by, "over": over}


def current(row: ClusterRow, now_s: float) -> list[dict[str, Any]]:
    """Those that the cluster has to know of."""
    told_from_s = ((drill, drill["ends_at_s"] - drill["lead_s"]) for drill in row.drills or ())
    return [drill for drill, at_s in told_from_s if now_s < max(drill["ends_at_s"], at_s + _TOLD_FOR_S)]


def resource(drill: Mapping[str, Any], cluster_id: str) -> Drill:
    return {
        "id": drill["id"],
        "cluster_id": cluster_id,
        "node": drill["node"],
        "notice_s": drill["lead_s"],
        "ends_at": rfc3339(drill["ends_at_s"]),
    }


def wishes(row: ClusterRow) -> list[WishedDrill]:
    """As a connector hears of them: `left_s` from now on, by nobody's clock."""
    now_s = time.time()
    return [
        {"id": drill["id"], "node": drill["node"], "left_s": max(0.0, drill["ends_at_s"] - now_s)}
        for drill in current(row, now_s)
    ]


def _nodes(row: ClusterRow) -> set[str]:
    return {node["id"] for node in row.snapshot["nodes"]}
