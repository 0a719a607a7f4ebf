"""What shows who asks: tokens, sign-in links, browser sessions, and the token of a page's forms. Who that is,
identity.py says; what they may do, access.py.

Secrets are 256 random bits; the database keeps only their SHA-256.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from sqlalchemy import delete, update
from starlette.datastructures import Headers

from shoal_service.access import Principal
from shoal_service.database import Database
from shoal_service.errors import Forbidden, Unauthorized
from shoal_service.guesses import Guesses
from shoal_service.identity import Identity, sha256
from shoal_service.models import SecretRow

COOKIE = "shoal_session"
CSRF_HEADER = "X-CSRF-Token"
_LOGIN = "login"
_SESSION = "session"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def admin_token(data_dir: Path) -> str:
    """The administrator's token: read from `data_dir`/admin.token, or made there (mode 600) on first start."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = data_dir / "admin.token"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        with contextlib.suppress(OSError):  # on a file system that is read only it is as its owner has made it
            path.chmod(0o600)
        token = path.read_text(encoding="ascii").strip()
        if len(token) < 16:
            raise ValueError(f"{path}: holds no token; delete the file and start again for a new one") from None
        return token
    token = f"shoal_{secrets.token_urlsafe(32)}"
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def csrf_token(session: str) -> str:
    """What forms of this session's pages must carry; another site cannot know it, since the cookie is HttpOnly."""
    return sha256(f"csrf:{session}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks, and by which browser session, if by one."""

    principal: Principal
    session: str | None = None


class Auth:
    def __init__(self, database: Database, identity: Identity, *, session_s: float, login_code_s: float) -> None:
        self._database = database
        self.identity = identity
        self.guesses = Guesses()
        self.session_s = session_s
        self.login_code_s = login_code_s

    async def mint_login_code(self, subject: str) -> tuple[str, float]:
        """A code that signs one browser in once, as this subject, and until when it is valid."""
        return await self._mint(_LOGIN, subject, self.login_code_s)

    async def mint_session(self, subject: str) -> str:
        secret, _ = await self._mint(_SESSION, subject, self.session_s)
        return secret

    async def _mint(self, purpose: str, subject: str, valid_s: float) -> tuple[str, float]:
        secret, now = secrets.token_urlsafe(32), time.time()
        async with self._database.write() as session:
            await session.execute(delete(SecretRow).where(SecretRow.expires_at_s < now))
            session.add(
                SecretRow(
                    hash=sha256(secret),
                    purpose=purpose,
                    subject=subject,
                    created_at_s=now,
                    expires_at_s=now + valid_s,
                    used_at_s=None,
                )
            )
        return secret, now + valid_s

    async def sign_in(self, code: str, address: str) -> tuple[str, Principal]:
        """Uses up the code; a session's secret, and whose it is. Raises Unauthorized and TooManyGuesses."""
        now, hashed = time.time(), sha256(code)
        self.guesses.check(_LOGIN, address, hashed)
        async with self._database.write() as session:
            used = await session.execute(
                update(SecretRow)
                .where(
                    SecretRow.hash == hashed,
                    SecretRow.purpose == _LOGIN,
                    SecretRow.used_at_s.is_(None),
                    SecretRow.expires_at_s > now,
                )
                .values(used_at_s=now)
            )
            row = await session.get(SecretRow, hashed)
        is_good = row is not None and used.rowcount  # type: ignore[attr-defined]
        principal = await self.identity.of_subject(row.subject) if row is not None and is_good else None
        if principal is None:
            self.guesses.wrong(_LOGIN, address, hashed)
            raise Unauthorized("this sign-in link was used already or has expired; make a new one")
        return await self.mint_session(principal.subject), principal

    async def sign_in_with_token(self, token: str, address: str) -> tuple[str, Principal]:
        """A session's secret, and whose it is. Raises Unauthorized and TooManyGuesses."""
        principal = await self._of_token(token.strip(), address)
        return await self.mint_session(principal.subject), principal

    async def sign_out(self, secret: str) -> None:
        async with self._database.write() as session:
            await session.execute(delete(SecretRow).where(SecretRow.hash == sha256(secret)))

    async def check(self, method: str, headers: Headers, address: str = "", form_token: str | None = None) -> Asker:
        """Lets a bearer token through, or a signed-in browser. A browser's changes need the CSRF token too, as header
        or `form_token`. Raises Unauthorized, Forbidden and TooManyGuesses."""
        authorization = headers.get("authorization")
        if authorization is not None:
            scheme, _, token = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise Unauthorized("send a token as 'Authorization: Bearer ...'")
            return Asker(principal=await self._of_token(token.strip(), address))
        session = _cookie(headers)
        if session is None:
            raise Unauthorized("send a token as 'Authorization: Bearer ...', or sign in")
        principal = await self._of_session(session, address)
        given = form_token if form_token is not None else headers.get(CSRF_HEADER.lower(), "")
        if method not in _SAFE_METHODS and not hmac.compare_digest(given.encode(), csrf_token(session).encode()):
            raise Forbidden("csrf", "the page is out of date: reload it and try again")
        return Asker(principal=principal, session=session)

    async def again(self, headers: Headers, known: Asker) -> Principal | None:
        """Whoever was let through with these headers before, as they are now; None if they would not be any more. That
        is no guess, and does not count as one."""
        if known.session is None:
            token = headers.get("authorization", "").partition(" ")[2].strip()
            return await self.identity.again(token, known.principal)
        return await self._signed_in(sha256(known.session))

    async def _of_token(self, token: str, address: str) -> Principal:
        hashed = sha256(token)
        held = self.guesses.held("token", address, hashed)
        # Others' guesses from the same address keep no token out that is right; the provider is not asked for each.
        principal = await self.identity.of_token(token, ask_provider=held is None)
        if principal is None and held is not None:
            raise held
        if principal is None:
            self.guesses.wrong("token", address, hashed)
            raise Unauthorized("the token is not known here, has expired or was revoked")
        self.guesses.right(hashed)
        return principal

    async def _of_session(self, secret: str, address: str) -> Principal:
        hashed = sha256(secret)
        held = self.guesses.held(_SESSION, address, hashed)
        principal = await self._signed_in(hashed)
        if principal is None and held is not None:
            raise held
        if principal is None:
            self.guesses.wrong(_SESSION, address, hashed)
            raise Unauthorized("your session has ended: sign in again")
        self.guesses.right(hashed)
        return principal

    async def _signed_in(self, hashed: str) -> Principal | None:
        async with self._database.read() as session:
            row = await session.get(SecretRow, hashed)
        if row is None or row.purpose != _SESSION or row.expires_at_s <= time.time():
            return None
        return await self.identity.of_subject(row.subject)


def _cookie(headers: Headers) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value
