"""REST: jobs as resources. Submitting, listing, showing, pausing, resuming, cancelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import StringConstraints
from starlette.responses import JSONResponse, Response

from shoal_planner.job import JobSpec
from shoal_planner.script_spec import AnyJob, parse_any_job
from shoal_recovery.journal import JobState
from shoal_service import clusters, enforcement, jobs, preconditions, rented_places, shares, storages, trackers
from shoal_service.access import seen_projects
from shoal_service.answers import page
from shoal_service.bell import CLUSTERS, JOBS, job_topic
from shoal_service.bodies import Moment, read_body
from shoal_service.cursors import OF_PAGE_BEFORE, described_text
from shoal_service.documents import reference
from shoal_service.dry_run import rehearse
from shoal_service.errors import BadInput, Conflict, Raced
from shoal_service.gate import Caller, ChosenProject, did
from shoal_service.job_filter import read_filter
from shoal_service.jobs import NewJob
from shoal_service.models import ClusterRow, JobRow
from shoal_service.preconditions import IfMatch
from shoal_service.problems import documented
from shoal_service.services import Deps, Services
from shoal_service.shapes import Page
from shoal_service.shapes_jobs import DryRun, Job, JobInFull, ListedJob
from shoal_service.submission import MOST_JOB_BYTES, check_surroundings, read_any_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
Label = Annotated[str, StringConstraints(min_length=1, max_length=200)]
# Of the id of a job, `job_` and a ULID, as base64 writes it: three characters of the one are four of the other.
_TWO = "([AEIMQUYcgkosw048][w-z0-5]|[BFJNRVZdhlptx159][B-Za])"
_CURSOR = f"^am9iX[z01]{_TWO}([MNOQ-W][DEFTUVjklz01]{_TWO}){{8}}$"
_JOB = {"schema": reference("JobDocument")}
_JOB_BODY = {
    "requestBody": {
        "required": True,
        "description": f"A JOB document, of at most {MOST_JOB_BYTES} bytes as JSON without spaces.",
        "content": {"application/json": _JOB, "application/yaml": _JOB},
    }
}


@router.post(
    "",
    status_code=201,
    responses=documented(400, 404, 409, 413, 415, created=Job, ok=DryRun),
    openapi_extra=_JOB_BODY,
)
async def submit_job(
    request: Request,
    deps: Deps,
    chosen: ChosenProject,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
    project: Annotated[str | None, Query(max_length=40)] = None,
    dry_run: bool = False,
) -> Response:
    """Creates a job in `project` (by default the only one that you have a role in, or `default`) if every check holds.
    The same Idempotency-Key with the same job answers with the first one. With `dry_run=1` nothing is created: the
    answer (200) is the plan that it would run by, and what that would cost."""
    body = await read_body(request)
    return await submitted(request, deps, chosen, body, idempotency_key, dry_run=dry_run)


async def submitted(
    request: Request, deps: Services, project: str, body: object, idempotency_key: str | None, *, dry_run: bool
) -> Response:
    """The answer to a request that brings a JOB document as plain values. Raises BadInput and Conflict."""
    if dry_run:
        spec = await read_any_job(body, deps.settings.store_check_s, deps.settings.places)
        return JSONResponse(await rehearse(deps, project, spec))
    row = await submit(request, deps, project, body, idempotency_key)
    headers = {"Location": f"/v1/jobs/{row.id}", "ETag": preconditions.etag(row)}
    return JSONResponse(jobs.resource(row), status_code=201, headers=headers)


async def submit(request: Request, deps: Services, project: str, body: object, idempotency_key: str | None) -> JobRow:
    """Of a JOB document as plain values. Raises BadInput and Conflict."""
    spec = await read_any_job(body, deps.settings.store_check_s, deps.settings.places)
    wanted_hash = jobs.body_hash(spec)
    row = await _known(deps, project, idempotency_key, wanted_hash)
    if row is None:
        owner: str = request.state.principal.owner
        row = await _create(deps, project, spec, wanted_hash, idempotency_key, owner)
    did(request, row.id)
    return row


async def _known(deps: Services, project: str, key: str | None, wanted_hash: str) -> JobRow | None:
    if key is None:
        return None
    async with deps.database.read() as session:
        return await jobs.find_by_key(session, project, key, wanted_hash)


async def _create(
    deps: Services, project: str, spec: AnyJob, wanted_hash: str, key: str | None, created_by: str
) -> JobRow:
    async with deps.database.read() as session:
        accesses = await storages.for_job(session, project, spec)
    spec = await check_surroundings(spec, deps.settings, accesses)
    async with deps.database.read() as session:
        candidates = [row for row in await clusters.all_clusters(session) if clusters.connected(row)]
    cluster_id, _, _ = await rented_places.choose(deps, spec, candidates)
    new = NewJob(
        project=project,
        spec=spec,
        body_hash=wanted_hash,
        idempotency_key=key,
        cluster_id=cluster_id,
        created_by=created_by,
    )
    try:
        async with deps.database.write() as session:
            if key is not None and (known := await jobs.find_by_key(session, project, key, wanted_hash)) is not None:
                return known
            await storages.for_job(session, project, spec, kept=True)
            row = jobs.create(session, new)
            if isinstance(spec, JobSpec):
                trackers.create(session, row.id, spec)
    except Raced:
        # Another replica of this server created the job under the same key in between.
        known = await _known(deps, project, key, wanted_hash)
        if known is None:
            raise
        return known
    deps.bell.ring(CLUSTERS, JOBS)
    return row


@router.get("", responses=documented(ok=Page[ListedJob]))
async def list_jobs(
    deps: Deps,
    caller: Caller,
    state: Annotated[list[JobState] | None, Query(description="Only in one of these states.")] = None,
    name: Annotated[str | None, Query(max_length=100, description="Only with this in the name.")] = None,
    label: Annotated[list[Label] | None, Query(description="Only with all of these labels: KEY=VALUE, or KEY.")] = None,
    created_since: Moment | None = None,
    created_until: Moment | None = None,
    created_by: Annotated[str | None, Query(max_length=40, description="A user's id, `admin`, or `me`.")] = None,
    project: Annotated[str | None, Query(max_length=40)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[Annotated[str, described_text(_CURSOR, 200)] | None, OF_PAGE_BEFORE] = None,
) -> Response:
    """Those of your projects (or of one `project` of them), newest first; `next_cursor` is null on the last page.
    A page ends before it is too large for an answer."""
    wanted = read_filter(
        projects=seen_projects(caller, project),
        states=tuple(state or ()),
        name=name,
        labels=tuple(label or ()),
        since_s=None if created_since is None else created_since.timestamp(),
        until_s=None if created_until is None else created_until.timestamp(),
        created_by=caller.owner if created_by == "me" else created_by,
    )
    async with deps.database.read() as session:
        rows, following = await jobs.list_page(session, wanted, limit=limit, cursor=cursor)
        problems = await clusters.silences(session, rows)

    def rest(kept: int) -> dict[str, Any]:
        return {"next_cursor": following if kept == len(rows) else jobs.cursor_after(rows[kept - 1].id)}

    return page([{**jobs.resource(row), "problem": problems.get(row.id)} for row in rows], rest)


@router.get("/{job_id}", responses=documented(404, ok=JobInFull))
async def get_job(deps: Deps, job_id: str) -> Response:
    """One job, what there is to say of the `cluster` that has it, its `share` of that, and how far its `trackers` are.
    Its ETag is for If-Match: it changes with the spec, the wish, the cluster and the state of the job, not with its
    progress."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        problem = (await clusters.silences(session, [row])).get(job_id)
        cluster, tracked = await clusters.of_job(session, row), await trackers.of_job(session, job_id)
        share = shares.resource(await shares.of_job(session, job_id))
    found = {**jobs.resource(row), "problem": problem, "cluster": cluster, "trackers": tracked, "share": share}
    return JSONResponse(found, headers={"ETag": preconditions.etag(row)})


def _changed(row: JobRow) -> Response:
    return JSONResponse(jobs.resource(row), headers={"ETag": preconditions.etag(row)})


@router.post("/{job_id}/cancel", responses=documented(404, 409, 412, ok=Job))
async def cancel_job(deps: Deps, job_id: str, if_match: IfMatch = None) -> Response:
    """Wishes the job to stop; one that no cluster runs is `cancelled` at once. Asking twice is the same as once; a job
    that has ended otherwise answers 409."""
    return _changed(await cancel(deps, job_id, if_match))


async def cancel(deps: Services, job_id: str, if_match: str | None = None) -> JobRow:
    async with deps.database.write() as session:
        preconditions.check(await jobs.get(session, job_id, to_change=True), if_match)
        row = await deps.lost_clusters.end_cancelled(session, await jobs.cancel(session, job_id))
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return row


@router.post("/{job_id}/pause", responses=documented(404, 409, 412, ok=Job))
async def pause_job(deps: Deps, job_id: str, if_match: IfMatch = None) -> Response:
    """Wishes the job to rest in its object store: its state is `paused` once its newest step stands there, and then it
    has no nodes. 409 where it has no store, has ended, or is wished to rest already."""
    return _changed(await pause(deps, job_id, if_match))


async def pause(deps: Services, job_id: str, if_match: str | None = None) -> JobRow:
    async with deps.database.write() as session:
        preconditions.check(await jobs.get(session, job_id, to_change=True), if_match)
        row = await jobs.pause(session, job_id)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return row


@router.post("/{job_id}/resume", responses=documented(404, 409, 412, ok=Job))
async def resume_job(deps: Deps, job_id: str, if_match: IfMatch = None) -> Response:
    """Lets a job that rests go on, on the connected cluster that suits it best; or calls a pause off that has not come
    about yet. 409 where it is not wished to rest."""
    return _changed(await resume(deps, job_id, if_match))


async def resume(deps: Services, job_id: str, if_match: str | None = None) -> JobRow:
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        candidates = [each for each in await clusters.all_clusters(session) if clusters.connected(each)]
    resting = row.state == JobState.PAUSED
    cluster_id = await _place_for(deps, row, candidates) if resting else row.cluster_id
    async with deps.database.write() as session:
        preconditions.check(await jobs.get(session, job_id, to_change=True), if_match)
        over, _ = await enforcement.standing(session, row)
        if over is not None and row.wish == jobs.WISH_PAUSED:
            raise Conflict(over.code, f"{job_id} cannot go on, {over.words}: change its limits first")
        row = await jobs.resume(session, job_id, cluster_id)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return row


async def _place_for(deps: Services, row: JobRow, candidates: Sequence[ClusterRow]) -> str | None:
    """Where no plan fits, the job waits: with the cluster that it had, if that is there."""
    try:
        return (await rented_places.choose(deps, parse_any_job(row.spec), candidates))[0]
    except BadInput:
        return row.cluster_id if row.cluster_id in {each.id for each in candidates} else None
