"""Parameters of a query that a route does not have are refused, as unknown fields of a body are: a name that is spelt
wrong must not pass for one that was left out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant

from shoal_service.errors import BadInput


async def known_parameters(request: Request) -> None:
    """Runs before every route of the API. Raises BadInput, which names those that the route has."""
    route = request.scope["route"]
    if not request.query_params or not route.path.startswith("/v1/"):
        return
    known = sorted(set(_declared(route.dependant)))
    for name in request.query_params:
        if name not in known:
            raise BadInput("unknown_parameter", _detail(name, known), name[:100])


def _declared(dependant: Dependant) -> Iterator[str]:
    for field in dependant.query_params:
        yield field.alias
    for each in dependant.dependencies:
        yield from _declared(each)


def _detail(name: str, known: list[str]) -> str:
    said = f"{name[:100]}: is no parameter of this route"
    if not known:
        return f"{said}, which has none"
    near = difflib.get_close_matches(name[:100], known, 1)
    return f"{said}{f'; {near[0]} is' if near else ''}. It has: {', '.join(known)}"
