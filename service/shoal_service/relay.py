"""Rings the bells of the other replicas on one PostgreSQL, and this one's when they ring: LISTEN and NOTIFY.

Owns a connection of its own. Where it breaks, replicas find each other's changes by looking again more often, and as it
is back everybody looks once, for what was missed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from typing import Any

import asyncpg
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_service.bell import Bell

log = structlog.get_logger()

_CHANNEL = "shoal_bell"
_MOST_TOPICS = 100  # in one notification, which PostgreSQL limits to 8,000 bytes
_ALIVE_S = 5.0
_AGAIN_S = 1.0


class Relay:
    """`start` in a running event loop."""

    def __init__(self, engine: AsyncEngine, bell: Bell) -> None:
        self._engine = engine
        self._bell = bell
        self._me = secrets.token_hex(8)
        self._topics: dict[str, None] = {}
        self._rung = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._bell.relay = self._pass_on
        self._task = asyncio.create_task(self._run(), name="relay")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _pass_on(self, topics: tuple[str, ...]) -> None:
        if self._bell.hears_others:  # else all look again anyway
            self._topics |= dict.fromkeys(topics)
            self._rung.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except (asyncpg.PostgresError, asyncpg.InterfaceError, SQLAlchemyError, OSError) as error:
                log.warning("other replicas are not heard", why=str(error))
            await asyncio.sleep(_AGAIN_S)

    async def _listen(self) -> None:
        async with self._engine.connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            try:
                await driver.add_listener(_CHANNEL, self._on_notification)
                self._bell.hears_others = True
                self._bell.heard_all()
                while True:
                    await self._send(driver, await self._next_topics())
            finally:
                self._bell.hears_others = False
                self._bell.heard_all()
                await connection.invalidate()  # it listens, so it is of no use to others

    async def _next_topics(self) -> Sequence[str]:
        try:
            async with asyncio.timeout(_ALIVE_S):
                await self._rung.wait()
        except TimeoutError:
            return ()
        self._rung.clear()
        topics, self._topics = list(self._topics), {}
        return topics

    async def _send(self, driver: Any, topics: Sequence[str]) -> None:
        """With no topics it only shows whether the connection still is one."""
        if not topics:
            await driver.execute("SELECT 1")
        for first in range(0, len(topics), _MOST_TOPICS):
            payload = json.dumps({"from": self._me, "topics": topics[first : first + _MOST_TOPICS]})
            await driver.execute("SELECT pg_notify($1, $2)", _CHANNEL, payload)

    def _on_notification(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        told = json.loads(payload)
        if told["from"] != self._me:
            self._bell.heard(*told["topics"])
