"""What the database itself guarantees, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from service_rows import append, done, new_job
from sqlalchemy import Connection, delete, func, inspect, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import Entry, EvaluationDone, StateChanged
from shoal_service import jobs, journal
from shoal_service.answers import MAX_ANSWER_BYTES, encoded, fitting, page
from shoal_service.curve import curve
from shoal_service.database import Database
from shoal_service.models import Base, CurveRow, JobRow, JournalRow, StepRow


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = Database(database_url)
    await found.migrate()
    yield found
    await found.close()


def differences(connection: Connection) -> list[Any]:
    context = MigrationContext.configure(connection, opts={"compare_type": True, "render_as_batch": True})
    return list(compare_metadata(context, Base.metadata))


async def test_migrations_give_the_tables_of_the_models(database: Database) -> None:
    await database.migrate()  # twice is the same as once
    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    assert set(names) == {"alembic_version", *Base.metadata.tables}


@pytest.mark.parametrize(
    "change",
    [
        update(JournalRow).values(at_s=0.0),
        update(JournalRow).values(payload={}),
        delete(JournalRow).where(JournalRow.seq == 3),
        delete(JournalRow),
    ],
    ids=["time", "payload", "one", "all"],
)
async def test_a_journal_is_append_only(database: Database, change: Any) -> None:
    """Whoever it is that asks: the database refuses."""
    job_id = await new_job(database)
    await append(database, job_id, [done(step, 2.0) for step in range(1, 5)])
    with pytest.raises(DBAPIError, match="append-only"):
        async with database.write() as session:
            await session.execute(change)
    async with database.read() as session:
        kept = await journal.entries_after(session, job_id, 0, 10)
    assert [(row.seq, row.at_s, row.payload["step"]) for row in kept] == [(n, float(n), n) for n in range(1, 5)]


async def test_what_retention_has_marked_may_go_and_nothing_else(database: Database) -> None:
    job_id = await new_job(database)
    await append(database, job_id, [done(step, 2.0) for step in range(1, 5)])
    async with database.write() as session:
        await session.execute(update(JobRow).values(forgotten_seq=2))
        await session.execute(delete(JournalRow).where(JournalRow.seq <= 2))
    with pytest.raises(DBAPIError, match="append-only"):
        async with database.write() as session:
            await session.execute(delete(JournalRow).where(JournalRow.seq == 3))


@pytest.mark.parametrize("seed", range(3))
async def test_levels_of_a_curve_are_what_its_points_say(database: Database, seed: int) -> None:
    """However steps come and are done again: every level holds the extremes and the number of the points in it."""
    chance, job_id, step, epoch = random.Random(seed), await new_job(database), 0, 1
    for _ in range(25):
        if step > 40 and chance.random() < 0.4:
            step, epoch = step - chance.randint(1, 40), epoch + 1
        batch = []
        for _ in range(chance.randint(1, 120)):
            step += 1
            loss = float("nan") if chance.random() < 0.02 else chance.uniform(1, 9)
            batch.append(done(step, loss, epoch))
        await append(database, job_id, batch)
    async with database.read() as session:
        points = (await session.scalars(select(StepRow).where(StepRow.rolled_back.is_(False)))).all()
        buckets = (await session.scalars(select(CurveRow))).all()
    assert {bucket.width for bucket in buckets} == {32, 512}
    for width in (32, 512):
        assert sorted(row.bucket for row in buckets if row.width == width) == list(range((step + 1) // width))
    for bucket in buckets:
        within = [point for point in points if point.step // bucket.width == bucket.bucket]
        losses = [(point.loss, point.seq) for point in within if point.loss is not None]
        assert bucket.num_points == len(within)
        assert (bucket.low_loss, bucket.low_seq) == min(losses)
        assert (bucket.high_loss, -bucket.high_seq) == max((loss, -seq) for loss, seq in losses)


@pytest.mark.parametrize("max_points", [10, 100, 450])
async def test_a_curve_read_by_levels_keeps_its_extremes(database: Database, max_points: int) -> None:
    job_id = await new_job(database)
    chance = random.Random(1)
    losses = {step: chance.uniform(1, 3) for step in range(1, 9001)}
    losses[1234], losses[8990] = 9.0, 0.5
    for first in range(1, 9001, 900):
        await append(database, job_id, [done(step, losses[step]) for step in range(first, first + 900)])
    await append(database, job_id, [done(step, losses[step], 2) for step in range(8800, 9001)])
    async with database.read() as session:
        found = await curve(session, job_id, max_points)
    live, undone = found["points"], found["rolled_back"]
    assert (found["num_points"], found["num_rolled_back"], found["downsampled"]) == (9000, 201, True)
    steps = [point["step"] for point in live]
    assert (
        steps == sorted(set(steps))
        and (steps[0], steps[-1]) == (1, 9000)
        and max_points // 3 < len(steps) <= max_points
    )
    assert {0.5, 9.0} <= {point["loss"] for point in live}
    assert {point["epoch"] for point in undone} == {1} and 0 < len(undone) <= max_points
    assert {point["epoch"] for point in live if point["step"] >= 8800} == {2}
    assert all(losses[point["step"]] == point["loss"] for point in live + undone)


async def test_a_stretch_of_a_curve_is_read_finer(database: Database) -> None:
    job_id = await new_job(database)
    chance = random.Random(2)
    losses = {step: chance.uniform(1, 3) for step in range(1, 2001)}
    # It may be told a little before its step is.
    evaluated = EvaluationDone(epoch=1, step=1001, loss=2.0, tokens=64, duration_s=0.1)
    for first in range(1, 2001, 500):
        steps = [done(step, losses[step]) for step in range(first, first + 500)]
        await append(database, job_id, [evaluated, *steps] if first == evaluated.step else steps)
    for _ in range(20):
        low, high = sorted(chance.sample(range(2100), 2))
        within = {step: loss for step, loss in losses.items() if low <= step <= high}
        async with database.read() as session:
            found = await curve(session, job_id, 50, low, high)
        points = {point["step"]: point["loss"] for point in found["points"]}
        assert found["num_points"] == len(within) and found["downsampled"] is (len(points) < len(within))
        assert all(within[step] == loss for step, loss in points.items()) and len(points) <= 50
        if within:
            assert {min(within), max(within)} <= set(points)
            assert {min(within.values()), max(within.values())} <= set(points.values())
        if len(within) <= 50:
            assert points == within
    async with database.read() as session:
        assert not (await curve(session, job_id, 450, 5, 1000))["evaluations"]
        assert [each["step"] for each in (await curve(session, job_id, 450, 1001))["evaluations"]] == [1001]
        assert (await curve(session, job_id, 450, 2001))["num_points"] == 0


async def test_values_that_no_database_holds_are_the_askers_fault(database: Database) -> None:
    from shoal_service.errors import NotFound, Problem

    for job_id in ("job_\x00", "job_\ud800"):
        with pytest.raises(Problem) as refused:
            async with database.read() as session:
                await jobs.get(session, job_id)
        assert refused.value.status in (404, 422) and isinstance(refused.value, NotFound | Problem)
    for after in (2**40, 2**70):
        with pytest.raises(Problem) as refused:
            async with database.read() as session:
                assert not await journal.entries_after(session, "job_1", after, 1)
                raise NotFound("none", "none")
        assert refused.value.status in (404, 422)


async def test_old_jobs_keep_their_counts(database: Database) -> None:
    async with database.read() as session:
        assert await _count(session) == 0
        assert (await session.execute(text("SELECT version_num FROM alembic_version"))).scalar_one()


async def _count(session: AsyncSession) -> int:
    return await session.scalar(select(func.count()).select_from(JobRow)) or 0


async def test_a_state_is_kept_with_its_entry(database: Database) -> None:
    """Journal, points and status change together or not at all."""
    job_id = await new_job(database)
    with pytest.raises(RuntimeError):
        async with database.write() as session:
            row = await jobs.get(session, job_id, to_change=True)
            event = StateChanged(state="starting", code="planned", reason="x")
            await journal.append(session, row, [Entry(seq=1, at_s=1.0, event=event)])
            raise RuntimeError("in the middle")
    async with database.read() as session:
        row = await jobs.get(session, job_id)
        assert (row.state, row.last_seq) == ("queued", 0)
        assert not await journal.entries_after(session, job_id, 0, 10)


@pytest.mark.parametrize("from_end", [False, True])
def test_an_answer_ends_before_it_is_too_large(from_end: bool) -> None:
    items = [{"n": n, "text": "\u00e9" * 1000} for n in range(500)]
    kept = fitting(items, from_end=from_end)
    assert kept == (items[-len(kept) :] if from_end else items[: len(kept)])
    assert MAX_ANSWER_BYTES - 5000 < sum(len(encoded(item)) + 1 for item in kept) < MAX_ANSWER_BYTES
    whole = page(items, lambda count: {"count": count})
    assert len(whole.body) <= MAX_ANSWER_BYTES and json.loads(whole.body) == {
        "items": items[: len(fitting(items))],
        "count": len(fitting(items)),
    }
    assert fitting([{"text": "x" * 300_000}], from_end=from_end), "one that is too large comes alone"
    assert json.loads(page([], lambda count: {"count": count}).body) == {"items": [], "count": 0}
