"""Versions side by side, as while replicas are replaced one by one: what a migration may do to older programs, and what
programs do on tables that are newer than they are."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from alembic import command
from alembic.script import ScriptDirectory
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, start_control_plane, story
from earlier import paths_before
from postgres import RunningPostgres
from schemas import Schema, narrowed, schema_of
from sqlalchemy import Connection, text

from shoal_recovery.journal import entry_to_mapping
from shoal_service.database import Database, alembic_config
from shoal_service.schema_floor import SchemaFloorRow

NEWER_FIELDS = ("stalled_s", "shards", "num_shards")  # of entries of journals, since before the newest migration
NEWER = "9999"
ADDS = "ALTER TABLE webhooks ADD COLUMN colour VARCHAR(9) NOT NULL DEFAULT 'red'"


def revisions() -> list[str]:
    return [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]


@pytest.fixture(scope="module")
def history(postgres: RunningPostgres) -> dict[str, tuple[Schema, str | None]]:
    """What the tables were after each migration, and from which revision on programs worked on them."""
    database = Database(postgres.new_database())
    found: dict[str, tuple[Schema, str | None]] = {}

    def upgrade(connection: Connection) -> None:
        for revision in revisions():
            command.upgrade(alembic_config(connection), revision)
            schema = schema_of(connection)
            is_told = SchemaFloorRow.__tablename__ in schema
            floor = connection.scalar(text("SELECT revision FROM schema_floor")) if is_told else None
            found[revision] = (schema, floor)

    async def run() -> None:
        async with database.engine.connect() as connection:
            await connection.run_sync(upgrade)
        await database.close()

    asyncio.run(run())
    return found


def test_a_migration_takes_nothing_from_the_version_before_or_says_so(
    history: dict[str, tuple[Schema, str | None]],
) -> None:
    known = revisions()
    for before, after in itertools.pairwise(known):
        (old, old_floor), (new, floor) = history[before], history[after]
        assert floor is None or floor <= after
        if old_floor is not None and (taken := narrowed(old, new)):
            assert floor == after, f"{after} takes from older programs, and leaves schema_floor as it is: {taken}"


def test_the_comparison_finds_what_older_programs_would_miss(
    history: dict[str, tuple[Schema, str | None]],
) -> None:
    assert narrowed(history["0019"][0], history["0020"][0]) == ["webhooks.form is new, and has to be given"]
    assert narrowed(history["0019"][0], history["0022"][0]) == []
    backwards = narrowed(history["0022"][0], history["0019"][0])
    assert "the table schema_floor is gone" in backwards and "webhooks.form is gone" in backwards


async def change(url: str, *statements: str) -> None:
    database = Database(url)
    async with database.write() as session:
        for statement in statements:
            await session.execute(text(statement))
    await database.close()


def make_newer(url: str, floor: str) -> None:
    """As the next version would: with a column more, and programs from `floor` on."""
    version = f"UPDATE alembic_version SET version_num = '{NEWER}'"
    asyncio.run(change(url, ADDS, version, f"UPDATE schema_floor SET revision = '{floor}'"))


def migrate(url: str) -> None:
    async def bring_up() -> None:
        database = Database(url)
        try:
            await database.migrate()
        finally:
            await database.close()

    asyncio.run(bring_up())


def test_tables_of_a_newer_version_are_left_as_they_are_where_it_allows_that(database_url: str) -> None:
    migrate(database_url)
    make_newer(database_url, revisions()[-1])
    migrate(database_url)
    asyncio.run(change(database_url, f"UPDATE schema_floor SET revision = '{NEWER}'"))
    said = f"the tables of a newer version ({NEWER}), on which this one ({revisions()[-1]}) cannot work"
    with pytest.raises(ValueError, match=re.escape(said)):
        migrate(database_url)


@pytest.fixture
def before(tmp_path: Path) -> str:
    """Where the programs of before the newest migration are found."""
    return paths_before(tmp_path)


@pytest.fixture
def old_plane(
    before: str, postgres: RunningPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ControlPlane, str]]:
    url = postgres.new_database()
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", before)
        plane = start_control_plane(tmp_path / "data", database_url=url)
    yield plane, url
    plane.stop()


def use(plane: ControlPlane, name: str) -> dict[str, Any]:
    """All that writes: what comes of a job in the end."""
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=60) as http:
        connector = Connector(http=http)
        ok(connector.renew())
        ok(http.post("/v1/webhooks", json={"url": f"https://{name}.example.org/hook", "events": ["job.failed"]}))
        ok(http.post("/v1/tokens", json={"name": name, "role": "viewer"}))
        ok(http.post("/v1/projects", json={"id": name}))
        job_id = ok(http.post("/v1/jobs", json=job_mapping(name=name)))["id"]
        # Servers are replaced before clusters, which tell what the version before knows.
        entries = [entry_to_mapping(entry) for entry in story(job_mapping(name=name), started_at_s=1e9).entries]
        told = [{key: value for key, value in entry.items() if key not in NEWER_FIELDS} for entry in entries]
        body = {"cluster_id": connector.cluster_id, "holder": connector.holder, "entries": told}
        ok(http.post(f"/v1/jobs/{job_id}/journal", json=body))
        found: dict[str, Any] = ok(http.get(f"/v1/jobs/{job_id}"))
        return found


@pytest.mark.timeout(600)
def test_the_version_before_serves_on_beside_the_new_one(old_plane: tuple[ControlPlane, str], tmp_path: Path) -> None:
    """In the order of the chart: it serves, the tables become those of the new version, which then serves beside it."""
    old, url = old_plane
    assert use(old, "first")["status"]["state"] == "succeeded"
    migrate(url)
    assert use(old, "second")["status"]["state"] == "succeeded"
    with control_plane(tmp_path / "data", database_url=url) as new:
        assert use(new, "third")["status"]["state"] == "succeeded"
        assert use(old, "fourth")["status"]["state"] == "succeeded"
        with httpx.Client(base_url=new.url, headers=new.headers, timeout=60) as http:
            names = {job["name"] for job in ok(http.get("/v1/jobs"))["items"]}
            forms = [hook["form"] for hook in ok(http.get("/v1/webhooks"))["items"]]
    assert names == {"first", "second", "third", "fourth"} and forms == ["json"] * 4
