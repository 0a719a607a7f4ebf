"""The tables of people: projects, users, their roles, tokens, and what was done by whom. Owns columns and keys; what
they mean together is identity.py, people.py, tokens.py and audit.py.

Times are wall-clock seconds (`_at_s`). Of secrets only a SHA-256 is kept.
"""

from __future__ import annotations

from sqlalchemy import Float, ForeignKey, Index, String, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from shoal_service.models import Base


class ProjectRow(Base):
    """What jobs, roles and tokens belong to. Its id is a slug, as in `default`."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    created_at_s: Mapped[float] = mapped_column(Float)


class UserRow(Base):
    """A person. One without a `subject` was invited by e-mail address, and has not signed in yet."""

    __tablename__ = "users"
    __table_args__ = (
        UniqueConstraint("issuer", "subject", name="uq_users_issuer_subject"),
        UniqueConstraint("email", name="uq_users_email"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    issuer: Mapped[str | None] = mapped_column(String(200))
    subject: Mapped[str | None] = mapped_column(String(255))
    email: Mapped[str | None] = mapped_column(String(254))
    name: Mapped[str] = mapped_column(String(200))
    server_admin: Mapped[bool] = mapped_column(server_default=false())
    created_at_s: Mapped[float] = mapped_column(Float)
    seen_at_s: Mapped[float | None] = mapped_column(Float)


class StorageRow(Base):
    """A project's named way to an object store. Of credentials it has names alone, as StoreAccess has them."""

    __tablename__ = "storages"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    endpoint: Mapped[str | None] = mapped_column(String(200))
    region: Mapped[str | None] = mapped_column(String(60))
    keys: Mapped[str | None] = mapped_column(String(60))
    profile: Mapped[str | None] = mapped_column(String(60))
    created_at_s: Mapped[float] = mapped_column(Float)
    updated_at_s: Mapped[float] = mapped_column(Float)


class MemberRow(Base):
    """The role of a user in a project."""

    __tablename__ = "members"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True, index=True)
    role: Mapped[str] = mapped_column(String(20))
    created_at_s: Mapped[float] = mapped_column(Float)


class TokenRow(Base):
    """A secret that programs send. Its scope is a `project_id` with a role, or a `cluster_id` whose connector it is;
    with neither it is the server's administrator. One that a user made (`created_by`) never may more than that user."""

    __tablename__ = "tokens"
    __table_args__ = (UniqueConstraint("hash", name="uq_tokens_hash"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    hash: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(20))
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"), index=True)
    cluster_id: Mapped[str | None] = mapped_column(String(80))
    created_by: Mapped[str] = mapped_column(String(40), index=True)
    created_at_s: Mapped[float] = mapped_column(Float)
    expires_at_s: Mapped[float | None] = mapped_column(Float)
    last_used_at_s: Mapped[float | None] = mapped_column(Float)
    revoked_at_s: Mapped[float | None] = mapped_column(Float)


class AuditRow(Base):
    """Somebody did something, or was refused. Rows are added and never changed."""

    __tablename__ = "audit_events"
    __table_args__ = (Index("ix_audit_events_project_id", "project_id", "id"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    at_s: Mapped[float] = mapped_column(Float)
    actor: Mapped[str | None] = mapped_column(String(40))
    actor_name: Mapped[str | None] = mapped_column(String(200))
    action: Mapped[str] = mapped_column(String(60))
    target: Mapped[str | None] = mapped_column(String(200))
    project_id: Mapped[str | None] = mapped_column(String(40))
    address: Mapped[str | None] = mapped_column(String(64))
    status: Mapped[int]
    code: Mapped[str | None] = mapped_column(String(80))
