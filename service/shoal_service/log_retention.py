"""Forgets printed lines that are old, now and then. Owns when; which ones is log_store's."""

from __future__ import annotations

import asyncio
import time

import structlog
from sqlalchemy.exc import SQLAlchemyError

from shoal_service import log_store
from shoal_service.database import Database

log = structlog.get_logger()

_EVERY_S = 600.0


async def forget_old(database: Database, kept_s: float, now_s: float) -> int:
    """How many chunks of lines were deleted."""
    why = f"lines are kept for {kept_s / 86400:g} days"
    async with database.write() as session:
        return await log_store.forget(session, now_s - kept_s, why)


async def keep_forgetting(database: Database, kept_s: float) -> None:
    """Until it is cancelled."""
    while True:
        try:
            if count := await forget_old(database, kept_s, time.time()):
                log.info("old lines forgotten", chunks=count)
        except (SQLAlchemyError, OSError):  # a database that is away comes back
            log.exception("old lines are not forgotten")
        await asyncio.sleep(_EVERY_S)
