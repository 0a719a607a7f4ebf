"""Long curves in steps of sixteen: of every 32, 512, 8,192 ... steps of the branch that counts, the points with the
lowest and the highest loss stand in a table, so that a curve of millions of points is read from a few thousand rows.

A bucket is written once the job is through with its last step, out of the buckets below it, and dropped when one of its
steps is done again. The steps that no bucket of a level holds yet are those of the levels below it, and at last points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, case, delete, func, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service.models import CurveRow, StepRow

WIDTHS = (32, 512, 8192, 131_072)
_SHARE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Of `num_points` points from step `first_step` on: numbers in the journal of the lowest and the highest one. A
    loss is None where none of them has one."""

    first_step: int
    low_seq: int
    low_loss: float | None
    high_seq: int
    high_loss: float | None
    num_points: int


async def keep_up(session: AsyncSession, job_id: str, *, redone_from: int | None, newest_step: int) -> None:
    """After points were added: drops the buckets that hold steps from `redone_from` on, and writes those that are
    full."""
    if redone_from is not None:
        gone = (CurveRow.job_id == job_id, (CurveRow.bucket + 1) * CurveRow.width > redone_from)
        await session.execute(delete(CurveRow).where(*gone))
    for level, width in enumerate(WIDTHS):
        full = (newest_step + 1) // width
        sealed = await _sealed(session, job_id, width)
        if full <= sealed:
            return  # nor is anything full above
        source = _of_points(job_id, width, sealed * width, full * width)
        if level:
            source = _of_buckets(job_id, WIDTHS[level - 1], sealed * width, full * width)
        names = ["job_id", "width", *_COLUMNS]
        await session.execute(insert(CurveRow).from_select(names, _with_keys(job_id, width, source)))


async def read(session: AsyncSession, job_id: str, width: int, first_step: int, last_step: int) -> list[Bucket]:
    """Buckets of at most `width` steps, in order, which hold every point from `first_step` to `last_step` once."""
    coarse_first = [each for each in reversed(WIDTHS) if each <= width]
    return await _read(session, job_id, coarse_first, min(width, WIDTHS[0]), first_step, last_step + 1)


async def _read(
    session: AsyncSession, job_id: str, levels: Sequence[int], width: int, first_step: int, end_step: int
) -> list[Bucket]:
    """What the coarsest level holds whole of these steps, and before and behind it what the finer ones do."""
    if first_step >= end_step:
        return []
    if not levels:
        return await _read_points(session, job_id, False, width, first_step, end_step - 1)
    level, *finer = levels
    begin = -(-first_step // level)
    end = min(end_step // level, await _sealed(session, job_id, level))
    if begin >= end:
        return await _read(session, job_id, finer, width, first_step, end_step)
    within = (CurveRow.bucket >= begin, CurveRow.bucket < end)
    mine = (CurveRow.job_id == job_id, CurveRow.width == level, *within)
    query = select(*(getattr(CurveRow, name) for name in _COLUMNS)).where(*mine).order_by(CurveRow.bucket)
    return [
        *await _read(session, job_id, finer, width, first_step, begin * level),
        *(_bucket(row, level) for row in await session.execute(query)),
        *await _read(session, job_id, finer, width, end * level, end_step),
    ]


async def read_undone(session: AsyncSession, job_id: str, width: int, first_step: int, last_step: int) -> list[Bucket]:
    """The same of what was rolled back: few points, which no table holds together."""
    return await _read_points(session, job_id, True, width, first_step, last_step)


async def _read_points(
    session: AsyncSession, job_id: str, rolled_back: bool, width: int, first_step: int, last_step: int
) -> list[Bucket]:
    query = _of_points(job_id, width, first_step, last_step + 1, rolled_back=rolled_back)
    found = [_bucket(row, width) for row in await session.execute(query)]
    return sorted(found, key=lambda each: each.first_step)


def merged(buckets: Sequence[Bucket], width: int, first_step: int) -> list[int]:
    """Numbers in the journal of the lowest and the highest point of every `width` steps."""
    lows: dict[int, Bucket] = {}
    highs: dict[int, Bucket] = {}
    for bucket in buckets:
        place = max(0, bucket.first_step - first_step) // width
        low, high = lows.setdefault(place, bucket), highs.setdefault(place, bucket)
        if _less(bucket.low_loss, low.low_loss):
            lows[place] = bucket
        if _less(high.high_loss, bucket.high_loss) or (high.high_loss is None and bucket.high_loss is not None):
            highs[place] = bucket
    return sorted({each.low_seq for each in lows.values()} | {each.high_seq for each in highs.values()})


def _less(loss: float | None, than: float | None) -> bool:
    return loss is not None and (than is None or loss < than)


async def _sealed(session: AsyncSession, job_id: str, width: int) -> int:
    """The first bucket that is not written yet."""
    newest = select(func.max(CurveRow.bucket)).where(CurveRow.job_id == job_id, CurveRow.width == width)
    found = await session.scalar(newest)
    return 0 if found is None else found + 1


_COLUMNS = ("bucket", "low_seq", "low_loss", "high_seq", "high_loss", "num_points")


def _of_points(job_id: str, width: int, first_step: int, end_step: int, *, rolled_back: bool = False) -> Select[Any]:
    live = (StepRow.job_id == job_id, StepRow.rolled_back.is_(rolled_back))
    within = (StepRow.step >= first_step, StepRow.step < end_step)
    one: ColumnElement[int] = literal(1)
    return _extremes(
        StepRow.step // width, (StepRow.seq, StepRow.loss), (StepRow.seq, StepRow.loss), one, live + within
    )


def _of_buckets(job_id: str, width: int, first_step: int, end_step: int) -> Select[Any]:
    mine = (CurveRow.job_id == job_id, CurveRow.width == width)
    within = (CurveRow.bucket >= first_step // width, CurveRow.bucket < end_step // width)
    lows, highs = (CurveRow.low_seq, CurveRow.low_loss), (CurveRow.high_seq, CurveRow.high_loss)
    return _extremes(CurveRow.bucket // _SHARE, lows, highs, CurveRow.num_points, mine + within)


def _extremes(bucket: Any, lows: Any, highs: Any, count: Any, where: Any) -> Select[Any]:
    """The columns of _COLUMNS. Where losses are equal the earlier point is the one; none is less and more than any."""
    (low_seq, low_loss), (high_seq, high_loss) = lows, highs
    low = func.row_number().over(partition_by=bucket, order_by=(low_loss.is_(None), low_loss, low_seq))
    high = func.row_number().over(partition_by=bucket, order_by=(high_loss.is_(None), high_loss.desc(), high_seq))
    ranked = select(
        bucket.label("bucket"),
        low_seq.label("low_seq"),
        low_loss.label("low_loss"),
        high_seq.label("high_seq"),
        high_loss.label("high_loss"),
        count.label("num_points"),
        low.label("low"),
        high.label("high"),
    )
    each = ranked.where(*where).subquery().c
    return select(
        each.bucket,
        func.max(case((each.low == 1, each.low_seq))).label("low_seq"),
        func.max(case((each.low == 1, each.low_loss))).label("low_loss"),
        func.max(case((each.high == 1, each.high_seq))).label("high_seq"),
        func.max(case((each.high == 1, each.high_loss))).label("high_loss"),
        func.sum(each.num_points).label("num_points"),
    ).group_by(each.bucket)


def _with_keys(job_id: str, width: int, source: Select[Any]) -> Select[Any]:
    columns = source.subquery().c
    return select(literal(job_id), literal(width), *(columns[name] for name in _COLUMNS))


def _bucket(row: Any, width: int) -> Bucket:
    return Bucket(
        first_step=row.bucket * width,
        low_seq=row.low_seq,
        low_loss=row.low_loss,
        high_seq=row.high_seq,
        high_loss=row.high_loss,
        num_points=int(row.num_points),
    )
