"""The database connection and its migrations. Owns how transactions begin; not what is in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

MIGRATIONS = Path(__file__).parent / "migrations"


class Database:
    """`read()` and `write()` yield sessions; `write()` commits when its block ends without an exception.

    In SQLite a writing transaction takes the write lock when it begins: two that first read and then write would
    otherwise both be refused half way.
    """

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        async with self._sessions() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        async with self._sessions() as session:
            await session.connection(execution_options={"shoal_write": True})
            yield session
            await session.commit()

    async def migrate(self) -> None:
        """Brings the schema to the newest version."""
        async with self.engine.connect() as connection:
            await connection.run_sync(_upgrade)
            await connection.commit()

    async def close(self) -> None:
        await self.engine.dispose()


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    command.upgrade(alembic_config(connection), "head")


def _engine(url: str) -> AsyncEngine:
    if not url.startswith("sqlite"):
        return create_async_engine(url, pool_pre_ping=True)
    engine = create_async_engine(url, connect_args={"timeout": 30})
    event.listen(engine.sync_engine, "connect", _configure_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    raw: Any = connection
    raw.isolation_level = None  # the driver would begin transactions at moments of its own choice
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("shoal_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
