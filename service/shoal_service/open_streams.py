"""How many streams of server-sent events this process holds open, of whom, and no more of them than the operator says:
each one takes memory, a connection and a look at the database now and then."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from shoal_service.errors import Problem

_PING_S = 15
_SEND_S = 60.0  # a reader that takes nothing for so long is gone, or as good as that
_RETRY_S = 30
_LOOK_AGAIN_S = 5.0  # how long who may not read any more may do so


class OpenStreams:
    """Use from one event loop. `each`: of one subject, as `Principal` has it; `in_all`: of this process."""

    def __init__(self, each: int, in_all: int) -> None:
        self._each = each
        self._in_all = in_all
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._of.total()

    @contextmanager
    def one_more(self, subject: str) -> Iterator[None]:
        """Raises Problem: 429 where this subject has too many, 503 where all together have."""
        more: dict[str, object] = {"retry_after_s": _RETRY_S}
        if self._of[subject] >= self._each:
            detail = f"you have {self._each} event streams open, as many as one may: close some, or ask for pages"
            raise Problem(429, "too_many_streams", detail, None, more)
        if len(self) >= self._in_all:
            detail = f"{self._in_all} event streams are open, as many as this server holds: ask again, or for pages"
            raise Problem(503, "streams_exhausted", detail, None, more)
        self._of[subject] += 1
        try:
            yield
        finally:
            self._of[subject] -= 1
            if not self._of[subject]:
                del self._of[subject]

    def response(self, subject: str, events: AsyncIterator[ServerSentEvent]) -> EventSourceResponse:
        """An answer that counts from its first byte until its reader has gone, in whatever way."""
        return _Counted(self, subject, events)


async def while_allowed(
    events: AsyncIterator[ServerSentEvent], may: Callable[[], Awaitable[bool]], every_s: float = _LOOK_AGAIN_S
) -> AsyncIterator[ServerSentEvent]:
    """The events, as long as `may` says yes: it is asked every so often, whether there are events or none."""
    looked_s, coming = time.monotonic(), asyncio.ensure_future(_following(events))
    try:
        while True:
            await asyncio.wait((coming,), timeout=max(0.0, looked_s + every_s - time.monotonic()))
            if time.monotonic() - looked_s >= every_s:
                if not await may():
                    yield ServerSentEvent(comment="you may not read this any more", sep="\n")
                    return
                looked_s = time.monotonic()
            if coming.done():
                event = coming.result()
                if event is None:
                    return
                yield event
                coming = asyncio.ensure_future(_following(events))
    finally:
        coming.cancel()


async def _following(events: AsyncIterator[ServerSentEvent]) -> ServerSentEvent | None:
    return await anext(events, None)


class _Counted(EventSourceResponse):
    """Refuses before it begins: so nothing can come between counting and the end that takes it back."""

    def __init__(self, streams: OpenStreams, subject: str, events: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(events, ping=_PING_S, send_timeout=_SEND_S)
        self._streams = streams
        self._subject = subject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams.one_more(self._subject):
            await super().__call__(scope, receive, send)
