"""Several control planes on one PostgreSQL: whichever is asked, it is the same service."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, snapshot, story
from httpx_sse import connect_sse
from postgres import RunningPostgres
from service_rows import new_job
from sqlalchemy import delete, update
from waiting import eventually

from shoal_planner.cluster import snapshot_to_mapping
from shoal_planner.search import PlanResult
from shoal_service import duties, jobs
from shoal_service.awake import Awake
from shoal_service.bell import Bell
from shoal_service.database import Database
from shoal_service.models import ClusterRow, DutyRow, JobRow
from shoal_service.planning import Planner
from shoal_service.takeover import Takeover


@pytest.fixture(scope="module")
def replicas(
    tmp_path_factory: pytest.TempPathFactory, postgres: RunningPostgres, migrated: str
) -> Iterator[tuple[ControlPlane, ControlPlane]]:
    """They hear of each other's changes, or not for a minute."""
    settings = {"database_url": postgres.new_database(migrated), "poll_s": "60"}
    folder = tmp_path_factory.mktemp("replicas")
    with control_plane(folder, **settings) as first, control_plane(folder, **settings) as second:
        yield first, second


@pytest.fixture
def clients(replicas: tuple[ControlPlane, ControlPlane]) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    first, second = (httpx.Client(base_url=each.url, headers=each.headers, timeout=30) for each in replicas)
    with first, second:
        yield first, second


def test_a_watcher_hears_of_what_another_replica_wrote(clients: tuple[httpx.Client, httpx.Client]) -> None:
    here, there = clients
    job_id = str(ok(here.post("/v1/jobs", json=job_mapping()))["id"])
    connector = Connector(http=there)
    ok(connector.renew(lease_s=300))
    told = story(job_mapping(), started_at_s=time.time()).entries
    seen: list[int] = []
    began = threading.Event()

    def watch() -> None:
        with (
            httpx.Client(base_url=here.base_url, headers=here.headers, timeout=50) as http,
            connect_sse(http, "GET", f"/v1/jobs/{job_id}/events", params={"watch": "1"}) as source,
        ):
            began.set()
            seen.extend(int(event.id) for event in source.iter_sse() if event.data and event.event != "end")

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert began.wait(30)
    for first in range(0, len(told), 10):
        ok(connector.send(job_id, told[first : first + 10]))
    watcher.join(45)
    assert not watcher.is_alive() and seen == list(range(1, len(told) + 1))


def test_a_wish_reaches_the_connector_of_another_replica(clients: tuple[httpx.Client, httpx.Client]) -> None:
    here, there = clients
    connector = Connector(http=there)
    ok(connector.renew(lease_s=300))
    version = connector.wishes()["version"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connector.wishes, after=version, wait_s=25)
        job_id = str(ok(here.post("/v1/jobs", json=job_mapping()))["id"])
        began_s = time.monotonic()
        assert job_id in [job["id"] for job in asked.result(30)["jobs"]]
    assert time.monotonic() - began_s < 20, "it was found by looking again, not heard"


def test_one_key_makes_one_job_whomever_it_is_given_to(clients: tuple[httpx.Client, httpx.Client]) -> None:
    def submit(index: int, **changes: Any) -> httpx.Response:
        return clients[index % 2].post("/v1/jobs", json=job_mapping(**changes), headers={"Idempotency-Key": "one key"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(8)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = submit(1, name="another job")
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")


def test_one_connector_speaks_for_a_new_cluster(clients: tuple[httpx.Client, httpx.Client]) -> None:
    for number in range(5):
        with ThreadPoolExecutor(4) as pool:
            holders = [
                Connector(http=clients[i % 2], cluster_id=f"new-{number}", holder=f"holder-{i}") for i in range(4)
            ]
            answers = [answer.status_code for answer in pool.map(Connector.renew, holders)]
        assert sorted(answers) == [200, 409, 409, 409]


def test_wishes_of_users_at_the_same_time_are_one_after_the_other(clients: tuple[httpx.Client, httpx.Client]) -> None:
    """A cancellation is not refused for a step that comes at the same moment."""
    here, there = clients
    for _ in range(3):
        job_id = str(ok(here.post("/v1/jobs", json=job_mapping()))["id"])
        connector = Connector(http=there)
        ok(connector.renew(lease_s=300))
        if job_id not in [job["id"] for job in connector.wishes()["jobs"]]:
            continue  # another test's cluster has it
        told = story(job_mapping(), started_at_s=time.time()).entries[:40]

        def send(job_id: str = job_id, told: Any = told, connector: Connector = connector) -> None:
            for entry in told:
                assert connector.send(job_id, [entry]).status_code == 200

        with ThreadPoolExecutor(2) as pool:
            sending = pool.submit(send)
            cancelled = pool.submit(here.post, f"/v1/jobs/{job_id}/cancel").result(30)
            sending.result(60)
        assert cancelled.status_code == 200 and cancelled.json()["wish"] == "cancelled"
        assert ok(there.get(f"/v1/jobs/{job_id}"))["wish"] == "cancelled"


async def test_a_duty_is_one_holders_until_its_lease_ends(database_url: str) -> None:
    first, second = Database(database_url), Database(database_url)
    await first.migrate()

    async def claim(database: Database, holder: str, lease_s: float = 60.0) -> bool:
        async with database.write() as session:
            return await duties.claim(session, "retention", holder, lease_s)

    assert [await claim(first, "a"), await claim(second, "b"), await claim(first, "a")] == [True, False, True]
    assert await claim(first, "a", lease_s=-1.0)  # it is over at once
    assert [await claim(second, "b"), await claim(first, "a")] == [True, False]
    async with second.write() as session:
        await duties.release(session, "b")
    assert await claim(first, "a")
    async with first.write() as session:
        await session.execute(delete(DutyRow))
    for database in (first, second):
        await database.close()


class CountingPlanner(Planner):
    num_searches = 0

    async def plan(self, *args: Any, **kwargs: Any) -> PlanResult:
        self.num_searches += 1
        return await super().plan(*args, **kwargs)


async def test_one_replica_gives_the_jobs_of_a_lost_cluster_away(database_url: str) -> None:
    """Though two hear at the same time of a cluster that could have them."""
    first, second = Database(database_url), Database(database_url)
    await first.migrate()
    job_id, now_s, clock_s = await new_job(first), time.time(), [0.0]
    empty = {"profile": {}, "snapshot": snapshot_to_mapping(snapshot())}
    async with first.write() as session:
        session.add(ClusterRow(id="lost", holder="a", lease_until_s=now_s - 99, updated_at_s=now_s - 100, **empty))
        session.add(ClusterRow(id="here", holder="b", lease_until_s=now_s + 99, updated_at_s=now_s, **empty))
        await session.execute(update(JobRow).values(cluster_id="lost"))
    awake, planner = Awake(lambda: clock_s[0]), CountingPlanner(5.0)
    clock_s[0] += 4.0
    replicas = [Takeover(database, planner, Bell(), 0.0, 0.0, awake) for database in (first, second)]
    for takeover in replicas:
        takeover.look("here")
    await asyncio.gather(*(task for takeover in replicas for task in takeover._looking.values()))
    async with second.read() as session:
        assert (await jobs.get(session, job_id)).cluster_id == "here"
    assert planner.num_searches == 1
    for database in (first, second):
        await database.close()


def test_one_replica_goes_on_when_the_other_is_killed(tmp_path: Path, postgres: RunningPostgres, migrated: str) -> None:
    settings = {"database_url": postgres.new_database(migrated)}
    with control_plane(tmp_path, **settings) as first, control_plane(tmp_path, **settings) as second:
        with httpx.Client(base_url=first.url, headers=first.headers, timeout=30) as http:
            job_id = str(ok(http.post("/v1/jobs", json=job_mapping()))["id"])
            ok(Connector(http=http).renew(lease_s=300))
        first.kill()
        with httpx.Client(base_url=second.url, headers=second.headers, timeout=30) as http:
            connector = Connector(http=http)
            ok(connector.renew(lease_s=300))
            assert [job["id"] for job in connector.wishes()["jobs"]] == [job_id]
            told = story(job_mapping(), started_at_s=time.time()).entries
            ok(connector.send(job_id, told))
            assert eventually(lambda: ok(http.get(f"/v1/jobs/{job_id}"))["status"]["state"] == "succeeded")
