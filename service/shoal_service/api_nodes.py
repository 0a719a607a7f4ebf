"""REST for the nodes of all clusters: what they are, who uses them, and drills with them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service import clusters, drills, jobs, journal, signs
from shoal_service.access import Principal
from shoal_service.bell import CLUSTERS
from shoal_service.bodies import Preemption
from shoal_service.cursors import Cursor, Limit, page_after
from shoal_service.gate import Caller
from shoal_service.measured import MeasuredNodes
from shoal_service.once import Repeatable
from shoal_service.problems import documented
from shoal_service.services import Deps, Services
from shoal_service.shapes_clusters import Drill, Nodes
from shoal_service.signs import Sign

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])
_Place = tuple[str, str]  # a cluster and a node of it


@router.get("", responses=documented(ok=Nodes))
async def list_nodes(
    deps: Deps,
    caller: Caller,
    limit: Limit = 200,
    cursor: Cursor = None,
    cluster_id: Annotated[str | None, Query(max_length=80, description="Only those of this cluster.")] = None,
) -> Response:
    """The nodes of every cluster that came to us, which jobs' plans use them (of those that you may see), and
    what of them was `measured`, each figure with its source; `reclaim_at_s` while a drill, or Ray, says that a
    node goes away; `heard_at` is when there was a sign of life of it, in heartbeats that a job's supervisor
    listens to (`heard_by` processes) or, where no job has the node, in Ray's list of nodes (`ray`). Not
    connected: as last seen. By cluster and name; `next_cursor` is null on the last page, and a page ends before
    it is too large for an answer."""
    found = [node for node in await all_nodes(deps, caller) if cluster_id in (None, node["cluster_id"])]
    return page_after(found, _place, limit, cursor)


async def all_nodes(deps: Services, caller: Principal) -> list[dict[str, Any]]:
    """What `list_nodes` has in its pages."""
    async with deps.database.read() as session:
        rows = await clusters.all_clusters(session)
        users = await _users(session, caller.projects())
    figures = {row.id: MeasuredNodes(row.snapshot, row.profile) for row in rows}
    ends_at_s = {
        (row.id, drill["node"]): drill["ends_at_s"] for row in rows for drill in drills.current(row, time.time())
    }
    items = [
        {
            **node,
            "reclaim_at_s": ends_at_s.get((row.id, node["id"]), node.get("reclaim_at_s")),
            "measured": figures[row.id].of(node["id"]),
            "cluster_id": row.id,
            "connected": clusters.connected(row),
            "seen_at": jobs.rfc3339(row.updated_at_s),
            **_heard(signs.sign(row.signs, node["id"])),
            "jobs": users.get((row.id, node["id"]), []),
        }
        for row in rows
        for node in row.snapshot["nodes"]
    ]
    return sorted(items, key=_place)


@router.post("/{node_id}/preempt", status_code=202, responses=documented(404, 409, accepted=Drill))
async def preempt_node(
    deps: Deps,
    caller: Caller,
    once: Repeatable,
    node_id: Annotated[str, Path(max_length=200)],
    wanted: Preemption | None = None,
) -> Response:
    """A drill: tells a node that it goes away, as its cloud would. Jobs leave it before that; nothing ends it, and when
    its time is well over it may be used again."""
    wanted = wanted or Preemption()
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        drill = await drills.announce(session, node_id, wanted.cluster_id, wanted.notice_s, caller.owner)
        answer = await once.end(session, drill["id"], drills.resource(drill, drill["cluster_id"]), 202)
    deps.bell.ring(CLUSTERS)
    return answer


async def _users(session: AsyncSession, projects: frozenset[str] | None) -> Mapping[_Place, list[str]]:
    """(cluster, node) to the ids of jobs of these projects (None: of all) whose current plan, or newest workers, have a
    place there."""
    users: dict[_Place, list[str]] = {}
    for row in await clusters.active_jobs(session):
        if projects is not None and row.project_id not in projects:
            continue
        assert row.plan_seq is not None and row.cluster_id is not None
        entries = await journal.entries_after(session, row.id, row.plan_seq - 1, 1)
        for node in sorted(journal.plan_nodes(entries[0].payload["plan"])):
            users.setdefault((row.cluster_id, node), []).append(row.id)
    for row in await clusters.active_scripts(session):
        if projects is not None and row.project_id not in projects:
            continue
        started = await journal.newest(session, row.id, 1, (WorkersStarted.kind,))
        for node in sorted(set(started[0].payload["nodes"] if started else ())):
            users.setdefault((str(row.cluster_id), node), []).append(row.id)
    return users


def _heard(found: Sign | None) -> dict[str, str | None]:
    if found is None:
        return {"heard_at": None, "heard_by": None}
    return {"heard_at": jobs.rfc3339(found.at_s), "heard_by": found.by}


def _place(node: Mapping[str, Any]) -> _Place:
    return node["cluster_id"], node["id"]
