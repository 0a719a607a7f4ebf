"""Database URLs as libpq has them: options are heeded, or refused by name; tried with a PostgreSQL that speaks TLS."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import RunningPostgres, start_postgres
from sqlalchemy import text
from started_nodes import certificate
from typer.testing import CliRunner

from shoal.cli import app
from shoal_service.database import Database
from shoal_service.database_url import connection_options, with_driver
from shoal_service.errors import DatabaseAway

BASE = "postgresql://u:secret@h/n"


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("", "postgresql://"),
        ("sslmode=require", "postgresql://?sslmode=require"),
        ("ssl=require", "postgresql://?sslmode=require"),
        (
            "sslmode=disable&target_session_attrs=read-write",
            "postgresql://?sslmode=disable&target_session_attrs=read-write",
        ),
    ],
)
def test_options_of_libpq_go_to_the_driver(query: str, options: str) -> None:
    plain, found = connection_options(with_driver(f"{BASE}?{query}"))
    assert (found, dict(plain.query)) == (options, {})
    assert plain.render_as_string(hide_password=False) == "postgresql+asyncpg://u:secret@h/n"


def test_options_of_sqlalchemy_stay() -> None:
    plain, found = connection_options(with_driver(f"{BASE}?host=/run/postgresql&prepared_statement_cache_size=0"))
    assert found == "postgresql://"
    assert dict(plain.query) == {"host": "/run/postgresql", "prepared_statement_cache_size": "0"}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("channel_binding=secret", "the option 'channel_binding' is not known; known are sslmode, "),
        ("sslmode=sometimes", "sslmode = 'sometimes' must be one of disable, allow, prefer, require, verify-ca"),
        ("sslmode=require&ssl=require", "ssl and sslmode say the same"),
        ("sslmode=require&sslmode=disable", "the option 'sslmode' is given more than once"),
        ("sslmode=verify-full&sslrootcert=/no/such.crt", "sslrootcert = '/no/such.crt' is no file that is there"),
    ],
)
def test_what_nobody_would_heed_is_refused_by_name(query: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^database_url: ") as refused:
        with_driver(f"{BASE}?{query}")
    assert problem in str(refused.value) and "secret" not in str(refused.value)


def test_the_migrations_say_so_in_a_line() -> None:
    done = CliRunner().invoke(app, ["migrate", "--database-url", f"{BASE}?channel_binding=require"])
    assert done.exit_code != 0
    assert "the option 'channel_binding' is not known" in f"{done.output}{done.exception}"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningPostgres, Path]]:
    """A server that takes TLS alone, and the certificate of its authority."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("no PostgreSQL that speaks TLS is installed (Debian package postgresql)")
    server = start_postgres(programs=found[-1].parent)
    try:
        data = server.directory / "data"
        cert, key = certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1")
        owner = data.stat().st_uid
        for source, name in ((cert, "server.crt"), (key, "server.key")):
            shutil.copy(source, data / name)
            shutil.chown(data / name, owner)
            (data / name).chmod(0o600)
        with (data / "postgresql.conf").open("a") as config:
            config.write("\nssl = on\n")
        (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 trust\n")
        server.stop()
        server.start()
        yield server, cert
    finally:
        server.close()


def ask(url: str) -> bool:
    """Whether the connection is encrypted. Raises DatabaseAway."""

    async def asked() -> bool:
        database = Database(url)
        try:
            async with database.read() as session:
                return bool(await session.scalar(text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")))
        finally:
            await database.close()

    return asyncio.run(asked())


def test_a_connection_is_as_its_url_says(encrypted: tuple[RunningPostgres, Path], tmp_path: Path) -> None:
    server, authority = encrypted
    stranger, _ = certificate(tmp_path, "127.0.0.1")
    assert ask(f"{server.url()}?sslmode=require")
    assert ask(f"{server.url()}?sslmode=verify-full&sslrootcert={authority}")
    with pytest.raises(DatabaseAway) as refused:
        ask(f"{server.url()}?sslmode=verify-full&sslrootcert={stranger}")
    assert "CERTIFICATE_VERIFY_FAILED" in refused.value.why
    with pytest.raises(Exception, match="no encryption"):
        ask(f"{server.url()}?sslmode=disable")
    assert server.sql("SELECT 1", "postgres?sslmode=require") == "1", "psql takes the same URL"
