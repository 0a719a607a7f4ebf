"""What forms of pages do: signing in and out, and the verbs of a job and of a node. What pages show is pages_job.py's
and pages_fleet.py's."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import RedirectResponse, Response

from shoal_service import api_clusters, api_jobs, auth
from shoal_service.bodies import Preemption
from shoal_service.errors import BadInput, Problem
from shoal_service.rendering import rendered
from shoal_service.services import Deps, Services

router = APIRouter()


def refused(request: Request, problem: Problem) -> Response:
    """A refusal as a page, for browsers."""
    title = "Sign in" if problem.status == 401 else problem.body()["title"]
    return rendered(request, "refused.html", {"problem": problem, "title": title}, problem.status)


@router.post("/jobs/{job_id}/cancel")
async def cancel_from_page(request: Request, deps: Deps, job_id: str) -> Response:
    await check_form(request, deps)
    await api_jobs.cancel(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/pause")
async def pause_from_page(request: Request, deps: Deps, job_id: str) -> Response:
    await check_form(request, deps)
    await api_jobs.pause(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/resume")
async def resume_from_page(request: Request, deps: Deps, job_id: str) -> Response:
    await check_form(request, deps)
    await api_jobs.resume(deps, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/nodes/{node_id}/preempt")
async def preempt_from_page(request: Request, deps: Deps, node_id: Annotated[str, Path(max_length=200)]) -> Response:
    """A drill, from the page of a job (`job`) or of all nodes."""
    await check_form(request, deps)
    form = await read_form(request)
    try:
        wanted = Preemption(notice_s=float(form.get("notice_s") or 120), cluster_id=form.get("cluster_id") or None)
    except ValueError as error:
        problem = f"notice_s = {form.get('notice_s')!r}: must be seconds, from 0 to 86400"
        raise BadInput("invalid_field", problem, "notice_s") from error
    await api_clusters.preempt_node(deps, node_id, wanted)
    job_id = form.get("job", "")
    back = f"/jobs/{job_id}#part-nodes" if job_id.isidentifier() else "/nodes"
    return RedirectResponse(back, status_code=303)


@router.get("/login")
async def login(
    request: Request,
    deps: Deps,
    code: str | None = None,
    then: Annotated[str, Query(alias="next", pattern=r"^/(nodes|new|jobs/\w+)?$")] = "/",
) -> Response:
    """Signs a browser in with the code of a sign-in link, which is used up, and leads to the page `next`."""
    if code is None:
        return rendered(request, "refused.html", {"problem": None, "title": "Sign in"})
    try:
        secret = await deps.auth.sign_in(code)
    except Problem as problem:
        return refused(request, problem)
    answer = RedirectResponse(then, status_code=303, headers={"Cache-Control": "no-store"})
    secure = request.url.scheme == "https" or (deps.settings.public_url or "").startswith("https")
    answer.set_cookie(
        auth.COOKIE, secret, max_age=int(deps.settings.session_s), httponly=True, samesite="lax", secure=secure
    )
    return answer


@router.post("/sign-out")
async def sign_out(request: Request, deps: Deps) -> Response:
    session = await check_form(request, deps)
    if session is not None:
        await deps.auth.sign_out(session)
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(auth.COOKIE)
    return answer


async def check_form(request: Request, deps: Services) -> str | None:
    """The session of a form post whose CSRF token is right. Raises Unauthorized or Forbidden."""
    form = await read_form(request)
    return await deps.auth.check("POST", request.headers, form_token=form.get("csrf", ""))


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form; of one that comes twice, the first."""
    found = parse_qs((await request.body()).decode("utf-8", errors="replace"), keep_blank_values=True)
    return {name: values[0] for name, values in found.items()}
