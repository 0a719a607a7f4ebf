"""Webhooks: making, changing and listing them, and their deliveries. Who may: administrators of the project, or of the
server where a webhook is of all projects. The secret is told once; how it is made is signing.py's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from shoal_service import preconditions, signing
from shoal_service.access import Principal, Role, project_not_found
from shoal_service.cursors import cut
from shoal_service.errors import Conflict, Forbidden, NotFound
from shoal_service.jobs import rfc3339
from shoal_service.models_people import ProjectRow
from shoal_service.models_webhooks import DeliveryRow, WebhookRow
from shoal_service.outbox import FAILED, PENDING, PING, Told, delivery
from shoal_service.shapes_people import Delivery, Webhook
from shoal_service.told_words import Form

MOST = 20  # of a project, and of the server


async def create(
    session: AsyncSession,
    principal: Principal,
    key: str,
    *,
    project: str | None,
    url: str,
    form: Form,
    events: Sequence[Told],
) -> tuple[WebhookRow, str]:
    """The webhook and its secret. `project` None: of all jobs. Raises Problem."""
    _check_may(principal, project)
    if project is not None and await session.get(ProjectRow, project) is None:
        raise project_not_found(project)
    count = select(func.count()).select_from(WebhookRow)
    if (await session.scalar(count.where(WebhookRow.project_id == project)) or 0) >= MOST:
        raise Conflict("too_many_webhooks", f"there are {MOST} webhooks already: delete one")
    row = WebhookRow(
        id=f"hook_{ULID()}",
        project_id=project,
        url=url,
        form=form,
        events=[event.value for event in events],
        enabled=True,
        created_by=principal.subject,
        created_at_s=time.time(),
        problem=None,
    )
    secret = renew_secret(row, key)
    session.add(row)
    return row, secret


def renew_secret(row: WebhookRow, key: str, overlap_s: float = 0.0) -> str:
    """Another secret from now on, also for what was not delivered yet. For `overlap_s` the one before signs as well, if
    it can still be made."""
    before: str | None = row.nonce  # of a new one there is none yet
    is_known = before is not None and signing.hash_of(signing.secret_of(key, row.id, before)) == row.secret_hash
    overlaps = is_known and overlap_s > 0
    row.old_nonce, row.old_until_s = (before, time.time() + overlap_s) if overlaps else (None, None)
    row.nonce = secrets.token_hex(16)
    secret = signing.secret_of(key, row.id, row.nonce)
    row.secret_hash = signing.hash_of(secret)
    row.problem = None
    return secret


async def page(
    session: AsyncSession, principal: Principal, *, limit: int, after: str | None
) -> tuple[Sequence[WebhookRow], str | None]:
    """Those that the principal administers, oldest first, and the id after which the next page begins, if any."""
    query = select(WebhookRow).order_by(WebhookRow.id).limit(limit + 1)
    seen = principal.projects(Role.ADMIN)
    if seen is not None:
        query = query.where(WebhookRow.project_id.in_(seen))
    if after is not None:
        query = query.where(WebhookRow.id > after)
    return cut((await session.scalars(query)).all(), limit, lambda row: row.id)


async def get(
    session: AsyncSession,
    principal: Principal,
    webhook_id: str,
    *,
    to_change: bool = False,
    if_match: str | None = None,
) -> WebhookRow:
    """`to_change` holds others up who are to change it. Raises NotFound for one that is not theirs, and Problem (412)
    for one that is not as `if_match` says."""
    row = await session.get(WebhookRow, webhook_id, with_for_update=to_change or None)
    if row is None or not _administers(principal, row.project_id):
        raise NotFound("webhook_not_found", f"id = {webhook_id!r}: there is no such webhook", "id")
    preconditions.require(_tag(row), if_match, f"webhook {row.id} has changed since")
    return row


async def remove(session: AsyncSession, row: WebhookRow) -> None:
    """With what it was not told yet."""
    await session.execute(delete(DeliveryRow).where(DeliveryRow.webhook_id == row.id))
    await session.delete(row)


def ping(session: AsyncSession, row: WebhookRow) -> DeliveryRow:
    """Something to tell, whatever happens."""
    found = delivery(row, PING, {"webhook": row.id}, cause=f"ping:{ULID()}")
    session.add(found)
    return found


async def deliveries(
    session: AsyncSession, webhook_id: str, *, state: str | None, limit: int, before: str | None
) -> tuple[Sequence[DeliveryRow], str | None]:
    """Newest first, and the id before which the next page begins, if any."""
    query = select(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id)
    if state is not None:
        query = query.where(DeliveryRow.state == state)
    if before is not None:
        query = query.where(DeliveryRow.id < before)
    rows = (await session.scalars(query.order_by(DeliveryRow.id.desc()).limit(limit + 1))).all()
    return rows[:limit], rows[limit - 1].id if len(rows) > limit else None


async def redeliver(session: AsyncSession, webhook_id: str, delivery_id: str) -> DeliveryRow:
    """Tells it again, under the same id. Raises NotFound."""
    row = await session.get(DeliveryRow, delivery_id)
    if row is None or row.webhook_id != webhook_id:
        raise NotFound("delivery_not_found", f"id = {delivery_id!r}: there is no such delivery", "id")
    row.state, row.num_attempts, row.next_at_s = PENDING, 0, time.time()
    return row


async def end_pending(session: AsyncSession, webhook_id: str, why: str) -> None:
    """Of a webhook that is told nothing any more."""
    mine = (DeliveryRow.webhook_id == webhook_id, DeliveryRow.state == PENDING)
    await session.execute(update(DeliveryRow).where(*mine).values(state=FAILED, problem=why))


def _administers(principal: Principal, project: str | None) -> bool:
    role = principal.role_in(project)
    return principal.server_admin or (role is not None and role.allows(Role.ADMIN))


def _check_may(principal: Principal, project: str | None) -> None:
    if _administers(principal, project):
        return
    if project is None:
        raise Forbidden("role", "needs an administrator of this server")
    if principal.role_in(project) is None:
        raise project_not_found(project)
    raise Forbidden("role", f"needs the role admin in project {project}")


def _tag(row: WebhookRow) -> str:
    return preconditions.tag_of(row.id, row.url, row.form, row.events, row.enabled, row.nonce)


def resource(row: WebhookRow) -> Webhook:
    """All but the secret."""
    return {
        "id": row.id,
        "project": row.project_id,
        "url": row.url,
        "form": row.form,
        "events": row.events,
        "enabled": row.enabled,
        "problem": row.problem,
        "old_secret_until": _old_until(row),
        "created_by": row.created_by,
        "created_at": rfc3339(row.created_at_s),
        "etag": _tag(row),
    }


def _old_until(row: WebhookRow) -> str | None:
    still = row.old_until_s is not None and row.old_until_s > time.time()
    return rfc3339(row.old_until_s) if still and row.old_until_s is not None else None


def delivery_resource(row: DeliveryRow) -> Delivery:
    return {
        "id": row.id,
        "event": row.event,
        "job": row.job_id,
        "state": row.state,
        "attempts": row.num_attempts,
        "status": row.status,
        "problem": row.problem,
        "created_at": rfc3339(row.created_at_s),
        "last_attempt_at": None if row.last_at_s is None else rfc3339(row.last_at_s),
        "next_attempt_at": rfc3339(row.next_at_s) if row.state == PENDING else None,
        "body": row.body,
    }
