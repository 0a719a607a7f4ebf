"""Signing in with an OpenID provider that really signs: who comes in, as whom, and every lie that is not believed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import uvicorn
from control_plane import ok
from openid_provider import CLIENT_ID, CLIENT_SECRET, OpenIdProvider, new_key, openid_provider, person
from pydantic import SecretStr
from servers import free_ports
from waiting import eventually

from shoal_service.app import create_app
from shoal_service.oidc import OpenId
from shoal_service.settings import Settings

AUDIENCE = "shoal-api"


@dataclass(frozen=True, kw_only=True)
class Ground:
    provider: OpenIdProvider
    url: str
    admin: httpx.Client

    def browser(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    def sign_in(self, browser: httpx.Client, then: str = "/") -> httpx.Response:
        """From the button on the page to the answer of our callback."""
        return browser.get(self.from_provider(browser, then))

    def from_provider(self, browser: httpx.Client, then: str = "/") -> str:
        """Where the provider sends the browser back to."""
        away = browser.get("/login/oidc", params={"next": then})
        assert away.status_code == 303, away.text
        back = httpx.get(away.headers["location"])
        assert back.status_code == 302
        return back.headers["location"]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    data_dir, port = tmp_path_factory.mktemp("data"), free_ports(1)[0]
    with openid_provider() as provider:
        settings = Settings(
            data_dir=data_dir,
            oidc_issuer=provider.issuer,
            oidc_client_id=CLIENT_ID,
            oidc_client_secret=SecretStr(CLIENT_SECRET),
            oidc_admins="Root@example.org",
            oidc_audience=AUDIENCE,
        )
        app = create_app(settings)
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        headers = {"Authorization": f"Bearer {(data_dir / 'admin.token').read_text().strip()}"}
        try:
            eventually(lambda: server.started, 60)
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, headers=headers, timeout=30) as admin:
                yield Ground(provider=provider, url=url, admin=admin)
        finally:
            app.state.services.bell.close()
            server.should_exit = True
            thread.join(timeout=10)


@pytest.fixture(autouse=True)
def honest(ground: Ground) -> None:
    ground.provider.lies.clear()
    ground.provider.signer = ground.provider.published[-1]


def test_an_invited_person_signs_in_and_has_the_role_that_they_were_given(ground: Ground) -> None:
    ground.provider.person = person("ada", "ada@example.org", "Ada")
    invited = ok(ground.admin.post("/v1/projects/default/members", json={"email": "Ada@Example.org", "role": "member"}))
    with ground.browser() as browser:
        assert "single sign-on" in browser.get("/login").text
        entered = ground.sign_in(browser, "/nodes")
        assert (entered.status_code, entered.headers["location"]) == (303, "/nodes")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=lax" in cookie
        me = ok(browser.get("/v1/me"))
        assert (me["id"], me["name"], me["kind"], me["server_admin"]) == (invited["user_id"], "Ada", "user", False)
        assert [(project["id"], project["role"]) for project in me["projects"]] == [("default", "member")]
        assert browser.get("/v1/users").status_code == 403

        # A role that is taken away counts with the next request, and so does the end of the user.
        changed = ok(ground.admin.put(f"/v1/projects/default/members/{me['id']}", json={"role": "viewer"}))
        assert changed["role"] == "viewer"
        assert ok(browser.get("/v1/me"))["projects"][0]["role"] == "viewer"
        assert ground.admin.delete(f"/v1/users/{me['id']}").status_code == 204
        assert browser.get("/v1/me").status_code == 401
    events = ok(ground.admin.get("/v1/audit-events", params={"action": "sign_in.oidc"}))["items"]
    assert (events[0]["actor"], events[0]["actor_name"], events[0]["outcome"]) == (me["id"], "Ada", "done")


def test_who_was_not_invited_sees_nothing(ground: Ground) -> None:
    ground.provider.person = person("eve", "eve@example.org", "Eve")
    with ground.browser() as browser:
        assert ground.sign_in(browser).status_code == 303
        assert ok(browser.get("/v1/me"))["projects"] == []
        assert ok(browser.get("/v1/jobs"))["items"] == []
        assert browser.get("/v1/projects/default").status_code == 404
        assert browser.get("/v1/nodes").status_code == 403
        assert browser.get("/").status_code == 200


def test_an_address_that_is_not_verified_is_nobodys(ground: Ground) -> None:
    ok(ground.admin.post("/v1/projects/default/members", json={"email": "grace@example.org", "role": "admin"}))
    for subject, email in (("mallory", "grace@example.org"), ("mallory2", "root@example.org")):
        ground.provider.person = person(subject, email, "Mallory", verified=False)
        with ground.browser() as browser:
            assert ground.sign_in(browser).status_code == 303
            me = ok(browser.get("/v1/me"))
            assert (me["projects"], me["server_admin"]) == ([], False)


def test_the_operator_names_administrators_by_address(ground: Ground) -> None:
    ground.provider.person = person("root", "root@example.org", "Root")
    with ground.browser() as browser:
        ground.sign_in(browser)
        assert ok(browser.get("/v1/me"))["server_admin"] is True
        assert ok(browser.get("/v1/users"))["items"]


@pytest.mark.parametrize(
    "lies",
    [
        {"nonce": "another"},
        {"aud": "another"},
        {"iss": "https://elsewhere.example"},
        {"exp": 1_000_000_000},
        {"sub": None},
    ],
    ids=lambda lies: next(iter(lies)),
)
def test_a_token_with_a_wrong_claim_lets_nobody_in(ground: Ground, lies: dict[str, object]) -> None:
    ground.provider.lies = lies
    with ground.browser() as browser:
        assert ground.sign_in(browser).status_code == 401
        assert browser.get("/v1/me").status_code == 401


def test_a_token_that_another_key_signed_lets_nobody_in(ground: Ground) -> None:
    ground.provider.signer = new_key()
    with ground.browser() as browser:
        assert ground.sign_in(browser).status_code == 401


async def test_new_keys_of_the_provider_are_asked_for_but_not_by_every_wrong_token() -> None:
    now_s = 1000.0
    with openid_provider() as provider:
        openid = OpenId(
            issuer=provider.issuer,
            client_id=CLIENT_ID,
            client_secret=None,
            scopes="openid",
            audience=AUDIENCE,
            clock_s=lambda: now_s,
        )
        assert await openid.of_access_token(provider.signed(aud=AUDIENCE)) is not None
        provider.signer = new_key()
        for _ in range(3):
            assert await openid.of_access_token(provider.signed(aud=AUDIENCE)) is None
        assert provider.num_key_requests == 1
        provider.published.append(provider.signer)
        now_s += 60
        assert await openid.of_access_token(provider.signed(aud=AUDIENCE)) is not None
        assert provider.num_key_requests == 2


def test_an_answer_of_another_sign_in_is_refused(ground: Ground) -> None:
    with ground.browser() as one, ground.browser() as other:
        mine, theirs = ground.from_provider(one), ground.from_provider(other)
        assert one.get(theirs).status_code == 401  # another browser's code: a sign-in that somebody foists on us
        assert httpx.get(theirs).status_code == 401
        code = parse_qs(urlsplit(theirs).query)["code"][0]
        state = parse_qs(urlsplit(mine).query)["state"][0]
        # The right state with the code of another browser: its verifier does not fit.
        assert one.get("/login/callback", params={"code": code, "state": state}).status_code == 401
        assert one.get("/login/callback", params={"error": "access_denied", "state": state}).status_code == 401
        assert one.get(mine).status_code == 303
        assert one.get(mine).status_code == 401  # once


def test_access_tokens_of_the_provider_are_bearer_tokens(ground: Ground) -> None:
    ground.provider.person = person("robot", "robot@example.org", "Robot")

    def asks(token: str) -> httpx.Response:
        return httpx.get(f"{ground.url}/v1/me", headers={"Authorization": f"Bearer {token}"})

    assert ok(asks(ground.provider.signed(aud=AUDIENCE)))["name"] == "Robot"
    assert asks(ground.provider.signed(aud=CLIENT_ID)).status_code == 401  # an ID token is none
    assert asks(ground.provider.signed(aud=AUDIENCE, exp=int(time.time()) - 600)).status_code == 401
    head, body, _ = ground.provider.signed(aud=AUDIENCE).split(".")
    assert asks(f"{head}.{body}.").status_code == 401
    assert asks(f"eyJhbGciOiJub25lIn0.{body}.").status_code == 401  # {"alg":"none"}


def test_a_provider_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SHOAL_OIDC_ISSUER = .*: must begin with https://"):
        create_app(Settings(data_dir=tmp_path, oidc_issuer="http://elsewhere.example", oidc_client_id="x"))
    with pytest.raises(ValueError, match="SHOAL_OIDC_CLIENT_ID is missing"):
        create_app(Settings(data_dir=tmp_path, oidc_issuer="https://elsewhere.example"))
