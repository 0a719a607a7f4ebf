"""How far jobs' metrics are with their trackers"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trackers",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("tool", sa.String(20), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("step_seq", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("position", sa.JSON(), nullable=False),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("problem_since_s", sa.Float(), nullable=True),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("holder", sa.String(200), nullable=True),
        sa.Column("lease_until_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "tool"),
    )
    with op.batch_alter_table("trackers") as batch_op:
        batch_op.create_index(batch_op.f("ix_trackers_complete"), ["complete"])
