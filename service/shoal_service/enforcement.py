"""Budgets, deadlines and durations: looks at every job that has one, and lets those rest that have reached it. They
rest as after a pause of their user's, with their state in the object store, and go on once their limits allow it.

Owns no figures: what a job has cost is `spending`'s. A store that takes nothing stops no training, here as ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.limits import CostLimits, deadline_at_s, duration_s
from shoal_planner.script_spec import parse_any_job
from shoal_recovery.journal import AT_REST
from shoal_service import jobs, journal, outbox, rentals, shares
from shoal_service.bell import CLUSTERS, JOBS, Bell, job_topic
from shoal_service.database import Database
from shoal_service.models import JobRow, ShareRow
from shoal_service.outbox import Told
from shoal_service.shares import Held
from shoal_service.spending import spending_of
from shoal_service.turns import Turns

log = structlog.get_logger()

BUDGET_SPENT = "budget_spent"
DEADLINE_PASSED = "deadline_passed"
DURATION_PASSED = "max_duration_passed"
_FIELDS = {BUDGET_SPENT: "budget_usd", DEADLINE_PASSED: "deadline", DURATION_PASSED: "max_duration"}
_TOLD = {
    BUDGET_SPENT: Told.BUDGET_SPENT,
    DEADLINE_PASSED: Told.DEADLINE_PASSED,
    DURATION_PASSED: Told.DEADLINE_PASSED,
}
_UNPRICED = "limits.budget_usd cannot be kept: none of its nodes has a price"
_LOOK_S = 2.0
_WARN_SHARE = 0.8
_OPEN = tuple(state.value for state in AT_REST)


class Enforcement:
    """`start` in a running event loop."""

    def __init__(self, database: Database, bell: Bell) -> None:
        self._database = database
        self._bell = bell
        self._turns = Turns("limits", self.look, _LOOK_S)

    def start(self) -> None:
        self._turns.start()

    async def close(self) -> None:
        await self._turns.close()

    async def look(self) -> None:
        async with self._database.read() as session:
            rows = await _limited(session)
        for row in rows:
            async with self._database.write() as session:
                news = await _keep(session, await jobs.get(session, row.id))
            if news:
                self._bell.ring(CLUSTERS, JOBS, job_topic(row.id))


async def _limited(session: AsyncSession) -> Sequence[JobRow]:
    """Those that want to run, and have a limit that this is about."""
    query = select(JobRow).join(ShareRow, ShareRow.job_id == JobRow.id)
    wants = (JobRow.wish == jobs.WISH_RUN, JobRow.state.not_in(_OPEN), ShareRow.limited.is_(True))
    return (await session.scalars(query.where(*wants).order_by(JobRow.id))).all()


async def _keep(session: AsyncSession, row: JobRow) -> bool:
    """Whether anything came of it."""
    if row.wish != jobs.WISH_RUN or row.state in _OPEN:
        return False
    over, warning = await standing(session, row)
    share = await shares.of_job(session, row.id)
    if over is not None:
        # What it has spent was summed up beside its journal, which goes on; from here on that waits.
        row = await jobs.get(session, row.id, to_change=True)
        if row.wish != jobs.WISH_RUN or row.state in _OPEN:
            return False
        share.warning = None
        await jobs.let_rest(session, row, over)
        log.warning("job is let rest", job=row.id, code=over.code)
        await outbox.announce(session, row, _TOLD[over.code], once=_limit_of(row, over.code), reason=over.words)
        return True
    if warning is not None and warning != _UNPRICED:
        await outbox.announce(session, row, Told.BUDGET_WARNING, once=_limit_of(row, BUDGET_SPENT), reason=warning)
    if share.warning == warning:
        return False
    share.warning = warning
    return True


def _limit_of(row: JobRow, code: str) -> str:
    """Of each limit a webhook is told once, and again when it was changed."""
    field = _FIELDS[code]
    return f"{field} {row.spec['limits'][field]}"


async def standing(session: AsyncSession, row: JobRow) -> tuple[Held | None, str | None]:
    """Why the job may not go on, and what is about to run out: each None where nothing is."""
    limits: CostLimits = parse_any_job(row.spec).limits
    if limits.deadline is not None and time.time() >= deadline_at_s(limits.deadline):
        return Held(code=DEADLINE_PASSED, words=f"as limits.deadline ({limits.deadline}) has passed"), None
    if limits.max_duration is not None and (over := await _too_long(session, row, limits.max_duration)):
        return over, None
    if limits.budget_usd is None:
        return None, None
    spent_usd = spending_of(row, await journal.history(session, row.id), await rentals.of_job(session, row.id)).usd
    if spent_usd is None:
        return None, _UNPRICED
    of_budget = f"{spent_usd:.2f} of {limits.budget_usd:.2f} USD (limits.budget_usd)"
    if spent_usd >= limits.budget_usd:
        return Held(code=BUDGET_SPENT, words=f"as its budget is spent, {of_budget}"), None
    if spent_usd >= _WARN_SHARE * limits.budget_usd:
        return None, f"{spent_usd / limits.budget_usd:.0%} of its budget is spent, {of_budget}"
    return None, None


async def _too_long(session: AsyncSession, row: JobRow, max_duration: str) -> Held | None:
    """Since its journal began, which is when it first had nodes, whatever happened since."""
    first_at_s = await journal.first_at_s(session, row.id)
    if first_at_s is None or time.time() < first_at_s + duration_s(max_duration):
        return None
    began = jobs.rfc3339(first_at_s)
    return Held(code=DURATION_PASSED, words=f"as limits.max_duration ({max_duration}) has passed since {began}")
