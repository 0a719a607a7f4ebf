"""The loss curve of a job, small enough for a page: of a long run, the lowest and highest point of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import EvaluationDone, RecoveryDone
from shoal_recovery.journal_scripts import ScriptReported
from shoal_service import jobs, journal
from shoal_service.jobs import rfc3339
from shoal_service.models import JournalRow, StepRow
from shoal_service.status import finite

MAX_MARKERS = 500


async def curve(session: AsyncSession, job_id: str, max_points: int) -> dict[str, Any]:
    """`points` is the branch that counts, `rolled_back` what was done and undone, `markers` what happened when, and
    `evaluations` the newest `max_points` of these. `reported` are, of a job that runs a script, the newest `max_points`
    of what it reported that count, with all figures under their own names."""
    live, num_live = await _points(session, job_id, False, max_points)
    undone, num_undone = await _points(session, job_id, True, max_points)
    events = await journal.newest(session, job_id, MAX_MARKERS, (RecoveryDone.kind,))
    evaluations = await journal.newest(session, job_id, max_points, (EvaluationDone.kind,))
    reported = await journal.newest(session, job_id, max_points, (ScriptReported.kind,))
    return {
        "job_id": job_id,
        "points": [point(row) for row in live],
        "rolled_back": [point(row) for row in undone],
        "markers": [_marker(row) for row in reversed(events)],
        "evaluations": [evaluation(row) for row in reversed(evaluations)],
        "reported": _reported(reported),
        "num_points": num_live,
        "num_rolled_back": num_undone,
        "downsampled": num_live > len(live) or num_undone > len(undone),
    }


async def _points(
    session: AsyncSession, job_id: str, rolled_back: bool, max_points: int
) -> tuple[Sequence[StepRow], int]:
    mine = (StepRow.job_id == job_id, StepRow.rolled_back.is_(rolled_back))
    counted = select(func.count(), func.min(StepRow.step), func.max(StepRow.step)).where(*mine)
    count, first, last = (await session.execute(counted)).one()
    query = select(StepRow).where(*mine)
    if count > max_points:
        # Two points stay of each bucket; the newest one always stays, so that the curve ends where the job is.
        width = -(-2 * (last - first + 1) // max(max_points - 2, 1))
        bucket = (StepRow.step - first) // width
        low = func.row_number().over(partition_by=bucket, order_by=(StepRow.loss, StepRow.seq))
        high = func.row_number().over(partition_by=bucket, order_by=(StepRow.loss.desc(), StepRow.seq))
        ranked = select(StepRow.seq, StepRow.step, low.label("low"), high.label("high")).where(*mine).subquery()
        kept = select(ranked.c.seq).where(or_(ranked.c.low == 1, ranked.c.high == 1, ranked.c.step == last))
        query = query.where(StepRow.seq.in_(kept))
    rows = (await session.scalars(query.order_by(StepRow.step, StepRow.seq))).all()
    return rows[-max_points:], count


def point(row: StepRow) -> dict[str, Any]:
    return {
        "step": row.step,
        "epoch": row.epoch,
        "loss": row.loss,
        "grad_norm": row.grad_norm,
        "lr": row.lr,
        "tokens_per_s": row.tokens / row.duration_s if row.duration_s > 0 else None,
        "duration_s": row.duration_s,
        "skipped": row.skipped,
        "at": rfc3339(row.at_s),
    }


def evaluation(row: JournalRow) -> dict[str, Any]:
    loss = finite(float(row.payload["loss"]))  # what is no number stands there as text
    return {
        "step": row.payload["step"],
        "loss": loss,
        "perplexity": jobs.perplexity(loss),
        "tokens": row.payload["tokens"],
        "duration_s": row.payload["duration_s"],
        "at": rfc3339(row.at_s),
    }


def _reported(newest_first: Sequence[JournalRow]) -> list[dict[str, Any]]:
    """Each step once: what was reported of it, or of a later one, before it was done again counts no more."""
    found: list[dict[str, Any]] = []
    for row in newest_first:
        if not found or row.payload["step"] < found[-1]["step"]:
            told = {name: row.payload[name] for name in ("step", "epoch", "metrics", "duration_s")}
            found.append({**told, "at": rfc3339(row.at_s)})
    return found[::-1]


def _marker(row: JournalRow) -> dict[str, Any]:
    return {
        "kind": "recovery",
        "step": row.payload["step"],
        "epoch": row.payload["epoch"],
        "cause": row.payload["cause"],
        "label": row.payload["reason"],
        "at": rfc3339(row.at_s),
    }
