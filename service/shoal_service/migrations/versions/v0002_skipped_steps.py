"""Steps that were done without an update"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as batch_op:
        batch_op.add_column(sa.Column("skipped_steps", sa.Integer(), nullable=False, server_default="0"))
    with op.batch_alter_table("step_points") as batch_op:
        batch_op.add_column(sa.Column("skipped", sa.Boolean(), nullable=False, server_default=sa.false()))
