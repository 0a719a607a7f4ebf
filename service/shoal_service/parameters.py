"""Parameters of a query that a route does not have are refused, as unknown fields of a body are: a name that is spelt
wrong must not pass for one that was left out. So is the character NUL wherever it stands: no text of PostgreSQL's holds
it, and what is kept where is nobody's business."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant

from shoal_planner.errors import InvalidField
from shoal_service.errors import BadInput, invalid_field


async def known_parameters(request: Request) -> None:
    """Runs before every route. Raises BadInput; of what is no parameter of the API's, with those that the route has."""
    route = request.scope["route"]
    for name, value in (*request.path_params.items(), *request.query_params.multi_items()):
        if "\0" in name or "\0" in value:
            raise invalid_field(InvalidField(name[:100], value[:100], "must not hold the character NUL"))
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
