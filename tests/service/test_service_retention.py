"""History has an end where the operator says so: what is past it goes in small batches, and answers say that it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story
from fastapi import FastAPI
from service_rows import append, done, new_job
from sqlalchemy import func, select, update

from shoal_service import retention
from shoal_service.app import create_app
from shoal_service.database import Database
from shoal_service.models import JobRow, JournalRow, StepRow, TrackerRow
from shoal_service.retention import Retention
from shoal_service.settings import Settings

DAY_S = 86_400.0
STEPS = 240


@pytest.fixture
def app(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """Which looks at what is past its time all the time."""
    monkeypatch.setattr(retention, "_LOOK_S", 0.05)
    monkeypatch.setattr(retention, "_BATCH", 64)
    return create_app(settings.model_copy(update={"events_kept_s": 30 * DAY_S, "points_kept_s": DAY_S}))


def ended_job(api: httpx.Client, ended_s: float) -> tuple[str, int]:
    """Its id, and how many entries it has."""
    mapping = job_mapping(train={"steps": STEPS})
    job_id = str(ok(api.post("/v1/jobs", json=mapping))["id"])
    connector = Connector(http=api)
    ok(connector.renew())
    told = story(mapping, started_at_s=ended_s - 1000).entries
    ok(connector.send(job_id, told))
    return job_id, len(told)


def test_what_is_past_its_time_goes_and_answers_say_so(api: httpx.Client, eventually: Callable[..., Any]) -> None:
    old, num_entries = ended_job(api, time.time() - 40 * DAY_S)
    kept, _ = ended_job(api, time.time())
    before = ok(api.get(f"/v1/jobs/{kept}/metrics"))
    eventually(lambda: api.get(f"/v1/jobs/{old}/events").status_code == 410)
    eventually(lambda: api.get(f"/v1/jobs/{old}/events").json()["forgotten_seq"] == num_entries)
    for path in ("events", "events?watch=1", "plan", "plan.svg", "recoveries", "cost"):
        gone = api.get(f"/v1/jobs/{old}/{path}")
        assert (gone.status_code, gone.json()["code"]) == (410, "history_expired"), path
        assert old in gone.json()["detail"] and "events_kept_s" in gone.json()["detail"]
    assert ok(api.get(f"/v1/jobs/{old}/events", params={"after": num_entries}))["items"] == []
    job = ok(api.get(f"/v1/jobs/{old}"))
    assert (job["status"]["state"], job["status"]["step"]) == ("succeeded", STEPS)
    assert api.get(f"/jobs/{old}", headers={"Accept": "text/html"}).is_success

    eventually(lambda: ok(api.get(f"/v1/jobs/{old}/metrics"))["thinned"])
    outline = ok(api.get(f"/v1/jobs/{old}/metrics"))
    assert 0 < len(outline["points"]) < STEPS / 4 and outline["rolled_back"] == []
    whole = {point["step"]: point["loss"] for point in before["points"]}
    assert all(whole[point["step"]] == point["loss"] for point in outline["points"])
    assert max(whole.values()) == max(point["loss"] for point in outline["points"])
    # What is not past its time is as it was.
    assert ok(api.get(f"/v1/jobs/{kept}/metrics")) == before and not before["thinned"]
    assert len(ok(api.get(f"/v1/jobs/{kept}/events", params={"limit": 1000}))["items"]) == num_entries


async def test_batches_are_small_and_go_on_where_a_replica_stopped(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH", 100)
    database = Database(database_url)
    await database.migrate()
    job_id = await new_job(database)
    await append(database, job_id, [done(step, 2.0) for step in range(1, 1001)])
    keeper = Retention(database, events_kept_s=1.0, points_kept_s=None)

    async def count() -> int:
        async with database.read() as session:
            return await session.scalar(select(func.count()).select_from(JournalRow)) or 0

    await keeper.turn()
    assert await count() == 1000, "it has not ended"
    async with database.write() as session:
        ended = {"state": "succeeded", "since_at_s": time.time() - 10}
        await session.execute(update(JobRow).values(ended))
        session.add(
            TrackerRow(
                job_id=job_id, tool="mlflow", generation=1, step=0, step_seq=0, seq=0, position={}, complete=False,
                lease_until_s=0.0,
            )
        )  # fmt: skip
    await keeper.turn()
    assert await count() == 1000, "a tracker still waits for it"
    async with database.write() as session:
        await session.execute(update(TrackerRow).values(complete=True))
    seen: list[int] = []

    class Killed(Exception):
        pass

    async def let_others() -> None:
        seen.append(await count())
        if len(seen) == 4:
            raise Killed

    monkeypatch.setattr(keeper, "_let_others", let_others)
    with pytest.raises(Killed):
        await keeper.turn()
    assert seen == [900, 800, 700, 600]
    await Retention(database, events_kept_s=1.0, points_kept_s=None).turn()
    assert await count() == 0
    async with database.read() as session:
        assert await session.scalar(select(JobRow.forgotten_seq)) == 1000
        assert await session.scalar(select(func.count()).select_from(StepRow)) == 1000, "points have their own time"
    await database.close()
