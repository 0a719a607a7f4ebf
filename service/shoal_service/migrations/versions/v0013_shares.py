"""Which nodes of its cluster each job may use"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "shares",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("limited", sa.Boolean(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=True),
        sa.Column("held", sa.JSON(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("code", sa.String(80), nullable=False),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("hold", sa.String(80), nullable=True),
        sa.Column("hold_words", sa.Text(), nullable=False),
        sa.Column("warning", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id"),
    )
    with op.batch_alter_table("shares") as batch_op:
        batch_op.create_index(batch_op.f("ix_shares_priority"), ["priority"])
        batch_op.create_index(batch_op.f("ix_shares_limited"), ["limited"])
    # Until now the one job that runs has had all of its cluster, and the others nothing.
    jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("state", sa.String))
    shares = sa.table(
        "shares",
        sa.column("job_id", sa.String),
        sa.column("limited", sa.Boolean),
        *(sa.column(name, sa.Integer) for name in ("priority", "version")),
        *(sa.column(name, sa.JSON(none_as_null=True)) for name in ("nodes", "held")),
        *(sa.column(name, sa.Text) for name in ("reason", "code", "hold_words")),
    )
    without = ("queued", "paused", "succeeded", "failed", "cancelled")
    common = {"priority": 0, "limited": False, "version": 1, "reason": "", "code": "", "hold_words": ""}
    known = op.get_bind().execute(sa.select(jobs.c.id, jobs.c.state)).all()
    rows = []
    for job, state in known:
        nodes: list[str] | None = [] if state in without else None
        rows.append({"job_id": job, **common, "nodes": nodes, "held": nodes})
    if rows:
        op.bulk_insert(shares, rows)
