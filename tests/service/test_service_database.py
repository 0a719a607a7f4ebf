"""Migrations give exactly the tables of the models; settings are the ones that are documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect

from shoal.settings import ClientSettings
from shoal_service.database import Database, alembic_config
from shoal_service.jobs import get, status_of
from shoal_service.models import Base
from shoal_service.settings import Settings
from shoal_service.shares import of_job


def differences(connection: Connection) -> list[Any]:
    context = MigrationContext.configure(connection, opts={"compare_type": True, "render_as_batch": True})
    return list(compare_metadata(context, Base.metadata))


async def test_migrations_give_the_tables_of_the_models(tmp_path: Path) -> None:
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'shoal.db'}")
    await database.migrate()
    await database.migrate()
    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    await database.close()
    tables = {"jobs", "journal", "step_points", "clusters", "secrets", "trackers", "shares"}
    assert set(names) == {"alembic_version", *tables}


async def test_jobs_of_older_versions_are_kept(tmp_path: Path) -> None:
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'shoal.db'}")
    names = "id, name, spec, wish, body_hash, created_at_s, updated_at_s, version, state, state_code, reason"
    values = "'job_1', 'old', '{}', 'run', 'x', 0, 0, 1, 'running', 'running', ''"
    async with database.engine.connect() as connection:
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "0001"))
        counts = "since_at_s, last_seq, step, epoch, num_recoveries, redone_steps, lost_steps"
        await connection.exec_driver_sql(f"INSERT INTO jobs ({names}, {counts}) VALUES ({values}, 0, 9, 7, 1, 0, 0, 0)")
        await connection.commit()
    await database.migrate()
    async with database.read() as session:
        status = status_of(await get(session, "job_1"))
        share = await of_job(session, "job_1")
    await database.close()
    assert (share.nodes, share.held) == (None, None), "it runs, and has its cluster to itself"
    assert (status.step, status.skipped_steps, status.eval_step, status.eval_loss) == (7, 0, None, None)


def test_settings_are_documented_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new setting is a decision: it changes this list."""
    assert sorted(Settings.model_fields) == [
        "cluster_lost_s",
        "data_dir",
        "database_url",
        "host",
        "log_level",
        "login_code_s",
        "max_body_bytes",
        "max_lease_s",
        "max_wait_s",
        "plan_time_limit_s",
        "poll_s",
        "port",
        "public_url",
        "session_s",
        "store_check_s",
        "tracker_lease_s",
        "tracker_timeout_s",
    ]
    assert sorted(ClientSettings.model_fields) == ["data_dir", "server", "token"]
    for kind in (Settings, ClientSettings):
        assert all(field.description for field in kind.model_fields.values())
    monkeypatch.setenv("SHOAL_PORT", "1234")
    monkeypatch.setenv("SHOAL_DATA_DIR", "/somewhere")
    assert Settings().port == 1234
    assert Settings().resolved_database_url == "sqlite+aiosqlite:////somewhere/shoal.db"
    assert Settings(host="::1").host == "::1"
