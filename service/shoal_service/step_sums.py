"""What all steps of a job add up to, by the epoch in which they were done: seconds, tokens, how many count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service.models import StepRow

_KEPT_JOBS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSteps:
    """Steps of one epoch: those that count, or those that were rolled back and done again (`rolled_back`). `stalled_s`
    of their seconds were waited for the safety of the step before, where anybody told."""

    epoch: int
    rolled_back: bool
    num_steps: int
    seconds: float
    tokens: int
    stalled_s: float = 0.0

    @property
    def worked_s(self) -> float:
        return max(0.0, self.seconds - self.stalled_s)


class StepSums:
    """Sums over all steps of jobs, kept so that of a job with a million steps only the new ones are added. Use from one
    event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def of(self, session: AsyncSession, job_id: str) -> tuple[EpochSteps, ...]:
        """In the order of epochs. Steps that were rolled back meanwhile change sums of before: then all are read."""
        undone = select(func.count()).where(StepRow.job_id == job_id, StepRow.rolled_back.is_(True))
        newest = select(func.max(StepRow.seq)).where(StepRow.job_id == job_id)
        num_undone, until_seq = await session.scalar(undone) or 0, await session.scalar(newest) or 0
        kept = self._kept.get(job_id)
        if kept is None or kept.num_undone != num_undone or kept.until_seq > until_seq:
            kept = _Kept(num_undone=num_undone, until_seq=0, sums=())
        fresh = await step_sums(session, job_id, after_seq=kept.until_seq, until_seq=until_seq)
        self._kept[job_id] = kept = _Kept(num_undone=num_undone, until_seq=until_seq, sums=_added(kept.sums, fresh))
        self._kept.move_to_end(job_id)
        while len(self._kept) > _KEPT_JOBS:
            self._kept.popitem(last=False)
        return kept.sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    num_undone: int
    until_seq: int
    sums: tuple[EpochSteps, ...]


def _added(left: Sequence[EpochSteps], right: Sequence[EpochSteps]) -> tuple[EpochSteps, ...]:
    found = {(each.epoch, each.rolled_back): each for each in left}
    for each in right:
        before = found.get((each.epoch, each.rolled_back))
        found[each.epoch, each.rolled_back] = (
            each
            if before is None
            else EpochSteps(
                epoch=each.epoch,
                rolled_back=each.rolled_back,
                num_steps=before.num_steps + each.num_steps,
                seconds=before.seconds + each.seconds,
                tokens=before.tokens + each.tokens,
                stalled_s=before.stalled_s + each.stalled_s,
            )
        )
    return tuple(found[key] for key in sorted(found))


async def step_sums(
    session: AsyncSession,
    job_id: str,
    *,
    since_s: float | None = None,
    after_seq: int = 0,
    until_seq: int | None = None,
) -> tuple[EpochSteps, ...]:
    """Of steps that were done after `since_s` (by the clock of their cluster), and whose numbers in the journal are
    after `after_seq` and not after `until_seq`; of all by default. In the order of epochs."""
    query = (
        select(
            StepRow.epoch,
            StepRow.rolled_back,
            func.count(),
            func.sum(StepRow.duration_s),
            func.sum(StepRow.tokens),
            func.sum(StepRow.stalled_s),
        )
        .where(StepRow.job_id == job_id, StepRow.seq > after_seq)
        .group_by(StepRow.epoch, StepRow.rolled_back)
        .order_by(StepRow.epoch, StepRow.rolled_back)
    )
    if until_seq is not None:
        query = query.where(StepRow.seq <= until_seq)
    if since_s is not None:
        query = query.where(StepRow.at_s >= since_s)
    return tuple(
        EpochSteps(
            epoch=epoch,
            rolled_back=bool(undone),
            num_steps=count,
            seconds=float(seconds),
            tokens=int(tokens),
            stalled_s=float(stalled_s or 0.0),
        )
        for epoch, undone, count, seconds, tokens, stalled_s in (await session.execute(query)).all()
    )
