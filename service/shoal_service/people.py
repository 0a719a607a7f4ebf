"""Projects, users, and the roles of users in projects, in the database."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from shoal_service import preconditions
from shoal_service.access import DEFAULT_PROJECT, Role, project_not_found
from shoal_service.cursors import cut
from shoal_service.errors import BadInput, Conflict, NotFound
from shoal_service.jobs import rfc3339
from shoal_service.models import JobRow, SecretRow
from shoal_service.models_people import MemberRow, ProjectRow, StorageRow, TokenRow, UserRow
from shoal_service.models_webhooks import WebhookRow
from shoal_service.shapes_people import Member, Project, User


async def all_projects(session: AsyncSession, ids: frozenset[str] | None) -> Sequence[ProjectRow]:
    """These (None: all), by id."""
    query = select(ProjectRow).order_by(ProjectRow.id)
    return (await session.scalars(query if ids is None else query.where(ProjectRow.id.in_(ids)))).all()


async def projects_page(
    session: AsyncSession, ids: frozenset[str] | None, *, limit: int, after: str | None
) -> tuple[Sequence[ProjectRow], str | None]:
    """Of these projects (None: of all) by id, and the id after which the next page begins, if any."""
    query = select(ProjectRow).order_by(ProjectRow.id).limit(limit + 1)
    query = query if ids is None else query.where(ProjectRow.id.in_(ids))
    rows = (await session.scalars(query if after is None else query.where(ProjectRow.id > after))).all()
    return cut(rows, limit, lambda row: row.id)


async def names(session: AsyncSession, ids: Collection[str]) -> dict[str, str]:
    """Of people, by id, as pages show them; `admin` holds the server's own token."""
    rows = await session.scalars(select(UserRow).where(UserRow.id.in_(ids)))
    found = {row.id: row.name or row.email or row.id for row in rows}
    return {"admin": "administrator", "": "not known", **found}


async def get_project(session: AsyncSession, project: str) -> ProjectRow:
    row = await session.get(ProjectRow, project)
    if row is None:
        raise project_not_found(project)
    return row


async def create_project(session: AsyncSession, project: str) -> ProjectRow:
    """Raises Conflict where there is one of that name."""
    if await session.get(ProjectRow, project) is not None:
        raise Conflict("project_exists", f"id = {project!r}: there is such a project already")
    row = ProjectRow(id=project, created_at_s=time.time())
    session.add(row)
    return row


async def delete_project(session: AsyncSession, project: str) -> None:
    """With its members, tokens and webhooks. Raises Conflict for one that has had jobs, whose history stays."""
    row = await get_project(session, project)
    if project == DEFAULT_PROJECT:
        raise Conflict("project_in_use", f"project {project} cannot be deleted: it is the one of whoever names none")
    if await session.scalar(select(JobRow.id).where(JobRow.project_id == project).limit(1)) is not None:
        raise Conflict("project_in_use", f"project {project} cannot be deleted: it has jobs")
    for table in (MemberRow, TokenRow, StorageRow, WebhookRow):
        await session.execute(delete(table).where(table.project_id == project))
    await session.delete(row)


async def members(
    session: AsyncSession, project: str, *, limit: int | None = None, after: str | None = None
) -> Sequence[tuple[MemberRow, UserRow]]:
    """By user id: at most `limit` of those behind `after`."""
    query = (
        select(MemberRow, UserRow)
        .join(UserRow, UserRow.id == MemberRow.user_id)
        .where(MemberRow.project_id == project)
        .order_by(MemberRow.user_id)
        .limit(limit)
    )
    if after is not None:
        query = query.where(MemberRow.user_id > after)
    return [(member, user) for member, user in (await session.execute(query)).all()]


async def set_role(
    session: AsyncSession, project: str, user: UserRow, role: Role, if_match: str | None = None
) -> MemberRow:
    """Raises Problem (412) where the role is not as `if_match` says."""
    row = await session.get(MemberRow, (project, user.id), with_for_update=True)
    _check_member(row, if_match, project, user.id)
    if row is None:
        row = MemberRow(project_id=project, user_id=user.id, created_at_s=time.time(), role=role.value)
        session.add(row)
    row.role = role.value
    return row


async def remove_member(session: AsyncSession, project: str, user_id: str, if_match: str | None = None) -> None:
    """Raises NotFound, and Problem (412) where the role is not as `if_match` says."""
    row = await session.get(MemberRow, (project, user_id), with_for_update=True)
    if row is None:
        raise NotFound("user_not_found", f"user_id = {user_id!r}: is no member of project {project}", "user_id")
    _check_member(row, if_match, project, user_id)
    await session.delete(row)


def _check_member(row: MemberRow | None, if_match: str | None, project: str, user_id: str) -> None:
    role = "no role" if row is None else f"the role {row.role}"
    current = None if row is None else _member_tag(row)
    preconditions.require(current, if_match, f"{user_id} has {role} in project {project} now")


async def all_users(session: AsyncSession, *, limit: int, after: str | None) -> tuple[Sequence[UserRow], str | None]:
    """By id, and the id after which the next page begins, if any."""
    query = select(UserRow).order_by(UserRow.id).limit(limit + 1)
    rows = (await session.scalars(query if after is None else query.where(UserRow.id > after))).all()
    return rows[:limit], rows[limit - 1].id if len(rows) > limit else None


async def get_user(
    session: AsyncSession, user_id: str, *, to_change: bool = False, if_match: str | None = None
) -> UserRow:
    """`to_change` holds others up who are to change it. Raises NotFound, and Problem (412) for one who is not as
    `if_match` says."""
    row = await session.get(UserRow, user_id, with_for_update=to_change or None)
    if row is None:
        raise NotFound("user_not_found", f"user_id = {user_id!r}: there is no such user", "user_id")
    preconditions.require(_user_tag(row), if_match, f"user {row.id} has changed since")
    return row


async def invited(session: AsyncSession, email: str) -> UserRow:
    """The user with this address; if there is none, whoever signs in with it first will be."""
    email = _normal(email)
    row = await session.scalar(select(UserRow).where(UserRow.email == email))
    if row is None:
        row = UserRow(id=f"user_{ULID()}", email=email, name=email, created_at_s=time.time(), server_admin=False)
        session.add(row)
        await session.flush()
    return row


def _normal(email: str) -> str:
    local, at, domain = email.strip().rpartition("@")
    if not (local and at and domain) or not email.isprintable() or " " in email.strip():
        raise BadInput("invalid_field", f"email = {email!r}: is no e-mail address", "email")
    return f"{local}@{domain}".lower()


async def delete_user(session: AsyncSession, user_id: str, if_match: str | None = None) -> None:
    """With the roles that they had; their sessions and tokens end with them. Raises as `get_user`."""
    row = await get_user(session, user_id, to_change=True, if_match=if_match)
    await session.execute(delete(MemberRow).where(MemberRow.user_id == user_id))
    await session.execute(delete(SecretRow).where(SecretRow.subject == user_id))
    await session.delete(row)


async def arrived(
    session: AsyncSession, *, issuer: str, subject: str, email: str | None, name: str, server_admin: bool
) -> UserRow:
    """Whoever the identity provider says is there: known already, invited by this (verified) address, or new."""
    found = select(UserRow).where(UserRow.issuer == issuer, UserRow.subject == subject)
    row = await session.scalar(found)
    email = None if email is None else _normal(email)
    if row is None and email is not None:
        row = await session.scalar(select(UserRow).where(UserRow.email == email, UserRow.subject.is_(None)))
    if row is None:
        row = UserRow(id=f"user_{ULID()}", created_at_s=time.time(), server_admin=False)
        taken = email and await session.scalar(select(UserRow.id).where(UserRow.email == email))
        row.email = None if taken else email
        session.add(row)
    row.issuer, row.subject, row.name, row.seen_at_s = issuer, subject, name[:200], time.time()
    row.server_admin = row.server_admin or server_admin
    return row


def _user_tag(row: UserRow) -> str:
    return preconditions.tag_of(row.id, row.name, row.email, row.server_admin)


def _member_tag(row: MemberRow) -> str:
    return preconditions.tag_of(row.project_id, row.user_id, row.role)


def user_resource(row: UserRow) -> User:
    return {
        "id": row.id,
        "name": row.name,
        "email": row.email,
        "server_admin": row.server_admin,
        "signed_in_before": row.subject is not None,
        "created_at": rfc3339(row.created_at_s),
        "seen_at": None if row.seen_at_s is None else rfc3339(row.seen_at_s),
        "etag": _user_tag(row),
    }


def member_resource(member: MemberRow, user: UserRow) -> Member:
    return {
        "user_id": user.id,
        "name": user.name,
        "email": user.email,
        "role": member.role,
        "since": rfc3339(member.created_at_s),
        "etag": _member_tag(member),
    }


def project_resource(row: ProjectRow, role: Role | None) -> Project:
    """`role` is that of whoever asks."""
    return {"id": row.id, "role": role, "created_at": rfc3339(row.created_at_s)}
