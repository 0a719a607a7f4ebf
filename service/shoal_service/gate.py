"""The gate that every request passes: who asks is found out first, then, once the route is known, whether they may, and
what they did is recorded. Nothing but health, sign-in and the page's own files is open to all, and a route that is not
in the table of rules is refused: no new one can forget to ask."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import Depends, Request
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sse_starlette import ServerSentEvent
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_recovery.journal import ClusterEntered
from shoal_service import access, audit
from shoal_service.access import Principal, Rule, Target, default_project
from shoal_service.auth import Asker
from shoal_service.errors import BadInput, Forbidden, Problem, Unavailable
from shoal_service.models import JobRow, JournalRow
from shoal_service.models_people import ProjectRow
from shoal_service.open_streams import while_allowed
from shoal_service.rules import RULES
from shoal_service.services import Deps, Services

_OPEN_PATHS = frozenset({"/healthz", "/v1/health", "/login", "/openapi.json", "/favicon.ico"})
_OPEN_FOLDERS = ("/static/", "/login/", "/v1/schemas/")
_IDS = (
    "job_id",
    "project_id",
    "token_id",
    "user_id",
    "node_id",
    "cluster_id",
    "webhook_id",
    "delivery_id",
    "name",
)  # of what is done, as paths name it


_ID = re.compile(r"[A-Za-z0-9_.-]{1,80}")  # nothing else is one, and no database need be asked for it


def is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


def address_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""


@dataclass(slots=True, kw_only=True)
class Deed:
    """What is recorded of a request once it is answered. A route that creates something says what (`target`)."""

    principal: Principal | None
    action: str
    address: str
    target: str | None = None
    project: str | None = None
    code: str | None = None


class Gate:
    """ASGI middleware: asks `Auth` about everything that is not open to all. The token of a page's form is checked once
    the route is known (`authorize`), since a middleware must not eat the body. Announced bodies that are too large
    are refused before anything of them is read."""

    def __init__(self, app: ASGIApp, refuse: Callable[[Request, Problem], Response], max_body_bytes: int) -> None:
        self._app = app
        self._refuse = refuse
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, services = Request(scope), scope["app"].state.services
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > self._max_body_bytes:
            too_large = BadInput("body_too_large", f"at most {self._max_body_bytes} bytes are read", status=413)
            await self._refuse(request, too_large)(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        if not is_open(scope["path"]):
            try:
                await _identify(request, services, state)
            except Problem as problem:
                await self._refuse(request, problem)(scope, receive, send)
                return
        await _recorded(self._app, scope, receive, send)


async def _identify(request: Request, services: Services, state: dict[str, Any]) -> None:
    is_form = request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
    method = "GET" if is_form and not request.url.path.startswith("/v1") else request.method
    address = address_of(request)
    try:
        asker = await services.auth.check(method, request.headers, address)
    except Problem as problem:
        wrong = problem.status == 403 or request.headers.get("authorization") is not None
        if wrong and problem.status != 429:  # guesses beyond the limit are not worth a row each
            await _write(
                services, Deed(principal=None, action="enter", address=address, code=problem.code), problem.status
            )
        raise
    state["principal"], state["session"], state["form"] = asker.principal, asker.session, method != request.method


async def _recorded(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """What was done is written down before whoever did it hears that it was."""

    async def noting(message: Message) -> None:
        deed: Deed | None = scope["state"].pop("deed", None) if message["type"] == "http.response.start" else None
        if deed is not None:
            await _write(scope["app"].state.services, deed, message["status"])
        await send(message)

    try:
        await app(scope, receive, noting)
    except Exception:  # whatever it was is a failure on the record; who answers 500 to it is further out
        deed: Deed | None = scope["state"].pop("deed", None)
        if deed is not None:
            deed.code = "internal_error"
            await _write(scope["app"].state.services, deed, 500)
        raise


async def _write(services: Services, deed: Deed, status: int) -> None:
    async with services.database.write() as session:
        audit.record(
            session,
            principal=deed.principal,
            action=deed.action,
            target=deed.target,
            project=deed.project,
            address=deed.address,
            status=status,
            code=deed.code,
        )


async def authorize(request: Request, deps: Deps) -> None:
    """Runs before every route, and decides by the table. Raises Forbidden, NotFound or Conflict."""
    path: str = request.scope["route"].path
    if is_open(path):
        return
    principal: Principal = request.state.principal
    rule = RULES.get(f"{request.method} {path}")
    if rule is None:
        raise Forbidden("no_rule", f"{request.method} {path}: nobody has said who may do that")
    target = await _target(deps, rule, principal, request)
    request.state.project = target.project
    problem = access.refusal(rule, principal, target)
    if rule.action is not None:
        request.state.deed = Deed(
            principal=principal,
            action=rule.action,
            address=address_of(request),
            target="/".join(request.path_params[name] for name in _IDS if name in request.path_params) or None,
            project=target.project,
        )
    if problem is not None:
        raise problem
    if request.state.form:
        await check_form(request, deps)


async def check_form(request: Request, deps: Services) -> None:
    """Raises Unauthorized or Forbidden where the CSRF token of a form post is not right."""
    given = await _form_field(request, "csrf")
    await deps.auth.check(request.method, request.headers, address_of(request), form_token=given)


async def _form_field(request: Request, name: str) -> str:
    form = parse_qs((await request.body()).decode("utf-8", errors="replace"))
    return form.get(name, [""])[0]


def streamed(request: Request, deps: Services, events: AsyncIterator[ServerSentEvent]) -> Response:
    """A stream for whoever asks, which ends soon after they may not have it any more: who asks again hears why."""
    principal = _principal(request)
    return deps.streams.response(principal.subject, while_allowed(events, lambda: _still_may(request, deps)))


async def _still_may(request: Request, deps: Services) -> bool:
    """Whether what was shown and the roles are still enough. A database or provider that is away revokes nothing."""
    known = Asker(principal=_principal(request), session=request.state.session)
    rule = RULES[f"{request.method} {request.scope['route'].path}"]
    try:
        principal = await deps.auth.again(request.headers, known)
        if principal is None:
            return False
        return access.refusal(rule, principal, await _target(deps, rule, principal, request)) is None
    except Unavailable:
        return True


async def _target(deps: Services, rule: Rule, principal: Principal, request: Request) -> Target:
    path = request.path_params
    in_form = ""
    if rule.scope is access.Scope.CHOSEN and request.state.form:
        in_form = await _form_field(request, "project")
    async with deps.database.read() as session:
        if "job_id" in path:
            query = select(JobRow.project_id, JobRow.cluster_id).where(JobRow.id == path["job_id"])
            row = (await session.execute(query)).one_or_none() if _ID.fullmatch(path["job_id"]) else None
            if row is None:
                return Target(job_id=path["job_id"])
            was_on = None
            asking = principal.cluster_id
            if rule.scope is access.Scope.JOBS_CLUSTERS and asking is not None and asking != row.cluster_id:
                was_on = asking if await _entered(session, path["job_id"], asking) else None
            return Target(project=row.project_id, job_id=path["job_id"], cluster_id=row.cluster_id, was_on=was_on)
        if "cluster_id" in path:
            return Target(cluster_id=path["cluster_id"])
        if rule.scope not in (access.Scope.PROJECT, access.Scope.CHOSEN):
            return Target()
        named = path.get("project_id") or request.query_params.get("project") or in_form or default_project(principal)
        project = await session.get(ProjectRow, named) if _ID.fullmatch(named) else None
    return Target(project=None if project is None else project.id, named_project=named)


async def _entered(session: AsyncSession, job_id: str, cluster_id: str) -> bool:
    """Whether the journal, as far as it is kept, says that the job began there."""
    there = JournalRow.payload["cluster"].as_string() == cluster_id
    query = select(JournalRow.seq).where(JournalRow.job_id == job_id, JournalRow.kind == ClusterEntered.kind, there)
    return (await session.scalar(query.limit(1))) is not None


def _principal(request: Request) -> Principal:
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def _project(request: Request) -> str:
    project = request.state.project
    assert isinstance(project, str)
    return project


Caller = Annotated[Principal, Depends(_principal)]
ChosenProject = Annotated[str, Depends(_project)]
"""The project of whatever a route with the scope `chosen`, `project` or `job` is about."""


def refused(request: Request, problem: Problem) -> None:
    """Says why nothing came of a request, for the record."""
    deed: Deed | None = getattr(request.state, "deed", None)
    if deed is not None:
        deed.code = problem.code


def did(request: Request, target: str, project: str | None = None) -> None:
    """Says what came of a request, for the record."""
    deed: Deed | None = getattr(request.state, "deed", None)
    if deed is not None:
        deed.target = target
        deed.project = project or deed.project
