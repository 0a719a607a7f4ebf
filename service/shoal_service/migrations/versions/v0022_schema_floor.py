"""The oldest revision whose programs work on these tables; and webhooks get their form without being told it

A replica of the version before, which serves while this migration runs, must be able to add a webhook.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    floor = op.create_table("schema_floor", sa.Column("revision", sa.String(32), primary_key=True))
    op.bulk_insert(floor, [{"revision": revision}])
    # One server alone uses SQLite, which would have to make the table anew for it.
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("webhooks", "form", server_default="json")
