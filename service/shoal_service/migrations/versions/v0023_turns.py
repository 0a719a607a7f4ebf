"""The jobs that wait are found by cluster and project; who created a job; drills are kept"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("created_by", sa.String(40), nullable=True))
    op.create_index("ix_jobs_queue", "jobs", ["cluster_id", "state", "project_id", "created_at_s", "id"])
    op.create_table(
        "drills",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("cluster_id", sa.String(80), nullable=False),
        sa.Column("node", sa.String(200), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("ends_at_s", sa.Float(), nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
