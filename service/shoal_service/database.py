"""The database connection and its migrations. Owns how transactions begin, how long anybody waits for the database, and
what is said when it cannot be used; not what is in transactions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from shoal_service.database_errors import refusal
from shoal_service.database_url import connection_options, with_driver
from shoal_service.errors import DatabaseAway
from shoal_service.schema_floor import is_ahead

MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x5348_4F41_4C  # "SHOAL": of replicas that start together one migrates, the others wait for it
_CONNECTIONS = (10, 20)  # of one process: kept open, and more for a while


class Database:
    """`read()` and `write()` yield sessions; `write()` commits when its block ends without an exception. Both raise
    DatabaseAway where the database does not answer within `timeout_s` (`on_away` is called then), and BadInput for
    values that it cannot hold.

    In SQLite a writing transaction takes the write lock when it begins: two that first read and then write would
    otherwise both be refused half way. In PostgreSQL whoever is to write a row locks it when reading it.
    """

    def __init__(self, url: str, *, timeout_s: float = 10.0, on_away: Callable[[], None] = lambda: None) -> None:
        self.url = with_driver(url)
        self.engine = _engine(self.url, timeout_s)
        self._on_away = on_away
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @property
    def is_postgres(self) -> bool:
        return self.url.get_backend_name() == "postgresql"

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        async with self._answering(), self._session() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        async with self._answering(), self._session() as session:
            await session.connection(execution_options={"shoal_write": True})
            yield session
            await session.commit()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[AsyncSession]:
        async with self._sessions() as session:
            try:
                yield session
            except OSError:  # whoever does not answer is not asked to roll back either
                await session.invalidate()
                raise

    async def migrate(self) -> None:
        """Brings the schema to the newest version, however long that takes; a newer one that this version works on is
        left as it is. Raises DatabaseAway, and ValueError for a newer one that it does not work on."""
        engine = _engine(self.url, None)
        try:
            async with self._answering(), engine.connect() as connection:
                connection = await connection.execution_options(shoal_write=True)
                if self.is_postgres:
                    await connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
                await connection.run_sync(_upgrade)
                await connection.commit()
        finally:
            await engine.dispose()

    async def close(self) -> None:
        await self.engine.dispose()

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        try:
            yield
        except Exception as error:  # drivers fail in many ways, through SQLAlchemy or past it: `refusal` knows which
            refused = refusal(error)
            if refused is None:
                raise
            if isinstance(refused, DatabaseAway):
                self._on_away()
            raise refused from error


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    config = alembic_config(connection)
    if not is_ahead(connection, config):
        command.upgrade(config, "head")


def _engine(url: URL, timeout_s: float | None) -> AsyncEngine:
    if url.get_backend_name() == "postgresql":
        size, more = _CONNECTIONS
        waiting = {"timeout": timeout_s or 60.0, "command_timeout": timeout_s}
        limits = {"pool_size": size, "max_overflow": more, "pool_timeout": timeout_s or 60.0}
        # A plan for any values would be made after five queries; for a job with a million points it is the wrong one.
        named = {"server_settings": {"application_name": "shoal", "plan_cache_mode": "force_custom_plan"}}
        plain, options = connection_options(url)
        arguments = {"dsn": options, **waiting, **named}
        return create_async_engine(plain, pool_pre_ping=True, connect_args=arguments, **limits)
    engine = create_async_engine(url, connect_args={"timeout": timeout_s or 60.0})
    event.listen(engine.sync_engine, "connect", _configure_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    raw: Any = connection
    raw.isolation_level = None  # the driver would begin transactions at moments of its own choice
    cursor = connection.cursor()
    # FULL: what was acknowledged is on disk, so it survives the machine as well as the process.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("shoal_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
