"""Who somebody is: from a token or a subject to a `Principal`, as the database says at that moment. So a role that was
taken away, or a token that was revoked, counts no more with the next request."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import time
from collections.abc import Mapping

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import people
from shoal_service.access import ADMINISTRATOR, Kind, Principal, Role, lesser
from shoal_service.database import Database
from shoal_service.models_people import MemberRow, TokenRow, UserRow
from shoal_service.openid import Person, Provider

_NOTED_EVERY_S = 60.0  # when a token was last used is kept to the minute: it is asked for with every request


def sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Identity:
    """`admins` are the verified addresses of users who administer the server; `given` is who has which token, by its
    hash, that is in no table."""

    def __init__(
        self,
        database: Database,
        admin_token: str,
        provider: Provider | None = None,
        admins: frozenset[str] = frozenset(),
        given: Mapping[str, Principal] | None = None,
    ) -> None:
        self._database = database
        self._given = given or {}
        self._admin_hash = sha256(admin_token)
        self.provider = provider
        self._admins = admins
        self._noted_at_s: dict[str, float] = {}

    async def of_token(self, secret: str, *, ask_provider: bool = True) -> Principal | None:
        """None for one that nobody has, or that is expired or revoked. One that is not ours may be the OpenID
        provider's."""
        hashed, now_s = sha256(secret), time.time()
        if hmac.compare_digest(hashed, self._admin_hash):
            return ADMINISTRATOR
        if hashed in self._given:
            return self._given[hashed]
        async with self._database.read() as session:
            row = await session.scalar(select(TokenRow).where(TokenRow.hash == hashed))
            found = None if row is None else await _of_row(session, row, now_s)
        if row is None and self.provider is not None and ask_provider:
            person = await self.provider.of_access_token(secret)
            return None if person is None else await self.of_person(person)
        if row is not None and found is not None:
            await self._note(row.id, now_s)
        return found

    async def of_person(self, person: Person) -> Principal:
        """The user that somebody is here, who becomes one by coming."""
        async with self._database.write() as session:
            row = await people.arrived(
                session,
                issuer=person.issuer,
                subject=person.subject,
                email=person.email,
                name=person.name,
                server_admin=person.email is not None and person.email.lower() in self._admins,
            )
            await session.flush()
            found = await _of_user(session, row.id)
        assert found is not None
        return found

    async def of_subject(self, subject: str) -> Principal | None:
        """None for one that is not there any more, or may not sign in."""
        if subject == ADMINISTRATOR.subject:
            return ADMINISTRATOR
        async with self._database.read() as session:
            if subject.startswith("tok_"):
                row = await session.get(TokenRow, subject)
                return None if row is None else await _of_row(session, row, time.time())
            return await _of_user(session, subject)

    async def again(self, secret: str, known: Principal) -> Principal | None:
        """Whoever showed this token before, as they are now: of a provider's, nothing is written down once more."""
        found = await self.of_token(secret, ask_provider=False)
        if found is not None or known.kind is not Kind.USER or self.provider is None:
            return found
        person = await self.provider.of_access_token(secret)
        return None if person is None else await self.of_subject(known.subject)

    async def _note(self, token_id: str, now_s: float) -> None:
        if now_s - self._noted_at_s.get(token_id, 0.0) < _NOTED_EVERY_S:
            return
        self._noted_at_s[token_id] = now_s
        async with self._database.write() as session:
            await session.execute(update(TokenRow).where(TokenRow.id == token_id).values(last_used_at_s=now_s))


def is_valid(row: TokenRow, now_s: float) -> bool:
    return row.revoked_at_s is None and (row.expires_at_s is None or row.expires_at_s > now_s)


async def _of_row(session: AsyncSession, row: TokenRow, now_s: float) -> Principal | None:
    if not is_valid(row, now_s):
        return None
    if row.cluster_id is not None:
        return Principal(
            subject=row.id, name=row.name, kind=Kind.CONNECTOR, owner=row.created_by, cluster_id=row.cluster_id
        )
    owner = await _of_user(session, row.created_by) if row.created_by.startswith("user_") else ADMINISTRATOR
    if owner is None:
        return None
    as_token = dataclasses.replace(owner, subject=row.id, name=row.name, kind=Kind.TOKEN, owner=owner.subject)
    if row.role == Kind.METRICS:
        scraper = dataclasses.replace(as_token, kind=Kind.METRICS, roles=(), server_admin=False)
        return scraper if owner.server_admin else None
    if row.project_id is None:
        return as_token if owner.server_admin else None
    role = lesser(Role(row.role), owner.role_in(row.project_id))
    roles = () if role is None else ((row.project_id, role),)
    return dataclasses.replace(as_token, roles=roles, server_admin=False)


async def _of_user(session: AsyncSession, user_id: str) -> Principal | None:
    row = await session.get(UserRow, user_id)
    if row is None:
        return None
    query = select(MemberRow).where(MemberRow.user_id == user_id).order_by(MemberRow.project_id)
    members = (await session.scalars(query)).all()
    return Principal(
        subject=row.id,
        name=row.name,
        kind=Kind.USER,
        owner=row.id,
        roles=tuple((member.project_id, Role(member.role)) for member in members),
        server_admin=row.server_admin,
    )
