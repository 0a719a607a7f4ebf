"""Signing in with an OpenID provider: authorization code with PKCE, and access tokens of that provider as bearer
tokens. Owns the conversation with the provider and what of its tokens is believed; who somebody is here, people.py
says. The only file that knows authlib and joserfc."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from shoal_service.errors import Unauthorized, Unavailable
from shoal_service.openid import Attempt, Person

_DISCOVERY = "/.well-known/openid-configuration"
_KNOWN_FOR_S = 3600.0  # what the provider says of itself
_KEYS_AGAIN_S = 10.0  # a key that is not known may be new; not every wrong token makes us ask
_TIMEOUT_S = 10.0
_LEEWAY_S = 60
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]


class OpenId:
    """A `Provider`. Without an `audience` it takes no access tokens."""

    def __init__(
        self,
        *,
        issuer: str,
        client_id: str,
        client_secret: str | None,
        scopes: str,
        audience: str | None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock_s = clock_s
        self._issuer = issuer.rstrip("/")
        self._client_id = client_id
        self._client_secret = client_secret
        self._scopes = scopes
        self._audience = audience
        self._metadata: dict[str, Any] = {}
        self._metadata_at_s = 0.0
        self._keys = KeySet([])
        self._keys_at_s = 0.0

    async def begin(self, redirect_uri: str) -> tuple[str, Attempt]:
        state, nonce, verifier = (secrets.token_urlsafe(48) for _ in range(3))
        attempt = Attempt(state=state, nonce=nonce, verifier=verifier)
        endpoint = (await self._known())["authorization_endpoint"]
        async with self._client(redirect_uri) as client:
            url, _ = client.create_authorization_url(
                endpoint, state=attempt.state, nonce=attempt.nonce, code_verifier=attempt.verifier
            )
        return str(url), attempt

    async def finish(self, attempt: Attempt, answer: Mapping[str, str], redirect_uri: str) -> Person:
        if not secrets.compare_digest(answer.get("state", "").encode(), attempt.state.encode()):
            raise Unauthorized("this answer belongs to another sign-in: begin again")
        if "error" in answer or "code" not in answer:
            raise Unauthorized("the identity provider did not let you in")
        endpoint = (await self._known())["token_endpoint"]
        try:
            async with self._client(redirect_uri) as client:
                given = await client.fetch_token(
                    endpoint, code=answer["code"], code_verifier=attempt.verifier, grant_type="authorization_code"
                )
        except OAuthError as error:
            raise Unauthorized("the identity provider did not take the code: begin again") from error
        except (httpx.HTTPError, ValueError) as error:
            raise _no_answer(self._issuer) from error
        if not isinstance(given.get("id_token"), str):
            raise Unauthorized("the identity provider does not say who you are: it gave no ID token")
        claims = await self._claims(given["id_token"], self._client_id, nonce=attempt.nonce)
        if claims.get("azp", self._client_id) != self._client_id:
            raise Unauthorized("the identity provider's token is for somebody else")
        return self._person(claims)

    async def of_access_token(self, token: str) -> Person | None:
        if self._audience is None or token.count(".") != 2:
            return None
        try:
            return self._person(await self._claims(token, self._audience))
        except Unauthorized:
            return None

    def _client(self, redirect_uri: str) -> Any:
        return AsyncOAuth2Client(
            self._client_id,
            self._client_secret,
            scope=self._scopes,
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            token_endpoint_auth_method="none" if self._client_secret is None else "client_secret_basic",
            timeout=_TIMEOUT_S,
        )

    async def _claims(self, token: str, audience: str, nonce: str | None = None) -> dict[str, Any]:
        """What stands in a token that this provider signed for this audience, and whose time has not passed."""
        expected: dict[str, Any] = {
            "iss": {"essential": True, "value": self._issuer_said(await self._known())},
            "aud": {"essential": True, "value": audience},
            "sub": {"essential": True},
            "exp": {"essential": True},
            **({} if nonce is None else {"nonce": {"essential": True, "value": nonce}}),
        }
        try:
            claims: dict[str, Any] = (await self._decoded(token)).claims
            jwt.JWTClaimsRegistry(leeway=_LEEWAY_S, **expected).validate(claims)
        except (JoseError, ValueError) as error:
            raise Unauthorized("the identity provider's token does not hold") from error
        return claims

    async def _decoded(self, token: str) -> Any:
        """Raises JoseError or ValueError. Where no known key fits, the provider is asked for its keys again."""
        try:
            return jwt.decode(token, self._keys, algorithms=_ALGORITHMS)
        except (JoseError, ValueError):
            if self._clock_s() - self._keys_at_s < _KEYS_AGAIN_S and self._keys.keys:
                raise
        self._keys = KeySet.import_key_set(await self._get((await self._known())["jwks_uri"]))
        self._keys_at_s = self._clock_s()
        return jwt.decode(token, self._keys, algorithms=_ALGORITHMS)

    async def _known(self) -> dict[str, Any]:
        """What the provider says of itself."""
        if not self._metadata or self._clock_s() - self._metadata_at_s > _KNOWN_FOR_S:
            found = await self._get(self._issuer + _DISCOVERY)
            if self._issuer_said(found).rstrip("/") != self._issuer:
                raise Unavailable("identity_provider_unreachable", f"{self._issuer} says that it is somebody else")
            self._metadata, self._metadata_at_s = found, self._clock_s()
        return self._metadata

    @staticmethod
    def _issuer_said(metadata: Mapping[str, Any]) -> str:
        return str(metadata.get("issuer", ""))

    async def _get(self, url: str) -> Any:
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
                answer = await client.get(url)
                answer.raise_for_status()
                return answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise _no_answer(self._issuer) from error

    def _person(self, claims: Mapping[str, Any]) -> Person:
        email = claims.get("email") if claims.get("email_verified") is True else None
        name = claims.get("name") or claims.get("preferred_username") or email or claims["sub"]
        return Person(issuer=self._issuer, subject=str(claims["sub"]), email=email, name=str(name))


def _no_answer(issuer: str) -> Unavailable:
    return Unavailable("identity_provider_unreachable", f"the identity provider {issuer} does not answer as it should")
