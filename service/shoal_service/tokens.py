"""Tokens: making, listing and revoking them. What a token may, identity.py says; the secret itself is told once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from shoal_service.access import Kind, Principal, Role, project_not_found
from shoal_service.access import TokenRole as TokenRole
from shoal_service.errors import BadInput, Forbidden, NotFound, Problem
from shoal_service.identity import is_valid, sha256
from shoal_service.jobs import rfc3339
from shoal_service.models_people import ProjectRow, TokenRow
from shoal_service.shapes_people import Token

VALID_S = 90 * 86400.0

OF_SERVER = (TokenRole.CONNECTOR, TokenRole.SERVER_ADMIN, TokenRole.METRICS)


def refusal(principal: Principal, role: TokenRole, project: str | None, cluster_id: str | None) -> Problem | None:
    """Why nobody may be given such a token by this principal; None if they may. Pure."""
    if (cluster_id is None) == (role is TokenRole.CONNECTOR):
        return BadInput(
            "invalid_field", f"cluster_id = {cluster_id!r}: goes with the role connector alone", "cluster_id"
        )
    if role in OF_SERVER:
        if project is not None:
            return BadInput("invalid_field", f"project = {project!r}: a token with the role {role} has none", "project")
        return None if principal.server_admin else Forbidden("role", "needs an administrator of this server")
    held = principal.role_in(project)
    if held is None:
        return project_not_found(project)
    if principal.kind is Kind.TOKEN and not held.allows(Role.ADMIN):
        return Forbidden("role", f"needs the role admin in project {project}: a token may give no other ones away")
    if not held.allows(Role(role)):
        return Forbidden("role", f"role = {role}: is more than you have in project {project}, where you are {held}")
    return None


async def create(
    session: AsyncSession,
    principal: Principal,
    *,
    name: str,
    role: TokenRole,
    project: str | None,
    cluster_id: str | None,
    valid_s: float | None,
) -> tuple[TokenRow, str]:
    """The token and its secret, which nobody can find out again. Raises Problem."""
    problem = refusal(principal, role, project, cluster_id)
    if problem is None and project is not None and await session.get(ProjectRow, project) is None:
        problem = project_not_found(project)
    if problem is not None:
        raise problem
    secret, now_s = f"shoal_{secrets.token_urlsafe(32)}", time.time()
    row = TokenRow(
        id=f"tok_{ULID()}",
        name=name,
        hash=sha256(secret),
        role=role.value,
        project_id=project,
        cluster_id=cluster_id,
        created_by=principal.owner,
        created_at_s=now_s,
        expires_at_s=None if valid_s is None else now_s + valid_s,
    )
    session.add(row)
    return row, secret


async def page(
    session: AsyncSession, principal: Principal, *, limit: int, before: str | None
) -> tuple[Sequence[TokenRow], str | None]:
    """Those that the principal may see, newest first, and the id before which the next page begins, if any."""
    query = select(TokenRow).order_by(TokenRow.id.desc()).limit(limit + 1)
    if not principal.server_admin:
        theirs = TokenRow.project_id.in_(principal.projects(Role.ADMIN) or ())
        query = query.where(or_(theirs, TokenRow.created_by == _maker(principal)))
    if before is not None:
        query = query.where(TokenRow.id < before)
    rows = (await session.scalars(query)).all()
    return rows[:limit], rows[limit - 1].id if len(rows) > limit else None


async def revoke(session: AsyncSession, principal: Principal, token_id: str) -> TokenRow:
    """It is refused from now on. Once more is the same as once. Raises NotFound for one that is not theirs to see."""
    row = await session.get(TokenRow, token_id)
    if row is None or not _may_revoke(principal, row):
        raise NotFound("token_not_found", f"id = {token_id!r}: there is no such token", "id")
    if row.revoked_at_s is None:
        row.revoked_at_s = time.time()
    return row


def _may_revoke(principal: Principal, row: TokenRow) -> bool:
    role = principal.role_in(row.project_id)
    is_theirs = row.created_by == _maker(principal) or row.id == principal.subject
    return principal.server_admin or is_theirs or (role is not None and role.allows(Role.ADMIN))


def _maker(principal: Principal) -> str | None:
    """Under what name it makes tokens; another token of the same user is not shown these."""
    return principal.owner if principal.kind in (Kind.USER, Kind.ADMINISTRATOR) else None


def resource(row: TokenRow) -> Token:
    """All but the secret, which is not here."""
    times = (row.expires_at_s, row.last_used_at_s, row.revoked_at_s)
    expires, used, revoked = (None if at_s is None else rfc3339(at_s) for at_s in times)
    return {
        "id": row.id,
        "name": row.name,
        "role": row.role,
        "project": row.project_id,
        "cluster_id": row.cluster_id,
        "created_by": row.created_by,
        "created_at": rfc3339(row.created_at_s),
        "expires_at": expires,
        "last_used_at": used,
        "revoked_at": revoked,
        "valid": is_valid(row, time.time()),
    }
