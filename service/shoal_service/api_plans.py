"""REST: plan previews, health, and sign-in links."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import text

from shoal_planner.answers import plan_answer
from shoal_planner.cluster import ClusterSnapshot, parse_cluster, snapshot_from_mapping
from shoal_planner.errors import InvalidField
from shoal_planner.profile import Profile, profile_from_mapping
from shoal_service import clusters, jobs
from shoal_service.bodies import PlanRequest
from shoal_service.errors import Conflict, invalid_field
from shoal_service.gate import Caller
from shoal_service.problems import documented
from shoal_service.services import Deps, Services
from shoal_service.shapes import Plan
from shoal_service.shapes_people import Health, LoginLink
from shoal_service.submission import read_job

router = APIRouter()


@router.post("/v1/plans", tags=["plans"], responses=documented(400, 409, ok=Plan), response_model=None)
async def preview_plan(deps: Deps, body: PlanRequest) -> dict[str, Any]:
    """The plan of a JOB on a CLUSTER, or on the connected cluster where it would go. Creates nothing."""
    job = await read_job(body.job, deps.settings.store_check_s, deps.settings.places)
    if body.cluster is not None:
        snapshot, profile = _read_cluster(body.cluster), Profile()
    else:
        snapshot, profile = await _connected(deps)
    return plan_answer(await deps.planner.plan(job, snapshot, profile, seed=body.seed), seed=body.seed)


def _read_cluster(value: dict[str, Any]) -> ClusterSnapshot:
    try:
        return parse_cluster(value)
    except InvalidField as error:
        raise invalid_field(error, "" if error.field == "cluster" else "cluster") from error


async def _connected(deps: Services) -> tuple[ClusterSnapshot, Profile]:
    """The largest cluster that is connected. Raises Conflict."""
    async with deps.database.read() as session:
        rows = [row for row in await clusters.all_clusters(session) if clusters.connected(row)]
    if not rows:
        raise Conflict("no_cluster", "no cluster is connected: give one to plan for in the field 'cluster'")
    found = [(snapshot_from_mapping(row.snapshot), profile_from_mapping(row.profile)) for row in rows]
    return max(found, key=lambda pair: pair[0].num_devices)


@router.get("/healthz", tags=["health"], responses={200: {"model": Health}}, response_model=None)
@router.get("/v1/health", tags=["health"], responses={200: {"model": Health}}, response_model=None)
async def health(deps: Deps) -> Health:
    """Answers only if the database does."""
    async with deps.database.read() as session:
        await session.execute(text("SELECT 1"))
    return {"status": "ok"}


@router.post(
    "/v1/login-links", status_code=201, tags=["sign-in"], responses=documented(created=LoginLink), response_model=None
)
async def make_login_link(request: Request, deps: Deps, caller: Caller) -> LoginLink:
    """A link that signs one browser in, once, as whoever asks for it."""
    code, expires_at_s = await deps.auth.mint_login_code(caller.subject)
    base = deps.settings.public_url or str(request.base_url)
    return {"url": f"{base.rstrip('/')}/login?code={code}", "expires_at": jobs.rfc3339(expires_at_s)}
