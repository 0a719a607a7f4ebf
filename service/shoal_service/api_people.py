"""REST: who I am, projects and their members, users, tokens, and what was done by whom."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from shoal_service import audit, people, tokens
from shoal_service.access import Role, default_project
from shoal_service.bodies import Body, FromJson, Identifier
from shoal_service.cursors import NEXT, cursor_of, cut
from shoal_service.gate import Caller, did
from shoal_service.once import Repeatable
from shoal_service.preconditions import IfMatch, tagged
from shoal_service.problems import documented
from shoal_service.services import Deps
from shoal_service.shapes import Page
from shoal_service.shapes_people import AuditEvent, Me, Member, Project, Token, TokenWithSecret, User
from shoal_service.tokens import OF_SERVER, VALID_S, TokenRole

router = APIRouter(prefix="/v1", tags=["people"])
PROJECT_ID = r"^[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?$"
ProjectId = Annotated[str, Field(pattern=PROJECT_ID)]
UserId = Annotated[str, Path(pattern=r"^user_[0-9A-Z]{26}$")]
Limit = Annotated[int, Query(ge=1, le=200)]
ProjectCursor = Annotated[str | None, Query(pattern=PROJECT_ID, description=NEXT)]


class NewProject(Body):
    id: ProjectId = Field(description="Lower-case letters, digits and dashes.")


class NewMember(Body):
    """By `user_id`, or by the `email` with which somebody signs in, or will."""

    user_id: Annotated[str, Field(pattern=r"^user_[0-9A-Z]{26}$")] | None = None
    email: Annotated[str, Field(max_length=254)] | None = None
    role: Annotated[Role, FromJson]

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.user_id is None) == (self.email is None):
            raise ValueError("give user_id or email")
        return self


class NewRole(Body):
    role: Annotated[Role, FromJson]


class UserChange(Body):
    server_admin: bool


class NewToken(Body):
    """A token of a `project` (without one, the project that you have), of the connector of a cluster, for reading
    /metrics, or with the rights of the server's administrator."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")]
    role: Annotated[TokenRole, FromJson]
    project: ProjectId | None = None
    cluster_id: Identifier | None = None
    expires_in_s: Annotated[float, Field(gt=0, le=10 * 366 * 86400)] | None = Field(
        default=None, description="Null: never. Without it after 90 days, and never with the role connector."
    )


@router.get("/me", responses=documented(ok=Me), response_model=None)
async def get_me(deps: Deps, caller: Caller) -> Me:
    """Who you are, and your role in each project."""
    async with deps.database.read() as session:
        rows = await people.all_projects(session, caller.projects())
    return {
        "id": caller.subject,
        "name": caller.name,
        "kind": caller.kind,
        "server_admin": caller.server_admin,
        "cluster_id": caller.cluster_id,
        "projects": [people.project_resource(row, caller.role_in(row.id)) for row in rows],
    }


@router.get("/projects", responses=documented(ok=Page[Project]), response_model=None)
async def list_projects(deps: Deps, caller: Caller, limit: Limit = 50, cursor: ProjectCursor = None) -> Page[Project]:
    """Those in which you have a role, by id."""
    async with deps.database.read() as session:
        rows, following = await people.projects_page(session, caller.projects(), limit=limit, after=cursor)
    items = [people.project_resource(row, caller.role_in(row.id)) for row in rows]
    return {"items": items, "next_cursor": following}


@router.post("/projects", status_code=201, responses=documented(409, created=Project))
async def create_project(request: Request, deps: Deps, caller: Caller, once: Repeatable, body: NewProject) -> Response:
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        row = await people.create_project(session, body.id)
        did(request, row.id)
        return await once.end(session, row.id, people.project_resource(row, caller.role_in(row.id)), 201)


@router.get("/projects/{project_id}", responses=documented(404, ok=Project), response_model=None)
async def get_project(deps: Deps, caller: Caller, project_id: str) -> Project:
    async with deps.database.read() as session:
        row = await people.get_project(session, project_id)
    return people.project_resource(row, caller.role_in(row.id))


@router.delete("/projects/{project_id}", status_code=204, responses=documented(404, 409))
async def delete_project(deps: Deps, project_id: str) -> Response:
    """With its members and tokens. One that has had jobs stays, as does `default`: 409."""
    async with deps.database.write() as session:
        await people.delete_project(session, project_id)
    return Response(status_code=204)


@router.get("/projects/{project_id}/members", responses=documented(404, ok=Page[Member]), response_model=None)
async def list_members(
    deps: Deps, project_id: str, limit: Limit = 50, cursor: Annotated[str | None, cursor_of("user")] = None
) -> Page[Member]:
    """By user id."""
    async with deps.database.read() as session:
        found = await people.members(session, project_id, limit=limit + 1, after=cursor)
    pairs, following = cut(found, limit, lambda pair: pair[1].id)
    return {"items": [people.member_resource(member, user) for member, user in pairs], "next_cursor": following}


@router.post("/projects/{project_id}/members", status_code=201, responses=documented(404, 409, created=Member))
async def add_member(request: Request, deps: Deps, once: Repeatable, project_id: str, body: NewMember) -> Response:
    """Gives a user a role, instead of the one that they have. Somebody with an unknown `email` is invited: the role is
    theirs when they sign in with that address for the first time."""
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        if body.user_id is not None:
            user = await people.get_user(session, body.user_id)
        else:
            user = await people.invited(session, body.email or "")
        member = await people.set_role(session, project_id, user, body.role)
        did(request, f"{project_id}/{user.id}")
        return await once.end(session, user.id, people.member_resource(member, user), 201)


@router.put("/projects/{project_id}/members/{user_id}", responses=documented(404, 412, ok=Member))
async def set_role(deps: Deps, project_id: str, user_id: UserId, body: NewRole, if_match: IfMatch = None) -> Response:
    async with deps.database.write() as session:
        user = await people.get_user(session, user_id)
        member = await people.set_role(session, project_id, user, body.role, if_match)
        return tagged(people.member_resource(member, user))


@router.delete("/projects/{project_id}/members/{user_id}", status_code=204, responses=documented(404, 412))
async def remove_member(deps: Deps, project_id: str, user_id: UserId, if_match: IfMatch = None) -> Response:
    async with deps.database.write() as session:
        await people.remove_member(session, project_id, user_id, if_match)
    return Response(status_code=204)


@router.get("/users", responses=documented(ok=Page[User]), response_model=None)
async def list_users(
    deps: Deps, limit: Limit = 50, cursor: Annotated[str | None, cursor_of("user")] = None
) -> Page[User]:
    async with deps.database.read() as session:
        rows, following = await people.all_users(session, limit=limit, after=cursor)
    return {"items": [people.user_resource(row) for row in rows], "next_cursor": following}


@router.patch("/users/{user_id}", responses=documented(404, 412, ok=User))
async def change_user(deps: Deps, user_id: UserId, body: UserChange, if_match: IfMatch = None) -> Response:
    """Makes a user an administrator of this server, or no more."""
    async with deps.database.write() as session:
        row = await people.get_user(session, user_id, to_change=True, if_match=if_match)
        row.server_admin = body.server_admin
    return tagged(people.user_resource(row))


@router.delete("/users/{user_id}", status_code=204, responses=documented(404, 412))
async def delete_user(deps: Deps, user_id: UserId, if_match: IfMatch = None) -> Response:
    """Their roles, sessions and tokens end with them. They may be somebody new later, if the identity provider lets
    them in."""
    async with deps.database.write() as session:
        await people.delete_user(session, user_id, if_match)
    return Response(status_code=204)


@router.get("/tokens", responses=documented(ok=Page[Token]), response_model=None)
async def list_tokens(
    deps: Deps, caller: Caller, limit: Limit = 50, cursor: Annotated[str | None, cursor_of("tok")] = None
) -> Page[Token]:
    """Those that you made, and those of projects that you administer, newest first. Secrets are not in it."""
    async with deps.database.read() as session:
        rows, following = await tokens.page(session, caller, limit=limit, before=cursor)
    return {"items": [tokens.resource(row) for row in rows], "next_cursor": following}


@router.post("/tokens", status_code=201, responses=documented(404, 409, created=TokenWithSecret))
async def create_token(request: Request, deps: Deps, caller: Caller, once: Repeatable, body: NewToken) -> Response:
    """The answer has the `secret`: it is told this once, and can never be found out again (409 `secret_told_before` to
    the same Idempotency-Key once more). Nobody can give away more than they have, and what you make never may more than
    you may."""
    has_project = body.role not in OF_SERVER
    project = body.project or (default_project(caller) if has_project else None)
    is_lasting = body.role is TokenRole.CONNECTOR and "expires_in_s" not in body.model_fields_set
    valid_s = body.expires_in_s if "expires_in_s" in body.model_fields_set or is_lasting else VALID_S
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        row, secret = await tokens.create(
            session,
            caller,
            name=body.name,
            role=body.role,
            project=project,
            cluster_id=body.cluster_id,
            valid_s=valid_s,
        )
        did(request, row.id, project)
        return await once.end(session, row.id, tokens.resource(row), 201, secret=secret)


@router.delete("/tokens/{token_id}", responses=documented(404, ok=Token), response_model=None)
async def revoke_token(
    request: Request, deps: Deps, caller: Caller, token_id: Annotated[str, Path(pattern=r"^tok_[0-9A-Z]{26}$")]
) -> Token:
    """It is refused from now on, and so are browsers that signed in with it. It stays in lists."""
    async with deps.database.write() as session:
        row = await tokens.revoke(session, caller, token_id)
    did(request, row.id, row.project_id)
    return tokens.resource(row)


@router.get("/audit-events", responses=documented(ok=Page[AuditEvent]), response_model=None)
async def list_audit_events(
    deps: Deps,
    caller: Caller,
    project: Annotated[str | None, Query(max_length=40)] = None,
    action: Annotated[str | None, Query(max_length=60)] = None,
    limit: Limit = 50,
    cursor: Annotated[str | None, cursor_of("aud")] = None,
) -> Page[AuditEvent]:
    """Who did what, and what was refused, newest first: in projects that you administer, or, for administrators of this
    server, everywhere."""
    seen = caller.projects(Role.ADMIN)
    if project is not None:
        seen = frozenset({project}) if seen is None or project in seen else frozenset()
    async with deps.database.read() as session:
        rows, following = await audit.page(session, projects=seen, action=action, limit=limit, before=cursor)
    return {"items": [audit.resource(row) for row in rows], "next_cursor": following}
