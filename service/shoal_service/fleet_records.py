"""What every job of the last weeks tells of its nodes: which it lost, and how long it had them. Of a job that has ended
that is read once, and a page never reads more than some anew: it says how many are missing."""

from __future__ import annotations

import time
from collections import OrderedDict

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import TERMINAL
from shoal_service import journal
from shoal_service.fleet import Record, record_of
from shoal_service.job_filter import JobFilter
from shoal_service.job_history import Histories
from shoal_service.models import JobRow

_NEW_AT_ONCE = 100
_KEPT = 20_000
_ENDED = tuple(state.value for state in TERMINAL)


class FleetRecords:
    """Use from one event loop."""

    def __init__(self, histories: Histories) -> None:
        self._histories = histories
        self._kept: OrderedDict[str, Record] = OrderedDict()

    async def since(
        self, session: AsyncSession, projects: frozenset[str] | None, since_s: float
    ) -> tuple[tuple[Record, ...], int]:
        """Of all jobs of these projects (None: all) that changed since then, and how many of them are not in it: the
        next look has them."""
        seen = (*JobFilter(projects=projects).conditions(), JobRow.updated_at_s >= since_s)
        query = select(JobRow.id, JobRow.state, JobRow.since_at_s).where(*seen).order_by(JobRow.updated_at_s.desc())
        left, found, missing = _NEW_AT_ONCE, [], 0
        for job_id, state, ended_at_s in (await session.execute(query)).all():
            if state not in _ENDED:
                found.append(record_of(await self._histories.of(session, job_id), time.time()))
            elif job_id in self._kept:
                self._kept.move_to_end(job_id)
                found.append(self._kept[job_id])
            elif left:
                left -= 1
                found.append(await self._keep(session, job_id, ended_at_s))
            else:
                missing += 1
        return tuple(found), missing

    async def _keep(self, session: AsyncSession, job_id: str, ended_at_s: float) -> Record:
        record = self._kept[job_id] = record_of(await journal.history(session, job_id), ended_at_s)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return record
