"""The form in which a webhook is told what happens"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("webhooks") as batch:
        batch.add_column(sa.Column("form", sa.String(10), nullable=False, server_default="json"))
    with op.batch_alter_table("webhooks") as batch:
        batch.alter_column("form", server_default=None)
