"""Pages and their parts as answers: the templates, what every page carries, the headers that keep it to itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import Request
from markupsafe import Markup
from starlette.responses import Response
from starlette.templating import Jinja2Templates

from shoal_service import access, auth
from shoal_service.access import Target
from shoal_service.rules import RULES
from shoal_service.timeline import duration, num_bytes
from shoal_service.utilisation import in_percent
from shoal_service.words import dollars

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
templates = Jinja2Templates(directory=Path(__file__).parent / "templates")
templates.env.filters.update(num_bytes=num_bytes, duration=duration, dollars=dollars, in_percent=in_percent)
templates.env.trim_blocks = templates.env.lstrip_blocks = True


def rendered(
    request: Request, name: str, values: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A template as an answer. Forms in it find the token of the session as `csrf` (None: nobody is signed in), and ask
    `may` whether whoever looks at them may send them."""
    context = {**values, **_of_reader(request)}
    return templates.TemplateResponse(
        request, name, context, status_code=status, headers={**HEADERS, **(headers or {})}
    )


def fragment(request: Request, name: str, values: dict[str, Any]) -> Markup:
    """A template as a part of a page."""
    return Markup(templates.env.get_template(name).render({**values, **_of_reader(request)}))


def _of_reader(request: Request) -> dict[str, Any]:
    return {"csrf": _csrf(request), "may": permissions(request)}


def permissions(request: Request) -> Callable[[str], bool]:
    """Whether the reader of a page may use a route ("POST /jobs/{job_id}/pause") on what the page is about, as the gate
    would decide. A page that nobody is signed in to has no forms."""
    if getattr(request.state, "session", None) is None:
        return lambda _: False
    principal = request.state.principal
    target = Target(project=getattr(request.state, "project", None), job_id=request.path_params.get("job_id"))
    return lambda route: access.refusal(RULES[route], principal, target) is None


def _csrf(request: Request) -> str | None:
    session = getattr(request.state, "session", None)
    return None if session is None else auth.csrf_token(session)
