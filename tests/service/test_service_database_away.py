"""PostgreSQL goes away while clusters train: requests are refused in time and say when to ask again, streams stay, and
as it is back everything goes on by itself, with nothing lost. `-m long`: for 60 s each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from control_plane import Connector, control_plane, job_mapping, ok, start_control_plane, story
from httpx_sse import connect_sse
from postgres import RunningPostgres, start_postgres
from waiting import eventually

from shoal_service.awake import Awake
from shoal_service.database import Database
from shoal_service.errors import DatabaseAway
from shoal_service.jobs import rfc3339

Away = Callable[[RunningPostgres], contextlib.AbstractContextManager[None]]


@pytest.fixture
def own() -> Iterator[RunningPostgres]:
    server = start_postgres()
    yield server
    server.close()


def frozen(server: RunningPostgres) -> contextlib.AbstractContextManager[None]:
    """Connections stay, and nothing answers."""
    return server.frozen()


@contextlib.contextmanager
def stopped(server: RunningPostgres) -> Iterator[None]:
    """Connections break, and new ones are refused."""
    server.stop()
    try:
        yield
    finally:
        server.start()


FOR_S = [pytest.param(0.0, id="short"), pytest.param(60.0, id="long", marks=pytest.mark.long)]


@pytest.mark.parametrize("for_s", FOR_S)
@pytest.mark.parametrize("away", [frozen, stopped])
def test_a_database_that_is_away_comes_back(tmp_path: Path, own: RunningPostgres, away: Away, for_s: float) -> None:
    told = story(job_mapping(), started_at_s=time.time()).entries
    seen: list[int] = []
    printed: list[str] = []
    with control_plane(tmp_path, database_url=own.new_database(), database_timeout_s="1") as plane:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=60) as http:
            job_id = str(ok(http.post("/v1/jobs", json=job_mapping()))["id"])
            connector = Connector(http=http)
            ok(connector.renew(lease_s=300))
            ok(connector.send(job_id, told[:20]))

            def watch() -> None:
                with (
                    httpx.Client(base_url=plane.url, headers=plane.headers, timeout=120) as watching,
                    connect_sse(watching, "GET", f"/v1/jobs/{job_id}/events", params={"watch": "1"}) as source,
                ):
                    seen.extend(int(event.id) for event in source.iter_sse() if event.data and event.event != "end")

            def watch_logs() -> None:
                with (
                    httpx.Client(base_url=plane.url, headers=plane.headers, timeout=120) as watching,
                    connect_sse(watching, "GET", f"/v1/jobs/{job_id}/logs", params={"watch": "1"}) as source,
                ):
                    printed.extend(event.json()["text"] for event in source.iter_sse() if event.event == "line")

            def bring(number: int, text: str) -> None:
                source = {"node": "big-0", "life": "1", "lines": [[number, time.time(), "info", 1, 0, text]]}
                batch = {"cluster_id": "local", "holder": "connector-1", "sources": [source]}
                ok(http.post(f"/v1/jobs/{job_id}/logs", json=batch))

            watcher, reader = threading.Thread(target=watch), threading.Thread(target=watch_logs)
            watcher.start()
            reader.start()
            bring(1, "before")
            eventually(lambda: len(seen) == 20 and printed == ["before"])
            with away(own):
                began_s = time.monotonic()
                asked = [
                    lambda: http.get(f"/v1/jobs/{job_id}"),
                    lambda: http.get("/v1/jobs"),
                    lambda: http.get("/v1/health"),
                    lambda: http.post("/v1/jobs", json=job_mapping(), headers={"Idempotency-Key": "meanwhile"}),
                    lambda: connector.send(job_id, told[20:30]),
                    connector.renew,
                ]
                while True:
                    with ThreadPoolExecutor(len(asked)) as pool:
                        answers = [each.result() for each in [pool.submit(ask) for ask in asked]]
                    for answer in answers:
                        assert answer.status_code == 503, answer.text
                        assert answer.headers["content-type"] == "application/problem+json"
                        assert int(answer.headers["retry-after"]) >= 1
                        assert answer.json()["code"] == "database_unavailable"
                        assert "127.0.0.1" not in answer.text
                    if time.monotonic() - began_s >= for_s:
                        break
            eventually(lambda: http.get("/v1/health").is_success, 60)
            # What was refused may have been kept all the same: asked again it is there once.
            first = ok(http.post("/v1/jobs", json=job_mapping(), headers={"Idempotency-Key": "meanwhile"}))["id"]
            assert (
                ok(http.post("/v1/jobs", json=job_mapping(), headers={"Idempotency-Key": "meanwhile"}))["id"] == first
            )
            assert sorted(job["id"] for job in ok(http.get("/v1/jobs"))["items"]) == sorted([job_id, first])
            ok(connector.renew(lease_s=300))
            bring(2, "after")
            ok(connector.send(job_id, told))
            reader.join(60)
            assert not reader.is_alive() and printed == ["before", "after"]
            watcher.join(60)
            assert not watcher.is_alive() and seen == list(range(1, len(told) + 1))
            assert ok(http.get(f"/v1/jobs/{job_id}"))["status"]["state"] == "succeeded"
            # And who keeps limits beside requests does so again.
            kept = job_mapping(checkpoint={"uri": tmp_path.as_uri()})
            late = ok(http.post("/v1/jobs", json=kept))["id"]
            ok(http.post(f"/v1/jobs/{late}/limits", json={"deadline": rfc3339(time.time() + 2)}))
            eventually(lambda: ok(http.get(f"/v1/jobs/{late}"))["status"]["code"] == "deadline_passed", 60)


def test_a_control_plane_waits_for_its_database(tmp_path: Path, own: RunningPostgres) -> None:
    url = own.new_database()
    own.stop()
    log = tmp_path / "log"
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start_control_plane, tmp_path, database_url=url, database_timeout_s="1")
        eventually(lambda: log.exists() and "waits for the database" in log.read_text(), 60)
        own.start()
        plane = starting.result(120)
    assert plane.stop() == 0


async def test_who_could_write_nothing_down_has_heard_nobody(own: RunningPostgres) -> None:
    """So no cluster counts as lost for a time in which its lease could not be renewed."""
    now_s = [100.0]
    awake = Awake(lambda: now_s[0])
    database = Database(own.new_database(), timeout_s=0.5, on_away=awake.interrupted)
    await database.migrate()
    now_s[0] += 4.0
    assert awake.for_s() == 4.0
    with own.frozen(), pytest.raises(DatabaseAway):
        async with database.read() as session:
            await session.connection()
    assert awake.for_s() == 0.0
    await database.close()
