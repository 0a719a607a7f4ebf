"""Many more jobs wait than are looked at: whose turn comes all the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
from control_plane import Connector, job_mapping, ok

from shoal_planner.cluster import parse_cluster
from shoal_planner.script_spec import parse_any_job
from shoal_service import clusters, jobs, queueing
from shoal_service.database import Database
from shoal_service.jobs import NewJob
from shoal_service.settings import Settings

MANY = queueing.SEEN + 50
NODES = {"nodes": [{"name": "n", "count": 4, "device": "T4", "price_per_hour": 1.0}]}
NEVER = {"min_devices": 99}


async def _waiting(database: Database, count: int, project: str, spec: dict[str, Any]) -> list[str]:
    """Jobs in the queue of the cluster, as submitted one by one."""
    parsed, began_s = parse_any_job(spec), time.time() - count
    async with database.write() as session:
        rows = [
            jobs.create(
                session,
                NewJob(project=project, spec=parsed, body_hash="", idempotency_key=None, cluster_id="local"),
            )
            for _ in range(count)
        ]
        for index, row in enumerate(rows):
            row.created_at_s = began_s + index
    return [row.id for row in rows]


def waiting(settings: Settings, count: int, project: str = "default", **changes: Any) -> list[str]:
    async def run() -> list[str]:
        database = Database(settings.database_url)
        try:
            return await _waiting(database, count, project, job_mapping(model={"layers": 2}, **changes))
        finally:
            await database.close()

    return asyncio.run(run())


def started(api: httpx.Client) -> Connector:
    connector = Connector(http=api, cluster=parse_cluster(NODES))
    ok(connector.renew())
    return connector


def given(connector: Connector) -> dict[str, list[str] | None]:
    """By job, the nodes that it may begin on; None: all."""
    return {wish["id"]: wish["share"]["nodes"] for wish in connector.wishes()["jobs"] if wish["share"]["nodes"] != []}


def test_a_project_is_not_overlooked_for_what_others_have_submitted(api: httpx.Client, settings: Settings) -> None:
    ok(api.post("/v1/projects", json={"id": "other"}))
    connector = started(api)
    first = waiting(settings, MANY)
    other = waiting(settings, 3, "other")
    assert sorted(given(connector)) == sorted([*first[:2], *other[:2]]), "each project has half of the cluster"
    assert ok(api.get(f"/v1/jobs/{other[2]}"))["status"]["code"] == "waits_for_nodes"


def test_a_lower_priority_of_another_project_has_a_turn_where_the_higher_fit_nowhere(
    api: httpx.Client, settings: Settings
) -> None:
    ok(api.post("/v1/projects", json={"id": "other"}))
    connector = started(api)
    waiting(settings, MANY, priority="high", limits=NEVER)
    (other,) = waiting(settings, 1, "other", priority="low")
    assert list(given(connector)) == [other]


def test_jobs_that_fit_nowhere_hold_up_nobody_of_their_own_project(
    api: httpx.Client, settings: Settings, eventually: Callable[..., object]
) -> None:
    connector = started(api)
    waiting(settings, MANY, priority="high", limits=NEVER)
    (fits,) = waiting(settings, 1)
    eventually(lambda: list(given(connector)) == [fits])


def test_a_job_that_was_given_nodes_keeps_them_however_many_come_after_it(
    api: httpx.Client, settings: Settings
) -> None:
    """It may be beginning at this very moment."""
    connector = started(api)
    (first,) = waiting(settings, 1, priority="low", limits={"min_devices": 4})
    assert given(connector) == {first: None}
    waiting(settings, MANY, priority="high")
    assert given(connector) == {first: ["n-0", "n-1", "n-2", "n-3"]}


def test_jobs_that_may_rent_are_found_behind_any_number_of_others(database_url: str) -> None:
    async def run() -> None:
        database = Database(database_url)
        await database.migrate()
        await _waiting(database, MANY, "default", job_mapping(priority="high"))
        limits = {"rent": True, "max_price_per_hour": 5.0}
        (rents,) = await _waiting(database, 1, "default", job_mapping(limits=limits))
        async with database.read() as session:
            found = await clusters.scheduled(session, "local", queueing.that_may_rent("local"))
        assert [row.id for row in found] == [rents]
        await database.close()

    asyncio.run(run())


def test_ten_thousand_jobs_are_looked_through_in_a_moment(database_url: str) -> None:
    """A tenth of a second here; the bound is for machines that do other things besides."""

    async def run() -> float:
        database = Database(database_url)
        await database.migrate()
        for index in range(10):
            await _waiting(database, 1000, f"p{index % 5}", job_mapping())
        async with database.read() as session:
            began_s = time.monotonic()
            found = await clusters.scheduled(session, "local")
            took_s = time.monotonic() - began_s
        assert len(found) == queueing.SEEN and len({row.project_id for row in found}) == 5
        await database.close()
        return took_s

    assert asyncio.run(run()) < 2.0
