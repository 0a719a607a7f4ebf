"""REST for pools: what nodes could be had of, what is asked of each, and what came of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from shoal_service import pools
from shoal_service.answers import page
from shoal_service.cursors import Cursor, Limit, page_after
from shoal_service.gate import Caller
from shoal_service.models import JobRow
from shoal_service.models_pools import PoolEventRow
from shoal_service.problems import documented
from shoal_service.services import Deps
from shoal_service.shapes import Page
from shoal_service.shapes_pools import Pool, PoolEvents

router = APIRouter(prefix="/v1", tags=["nodes"])
_PAGE = 1000


@router.get("/pools", responses=documented(), response_model=Page[Pool])
async def list_pools(deps: Deps, limit: Limit = 200, cursor: Cursor = None) -> Response:
    """Pools that clusters can get nodes of: how many are there, asked for and starting, what one costs and who says so,
    why it gives no more. By cluster and name."""
    async with deps.database.read() as session:
        found = [pools.resource(row) for row in await pools.every(session) if pools.is_fresh(row)]
    return page_after(found, lambda each: (each["cluster_id"], each["name"]), limit, cursor)


@router.get("/pool-events", responses=documented(), response_model=PoolEvents)
async def list_pool_events(
    deps: Deps,
    caller: Caller,
    cluster_id: Annotated[str | None, Query(max_length=80, description="Only of this cluster.")] = None,
    job_id: Annotated[str | None, Query(max_length=40, description="Only for this job.")] = None,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=_PAGE)] = 200,
) -> Response:
    """What was asked of pools and what came of it, oldest first, after number `after`: requests, shortages, nodes that
    came, went and were given back, each with a reason. Of jobs of other projects you see that, but not which."""
    projects = caller.projects()
    query = pools.events_for(projects).where(PoolEventRow.id > after)
    if job_id is not None:
        query = query.where(PoolEventRow.job_id == job_id)
        if projects is not None:
            query = query.where(JobRow.project_id.in_(projects))
    if cluster_id is not None:
        query = query.where(PoolEventRow.cluster_id == cluster_id)
    async with deps.database.read() as session:
        rows = (await session.execute(query.order_by(PoolEventRow.id).limit(limit + 1))).all()
    items = [pools.event_resource(row, shown=projects is None or project in projects) for row, project in rows[:limit]]

    def rest(kept: int) -> dict[str, Any]:
        return {"next_after": rows[kept - 1][0].id if kept else after, "more": len(rows) > kept}

    return page(items, rest)
