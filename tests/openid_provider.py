"""An OpenID provider of our own: the authorization code flow with PKCE over HTTP, with tokens that are really signed.

It lets everybody in as its `person`. What it says wrongly, tests set: `lies` are put over the claims of the next
tokens, `signer` is the key that signs them, and `published` those that it says are its keys.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlencode

import uvicorn
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from servers import free_ports
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from waiting import eventually

CLIENT_ID, CLIENT_SECRET = "shoal-under-test", "a-secret-of-the-client"


def new_key() -> RSAKey:
    return RSAKey.generate_key(2048, parameters={"kid": secrets.token_hex(4), "use": "sig"})


@dataclass(kw_only=True)
class OpenIdProvider:
    issuer: str
    person: dict[str, Any] = field(default_factory=lambda: person("1", "ada@example.org", "Ada"))
    signer: RSAKey = field(default_factory=new_key)
    published: list[RSAKey] = field(default_factory=list)
    lies: dict[str, Any] = field(default_factory=dict)
    num_key_requests: int = 0
    _codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.published.append(self.signer)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self._metadata),
                Route("/keys", self._keys),
                Route("/authorize", self._authorize),
                Route("/token", self._token, methods=["POST"]),
            ]
        )

    async def _metadata(self, request: Request) -> Response:
        return JSONResponse(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
                "response_types_supported": ["code"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": ["RS256"],
                "code_challenge_methods_supported": ["S256"],
            }
        )

    async def _keys(self, request: Request) -> Response:
        self.num_key_requests += 1
        return JSONResponse(KeySet(self.published).as_dict(private=False))

    async def _authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        assert (asked["client_id"], asked["response_type"]) == (CLIENT_ID, "code")
        assert asked["code_challenge_method"] == "S256" and "openid" in asked["scope"].split()
        code = secrets.token_urlsafe(16)
        self._codes[code] = asked
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}", 302)

    async def _token(self, request: Request) -> Response:
        given = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        asked = self._codes.pop(given.get("code", ""), None)  # a code works once
        challenge = base64.urlsafe_b64encode(hashlib.sha256(given.get("code_verifier", "").encode()).digest())
        if request.headers.get("authorization") != f"Basic {basic}":
            return JSONResponse({"error": "invalid_client"}, 401)
        if (
            asked is None
            or asked["redirect_uri"] != given["redirect_uri"]
            or asked["code_challenge"] != challenge.decode().rstrip("=")
        ):
            return JSONResponse({"error": "invalid_grant"}, 400)
        answer = {"access_token": secrets.token_urlsafe(16), "token_type": "Bearer", "expires_in": 300}
        return JSONResponse(answer | {"id_token": self.signed(aud=CLIENT_ID, nonce=asked["nonce"])})

    def signed(self, **claims: Any) -> str:
        """A token about the person."""
        now = int(time.time())
        said = {"iss": self.issuer, "iat": now, "exp": now + 300, **self.person, **claims, **self.lies}
        return jwt.encode({"alg": "RS256", "kid": self.signer.kid}, said, self.signer)


def person(subject: str, email: str, name: str, *, verified: bool = True) -> dict[str, Any]:
    return {"sub": subject, "email": email, "email_verified": verified, "name": name}


@contextlib.contextmanager
def openid_provider() -> Iterator[OpenIdProvider]:
    port = free_ports(1)[0]
    provider = OpenIdProvider(issuer=f"http://127.0.0.1:{port}")
    server = uvicorn.Server(uvicorn.Config(provider.app(), port=port, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, 30)
        yield provider
    finally:
        server.should_exit = True
        thread.join(timeout=10)
