"""What answers about people, tokens, webhooks, storage profiles and what was done look like."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from shoal_service.access import Kind, Role, TokenRole
from shoal_service.outbox import DELIVERED, FAILED, PENDING, PING, Told
from shoal_service.shapes import At, ETag, one_of
from shoal_service.told_words import Form

_Secret = Annotated[str, Field(description="Told this once.")]
RoleName = Annotated[str, one_of(*Role)]
_TokenRoleName = Annotated[str, one_of(*TokenRole)]
_Told = Annotated[str, one_of(*Told)]


class Project(TypedDict):
    """`role` is that of whoever asks; null for who sees it as an administrator of the server."""

    id: str
    role: RoleName | None
    created_at: At


class Me(TypedDict):
    id: str
    name: str
    kind: Annotated[str, one_of(*Kind)]
    server_admin: bool
    cluster_id: str | None
    projects: list[Project]


class Member(TypedDict):
    user_id: str
    name: str
    email: str | None
    role: RoleName
    since: At
    etag: ETag


class User(TypedDict):
    id: str
    name: str
    email: str | None
    server_admin: bool
    signed_in_before: bool
    created_at: At
    seen_at: At | None
    etag: ETag


class Token(TypedDict):
    """All but its secret."""

    id: str
    name: str
    role: _TokenRoleName
    project: str | None
    cluster_id: str | None
    created_by: str | None
    created_at: At
    expires_at: At | None
    last_used_at: At | None
    revoked_at: At | None
    valid: bool


class TokenWithSecret(Token):
    """As it is answered once."""

    secret: _Secret


class AuditEvent(TypedDict):
    """Nobody is named (`actor`) where somebody was not let in."""

    id: str
    at: At
    actor: str | None
    actor_name: str | None
    action: str
    target: str | None
    project: str | None
    address: str | None
    outcome: Annotated[str, one_of("done", "refused", "failed")]
    status: int
    code: str | None


class NamedCredentials(TypedDict):
    environment: str | None
    profile: str | None


class Storage(TypedDict):
    """How object stores are reached; of credentials it has names alone."""

    name: str
    project: str
    endpoint: str | None
    region: str | None
    credentials: NamedCredentials | None
    created_at: At
    updated_at: At
    etag: ETag


class Webhook(TypedDict):
    """All but its secret. `project` null: of all jobs. `problem` says why it was disabled."""

    id: str
    project: str | None
    url: str
    form: Annotated[str, one_of(*(form.value for form in Form))]
    events: list[_Told]
    enabled: bool
    problem: str | None
    old_secret_until: Annotated[At | None, Field(description="Until then the secret before signs as well.")]
    created_by: str
    created_at: At
    etag: ETag


class WebhookWithSecret(Webhook):
    """As it is answered once."""

    secret: _Secret


class Delivery(TypedDict):
    """`status` is that of the newest answer, `body` what is posted."""

    id: str
    event: Annotated[str, one_of(*Told, PING)]
    job: str | None
    state: Annotated[str, one_of(PENDING, DELIVERED, FAILED)]
    attempts: int
    status: int | None
    problem: str | None
    created_at: At
    last_attempt_at: At | None
    next_attempt_at: At | None
    body: str


class LoginLink(TypedDict):
    url: str
    expires_at: At


class Health(TypedDict):
    status: Annotated[str, one_of("ok")]
