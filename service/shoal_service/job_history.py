"""A job's history for its page: the journal without its steps, read from the database once for all who look.

Plans of a thousand devices are large, and panels are many: what did not change since it was read is not read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import CheckpointCommitted, PredictionChecked, RecoveryDone
from shoal_service import journal, timeline
from shoal_service.models import JobRow, JournalRow, StepRow
from shoal_service.step_sums import StepSums
from shoal_service.timeline import Event

_KEPT_JOBS = 16
KINDS = (*timeline.KINDS, PredictionChecked.kind)


class Histories:
    """Of the jobs that were looked at last, and what their `steps` add up to. Use from one event loop.

    Journals only grow, so the number of the newest entry tells whether anything is new.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, tuple[Event, ...]]] = OrderedDict()
        self.steps = StepSums()

    async def of(self, session: AsyncSession, job_id: str) -> tuple[Event, ...]:
        """Oldest first: the newest 5,000 entries of the kinds that panels show."""
        newest = await newest_seq(session, job_id)
        kept = self._kept.get(job_id)
        if kept is None or kept[0] != newest:
            rows = await journal.newest(session, job_id, journal.MAX_HISTORY, KINDS)
            kept = newest, tuple(event_of(row) for row in reversed(rows))
        self._kept[job_id] = kept
        self._kept.move_to_end(job_id)
        while len(self._kept) > _KEPT_JOBS:
            self._kept.popitem(last=False)
        return kept[1]


async def newest_seq(session: AsyncSession, job_id: str) -> int:
    """The number of the newest entry that panels show; 0: there is none."""
    return (await newest_seqs(session, [job_id])).get(job_id, 0)


async def newest_seqs(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, int]:
    """The same by job, of those that have such an entry."""
    newest = select(func.max(JournalRow.seq)).where(
        JournalRow.job_id == JobRow.id, JournalRow.kind.in_((*KINDS, CheckpointCommitted.kind))
    )
    query = select(JobRow.id, newest.correlate(JobRow).scalar_subquery()).where(JobRow.id.in_(job_ids))
    return {job_id: seq for job_id, seq in (await session.execute(query)).all() if seq is not None}


async def mark(session: AsyncSession, row: JobRow) -> str:
    """The same as long as nothing but steps has happened to a job and to what is wished of it."""
    return f"{await newest_seq(session, row.id)}.{row.state}.{row.wish}"


def event_of(row: JournalRow) -> Event:
    return Event(seq=row.seq, at_s=row.at_s, kind=row.kind, payload=row.payload)


async def first_steps_s(session: AsyncSession, job_id: str, recoveries: Sequence[Event]) -> dict[int, float]:
    """By the number of a recovery's entry, how long the first step after it took; none where there was none."""
    found: dict[int, float] = {}
    for event in recoveries:
        assert event.kind == RecoveryDone.kind
        query = select(StepRow.duration_s).where(
            StepRow.job_id == job_id, StepRow.seq > event.seq, StepRow.epoch == event.payload["epoch"]
        )
        seconds = await session.scalar(query.order_by(StepRow.seq).limit(1))
        if seconds is not None:
            found[event.seq] = float(seconds)
    return found


async def newest_steps_at_s(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, float]:
    """By job, when its newest step was done; none of a job that has done none."""
    newest = select(StepRow.at_s).where(StepRow.job_id == JobRow.id).order_by(StepRow.seq.desc()).limit(1)
    query = select(JobRow.id, newest.correlate(JobRow).scalar_subquery()).where(JobRow.id.in_(job_ids))
    return {job_id: float(at_s) for job_id, at_s in (await session.execute(query)).all() if at_s is not None}
