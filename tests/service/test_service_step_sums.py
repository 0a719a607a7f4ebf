"""Sums of steps that are kept and added to, against the same sums read anew."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from control_plane import job_mapping, story

from shoal_planner.job import parse_job
from shoal_service import jobs, journal
from shoal_service.database import Database
from shoal_service.jobs import NewJob
from shoal_service.step_sums import EpochSteps, StepSums, step_sums


def test_kept_sums_are_those_of_all_steps_after_each_batch(tmp_path: Path) -> None:
    asyncio.run(_batches(tmp_path))


async def _batches(folder: Path) -> None:
    database = Database(f"sqlite+aiosqlite:///{folder / 'shoal.db'}")
    await database.migrate()
    told = story(job_mapping(), started_at_s=1000.0).entries
    spec = parse_job(job_mapping())
    async with database.write() as session:
        new = NewJob(project="default", spec=spec, body_hash="", idempotency_key=None, cluster_id=None)
        job_id = jobs.create(session, new).id
    kept, seen = StepSums(), []
    assert await _both(database, kept, job_id) == ((), ())
    for last in (5, 20, 26, 30, 31, 45, len(told)):
        async with database.write() as session:
            await journal.append(session, await jobs.get(session, job_id), told[:last])
        ours, all_of_them = await _both(database, kept, job_id)
        assert ours == all_of_them, last
        seen.append(sum(each.num_steps for each in ours))
    assert seen[-1] == 61 and any(each.rolled_back for each in ours)
    await database.close()


async def _both(
    database: Database, kept: StepSums, job_id: str
) -> tuple[tuple[EpochSteps, ...], tuple[EpochSteps, ...]]:
    async with database.read() as session:
        ours, anew = await kept.of(session, job_id), await step_sums(session, job_id)
    return _rounded(ours), _rounded(anew)


def _rounded(found: tuple[EpochSteps, ...]) -> tuple[EpochSteps, ...]:
    """Sums of floats depend on their order."""
    return tuple(
        dataclasses.replace(each, seconds=round(each.seconds, 9), stalled_s=round(each.stalled_s, 9)) for each in found
    )
