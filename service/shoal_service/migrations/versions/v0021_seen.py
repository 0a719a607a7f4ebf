"""When nodes were last heard, for how long steps were held up, and what jobs would cost on nodes that are all alike"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("clusters") as batch:
        batch.add_column(sa.Column("signs", sa.JSON(none_as_null=True), nullable=True))
    with op.batch_alter_table("step_points") as batch:
        batch.add_column(sa.Column("stalled_s", sa.Float(), nullable=True))
    op.create_table(
        "comparisons",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("plan_seq", sa.Integer(), nullable=False),
        sa.Column("offers", sa.String(64), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("found", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id"),
    )
