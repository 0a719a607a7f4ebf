"""Gives each request an id, which stands in every line that is logged because of it and in the answer (`X-Request-Id`),
and logs what came of it. Outermost. An id that a proxy or a client brings is kept if it looks like one."""

from __future__ import annotations

import re
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

log = structlog.get_logger()

HEADER = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestIds:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, began_s, status = _id_of(scope), time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER.encode(), request_id.encode())]
            await send(message)

        # They stay bound when this returns: what answers to an exception of ours is further out, and logs, too. The
        # server runs each request in a task of its own.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id, **_named(scope))
        try:
            await self._app(scope, receive, noting)
        except Exception:  # whatever it was is noted as a failure, and goes on to whoever answers it
            status = 500
            raise
        finally:
            _note(scope, status, time.monotonic() - began_s)


def current_id() -> str:
    """Of the request that is being answered."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def _id_of(scope: Scope) -> str:
    given = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
    return given if _ID.fullmatch(given) else f"req_{ULID()}"


def _named(scope: Scope) -> dict[str, str]:
    """The job that a path is about: `/jobs/ID/...` or `/v1/jobs/ID/...`."""
    found = re.match(r"(?:/v1)?/jobs/(job_[0-9A-Za-z]{1,40})(?:/|$)", scope["path"])
    return {} if found is None else {"job": found[1]}


def _note(scope: Scope, status: int, seconds: float) -> None:
    """What changed something, or went wrong, is worth a line; what was read is for those who look closely."""
    route = getattr(scope.get("route"), "path", None)
    principal = scope.get("state", {}).get("principal")
    level = "debug" if scope["method"] in _READING and 0 < status < 400 else "info"
    getattr(log, level)(
        "request",
        method=scope["method"],
        route=route,
        status=status or None,
        duration_s=round(seconds, 4),
        caller=None if principal is None else principal.subject,
    )
