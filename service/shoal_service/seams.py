"""The losses around changes of plan, from the database, for `continuity` to judge."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from shoal_recovery.journal import RecoveryDone
from shoal_service.continuity import Pair, Seam
from shoal_service.models import StepRow
from shoal_service.timeline import Event

_MOST_PAIRS = 200
_MOST_SEAMS = 20
_BEFORE = 12


async def pairs_of(session: AsyncSession, job_id: str) -> tuple[Pair, ...]:
    """The newest steps that were done twice, with both losses where these are numbers."""
    undone, done = aliased(StepRow), aliased(StepRow)
    query = (
        select(undone.step, undone.loss, done.loss)
        .join(
            done,
            (done.job_id == undone.job_id) & done.rolled_back.is_(False) & (done.step == undone.step),
        )
        .where(undone.job_id == job_id, undone.rolled_back.is_(True))
        .where(undone.loss.is_not(None), done.loss.is_not(None))
        .order_by(undone.step.desc())
        .limit(_MOST_PAIRS)
    )
    rows = (await session.execute(query)).all()
    return tuple(Pair(step=step, before=before, after=after) for step, before, after in rows if before and after)


async def seams_of(session: AsyncSession, job_id: str, events: Sequence[Event]) -> tuple[Seam, ...]:
    """At the newest changes of plan after which a step was done."""
    found: list[Seam] = []
    for event in [each for each in events if each.kind == RecoveryDone.kind][-_MOST_SEAMS:]:
        step = int(event.payload["step"])
        query = select(StepRow.step, StepRow.loss).where(
            StepRow.job_id == job_id,
            StepRow.rolled_back.is_(False),
            StepRow.step > step - _BEFORE,
            StepRow.step <= step + 1,
        )
        losses = {at: loss for at, loss in (await session.execute(query)).all() if loss is not None}
        after = losses.pop(step + 1, None)
        if after is not None:
            found.append(Seam(step=step + 1, before=tuple(losses[at] for at in sorted(losses)), after=after))
    return tuple(found)
