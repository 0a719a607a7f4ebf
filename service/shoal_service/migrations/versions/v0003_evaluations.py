"""The newest evaluation of a job"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as batch_op:
        batch_op.add_column(sa.Column("eval_step", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("eval_loss", sa.Float(), nullable=True))
