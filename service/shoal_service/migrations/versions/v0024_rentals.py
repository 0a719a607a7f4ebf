"""What machines of pools cost, and whom, from when they start until they go"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rentals",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("cluster_id", sa.String(80), nullable=False),
        sa.Column("pool", sa.String(40), nullable=False),
        sa.Column("node", sa.String(80), nullable=True),
        sa.Column("job_id", sa.String(40), nullable=True),
        sa.Column("device", sa.String(80), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("spot", sa.Boolean(), nullable=False),
        sa.Column("price_per_hour", sa.Float(), nullable=False),
        sa.Column("since_at_s", sa.Float(), nullable=False),
        sa.Column("until_at_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_rentals_cluster_id", "rentals", ["cluster_id", "until_at_s"])
    op.create_index("ix_rentals_job_id", "rentals", ["job_id"])
