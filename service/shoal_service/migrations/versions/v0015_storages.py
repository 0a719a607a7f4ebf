"""Storage profiles of projects"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "storages",
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("endpoint", sa.String(200), nullable=True),
        sa.Column("region", sa.String(60), nullable=True),
        sa.Column("keys", sa.String(60), nullable=True),
        sa.Column("profile", sa.String(60), nullable=True),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.Column("updated_at_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
        sa.PrimaryKeyConstraint("project_id", "name"),
    )
