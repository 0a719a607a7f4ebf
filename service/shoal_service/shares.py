"""Shares of clusters in the database: what jobs are told, and what follows from what they confirm. Which nodes these
are is `scheduler`'s."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.job import JobSpec
from shoal_planner.limits import RESTING, CostLimits, priority_of
from shoal_planner.script_spec import AnyJob
from shoal_recovery.journal import Entry
from shoal_recovery.journal_shares import ShareTaken
from shoal_service.models import ShareRow
from shoal_service.shapes_jobs import Share, Why, WishOfControl

PREEMPTED = "preempted_by_priority"


def create(session: AsyncSession, job_id: str, spec: AnyJob) -> None:
    """With the job, in one transaction: it has no nodes yet."""
    session.add(
        ShareRow(
            job_id=job_id,
            priority=priority_of(spec.priority),
            limited=_is_limited(spec.limits),
            version=0,
            nodes=[],
            held=[],
            reason="",
            code="",
            hold_words="",
        )
    )


def may_rent(spec: AnyJob) -> bool:
    return isinstance(spec, JobSpec) and spec.limits.rent


async def relimit(session: AsyncSession, job_id: str, priority: int, limits: CostLimits) -> None:
    values = {"priority": priority, "limited": _is_limited(limits), "warning": None}
    await session.execute(update(ShareRow).where(ShareRow.job_id == job_id).values(values))


def _is_limited(limits: CostLimits) -> bool:
    return any(getattr(limits, name) is not None for name in RESTING)


async def of_jobs(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, ShareRow]:
    rows = await session.scalars(
        select(ShareRow).where(ShareRow.job_id.in_(job_ids)).execution_options(populate_existing=True)
    )
    return {row.job_id: row for row in rows}


async def of_job(session: AsyncSession, job_id: str) -> ShareRow:
    row = await session.get(ShareRow, job_id, populate_existing=True)
    assert row is not None  # every job is created with one
    return row


async def give_back(session: AsyncSession, job_id: str) -> None:
    """Of a job that has no supervisor any more: nothing of it is left on any node."""
    values = {"nodes": [], "held": [], "version": ShareRow.version + 1, "position": None, "code": "", "reason": ""}
    await session.execute(update(ShareRow).where(ShareRow.job_id == job_id).values(values))


async def confirm(session: AsyncSession, job_id: str, entries: Sequence[Entry]) -> None:
    """What a supervisor has taken; what it was told since may have been heard, too, so that counts as used."""
    for event in (entry.event for entry in entries):
        if isinstance(event, ShareTaken):
            held = None if event.nodes is None else sorted(event.nodes)
            mine = (ShareRow.job_id == job_id, ShareRow.version == event.version)
            await session.execute(update(ShareRow).where(*mine).values(held=held))


async def hold(session: AsyncSession, job_id: str, code: str | None, words: str = "") -> None:
    """The control plane lets the job rest, `words` ("as ...") say why; None: no more."""
    await session.execute(update(ShareRow).where(ShareRow.job_id == job_id).values(hold=code, hold_words=words))


def tell(row: ShareRow, nodes: Sequence[str] | None, reason: str) -> bool:
    """Whether that is news."""
    if row.nodes == nodes:
        return False
    held = None if row.held is None or nodes is None else sorted({*row.held, *nodes})
    row.held, row.nodes, row.version, row.reason = held, None if nodes is None else list(nodes), row.version + 1, reason
    return True


def wish(row: ShareRow) -> WishOfControl:
    """For a connector."""
    why: Why | None = None if row.hold is None else {"code": row.hold, "words": row.hold_words}
    return {"share": {"version": row.version, "nodes": row.nodes, "reason": row.reason}, "why": why}


def resource(row: ShareRow) -> Share:
    """As REST shows it. `leaving` are nodes that it still uses; null where it has not said yet which it has left."""
    return {
        "priority": row.priority,
        "nodes": row.nodes,
        "leaving": _leaving(row),
        "code": row.code or None,
        "reason": row.reason or None,
        "queue_position": row.position,
        "hold": row.hold,
        "warning": row.warning,
    }


def _leaving(row: ShareRow) -> list[str] | None:
    if row.nodes is None:
        return []
    return None if row.held is None else sorted({*row.held} - {*row.nodes})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Why the control plane lets a job rest."""

    code: str
    words: str


async def held(session: AsyncSession, job_id: str) -> Held | None:
    row = await of_job(session, job_id)
    return None if row.hold is None else Held(code=row.hold, words=row.hold_words)
