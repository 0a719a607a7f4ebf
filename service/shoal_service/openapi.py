"""The description of the API for programs: what FastAPI finds in the routes, and what holds for all of them."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from shoal_service.documents import components as documents
from shoal_service.documents import reference
from shoal_service.gate import is_open
from shoal_service.problems import ProblemBody, documented
from shoal_service.shapes import NAMED

_HAS_BODY = ("post", "put", "patch")
# Bodies are read whatever the method is.
_OF_ALL = (408, 413, 500, 503)
_ETAG = {"description": "For If-Match.", "schema": {"type": "string"}}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token of this server."},
}
_PAGE = re.compile(r"Page_(\w+)_")  # pydantic's name of a page of something
_NOT_OURS = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI) -> None:
    """Makes `app.openapi()` say all of it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(found: dict[str, Any]) -> dict[str, Any]:
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            _complete_operation(path, method, operation)
    schemas = {"Problem": ProblemBody.model_json_schema(), **found["components"]["schemas"], **documents()}
    kept = {_renamed(name): schema for name, schema in schemas.items() if name not in _NOT_OURS}
    components = {"schemas": dict(sorted(kept.items())), "securitySchemes": _SCHEMES}
    completed: dict[str, Any] = _linked({**found, "components": components})
    return completed


def _linked(value: Any) -> Any:
    """With references where components are named, which go by the names that they have here."""
    if isinstance(value, list):
        return [_linked(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _linked(each) for key, each in value.items() if key != NAMED}
    if isinstance(found.get("$ref"), str):
        found["$ref"] = _renamed(found["$ref"])
    return {**found, **reference(value[NAMED])} if NAMED in value else found


def _renamed(name: str) -> str:
    return _PAGE.sub(r"PageOf\1", name)


def _takes_etag(operation: dict[str, Any]) -> bool:
    return any(each["name"].lower() == "if-match" for each in operation.get("parameters", ()))


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    common = {*_OF_ALL, *((400,) if method in _HAS_BODY else ()), *((415,) if "requestBody" in operation else ())}
    if is_open(path):
        operation["security"] = []
    else:
        operation["security"] = [{name: []} for name in _SCHEMES]
        common |= {401, 403}
    said = operation["responses"]
    if _takes_etag(operation):
        for status in said.keys() & {"200", "201", "202"}:
            said[status].setdefault("headers", {})["ETag"] = _ETAG
    # FastAPI names a body of its own for 422; ours is a Problem.
    for status, response in documented(*common).items():
        if is_open(path) and status in (401, 403, 422):
            continue
        said.setdefault(str(status), response)
    operation["responses"] = dict(sorted(said.items()))
