"""Work that is done again and again beside requests. When the server stops it finishes what it is at: who is cancelled
within a transaction may leave the database locked for others, who then wait in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()

_STOP_S = 5.0  # that a turn has to end by itself


class Turns:
    """`start` in a running event loop. A turn that fails is taken again `every_s` later."""

    def __init__(self, name: str, turn: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._name = name
        self._turn = turn
        self._every_s = every_s
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def close(self) -> None:
        if self._task is not None:
            self._stopping.set()
            await asyncio.wait({self._task}, timeout=_STOP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._turn()
            except Exception:  # a database that is away comes back; what else surprises must not end it for good
                log.exception("work beside requests cannot be done at present", task=self._name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._stopping.wait()
