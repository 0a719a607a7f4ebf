"""What the page of a job shows of one chosen step: each time that it was done, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import jobs
from shoal_service.models import JobRow, JournalRow, StepRow
from shoal_service.panels_recovery import milliseconds

_MOST = 20  # times that a step was done


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One time that the step was done, as the journal tells at `seq`."""

    seq: int
    epoch: int
    at: str
    loss: str
    grad_norm: str
    lr: str
    tokens: int
    took: str
    held_up: str
    samples: str
    standing: str


async def step_panel(session: AsyncSession, row: JobRow, step: int) -> dict[str, Any]:
    """`times`: the newest first; none where the step is not done, or its points are not kept any more."""
    query = (
        select(StepRow, JournalRow.payload)
        .outerjoin(JournalRow, (JournalRow.job_id == StepRow.job_id) & (JournalRow.seq == StepRow.seq))
        .where(StepRow.job_id == row.id, StepRow.rolled_back.in_((False, True)), StepRow.step == step)
        .order_by(StepRow.seq.desc())
        .limit(_MOST)
    )
    found = (await session.execute(query)).all()
    return {
        "step": step,
        "times": [_done(point, payload or {}) for point, payload in found],
        "newest": row.step,
        "before": step - 1 if step > 1 else None,
        "after": step + 1 if step < row.step else None,
    }


def _done(point: StepRow, payload: dict[str, Any]) -> Done:
    ranges = payload.get("samples") or ()
    return Done(
        seq=point.seq,
        epoch=point.epoch,
        at=jobs.rfc3339(point.at_s),
        loss=_figure(point.loss),
        grad_norm=_figure(point.grad_norm),
        lr="-" if point.lr is None else f"{point.lr:.3g}",
        tokens=point.tokens,
        took=milliseconds(point.duration_s),
        held_up="-" if point.stalled_s is None else milliseconds(point.stalled_s),
        samples=", ".join(f"{first:,} to {last - 1:,}" for first, last in ranges[:4]) + (" ..." if ranges[4:] else ""),
        standing="rolled back" if point.rolled_back else "no update" if point.skipped else "counts",
    )


def _figure(value: float | None) -> str:
    return "no number" if value is None else f"{value:.6g}"
