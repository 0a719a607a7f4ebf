"""Turns every refusal into application/problem+json, and tells OpenAPI that it is so."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from shoal_planner.errors import InvalidField
from shoal_service.errors import BadInput, DatabaseAway, NotFound, Problem, Raced, Unavailable
from shoal_service.request_ids import HEADER, current_id

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
MEDIA_TYPE = "application/problem+json"
_log = structlog.get_logger(__name__)


class ProblemBody(BaseModel):
    """What every refusal looks like."""

    model_config = ConfigDict(extra="allow", title="Problem")

    type: str = Field(description="A URN that names the kind of problem.")
    title: str = Field(description="The phrase of the HTTP status.")
    status: int
    detail: str = Field(description="One sentence for a person, naming field and value.")
    code: str = Field(description="Stable for programs, as in invalid_field or no_plan_fits.")
    param: str | None = Field(description="The field that it is about, as a dotted path.")


def documented(
    *statuses: int, ok: Any = None, created: Any = None, accepted: Any = None
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's `responses` for these refusals, and for answers of these shapes (`shapes`) with 200, 201 and 202; what
    every route may answer goes without saying."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: schema}}
        for status in sorted({401, 403, 422, 429, 503, *statuses})
    }
    shapes = {200: ok, 201: created, 202: accepted}
    return {status: {"model": shape} for status, shape in shapes.items() if shape is not None} | refusals


def response(problem: Problem) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}
    if "retry_after_s" in problem.extra:
        headers["Retry-After"] = str(problem.extra["retry_after_s"])
    if isinstance(problem, Unavailable):
        headers["Retry-After"] = str(problem.retry_after_s)
    return JSONResponse(problem.body(), status_code=problem.status, media_type=MEDIA_TYPE, headers=headers)


Answer = Callable[[Request, Problem], Response]


def install(app: FastAPI, answer: Answer) -> None:
    """`answer` gives a problem its form: a page for browsers, `response` for all others."""

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        if isinstance(error, DatabaseAway):
            _log.warning("database_unavailable", method=request.method, path=request.url.path, why=error.why)
        if isinstance(error, Raced):
            _log.info("created_meanwhile", method=request.method, path=request.url.path, why=error.why)
        return answer(request, error)

    async def on_invalid_request(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        if isinstance(error.body, bytes):  # as it came: only what is announced as JSON has been read
            return answer(request, _not_json(request))
        return answer(request, _invalid_request(error))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_error)


def _not_json(request: Request) -> BadInput:
    given = request.headers.get("content-type", "")[:100]
    detail = f"Content-Type = {given!r}: send application/json"
    return BadInput("unsupported_media_type", detail, "Content-Type", status=415)


def _invalid_request(error: RequestValidationError) -> BadInput:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return BadInput("malformed_body", f"the body is not valid JSON: {first['ctx']['error']}", "body", status=400)
    field = _path(first["loc"])
    if first["type"] == "missing":
        return BadInput("invalid_field", f"{field}: is required", field)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return BadInput("invalid_field", str(InvalidField(field, first.get("input"), message)), field)


def _path(location: tuple[str | int, ...]) -> str:
    """`("body", "entries", 0, "seq")` as `entries[0].seq`; a query parameter or header by its name alone."""
    if location[0] == "query":  # one that is given more than once has a number behind its name
        location = location[:2]
    text = ""
    for part in location[1:] or location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem: Problem
    if error.status_code == 404:
        problem = NotFound("no_such_route", f"{request.method} {request.url.path}: there is no such route")
    elif error.status_code == 405:
        problem = Problem(405, "method_not_allowed", f"{request.method} is not possible on {request.url.path}")
    else:
        problem = Problem(error.status_code, "http_error", str(error.detail))
    answer = response(problem)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    if error.status_code == 405:
        answer.headers["Allow"] = ", ".join(_allowed(request))
    return answer


def _allowed(request: Request) -> list[str]:
    """By all routes of that path, and not by the first alone."""
    routes = request.app.routes
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    scopes["HEAD"] = scopes["GET"]  # as `heads` answers it
    return [name for name, scope in scopes.items() if any(one.matches(scope)[0] is Match.FULL for one in routes)]


async def _on_error(request: Request, error: Exception) -> Response:
    # The cause is in the log alone: it may name paths or addresses that are nobody's business outside.
    _log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
    answer = response(Problem(500, "internal_error", "the control plane failed at this request; its log says why"))
    answer.headers[HEADER] = current_id()
    return answer
