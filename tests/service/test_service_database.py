"""Jobs of older versions are kept; settings are the ones that are documented."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import text

from shoal.settings import ClientSettings
from shoal_service.database import Database, alembic_config
from shoal_service.database_url import with_driver
from shoal_service.errors import DatabaseAway
from shoal_service.jobs import get, status_of
from shoal_service.settings import Settings
from shoal_service.shares import of_job


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
        "ambient_storage",
        "behind_proxy",
        "body_timeout_s",
        "cloud_prices",
        "cluster_lost_s",
        "data_dir",
        "database_timeout_s",
        "database_url",
        "events_kept_s",
        "file_roots",
        "host",
        "log_bytes_per_job",
        "log_kept_s",
        "log_level",
        "login_code_s",
        "mail_domains",
        "mail_from",
        "max_body_bytes",
        "max_lease_s",
        "max_streams",
        "max_streams_each",
        "max_wait_s",
        "metrics_jobs",
        "no_progress_s",
        "oidc_admins",
        "oidc_audience",
        "oidc_client_id",
        "oidc_client_secret",
        "oidc_issuer",
        "oidc_scopes",
        "otlp_endpoint",
        "plan_time_limit_s",
        "points_kept_s",
        "poll_s",
        "pool_back_off_s",
        "pool_idle_s",
        "pool_start_s",
        "pool_wait_s",
        "port",
        "public_url",
        "session_s",
        "smtp_url",
        "standing_cluster_lost_s",
        "store_check_s",
        "tls_cert",
        "tls_key",
        "tokens_dir",
        "tracker_lease_s",
        "tracker_timeout_s",
        "tracking_hosts",
        "tracking_private",
        "trusted_proxies",
        "webhook_private",
    ]
    assert sorted(ClientSettings.model_fields) == ["data_dir", "project", "server", "token"]
    for kind in (Settings, ClientSettings):
        assert all(field.description for field in kind.model_fields.values())
    monkeypatch.setenv("SHOAL_PORT", "1234")
    monkeypatch.setenv("SHOAL_DATA_DIR", "/somewhere")
    assert Settings().port == 1234
    assert Settings().resolved_database_url == "sqlite+aiosqlite:////somewhere/shoal.db"
    assert Settings(host="::1").host == "::1"


async def test_a_file_that_others_write_to_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    """And what is acknowledged stands on the disk."""
    path = tmp_path / "shoal.db"
    database = Database(f"sqlite:///{path}", timeout_s=0.2)
    await database.migrate()
    async with database.read() as session:
        asked = [(await session.execute(text(f"PRAGMA {name}"))).scalar() for name in ("journal_mode", "synchronous")]
    assert asked == ["wal", 2]  # 2: FULL
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseAway) as refused:
        async with database.write():
            pass
    assert refused.value.retry_after_s >= 1 and "locked" in refused.value.why
    async with database.read() as session:  # readers are not held up
        assert (await session.execute(text("SELECT count(*) FROM jobs"))).scalar() == 0
    other.execute("ROLLBACK")
    other.close()
    async with database.write() as session:
        await session.execute(text("DELETE FROM secrets"))
    await database.close()


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://u:p@h/n", "postgresql+asyncpg"),
        ("postgres://h/n", "postgresql+asyncpg"),
        ("postgresql+psycopg://h/n", "postgresql+asyncpg"),
        ("sqlite:///a/b.db", "sqlite+aiosqlite"),
    ],
)
def test_a_database_is_named_as_everywhere(url: str, driver: str) -> None:
    assert with_driver(url).drivername == driver


@pytest.mark.parametrize(("url", "problem"), [("mysql://u:secret@h/n", "must be postgres"), ("secret", "is not a URL")])
def test_a_database_that_cannot_be_used_is_refused_without_its_password(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        with_driver(url)
    assert "secret" not in str(refused.value)
