"""The jobs that wait are found by cluster and project; who created a job"""

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
