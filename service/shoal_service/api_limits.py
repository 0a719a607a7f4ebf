"""REST: the limits and the priority of a job, which may change while it runs: the control plane alone goes by them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from shoal_planner.errors import InvalidField
from shoal_planner.limits import priority_of
from shoal_planner.script_spec import any_job_to_mapping, parse_any_job
from shoal_service import jobs, shares
from shoal_service.bell import CLUSTERS, JOBS, job_topic
from shoal_service.bodies import NewLimits
from shoal_service.errors import Conflict, invalid_field
from shoal_service.problems import documented
from shoal_service.services import Deps

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post("/{job_id}/limits", responses=documented(404, 409))
async def set_limits(deps: Deps, job_id: str, wanted: NewLimits) -> dict[str, Any]:
    """Changes what is given, null takes a limit away. A job that rests because of a limit goes on when it is resumed.
    409 where it has ended."""
    async with deps.database.write() as session:
        row = await jobs.get(session, job_id)
        if jobs.ended(row):
            raise Conflict("job_ended", f"{job_id} has already {row.state}: its limits are of no use", state=row.state)
        given = wanted.model_dump(exclude_unset=True)
        priority = given.pop("priority", row.spec.get("priority", "normal"))
        changed = {**row.spec, "limits": {**(row.spec.get("limits") or {}), **given}, "priority": priority}
        try:
            spec = parse_any_job(changed)
        except InvalidField as error:
            raise invalid_field(error) from error
        mapping = {name: any_job_to_mapping(spec)[name] for name in ("limits", "priority")}
        if not await jobs.put_status(session, row, jobs.status_of(row), spec={**row.spec, **mapping}):
            raise Conflict("changed_meanwhile", f"{job_id} changed meanwhile; ask again")
        await shares.relimit(session, job_id, priority_of(spec.priority), spec.limits)
        row = await jobs.get(session, job_id)
    deps.bell.ring(CLUSTERS, JOBS, job_topic(job_id))
    return jobs.resource(row)
