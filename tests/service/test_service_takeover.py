"""Jobs of clusters that are not heard of any more: which go to another one, which wait, and what is said of it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, start_control_plane, story
from fastapi import FastAPI
from sqlalchemy import update

from shoal_planner.cluster import parse_cluster
from shoal_recovery.journal import CheckpointCommitted
from shoal_service.app import create_app
from shoal_service.awake import Awake
from shoal_service.database import Database
from shoal_service.models import ClusterRow
from shoal_service.settings import Settings


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    return create_app(settings.model_copy(update={"cluster_lost_s": 0}))


def test_a_job_goes_where_nothing_of_it_is_lost(
    api: httpx.Client, connector: Connector, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """Not to a cluster that has no plan for it; not at all while its state is nowhere else."""
    stored, alone = (
        str(ok(api.post("/v1/jobs", json=job_mapping(checkpoint={"uri": (tmp_path / name).as_uri()})))["id"])
        for name in ("stored", "alone")
    )
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time()).entries
    at = next(index for index, entry in enumerate(told) if isinstance(entry.event, CheckpointCommitted))
    ok(connector.send(stored, told[: at + 1]))
    ok(connector.send(alone, told[:at]))
    said = ok(api.get(f"/v1/jobs/{stored}"))["cluster"]
    assert (said["connected"], said["problem"], said["fault_tolerant_head"]) == (True, None, None)
    ok(connector.renew(lease_s=1e-6))
    problem = ok(api.get(f"/v1/jobs/{alone}"))["cluster"]["problem"]
    assert "no step of the job stands in an object store, so it waits for that cluster" in problem
    assert problem[:1].upper() + problem[1:] in api.get(f"/jobs/{alone}", headers={"Accept": "text/html"}).text
    assert "goes on on the next one that connects" in ok(api.get(f"/v1/jobs/{stored}"))["cluster"]["problem"]

    tiny = parse_cluster({"nodes": [{"name": "t", "device": "X", "host_memory_gib": 1}], "devices": {"X": TINY}})
    ok(Connector(http=api, cluster_id="tiny", holder="h", cluster=tiny).renew())
    other = Connector(http=api, cluster_id="other", holder="h")

    def wished() -> list[tuple[str, str, int]]:
        ok(other.renew())
        return [(job["id"], job["wish"], job["last_seq"]) for job in other.wishes()["jobs"]]

    assert eventually(wished, 30) == [(stored, "run", at + 1)]
    job = ok(api.get(f"/v1/jobs/{stored}"))
    assert (job["cluster_id"], job["status"]["state"], job["status"]["code"]) == ("other", "waiting", "cluster_lost")
    assert "cluster local has not been heard of for long" in job["status"]["reason"]
    # The one that comes back has lost the job; what nobody took is still its own.
    ok(connector.renew())
    assert [wish["id"] for wish in connector.wishes()["jobs"]] == [alone]
    assert connector.send(stored, told[at + 1 :]).json()["code"] == "wrong_cluster"


TINY = {"memory_gib": 0.0001, "tflops_bf16": 1, "memory_gb_per_s": 1}


def submit_and_store(http: httpx.Client, connector: Connector, uri: str) -> str:
    """A job of which a step stands in its object store, on this cluster."""
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping(checkpoint={"uri": uri})))["id"])
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time()).entries
    at = next(index for index, entry in enumerate(told) if isinstance(entry.event, CheckpointCommitted))
    ok(connector.send(job_id, told[: at + 1]))
    return job_id


def test_a_control_plane_that_was_away_takes_no_job_from_a_cluster_before_it_could_be_heard(tmp_path: Path) -> None:
    """Two clusters train while it is down; the one that renews its lease first must not get the other one's job."""
    plane = start_control_plane(tmp_path / "data")
    port = int(plane.url.rpartition(":")[2])
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
        second = Connector(http=http)
        job_id = submit_and_store(http, second, (tmp_path / "store").as_uri())
    plane.kill()
    kept = sqlite3.connect(tmp_path / "data" / "shoal.db")
    with kept:  # as an hour later
        kept.execute("UPDATE clusters SET lease_until_s = lease_until_s - 3600, updated_at_s = updated_at_s - 3600")
    kept.close()
    plane = start_control_plane(tmp_path / "data", port)
    try:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
            first, second = Connector(http=http, cluster_id="first", holder="h"), Connector(http=http)
            ok(first.renew())
            version = first.wishes()["version"]
            assert first.wishes(after=version, wait_s=2)["jobs"] == []
            ok(second.renew())
            assert [job["id"] for job in second.wishes()["jobs"]] == [job_id]
    finally:
        plane.stop()


def test_a_job_goes_once_everybody_could_have_been_heard(
    app: FastAPI, api: httpx.Client, connector: Connector, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    now_s, takeover = [0.0], app.state.services.takeover
    takeover._awake = Awake(lambda: now_s[0])
    job_id = submit_and_store(api, connector, (tmp_path / "store").as_uri())
    ok(connector.renew(lease_s=0.5))
    other = Connector(http=api, cluster_id="other", holder="h")

    def looks() -> list[str]:
        ok(other.renew())
        eventually(lambda: takeover._looking["other"].done())
        return [job["id"] for job in other.wishes()["jobs"]]

    eventually(lambda: not ok(api.get("/v1/clusters/local"))["connected"])
    assert looks() == []
    now_s[0] = 0.4
    assert looks() == []
    now_s[0] = 0.6
    assert eventually(looks, 30) == [job_id]


def test_a_cluster_that_comes_back_while_a_plan_is_searched_for_keeps_its_job(
    app: FastAPI, api: httpx.Client, connector: Connector, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    takeover = app.state.services.takeover
    job_id = submit_and_store(api, connector, (tmp_path / "store").as_uri())
    ok(connector.renew(lease_s=1e-6))
    takeover._planner = search = ComesBack(app.state.services.database)
    other = Connector(http=api, cluster_id="other", holder="h")

    ok(other.renew())
    eventually(lambda: search.asked and takeover._looking["other"].done())
    assert other.wishes()["jobs"] == []
    assert [job["id"] for job in connector.wishes()["jobs"]] == [job_id]


class ComesBack:
    """Finds a plan for every job; meanwhile the lease of cluster local is renewed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.asked = False

    async def plan(self, *_: Any) -> None:
        async with self._database.write() as session:
            renewed = update(ClusterRow).where(ClusterRow.id == "local").values(lease_until_s=time.time() + 60)
            await session.execute(renewed)
        self.asked = True


def test_where_jobs_step_on_without_a_head_they_are_taken_later(
    app: FastAPI, api: httpx.Client, connector: Connector, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    takeover = app.state.services.takeover
    job_id = submit_and_store(api, connector, (tmp_path / "store").as_uri())
    body = {"holder": connector.holder, "lease_s": 1e-6, "fault_tolerant_head": True, "snapshot": {"nodes": []}}
    ok(api.put(f"/v1/clusters/{connector.cluster_id}", json=body))
    other = Connector(http=api, cluster_id="other", holder="h")

    def looks() -> list[str]:
        ok(other.renew())
        eventually(lambda: takeover._looking["other"].done())
        return [job["id"] for job in other.wishes()["jobs"]]

    assert [looks() for _ in range(3)] == [[], [], []]
    takeover._standing_s = 0.0
    assert eventually(looks, 30) == [job_id]


@pytest.mark.parametrize(("jump_s", "awake_s"), [(4.0, 8.0), (6.0, 0.0), (-1.0, 0.0)])
def test_who_had_no_turn_was_not_awake(jump_s: float, awake_s: float) -> None:
    """Nor does the time before count where the clock was set."""
    now_s = [100.0]
    awake = Awake(lambda: now_s[0])
    for step_s in (4.0, jump_s):
        now_s[0] += step_s
        found_s = awake.for_s()
    assert found_s == awake_s


def test_pages_say_what_comes_of_a_dead_head(api: httpx.Client, connector: Connector) -> None:
    for told, words in ((True, "training goes on: "), (False, "the cluster ends with it: "), (None, "not known: ")):
        body = {"holder": "connector-1", "lease_s": 60, "fault_tolerant_head": told}
        snapshot = {"nodes": []}
        ok(api.put("/v1/clusters/local", json={**body, "snapshot": snapshot}))
        (cluster,) = ok(api.get("/v1/clusters"))["items"]
        assert cluster["if_head_dies"].startswith(words)
        again = (
            "connects as local again, from disks of its nodes that survived or from their object store, or on one of "
        )
        assert (f"{again}another name, from their object store alone" in cluster["if_head_dies"]) is (told is False)
        assert words in api.get("/nodes", headers={"Accept": "text/html"}).text
