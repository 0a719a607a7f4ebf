"""Counts every request by its route, and how long its answer took to begin. Outermost, so that refusals count, too."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_service.meters import Meters

# Routes and methods that exist: whatever else somebody asks for would be a new series each.
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_NO_ROUTE = "none"
_NO_STATUS = 499  # the client has gone before there was an answer
_FAILED = 500


class Metered:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status, streaming = time.monotonic(), _NO_STATUS, False
        method = scope["method"] if scope["method"] in _METHODS else "other"

        async def noting(message: Message) -> None:
            nonlocal status, streaming
            if message["type"] == "http.response.start":
                status = message["status"]
                self._meters.answers.labels(method, _route(scope)).observe(time.monotonic() - began_s)
                kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
                streaming = any(kind.startswith(b"text/event-stream") for kind in kinds)
                if streaming:
                    self._meters.streams.labels(_route(scope)).inc()
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:  # whatever it was counts as a failure; who answers 500 to it is further in, or the server
            status = _FAILED
            raise
        finally:
            if streaming:
                self._meters.streams.labels(_route(scope)).dec()
            self._meters.requests.labels(method, _route(scope), str(status)).inc()


def _route(scope: Scope) -> str:
    """The path as it is declared, as in `/v1/jobs/{job_id}`."""
    if scope["path"].startswith("/static/"):
        return "/static"
    return getattr(scope.get("route"), "path", None) or _NO_ROUTE
