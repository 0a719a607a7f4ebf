"""What webhooks are to be told, written down in the transaction in which it happens: so nothing that happened is left
out, and nothing is told that did not. Sending is couriers.py's."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from shoal_service.models import JobRow
from shoal_service.models_webhooks import DeliveryRow, WebhookRow

PENDING, DELIVERED, FAILED = "pending", "delivered", "failed"
_MOST_TEXT = 2000  # of a reason


class Told(StrEnum):
    """What a webhook may ask to be told."""

    SUCCEEDED = "job.succeeded"
    FAILED = "job.failed"
    RECOVERED = "job.recovered"
    STUCK = "job.stuck"
    LOSS = "job.loss"
    BUDGET_WARNING = "job.budget_warning"
    BUDGET_SPENT = "job.budget_spent"
    DEADLINE_PASSED = "job.deadline_passed"


PING = "ping"


async def announce(session: AsyncSession, row: JobRow, told: Told, *, once: str, **more: Any) -> bool:
    """Something happened to a job: `once` tells it from all that happened before. `more` goes with it. Whether anybody
    is to be told who has not been."""
    found = await _listening(session, row.project_id, told)
    any_new = False
    for webhook in found:
        data = {"job": row.id, "project": row.project_id, "name": row.name, "step": row.step, **more}
        any_new |= await _put(session, delivery(webhook, told, data, cause=f"{told}:{row.id}:{once}"))
    return any_new


def delivery(webhook: WebhookRow, event: str, data: Mapping[str, Any], *, cause: str) -> DeliveryRow:
    now_s = time.time()
    short = {key: value[:_MOST_TEXT] if isinstance(value, str) else value for key, value in data.items()}
    at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return DeliveryRow(
        id=f"msg_{ULID()}",
        webhook_id=webhook.id,
        event=event,
        cause=cause[:200],
        job_id=data.get("job"),
        body=json.dumps({"type": event, "timestamp": at, "data": short}),
        created_at_s=now_s,
        state=PENDING,
        num_attempts=0,
        next_at_s=now_s,
        last_at_s=None,
        status=None,
        problem=None,
    )


async def _listening(session: AsyncSession, project: str, told: Told) -> Sequence[WebhookRow]:
    theirs = or_(WebhookRow.project_id == project, WebhookRow.project_id.is_(None))
    rows = await session.scalars(select(WebhookRow).where(WebhookRow.enabled.is_(True), theirs).order_by(WebhookRow.id))
    return [row for row in rows if told in row.events]


async def _put(session: AsyncSession, row: DeliveryRow) -> bool:
    known = select(DeliveryRow.id).where(DeliveryRow.webhook_id == row.webhook_id, DeliveryRow.cause == row.cause)
    if await session.scalar(known) is not None:
        return False
    try:
        async with session.begin_nested():
            session.add(row)
    except IntegrityError:  # another replica was first
        return False
    return True
