"""Brings the database to the tables of this version, when a server starts or before it does (`shoal migrate`). Of those
that try at the same time one does it, the others wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import asyncpg
import structlog
from sqlalchemy.exc import DBAPIError

from shoal_service.database import Database
from shoal_service.errors import DatabaseAway

log = structlog.get_logger()

_AGAIN_S = 1.0
_REFUSED = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)


async def bring_up(database: Database, given_up: Callable[[], bool] = lambda: False) -> None:
    """A database that is a server may come later than who asks. Raises DatabaseAway where it is a file, and once
    `given_up`."""
    while True:
        try:
            await database.migrate()
            return
        except DatabaseAway as error:
            if not database.is_postgres or given_up():
                raise
            log.warning("waits for the database", why=error.why)
            await asyncio.sleep(_AGAIN_S)


async def migrate(url: str, timeout_s: float) -> None:
    """Raises DatabaseAway where it is a file that cannot be used, and ValueError for one that lets nobody in by this
    URL."""
    database = Database(url, timeout_s=timeout_s)
    try:
        await bring_up(database)
    except DBAPIError as error:
        why = getattr(error.orig, "__cause__", None)
        if isinstance(why, _REFUSED):
            raise ValueError(f"database_url: the database refuses ({why})") from error
        raise
    finally:
        await database.close()
