"""Lines that jobs printed, and checkpoints that were asked for"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "logs",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("next_line", sa.BigInteger(), nullable=False),
        sa.Column("first_line", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("forgotten", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_table(
        "log_sources",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("source", sa.String(120), nullable=False),
        sa.Column("last_number", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "source"),
    )
    op.create_table(
        "log_chunks",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("first_line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("num_lines", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.Integer(), nullable=False),
        sa.Column("first_at_s", sa.Float(), nullable=False),
        sa.Column("last_at_s", sa.Float(), nullable=False),
        sa.Column("first_attempt", sa.Integer(), nullable=False),
        sa.Column("last_attempt", sa.Integer(), nullable=False),
        sa.Column("worst", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "first_line"),
    )
    with op.batch_alter_table("log_chunks") as batch_op:
        batch_op.create_index(batch_op.f("ix_log_chunks_last_at_s"), ["last_at_s"])
    with op.batch_alter_table("jobs") as batch_op:
        batch_op.add_column(sa.Column("saves", sa.Integer(), server_default="0", nullable=False))
