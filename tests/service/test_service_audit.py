"""What was done, and by whom, stays what it was: the database itself refuses all else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import Delete, Update, delete, select, text, update
from sqlalchemy.exc import DBAPIError

from shoal_service import audit
from shoal_service.database import Database
from shoal_service.models_people import AuditRow


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = Database(database_url)
    await found.migrate()
    yield found
    await found.close()


async def add(database: Database, *actions: str) -> list[tuple[str, str]]:
    async with database.write() as session:
        for action in actions:
            audit.record(
                session, principal=None, action=action, target="job_1", project="default", address=None, status=201
            )
    return await held(database)


async def held(database: Database) -> list[tuple[str, str]]:
    async with database.read() as session:
        return [(row.id, row.action) for row in (await session.scalars(select(AuditRow).order_by(AuditRow.id))).all()]


@pytest.mark.parametrize(
    "change",
    [
        update(AuditRow).values(actor_name="somebody else"),
        update(AuditRow).where(AuditRow.action == "cancel").values(status=403),
        delete(AuditRow).where(AuditRow.action == "cancel"),
        delete(AuditRow),
    ],
    ids=["all-changed", "one-changed", "one-removed", "all-removed"],
)
async def test_audit_events_are_append_only(database: Database, change: Update | Delete) -> None:
    before = await add(database, "submit", "cancel")
    with pytest.raises(DBAPIError, match="append-only"):
        async with database.write() as session:
            await session.execute(change)
    assert await held(database) == before
    assert len(await add(database, "resume")) == 3, "what is new is added as before"


async def test_nor_do_they_go_by_other_ways(database: Database) -> None:
    """Rows that take the place of others in SQLite; all of them at once in PostgreSQL."""
    before = await add(database, "submit")
    replace = (
        f"INSERT OR REPLACE INTO audit_events (id, at_s, action, status) VALUES ('{before[0][0]}', 0, 'none', 200)"
    )
    change = {"sqlite": replace, "postgresql": "TRUNCATE audit_events"}[database.engine.dialect.name]
    with pytest.raises(DBAPIError, match="append-only"):
        async with database.write() as session:
            await session.execute(text(change))
    assert await held(database) == before
