"""Jobs and journals written straight into a database, without a server."""

from __future__ import annotations

from typing import Any

from control_plane import job_mapping

from shoal_planner.job import parse_job
from shoal_recovery.journal import Entry, StepDone
from shoal_service import jobs, journal
from shoal_service.database import Database
from shoal_service.jobs import NewJob


async def new_job(database: Database) -> str:
    spec = parse_job(job_mapping(train={"steps": 100_000}))
    async with database.write() as session:
        row = jobs.create(
            session, NewJob(spec=spec, body_hash="x", idempotency_key=None, cluster_id=None, project="default")
        )
        await session.flush()
        return row.id


async def append(database: Database, job_id: str, events: list[Any]) -> None:
    async with database.write() as session:
        row = await jobs.get(session, job_id, to_change=True)
        numbered = enumerate(events, start=row.last_seq + 1)
        await journal.append(session, row, [Entry(seq=seq, at_s=float(seq), event=event) for seq, event in numbered])


def done(step: int, loss: float, epoch: int = 1) -> StepDone:
    return StepDone(
        epoch=epoch, step=step, loss=loss, grad_norm=1.0, lr=1e-3, tokens=256, duration_s=0.5, samples=((0, 8),)
    )
