"""HEAD: wherever GET is answered, the same without what it holds."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """ASGI middleware: whoever is further in sees GET, and that the client has gone once the answer has begun: so no
    stream is read that nobody hears."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})  # one for both: what is found out of the caller is noted further out
        inner, begun = {**scope, "method": "GET"}, False

        async def hear() -> Message:
            return {"type": "http.disconnect"} if begun else await receive()

        async def say(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and not begun:
                begun = True
                if "route" in inner:
                    scope["route"] = inner["route"]
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(inner, hear, say)
