"""What forms of pages do, and refusals as pages. Pages that only show something are pages_job.py's, pages_submit.py's
and pages_fleet.py's."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Path, Request
from starlette.responses import RedirectResponse, Response

from shoal_service import api_jobs, api_limits, api_nodes, api_verbs
from shoal_service.bodies import Preemption
from shoal_service.errors import BadInput, Problem
from shoal_service.gate import Caller
from shoal_service.once import Repeatable
from shoal_service.panels_limits import limits_of_form
from shoal_service.rendering import rendered
from shoal_service.services import Deps

router = APIRouter()


def refused(request: Request, problem: Problem) -> Response:
    """A refusal as a page, for browsers."""
    title = "Sign in" if problem.status == 401 else problem.body()["title"]
    return rendered(request, "refused.html", {"problem": problem, "title": title}, problem.status)


@router.post("/jobs/{job_id}/cancel")
async def cancel_from_page(deps: Deps, job_id: str) -> Response:
    await api_jobs.cancel(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/pause")
async def pause_from_page(deps: Deps, job_id: str) -> Response:
    await api_jobs.pause(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/resume")
async def resume_from_page(deps: Deps, job_id: str) -> Response:
    await api_jobs.resume(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/checkpoint")
async def checkpoint_from_page(deps: Deps, once: Repeatable, job_id: str) -> Response:
    await api_verbs.checkpoint_job(deps, once, job_id)
    return RedirectResponse(f"/jobs/{job_id}#part-checkpoints", status_code=303)


@router.post("/jobs/{job_id}/limits")
async def limits_from_page(request: Request, deps: Deps, job_id: str) -> Response:
    """Fewer or more devices, too: the job shrinks or grows without being stopped."""
    await api_limits.set_limits(deps, job_id, limits_of_form(await read_form(request)))
    return RedirectResponse(f"/jobs/{job_id}#part-limits", status_code=303)


@router.post("/nodes/{node_id}/preempt")
async def preempt_from_page(
    request: Request, deps: Deps, caller: Caller, once: Repeatable, node_id: Annotated[str, Path(max_length=200)]
) -> Response:
    """A drill, from the page of a job (`job`) or of all nodes."""
    form = await read_form(request)
    try:
        wanted = Preemption(notice_s=float(form.get("notice_s") or 120), cluster_id=form.get("cluster_id") or None)
    except ValueError as error:
        problem = f"notice_s = {form.get('notice_s')!r}: must be seconds, from 0 to 86400"
        raise BadInput("invalid_field", problem, "notice_s") from error
    await api_nodes.preempt_node(deps, caller, once, node_id, wanted)
    job_id = form.get("job", "")
    back = f"/jobs/{job_id}#part-nodes" if job_id.isidentifier() else "/nodes"
    return RedirectResponse(back, status_code=303)


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form; of one that comes twice, the first."""
    found = parse_qs((await request.body()).decode("utf-8", errors="replace"), keep_blank_values=True)
    return {name: values[0] for name, values in found.items()}
