"""What is answered is for whoever asked, and is what it says that it is: no browser or proxy keeps it, and none guesses
another type. Answers that say something of this themselves, and files that are the same for all, are left alone."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FOR_EVERYBODY = ("/static/", "/openapi.json")


class Unkept:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def saying(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                if not scope["path"].startswith(_FOR_EVERYBODY):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, saying)
