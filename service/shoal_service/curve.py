"""The loss curve of a job, or a stretch of it, small enough for a page: of many points, the lowest and highest of each
bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import EvaluationDone, RecoveryDone
from shoal_recovery.journal_scripts import ScriptReported
from shoal_service import curve_levels, jobs, journal
from shoal_service.answers import fitting
from shoal_service.jobs import rfc3339
from shoal_service.models import JournalRow, StepRow
from shoal_service.shapes_history import EvaluationPoint, Marker, Point
from shoal_service.status import finite

# So that all of an answer stays below MAX_ANSWER_BYTES.
MOST_POINTS, _MOST_UNDONE, _MOST_OTHERS, _MOST_MARKERS = 450, 100, 100, 100
_MOST_REPORTED_BYTES = 30_000


async def curve(
    session: AsyncSession, job_id: str, max_points: int, from_step: int = 0, to_step: int | None = None
) -> dict[str, Any]:
    """Of the steps from `from_step` to `to_step`, both within (None: the newest). `points` is the branch that counts,
    `rolled_back` what was done and undone, `markers` what happened when, and `evaluations` the newest of these.
    `reported` are, of a job that runs a script, the newest of what it reported that count, with all figures under their
    own names. There are at most `max_points` points, and no more than an answer may hold."""
    live, num_live = await _points(session, job_id, False, min(max_points, MOST_POINTS), from_step, to_step)
    undone, num_undone = await _points(session, job_id, True, min(max_points, _MOST_UNDONE), from_step, to_step)
    within = await _journal_span(session, job_id, from_step, to_step)
    events = await journal.newest(session, job_id, _MOST_MARKERS, (RecoveryDone.kind,), *within)
    evaluations = await journal.newest(session, job_id, min(max_points, _MOST_OTHERS), (EvaluationDone.kind,), *within)
    reported = await journal.newest(session, job_id, min(max_points, MOST_POINTS), (ScriptReported.kind,), *within)
    return {
        "job_id": job_id,
        "points": [point(row) for row in live],
        "rolled_back": [point(row) for row in undone],
        "markers": [_marker(row) for row in reversed(events)],
        "evaluations": [evaluation(row) for row in reversed(evaluations) if _is_within(row, from_step, to_step)],
        "reported": fitting(
            _reported([row for row in reported if _is_within(row, from_step, to_step)]),
            _MOST_REPORTED_BYTES,
            from_end=True,
        ),
        "num_points": num_live,
        "num_rolled_back": num_undone,
        "downsampled": num_live > len(live) or num_undone > len(undone),
    }


async def _points(
    session: AsyncSession, job_id: str, rolled_back: bool, max_points: int, from_step: int, to_step: int | None
) -> tuple[Sequence[StepRow], int]:
    """The points in order, and how many there are in all. The first and the newest one always stay, so that the curve
    ends where the job is."""
    mine = [StepRow.job_id == job_id, StepRow.rolled_back.is_(rolled_back), StepRow.step >= from_step]
    if to_step is not None:
        mine.append(StepRow.step <= to_step)
    ends_of = select(func.min(StepRow.step), func.max(StepRow.step)).where(*mine)
    first, last = cast(tuple[int | None, int | None], tuple((await session.execute(ends_of)).one()))
    if first is None or last is None:
        return (), 0
    columns = StepRow.__table__.columns  # rather than objects that a session keeps: there are hundreds
    query, count = select(*columns).where(*mine), None
    if rolled_back or last - first < max_points:
        count = await session.scalar(select(func.count()).select_from(StepRow).where(*mine)) or 0
    if count is None or count > max_points:
        # Two points stay of each bucket.
        width = -(-2 * (last - first + 1) // max(max_points - 4, 1))
        read = curve_levels.read_undone if rolled_back else curve_levels.read
        buckets = await read(session, job_id, width, from_step, last)
        count = sum(bucket.num_points for bucket in buckets)
        ends = await session.scalars(select(StepRow.seq).where(*mine, StepRow.step.in_((first, last))))
        kept = {*curve_levels.merged(buckets, width, first), *ends}
        query = select(*columns).where(StepRow.job_id == job_id, StepRow.seq.in_(kept))
    rows = (await session.execute(query.order_by(StepRow.step, StepRow.seq))).all()
    return cast(Sequence[StepRow], rows)[-max_points:], count


async def _journal_span(
    session: AsyncSession, job_id: str, from_step: int, to_step: int | None
) -> tuple[int, int | None]:
    """The numbers in the journal after and before which what belongs to these steps stands."""
    live = (StepRow.job_id == job_id, StepRow.rolled_back.is_(False))
    after, before = 0, None
    if from_step:
        after = await session.scalar(select(func.max(StepRow.seq)).where(*live, StepRow.step < from_step)) or 0
    if to_step is not None:
        before = await session.scalar(select(func.min(StepRow.seq)).where(*live, StepRow.step > to_step))
    return after, before


def _is_within(row: JournalRow, from_step: int, to_step: int | None) -> bool:
    """What a step brought may stand in the journal a little before the step itself."""
    return bool(row.payload["step"] >= from_step and (to_step is None or row.payload["step"] <= to_step))


def point(row: StepRow) -> Point:
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


def evaluation(row: JournalRow) -> EvaluationPoint:
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


def _marker(row: JournalRow) -> Marker:
    return {
        "kind": "recovery",
        "step": row.payload["step"],
        "epoch": row.payload["epoch"],
        "cause": row.payload["cause"],
        "label": row.payload["reason"],
        "at": rfc3339(row.at_s),
    }
