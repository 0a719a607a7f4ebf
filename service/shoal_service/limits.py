"""How much a request may send, and how long it may take: bodies are read here, whole, before anybody looks at them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_service.errors import BadInput, Problem


class Limits:
    """ASGI middleware. Refuses bodies of more than `max_body_bytes` (413), however they are announced, and those that
    have not come within `timeout_s` (408), whose connections are closed then."""

    def __init__(
        self,
        app: ASGIApp,
        refuse: Callable[[Request, Problem], Response],
        max_body_bytes: int,
        timeout_s: float,
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            slow = Problem(408, "body_too_slow", f"the body did not come within {self._timeout_s:g} s")
            await self._answer(slow, scope, receive, send)
            return
        except BadInput as problem:
            await self._answer(problem, scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """None where the client has gone meanwhile. Raises BadInput."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                raise BadInput("body_too_large", f"at most {self._max_body_bytes} bytes are read", status=413)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _answer(self, problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._refuse(Request(scope), problem)
        response.headers["Connection"] = "close"  # the rest of the body is not waited for
        await response(scope, receive, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal message
        if message is None:
            return await receive()
        first, message = message, None
        return first

    return replay
