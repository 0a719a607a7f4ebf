"""Pools of nodes that can be had and given back, and what came of it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "pools",
        sa.Column("cluster_id", sa.String(80), nullable=False),
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("about", sa.JSON(), nullable=False),
        sa.Column("seen_at_s", sa.Float(), nullable=False),
        sa.Column("memory", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("price_per_hour", sa.Float(), nullable=True),
        sa.Column("price_source", sa.String(40), nullable=True),
        sa.Column("price_at_s", sa.Float(), nullable=True),
        sa.Column("not_offered", sa.Text(), nullable=True),
        sa.Column("num_asked", sa.Integer(), nullable=False),
        sa.Column("num_came", sa.Integer(), nullable=False),
        sa.Column("num_short", sa.Integer(), nullable=False),
        sa.Column("num_released", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("cluster_id", "name"),
    )
    op.create_table(
        "pool_events",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("cluster_id", sa.String(80), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=True),
        sa.Column("pool", sa.String(40), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_pool_events_cluster_id", "pool_events", ["cluster_id", "id"])
    op.create_index("ix_pool_events_job_id", "pool_events", ["job_id"])
    op.create_index("ix_pool_events_at_s", "pool_events", ["at_s"])
