"""Webhooks sign with the secret before, too, for a while"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("webhooks") as batch_op:
        batch_op.add_column(sa.Column("old_nonce", sa.String(64), nullable=True))
        batch_op.add_column(sa.Column("old_until_s", sa.Float(), nullable=True))
