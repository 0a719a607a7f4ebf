"""REST: the limits, the size and the priority of a job, which may change while it runs: the control plane alone goes by
them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from shoal_planner.errors import InvalidField
from shoal_planner.limits import check_to_come, priority_of
from shoal_planner.script_spec import any_job_to_mapping, parse_any_job
from shoal_recovery.journal import JobState
from shoal_service import jobs, preconditions, shares
from shoal_service.bell import CLUSTERS, JOBS, job_topic
from shoal_service.bodies import NewLimits, NewSize
from shoal_service.errors import Conflict, invalid_field
from shoal_service.models import JobRow
from shoal_service.preconditions import IfMatch
from shoal_service.problems import documented
from shoal_service.services import Deps, Services
from shoal_service.shapes_jobs import Job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
_WITHOUT_NODES = (JobState.QUEUED, JobState.PAUSED)


@router.post("/{job_id}/limits", responses=documented(404, 409, 412, ok=Job))
async def set_limits(deps: Deps, job_id: str, wanted: NewLimits, if_match: IfMatch = None) -> Response:
    """Changes what is given, null takes a limit away. A job that rests because of a limit goes on when it is resumed.
    A `deadline` is to come. 409 where it has ended."""
    return await _changed(deps, job_id, wanted.model_dump(exclude_unset=True), if_match)


@router.post("/{job_id}/resize", responses=documented(404, 409, 412, ok=Job))
async def resize_job(deps: Deps, job_id: str, wanted: NewSize, if_match: IfMatch = None) -> Response:
    """Lets a job have more devices, or fewer: one that runs leaves nodes within a step, or grows where nobody else
    needs them. `min_devices` belongs to the plans of a job that runs (409 `job_has_nodes`): pause it first."""
    return await _changed(deps, job_id, wanted.model_dump(exclude_unset=True), if_match)


async def _changed(deps: Services, job_id: str, given: dict[str, Any], if_match: str | None) -> Response:
    async with deps.database.write() as session:
        row = await jobs.get(session, job_id, to_change=True)
        preconditions.check(row, if_match)
        _check(row, given)
        priority = given.pop("priority", row.spec.get("priority", "normal"))
        changed = {**row.spec, "limits": {**(row.spec.get("limits") or {}), **given}, "priority": priority}
        try:
            spec = parse_any_job(changed)
            if spec.limits.deadline != (row.spec.get("limits") or {}).get("deadline"):
                check_to_come(spec.limits.deadline, time.time())
        except InvalidField as error:
            raise invalid_field(error) from error
        mapping = {name: any_job_to_mapping(spec)[name] for name in ("limits", "priority")}
        if not await jobs.put_status(session, row, jobs.status_of(row), spec={**row.spec, **mapping}):
            raise Conflict("changed_meanwhile", f"{job_id} changed meanwhile; ask again")
        await shares.relimit(session, job_id, priority_of(spec.priority), spec.limits)
        row = await jobs.get(session, job_id)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return JSONResponse(jobs.resource(row), headers={"ETag": preconditions.etag(row)})


def _check(row: JobRow, given: dict[str, Any]) -> None:
    """Raises Conflict."""
    if jobs.ended(row):
        raise Conflict("job_ended", f"{row.id} has already {row.state}: its limits are of no use", state=row.state)
    if "min_devices" in given and row.state not in _WITHOUT_NODES:
        problem = f"{row.id} is {row.state}, and its plans go by min_devices: pause it, resize it, and resume it"
        raise Conflict("job_has_nodes", problem, state=row.state)
