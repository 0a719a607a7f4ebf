"""What is known of people who sign in elsewhere: the values that pass between an OpenID provider and us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A sign-in that has begun. The browser keeps it until it comes back from the provider."""

    state: str
    nonce: str
    verifier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Who the provider says somebody is. Only a verified address is one (`email`)."""

    issuer: str
    subject: str
    email: str | None
    name: str


class Provider(Protocol):
    """Methods raise Unavailable where the provider does not answer as it should."""

    async def begin(self, redirect_uri: str) -> tuple[str, Attempt]:
        """Where the browser is to go, and what has begun by that."""

    async def finish(self, attempt: Attempt, answer: Mapping[str, str], redirect_uri: str) -> Person:
        """Turns what the browser came back with into whoever signed in. Raises Unauthorized."""

    async def of_access_token(self, token: str) -> Person | None:
        """Whose token that is; None where it is none of this provider's for us, or such tokens are not taken."""
