"""Who may ask: the administrator's token, sign-in links, browser sessions, and the token of a page's forms.

Secrets are 256 random bits; the database keeps only their SHA-256. Nothing but health, sign-in and the page's own
files is answered without one (`Gate`), so no new route can forget to ask.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from sqlalchemy import delete, update
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal_service.database import Database
from shoal_service.errors import BadInput, Forbidden, Problem, Unauthorized
from shoal_service.models import SecretRow

COOKIE = "shoal_session"
CSRF_HEADER = "X-CSRF-Token"
_LOGIN = "login"
_SESSION = "session"
_OPEN_PATHS = frozenset({"/healthz", "/v1/health", "/login", "/openapi.json", "/v1/schemas/job", "/favicon.ico"})
_OPEN_FOLDERS = ("/static/",)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def admin_token(data_dir: Path) -> str:
    """The administrator's token: read from `data_dir`/admin.token, or made there (mode 600) on first start."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = data_dir / "admin.token"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        path.chmod(0o600)
        token = path.read_text(encoding="ascii").strip()
        if len(token) < 16:
            raise ValueError(f"{path}: holds no token; delete the file and start again for a new one") from None
        return token
    token = f"shoal_{secrets.token_urlsafe(32)}"
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def csrf_token(session: str) -> str:
    """What forms of this session's pages must carry; another site cannot know it, since the cookie is HttpOnly."""
    return hashlib.sha256(f"csrf:{session}".encode()).hexdigest()


class Auth:
    def __init__(self, database: Database, token: str, *, session_s: float, login_code_s: float) -> None:
        self._database = database
        self._token_hash = _hash(token)
        self.session_s = session_s
        self.login_code_s = login_code_s

    def is_admin(self, token: str) -> bool:
        return hmac.compare_digest(_hash(token), self._token_hash)

    async def mint_login_code(self) -> tuple[str, float]:
        """A code that signs one browser in once, and until when it is valid."""
        return await self._mint(_LOGIN, self.login_code_s)

    async def _mint(self, purpose: str, valid_s: float) -> tuple[str, float]:
        secret, now = secrets.token_urlsafe(32), time.time()
        async with self._database.write() as session:
            await session.execute(delete(SecretRow).where(SecretRow.expires_at_s < now))
            session.add(
                SecretRow(
                    hash=_hash(secret), purpose=purpose, created_at_s=now, expires_at_s=now + valid_s, used_at_s=None
                )
            )
        return secret, now + valid_s

    async def sign_in(self, code: str) -> str:
        """Uses up the code and returns a session's secret. Raises Unauthorized."""
        now = time.time()
        async with self._database.write() as session:
            used = await session.execute(
                update(SecretRow)
                .where(
                    SecretRow.hash == _hash(code),
                    SecretRow.purpose == _LOGIN,
                    SecretRow.used_at_s.is_(None),
                    SecretRow.expires_at_s > now,
                )
                .values(used_at_s=now)
            )
        if not used.rowcount:  # type: ignore[attr-defined]
            raise Unauthorized("this sign-in link was used already or has expired; make a new one")
        secret, _ = await self._mint(_SESSION, self.session_s)
        return secret

    async def sign_out(self, secret: str) -> None:
        async with self._database.write() as session:
            await session.execute(delete(SecretRow).where(SecretRow.hash == _hash(secret)))

    async def is_session(self, secret: str) -> bool:
        async with self._database.read() as session:
            row = await session.get(SecretRow, _hash(secret))
            return row is not None and row.purpose == _SESSION and row.expires_at_s > time.time()

    async def check(self, method: str, headers: Headers, form_token: str | None = None) -> str | None:
        """Lets the administrator's token through, or a signed-in browser, whose session is returned.

        A browser's changes need the CSRF token too, as header or `form_token`. Raises Unauthorized or Forbidden.
        """
        authorization = headers.get("authorization")
        if authorization is not None:
            scheme, _, token = authorization.partition(" ")
            if scheme.lower() != "bearer" or not self.is_admin(token.strip()):
                raise Unauthorized("the bearer token is not the one of this server (see admin.token in its data dir)")
            return None
        session = _cookie(headers)
        if session is None or not await self.is_session(session):
            raise Unauthorized("send the administrator's token as 'Authorization: Bearer ...', or sign in")
        given = form_token if form_token is not None else headers.get(CSRF_HEADER.lower(), "")
        if method not in _SAFE_METHODS and not hmac.compare_digest(given, csrf_token(session)):
            raise Forbidden("csrf", "the page is out of date: reload it and try again")
        return session


def _cookie(headers: Headers) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


class Gate:
    """ASGI middleware: asks `Auth` about everything that is not open to all. Form posts of pages check their own token
    once the form is read (`pages.py`), since a middleware must not eat the body. Announced bodies that are too large
    are refused before anything of them is read."""

    def __init__(self, app: ASGIApp, refuse: Callable[[Request, Problem], Response], max_body_bytes: int) -> None:
        self._app = app
        self._refuse = refuse
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            too_large = BadInput("body_too_large", f"at most {self._max_body_bytes} bytes are read", status=413)
            await self._refuse(request, too_large)(scope, receive, send)
            return
        auth: Auth = scope["app"].state.services.auth
        is_form = request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
        try:
            method = "GET" if is_form and not scope["path"].startswith("/v1") else scope["method"]
            scope.setdefault("state", {})["session"] = await auth.check(method, request.headers)
        except Problem as problem:
            await self._refuse(request, problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS)
