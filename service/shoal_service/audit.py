"""What was done by whom, and what was refused: rows that are added, and read as pages. There is nothing that changes or
removes one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from shoal_service.access import Principal
from shoal_service.jobs import rfc3339
from shoal_service.models_people import AuditRow
from shoal_service.shapes_people import AuditEvent

_LONGEST_TARGET = 200


def record(
    session: AsyncSession,
    *,
    principal: Principal | None,
    action: str,
    target: str | None,
    project: str | None,
    address: str | None,
    status: int,
    code: str | None = None,
) -> None:
    """`status` is that of the answer. Nobody is known where somebody was not let in."""
    session.add(
        AuditRow(
            id=f"aud_{ULID()}",
            at_s=time.time(),
            actor=principal and principal.subject,
            actor_name=principal and principal.name,
            action=action,
            # No text of PostgreSQL's holds that character, and what was refused for it is recorded all the same.
            target=None if target is None else target[:_LONGEST_TARGET].replace("\0", "?"),
            project_id=project,
            address=address,
            status=status,
            code=code,
        )
    )


async def page(
    session: AsyncSession, *, projects: frozenset[str] | None, action: str | None, limit: int, before: str | None
) -> tuple[Sequence[AuditRow], str | None]:
    """Newest first, of these projects (None: everything), and the id before which the next page begins, if any."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
    if projects is not None:
        query = query.where(AuditRow.project_id.in_(projects))
    if action is not None:
        query = query.where(AuditRow.action == action)
    if before is not None:
        query = query.where(AuditRow.id < before)
    rows = (await session.scalars(query)).all()
    return rows[:limit], rows[limit - 1].id if len(rows) > limit else None


def resource(row: AuditRow) -> AuditEvent:
    return {
        "id": row.id,
        "at": rfc3339(row.at_s),
        "actor": row.actor,
        "actor_name": row.actor_name,
        "action": row.action,
        "target": row.target,
        "project": row.project_id,
        "address": row.address,
        "outcome": "done" if row.status < 400 else "refused" if row.status < 500 else "failed",
        "status": row.status,
        "code": row.code,
    }
