"""REST: jobs as resources. Submitting, listing, showing, pausing, resuming, cancelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from sqlalchemy.exc import IntegrityError
from starlette.responses import JSONResponse, Response

from shoal_planner.job import JobSpec
from shoal_planner.script_spec import AnyJob, parse_any_job
from shoal_recovery.journal import JobState
from shoal_service import clusters, enforcement, jobs, shares, trackers
from shoal_service.bell import CLUSTERS, JOBS, job_topic
from shoal_service.bodies import read_body
from shoal_service.errors import BadInput, Conflict
from shoal_service.jobs import NewJob
from shoal_service.models import ClusterRow, JobRow
from shoal_service.problems import documented
from shoal_service.services import Deps, Services
from shoal_service.submission import check_surroundings, read_any_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
_ANY_OBJECT = {"schema": {"type": "object"}}
_JOB_BODY = {
    "requestBody": {
        "required": True,
        "description": "A JOB document.",
        "content": {"application/json": _ANY_OBJECT, "application/yaml": _ANY_OBJECT},
    }
}


@router.post("", status_code=201, responses=documented(400, 409, 413, 415), openapi_extra=_JOB_BODY)
async def submit_job(
    request: Request,
    deps: Deps,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Response:
    """Creates a job if every check holds. The same Idempotency-Key with the same job answers with the first one."""
    body = await read_body(request, deps.settings.max_body_bytes)
    spec = await read_any_job(body, deps.settings.store_check_s)
    wanted_hash = jobs.body_hash(spec)
    row = await _known(deps, idempotency_key, wanted_hash)
    if row is None:
        row = await _create(deps, spec, wanted_hash, idempotency_key)
    return JSONResponse(jobs.resource(row), status_code=201, headers={"Location": f"/v1/jobs/{row.id}"})


async def _known(deps: Services, key: str | None, wanted_hash: str) -> JobRow | None:
    if key is None:
        return None
    async with deps.database.read() as session:
        return await jobs.find_by_key(session, key, wanted_hash)


async def _create(deps: Services, spec: AnyJob, wanted_hash: str, key: str | None) -> JobRow:
    spec = await check_surroundings(spec, deps.settings.store_check_s)
    async with deps.database.read() as session:
        candidates = [row for row in await clusters.all_clusters(session) if clusters.connected(row)]
    cluster_id = await deps.planner.choose_cluster(spec, candidates)
    new = NewJob(spec=spec, body_hash=wanted_hash, idempotency_key=key, cluster_id=cluster_id)
    try:
        async with deps.database.write() as session:
            if key is not None and (known := await jobs.find_by_key(session, key, wanted_hash)) is not None:
                return known
            row = jobs.create(session, new)
            if isinstance(spec, JobSpec):
                trackers.create(session, row.id, spec)
    except IntegrityError:
        # Another replica of this server created the job under the same key in between.
        known = await _known(deps, key, wanted_hash)
        if known is None:
            raise
        return known
    deps.bell.ring(CLUSTERS, JOBS)
    return row


@router.get("", responses=documented())
async def list_jobs(
    deps: Deps,
    state: JobState | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> dict[str, Any]:
    """Newest first; `next_cursor` is null on the last page."""
    async with deps.database.read() as session:
        rows, following = await jobs.list_page(session, state=state, limit=limit, cursor=cursor)
    return {"items": [jobs.resource(row) for row in rows], "next_cursor": following}


@router.get("/{job_id}", responses=documented(404))
async def get_job(deps: Deps, job_id: str) -> dict[str, Any]:
    """One job, what there is to say of the `cluster` that has it, its `share` of that, and how far its `trackers`
    are."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        cluster, tracked = await clusters.of_job(session, row), await trackers.of_job(session, job_id)
        share = shares.resource(await shares.of_job(session, job_id))
    return {**jobs.resource(row), "cluster": cluster, "trackers": tracked, "share": share}


@router.post("/{job_id}/cancel", responses=documented(404, 409))
async def cancel_job(deps: Deps, job_id: str) -> dict[str, Any]:
    """Wishes the job to stop. Asking twice is the same as once; a job that has ended otherwise answers 409."""
    return jobs.resource(await cancel(deps, job_id))


async def cancel(deps: Services, job_id: str) -> JobRow:
    async with deps.database.write() as session:
        row = await jobs.cancel(session, job_id)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return row


@router.post("/{job_id}/pause", responses=documented(404, 409))
async def pause_job(deps: Deps, job_id: str) -> dict[str, Any]:
    """Wishes the job to rest in its object store: its state is `paused` once its newest step stands there, and then it
    has no nodes. 409 where it has no store, has ended, or is wished to rest already."""
    return jobs.resource(await pause(deps, job_id))


async def pause(deps: Services, job_id: str) -> JobRow:
    async with deps.database.write() as session:
        row = await jobs.pause(session, job_id)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return row


@router.post("/{job_id}/resume", responses=documented(404, 409))
async def resume_job(deps: Deps, job_id: str) -> dict[str, Any]:
    """Lets a job that rests go on, on the connected cluster that suits it best; or calls a pause off that has not come
    about yet. 409 where it is not wished to rest."""
    return jobs.resource(await resume(deps, job_id))


async def resume(deps: Services, job_id: str) -> JobRow:
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        candidates = [each for each in await clusters.all_clusters(session) if clusters.connected(each)]
    resting = row.state == JobState.PAUSED
    cluster_id = await _place_for(deps, row, candidates) if resting else row.cluster_id
    async with deps.database.write() as session:
        over, _ = await enforcement.standing(session, row)
        if over is not None and row.wish == jobs.WISH_PAUSED:
            raise Conflict(over.code, f"{job_id} cannot go on, {over.words}: change its limits first")
        row = await jobs.resume(session, job_id, cluster_id)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return row


async def _place_for(deps: Services, row: JobRow, candidates: Sequence[ClusterRow]) -> str | None:
    """Where no plan fits, the job waits: with the cluster that it had, if that is there."""
    try:
        return await deps.planner.choose_cluster(parse_any_job(row.spec), candidates)
    except BadInput:
        return row.cluster_id if row.cluster_id in {each.id for each in candidates} else None
