"""The page /login: with a token, with a link that works once, or with an OpenID provider. What shows who somebody is,
is auth.py's and oidc.py's; here are cookies, forms and ways back."""

from __future__ import annotations

import base64
import json
import re
import secrets
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from shoal_service import audit, auth
from shoal_service.access import Principal
from shoal_service.errors import Forbidden, NotFound, Problem, Unauthorized
from shoal_service.gate import address_of
from shoal_service.openid import Attempt, Provider
from shoal_service.rendering import rendered
from shoal_service.services import Deps, Services

router = APIRouter()
_BEGUN = "shoal_login"  # cookie: what belongs to the form of this browser
_AWAY = "shoal_oidc"  # cookie: the sign-in that is under way with the provider, and the page to lead to
_AWAY_S = 600
_LONGEST_FORM = 10_000
_OURS = r"/(?:[A-Za-z0-9][A-Za-z0-9_./-]*)?"  # pages of ours: never //elsewhere
Then = Annotated[str, Query(alias="next", pattern=f"^{_OURS}$")]


@router.get("/login")
async def login(request: Request, deps: Deps, code: str | None = None, then: Then = "/") -> Response:
    """The form; with the code of a sign-in link a button that sends it. To look at a link does not use it up: programs
    that pass it on look at it, too, to show what is there."""
    return form(request, deps, then, None, code)


@router.post("/login")
async def login_with_secret(request: Request, deps: Deps) -> Response:
    """By a token, or by the code of a sign-in link, which is used up; then the page `next`."""
    raw = await request.body()
    form = parse_qs(raw.decode("utf-8", errors="replace")) if len(raw) <= _LONGEST_FORM else {}
    token, code, given, then = (form.get(name, [""])[0] for name in ("token", "code", "csrf", "next"))
    how = "sign_in.link" if code else "sign_in.token"
    then = then if re.fullmatch(_OURS, then) else "/"
    begun = request.cookies.get(_BEGUN, "")
    try:
        if not begun or not secrets.compare_digest(given.encode(), auth.csrf_token(begun).encode()):
            raise Forbidden("csrf", "the page is out of date: try again")
        sign_in = deps.auth.sign_in if code else deps.auth.sign_in_with_token
        secret, principal = await sign_in(code or token, address_of(request))
    except Problem as problem:
        return await _kept_out(request, deps, then, how, problem)
    return await _entered(request, deps, then, how, secret, principal)


@router.get("/login/oidc")
async def login_with_oidc(request: Request, deps: Deps, then: Then = "/") -> Response:
    """Sends the browser to the OpenID provider."""
    try:
        url, attempt = await _provider(deps).begin(_way_back(request, deps))
    except Problem as problem:
        return form(request, deps, then, problem)
    answer = RedirectResponse(url, status_code=303, headers={"Cache-Control": "no-store"})
    _set_cookie(request, deps, answer, _AWAY, _packed(attempt, then), _AWAY_S)
    return answer


@router.get("/login/callback")
async def back_from_oidc(request: Request, deps: Deps) -> Response:
    """Where the OpenID provider sends the browser back to."""
    try:
        attempt, then = _unpacked(request.cookies.get(_AWAY, ""))
        person = await _provider(deps).finish(attempt, dict(request.query_params), _way_back(request, deps))
        principal = await deps.auth.identity.of_person(person)
    except Problem as problem:
        return await _kept_out(request, deps, "/", "sign_in.oidc", problem)
    secret = await deps.auth.mint_session(principal.subject)
    answer = await _entered(request, deps, then, "sign_in.oidc", secret, principal)
    answer.delete_cookie(_AWAY)
    return answer


@router.post("/sign-out")
async def sign_out(request: Request, deps: Deps) -> Response:
    if request.state.session is not None:
        await deps.auth.sign_out(request.state.session)
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(auth.COOKIE)
    return answer


def _provider(deps: Services) -> Provider:
    if deps.auth.identity.provider is None:
        raise NotFound("no_identity_provider", "this control plane has no OpenID provider (SHOAL_OIDC_ISSUER)")
    return deps.auth.identity.provider


def _way_back(request: Request, deps: Services) -> str:
    return f"{(deps.settings.public_url or str(request.base_url)).rstrip('/')}/login/callback"


def _packed(attempt: Attempt, then: str) -> str:
    kept = json.dumps([attempt.state, attempt.nonce, attempt.verifier, then])
    return base64.urlsafe_b64encode(kept.encode()).decode()


def _unpacked(cookie: str) -> tuple[Attempt, str]:
    """Raises Unauthorized where no sign-in is under way in this browser."""
    try:
        state, nonce, verifier, then = map(str, json.loads(base64.urlsafe_b64decode(cookie)))
    except ValueError as error:
        raise Unauthorized("no sign-in is under way in this browser: begin again") from error
    return Attempt(state=state, nonce=nonce, verifier=verifier), then if re.fullmatch(_OURS, then) else "/"


def way_back_to(request: Request) -> str:
    """The page that was asked for, to be shown once somebody has signed in."""
    return request.url.path if re.fullmatch(_OURS, request.url.path) and request.method == "GET" else "/"


def form(request: Request, deps: Services, then: str, problem: Problem | None, code: str | None = None) -> Response:
    """The page, which says why somebody was not let in. For a first visit that is no news."""
    begun = request.cookies.get(_BEGUN) or secrets.token_urlsafe(32)
    values = {
        "problem": problem if request.url.path.startswith("/login") else None,
        "next": then,
        "code": code,
        "login_csrf": auth.csrf_token(begun),
        "with_oidc": deps.auth.identity.provider is not None,
    }
    answer = rendered(request, "login.html", values, 200 if problem is None else problem.status)
    _set_cookie(request, deps, answer, _BEGUN, begun, None)
    return answer


async def _kept_out(request: Request, deps: Services, then: str, how: str, problem: Problem) -> Response:
    if problem.status != 429:  # guesses beyond the limit are not worth a row each
        await _record(request, deps, how, None, problem.status, problem.code)
    return form(request, deps, then, problem)


async def _entered(
    request: Request, deps: Services, then: str, how: str, secret: str, principal: Principal
) -> RedirectResponse:
    await _record(request, deps, how, principal, 303, None)
    answer = RedirectResponse(then, status_code=303, headers={"Cache-Control": "no-store"})
    _set_cookie(request, deps, answer, auth.COOKIE, secret, int(deps.settings.session_s))
    answer.delete_cookie(_BEGUN)
    return answer


async def _record(
    request: Request, deps: Services, how: str, principal: Principal | None, status: int, code: str | None
) -> None:
    async with deps.database.write() as session:
        audit.record(
            session,
            principal=principal,
            action=how,
            target=None,
            project=None,
            address=address_of(request),
            status=status,
            code=code,
        )


def _set_cookie(
    request: Request, deps: Services, answer: Response, name: str, value: str, max_age_s: int | None
) -> None:
    """`lax`, as the way back from a provider, or from a link in a terminal, begins on another site."""
    secure = request.url.scheme == "https" or (deps.settings.public_url or "").startswith("https")
    answer.set_cookie(name, value, max_age=max_age_s, httponly=True, samesite="lax", secure=secure)
