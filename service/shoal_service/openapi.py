"""The description of the API for programs: what FastAPI finds in the routes, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from shoal_service.gate import is_open
from shoal_service.problems import ProblemBody, documented

_HAS_BODY = ("post", "put", "patch")
# Bodies are read whatever the method is.
_OF_ALL = (408, 413, 500, 503)
_ETAG = {"description": "For If-Match.", "schema": {"type": "string"}}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token of this server."},
}


def describe(app: FastAPI) -> None:
    """Makes `app.openapi()` say all of it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(found: dict[str, Any]) -> dict[str, Any]:
    components = found.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = ProblemBody.model_json_schema()
    components["securitySchemes"] = _SCHEMES
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            _complete_operation(path, method, operation)
    return found


def _takes_etag(operation: dict[str, Any]) -> bool:
    return any(each["name"].lower() == "if-match" for each in operation.get("parameters", ()))


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    common = {*_OF_ALL, *((400,) if method in _HAS_BODY else ())}
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
