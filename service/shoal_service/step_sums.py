"""What all steps of a job add up to, by the epoch in which they were done: seconds, tokens, how many count."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service.models import StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSteps:
    """Steps of one epoch: those that count, or those that were rolled back and done again (`rolled_back`)."""

    epoch: int
    rolled_back: bool
    num_steps: int
    seconds: float
    tokens: int


async def step_sums(session: AsyncSession, job_id: str, since_s: float | None = None) -> tuple[EpochSteps, ...]:
    """Of steps that were done after `since_s` (by the clock of their cluster); of all by default. In the order of
    epochs."""
    query = (
        select(
            StepRow.epoch,
            StepRow.rolled_back,
            func.count(),
            func.sum(StepRow.duration_s),
            func.sum(StepRow.tokens),
        )
        .where(StepRow.job_id == job_id)
        .group_by(StepRow.epoch, StepRow.rolled_back)
        .order_by(StepRow.epoch, StepRow.rolled_back)
    )
    if since_s is not None:
        query = query.where(StepRow.at_s >= since_s)
    return tuple(
        EpochSteps(epoch=epoch, rolled_back=bool(undone), num_steps=count, seconds=float(seconds), tokens=int(tokens))
        for epoch, undone, count, seconds, tokens in (await session.execute(query)).all()
    )
