"""What ranks exchange in a step, and how long evaluations take"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as batch_op:
        batch_op.add_column(sa.Column("eval_s", sa.Float(), nullable=True))
        batch_op.add_column(sa.Column("exchanges", sa.JSON(), nullable=True))
