"""The pages of tokens, and of projects with their members. What may be done by whom is people.py's, tokens.py's and the
table of rules'."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import HTMLResponse, RedirectResponse, Response

from shoal_planner.errors import InvalidField
from shoal_service import api_people, people, tokens
from shoal_service.access import Principal, Role
from shoal_service.api_people import NewMember, NewProject, NewRole, NewToken, UserId
from shoal_service.cursors import cursor_of
from shoal_service.errors import BadInput, Problem, invalid_field
from shoal_service.gate import Caller, refused
from shoal_service.ledger import by_project
from shoal_service.once import Repeatable
from shoal_service.pages import read_form
from shoal_service.rendering import rendered
from shoal_service.services import Deps
from shoal_service.tokens import TokenRole

router = APIRouter()
_LIST = 50
_DAY_S = 86400.0
Body = TypeVar("Body", bound=BaseModel)


@router.get("/tokens", response_class=HTMLResponse)
async def tokens_page(
    request: Request, deps: Deps, caller: Caller, cursor: Annotated[str | None, cursor_of("tok")] = None
) -> Response:
    """Those that the reader made, and those of projects that they administer."""
    return await _tokens(request, deps, caller, cursor=cursor)


@router.post("/tokens", response_class=HTMLResponse)
async def create_token_from_page(request: Request, deps: Deps, caller: Caller, once: Repeatable) -> Response:
    """The answer shows the secret, this once: there is no address to come back to it."""
    form = await read_form(request)
    try:
        answer = await api_people.create_token(request, deps, caller, once, _new_token(form))
    except Problem as problem:
        refused(request, problem)
        return await _tokens(request, deps, caller, form=form, problem=problem)
    return await _tokens(request, deps, caller, made=json.loads(bytes(answer.body)))


@router.post("/tokens/{token_id}/revoke")
async def revoke_token_from_page(
    request: Request, deps: Deps, caller: Caller, token_id: Annotated[str, Path(pattern=r"^tok_[0-9A-Z]{26}$")]
) -> Response:
    await api_people.revoke_token(request, deps, caller, token_id)
    return RedirectResponse("/tokens", status_code=303)


async def _tokens(
    request: Request,
    deps: Deps,
    caller: Principal,
    *,
    cursor: str | None = None,
    form: dict[str, str] | None = None,
    made: dict[str, Any] | None = None,
    problem: Problem | None = None,
) -> Response:
    async with deps.database.read() as session:
        rows, following = await tokens.page(session, caller, limit=_LIST, before=cursor)
        projects = [row.id for row in await people.all_projects(session, caller.projects())]
    values = {
        "tokens": [tokens.resource(row) for row in rows],
        "next_cursor": following,
        "choices": offered(caller, projects),
        "form": form or {},
        "made": made,
        "problem": problem,
    }
    return rendered(request, "tokens.html", values, problem.status if problem else 200)


def offered(principal: Principal, projects: list[str]) -> list[tuple[str, str]]:
    """(project, role) of the tokens that the principal may make; the project is empty where a token has none. Pure."""
    pairs = [(project, role) for project in projects for role in map(TokenRole, Role)]
    found = [(project, role.value) for project, role in pairs if not tokens.refusal(principal, role, project, None)]
    if not tokens.refusal(principal, TokenRole.SERVER_ADMIN, None, None):
        found.append(("", TokenRole.SERVER_ADMIN.value))
    return found


def _new_token(form: dict[str, str]) -> NewToken:
    """`what` is a project and a role, by a space. Raises BadInput."""
    project, _, role = form.get("what", "").rpartition(" ")
    given: dict[str, Any] = {"name": form.get("name", "").strip(), "role": role, "project": project or None}
    days = form.get("days", "").strip()
    try:
        given["expires_in_s"] = float(days) * _DAY_S if days else None
    except ValueError as error:
        raise BadInput("invalid_field", f"days = {days!r}: must be a number, or empty for ever", "days") from error
    return read(NewToken, given)


def read(body: Callable[..., Body], given: dict[str, Any]) -> Body:
    """Raises BadInput, naming the field."""
    try:
        return body(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else next(iter(given))
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise invalid_field(InvalidField(name, given.get(name), message)) from error


@router.get("/projects", response_class=HTMLResponse)
async def projects_page(request: Request, deps: Deps, caller: Caller) -> Response:
    """Those in which the reader has a role, and what their jobs have cost."""
    async with deps.database.read() as session:
        rows = await people.all_projects(session, caller.projects())
        bills, missing = await deps.ledger.newest(session, caller.projects())
    values = {
        "projects": [people.project_resource(row, caller.role_in(row.id)) for row in rows],
        "spent": {each.of: each for each in by_project(bills)},
        "num_billed": len(bills),
        "not_billed": missing,
    }
    return rendered(request, "projects.html", values)


@router.post("/projects")
async def create_project_from_page(request: Request, deps: Deps, caller: Caller, once: Repeatable) -> Response:
    wanted = read(NewProject, {"id": (await read_form(request)).get("id", "").strip()})
    await api_people.create_project(request, deps, caller, once, wanted)
    return RedirectResponse(f"/projects/{wanted.id}", status_code=303)


@router.get("/projects/{project_id}", response_class=HTMLResponse)
async def project_page(
    request: Request,
    deps: Deps,
    caller: Caller,
    project_id: str,
    page: Annotated[int, Query(ge=1, le=10_000)] = 1,
) -> Response:
    """Its members; who administers it gives them roles."""
    async with deps.database.read() as session:
        project = await people.get_project(session, project_id)
        found = await people.members(session, project_id)
    values = {
        "project": people.project_resource(project, caller.role_in(project_id)),
        "members": [people.member_resource(member, user) for member, user in found[(page - 1) * _LIST : page * _LIST]],
        "roles": list(Role),
        "page": page,
        "pages": -(-len(found) // _LIST),
        "num_members": len(found),
    }
    return rendered(request, "project.html", values)


@router.post("/projects/{project_id}/members")
async def add_member_from_page(request: Request, deps: Deps, once: Repeatable, project_id: str) -> Response:
    form = await read_form(request)
    wanted = read(NewMember, {"email": form.get("email", "").strip(), "role": form.get("role", "")})
    await api_people.add_member(request, deps, once, project_id, wanted)
    return RedirectResponse(f"/projects/{project_id}", status_code=303)


@router.post("/projects/{project_id}/members/{user_id}")
async def change_member_from_page(request: Request, deps: Deps, project_id: str, user_id: UserId) -> Response:
    wanted = read(NewRole, {"role": (await read_form(request)).get("role", "")})
    await api_people.set_role(deps, project_id, user_id, wanted)
    return RedirectResponse(f"/projects/{project_id}", status_code=303)


@router.post("/projects/{project_id}/members/{user_id}/remove")
async def remove_member_from_page(deps: Deps, project_id: str, user_id: UserId) -> Response:
    await api_people.remove_member(deps, project_id, user_id)
    return RedirectResponse(f"/projects/{project_id}", status_code=303)
