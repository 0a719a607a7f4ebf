"""Projects, users, tokens, what was done by whom; jobs belong to projects"""

from __future__ import annotations

import hashlib
import time

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    projects = sa.table("projects", sa.column("id", sa.String), sa.column("created_at_s", sa.Float))
    op.bulk_insert(projects, [{"id": "default", "created_at_s": time.time()}])
    _create_users()
    _create_tokens()
    _create_audit_events()
    op.add_column("jobs", sa.Column("project_id", sa.String(40), nullable=False, server_default="default"))
    op.create_index("ix_jobs_project_id", "jobs", ["project_id", "id"])
    op.add_column("secrets", sa.Column("subject", sa.String(40), nullable=False, server_default="admin"))
    _scope_idempotency_keys()


def _create_users() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("issuer", sa.String(200), nullable=True),
        sa.Column("subject", sa.String(255), nullable=True),
        sa.Column("email", sa.String(254), nullable=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("server_admin", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.Column("seen_at_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("issuer", "subject", name="uq_users_issuer_subject"),
        sa.UniqueConstraint("email", name="uq_users_email"),
    )
    op.create_table(
        "members",
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("user_id", sa.String(40), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"]),
        sa.PrimaryKeyConstraint("project_id", "user_id"),
    )
    op.create_index("ix_members_user_id", "members", ["user_id"])


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=True),
        sa.Column("cluster_id", sa.String(80), nullable=True),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.Column("expires_at_s", sa.Float(), nullable=True),
        sa.Column("last_used_at_s", sa.Float(), nullable=True),
        sa.Column("revoked_at_s", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash", name="uq_tokens_hash"),
    )
    op.create_index("ix_tokens_project_id", "tokens", ["project_id"])
    op.create_index("ix_tokens_created_by", "tokens", ["created_by"])


def _create_audit_events() -> None:
    op.create_table(
        "audit_events",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(40), nullable=True),
        sa.Column("actor_name", sa.String(200), nullable=True),
        sa.Column("action", sa.String(60), nullable=False),
        sa.Column("target", sa.String(200), nullable=True),
        sa.Column("project_id", sa.String(40), nullable=True),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", sa.String(80), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_audit_events_project_id", "audit_events", ["project_id", "id"])


def _scope_idempotency_keys() -> None:
    """They belong to a project from now on (`jobs.stored_key`)."""
    jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("idempotency_key", sa.String))
    connection = op.get_bind()
    for row in connection.execute(sa.select(jobs).where(jobs.c.idempotency_key.is_not(None))).all():
        key = f"default/{hashlib.sha256(row.idempotency_key.encode()).hexdigest()}"
        connection.execute(jobs.update().where(jobs.c.id == row.id).values(idempotency_key=key))
