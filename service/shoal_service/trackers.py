"""Trackers of jobs in the database: which there are, who follows them, and how far they are, as REST shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.job import JobSpec
from shoal_service.jobs import rfc3339
from shoal_service.models import JobRow, TrackerRow
from shoal_service.shapes_jobs import Tracker

Key = tuple[str, str]  # job id, tool


def create(session: AsyncSession, job_id: str, spec: JobSpec) -> None:
    """With the job, in one transaction."""
    for tool, _ in spec.track.chosen():
        session.add(
            TrackerRow(
                job_id=job_id,
                tool=tool,
                generation=1,
                step=0,
                step_seq=0,
                seq=0,
                position={},
                complete=False,
                lease_until_s=0.0,
            )
        )


async def of_job(session: AsyncSession, job_id: str) -> list[Tracker]:
    query = select(TrackerRow).where(TrackerRow.job_id == job_id).order_by(TrackerRow.tool)
    return [resource(row) for row in (await session.scalars(query)).all()]


def resource(row: TrackerRow) -> Tracker:
    """`step`: all steps up to it stand in the tracker. `complete`: so does the end of the job, and nothing follows."""
    return {
        "tool": row.tool,
        "url": row.url,
        "step": row.step,
        "complete": row.complete,
        "problem": row.problem,
        "problem_since": None if row.problem_since_s is None else rfc3339(row.problem_since_s),
    }


async def open_to(session: AsyncSession, holder: str) -> Sequence[Key]:
    """What the holder has claimed, or may: nobody else who shows life follows it."""
    query = select(TrackerRow.job_id, TrackerRow.tool).where(TrackerRow.complete.is_(False), _free(holder))
    return [(job_id, tool) for job_id, tool in (await session.execute(query)).all()]


async def claim(session: AsyncSession, key: Key, holder: str, lease_s: float) -> bool:
    """Whether it is the holder's from now on."""
    values = {"holder": holder, "lease_until_s": time.time() + lease_s}
    changed = await session.execute(update(TrackerRow).where(*_is(key), _free(holder)).values(values))
    return bool(changed.rowcount)  # type: ignore[attr-defined]


async def renew(session: AsyncSession, holder: str, lease_s: float) -> None:
    await session.execute(
        update(TrackerRow).where(TrackerRow.holder == holder).values(lease_until_s=time.time() + lease_s)
    )


async def release(session: AsyncSession, holder: str) -> None:
    await session.execute(update(TrackerRow).where(TrackerRow.holder == holder).values(holder=None, lease_until_s=0.0))


async def get(session: AsyncSession, key: Key, holder: str) -> tuple[TrackerRow, JobRow] | None:
    """None where the holder is another one by now."""
    row = await session.scalar(select(TrackerRow).where(*_is(key), TrackerRow.holder == holder))
    job = None if row is None else await session.get(JobRow, row.job_id)
    return None if row is None or job is None else (row, job)


async def put(session: AsyncSession, key: Key, holder: str, **values: Any) -> bool:
    """False where the holder is another one by now."""
    changed = await session.execute(update(TrackerRow).where(*_is(key), TrackerRow.holder == holder).values(**values))
    return bool(changed.rowcount)  # type: ignore[attr-defined]


async def told(session: AsyncSession, job_id: str) -> None:
    """There is something new to see of the job."""
    await session.execute(update(JobRow).where(JobRow.id == job_id).values(version=JobRow.version + 1))


def _is(key: Key) -> tuple[Any, Any]:
    return TrackerRow.job_id == key[0], TrackerRow.tool == key[1]


def _free(holder: str) -> Any:
    held = TrackerRow.holder
    return or_(held.is_(None), held == holder, TrackerRow.lease_until_s < time.time())
