"""REST: a job made from another one, a checkpoint now, the prices of what is connected, what jobs have cost, and the
drills that go on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.requests import Request
from starlette.responses import Response

from shoal_service import api_jobs, clusters, drills, jobs, people, pools, preconditions
from shoal_service.answers import page
from shoal_service.bell import CLUSTERS, JOBS, job_topic
from shoal_service.bodies import Overrides
from shoal_service.cursors import Cursor, Key, Limit, cursor_of, cut, page_after
from shoal_service.gate import Caller
from shoal_service.ledger import Spent, by_person, by_project
from shoal_service.models_pools import PoolRow
from shoal_service.once import Repeatable
from shoal_service.preconditions import IfMatch
from shoal_service.problems import documented
from shoal_service.services import Deps
from shoal_service.shapes import Page
from shoal_service.shapes_clusters import Drill, KeptDrill, Price
from shoal_service.shapes_jobs import DryRun, Job, Spending, SpentSums

router = APIRouter(prefix="/v1")


@router.post(
    "/jobs/{job_id}/clone", status_code=201, tags=["jobs"], responses=documented(400, 404, 409, created=Job, ok=DryRun)
)
async def clone_job(
    request: Request,
    deps: Deps,
    job_id: str,
    wanted: Overrides | None = None,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Response:
    """Submits the job again, as it was or with other values (`overrides`, merged into its spec field by field; null
    takes a field away), in its project. It begins anew, with none of the first one's steps; `dry_run` creates
    nothing."""
    wanted = wanted or Overrides()
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
    document = merged(row.spec, wanted.overrides)
    return await api_jobs.submitted(request, deps, row.project_id, document, idempotency_key, dry_run=wanted.dry_run)


@router.post(
    "/jobs/{job_id}/checkpoint",
    status_code=202,
    tags=["jobs"],
    responses=documented(404, 409, 412, accepted=Job),
)
async def checkpoint_job(deps: Deps, once: Repeatable, job_id: str, if_match: IfMatch = None) -> Response:
    """Wishes the newest step into the object store, while training goes on. The journal says which step that will be
    (`checkpoint_asked`), and when it stands there (`checkpoint_committed`)."""
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        preconditions.check(await jobs.get(session, job_id, to_change=True), if_match)
        row = await jobs.checkpoint(session, job_id)
        answer = await once.end(session, row.id, jobs.resource(row), 202)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    answer.headers["ETag"] = preconditions.etag(row)
    return answer


def merged(value: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """As a JSON merge patch (RFC 7396) says."""
    found = dict(value)
    for name, change in changes.items():
        if change is None:
            found.pop(name, None)
        elif isinstance(change, Mapping):
            before = found.get(name)
            found[name] = merged(before if isinstance(before, Mapping) else {}, change)
        else:
            found[name] = change
    return found


@router.get("/prices", tags=["nodes"], responses=documented(ok=Page[Price]))
async def list_prices(deps: Deps, limit: Limit = 200, cursor: Cursor = None) -> Response:
    """What nodes of each cluster cost an hour, by type, zone and market, as the clusters stated them last; null where
    nobody stated a price. `pool` names those of which more can be had; their price is that of one more, by their cloud
    (`source`) or else their file."""
    async with deps.database.read() as session:
        rows = await clusters.all_clusters(session)
        here = {row.id for row in rows if clusters.connected(row)}
        rented = [(row, row.cluster_id in here) for row in await pools.every(session) if pools.is_fresh(row)]
    items = []
    for row in rows:
        kinds: dict[tuple[str, int, str, bool, float], int] = {}
        for node in row.snapshot["nodes"]:
            price = float(node.get("price_per_hour") or 0.0)
            key = (node["device"], node["devices"], node.get("zone") or "", bool(node.get("spot")), price)
            kinds[key] = kinds.get(key, 0) + 1
        for (device, devices, zone, spot, price), count in sorted(kinds.items()):
            items.append(
                {
                    "cluster_id": row.id,
                    "connected": clusters.connected(row),
                    "pool": None,
                    "device": device,
                    "devices": devices,
                    "zone": zone,
                    "spot": spot,
                    "num_nodes": count,
                    "price_per_hour": price or None,
                    "price_per_device_hour": price / devices if price else None,
                    "source": "cluster",
                    "stated_at": jobs.rfc3339(row.updated_at_s),
                }
            )
    items += [_of_pool(row, connected) for row, connected in rented]
    return page_after(items, _pool, limit, cursor)


def _of_pool(row: PoolRow, connected: bool) -> dict[str, Any]:
    """What one more of its nodes would cost now."""
    node = pools.pool(row).node
    told = pools.price_resource(row)
    return {
        "cluster_id": row.cluster_id,
        "connected": connected,
        "pool": row.name,
        "device": node.device,
        "devices": node.devices,
        "zone": node.zone,
        "spot": node.spot,
        "num_nodes": len(row.about["nodes"]),
        "price_per_device_hour": told["price_per_hour"] / node.devices,
        **told,
    }


def _pool(price: Mapping[str, Any]) -> Key:
    names = ("cluster_id", "device", "devices", "zone", "spot")
    return (*(price[name] for name in names), price["price_per_hour"] or 0.0, price["pool"] or "")


@router.get("/spending", tags=["jobs"], responses=documented(ok=Spending), response_model=None)
async def get_spending(deps: Deps, caller: Caller) -> Spending:
    """What jobs of your projects have cost, in dollars, by project and by who created them, most first: of the newest
    `num_jobs`. `not_counted` older ones among the newest 200 are being added up: ask again. Nodes without a price are
    in no sum of money."""
    async with deps.database.read() as session:
        bills, missing = await deps.ledger.newest(session, caller.projects())
        persons = by_person(bills)
        names = await people.names(session, [each.of for each in persons])
    return {
        "num_jobs": len(bills),
        "not_counted": missing,
        "by_project": [{"project": each.of, **_sums(each)} for each in by_project(bills)],
        "by_person": [
            {"person": each.of or None, "name": names.get(each.of, each.of), **_sums(each)} for each in persons
        ],
    }


def _sums(spent: Spent) -> SpentSums:
    return {
        "num_jobs": spent.num_jobs,
        "usd": spent.usd,
        "usd_per_hour": spent.usd_per_hour,
        "unpriced_node_hours": spent.unpriced_node_hours,
    }


@router.get("/drills", tags=["nodes"], responses=documented(ok=Page[Drill]))
async def list_drills(deps: Deps, limit: Limit = 200, cursor: Cursor = None) -> Response:
    """Notices that users had given to nodes, and that still hold."""
    now_s = time.time()
    async with deps.database.read() as session:
        rows = await clusters.all_clusters(session)
    found = [drills.resource(drill, row.id) for row in rows for drill in drills.current(row, now_s)]
    return page_after(found, lambda each: (each["cluster_id"], each["id"]), limit, cursor)


@router.get("/drill-history", tags=["nodes"], responses=documented(ok=Page[KeptDrill]))
async def list_all_drills(
    deps: Deps, limit: Limit = 50, cursor: Annotated[str | None, cursor_of("drill")] = None
) -> Response:
    """All drills that were ever asked for, newest first: of which node, when, by whom, and whether its time has come.
    What came of one stands in the journals of the jobs that had the node (`node_noticed`, `notice_ended`)."""
    async with deps.database.read() as session:
        found = await drills.newest(session, limit + 1, cursor)
    shown, following = cut(found, limit, lambda row: row.id)

    def rest(kept: int) -> dict[str, Any]:
        return {"next_cursor": following if kept == len(shown) else shown[kept - 1].id}

    return page([drills.kept_resource(row) for row in shown], rest)
