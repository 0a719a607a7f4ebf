"""Several clusters: a job that waits for one goes to another that has idle nodes for it, and is started once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from control_plane import Connector, job_mapping, ok, story
from sqlalchemy import update

from shoal_planner.cluster import parse_cluster
from shoal_service.database import Database
from shoal_service.models import JobRow
from shoal_service.settings import Settings


def connect(api: httpx.Client, cluster_id: str, count: int) -> Connector:
    nodes = {"nodes": [{"name": cluster_id, "count": count, "device": "T4", "price_per_hour": 1.0}]}
    connector = Connector(http=api, cluster_id=cluster_id, holder=f"of-{cluster_id}", cluster=parse_cluster(nodes))
    ok(connector.renew())
    return connector


def submit(api: httpx.Client, **changes: Any) -> str:
    return str(ok(api.post("/v1/jobs", json=job_mapping(model={"layers": 2}, **changes)))["id"])


def waited(settings: Settings) -> None:
    """All jobs as if a minute had passed."""

    async def run() -> None:
        database = Database(settings.database_url)
        async with database.write() as session:
            await session.execute(update(JobRow).values(since_at_s=time.time() - 60))
        await database.close()

    asyncio.run(run())


def shown(api: httpx.Client, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = ok(api.get(f"/v1/jobs/{job_id}"))
    return found


def events(api: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ok(api.get(f"/v1/jobs/{job_id}/events"))["items"]
    return found


def given(connector: Connector) -> dict[str, list[str] | None]:
    return {wish["id"]: wish["share"]["nodes"] for wish in connector.wishes()["jobs"] if wish["share"]["nodes"] != []}


def test_a_waiting_job_goes_where_nodes_are_idle_and_its_history_says_so(
    api: httpx.Client, settings: Settings, eventually: Callable[..., Any]
) -> None:
    first = connect(api, "a", 1)
    holds, waits = submit(api), submit(api)
    assert given(first) == {holds: ["a-0"]}
    waited(settings)
    second = connect(api, "b", 2)

    def moved() -> bool:
        ok(second.renew())
        return bool(shown(api, waits)["cluster_id"] == "b")

    eventually(moved)
    status = shown(api, waits)["status"]
    assert (status["state"], status["code"]) == ("queued", "moved_to_cluster")
    (said,) = events(api, waits)
    assert (said["kind"], said["state"], said["code"]) == ("state_changed", "queued", "moved_to_cluster")
    assert said["reason"] == "waited for cluster a; cluster b has idle nodes for it, and it waits there now"
    assert given(first) == {holds: None} and given(second) == {waits: None}
    assert shown(api, holds)["cluster_id"] == "a", "it was given nodes, and may be starting"
    assert shown(api, waits)["status"]["reason"] == "begins on 2 nodes of cluster b"
    entries = story(job_mapping(), started_at_s=time.time()).entries
    assert first.send(waits, entries[:1]).json()["code"] == "wrong_cluster"
    assert ok(api.get(f"/v1/jobs/{waits}"))["status"]["last_seq"] == 1, "whoever starts it goes on from there"


def test_it_stays_where_the_other_cluster_is_none_for_it(api: httpx.Client, settings: Settings) -> None:
    """Too small, busy, or with a job of its own that is first."""
    connect(api, "a", 2)
    job = submit(api, limits={"min_devices": 2})
    also = submit(api, limits={"min_devices": 2})
    waits = {job, also} - given(connect(api, "a", 2)).keys()
    waited(settings)
    small = connect(api, "b", 1)
    for _ in range(5):
        ok(small.renew())
        small.wishes()
    assert {shown(api, each)["cluster_id"] for each in waits} == {"a"}


def test_clusters_that_look_at_once_take_each_job_once(
    api: httpx.Client, settings: Settings, eventually: Callable[..., Any]
) -> None:
    first = connect(api, "a", 1)
    jobs = [submit(api, limits={"max_devices": 1}) for _ in range(7)]
    assert len(given(first)) == 1
    waited(settings)
    clusters = [first, connect(api, "b", 3), connect(api, "c", 3)]

    def look(connector: Connector) -> dict[str, list[str] | None]:
        ok(connector.renew())
        return given(connector)

    def all_have_nodes() -> bool:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(look, clusters * 2))
        waited(settings)
        return len({job for each in found for job in each}) == len(jobs)

    eventually(all_have_nodes, 60)
    shares = [given(each) for each in clusters]
    assert sorted(job for share in shares for job in share) == sorted(jobs), "no job has nodes of two clusters"
    nodes = [node for share in shares for each in share.values() for node in each or ()]
    assert len(nodes) == len(set(nodes)) == 7
    assert [bool(events(api, job)) for job in jobs].count(True) == 6
